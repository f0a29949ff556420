"""Claims on the contrast of Section 4: linear nodes make attention sparse, nonlinear ones sparse and then dense."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import numpy as np
from scipy.integrate import solve_ivp
from scipy.optimize import brentq

from joma.paper.claims._registry import Kind, Variant, claim, share
from joma.paper.labs.contrast import flows, inputs, late_times, with_gradients
from joma.paper.labs.rebound import dip_and_rebound
from joma.paper.labs.regimes import MixtureRegime
from joma.theory.bounce import softmax_entropy
from joma.theory.flows import JointFlow
from joma.theory.isotropic import (
    Gaussian,
    Laplace,
    Mixture,
    Radial,
    StudentT,
    Thetas,
    UniformBall,
    expectation,
)
from joma.theory.setting import Array
from joma.theory.tasks import small_start

SEEDS = [(16, n) for n in range(6)]
ENDS = {"fixed": 300.0, "targets": 16.0}
MIXTURE_SEEDS = [(16, n) for n in range(12)]
MIXTURE_END = 20.0
LEAST_DIP, LEAST_BOUNCE = (
    0.1,
    0.2,
)  # of the start, of the dip: the rule of exhibits for solutions without noise


@functools.cache
def _curves(
    kind: str, activation: str, attention: str, scale: float = 32.0, held: bool = False
) -> tuple[Array, Array]:
    """Attention entropy and stable rank (T, flows) on uneven inputs; with ``held``, attention as it was at the start."""
    paths = flows(
        "uneven", kind, attention, activation, SEEDS, late_times(ENDS[kind]), scale=scale, tokens=4
    )
    entropy, rank = paths.entropy(), paths.stable_rank()
    return np.repeat(entropy[:1], len(entropy), axis=0) if held else entropy, rank


def _stay_down(curves: Array) -> float:
    """The share of curves (T, flows) that do not fall by a tenth of their start and come back by a fifth of that."""
    moves = [(dip_and_rebound(values), values[0]) for values in curves.T]
    bounced = [
        dip >= LEAST_DIP * start and rebound >= LEAST_BOUNCE * dip > 0
        for (dip, rebound), start in moves
    ]
    return share(bounced.count(False), len(bounced))


@claim(
    "S4.linear_sparse",
    source="Abstract, Sections 1 and 3.1: linear activations",
    statement="With linear activation attention becomes sparse during training (and stays so).",
    tolerance=0.0,
    measures=(
        "largest of 0.1 − dip/start (entropy does not fall) and rebound/dip − 0.2 (it comes back), "
        "over twelve flows under Assumption 1: uneven inputs, exp and softmax attention, six "
        "seeds, until the blow-up or t = 300"
    ),
    remark=(
        "Checked from a small start. It takes both linearity and Assumption 1: towards finite "
        "targets (squared loss) linear nodes bounce too, and under Assumption 1 nonlinear nodes "
        "with a large bias can (S4.nonlinear_bounce, `joma reproduce contrast`)"
    ),
    control="linear nodes whose gradients move towards finite targets",
    mutants={"attention held": "z as it was at the start"},
)
def s4_linear_sparse(variant: Variant) -> Iterator[float]:
    """Linear nodes: entropy falls and does not come back."""
    kind = "targets" if variant == "control" else "fixed"
    for attention in ("exp", "softmax"):
        entropy, _ = _curves(kind, "linear", attention, held=variant.has("attention held"))
        for values in entropy.T:
            dip, rebound = dip_and_rebound(values)
            yield max(LEAST_DIP - dip / values[0], rebound / dip - LEAST_BOUNCE if dip > 0 else 0.0)


# of one node, with x̄₋ = 0 and all the weight on two components: what S4.finite_target derives
_FINITE_TARGET = (
    r"With $\xi>0$ held, as in the proof of Theorem 3, $\mathbb E[g\varphi]$ along $v=s\hat x_+$ "
    r"rises at small $s$ and falls at large $s$ iff $a_+F(D)<a_-F(0)$: a finite target "
    r"$s\propto\xi$, which tokens reach one after the other (S4.finite_target). For linear "
    r"$\varphi$ it rises for ever, and one token takes all."
)
_FROM_A_SMALL_START = (
    r" From a small start $E=\mathbb E[gh]$ is soon positive, or the node dies: by S4.convex the "
    r"weights then grow ever faster, on one token or on a committee (S4.committee), and nothing "
    r"stops for the others to catch up."
)


@functools.cache
def _mixture_curves(activation: str, ratio: float, bias: float, held: bool = False) -> Array:
    """Attention entropy (T, flows) in Theorem 3's setting with attention put back."""
    regime = MixtureRegime("Gaussian", ratio, bias, holds_bias=False)
    paths = regime.flows(activation, MIXTURE_SEEDS, late_times(MIXTURE_END))
    entropy = np.stack([softmax_entropy(z) for z in paths.z])
    if held:
        return np.repeat(entropy[:1], len(entropy), axis=0)
    return entropy


