"""Isotropic mixtures (Section 4, Appendices A.3-A.4): marginals, Lemma 1, the flow, critical rays, linearisation."""

import math
from dataclasses import dataclass

import numpy as np
import pytest
from numpy.polynomial.hermite_e import hermegauss
from scipy.integrate import quad
from scipy.linalg import expm
from scipy.optimize import brentq, minimize_scalar
from scipy.stats import kstest

from joma.theory.ending import EndingKind
from joma.theory.isotropic import (
    Density,
    ExpNorm,
    Gaussian,
    Laplace,
    Mixture,
    Radial,
    StudentT,
    Thetas,
    UniformBall,
    critical_points,
    critical_rays,
    expectation,
    fate,
    linearise,
)

S = np.array([-3.0, -0.7, 0.0, 0.2, 0.9, 2.5])
AXIS = np.array([2.0, -1.0, 2.0]) / 3


def families(n):
    return [
        Gaussian(n, 1.3), UniformBall(n, 2.0), StudentT(n, nu=3.0), StudentT(n, nu=1.2, scale=0.5), Laplace(n, 0.8),
        ExpNorm(n, 0.7),
    ]  # fmt: skip


FAMILIES = [
    pytest.param(f, id=f"{type(f).__name__}{getattr(f, 'nu', '')}-{n}")
    for n in (1, 2, 3, 6)
    for f in families(n)
]


# -- marginals ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_closed_forms_are_the_integrals_of_the_density(family):
    known = family.by_quadrature()
    for name in ("marginal", "cdf", "tail_mean"):
        np.testing.assert_allclose(
            getattr(known, name)(S), getattr(family, name)(S), rtol=1e-11, atol=1e-15
        )


@pytest.mark.parametrize("n", [2, 3, 4, 5, 7])
def test_the_marginal_is_equation_36(n):
    # the paper's constants, for even and odd n, and plain quadrature over l
    double = math.prod(range(n - 3, 0, -2))
    even, odd = (
        2 ** (n / 2) * np.pi ** (n / 2 - 1) / double,
        2 * np.pi ** ((n - 1) / 2) / math.gamma((n - 1) / 2),
    )
    for family in (Gaussian(n), StudentT(n, nu=3.0), Laplace(n)):
        for s in (0.3, 1.4):
            integral = quad(
                lambda l, f=family, s=s: f.density(np.hypot(s, l)) * l ** (n - 2),
                0,
                np.inf,
                epsabs=1e-13,
            )[0]
            assert (odd if n % 2 else even) * integral == pytest.approx(
                float(family.marginal(s)), rel=1e-8
            )


@pytest.mark.parametrize("family", FAMILIES)
def test_samples_have_the_marginal_in_any_direction(family):
    rng = np.random.default_rng(1)
    u = rng.standard_normal(family.n)
    s = family.sample(4000, rng) @ (u / np.linalg.norm(u))
    assert kstest(s, family.cdf).pvalue > 1e-3


@pytest.mark.parametrize(
    "p0", [lambda r: np.exp(-(r**1.5)), lambda r: (0.3 + r * r) ** -3.0, lambda r: float(r < 2) * r]
)
def test_a_density_of_ones_own_is_sampled_and_integrated_consistently(p0):
    family = Density(3, p0=p0)
    s = family.sample(2000, np.random.default_rng(2))[:, 1]
    assert kstest(s, family.cdf).pvalue > 1e-3
    assert quad(lambda t: float(family.marginal(t)), -0.8, 0.5)[0] == pytest.approx(
        float(family.cdf(0.5) - family.cdf(-0.8)), abs=1e-9
    )


