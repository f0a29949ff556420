"""Eqn. 6 and Theorem 4 against mpmath quadrature, tight ODE solves and exact identities."""

from __future__ import annotations

import math
from collections.abc import Callable

import mpmath as mp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.integrate import solve_ivp
from scipy.special import softmax
from scipy.stats import entropy

from joma.theory import bounce
from joma.theory.bounce import (
    Bounce,
    convergence_ratio,
    flight_time,
    linear_ratio_limit,
    linear_remainder,
    linear_remainder_bound,
    remainder,
    remainder_supremum,
    solve_bounce,
    solve_linear_bounce,
    solve_softmax_bounce,
)

components = st.floats(-5, 5).filter(lambda mu: abs(mu) >= 0.05)


def exact_flight_time(s: float, mu: float) -> mp.mpf:
    """Eqn. 79 in 30 digits; past s = 90 the integrand is constant in all of them."""
    with mp.workdps(30):
        end, a = mp.mpf(min(s, 90.0)), mp.mpf(mu) ** 2 / 2
        knots = [k for k in (0, 0.1, 0.25, 0.5, 1, 2, 4, 8, 16, 40) if k < end]
        curved = mp.quad(lambda u: mp.exp(-a * (1 - mp.exp(-u)) ** 2), [*knots, end])
        return curved + (mp.mpf(s) - end) * mp.exp(-a)


def exact_remainder(mu: mp.mpf) -> mp.mpf:
    """ρ(∞, μ), by mpmath."""
    a = mu**2 / 2
    return mp.quad(lambda x: (mp.exp(-a * x**2) - mp.exp(-a)) / (1 - x), [0, 0.5, 1])


def integrate(
    slope: Callable[[float, np.ndarray], np.ndarray], start: np.ndarray, t: np.ndarray
) -> np.ndarray:
    """(T, J), by a method that shares nothing with the module's own; t[0] must be 0."""
    steps = solve_ivp(
        slope, (0, t[-1]), start, "DOP853", t, rtol=1e-13, atol=1e-14, max_step=t[-1] / 100
    )
    assert steps.success
    return steps.y.T


@pytest.mark.parametrize("mu", [0.05, 1.0, -2.5, 5.0])
@pytest.mark.parametrize("s", [1e-6, 0.4, 3.0, 30.0, 1e5])
def test_flight_time_is_eqn_79_and_solve_bounce_inverts_it(s: float, mu: float) -> None:
    exact = exact_flight_time(s, mu)
    assert float(abs(flight_time(s, mu) / exact - 1)) < 1e-14
    with mp.workdps(30):
        assert float(remainder(s, mu)) == pytest.approx(
            float(exact - mp.exp(-(mp.mpf(mu) ** 2) / 2) * s), rel=1e-13
        )
    # A time in float64 fixes s only to eps t s'(t): allow 8 of those besides the method's own error.
    slack = 8 * np.finfo(float).eps * float(exact) * math.exp((mu * -math.expm1(-s)) ** 2 / 2)
    solved = solve_bounce([mu], [float(exact)]).log_inverse_delta[0, 0]
    assert abs(solved - s) <= slack + 1e-13 * s


def test_v_agrees_with_a_tight_ode_solve_for_either_sign() -> None:
    size = np.linspace(0.05, 5, 25)
    mu, t = np.concatenate([size, -size]), np.linspace(0, 4, 81)
    s = integrate(lambda _, s: np.exp((mu * np.expm1(-s)) ** 2 / 2), np.zeros(mu.size), t)
    np.testing.assert_allclose(solve_bounce(mu, t).v, -mu * np.expm1(-s), rtol=0, atol=1e-9)


def test_the_far_tail_is_linear_and_keeps_its_digits() -> None:
    mu, t = np.array([0.3, 1.0, -3.0, 4.5]), np.array([50.0, 150.0, 250.0])
    run = solve_bounce(mu, t)
    assert np.all(run.log_inverse_delta > 40)
    assert np.all(run.delta[:, 2:] == 0)  # what a solver in δ or v would be left with
    gained = np.diff(run.log_inverse_delta, axis=0)
    np.testing.assert_allclose(gained, 100 * np.exp([mu**2 / 2] * 2), rtol=1e-13)