@claim(
    "S4.nonlinear_bounce",
    kind=Kind.UNSAID,
    source="Abstract, Sections 1, 4 and 5: nonlinear activations",
    statement="With nonlinear activations attention first becomes sparse and then dense again.",
    tolerance=0.5,
    measures=(
        "share of flows whose attention entropy does not fall by a tenth of its start and come "
        "back by a fifth of that: ReLU and GELU nodes, twelve draws each of Theorem 3's setting "
        "with attention put back, 60 + 60 samples of N(x̄₊, I) and N(0, I), ‖x̄₊‖ = 1, M = 10, fixed "
        "gradients with a₊ = 0.2 and a₋ = 0.8, exp attention, until t = 20; from a small start "
        "with ξ(0) = 0 (printed) and with ξ(0) = 100 (condition)"
    ),
    condition=(
        "weights with large finite targets. Under fixed gradients and exp attention these take a "
        "large bias and a₊F(D) < a₋F(0) (S4.finite_target); from a small start no flow that was "
        "checked comes back. Under a loss with a finite minimum linear nodes have finite targets "
        "too, and come back as well (`joma reproduce contrast`)"
    ),
    control="linear nodes under the condition",
    counterexample=(
        "the same samples and gradients with ξ(0) = 0, from a small start: ReLU nodes die, or all "
        "attention goes to a few tokens and stays there. With ξ(0) = 100 the contrast is there: on "
        "one draw entropy goes 2.30 → 1.27 → 2.12 nats with a ReLU node, and to 0.00 with a linear "
        "one"
    ),
    derivation=_FINITE_TARGET + _FROM_A_SMALL_START,
    paper_formula=r"nonlinear $\varphi$: sparse, then dense",
    corrected_formula=r"finite targets $v^*$ with $\|v^*\|$ large: sparse, then dense",
    mutants={
        "small bias": "ξ(0) = 0",
        "a = (0.6, −0.4)": "a₊F(D) > a₋F(0)",
        "attention held": "z as it was",
    },
)
def s4_nonlinear_bounce(variant: Variant) -> Iterator[float]:
    """Nonlinear nodes: entropy falls and comes back, in most flows."""
    is_small = variant == "printed" or variant.has("small bias")
    bias = 0.0 if is_small else 100.0
    ratio = 2 / 3 if variant.has("a = (0.6, −0.4)") else 4.0
    for activation in ("linear",) if variant == "control" else ("relu", "gelu"):
        yield _stay_down(_mixture_curves(activation, ratio, bias, variant.has("attention held")))