@dataclass(frozen=True)
class Tent(Radial):
    """In one dimension: weight w on a tent of half-width ε, 1 − w uniform on (−1, 1), with θ₂(0) p(0) as given."""

    epsilon: float = 0.05
    product: float = 0.25

    @property
    def radius(self) -> float:
        """1."""
        return 1.0

    @property
    def _weight(self) -> float:
        e = self.epsilon  # (w/ε + (1 − w)/2)(wε/6 + (1 − w)/4) = product
        return float(
            min(
                w.real
                for w in np.roots(
                    [
                        (1 / e - 0.5) * (e / 6 - 0.25),
                        (1 / e - 0.5) / 4 + (e / 6 - 0.25) / 2,
                        0.125 - self.product,
                    ]
                )
            )
        )

    def _density(self, r):
        w, e = self._weight, self.epsilon
        return w / e * np.maximum(0.0, 1 - r / e) + (1 - w) / 2 * (r < 1)

    def _upper(self, x):
        w, e = self._weight, self.epsilon
        return w / 2 * np.maximum(0.0, 1 - x / e) ** 2 + (1 - w) / 2 * np.maximum(0.0, 1 - x)

    def _tail(self, x):
        w, u = self._weight, np.maximum(0.0, 1 - x / self.epsilon)
        return w * self.epsilon * (u**2 / 2 - u**3 / 3) + (1 - w) / 4 * np.maximum(0.0, 1 - x * x)


def test_a_density_with_kinks_is_integrated_adaptively():
    tent = Tent(1)
    known = tent.by_quadrature()
    assert known.radius == pytest.approx(1, rel=1e-12)
    s = np.array([-0.9, -0.2, -0.03, 0.0, 0.02, 0.5])
    for name in ("marginal", "cdf", "tail_mean"):
        np.testing.assert_allclose(getattr(known, name)(s), getattr(tent, name)(s), rtol=1e-9)
    assert float(tent.tail_mean(0) * tent.marginal(0)) == pytest.approx(0.25, rel=1e-14)


@pytest.mark.parametrize("family", [*families(3), Density(2, p0=lambda r: (1 + r * r) ** -2.5)])
def test_quantiles_invert_the_cdf_into_the_far_tail(family):
    y = np.array([1e-12, 1e-5, 0.2, 0.5, 0.7, 0.999])
    np.testing.assert_allclose(family.cdf(family.ppf(y)), y, rtol=1e-9)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: StudentT(3, nu=1.0), "nu must be a number > 1"),
        (lambda: StudentT(3), "nu must be a number > 1"),
        (lambda: Gaussian(0), "n must be a positive integer"),
        (lambda: Gaussian(2, -1.0), "scale must be a positive number"),
        (lambda: Density(3, p0=lambda r: (1 + r) ** -3.0), "does not normalise"),
        (lambda: Density(3, p0=lambda r: r**-3.0 * np.exp(-r)), "does not normalise: near r = 0"),
        (lambda: Density(3, p0=lambda r: (1 + r) ** -3.9), "no mean distance"),
        (lambda: Density(3, p0=lambda r: 0.0), "does not normalise"),
        (lambda: Density(3, p0=lambda r: -np.exp(-r)), "≥ 0 at every r"),
        (lambda: Gaussian(2).ppf(1.0), "in \\(0, 1\\)"),
        (lambda: expectation(Gaussian(2), np.tanh, [0.0, 0.0], 0.1, [1.0, 0.0]), "v is zero"),
        (lambda: expectation(Gaussian(1), np.tanh, [0.0, 1.0], 0, [1.0, 0], basis=[[1.0], [0]]), "orthogonal to"),
        (lambda: expectation(Gaussian(3), np.tanh, [1.0, 0.0], 0.1, [1.0, 0.0]), "give a basis"),
        (lambda: Mixture(Gaussian(2), [[0.0, 1.0]], [1.0, 2.0]), "one centre per weight"),
        (lambda: Mixture(Gaussian(2), [[0.0, 1.0]], [1.0]).integrate(1.0, [0.0, 0.0]), "both zero"),
        (lambda: fate(Mixture(Gaussian(2), [[0.0, 1.0]], [1.0]), [0.0, 0.0], 0.0), "both zero"),
        (lambda: critical_rays(Gaussian(2), [0.0, 1.0]), "not zero"),
        (lambda: critical_rays(Gaussian(2), [1.0, -1.5], -1.0), "separation"),
        (lambda: critical_points(Mixture(Gaussian(2), [[1.0, 1], [1, 1]], [1.0, -2])), "coincide"),
        (lambda: linearise(Mixture(Gaussian(2), [[1.0, 1], [0, 0]], [1.0, -2]), [0.0, 0.0], 0.1), "zero vector"),
        (lambda: linearise(Mixture(Gaussian(2), [[1.0, 1], [0, 0]], [1.0, -2]), [1.0, 0.0], 0.1), "not critical"),
    ],
)  # fmt: skip
def test_bad_input_is_named(make, match):
    with pytest.raises(ValueError, match=match):
        make()


