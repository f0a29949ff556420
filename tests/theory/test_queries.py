"""Many queries and heads: the field against brute force, the summed integrals, and what one query's part predicts."""

import numpy as np
import pytest

from joma.theory import BlockFlow, JointFlow, Task, predicted_logits
from joma.theory.tasks import random_gradients

ATTENTIONS = ("linear", "exp", "softmax")
N, M, K, Q = 12, 4, 3, 3


def block_task(seed=0):
    rng = np.random.default_rng(seed)
    query = np.concatenate([[0, 1, 2], rng.choice(Q, size=N - 3, p=[0.6, 0.3, 0.1])])
    return random_gradients(rng, samples=N, tokens=M, nodes=K), query, rng


def start(rng, heads, attention, shared=False):
    v0 = 0.5 * rng.standard_normal((M if shared else heads * M, K))
    z0 = (
        0.3 * rng.standard_normal((Q, heads * M))
        + {"linear": 1.0, "exp": -1.0, "softmax": 0.0}[attention]
    )
    return v0, 0.2 * rng.standard_normal((Q, K)), z0


def objective(task, query, E, w, z, attention, temperature, heads):
    """E[Σ_k g_k φ(w_kᵀ f)] with f = Σ_h U_h b_h + u_m written out sample by sample; φ = silu."""
    total = 0.0
    for i in range(len(query)):
        f = E[:, heads * M + query[i]].copy()
        for h in range(heads):
            logits = z[query[i], h * M : (h + 1) * M] / temperature
            if attention == "linear":
                b = task.x[i] * logits
            else:
                b = task.x[i] * np.exp(logits)
                b = b / b.sum() if attention == "softmax" else b
            f += E[:, h * M : (h + 1) * M] @ b
        a = w.T @ f
        total += task.p[i] * float(task.g[i] @ (a / (1 + np.exp(-a))))
    return total


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("conditional", [False, True])
def test_the_field_is_the_gradient_of_the_block_written_out_with_its_embeddings(
    attention, conditional
):
    task, query, rng = block_task()
    H, d = 2, 7  # fewer dimensions than vectors: nothing is orthogonal
    E = rng.standard_normal((d, H * M + Q))
    w, (_, _, z) = rng.standard_normal((d, K)), start(rng, H, attention)
    flow = BlockFlow(
        task,
        query,
        attention,
        "silu",
        attention_lr=1.7,
        temperature=0.7,
        heads=H,
        values=E,
        conditional=conditional,
    )
    both = E.T @ w
    v, xi = both[: H * M], both[H * M :]
    b, a = flow.block.forward(v, xi, z)
    velocity = flow.block.velocity(v, b, flow.block.forces(a, flow.activation.derivative(a)))

    def value(w, z):
        return objective(task, query, E, w, z, attention, 0.7, H)

    h = 1e-6
    grad_w, grad_z = np.zeros_like(w), np.zeros_like(z)
    for at in np.ndindex(*w.shape):
        e = np.zeros_like(w)
        e[at] = h
        grad_w[at] = (value(w + e, z) - value(w - e, z)) / (2 * h)
    for at in np.ndindex(*z.shape):
        e = np.zeros_like(z)
        e[at] = h
        grad_z[at] = (value(w, z + e) - value(w, z - e)) / (2 * h)
    weight = np.bincount(query, task.p) if conditional else np.ones(Q)
    np.testing.assert_allclose(np.vstack([velocity.v, velocity.xi]), E.T @ grad_w, atol=1e-8)
    np.testing.assert_allclose(velocity.z, 1.7 * grad_z / weight[:, None], atol=1e-8)


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("activation", ["gelu", "relu"])
def test_one_query_and_one_head_is_the_joint_flow(attention, activation):
    task, _, rng = block_task(1)
    v0, xi0, z0 = (
        0.5 * rng.standard_normal((M, K)),
        0.2 * rng.standard_normal(K),
        0.3 * rng.standard_normal(M) + 0.5,
    )
    joint = JointFlow(task, attention, activation, temperature=0.9).integrate(
        1.5, v0, xi0, z0, times=7
    )
    block = BlockFlow(task, np.zeros(N), attention, activation, temperature=0.9)
    path = block.integrate(1.5, v0, xi0[None], z0[None], times=7)
    assert path.done
    assert path.switches == joint.switches
    np.testing.assert_allclose(path.v, joint.v, atol=1e-9)
    np.testing.assert_allclose(path.z[:, 0], joint.z, atol=1e-9)
    np.testing.assert_allclose(path.preactivation(), joint.preactivation(), atol=1e-9)
    np.testing.assert_allclose(path.entropy(), joint.entropy(), atol=1e-9)


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_the_relu_flow_is_the_limit_of_gradient_descent(attention):
    task, query, rng = block_task(2)
    v0, xi0, z0 = start(rng, 1, attention)
    flow = BlockFlow(task, query, attention, "relu")
    end = flow.integrate(1.5, v0, xi0, z0, times=2)
    assert end.done
    assert end.switches > 0
    gaps = []
    for steps in (1500, 6000):
        path = flow.descend(steps, 1.5 / steps, v0, xi0, z0)
        gaps.append(max(np.abs(path.v[-1] - end.v[-1]).max(), np.abs(path.z[-1] - end.z[-1]).max()))
    assert gaps[1] < 0.7 * gaps[0]  # steps of descent chatter about a kink, so not quite by 4
    assert gaps[1] < 1e-3 * np.abs(end.v[-1] - v0).max()


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("activation", ["gelu", "relu"])
@pytest.mark.parametrize(("heads", "values"), [(1, "separate"), (2, "separate"), (2, "shared")])
@pytest.mark.parametrize("conditional", [False, True])
def test_summed_integrals_and_the_law_of_descent(attention, activation, heads, values, conditional):
    task, query, rng = block_task(3)
    v0, xi0, z0 = start(rng, heads, attention, values == "shared")
    flow = BlockFlow(
        task, query, attention, activation, attention_lr=1.4, temperature=0.8, heads=heads, values=values,
        conditional=conditional,
    )  # fmt: skip
    path = flow.integrate(1.0, v0, xi0, z0, times=9)
    assert path.done
    assert np.abs(path.z - path.z[0]).max() > 1e-3
    assert path.invariant().max_drift < 1e-10
    descent = flow.descend(100, 0.01, v0, xi0, z0).invariant()
    assert descent.law_error < 1e-12
    if attention != "softmax":
        assert descent.max_drift > 1e-6  # so the law is not an empty one