@claim(
    "S4.rank_nodes",
    kind=Kind.UNSAID,
    source="Section 4, relationship with the rank of the lower MLP layer, for the nodes themselves",
    statement=(
        "The rank of the lower layer first drops and then bounces back, with nonlinear nodes."
    ),
    tolerance=0.5,
    measures=(
        "share of flows whose stable rank of V does not fall by a tenth of its start and come back "
        "by a fifth of that: ReLU and GELU nodes on uneven inputs, exp attention, from a small "
        "start, six seeds each; under fixed gradients (printed); towards targets of scale 32 "
        "(condition)"
    ),
    condition=(
        "weights with large finite targets. Checked for those of a squared loss, y = φ(32 (x − "
        "x̄)B), under exp attention and from a small start; there linear nodes bounce too. Several "
        "nodes with large biases under fixed gradients were not checked"
    ),
    control="linear nodes under fixed gradients",
    counterexample=(
        "uneven inputs, gradients as at the start and held, exp attention, from a small start: the "
        "stable rank of V falls towards 1 and stays there, with linear, ReLU and GELU nodes"
    ),
    paper_formula=r"$\mathrm{rank}(W)$ drops, then bounces back",
    corrected_formula=r"the same, where $v$ has finite targets",
    derivation=(
        r"With $g$ held and a small start $E=\sum_k\mathbb E[g_kh_k]$ is soon positive, and the "
        r"weights grow ever faster (S4.convex) on few tokens: $V$ has few rows that count. From a "
        r"large bias a node may have a finite target (S4.finite_target)."
    ),
    mutants={"fixed gradients": "the condition dropped"},
)
def s4_rank_nodes(variant: Variant) -> Iterator[float]:
    """Nonlinear nodes: the stable rank falls and comes back."""
    is_fixed = variant in ("printed", "control") or variant.has("fixed gradients")
    for activation in ("linear",) if variant == "control" else ("relu", "gelu"):
        _, rank = _curves("fixed" if is_fixed else "targets", activation, "exp")
        yield _stay_down(rank)


def _slope_ratio(family: Radial, separation: float, s: float) -> float:
    """Slope of E₊[φ] over that of E₋[φ] at v = s x̂₊ and ξ = 1, a ReLU node, by quadrature."""
    gate: Callable[[float], float] = lambda a: float(a > 0)  # noqa: E731
    unit = np.eye(family.n)[0]
    slopes = []
    for mean in (separation * unit, 0.0 * unit):
        _, pull = expectation(family, gate, s * unit, 1.0, mean)
        slopes.append(float(pull @ unit))
    if slopes[1] <= 0:  # nearly all samples are active, and E₋[φ] = ξ
        return np.inf
    return slopes[0] / slopes[1]


@claim(
    "S4.finite_target",
    kind=Kind.EXTENSION,
    source="Theorem 3 with two components, its proof's ξ held",
    statement=(
        "A ReLU node with ξ > 0 held, x̄₋ = 0 and a₋ > 0 has a finite target along x̄₊, v* = s*x̂₊ "
        "with s* ∝ ξ, if and only if a₊F(D) < a₋F(0)."
    ),
    tolerance=1e-5,
    measures=(
        "relative error of F(D)/F(0) as the a₋/a₊ from which the slope of E[gφ] along x̄₊ becomes "
        "negative somewhere, by quadrature over v = s x̂₊ with s/ξ from 0.01 to 10⁷; and relative "
        "error of s*(3ξ) = 3 s*(ξ), of v̇ = 0 there and its sign on both sides; Gaussian, Student-t "
        "(ν = 3), Laplace and uniform ball in R³, D = 0.5, 1 and 2"
    ),
    remark=(
        "For unimodal marginals, which every isotropic law in three dimensions and more has. A "
        "linear node has no finite target: the slope is a₊D. With ξ moving, the target moves with "
        "it, and attention comes back until ξ is small"
    ),
    control="F(D) of a linear node, D",
    derivation=(
        r"With $u=\xi/s$ the slope is $h(u)=a_+[\theta_2(D+u)+D\theta_1(D+u)]-a_-\theta_2(u)$. "
        r"$h(\infty)=a_+D>0$, $h(0)=a_+F(D)-a_-F(0)$, and $h'(u)=u[a_-p(u)-a_+p(D+u)]>0$ for "
        r"$a_-\ge a_+$: one zero iff $h(0)<0$. For $a_-<a_+$, $h>0$, since "
        r"$\theta_2(D+u)+D\theta_1(D+u)\ge\theta_2(u)$."
    ),
    paper_formula=r"“critical point due to nonlinearity” (slides), without a condition on $a_\pm$",
    corrected_formula=r"$a_+F(D)<a_-F(0)$",
    terms=("F(D)", "F(0)"),
)
def s4_finite_target(variant: Variant) -> Iterator[float]:
    """Where a finite target begins, by brute force, and where it is."""
    grid = np.geomspace(1e-2, 1e7, 28)
    for family in (Gaussian(3), StudentT(3, nu=3), Laplace(3), UniformBall(3)):
        thetas = Thetas(family)
        for separation in (0.5, 1.0, 2.0):
            least = min(_slope_ratio(family, separation, s) for s in grid)
            F_D = separation if variant == "control" else float(thetas.F(separation))
            predicted = variant.factor("F(D)") * F_D / (variant.factor("F(0)") * thetas.F(0.0))
            yield abs(float(predicted) / least - 1)
            yield from _target_errors(family, separation, 1.2 * float(predicted))


