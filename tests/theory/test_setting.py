"""Tasks, attention functions and activations: what they refuse, and identities they keep."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from joma.theory import Attention, JointFlow, Task
from joma.theory.setting import ACTIVATIONS, as_activation
from joma.theory.tasks import TASKS, named_task, orthogonal_regression

X = np.array([[0.5, 0.5, 0.0], [0.2, 0.3, 0.5]])
G = np.array([[1.0], [-1.0]])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Task(X, G[:1]), "x has 2 samples .* g has 1"),
        (lambda: Task(-X, G), r"x\[0, 0\] = -0.5 is negative.*signed=True"),
        (lambda: Task(X + np.inf, G), r"x\[0, 0\] is inf"),
        (lambda: Task(X, G * np.nan), r"g\[0, 0\] is nan"),
        (lambda: Task(np.zeros((0, 3)), np.zeros((0, 1))), "the task is empty"),
        (lambda: Task(X[0], G), r"x must have 2 dimension\(s\), got shape \(3,\)"),
        (lambda: Task("words", G), "x must be an array of numbers"),
        (lambda: Task(X, G, p=[1.0]), "p has 1 weights for 2 samples"),
        (lambda: Task(X, G, p=[2.0, -1.0]), "the smallest is -1"),
        (lambda: Task.classification(X, [0, 1.5]), "labels must be integers ≥ 0, got 1.5"),
        (lambda: Task.classification(X, [0, 5], classes=3), "label 5 does not fit into classes=3"),
        (lambda: Task.classification(X, [[0.5, 0.4], [1, 0]]), "rows that sum to 1"),
        (lambda: Attention("sofmax"), "Did you mean 'softmax'"),
        (
            lambda: Attention("exp", temperature=0.0),
            "temperature must be a positive number, got 0.0",
        ),
        (lambda: Attention("linear", A=2.0), "A = 2.0 is the constant of exp attention"),
        (lambda: as_activation("rleu"), "Did you mean 'relu'"),
        (lambda: JointFlow(Task(-X, G, signed=True), "softmax"), "can vanish for signed x"),
        (
            lambda: JointFlow(Task([[0.0, 0.0], [1.0, 0.0]], G), "softmax"),
            "sample 0 has no context token",
        ),
        (lambda: named_task("smooth", np.random.default_rng(0)), "Did you mean 'smooth-classes'"),
    ],
)
def test_bad_input_is_refused_with_its_value_and_a_remedy(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_signed_inputs_are_admitted_when_asked_for():
    path = JointFlow(Task(-X, G, signed=True), "exp", "linear", attention_lr=0.0).integrate(1.0)
    np.testing.assert_allclose(
        path.v[-1], -(X.T @ G) / 2, atol=1e-12
    )  # frozen attention: v = t E[g x]


@pytest.mark.parametrize("name", TASKS)
def test_every_named_task_can_be_integrated(name):
    task = named_task(name, np.random.default_rng(0))
    assert JointFlow(task, "softmax", "linear").integrate(1.0, times=3).done


@pytest.mark.parametrize("loss", ["fixed", "classification", "regression"])
@pytest.mark.parametrize("activation", ["gelu", "relu"])
def test_merging_identical_rows_changes_nothing(loss, activation):
    rng = np.random.default_rng(0)
    x = rng.random((5, 4))[[0, 1, 2, 3, 4, 0, 2, 2]]
    p = rng.random(8)
    targets = {"fixed": rng.standard_normal((8, 3)), "classification": rng.integers(3, size=8)}
    targets["regression"] = targets["fixed"]
    make = {"fixed": Task, "classification": Task.classification, "regression": Task.regression}[
        loss
    ]
    task = make(x, targets[loss], p=p)
    merged, first = task.merged()
    assert merged.samples == 5
    assert sorted(first) == [0, 1, 2, 3, 4]
    v = rng.standard_normal((4, 3))
    # the force on a distinct sample is the sum of the forces on its copies
    h = np.tanh(x @ v)
    whole = task.p[:, None] * task.gradient(h)
    parts = merged.p[:, None] * merged.gradient(np.tanh(merged.x @ v))
    np.testing.assert_allclose(x.T @ whole, merged.x.T @ parts, atol=1e-15)
    jittered = make(
        x * (1 + 1e-9 * rng.random(x.shape)), targets[loss], p=p
    )  # not merged: the same flow nearly
    ends = [
        JointFlow(t, "exp", activation).integrate(0.5, v, times=2).v[-1] for t in (task, jittered)
    ]
    np.testing.assert_allclose(ends[0], ends[1], atol=1e-6)


@pytest.mark.parametrize("loss", ["fixed", "classification", "regression"])
def test_the_flow_of_merged_rows_is_the_flow_of_all_of_them(loss, monkeypatch):
    rng = np.random.default_rng(1)
    x, y = rng.random((4, 3))[[0, 1, 2, 3, 1, 1]], rng.random((6, 2))
    task = Task(x, y / y.sum(axis=1, keepdims=True), rng.random(6), loss=loss)
    start = (rng.standard_normal((3, 2)), rng.standard_normal(2), rng.standard_normal(3))
    merged = JointFlow(task, "softmax", "gelu").integrate(3.0, *start, times=7)
    monkeypatch.setattr(Task, "merged", lambda self, rows=None: (self, np.arange(self.samples)))
    apart = JointFlow(task, "softmax", "gelu").integrate(3.0, *start, times=7)
    assert JointFlow(task).block.x.shape == (6, 3)
    for name in ("v", "xi", "z"):
        np.testing.assert_allclose(getattr(merged, name), getattr(apart, name), atol=1e-10)


@pytest.mark.parametrize(
    ("attention", "factors"),
    [
        ("softmax", [1.0, 3.0, 0.7]),
        ("exp", [1.0, 1 + 4e-16, 1 - 3e-16]),
        ("linear", [1.0, 1.0, 1.0]),
    ],
)
def test_samples_with_equal_attention_have_one_gate_on_a_kink(attention, factors):
    """Of three such samples one pushes off the kink, two onto it: only the sum of their forces can slide.

    Under softmax they are the ones whose frequencies are proportional; elsewhere, equal to rounding.
    """
    rows = np.array([[0.6, 0.1, 0.3], [0.2, 0.7, 0.1]])
    g = np.array([[-2.0], [-1.0], [2.0], [1.2]])
    apart = Task(np.vstack([np.outer(factors, rows[0]), rows[1]]), g)
    by_hand = Task(rows, [[-1.0 / 3], [1.2]], p=[3.0, 1.0])
    start = {"v0": [[0.3], [0.5], [-0.6]], "xi0": [-0.05], "z0": np.ones(3)}
    paths = [
        JointFlow(task, attention, "relu").integrate(10.0, **start) for task in (apart, by_hand)
    ]
    assert paths[1].slides
    assert len(paths[0].slides) == len(paths[1].slides)
    for name in ("v", "xi", "z"):
        np.testing.assert_allclose(getattr(paths[0], name), getattr(paths[1], name), atol=1e-9)


def test_rows_that_differ_are_not_merged():
    x = np.array([[1.0, 1e-14], [1.0, 2e-14], [1.0, 0.0], [2.0, 0.0], [1.0 + 1e-12, 0.0]])
    task = Task(x, np.ones((5, 1)))
    assert task.merged()[0].samples == 5
    merged, first = task.merged(Attention("softmax").rows(x))
    assert merged.samples == 3  # the last three have one token each, so softmax sees no difference
    assert sorted(first) == [0, 1, 2]


def test_saliency_is_discriminancy_times_frequency():
    rng = np.random.default_rng(1)
    x = rng.random((6, 4))
    x[:, 2] = 0.0
    task = Task(x, rng.standard_normal((6, 2)), p=rng.random(6))
    saliency = task.saliency()
    np.testing.assert_allclose(saliency.delta, np.einsum("i,ik,il->lk", task.p, task.g, x))
    np.testing.assert_allclose(saliency.delta, saliency.discriminancy * saliency.frequency[:, None])
    assert (saliency.discriminancy[2] == 0).all()


@pytest.mark.parametrize("kind", ["linear", "exp", "softmax"])
def test_the_jacobian_of_attention_against_differences(kind):
    rng = np.random.default_rng(2)
    attention = Attention(kind, temperature=0.7)
    x, z, u = rng.random((5, 4)), rng.standard_normal(4), rng.standard_normal(4)
    h = 1e-6
    differences = (attention.weights(z + h * u, x) - attention.weights(z - h * u, x)) / (2 * h)
    np.testing.assert_allclose(
        attention.pull(x, attention.weights(z, x), np.tile(u, (5, 1))), differences, atol=1e-8
    )


def test_softmax_attention_survives_any_logits():
    x = np.array([[1.0, 1.0, 0.0], [0.0, 0.0, 3.0], [0.0, 1.0, 1.0]])
    b = Attention("softmax").weights(np.array([1e4, 0.0, -1e4]), x)
    np.testing.assert_allclose(b, [[1, 0, 0], [0, 0, 1], [0, 1, 0]])


@given(
    hnp.arrays(float, 4, elements=st.floats(-1e4, 1e4)),
    hnp.arrays(float, (3, 4), elements=st.one_of(st.just(0.0), st.floats(1e-6, 1e3))),
    st.floats(0.05, 5.0),
)
def test_softmax_attention_of_every_sample_sums_to_one(z, x, temperature):
    x[:, 1] += 1.0  # no empty sample
    b = Attention("softmax", temperature).weights(z, x)
    np.testing.assert_allclose(b.sum(axis=1), 1.0, rtol=1e-12)
    assert (b >= 0).all()
    assert (b[x == 0] == 0).all()


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_derivatives_against_differences(name):
    a = np.linspace(-4, 4, 81) + 0.013
    activation, h = ACTIVATIONS[name], 1e-6
    np.testing.assert_allclose(
        activation.derivative(a),
        (activation.phi(a + h) - activation.phi(a - h)) / (2 * h),
        atol=1e-9,
    )


def test_the_task_that_eqn_6_stands_for_has_v_dot_equal_mu_minus_v_under_uniform_attention():
    mu = np.array([0.5, 1.5, 3.0])
    path = JointFlow(orthogonal_regression(mu), "exp", "linear", attention_lr=0.0).integrate(3.0)
    np.testing.assert_allclose(path.v[:, :, 0], mu * -np.expm1(-path.t)[:, None], atol=1e-10)
    assert np.abs(path.xi).max() < 1e-12
