"""Linear against nonlinear nodes under fixed gradients: the activation decides where attention ends (Section 4).

Theorem 3's setting with attention put back: two isotropic components with constant gradients of either sign and
weights a = (0.2, −0.8), so that a₊F(D) < a₋F(0), exp attention, one node. Only the activation differs.
"""

import numpy as np
import pytest
from scipy.integrate import solve_ivp
from scipy.special import erf

from joma._runs.curve import EXACT, describe
from joma.paper.labs.contrast import late_times
from joma.paper.labs.ensemble import integrate_all
from joma.theory import JointFlow
from joma.theory.bounce import softmax_entropy
from joma.theory.isotropic import Gaussian, Mixture, StudentT
from joma.theory.tasks import Start, small_start

A = np.array([0.2, -0.8])
LARGE_BIAS = 100.0


def mixture(family, separation, rng):
    """60 draws about a centre at that distance from 0, and 60 about 0."""
    centre = rng.standard_normal(family.n)
    centre *= separation / np.linalg.norm(centre)
    centres = np.stack([centre, np.zeros(family.n)])  # (2, M)
    return Mixture(family, centres, A).task(60, rng)


def from_a_large_bias(seed):
    """The task and its start: small v, a bias of 100, uniform attention."""
    rng = np.random.default_rng(seed)
    task = mixture(Gaussian(10), 1.0, rng)
    v0 = 0.01 * rng.standard_normal((10, 1))
    return task, Start(v0, np.array([LARGE_BIAS]), np.zeros(10))


def entropies(activation, end):
    """The times and attention entropies (T,) of the draw of seed 1."""
    task, start = from_a_large_bias(1)
    flow = JointFlow(task, "exp", activation)
    path = flow.integrate(
        end, start.v0, start.xi0, start.z0, times=late_times(end, 121), rtol=1e-7, atol=1e-8
    )
    return path.t, softmax_entropy(path.z)


@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_under_fixed_gradients_a_nonlinear_node_with_a_large_bias_comes_back(activation):
    t, entropy = entropies(activation, 150.0)
    assert t[-1] == 150.0
    assert entropy[0] == pytest.approx(np.log(10))
    assert entropy.min() == pytest.approx(1.28, abs=0.02)
    assert entropy[-1] == pytest.approx(2.10, abs=0.05)
    assert describe(t, entropy, EXACT).pattern == "dip and bounce"


def test_a_linear_node_on_the_same_data_from_the_same_start_blows_up_on_one_token():
    t, entropy = entropies("linear", 150.0)
    assert t[-1] < 6.0
    assert entropy[-1] == pytest.approx(0.0, abs=1e-3)


def independent_entropies(activation, end, **options):
    """Times and attention entropies by SciPy's stepper and a right-hand side that shares no code with joma."""
    task, start = from_a_large_bias(1)
    tokens = task.tokens
    weights = task.p * task.g[:, 0]
    slopes = {
        "linear": np.ones_like,
        "relu": lambda a: (a > 0).astype(float),
        "gelu": lambda a: (
            0.5 * (1 + erf(a / np.sqrt(2))) + a * np.exp(-a * a / 2) / np.sqrt(2 * np.pi)
        ),
    }

    def velocity(_, state):
        v = state[:tokens]
        xi = state[tokens]
        z = state[tokens + 1 :]
        b = task.x * np.exp(z)  # (N, M)
        force = weights * slopes[activation](b @ v + xi)  # (N,)
        pull = force @ b  # (M,)
        return np.concatenate([pull, [force.sum()], v * pull])

    def is_full(_, state):
        return state[tokens + 1 :].max() - 20.0

    is_full.terminal = True
    first = np.concatenate([start.v0[:, 0], start.xi0, start.z0])
    solution = solve_ivp(velocity, (0, end), first, events=is_full, **options)
    assert solution.success
    return solution.t, softmax_entropy(solution.y[tokens + 1 :].T)


def test_an_integration_that_shares_no_code_finds_the_same_dip_and_return():
    times, entropy = entropies("gelu", 40.0)
    _, independent = independent_entropies(
        "gelu", 40.0, method="LSODA", t_eval=times, rtol=1e-7, atol=1e-9
    )
    np.testing.assert_allclose(independent, entropy, atol=1e-3)


def test_the_counterexample_by_an_independent_integration_relu():
    t, entropy = independent_entropies("relu", 150.0, method="RK23", rtol=1e-4, atol=1e-8)
    assert t[-1] == 150.0
    assert entropy[0] == pytest.approx(2.30, abs=0.02)
    assert entropy.min() == pytest.approx(1.27, abs=0.02)
    assert entropy[-1] == pytest.approx(2.12, abs=0.02)


def test_the_counterexample_by_an_independent_integration_linear():
    t, entropy = independent_entropies("linear", 150.0, method="LSODA", rtol=1e-7, atol=1e-9)
    assert entropy[0] == pytest.approx(2.30, abs=0.02)
    assert t[-1] == pytest.approx(5.73, abs=0.02)  # the blow-up
    assert entropy[-1] == pytest.approx(0.0, abs=0.02)


def ends(activation, tasks, starts, times):
    """Attention entropies (T, flows) of one flow per task."""
    paths = integrate_all(tasks, starts, times, attention="exp", activation=activation)
    return np.stack([softmax_entropy(z) for z in paths.z.swapaxes(0, 1)], axis=1)


def test_of_twelve_draws_most_nonlinear_flows_come_back_and_no_linear_one():
    tasks, starts = zip(*map(from_a_large_bias, range(12)), strict=True)
    times = late_times(20.0)
    bounced = {}
    for activation in ("linear", "relu"):
        curves = ends(activation, tasks, starts, times)
        bounced[activation] = sum(describe(times, curve, EXACT).bounced for curve in curves.T)
    assert bounced == {"linear": 0, "relu": 9}


def test_from_a_small_start_linear_nodes_end_on_one_token_and_nonlinear_ones_on_several():
    tasks = []
    starts = []
    for seed in range(8):
        rng = np.random.default_rng(seed)
        tasks.append(mixture(StudentT(6, nu=3), 1.5, rng))
        starts.append(small_start(tasks[-1], rng))
    linear, gelu = (
        ends(activation, tasks, starts, late_times(300.0)) for activation in ("linear", "gelu")
    )
    assert linear[-1].max() < 1e-3
    assert gelu[-1].min() > 0.4
    assert not any(describe(late_times(300.0), curve, EXACT).bounced for curve in gelu.T)