def _target_errors(family: Radial, separation: float, ratio: float) -> Iterator[float]:
    """Errors of the target at this a₋/a₊: that it exists, is critical and stable, and is proportional to ξ."""
    centres = separation * np.eye(2, family.n)[:1]  # (1, n)
    mixture = Mixture(family, np.vstack([centres, 0 * centres]), np.array([1.0, -ratio]))
    unit = np.eye(family.n)[0]

    def speed(s: float, xi: float) -> float:
        return float(mixture.field(s * unit, xi)[0] @ unit)

    if speed(1e7, 1.0) >= 0:
        yield 1.0  # no finite target, where one was predicted
        return
    targets = [brentq(speed, 1e-3 * xi, 1e7 * xi, args=(xi,), xtol=1e-12) for xi in (1.0, 3.0)]
    yield abs(targets[1] / (3 * targets[0]) - 1)
    yield float(np.abs(mixture.field(targets[0] * unit, 1.0)[0]).max())
    is_stable = speed(0.9 * targets[0], 1.0) > 0 > speed(1.1 * targets[0], 1.0)
    yield float(not is_stable)


def _critical_speeds(mixture: Mixture, xi: float) -> Iterator[float]:
    """|v̇| at the points v = ± s x̂₊ where it changes its direction, over the speed of a linear node."""
    unit = np.eye(mixture.family.n)[0]
    linear_speed = float(np.linalg.norm(mixture.a @ mixture.centres))
    grid = np.geomspace(1e-2, 1e7, 61)
    for side in (1.0, -1.0):

        def speed(s: float, side: float = side) -> float:
            return float(mixture.field(side * s * unit, xi)[0] @ unit)

        speeds = np.array([speed(s) for s in grid])
        for i in np.flatnonzero(speeds[1:] * speeds[:-1] < 0):
            s = brentq(speed, grid[i], grid[i + 1], xtol=1e-14)
            v_dot, _ = mixture.field(side * s * unit, xi)
            yield float(np.linalg.norm(v_dot)) / linear_speed


