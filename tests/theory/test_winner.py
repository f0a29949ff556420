"""The closed form of Theorem 2: any start, extremes, ties, tokens that do not move."""

import mpmath
import numpy as np
import pytest

from joma.theory import JointFlow, Task, winner_take_all
from joma.theory.tasks import random_gradients


@pytest.mark.parametrize("seed", range(6))
def test_any_start_rates_and_temperature(seed):
    rng = np.random.default_rng(seed)
    K = int(rng.integers(1, 5))
    task = random_gradients(rng, samples=10, tokens=6, nodes=K)
    flow = JointFlow(
        task,
        "exp",
        "linear",
        mlp_lr=float(rng.uniform(0.3, 3)),
        attention_lr=float(rng.uniform(0.3, 3)),
        temperature=float(rng.uniform(0.2, 2)),
        A=float(rng.uniform(0.5, 3)),
    )
    start = (rng.standard_normal((6, K)), rng.standard_normal(K), rng.standard_normal(6))
    exact = winner_take_all(flow, *start)
    times = exact.blow_up_time * np.array([0.0, 0.3, 0.7, 0.9, 0.99, 0.999])
    path = flow.integrate(times[-1], *start, times=times)
    for computed, expected in zip((path.v, path.xi, path.z), exact.at(times), strict=True):
        assert np.abs(computed - expected).max() <= 1e-8 * max(1.0, np.abs(expected).max())
    end = flow.integrate(2 * exact.blow_up_time, *start)
    losers = [l for l in range(6) if l not in exact.winners]
    np.testing.assert_allclose(end.v[-1][losers], exact.limits[losers], atol=1e-7)
    assert np.isinf(exact.limits[list(exact.winners)]).all()


@pytest.mark.parametrize("q", [-30.0, -3.0, 0.0, 1e-9, 3.0, 40.0])
@pytest.mark.parametrize("share", [1e-6, 0.5, 0.999999])
def test_extreme_starts_against_fifty_digits(q, share):
    flow = JointFlow(Task([[1.0]], [[1.0]]), "exp", "linear", temperature=0.9)
    exact = winner_take_all(flow, v0=[[q]])
    v = exact.at([share * exact.blow_up_time])[0][0, 0, 0]
    with mpmath.workdps(60):
        s = 1 / mpmath.mpf(0.9)
        tail = lambda w: mpmath.erfc(s * w / mpmath.sqrt(2))  # noqa: E731
        blow_up = (
            mpmath.sqrt(mpmath.pi / 2) / s * mpmath.exp((s * q) ** 2 / 2) * tail(mpmath.mpf(q))
        )
        assert float(abs(blow_up / exact.blow_up_time - 1)) < 1e-12
        # how far the erfc equation is from being fulfilled, in the units of v
        left = tail(mpmath.mpf(q)) * (1 - mpmath.mpf(share))
        slope = 2 * s / mpmath.sqrt(2 * mpmath.pi) * mpmath.exp(-((s * v) ** 2) / 2)
        assert float(abs((tail(mpmath.mpf(float(v))) - left) / slope)) < 1e-9 * max(1.0, abs(q))


@pytest.mark.parametrize("t", [1e-3, 1.0, 1e6])
def test_a_start_so_far_out_that_its_blow_up_lies_beyond_all_numbers_still_moves(t):
    """ẏ = exp((y² + 2 q y)/2) with q = −60: against the time that it takes, ∫ exp(−(y² + 2 q y)/2) dy = t."""
    exact = winner_take_all(JointFlow(Task([[1.0]], [[1.0]]), "exp", "linear"), v0=[[-60.0]])
    assert exact.blow_up_time == np.inf
    y = exact.at([t])[0][0, 0, 0] + 60.0
    assert y > 0
    with mpmath.workdps(40):
        taken = mpmath.quad(
            lambda u: mpmath.exp(-(u**2) / 2 + 60 * u), mpmath.linspace(0, mpmath.mpf(y), 20)
        )
        assert float(taken) == pytest.approx(t, rel=1e-8)


def test_ties_blow_up_together_and_idle_tokens_stay():
    flow = JointFlow(Task([[2.0, 2.0, 1.0, 0.0]], [[1.0]]), "exp", "linear")
    exact = winner_take_all(flow)
    assert exact.winners == (0, 1)
    assert exact.blow_up_time == pytest.approx(np.sqrt(np.pi / 2) / 2, rel=1e-12)
    assert exact.limits[3, 0] == 0.0
    assert exact.limits[2, 0] == pytest.approx(
        np.sqrt(2) * 0.4769362762044699, rel=1e-12
    )  # √2 erfinv(½)


def test_the_sign_of_delta_is_the_sign_of_the_blow_up():
    exact = winner_take_all(JointFlow(Task([[1.0, 0.4]], [[-1.0]]), "exp", "linear"))
    assert exact.limits[0, 0] == -np.inf
    assert exact.limits[1, 0] < 0


def test_frozen_attention_never_blows_up():
    flow = JointFlow(Task([[1.0, 0.4]], [[1.0]]), "exp", "linear", attention_lr=0.0)
    exact = winner_take_all(flow)
    assert exact.blow_up_time == np.inf
    assert exact.winners == ()
    np.testing.assert_allclose(exact.at([3.0])[0][0], [[3.0], [1.2]])


@pytest.mark.parametrize(
    ("flow", "message"),
    [
        (JointFlow(Task([[1.0]], [[1.0]]), "softmax", "linear"), "this flow has softmax attention"),
        (JointFlow(Task([[1.0]], [[1.0]]), "exp", "relu"), "relu activation"),
        (JointFlow(Task.classification([[1.0]], [0]), "exp", "linear"), "classification gradients"),
        (
            JointFlow(Task([[1.0]], [[1.0]]), "exp", "linear", embedding=np.eye(2)),
            "orthonormal embeddings",
        ),
    ],
)
def test_what_has_no_closed_form_is_refused(flow, message):
    with pytest.raises(ValueError, match=message):
        winner_take_all(flow)


@pytest.mark.parametrize(
    ("start", "message"),
    [
        ({"v0": np.zeros((1, 1))}, r"v0 must have shape \(2, 1\), got \(1, 1\)"),
        ({"xi0": np.zeros(2)}, r"xi0 must have shape \(1,\), got \(2,\)"),
        ({"z0": [np.nan, 0.0]}, r"z0\[0\] is nan"),
    ],
)
def test_a_start_of_another_shape_is_refused(start, message):
    with pytest.raises(ValueError, match=message):
        winner_take_all(JointFlow(Task([[1.0, 0.5]], [[1.0]]), "exp", "linear"), **start)


def test_times_beyond_the_blow_up_are_refused():
    exact = winner_take_all(JointFlow(Task([[1.0]], [[1.0]]), "exp", "linear"))
    with pytest.raises(ValueError, match=r"t = 2 lies outside \[0, t\* = 1.2533"):
        exact.at([2.0])