# -- Lemma 1 and θ₁, θ₂ ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("psi", [np.tanh, lambda u: 1 / (1 + np.exp(-u))])
def test_lemma_1_for_any_norm_against_exact_cubature(norm, psi):
    # Gauss-Hermite in both coordinates of R²: exact to rounding for smooth ψ under a Gaussian
    nodes, weights = hermegauss(80)
    mean, v, xi = np.array([0.4, -0.3]), norm * np.array([0.6, 0.8]), 0.2
    x = mean + np.stack(np.meshgrid(nodes, nodes, indexing="ij"), axis=-1).reshape(-1, 2)
    w = np.outer(weights, weights).ravel() / (2 * np.pi)
    value = w * psi(x @ v + xi)
    first, second = expectation(Gaussian(2), psi, v, xi, mean)
    assert first == pytest.approx(value.sum(), abs=1e-9)
    np.testing.assert_allclose(second, value @ x, atol=1e-9)


@pytest.mark.parametrize("slopes", [(0.0, 1.0), (0.2, 1.0), (-1.0, 1.0), (1.0, 0.0)])
@pytest.mark.parametrize("family", families(3))
def test_thetas_are_lemma_1_at_unit_norm(family, slopes):
    thetas = Thetas(family, slopes)
    for r in (-1.1, 0.0, 0.6):
        first, second = expectation(
            family, lambda u: slopes[int(u > 0)], [1.0, 0, 0], r, np.zeros(3)
        )
        assert first == pytest.approx(float(thetas.theta1(r)), abs=1e-9)
        assert second[0] == pytest.approx(float(thetas.theta2(r)), rel=1e-6)
        np.testing.assert_allclose(second[1:], 0)


@pytest.mark.parametrize("family", families(2))
def test_relu_theta1_rises_from_0_to_1_and_theta2_is_positive(family):
    thetas, r = Thetas(family), np.linspace(-1.9, 1.9, 77)
    assert (np.diff(thetas.theta1(r)) > 0).all()
    assert (thetas.theta2(r) > 0).all()
    assert float(thetas.theta1(-1e9)) < 1e-8
    assert float(thetas.theta1(1e9)) > 1 - 1e-8
    y = np.array([0.1, 0.5, 0.8])
    np.testing.assert_allclose(thetas.G(y), thetas.F(family.ppf(y)))


# -- the flow -------------------------------------------------------------------------------------------------

CENTRES = [[0.9, 0.2, 0.0], [-0.1, 0.3, 0.4], [0.0, 0.0, -0.5]]
V, XI = np.array([0.3, -0.4, 0.8]), -0.2


def mixture(slopes=(0.1, 1.0), family=None, **kwargs):
    return Mixture(family or StudentT(3, nu=5.0), CENTRES, [0.5, -0.6, 0.3], slopes, **kwargs)


def differences(f, y, h=1e-5):
    return np.stack([(f(y + h * e) - f(y - h * e)) / (2 * h) for e in np.eye(len(y))], axis=-1)