def test_zero_mu_stays_and_the_sign_of_mu_only_flips_v() -> None:
    t = np.linspace(0, 3, 20)
    run = solve_bounce([0.0, 2.0, -2.0], t)
    np.testing.assert_allclose(run.log_inverse_delta[:, 0], t, rtol=1e-14)
    assert np.all(run.v[:, 0] == 0)
    assert np.array_equal(run.v[:, 1], -run.v[:, 2])
    assert np.all(run.log_inverse_delta[0] == 0)


def test_small_times_keep_their_relative_digits() -> None:
    t = np.array([1e-300, 1e-12, 1e-5])
    s = solve_bounce([3.0], t).log_inverse_delta[:, 0]
    np.testing.assert_allclose(s, t + 3.0**2 * t**3 / 6, rtol=1e-13)  # s' = 1 + μ² s²/2 + O(s³)


def test_the_largest_mu_neither_overflows_nor_turns_back() -> None:
    t = np.concatenate([np.linspace(0, 0.04, 400), [1.0, 1e6]])
    for mu in (20.0, 37.0):
        s = solve_bounce([mu], t).log_inverse_delta[:, 0]
        assert np.all(np.isfinite(s))
        assert np.all(np.diff(s) > 0)
        np.testing.assert_allclose(flight_time(s, mu), t, rtol=1e-13)


def test_chunks_of_components_and_of_times_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    mu, t = rng.uniform(-6, 6, 300), np.sort(rng.uniform(0, 10, 70))
    whole = solve_bounce(mu, t)
    monkeypatch.setattr(bounce, "_WORK", 32)
    pieces = solve_bounce(mu, t)
    np.testing.assert_allclose(pieces.v, whole.v, rtol=0, atol=1e-9)
    np.testing.assert_allclose(
        flight_time(pieces.log_inverse_delta, mu), t[:, None] + 0 * mu, rtol=1e-13
    )
    np.testing.assert_allclose(pieces.entropy(), whole.entropy(), rtol=1e-9)


def test_equal_times_give_equal_rows() -> None:
    t = np.array([0.0, 0.0, 0.5, 0.5, 9.0, 9.0])
    for run in (solve_bounce([1.0, 3.0], t), solve_softmax_bounce([1.0, 3.0], t)):
        assert np.array_equal(run.log_inverse_delta[::2], run.log_inverse_delta[1::2])


@settings(max_examples=60, deadline=None)
@given(components, components, st.floats(0.01, 100))
def test_salient_components_lead_at_every_time(mu_j: float, mu_k: float, t: float) -> None:
    s_j, s_k = solve_bounce([mu_j, mu_k], [t]).log_inverse_delta[0]
    if abs(mu_j) > abs(mu_k) + 1e-3:
        assert s_j > s_k
    elif abs(mu_k) > abs(mu_j) + 1e-3:
        assert s_k > s_j


@settings(max_examples=60, deadline=None)
@given(components, components, st.floats(1e-3, 1e4))
def test_lambda_of_theorem_4_is_the_difference_of_remainders(
    mu_j: float, mu_k: float, t: float
) -> None:
    s_j, s_k = solve_bounce([mu_j, mu_k], [t]).log_inverse_delta[0]
    terms = convergence_ratio(s_j, s_k, mu_j, mu_k)
    assert float(terms.lam) == pytest.approx(
        float(remainder(s_k, mu_k) - remainder(s_j, mu_j)), abs=1e-14 * (1 + t)
    )
    assert abs(terms.lam) <= remainder_supremum() + 1e-14 * t
    assert float(terms.ratio / terms.leading - 1) == pytest.approx(
        float(terms.Lambda), rel=1e-12, abs=1e-14
    )
    assert float(terms.Lambda * s_k * math.exp(-(mu_k**2) / 2)) == pytest.approx(
        float(terms.lam), rel=1e-12
    )


