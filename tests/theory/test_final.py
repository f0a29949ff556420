"""Where attention ends: the predicted logits against the joint flow, and what has no end."""

import numpy as np
import pytest

from joma.paper.labs.rest import run_to_rest
from joma.theory import JointFlow, Task
from joma.theory.final import final_attention


def example(seed, nodes, loss, samples=14, tokens=3):
    rng = np.random.default_rng(seed)
    x, p = rng.random((samples, tokens)), rng.random(samples) + 0.1
    if loss == "regression":
        return rng, Task.regression(x, rng.standard_normal((samples, nodes)), p=p)
    return rng, Task.classification(
        x, rng.dirichlet(np.ones(nodes), samples), p=p
    )  # soft labels never separate


def start_of(rng, task, zero=False, offset=0.0):
    M, K = task.tokens, task.nodes
    if zero:
        return np.zeros((M, K)), np.zeros(K), np.full(M, offset)
    return (
        0.7 * rng.standard_normal((M, K)),
        rng.standard_normal(K),
        offset + 0.5 * rng.standard_normal(M),
    )


@pytest.mark.parametrize(
    ("kind", "loss", "nodes", "zero"),
    [
        ("exp", "regression", 1, True),
        ("exp", "regression", 3, False),
        ("exp", "classification", 2, False),
        ("exp", "classification", 5, True),
        ("linear", "regression", 2, False),
        ("linear", "classification", 3, False),
    ],
)
def test_a_unique_minimiser_foretells_attention_from_any_start(kind, loss, nodes, zero):
    rng, task = example(nodes, nodes, loss)
    rates = {
        "mlp_lr": 0.7,
        "attention_lr": float(rng.uniform(0.1, 3)),
        "temperature": float(rng.uniform(0.6, 2)),
    }
    if kind == "exp":
        rates["A"] = 0.5
    start = start_of(rng, task, zero, offset=-4.0 if kind == "linear" else 0.0)
    end = final_attention(task, *start, attention=kind, **rates)
    flow = JointFlow(task, kind, **rates)
    v, xi, z, _ = run_to_rest(flow, *start)
    assert end.by == "the unique minimiser"
    np.testing.assert_allclose(end.z, z, rtol=0, atol=1e-6)
    np.testing.assert_allclose(end.v, v, rtol=0, atol=1e-6)
    np.testing.assert_allclose(end.xi, xi, rtol=0, atol=1e-6)
    np.testing.assert_allclose(end.attention(task.x), flow.attention.weights(z, task.x), atol=1e-6)


@pytest.mark.parametrize("kind", ["exp", "linear"])
@pytest.mark.parametrize("zero", [True, False])
def test_one_node_with_many_minimisers_ends_in_the_bregman_projection_of_its_start(kind, zero):
    rng, task = example(11, 1, "regression", samples=3, tokens=5)
    rates = {"attention_lr": 1.7, "temperature": 0.8}
    start = start_of(rng, task, zero, offset=2.5 if kind == "linear" else 0.0)
    end = final_attention(task, *start, attention=kind, **rates)
    _, xi, z, _ = run_to_rest(JointFlow(task, kind, **rates), *start)
    assert end.by == "the mirror flow"
    assert end.loss < 1e-20
    np.testing.assert_allclose(end.z, z, rtol=0, atol=1e-6)
    np.testing.assert_allclose(end.xi, xi, rtol=0, atol=1e-6)


def test_the_end_is_not_that_of_another_start_where_minimisers_are_many():
    rng, task = example(11, 1, "regression", samples=3, tokens=5)
    zero, other = final_attention(task), final_attention(task, *start_of(rng, task))
    assert np.abs(zero.u - other.u).max() > 1e-2