@pytest.mark.parametrize("basis", [None, np.linalg.qr(np.arange(6.0).reshape(3, 2) ** 2 + 1)[0]])
def test_the_field_is_the_gradient_of_its_objective_and_the_jacobian_its_derivative(basis):
    m = mixture(family=StudentT(3 if basis is None else 2, nu=4.0), basis=basis)
    y = np.append(V, XI)
    field = lambda y: np.append(*m.field(y[:3], y[3]))  # noqa: E731
    np.testing.assert_allclose(
        differences(lambda y: m.objective(y[:3], y[3]), y), field(y), atol=1e-9
    )
    J = m.jacobian(V, XI)
    np.testing.assert_allclose(J, differences(field, y), atol=1e-8)
    np.testing.assert_allclose(J, J.T, atol=1e-15)
    np.testing.assert_allclose(J @ y, 0, atol=1e-15)  # 0-homogeneous
    for c in (0.1, 7.0):
        np.testing.assert_allclose(field(c * y), field(y), rtol=1e-13)
    rho, norm = m.rho(V, XI), np.linalg.norm(V if basis is None else basis.T @ V)
    assert m.objective(V, XI) == pytest.approx(norm * float(m.a @ m.thetas.F(rho)), rel=1e-12)


@pytest.mark.parametrize("basis", [None, np.linalg.qr(np.arange(6.0).reshape(3, 2) ** 2 + 1)[0]])
def test_the_field_is_the_mean_over_samples(basis):
    m = mixture(family=Laplace(3 if basis is None else 2), basis=basis)
    task = m.task(100_000, np.random.default_rng(3))
    s = (
        task.g
        * np.where(task.x @ V + XI > 0, 1.0, 0.1)[:, None]
        * np.hstack([task.x, np.ones((task.samples, 1))])
    )
    parts = s.reshape(3, -1, 4)  # stratified by component
    error = np.sqrt((parts.var(axis=1) / parts.shape[1]).sum(axis=0)) / 3
    assert (np.abs(s.mean(axis=0) - np.append(*m.field(V, XI))) / error).max() < 4.5


def test_the_flow_is_the_limit_of_sampled_joint_flows_with_uniform_attention():
    m, rng = mixture(slopes=(0.0, 1.0)), np.random.default_rng(4)
    ends = []
    for _ in range(10):
        path = m.sampled(120, rng).integrate(2.0, V[:, None], [XI], times=2, rtol=1e-7, atol=1e-8)
        assert path.done
        assert (path.z == 0).all()
        ends.append(np.append(path.v[-1, :, 0], path.xi[-1]))
    exact = m.integrate(2.0, V, XI, times=2)
    deviation = np.mean(ends, axis=0) - np.append(exact.v[-1], exact.xi[-1])
    assert np.linalg.norm(np.append(exact.v[-1] - V, exact.xi[-1] - XI)) > 0.5  # something moved
    assert (np.abs(deviation) / (np.std(ends, axis=0, ddof=1) / np.sqrt(len(ends)))).max() < 4.5


def test_half_the_squared_norm_grows_at_the_rate_of_the_objective():
    path = mixture().integrate(5.0, V, XI, times=401)
    half = 0.5 * (np.square(path.v).sum(axis=1) + path.xi**2)
    rates = np.array([mixture().objective(v, xi) for v, xi in zip(path.v, path.xi, strict=True)])
    assert (np.diff(rates) > 0).all()  # it is gradient ascent
    gained = (
        (rates[::2][:-1] + 4 * rates[1::2] + rates[2::2]) @ np.ones(200) * (path.t[2] / 6)
    )  # Simpson
    assert half[-1] - half[0] == pytest.approx(gained, rel=1e-8)


def test_linear_nodes_move_straight_and_absolute_values_die_in_finite_time():
    path = mixture(slopes=(1.0, 1.0)).integrate(2.0, V, XI)
    np.testing.assert_allclose(
        path.v[-1] - V, 2.0 * np.array([0.5, -0.6, 0.3]) @ CENTRES, rtol=1e-9
    )
    alone = Mixture(Gaussian(3), np.zeros((1, 3)), [-1.0], (-1.0, 1.0))  # v̇ = −E|s| v̂
    path = alone.integrate(10.0, [0.6, 0.0, 0.8])
    assert path.ending.kind is EndingKind.DIED
    assert path.ending.t == pytest.approx(np.sqrt(np.pi / 2), rel=1e-6)
    assert path.status == f"dies at t = {path.ending.t:.10g}"


