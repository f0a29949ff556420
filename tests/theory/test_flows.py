"""The flows against independent integrations, and how they end."""

import numpy as np
import pytest
import torch
from scipy.integrate import solve_ivp
from scipy.special import expit

from joma.theory import EndingKind, FoldedFlow, JointFlow, Task
from joma.theory.tasks import class_distributions, random_gradients, small_start


@pytest.mark.parametrize("attention", ["linear", "exp", "softmax"])
def test_the_flow_against_a_right_hand_side_written_from_eqn_2_sample_by_sample(attention):
    rng = np.random.default_rng(0)
    N, M, K, T, eta, eta_z = 7, 4, 3, 0.8, 1.3, 0.6
    x, labels = rng.random((N, M)), rng.integers(K, size=N)
    start = rng.standard_normal(M * K + K + M)

    def right(_, y):
        v, xi, z = y[: M * K].reshape(M, K), y[M * K : M * K + K], y[M * K + K :]
        out = np.zeros_like(y)
        for i in range(N):
            if attention == "linear":
                b, L = x[i] * z / T, np.diag(x[i]) / T
            else:
                b = x[i] * np.exp(z / T)
                L = np.diag(b) / T
                if attention == "softmax":
                    b = b / b.sum()
                    L = (np.diag(b) - np.outer(b, b)) / T
            a = v.T @ b + xi
            h = a * expit(a)
            e = np.exp(h)
            g = (np.arange(K) == labels[i]) - e / e.sum()
            s = g * (expit(a) + a * expit(a) * (1 - expit(a))) / N
            out += np.concatenate([eta * np.outer(b, s).ravel(), eta * s, eta_z * L.T @ (v @ s)])
        return out

    flow = JointFlow(
        Task.classification(x, labels, classes=K),
        attention,
        "silu",
        mlp_lr=eta,
        attention_lr=eta_z,
        temperature=T,
    )
    v0, xi0, z0 = start[: M * K].reshape(M, K), start[M * K : M * K + K], start[M * K + K :]
    path = flow.integrate(3.0, v0, xi0, z0, times=4)
    reference = solve_ivp(right, (0, 3.0), start, "DOP853", path.t, rtol=1e-11, atol=1e-12).y.T
    np.testing.assert_allclose(path.v.reshape(4, -1), reference[:, : M * K], atol=1e-9)
    np.testing.assert_allclose(path.z, reference[:, M * K + K :], atol=1e-9)


def test_sliding_is_the_limit_of_ever_steeper_smooth_activations():
    rng = np.random.default_rng(1)
    task = Task(rng.random((12, 4)), rng.standard_normal((12, 2)))
    start = small_start(task, rng, 0.5)
    exact = JointFlow(task, "exp", "relu").integrate(2.0, *start, times=21)
    assert exact.slides
    errors = []
    for steep in (1e2, 1e3, 1e4):
        pair = (
            lambda a, s=steep: np.logaddexp(0.0, s * a) / s,
            lambda a, s=steep: expit(s * a),
        )
        smooth = JointFlow(task, "exp", pair).integrate(
            2.0, *start, times=21, method="LSODA", rtol=1e-9, atol=1e-10
        )
        assert smooth.done
        errors.append(np.abs(smooth.v - exact.v).max())
    assert errors[2] < errors[1] < errors[0]
    assert errors[2] < 1e-3


@pytest.mark.parametrize("activation", ["gelu", "relu"])
@pytest.mark.parametrize("attention", ["linear", "exp", "softmax"])
def test_an_orthonormal_embedding_gives_the_same_flow(attention, activation):
    rng = np.random.default_rng(2)
    task = random_gradients(rng, samples=15, tokens=5, nodes=3)
    start = small_start(task, rng, 0.4)
    U = np.linalg.qr(rng.standard_normal((9, 6)))[0]  # d = 9 > M + 1
    plain = JointFlow(task, attention, activation).integrate(3.0, *start)
    embedded = JointFlow(task, attention, activation, embedding=U).integrate(3.0, *start)
    for name in ("v", "xi", "z"):
        np.testing.assert_allclose(getattr(embedded, name), getattr(plain, name), atol=1e-9)
    np.testing.assert_allclose(
        embedded.w, U[:, :5] @ embedded.v + U[:, 5:] * embedded.xi[:, None], atol=1e-9
    )  # Eqn. 60