def test_the_ratio_tends_to_its_leading_term() -> None:
    s = solve_bounce([2.0, -1.0], [1.0, 1e2, 1e4, 1e6]).log_inverse_delta
    terms = convergence_ratio(s[:, 0], s[:, 1], 2.0, -1.0)
    assert np.all(np.diff(np.abs(terms.Lambda)) < 0)
    assert terms.ratio[-1] == pytest.approx(math.exp(1.5), rel=1e-6)


def test_the_remainder_grows_with_s_up_to_its_supremum() -> None:
    s, mu = np.array([0.0, 0.1, 1.0, 10.0, 50.0, np.inf])[:, None], np.linspace(-37, 37, 149)
    rho = remainder(s, mu)  # (6, 149)
    assert np.all(rho[0] == 0)
    assert np.all(np.diff(rho, axis=0) >= -1e-15)
    assert rho.max() <= remainder_supremum() < math.sqrt(math.pi / 2) + 0.5  # sharper than Eqn. 88
    best = mp.findroot(lambda mu: mp.diff(exact_remainder, mu), 1.9)
    at_best = exact_remainder(best)
    assert remainder_supremum() == pytest.approx(float(at_best), rel=1e-13)


def test_entropy_is_that_of_the_attention_and_bounces() -> None:
    mu, t = np.linspace(0.5, 4, 12), np.linspace(0, 40, 300)
    run = solve_bounce(mu, t)
    np.testing.assert_allclose(
        run.entropy(), entropy(softmax(run.v**2 / 2, axis=1), axis=1), rtol=1e-12
    )
    trough = run.trough()
    assert trough.start == pytest.approx(math.log(mu.size), rel=1e-15)
    assert trough.entropy == run.entropy().min() < trough.start
    assert trough.time == t[np.argmin(run.entropy())]
    assert trough.rebound == run.entropy()[-1] - trough.entropy > 0.01


def test_equal_components_have_no_trough() -> None:
    trough = solve_bounce([2.0, 2.0, -2.0], np.linspace(0, 20, 50)).trough()
    assert trough.entropy == pytest.approx(math.log(3), rel=1e-15)
    assert trough.rebound == pytest.approx(0, abs=1e-15)


@pytest.mark.parametrize("c", [1e-4, 0.3, 4.0])
def test_linear_attention_agrees_with_a_tight_ode_solve(c: float) -> None:
    mu, t = np.array([0.0, 0.1, -1.0, 2.0, -5.0]), np.linspace(0, 6, 61)
    run = solve_linear_bounce(mu, t, c)
    v = integrate(lambda _, v: (mu - v) * np.sqrt(v**2 + c), np.zeros(mu.size), t)
    np.testing.assert_allclose(run.v, v, rtol=0, atol=1e-10)
    z = np.sqrt(v**2 + c)
    np.testing.assert_allclose(run.entropy(), entropy(z, axis=1), rtol=1e-9)


@settings(max_examples=60, deadline=None)
@given(components, components, st.floats(1e-8, 10), st.floats(0, 1e4))
def test_linear_attention_obeys_its_closed_form_and_bound(
    mu_j: float, mu_k: float, c: float, t: float
) -> None:
    mu = np.array([mu_j, mu_k])
    s = solve_linear_bounce(mu, [t], c).log_inverse_delta[0]
    q, bound = linear_remainder(s, mu, c), linear_remainder_bound(mu, c)
    assert np.all((q >= 0) & (q <= bound + 1e-14))
    np.testing.assert_allclose(s + q, np.sqrt(mu**2 + c) * t, rtol=1e-13, atol=1e-300)


def test_linear_ratio_tends_to_its_limit() -> None:
    s = solve_linear_bounce([3.0, -1.0], [1e2, 1e4, 1e6], 0.5).log_inverse_delta
    gap = np.abs(s[:, 0] / s[:, 1] - linear_ratio_limit(3.0, -1.0, 0.5))
    assert linear_ratio_limit(3.0, -1.0, 0.5) == pytest.approx(math.sqrt(9.5 / 1.5), rel=1e-15)
    assert np.all(gap < np.array([2e-2, 2e-4, 2e-6]))