def test_frozen_attention_ends_in_the_nearest_minimiser():
    rng, task = example(3, 2, "regression", samples=3, tokens=5)
    start = start_of(rng, task)
    end = final_attention(task, *start, attention_lr=0.0)
    v, xi, _, _ = run_to_rest(JointFlow(task, "exp", attention_lr=0.0), *start)
    np.testing.assert_array_equal(end.z, start[2])
    np.testing.assert_allclose(end.v, v, atol=1e-6)
    np.testing.assert_allclose(end.xi, xi, atol=1e-6)


@pytest.mark.parametrize("kind", ["exp", "linear"])
def test_logits_are_a_function_of_u_at_all_times(kind):
    from joma.theory.final import _chart

    rng, task = example(2, 3, "regression")
    flow = JointFlow(task, kind, attention_lr=2.0, temperature=0.6)
    v, xi, z = start_of(rng, task, offset=4.0 if kind == "linear" else 0.0)
    path = flow.integrate(5.0, v, xi, z, times=6)
    chart = _chart(flow, v, z)
    for n in range(6):
        back_v, back_z = chart.back(chart.gain_at(path.z[n])[:, None] * path.v[n])
        np.testing.assert_allclose(back_z, path.z[n], atol=1e-9)
        np.testing.assert_allclose(back_v, path.v[n], atol=1e-9)


def test_a_token_that_never_occurs_keeps_its_logit():
    rng, task = example(4, 2, "regression")
    wider = Task.regression(np.insert(task.x, 1, 0.0, axis=1), task.g, p=task.p)
    v, xi, z = start_of(rng, wider)
    end, without = (
        final_attention(wider, v, xi, z),
        final_attention(task, np.delete(v, 1, 0), xi, np.delete(z, 1)),
    )
    np.testing.assert_allclose(np.delete(end.z, 1), without.z, atol=1e-12)
    assert end.z[1] == pytest.approx(z[1], abs=1e-14)


SEPARABLE = [
    ([[1.0, 0.0], [0.0, 1.0]], [0, 1]),
    (
        [[1.0, 0.0], [0.0, 1.0], [0.5, 0.5], [0.5, 0.5]],
        [0, 1, 0, 1],
    ),  # quasi-separable: the last two disagree
    ([[0.2, 0.8], [0.4, 0.6], [0.9, 0.1]], [0, 1, 1]),
]


@pytest.mark.parametrize(("x", "labels"), SEPARABLE)
def test_separable_data_have_no_end(x, labels):
    with pytest.raises(ValueError, match=r"separable.* no end.*ln ln t"):
        final_attention(Task.classification(x, labels))


def test_a_class_without_samples_is_separable_and_overlapping_ones_are_not():
    x, labels = [[0.1], [0.4], [0.6], [0.9]], [0, 1, 0, 1]
    assert np.isfinite(final_attention(Task.classification(x, labels)).z).all()
    with pytest.raises(ValueError, match="separable"):
        final_attention(Task.classification(x, labels, classes=3))


def test_what_is_not_known_without_integrating_is_refused():
    _, task = example(5, 2, "regression", samples=3, tokens=5)
    with pytest.raises(ValueError, match="no potential exists; integrate"):
        final_attention(task)
    with pytest.raises(ValueError, match="no function of v"):
        final_attention(task, attention="softmax")
    with pytest.raises(ValueError, match=r"token 0 .*larger"):
        final_attention(example(5, 2, "regression")[1], attention="linear", z0=np.zeros(3))
    with pytest.raises(ValueError, match="winner_take_all"):
        final_attention(Task([[1.0, 0.5]], [[1.0]]))


def test_a_weight_far_from_its_start_does_not_overflow():
    task = Task.regression([[1.0], [-1.0]], [[1e100], [-1e100]], signed=True)
    end = final_attention(task, z0=[-300.0])
    assert end.u[0, 0] == pytest.approx(1e100)
    assert end.z[0] == pytest.approx(
        -300 + 0.5 * (1060.5170185988092 - np.log(1060.5170185988092)), abs=0.01
    )