def test_other_embeddings_break_the_invariant_per_token_and_keep_its_sum():
    rng = np.random.default_rng(3)
    M, K = 6, 3
    context = rng.standard_normal((4, M))  # fewer dimensions than tokens
    U = np.zeros((5, M + 1))
    U[:4, :M] = context / np.linalg.norm(context, axis=0)
    U[4, M] = 1.0  # the query is orthogonal to the context
    task = random_gradients(rng, samples=15, tokens=M, nodes=K)
    path = JointFlow(task, "exp", "gelu", embedding=U).integrate(
        3.0, w0=rng.standard_normal((5, K))
    )
    assert path.invariant().max_drift > 1e-3
    total = path.z.sum(axis=1) - 0.5 * ((path.w**2).sum(axis=(1, 2)) - (path.xi**2).sum(axis=1))
    assert np.abs(total - total[0]).max() < 1e-9


@pytest.mark.parametrize("attention", ["softmax", "exp"])
def test_descent_is_what_autograd_and_sgd_do(attention):
    rng = np.random.default_rng(4)
    task = class_distributions(rng, smooth=True)
    start = small_start(task, rng)
    path = JointFlow(task, attention, "relu", temperature=0.5, attention_lr=2.0).descend(
        50, 0.1, *start
    )
    v, xi, z = (torch.tensor(part, requires_grad=True) for part in start)
    optimiser = torch.optim.SGD([{"params": [v, xi], "lr": 0.1}, {"params": [z], "lr": 0.2}])
    x = torch.tensor(task.x.copy())
    for _ in range(50):
        optimiser.zero_grad()
        b = x * torch.exp(z / 0.5)
        b = b / b.sum(1, keepdim=True) if attention == "softmax" else b
        torch.nn.functional.cross_entropy(torch.relu(b @ v + xi), torch.arange(20)).backward()
        optimiser.step()
    np.testing.assert_allclose(path.v[-1], v.detach().numpy(), atol=1e-13)
    np.testing.assert_allclose(path.z[-1], z.detach().numpy(), atol=1e-13)


def test_attention_lr_zero_freezes_attention_in_both_flows():
    rng = np.random.default_rng(5)
    task = random_gradients(rng, samples=15, tokens=5, nodes=3)
    start = small_start(task, rng, 0.4)
    for kind in (JointFlow, FoldedFlow):
        for attention in ("linear", "exp", "softmax"):
            path = kind(task, attention, "gelu", attention_lr=0.0).integrate(2.0, *start)
            np.testing.assert_allclose(path.z, np.tile(start.z0, (len(path.t), 1)), atol=1e-14)
            assert np.abs(path.v[-1] - path.v[0]).max() > 1e-3


def test_a_pair_of_callables_is_an_activation():
    rng = np.random.default_rng(6)
    task = random_gradients(rng, samples=15, tokens=5, nodes=3)
    start = small_start(task, rng, 0.4)
    pair = (lambda a: a * expit(a), lambda a: expit(a) * (1 + a * (1 - expit(a))))
    ends = [
        JointFlow(task, "exp", activation).integrate(2.0, *start).v[-1]
        for activation in ("silu", pair)
    ]
    np.testing.assert_allclose(ends[0], ends[1], atol=1e-12)