def test_softmax_flow_agrees_with_a_direct_ode_solve() -> None:
    mu, t = np.array([0.2, 1.0, 2.0, 3.0, -1.5]), np.linspace(0, 60, 61)
    run = solve_softmax_bounce(mu, t)
    v = integrate(lambda _, v: (mu - v) * softmax(v**2 / 3), np.full(mu.size, 0.05), t)
    np.testing.assert_allclose(run.v, v, rtol=0, atol=1e-9)
    np.testing.assert_allclose(run.entropy(), entropy(softmax(v**2 / 3, axis=1), axis=1), rtol=1e-8)


@pytest.mark.parametrize(("temperature", "v0"), [(3.0, 0.05), (2.0, 0.0), (1.0, -0.1)])
def test_softmax_flow_is_eqn_6_under_one_clock_for_all(temperature: float, v0: float) -> None:
    # The normaliser is common, and v = √(T/2) ṽ turns v²/T into ṽ²/2.
    mu, t = np.array([0.4, 1.0, 2.0, 3.5, -1.5]), np.geomspace(0.1, 200, 30)
    run = solve_softmax_bounce(mu, np.append(0.0, t), temperature, v0)
    clock = flight_time(run.log_inverse_delta, mu * math.sqrt(2 / temperature))
    elapsed = clock[1:] - clock[0]  # (T, J)
    np.testing.assert_allclose(elapsed, elapsed[:, :1] + 0 * mu, rtol=1e-9)
    np.testing.assert_allclose(run.v[0], v0, rtol=1e-14, atol=1e-300)


def test_softmax_flow_at_time_zero_is_its_start() -> None:
    run = solve_softmax_bounce([1.0, -2.0], [0.0, 0.0])
    np.testing.assert_allclose(run.v, 0.05, rtol=1e-14)
    assert isinstance(run, Bounce)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: solve_bounce([1.0, -37.5], [1.0]), r"\|mu\| = 37\.5 overflows"),
        (lambda: solve_bounce([37.0], [1e9]), r"overflows for \|mu\| = 37\.0 at t = 1000000000\.0"),
        (lambda: solve_bounce([1.0, math.nan], [1.0]), r"mu.* is nan"),
        (lambda: solve_bounce(1.0, [1.0]), r"mu must have 1 dimension"),
        (lambda: solve_bounce([], [1.0]), "mu is empty"),
        (lambda: solve_bounce([1.0], []), "t is empty"),
        (lambda: solve_bounce([1.0], [-0.25, 1.0]), r"t = -0\.25 is negative"),
        (lambda: solve_bounce([1.0], [0.0, 2.0, 1.5]), r"t falls from 2\.0 to 1\.5: sort"),
        (lambda: solve_bounce([1.0], [0.0, math.inf]), r"t.* is inf"),
        (
            lambda: convergence_ratio([1.0, 0.5], [1.0, 0.0], 2.0, 1.0),
            r"s_k = 0\.0 is not positive",
        ),
        (lambda: solve_linear_bounce([1.0], [1.0], 0.0), r"c = z\(0\)² = 0\.0 .*nothing moves"),
        (lambda: linear_ratio_limit(2.0, 1.0, -1.0), r"c = z\(0\)² = -1\.0"),
        (lambda: solve_softmax_bounce([1.0, 0.03], [1.0]), r"mu = 0\.03 is not beyond v0 = 0\.05"),
        (lambda: solve_softmax_bounce([0.0], [1.0]), r"mu = 0\.0 is not beyond v0"),
        (
            lambda: solve_softmax_bounce([1.0], [1.0], temperature=0.0),
            r"temperature = 0\.0 must be positive",
        ),
    ],
)
def test_bad_input_is_named_with_its_value(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