@claim(
    "S4.critical",
    kind=Kind.UNSAID,
    source="Slides, nonlinear activation; Theorem 3",
    statement=(
        "If x is sampled from a mixture of isotropic distributions, a nonlinear node has a critical "
        "point μ ~ x̄_c, due to nonlinearity."
    ),
    tolerance=1e-9,
    measures=(
        "smallest |v̇| over a₊‖x̄₊‖, the speed of a linear node, where v̇ changes its direction along "
        "the line of the centres (1 where it nowhere does); ReLU, x̄₋ = 0, Gaussian, Student-t (ν = "
        "3), Laplace and uniform ball in R³, ‖x̄₊‖ = 0.5, 1 and 2; ξ > 0 held (printed: of either "
        "sign, and a₋ = a₊ as well; under the condition: a₋/a₊ = 1.01, 1.2 and 2 times F(D)/F(0))"
    ),
    condition=(
        "ξ > 0 held, as in the proof of Theorem 3, and a₊F(D) < a₋F(0), D = ‖x̄₊‖. Then μ ∝ x̄₊, "
        "with a size that is proportional to ξ. With ξ moving as well, only heavy tails have "
        "critical points, at one distance of the centres (E59.exists). That a linear node has "
        "none is true for any mixture with Σ_j a_j x̄_j ≠ 0"
    ),
    counterexample=(
        "two Gaussians, or any two laws of one form, with a₋ = a₊: v̇ points along x̄₊ everywhere on "
        "the line of the centres, for every ξ, and nowhere vanishes off it"
    ),
    control="a linear node under the condition",
    derivation=(
        r"Along $\hat x_+$ with $u=\xi/s$ the field is $h(u)=a_+[\theta_2(D+u)+D\theta_1(D+u)]-a_-"
        r"\theta_2(u)$. With $a_-=a_+$ it is $a_+$ times $\mathbb E[x;\,x>-u]$ of the shifted law "
        r"minus that of the law at 0, which is positive. For $\xi>0$ it has a zero iff "
        r"$a_+F(D)<a_-F(0)$ (S4.finite_target)."
    ),
    paper_formula=r"$\dot v=0$ at $\mu\propto\bar x_c$, for a nonlinear $\phi$",
    corrected_formula=(
        r"$\dot v=0$ at $v\propto\bar x_+$ if $\xi>0$ is held and $a_+F(D)<a_-F(0)$"
    ),
    mutants={
        "a₋/a₊ × 0.98": "weights just beyond the condition",
        "ξ = 0": "no bias: the field along a ray does not change",
    },
)
def s4_critical(variant: Variant) -> Iterator[float]:
    """Look for critical points along the line of the centres."""
    biases = variant.choose((1.0,), {"printed": (1.0, -1.0), "ξ = 0": (0.0,)})
    slopes = variant.choose((0.0, 1.0), {"control": (1.0, 1.0)})
    factor = variant.choose(1.0, {"a₋/a₊ × 0.98": 0.98})
    for family in (Gaussian(3), StudentT(3, nu=3), Laplace(3), UniformBall(3)):
        thetas = Thetas(family)
        for D in (0.5, 1.0, 2.0):
            threshold = float(thetas.F(D) / thetas.F(0.0))
            ratios = [factor * above * threshold for above in (1.01, 1.2, 2.0)]
            if variant == "printed":
                ratios.append(1.0)
            centres = np.vstack([D * np.eye(3)[0], np.zeros(3)])
            for ratio in ratios:
                mixture = Mixture(family, centres, np.array([1.0, -ratio]), slopes=slopes)
                for xi in biases:
                    yield min(_critical_speeds(mixture, xi), default=1.0)


def _grows(mixture: Mixture, v: Array) -> bool:
    """True if v doubles in the joint exp flow of a mixture without a bias, before it halves; z = v²/2."""

    def velocity(_: float, v: Array) -> Array:
        e = np.exp(v * v / 2)
        return e * mixture.field(e * v, 0.0)[0]

    def has_doubled(_: float, v_now: Array) -> float:
        return float(np.linalg.norm(v_now) / np.linalg.norm(v) - 2)

    def has_halved(_: float, v_now: Array) -> float:
        return float(np.linalg.norm(v_now) / np.linalg.norm(v) - 0.5)

    # The field has no direction at v = 0: the integration must not get there.
    has_doubled.terminal = True  # type: ignore[attr-defined]
    has_halved.terminal = True  # type: ignore[attr-defined]
    first_speed = float(np.linalg.norm(velocity(0.0, v)))
    path = solve_ivp(
        velocity,
        (0.0, 1e4),
        v,
        rtol=1e-6,
        atol=1e-9,
        events=(has_doubled, has_halved),
        # A longer step would reach beyond both events, to where e^{v²/2} overflows.
        max_step=0.1 * float(np.linalg.norm(v)) / first_speed,
    )
    assert path.t_events is not None  # events were given
    return bool(path.t_events[0].size)


