"""First integrals: what is exact under softmax, normalised correlation, the law of gradient descent."""

import numpy as np
import pytest

from joma.theory import JointFlow
from joma.theory.invariants import normalised_correlation
from joma.theory.tasks import class_distributions, random_gradients, small_start


@pytest.fixture(scope="module")
def softmax_path():
    rng = np.random.default_rng(0)
    task = class_distributions(rng, smooth=True)
    return JointFlow(task, "softmax", "linear", temperature=0.5).integrate(
        100.0, *small_start(task, rng), times=51
    )


def test_under_softmax_the_sum_of_the_logits_is_exact_and_eqn_18_is_not(softmax_path):
    invariant = softmax_path.invariant()
    assert invariant.sum_drift.max() <= 1e-12
    assert not invariant.exact
    assert invariant.max_drift > 0.1


def test_the_parts_of_eqn_18_add_up_and_start_right(softmax_path):
    for b_bar in ("start", "current", "input"):
        invariant = softmax_path.invariant(b_bar)
        offset = invariant.z_hat - invariant.z1 - invariant.z2
        np.testing.assert_allclose(offset, np.tile(offset[0], (51, 1)), atol=1e-12)
        np.testing.assert_allclose(invariant.z_hat[0], softmax_path.z[0], atol=1e-15)
    with pytest.raises(ValueError, match="Did you mean 'start'"):
        softmax_path.invariant("star")


def test_b_bar_is_the_mean_attention_at_the_start_at_each_time_or_of_the_input(softmax_path):
    path, x, p = softmax_path, softmax_path.flow.task.x, softmax_path.flow.task.p

    def mean(z):
        b = x * np.exp(z / 0.5)
        return p @ (b / b.sum(axis=1, keepdims=True))

    square = (path.v**2).sum(axis=(1, 2))
    for b_bar, means in {
        "start": np.tile(mean(path.z[0]), (51, 1)),
        "current": np.stack([mean(z) for z in path.z]),
        "input": np.tile(mean(np.zeros(20)), (51, 1)),
    }.items():
        invariant = path.invariant(b_bar)
        np.testing.assert_allclose(invariant.z2, -square[:, None] * means, atol=1e-13)  # r/2T = 1
        np.testing.assert_allclose(invariant.z1, (path.v**2).sum(axis=2), atol=1e-13)


def test_normalised_correlation_is_pearson(softmax_path):
    z, z_hat = softmax_path.z, softmax_path.invariant().z_hat
    expected = [np.corrcoef(z[n], z_hat[n])[0, 1] for n in range(len(z))]
    np.testing.assert_allclose(softmax_path.invariant().nc, expected, atol=1e-12)
    assert np.isnan(normalised_correlation(np.ones((1, 4)), np.arange(4.0)[None])).all()
    huge = 1e90 * np.array([[1.0, 2.0, 4.0]])  # whose squares' product is no number
    assert normalised_correlation(huge, huge)[0] == pytest.approx(1.0)


@pytest.mark.parametrize("seed", range(5))
def test_a_constant_mean_attention_means_constant_logits(seed):
    """E[diag b − b bᵀ] is a graph Laplacian: db̄/dt = 0 forces ż = 0 on connected supports."""
    rng = np.random.default_rng(seed)
    task = random_gradients(rng, samples=8, tokens=6, nodes=3)
    flow = JointFlow(task, "softmax", "gelu", temperature=0.7)
    v, xi, z = rng.standard_normal((6, 3)), rng.standard_normal(3), rng.standard_normal(6)
    b, a = flow.block.forward(v, xi, z)
    z_dot = flow.block.velocity(v, b, flow.block.forces(a, flow.activation.derivative(a))).z
    p = flow.block.p
    laplacian = np.diag(p @ b) - (p[:, None] * b).T @ b
    eigenvalues = np.linalg.eigvalsh(laplacian)
    assert abs(eigenvalues[0]) < 1e-14
    assert eigenvalues[1] > 1e-4  # one-dimensional kernel
    assert abs(z_dot.sum()) < 1e-14  # ż is orthogonal to it
    h = 1e-6
    b_bar_dot = (
        p
        @ (
            flow.attention.weights(z + h * z_dot, flow.block.x)
            - flow.attention.weights(z - h * z_dot, flow.block.x)
        )
        / (2 * h)
    )
    assert np.linalg.norm(b_bar_dot) >= eigenvalues[1] / 0.7 * np.linalg.norm(z_dot) * (1 - 1e-6)


@pytest.mark.parametrize("attention", ["linear", "exp"])
def test_the_drift_of_gradient_descent_follows_its_law(attention):
    rng = np.random.default_rng(1)
    task = random_gradients(rng, samples=20, tokens=6, nodes=4)
    path = JointFlow(task, attention, "silu", attention_lr=2.0, temperature=0.8).descend(
        300, 0.05, *small_start(task, rng, 0.5)
    )
    invariant = path.invariant()
    assert invariant.max_drift > 1e-6  # there is a drift, and
    assert invariant.law_error <= 1e-13  # it is the law's
    assert (
        JointFlow(task, attention, "silu")
        .integrate(1.0, *small_start(task, rng, 0.5))
        .invariant()
        .law_error
        is None
    )


def test_gradient_descent_keeps_the_sum_of_the_logits_under_softmax_too():
    rng = np.random.default_rng(2)
    task = random_gradients(rng, samples=20, tokens=6, nodes=4)
    path = JointFlow(task, "softmax", "relu", attention_lr=3.0, temperature=0.5).descend(
        500, 0.5, *small_start(task, rng, 0.5)
    )
    assert np.abs(path.z[-1] - path.z[0]).max() > 0.1
    assert path.invariant().sum_drift.max() < 1e-13