# -- critical rays --------------------------------------------------------------------------------------------


def threshold(family, ratio):
    """D at which max over ρ of F(ρ + D)/F(ρ) is the ratio: brute force, with neither θ₁ nor Eqn. 56."""
    F, grid = Thetas(family).F, np.sinh(np.linspace(-8, 5, 401))

    def excess(D):
        i = int(np.argmax(F(grid + D) / F(grid)))
        window = (grid[max(i - 1, 0)], grid[min(i + 1, 400)])
        best = minimize_scalar(
            lambda r: -float(F(r + D) / F(r)),
            bounds=window,
            method="bounded",
            options={"xatol": 1e-9},
        )
        return -best.fun - ratio

    return brentq(excess, 1e-3, 300.0)


HEAVY = [
    StudentT(3, nu=3.0),
    StudentT(2, nu=1.2),
    StudentT(3, nu=20.0),
    Density(2, p0=lambda r: (1 + r * r) ** -2.5),
]


@pytest.mark.parametrize("ratio", [1.5, 8.0])
@pytest.mark.parametrize("family", HEAVY)
def test_heavy_tails_have_one_ray_where_the_field_vanishes_at_the_brute_force_separation(
    family, ratio
):
    (ray,) = critical_rays(family, [1.0, -ratio]).rays
    assert ray.separation == pytest.approx(threshold(family, ratio), rel=1e-7)
    centre = np.full(family.n, 0.3)
    centres = np.stack([centre + ray.separation * np.eye(family.n)[0], centre])
    m = Mixture(family, centres, [1.0, -ratio])
    for norm in (0.5, 1.0, 2.0):
        v, xi = critical_points(m).rays[0].point(centres, norm)
        assert np.abs(np.append(*m.field(v, xi))).max() < 1e-10
    mirrored = critical_rays(family, [ratio, -1.0]).rays[0]
    assert (mirrored.rho, mirrored.sign) == (ray.rho[::-1], -ray.sign)


def test_student_t_of_the_paper_s_range_and_the_honest_none_beside_its_separation():
    family, a = StudentT(3, nu=3.0), [0.4, -0.6]
    (D,) = critical_rays(family, a).separations
    assert pytest.approx(0.4317, abs=5e-5) == D
    for factor in (0.8, 1.2):
        found = critical_rays(family, a, factor * D)
        assert not found
        assert "critical rays need 0.43174081" in found.reason
    with pytest.raises(ValueError, match=r"exists at 0\.43174081 only"):
        critical_rays(family, a).rays[0].point([[1.0, 0, 0], [0, 0, 0]])


@pytest.mark.parametrize("ratio", [1.001, 1.5, 20.0])
@pytest.mark.parametrize(
    "family", [Gaussian(3), UniformBall(2), ExpNorm(3), Density(2, p0=lambda r: np.exp(-(r**4)))]
)
def test_log_concave_marginals_have_none(family, ratio):
    for slopes in ((0.0, 1.0), (0.1, 1.0)):
        found = critical_rays(family, [1.0, -ratio], slopes=slopes)
        assert not found
        assert found.reason.startswith("none")
    assert (critical_rays(family, [1.0, -ratio]).dead_below is None) == np.isinf(family.radius)


@pytest.mark.parametrize(
    "family", [Gaussian(3), UniformBall(3), ExpNorm(2), Density(2, p0=lambda r: np.exp(-(r**1.3)))]
)
def test_the_level_increases_for_log_concave_marginals_and_not_for_heavy_tails(family):
    r = np.linspace(-0.99 * min(family.radius, 6.0), 6.0, 800)
    assert (np.diff(Thetas(family).level(r)) > 0).all()
    assert (np.diff(Thetas(StudentT(3, nu=3.0)).level(r)) < 0).any()