@claim(
    "S4.committee",
    kind=Kind.EXTENSION,
    source="Section 4, a₋ > a₊: Theorem 3's setting with attention put back, without a bias",
    statement=(
        "Under fixed gradients a set S of tokens grows together from some state if and only if "
        "a₊F(‖x̄_S‖) > a₋F(0); with |x̄_l| small enough that no single token does, a committee does."
    ),
    tolerance=0.0,
    measures=(
        "share of predictions that are wrong: sets of 1 to 6 tokens with unequal x̄_l, a₋/a₊ 0.5 % "
        "below and above F(‖x̄_S‖)/F(0); a ReLU node without a bias, exp attention, the "
        "population's joint flow from v ∥ x̄_S and from three random directions (S grows if one of "
        "them does), and of every token alone; Gaussian, Student-t (ν = 3) and Laplace"
    ),
    remark=(
        "In a blow-up ‖w‖ → ∞ while ξ stays finite, so that the condition holds for moving biases "
        "too. Where a₊F(|x̄_l|) > a₋F(0) for one token, it can take all, as with linear nodes"
    ),
    control="the mean of |x̄_l| in the place of the norm",
    derivation=(
        r"With $w=e^z\circ v$ supported on $S$ and $\xi=0$, "
        r"$\tfrac12\frac{d}{dt}\|v\|^2=E=\|w\|\,[a_+F(\hat w\cdot\bar x)-a_-F(0)]$, largest at "
        r"$\hat w\parallel\bar x_S$ since $F$ grows; $\dot E\ge0$ (S4.convex), so what grows once "
        r"grows on."
    ),
    paper_formula=r"$a_->a_+$ is considered, and which tokens grow then is not said",
    corrected_formula=r"$a_+F(\|\bar x_S\|)>a_-F(0)$",
    terms=("F(‖x̄_S‖)",),
    mutants={"largest token": "max |x̄_l| in the place of the norm"},
)
def s4_committee(variant: Variant) -> Iterator[float]:
    """Predicted and observed growth of sets of tokens."""
    rng = np.random.default_rng(33)
    for make in (Gaussian, lambda n: StudentT(n, nu=3), Laplace):
        for size in range(1, 7):
            family = make(size)
            thetas = Thetas(family)
            means = 0.3 * rng.uniform(0.5, 1.5, size)
            norm = float(np.linalg.norm(means))
            measure = norm
            if variant == "control":
                measure = float(means.mean())
            elif variant.has("largest token"):
                measure = float(means.max())
            for share_of_threshold in (0.995, 1.005):
                ratio = share_of_threshold * float(thetas.F(norm) / thetas.F(0.0))
                predicted = variant.factor("F(‖x̄_S‖)") * thetas.F(measure) > ratio * thetas.F(0.0)
                mixture = Mixture(family, np.stack([means, 0 * means]), np.array([1.0, -ratio]))
                directions = [means, *rng.standard_normal((3, size))]
                # w ∥ x̄_S to first order: v is small
                starts = [0.01 * d / np.linalg.norm(d) for d in directions]
                observed = any(_grows(mixture, start) for start in starts)
                yield float(bool(predicted) != observed)
                if size > 1:
                    yield from _single_tokens(make(1), means, ratio, variant)