def test_relu_from_zero_is_not_unique_and_says_so():
    rng = np.random.default_rng(7)
    path = JointFlow(random_gradients(rng), "softmax", "relu").integrate(5.0)
    assert path.ending.kind is EndingKind.NOT_UNIQUE
    assert path.ending.t == 0
    assert "v0 ≠ 0" in path.status
    assert len(path.t) == 1


def test_linear_attention_from_zero_moves_only_the_bias():
    path = JointFlow(random_gradients(np.random.default_rng(8)), "linear", "linear").integrate(5.0)
    assert (path.v == 0).all()
    assert (path.z == 0).all()
    assert np.abs(path.xi[-1]).max() > 0


def test_giving_up_and_overflow_are_endings():
    rng = np.random.default_rng(9)
    task = random_gradients(rng)
    start = small_start(task, rng, 0.3)
    few = JointFlow(task, "exp", "relu").integrate(5.0, *start, max_steps=3)
    assert few.ending.kind is EndingKind.STEPS
    assert few.ending.t == few.t[-1]
    assert 0 < few.t[-1] < 5.0
    wild = JointFlow(Task([[1.0, 0.5]], [[1.0]]), "exp", "linear").descend(200, 1.0)
    assert wild.ending.kind is EndingKind.OVERFLOW
    assert wild.ending.t == len(wild.t)  # the step size is 1, and that step is not kept
    assert np.isfinite(wild.v).all()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda f: f.integrate(0.0), "t_end must be a positive number, got 0.0"),
        (lambda f: f.integrate(float("nan")), "t_end must be a positive number, got nan"),
        (
            lambda f: f.integrate(1.0, v0=np.zeros((1, 1))),
            r"v0 must have shape \(2, 1\), got \(1, 1\)",
        ),
        (lambda f: f.integrate(1.0, times=[0.5, 0.2]), "times must increase"),
        (lambda f: f.integrate(1.0, times=1), "at least 2 output times"),
        (lambda f: f.integrate(1.0, method="RK54"), "Did you mean 'RK45'"),
        (lambda f: f.integrate(1.0, w0=np.zeros((3, 1))), "w0 goes with an explicit embedding"),
        (lambda f: f.descend(1.5), "steps must be a positive integer, got 1.5"),
        (lambda f: f.descend(5, step=-1.0), "step must be a positive number, got -1.0"),
        (
            lambda f: JointFlow(f.task, embedding=np.eye(4)),
            r"embedding must be \(d, M \+ 1\) = \(d, 3\)",
        ),
        (lambda f: FoldedFlow(f.task, embedding=np.eye(3)), "needs orthonormal embeddings"),
        (lambda f: JointFlow(f.task, mlp_lr=0.0), "mlp_lr must be a positive number, got 0.0"),
        (lambda f: JointFlow(f.task, attention_lr=-1.0), "attention_lr must be ≥ 0"),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=message):
        call(JointFlow(Task([[1.0, 0.5]], [[1.0]]), "exp", "linear"))


def test_the_frame_holds_every_value_once():
    rng = np.random.default_rng(10)
    task = random_gradients(rng, samples=5, tokens=4, nodes=3)
    path = JointFlow(task, "exp", "gelu").integrate(1.0, *small_start(task, rng), times=5)
    frame = path.to_frame()
    assert len(frame) == 5 * (4 * 3 + 3 + 4)
    row = frame[
        (frame.quantity == "v") & (frame.token == 2) & (frame.node == 1) & (frame.t == path.t[3])
    ]
    assert row.value.tolist() == [path.v[3, 2, 1]]
    assert frame[frame.quantity == "z"].node.isna().all()


@pytest.mark.parametrize("attention", ["exp", "softmax"])
def test_entropy_is_the_mean_over_samples_of_the_entropy_of_attention(attention):
    rng = np.random.default_rng(11)
    task = Task(rng.random((5, 4)), rng.standard_normal((5, 2)), p=rng.random(5))
    path = JointFlow(task, attention, "gelu").integrate(1.0, *small_start(task, rng, 0.5), times=4)
    for n in range(4):
        b = path.attention(n)
        q = b / b.sum(axis=1, keepdims=True)
        assert path.entropy()[n] == pytest.approx(task.p @ -(q * np.log(q)).sum(axis=1), abs=1e-12)