def test_noise_in_the_far_tail_of_a_density_is_not_taken_for_a_ray():
    assert not critical_rays(ExpNorm(40).by_quadrature(), [1.0, -2.0])
    found = critical_rays(StudentT(20, nu=2.5).by_quadrature(), [1.0, -2.0])
    assert found.separations == pytest.approx(
        critical_rays(StudentT(1, nu=2.5), [1.0, -2.0]).separations, rel=1e-9
    )


@pytest.mark.parametrize(("family", "rate"), [(Laplace(3, 2.0), np.sqrt(2) / 2), (ExpNorm(1), 1.0)])
def test_exponential_tails_have_a_continuum_at_log_ratio_over_rate(family, rate):
    (run,) = critical_rays(family, [0.4, -0.6]).continua
    assert run.separation == pytest.approx(np.log(1.5) / rate, rel=1e-9)
    assert run.rho1[0] == -np.inf
    assert run.rho1[1] == pytest.approx(0, abs=1e-4)
    m = Mixture(
        family, np.stack([run.separation * np.eye(family.n)[0], np.zeros(family.n)]), [0.4, -0.6]
    )
    for rho1 in (-0.1, -1.0, -5.0):
        v, xi = np.eye(family.n)[0], rho1 - run.separation
        assert np.abs(np.append(*m.field(v, xi))).max() < 1e-12
    assert not critical_rays(family, [0.4, -0.6], slopes=(0.01, 1.0))  # a leak ends it


def test_slopes_of_both_signs_have_rays_for_gaussians_and_equal_weights_an_orthogonal_family():
    found = critical_rays(Gaussian(3), [0.4, -0.6], slopes=(-1.0, 1.0))
    assert len(found.rays) == 2
    for ray in found.rays:
        centres = np.stack([ray.separation * AXIS, 0 * AXIS])
        m = Mixture(Gaussian(3), centres, [0.4, -0.6], (-1.0, 1.0))
        assert np.abs(np.append(*m.field(*ray.point(centres)))).max() < 1e-12
    equal = critical_rays(Gaussian(3), [0.5, -0.5], slopes=(-0.5, 1.0))
    m = Mixture(Gaussian(3), [[1.0, 0, 0], [0, 0, 0]], [0.5, -0.5], (-0.5, 1.0))
    assert np.abs(np.append(*m.field([0.0, 0.6, 0.8], equal.orthogonal))).max() < 1e-12
    assert not critical_rays(Gaussian(3), [0.5, -0.5])
    assert not critical_rays(Gaussian(3), [0.5, 0.5])


def test_reflected_activations_have_reflected_rays_and_a_leak_brings_a_second_one():
    family, a = StudentT(3, nu=3.0), [0.4, -0.6]
    (relu,), (mirrored,) = (
        critical_rays(family, a).rays,
        critical_rays(family, a, slopes=(-1.0, 0.0)).rays,
    )
    np.testing.assert_allclose(mirrored.rho, -np.array(relu.rho), rtol=1e-12)
    leaky = critical_rays(family, a, slopes=(0.01, 1.0)).rays
    assert len(leaky) == 2
    for ray in leaky:
        centres = np.stack([ray.separation * AXIS, 0 * AXIS])
        m = Mixture(family, centres, a, (0.01, 1.0))
        assert np.abs(np.append(*m.field(*ray.point(centres)))).max() < 1e-12


# -- about a critical point -----------------------------------------------------------------------------------


def about(a, norm=1.0, nu=3.0):
    (ray,) = critical_rays(StudentT(3, nu=nu), a).rays
    m = Mixture(StudentT(3, nu=nu), np.stack([ray.separation * AXIS, 0 * AXIS]), a)
    return linearise(m, *ray.point(m.centres, norm))