def _single_tokens(family: Radial, means: Array, ratio: float, variant: Variant) -> Iterator[float]:
    """Whether the prediction of each token alone is wrong."""
    thetas = Thetas(family)
    for mean in means:
        predicted = variant.factor("F(‖x̄_S‖)") * thetas.F(mean) > ratio * thetas.F(0.0)
        mixture = Mixture(family, np.array([[mean], [0.0]]), np.array([1.0, -ratio]))
        yield float(bool(predicted) != _grows(mixture, np.array([0.01])))


@claim(
    "S4.convex",
    kind=Kind.EXTENSION,
    source="Section 4, Assumption 1 with a homogeneous activation",
    statement=(
        "With fixed gradients and homogeneous nodes ½(‖V‖² + ‖ξ‖²) is convex in time: its "
        "derivative is E = Σ_k E[g_k h_k], and Ė = ‖v̇‖² + ‖ξ̇‖² + ‖ż‖² ≥ 0, under any attention."
    ),
    tolerance=1e-6,
    measures=(
        "relative error of both identities, the first from the velocities and the second by "
        "central differences along the flow, at 36 random states: linear, ReLU and leaky ReLU "
        "nodes; linear, exp and softmax attention"
    ),
    remark=(
        "Once E > 0, all weights together grow for ever. While E < 0 they shrink, and V may grow "
        "at the expense of ξ and come to rest at a target that is finite (S4.finite_target): from "
        "a large bias attention comes back under Assumption 1 (S4.nonlinear_bounce)"
    ),
    control="cross-entropy, whose gradients move",
    derivation=(
        r"$h_k=\varphi(v_k^\top b+\xi_k)$ is homogeneous of degree one in $(v_k,\xi_k)$: Euler "
        r"gives $v\cdot\dot v+\xi\cdot\dot\xi=E$; the flow is $\nabla E$, so $\dot E=\|\nabla "
        r"E\|^2$."
    ),
    paper_formula=(
        "Assumption 1 and a homogeneous $\\varphi$ are assumed together; what that does to the "
        "size of the weights is not said"
    ),
    corrected_formula=r"$\tfrac12\frac{d}{dt}(\|V\|^2+\|\xi\|^2)=E,\quad \dot E=\|\nabla E\|^2$",
    terms=("E", "‖ż‖²"),
    mutants={"GELU": "an activation that is not homogeneous", "without ξ": "½‖V‖² alone"},
)
def s4_convex(variant: Variant) -> Iterator[float]:
    """Euler's identity and the gradient flow's own, at random states."""
    rng = np.random.default_rng(4)
    activations = ("gelu",) * 3 if variant.has("GELU") else ("linear", "relu", "leaky_relu")
    kind = "cross-entropy" if variant == "control" else "fixed"
    for n in range(36):
        activation, attention = activations[n % 3], ("linear", "exp", "softmax")[n // 3 % 3]
        task = with_gradients(inputs("uneven", rng, 5), kind, activation, rng, 1.0)
        flow = JointFlow(task, attention, activation)
        v, xi, z = small_start(task, rng, 0.7)
        speed = flow.block.smooth_velocity(v, xi, z)

        def objective(
            s: float, v: Array = v, xi: Array = xi, z: Array = z, flow: JointFlow = flow
        ) -> float:
            """E, s units of time along the velocity."""
            d = flow.block.smooth_velocity(v, xi, z)
            a = flow.block.forward(v + s * d.v, xi + s * d.xi, z + s * d.z)[1]
            h = flow.activation.phi(a)
            return float((flow.block.p[:, None] * flow.block.samples.gradient(h) * h).sum())

        E = objective(0.0)
        euler = (v * speed.v).sum() + (0.0 if variant.has("without ξ") else (xi * speed.xi).sum())
        yield abs(variant.factor("E") * E - euler) / max(0.01, abs(E))
        square = (
            (speed.v**2).sum() + (speed.xi**2).sum() + variant.factor("‖ż‖²") * (speed.z**2).sum()
        )
        yield abs((objective(1e-5) - objective(-1e-5)) / 2e-5 - square) / max(0.01, square)