def test_entropy_of_attention_to_nothing_is_not_a_number():
    path = JointFlow(random_gradients(np.random.default_rng(12)), "linear", "linear").integrate(
        1.0, times=3
    )
    assert np.isnan(path.entropy()).all()


@pytest.mark.parametrize("temperature", [0.5, 3.0])
@pytest.mark.parametrize("activation", ["silu", "relu"])
@pytest.mark.parametrize("attention", ["linear", "exp"])
def test_the_first_integral_holds_at_any_temperature(attention, activation, temperature):
    rng = np.random.default_rng(13)
    task = random_gradients(rng, samples=20, tokens=6, nodes=3)
    flow = JointFlow(
        task, attention, activation, mlp_lr=0.4, attention_lr=1.2, temperature=temperature
    )
    start = small_start(task, rng, 0.4)
    path = flow.integrate(
        4.0, start.v0, start.xi0, start.z0 + (1.0 if attention == "linear" else 0.0)
    )
    assert np.abs(path.z[-1] - path.z[0]).max() > 1e-3
    assert path.invariant().max_drift <= 1e-9


def off_the_kink(path):
    """How far sliding samples are from their hyperplane at the output times, the farthest."""
    return max(
        abs(path.preactivation(n)[slide.sample, slide.node])
        for slide in path.slides
        for n in np.flatnonzero((path.t >= slide.start) & (path.t <= slide.end))
    )


@pytest.mark.parametrize("attention", ["linear", "exp", "softmax"])
def test_loose_tolerances_switch_and_slide_as_tight_ones_do(attention):
    rng = np.random.default_rng(23)
    task = Task(rng.random((12, 4)), rng.standard_normal((12, 3)))
    v0, xi0, z0 = small_start(task, rng, 0.5)
    flow = JointFlow(task, attention, "relu")
    tight, loose = (
        flow.integrate(5.0, v0, xi0, z0 + (attention == "linear"), rtol=rtol, atol=0.1 * rtol)
        for rtol in (1e-12, 1e-6)
    )
    pairs = [{(slide.sample, slide.node) for slide in path.slides} for path in (tight, loose)]
    assert pairs[0] == pairs[1] != set()
    assert np.abs(tight.v - loose.v).max() < 1e-4
    assert off_the_kink(tight) < 1e-9
    assert off_the_kink(loose) < 1e-3


@pytest.mark.parametrize("seed", [1, 3])
def test_kinked_flows_that_are_stiff_between_their_switches_reach_the_end(seed):
    """Squared loss under sharp attention: the tangent kernel, and the rate at which errors decay, is large."""
    rng = np.random.default_rng(seed)
    task = Task.regression(rng.random((4, 4)), rng.standard_normal((4, 2)))
    flow, v0, z0 = (
        JointFlow(task, "exp", "relu", temperature=0.3),
        rng.standard_normal((4, 2)),
        np.full(4, 1.5),
    )
    path = flow.integrate(20.0, v0, z0=z0, max_steps=5000, times=21)
    assert path.done
    implicit = flow.integrate(20.0, v0, z0=z0, method="Radau", rtol=1e-8, atol=1e-9, times=21)
    np.testing.assert_allclose(path.v, implicit.v, atol=1e-6)
    np.testing.assert_allclose(path.z, implicit.z, atol=1e-6)


@pytest.mark.parametrize("seed", [11, 12, 21])
def test_samples_that_hardly_differ_do_not_stop_the_flow(seed):
    rng = np.random.default_rng(seed)
    x = rng.random((5, 2))
    x = np.vstack([x, x * (1 + 1e-10 * rng.standard_normal((5, 2)))])
    path = JointFlow(Task(x, rng.standard_normal((10, 3))), "linear", "relu").integrate(
        5.0, 1e-3 * rng.standard_normal((2, 3)), z0=np.ones(2)
    )
    assert path.done
    assert off_the_kink(path) < 1e-9