@pytest.mark.parametrize("nu", [1.5, 3.0])
@pytest.mark.parametrize(("a", "stable"), [((0.4, -0.6), True), ((0.6, -0.4), False)])
@pytest.mark.parametrize("norm", [0.5, 2.0])
def test_the_corrected_coefficients_are_the_jacobian_and_definiteness_decides_attraction(
    a, stable, norm, nu
):
    here = about(a, norm, nu)
    true = -differences(lambda v: here.mixture.field(v, here.xi)[0], here.mu, 1e-5 * norm)
    np.testing.assert_allclose(here.matrix(here.corrected), true, atol=1e-8)
    assert np.abs(here.s_mu * here.matrix(here.printed) - true).max() > 0.1 * np.abs(true).max()
    assert here.definite is stable
    assert here.attracts is stable
    np.testing.assert_allclose(here.jacobian @ here.null, 0, atol=1e-14)
    values = np.sort(np.linalg.eigvalsh(here.jacobian))
    kappa = float(here.mixture.a @ here.mixture.thetas.density(here.mixture.rho(here.mu, here.xi)))
    expected = [
        0.0,
        -here.corrected[0],
        -here.corrected[0],
        kappa * (1 + (here.xi / norm) ** 2) / norm,
    ]
    np.testing.assert_allclose(values, np.sort(expected), atol=1e-12)


def test_equation_5_predicts_the_flow_to_5_percent_in_the_neighbourhood_and_not_far_beyond():
    here = about((0.4, -0.6))
    gamma = here.neighbourhood(0.05)
    assert gamma == pytest.approx(
        about((0.4, -0.6), 3.0).neighbourhood(0.05), rel=1e-6
    )  # in units of ‖μ‖
    assert 0.02 < gamma < 0.5

    reach = here.flow_neighbourhood(0.05)
    assert reach > gamma  # errors of v̇ average out, and shrink as v comes closer

    def worst(radius):
        off = 0.0
        for angle in np.linspace(0, np.pi, 9):
            step = radius * (
                np.cos(angle) * AXIS + np.sin(angle) * np.array([1.0, 2.0, 0.0]) / np.sqrt(5)
            )
            path = here.mixture.integrate(700.0, here.mu + step, here.xi, times=71, freeze_xi=True)
            linear = np.stack([expm(-here.C * t) @ step for t in path.t])
            off = max(off, np.linalg.norm(path.v - here.mu - linear, axis=1).max() / radius)
        return off

    assert worst(0.9 * reach) < 0.05
    assert worst(1.2 * reach) > 0.05
    with pytest.raises(ValueError, match="not positive definite"):
        about((0.6, -0.4)).flow_neighbourhood()


def test_nodes_grow_above_the_critical_separation_rest_at_it_and_die_below():
    here = about((0.4, -0.6))
    push = np.array([0.05, -0.08, 0.03, 0.06])
    for factor, kind in ((0.8, "dies"), (1.0, "rests"), (1.2, "grows")):
        m = Mixture(here.mixture.family, factor * here.mixture.centres, here.mixture.a)
        end = fate(m, here.mu + push[:3], here.xi + push[3])
        assert end.kind == kind
        w = np.append(end.v, end.xi)
        gradient = np.append(*m.field(end.v, end.xi))
        assert np.linalg.norm(gradient - (gradient @ w) * w) < 1e-5  # a ray of the flow
        if kind == "grows":
            path = m.integrate(2000.0, end.v, end.xi, times=2)
            assert np.linalg.norm(np.append(path.v[-1], path.xi[-1])) == pytest.approx(
                1 + 2000 * end.rate, rel=1e-4
            )
        if kind == "dies":
            assert end.firing.max() < 1e-6


def test_gaussians_always_have_a_direction_that_grows():
    for D in (0.2, 1.0):
        m = Mixture(Gaussian(3), np.stack([D * AXIS, 0 * AXIS]), [0.4, -0.6])
        assert fate(m, AXIS, -1.5 if D < 0.5 else -1.0).kind == "grows"
