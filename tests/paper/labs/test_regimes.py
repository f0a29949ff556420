"""Regimes of linear against nonlinear nodes: what is equal in a pair, and what the labels promise."""

import numpy as np
import pytest

from joma.paper.labs.contrast import late_times
from joma.paper.labs.regimes import LabelRegime, MixtureRegime
from joma.theory import JointFlow

SEED = (3, 0)


@pytest.mark.parametrize(
    ("inputs", "ratio", "has_target"),
    [
        ("Gaussian", 2 / 3, False),
        ("Gaussian", 2.0, False),
        ("Gaussian", 4.0, True),
        ("Student-t", 2.0, False),
        ("Student-t", 4.0, True),
    ],
)
def test_which_mixtures_have_a_finite_target(inputs, ratio, has_target):
    assert MixtureRegime(inputs, ratio, 100.0, holds_bias=True).has_target is has_target


def test_the_gradients_of_a_mixture_have_the_ratio_of_its_regime():
    task, start = MixtureRegime("Gaussian", 4.0, 20.0, holds_bias=False).draw(SEED)
    mean = np.array([task.g[:60].mean(), task.g[60:].mean()]) / 2
    np.testing.assert_allclose(mean, [0.2, -0.8])
    assert start.xi0 == 20.0


def test_a_bias_that_is_held_stays_and_leaves_linear_nodes_alone():
    times = late_times(2.0, 5)
    held = MixtureRegime("Gaussian", 4.0, 20.0, holds_bias=True)
    trained = MixtureRegime("Gaussian", 4.0, 20.0, holds_bias=False)
    flows = held.flows("relu", [SEED], times)
    np.testing.assert_array_equal(flows.xi, 20.0)
    assert trained.flows("relu", [SEED], times).xi[-1, 0, 0] < 19.0
    linear = [regime.flows("linear", [SEED], times).v for regime in (held, trained)]
    np.testing.assert_allclose(linear[0], linear[1], atol=1e-3)


@pytest.mark.parametrize("attention", ["exp", "softmax"])
def test_label_flows_are_those_of_the_integrator(attention):
    regime = LabelRegime(is_certain=False, zipf=1.0, is_equal=False, rate=10.0, attention=attention)
    times = late_times(5.0, 6)
    flows = regime.flows("gelu", [SEED, (3, 1)], times)
    task, start = regime.draw(SEED)
    path = JointFlow(task, attention, "gelu", attention_lr=10.0).integrate(
        5.0, *start, times=times, rtol=1e-8, atol=1e-10
    )
    np.testing.assert_allclose(flows.z[:, 0], path.z, atol=5e-3)
    np.testing.assert_allclose(flows.entropy()[:, 0], path.entropy(), atol=2e-3)


def test_certain_and_uncertain_labels_are_of_the_same_contexts():
    regimes = [LabelRegime(certain, 1.5, True, 1.0, "exp") for certain in (True, False)]
    certain, uncertain = (regime.draw(SEED)[0] for regime in regimes)
    np.testing.assert_array_equal(certain.x, uncertain.x)
    np.testing.assert_array_equal(certain.g.argmax(axis=1), uncertain.g.argmax(axis=1))
    assert set(np.unique(certain.g)) == {0.0, 1.0}
    assert uncertain.g.max() < 1.0


def test_frequent_tokens_are_frequent():
    task, _ = LabelRegime(False, 1.5, True, 1.0, "exp").draw(SEED)
    frequency = task.x.mean(axis=0)
    assert frequency[0] > 3 * frequency[3]
    equal, _ = LabelRegime(False, 0.0, True, 1.0, "exp").draw(SEED)
    assert equal.x.mean(axis=0).max() < 2.0 / 12