def test_one_querys_own_integral_is_not_conserved():
    task, query, rng = block_task(3)
    path = BlockFlow(task, query, "exp", "gelu").integrate(1.0, *start(rng, 1, "exp"))
    value = path.z - 0.5 * (path.v**2).sum(axis=2)[:, None]
    assert np.abs(value - value[0]).max() > 1e-3


def test_parts_add_up_and_predict_the_sum_exactly():
    task, query, rng = block_task(4)
    flow = BlockFlow(task, query, "exp", "gelu", attention_lr=1.3, temperature=0.7)
    path = flow.descend(4000, 5e-4, *start(rng, 1, "exp"))
    parts = path.parts()
    np.testing.assert_allclose(parts.sum(axis=0), path.v[-1] - path.v[0], atol=1e-12)
    predicted = sum(
        predicted_logits(p, path.v[-1], path.v[0], ratio=1.3, temperature=0.7) for p in parts
    )
    moved = (path.z[-1] - path.z[0]).sum(axis=0)
    np.testing.assert_allclose(
        predicted, moved, atol=2e-3 * np.abs(moved).max()
    )  # but for the law of descent


def test_what_a_query_adds_beyond_its_prediction_is_an_area():
    """z_m − z_m(0) − (r/2T) Σ V_m(v + v0) = (r/2T) Σ ∫ ((v − v0) dV_m − V_m dv), here as sums over the steps."""
    task, query, rng = block_task(5)
    task = Task.classification(
        4 * task.x, rng.integers(K, size=N), classes=K
    )  # gradients that turn, and no blow-up
    flow = BlockFlow(task, query, "exp", "gelu")
    path = flow.descend(2000, 0.01, *start(rng, 1, "exp"))
    part, area, dv = np.zeros((Q, M, K)), np.zeros((Q, M)), np.diff(path.v, axis=0)
    for n in range(len(dv)):
        b, a = flow.block.forward(path.v[n], path.xi[n], path.z[n])
        s = flow.block.forces(a, flow.activation.derivative(a))
        step = np.stack(
            [0.01 * (b[flow.block.query == m].T @ s[flow.block.query == m]) for m in range(Q)]
        )
        middle = path.v[n] - path.v[0] + dv[n] / 2
        area += 0.5 * (middle * step - (part + step / 2) * dv[n]).sum(axis=2)
        part += step
    np.testing.assert_allclose(part, path.parts(), atol=1e-12)
    moved = path.z[-1] - path.z[0]
    first = np.stack([predicted_logits(p, path.v[-1], path.v[0]) for p in part])
    assert np.abs(area).max() > 0.01
    np.testing.assert_allclose(moved - first, area, atol=0.03 * np.abs(area).max())
    np.testing.assert_allclose(area.sum(axis=0), 0.0, atol=1e-12)