@pytest.mark.parametrize("seed", [5, 21])
def test_the_margin_of_a_switch_knows_what_errors_of_the_state_do_to_it(seed):
    """Pre-activations of size 1e5, of logits that pass near 0: an absolute margin takes noise for switches."""
    rng = np.random.default_rng(seed)
    task = Task.classification(1e3 * rng.random((8, 2)), rng.integers(5, size=8), classes=5)
    flow = JointFlow(task, "linear", "leaky_relu", mlp_lr=0.1, attention_lr=10.0, temperature=0.5)
    path = flow.integrate(0.01, 100 * rng.standard_normal((2, 5)), z0=np.ones(2))
    assert path.done
    assert np.abs(path.z).min() < 1e-3 * np.abs(path.z).max()


@pytest.mark.parametrize("seed", [4, 12])
def test_a_blow_up_while_samples_slide_is_an_ending_at_any_tolerance(seed):
    rng = np.random.default_rng(seed)
    flow = JointFlow(Task(rng.random((10, 3)), rng.standard_normal((10, 2))), "exp", "relu")
    v0 = rng.standard_normal((3, 2))
    tight, loose = (flow.integrate(50.0, v0, rtol=rtol, atol=0.1 * rtol) for rtol in (1e-10, 1e-6))
    for path in (tight, loose):
        assert path.ending.kind is EndingKind.BLOW_UP
        assert path.slides
    assert loose.t[-1] == pytest.approx(tight.t[-1], rel=1e-5)


@pytest.mark.parametrize("loss", ["regression", "classification"])
def test_moving_gradients_never_blow_up(loss):
    """A loss that is bounded below bounds the length of the flow: ∫|ẏ|² = L(0) − L(t)."""
    rng = np.random.default_rng(15)
    x, y = rng.random((6, 3)), rng.integers(2, size=6)
    task = (
        Task.classification(x, y)
        if loss == "classification"
        else Task.regression(x, 30.0 * np.eye(2)[y])
    )
    path = JointFlow(task, "exp", "leaky_relu", temperature=0.5).integrate(
        5.0, 3 * rng.standard_normal((3, 2))
    )
    assert path.done

    def value(n):
        h = np.where(path.preactivation(n) > 0, 1.0, 0.01) * path.preactivation(n)
        error = (
            0.5 * (task.g - h) ** 2
            if loss == "regression"
            else -task.g * (h - np.log(np.exp(h).sum(1))[:, None])
        )
        return task.p @ error.sum(axis=1)

    losses = np.array([value(n) for n in range(len(path.t))])
    assert (np.diff(losses) <= 1e-12).all()
    moved = sum(((part[-1] - part[0]) ** 2).sum() for part in (path.v, path.xi, path.z))
    assert moved <= path.t[-1] * (losses[0] - losses[-1])  # Cauchy and Schwarz


def test_growth_without_bound_is_an_overflow_and_can_still_be_read():
    path = JointFlow(Task([[1.0, 0.5]], [[10.0]]), "linear", "linear").integrate(
        200.0, z0=[1.0, 1.0]
    )
    assert path.ending.kind is EndingKind.OVERFLOW
    assert path.invariant().max_drift < 1e-12
    assert np.isfinite(path.entropy()).all()
    descent = JointFlow(Task([[1.0, 0.0], [0.0, 1.0]], [[1.0], [1.0]]), "exp", "linear").descend(
        200, 1.0
    )
    assert descent.ending.kind is EndingKind.OVERFLOW
    assert np.isfinite(descent.entropy()).all()
    assert np.isfinite(descent.invariant().law_error)


def test_a_start_on_the_kink_is_seen_through_the_rounding_of_an_embedding():
    rng = np.random.default_rng(16)
    task = Task(
        [[0.3, 0.7], [0.0, 0.0]], [[-0.5], [1.0]]
    )  # the second sample sees nothing: its a is ξ
    U = np.linalg.qr(rng.standard_normal((6, 3)))[0]
    for embedding in (None, U):
        path = JointFlow(task, "exp", "relu", embedding=embedding).integrate(1.0, v0=[[2.0], [5.0]])
        assert path.ending.kind is EndingKind.NOT_UNIQUE
        assert "1 sample-node pairs" in path.status


def test_leaky_units_leave_zero_where_the_way_is_unique():
    """All gradients push up, so all samples go on, whichever way one starts to think about it."""
    rng = np.random.default_rng(17)
    task = Task(rng.random((40, 5)), rng.random((40, 3)) + 0.1)
    path = JointFlow(task, "softmax", "leaky_relu").integrate(1.0)
    linear = JointFlow(task, "softmax", "linear").integrate(1.0)
    assert path.done
    np.testing.assert_allclose(path.v, linear.v, atol=1e-10)


def test_many_samples_on_one_kink_are_no_trap():
    rng = np.random.default_rng(18)
    task = Task.classification(rng.random((150, 5)), rng.integers(5, size=150))
    path = JointFlow(task, "exp", "leaky_relu").integrate(1.0)
    assert path.ending.kind is EndingKind.NOT_UNIQUE
    assert "750 sample-node pairs" in path.status


@pytest.mark.parametrize("activation", ["gelu", "leaky_relu"])
def test_folding_does_not_cancel_for_large_weights(activation):
    """z − z(0) is a small difference of (r/2T) Σ v² ≈ 1e4; the way v − v(0) gives it with all its digits."""
    rng = np.random.default_rng(19)
    task = Task.regression(0.1 * rng.random((12, 4)), rng.standard_normal((12, 3)))
    v0 = 100 * rng.standard_normal((4, 3))
    joint, folded = (
        kind(task, "exp", activation).integrate(0.5, v0) for kind in (JointFlow, FoldedFlow)
    )
    assert joint.done
    assert np.abs(joint.z[-1] - joint.z[0]).max() > 0.1
    assert np.abs(joint.v - folded.v).max() <= 1e-7
    assert np.abs(joint.z - folded.z).max() <= 1e-7


@pytest.mark.parametrize("method", ["auto", "RK45", "Radau", "BDF", "LSODA"])
def test_whatever_a_stepper_makes_of_a_field_without_values_is_an_ending(method):
    pair = (lambda a: a, lambda a: np.where(a > 1, np.nan, 1.0))
    path = JointFlow(Task([[1.0, 0.5], [0.2, 0.9]], [[1.0], [1.0]]), "softmax", pair).integrate(
        5.0, method=method
    )
    assert path.ending.kind is EndingKind.INTEGRATOR
    assert 0.4 < path.t[-1] < 0.7
    assert np.isfinite(path.v).all()


def test_an_ending_reads_as_the_sentence_it_always_was():
    """str(ending) is what users see as ``status``; the kind and the time are what programs go by."""
    done = JointFlow(Task([[1.0, 0.5]], [[1.0]]), "exp", "linear").integrate(0.5)
    assert (done.status, done.ending.kind, done.ending.t, done.done) == (
        "done",
        EndingKind.DONE,
        0.5,
        True,
    )
    blown = JointFlow(Task([[1.0, 0.5]], [[1.0]]), "exp", "linear").integrate(5.0)
    assert (
        blown.status
        == str(blown.ending)
        == f"blow-up at t = {blown.ending.t:.10g}: the solution does not exist beyond"
    )
    assert blown.ending.t == pytest.approx(np.sqrt(np.pi / 2), rel=1e-9)
    assert not blown.done