def test_the_prediction_is_exact_while_a_querys_share_stays_what_it_is():
    rng = np.random.default_rng(6)
    one = random_gradients(rng, samples=6, tokens=M, nodes=K)
    task = Task(np.vstack([one.x, one.x]), np.vstack([one.g, one.g]), p=np.repeat([3.0, 1.0], 6))
    z0 = np.tile(-1 + 0.3 * rng.standard_normal(M), (2, 1))
    flow = BlockFlow(
        task, np.repeat([0, 1], 6), "exp", "linear", conditional=True
    )  # both see and do the same
    path = flow.descend(4000, 2.5e-4, 0.5 * rng.standard_normal((M, K)), None, z0)
    for part, weight, z in zip(path.parts(), (0.75, 0.25), path.z[-1], strict=True):
        predicted = predicted_logits(part, path.v[-1], path.v[0]) / weight
        np.testing.assert_allclose(predicted, z - z0[0], atol=1e-3 * np.abs(z - z0[0]).max())


def test_softmax_prediction_sums_to_zero_over_tokens():
    rng = np.random.default_rng(7)
    part, v, v0 = (rng.standard_normal((M, K)) for _ in range(3))
    assert abs(predicted_logits(part, v, v0, b_bar=np.full(M, 1 / M)).sum()) < 1e-12


def test_identical_rows_of_different_queries_stay_apart():
    x = np.array([[0.5, 0.5], [0.5, 0.5], [0.5, 0.5]])
    flow = BlockFlow(Task(x, [[1.0], [-1.0], [2.0]]), [0, 0, 1], "exp", "gelu")
    assert len(flow.block.x) == 2
    path = flow.integrate(0.5, times=3)
    assert path.xi[-1, 1, 0] > path.xi[-1, 0, 0]


def test_frame_has_every_number_once():
    task, query, rng = block_task()
    path = BlockFlow(task, query, "exp", "gelu", heads=2).integrate(
        0.2, *start(rng, 2, "exp"), times=3
    )
    frame = path.to_frame()
    assert len(frame) == path.v.size + path.xi.size + path.z.size
    one = frame[
        (frame.quantity == "z") & (frame["query"] == 1) & (frame["head"] == 1) & (frame.token == 2)
    ]
    np.testing.assert_array_equal(one.value, path.z[:, 1, M + 2])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query": [0, 1]}, "12 integers"),
        ({"query": np.full(N, 0.5)}, "12 integers"),
        ({"query": np.full(N, 2)}, "query 0 has no sample"),
        ({"heads": 0}, "heads must be a positive integer, got 0"),
        ({"values": "share"}, "Did you mean 'shared'"),
        ({"values": np.eye(3)}, r"\(d, H·M \+ Q\) = \(d, 7\)"),
    ],
)
def test_bad_input_is_named(change, message):
    task, query, _ = block_task()
    with pytest.raises(ValueError, match=message):
        BlockFlow(task, **{"query": query, "attention": "exp"} | change)


def test_bad_starts_are_named():
    task, query, rng = block_task()
    flow = BlockFlow(task, query, "exp", "gelu")
    with pytest.raises(ValueError, match=r"z0 must have shape \(3, 4\)"):
        flow.integrate(1.0, z0=np.zeros((3, 3)))
    with pytest.raises(ValueError, match="a block takes v0"):
        flow.integrate(1.0, w0=np.zeros((7, 3)))
    with pytest.raises(ValueError, match="for gradient descent"):
        flow.integrate(0.1, *start(rng, 1, "exp")).parts()
