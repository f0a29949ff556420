"""Claims on Theorem 2: linear activations, winner takes all."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from scipy.special import erf, erfc, erfinv

from joma.paper.claims._registry import Kind, Variant, claim, largest
from joma.paper.claims.softmax import attention_at_rest, contexts
from joma.theory.flows import JointFlow
from joma.theory.setting import Array, Task
from joma.theory.trajectory import Trajectory

DRAWS = 12


def _spread(ratio: Array) -> float:
    """The spread over tokens, relative to the mean size."""
    return float((ratio.max() - ratio.min()) / np.abs(ratio).mean())


@dataclass(frozen=True)
class _LinearFlow:
    """The flow of a linear task with exp attention."""

    delta: Array  # (M,)
    A: float
    path: Trajectory


@functools.cache
def _paths(share: float, draws: int = DRAWS) -> tuple[_LinearFlow, ...]:
    """Flows of random tasks up to that share of the blow-up time.

    Gradients have both signs, and so has Δ; in half of the draws the token that wins has Δ < 0.
    """
    rng = np.random.default_rng(0)
    flows = []
    for n in range(draws):
        x = rng.random((12, 7))
        g = rng.standard_normal((12, 1))
        A = float(rng.uniform(0.5, 2.0))
        delta = Task(x, g).saliency().delta[:, 0]
        winner = float(delta[np.abs(delta).argmax()])
        if (winner < 0) != (n % 2 == 0):
            g = -g
        flow = JointFlow(Task(x, g), "exp", "linear", A=A)
        delta = flow.task.saliency().delta[:, 0]
        end = share * A * np.sqrt(np.pi / 2) / np.abs(delta).max()
        flows.append(_LinearFlow(delta, A, flow.integrate(end, times=3)))
    return tuple(flows)


def _varied(delta: Array, variant: Variant) -> Array:
    """Δ with the factor of its first entry, and of token l + 1 for that mutant."""
    factors = np.ones(len(delta))
    factors[0] = variant.factor("one Δ")
    return variant.shift("next token", delta * factors)


@claim(
    "T2.invariant",
    root="erf",
    kind=Kind.WRONG,
    source="Theorem 2, Eqns. 4 and 22",
    statement=(
        "erf(v_l(t)/2)/Δ_lm is the same for all tokens l (exp attention, linear activation, zero "
        "start)."
    ),
    tolerance=1e-8,
    measures=(
        "largest relative spread of the ratio over tokens at 0.9 of the blow-up time, twelve draws "
        "with Δ of both signs and A from 0.5 to 2"
    ),
    correction="erf(v_l/√2)/Δ_lm",
    counterexample=(
        "One sample x = (1, ½), g = 1: v̇_l = Δ_l e^{v_l²/2} with Δ = (1, ½). At t = 1, v = (1.28, "
        "0.52), so erf(v/2)/Δ = (0.63, 0.58), while erf(v/√2)/Δ = √(2/π)(1, 1)"
    ),
    control="v_l/Δ_lm, as without attention",
    derivation=(
        "v̇_l = Δ_l exp(v_l²/2)/A, so ∫ exp(−v²/2) dv = Δ_l t/A, and ∫₀^v exp(−u²/2) du = √(π/2) "
        "erf(v/√2)."
    ),
    paper_formula=(
        r"$\frac{\operatorname{erf}(v_l(t)/2)}{\Delta_{lm}}=\frac{\operatorname{erf}(v_{l'}(t)/2)}{"
        r"\Delta_{l'm}}$"
    ),
    corrected_formula=(
        r"$\frac{\operatorname{erf}(v_l(t)/\sqrt2)}{\Delta_{lm}}=\frac{"
        r"\operatorname{erf}(v_{l'}(t)/\sqrt2)}{\Delta_{l'm}}$"
    ),
    terms=("argument of erf", "one Δ"),
    mutants={"all Δ × 1.01": "every Δ_lm × 1.01", "next token": "Δ of token l + 1"},
    equivalent={
        "all Δ × 1.01": "an overall factor of a homogeneous statement",
        "−argument of erf": "erf is odd: an overall sign",
    },
)
def t2_invariant(variant: Variant) -> Iterator[float]:
    """Measure the spread of the ratio along the joint flow."""
    all_delta = variant.choose(1.0, {"all Δ × 1.01": 1.01})
    divisor = variant.choose(np.sqrt(2), {"printed": 2.0})
    for flow in _paths(0.9):
        v = flow.path.v[-1, :, 0]
        delta = _varied(flow.delta, variant) * all_delta
        if variant == "control":
            yield _spread(v / delta)
        else:
            yield _spread(erf(variant.factor("argument of erf") * v / divisor) / delta)


@claim(
    "T2.winner",
    source="Theorem 2, remarks",
    statement=(
        "With l* = argmax |Δ_lm|, v_l* → sign(Δ_l*m) · ∞ and all other v_l converge to finite "
        "numbers."
    ),
    tolerance=1e-6,
    measures=(
        "at the flow's own blow-up, six draws, half of them with Δ_l* < 0: 1 − sign(Δ_l*) "
        "erf(v_l*/√2), the relative error of the time, and the other tokens' distance from √2 "
        "erfinv(Δ_l/|Δ_l*|)"
    ),
    remark=(
        "The blow-up comes in finite time, at t* = A √(π/2)/max|Δ_lm|, and the others stop at √2 "
        "erfinv(Δ_l/|Δ_l*|). Tokens with exactly the same |Δ| (measure zero) blow up together"
    ),
    control="the token with the second largest |Δ_lm| wins",
    derivation=(
        r"$\sqrt{\pi/2}\operatorname{erf}(v_l/\sqrt2)=\Delta_{lm}t/A$. The left side is below "
        r"$\sqrt{\pi/2}$, so $v_l$ is infinite when $|\Delta_{lm}|t/A$ gets there: first for the "
        r"token with the largest $|\Delta_{lm}|$."
    ),
    terms=("limits of the others", "blow-up time"),
    mutants={
        "v → +∞": "the sign of Δ_l*m left out",
        "largest Δ": "l* = argmax Δ_lm, without the absolute value",
    },
)
def t2_winner(variant: Variant) -> Iterator[float]:
    """Compare the joint flow at its blow-up with the closed form."""
    for flow in _paths(2.0, 6):
        if flow.path.done:
            raise ArithmeticError("the flow did not blow up")
        delta = flow.delta
        size = np.abs(delta)
        if variant.has("largest Δ"):
            size = delta
        place = variant.choose(0, {"control": 1})
        winner = np.argsort(-size)[place]
        sign = np.sign(delta[winner])
        if variant.has("v → +∞"):
            sign = 1.0
        yield float(erfc(sign * flow.path.v[-1, winner, 0] / np.sqrt(2)))
        end = variant.factor("blow-up time") * flow.A * np.sqrt(np.pi / 2) / np.abs(delta[winner])
        yield float(abs(flow.path.t[-1] / end - 1))
        others = np.delete(np.arange(len(delta)), winner)
        with np.errstate(divide="ignore"):
            limits = np.sqrt(2) * erfinv(np.clip(delta[others] / np.abs(delta[winner]), -1, 1))
        limits = variant.factor("limits of the others") * limits
        yield largest(flow.path.v[-1, others, 0] - limits)


@claim(
    "T2.saliency",
    source="Section 3.1 and footnote 1",
    statement="Δ_lm = E_{q=m}[g x_l] = E_{l,q=m}[g] · P(l|m): discriminancy × frequency.",
    tolerance=1e-14,
    measures=(
        "largest difference over 20 tasks from a count: draw a sample, then a token of it, both "
        "enumerated"
    ),
    control="P(l|m) without the weights of the samples",
    terms=("E[g x]", "discriminancy", "frequency"),
)
def t2_saliency(variant: Variant) -> Iterator[float]:
    """Compare E[g x_l] with the two factors, enumerated."""
    rng = np.random.default_rng(2)
    for _ in range(20):
        x = rng.dirichlet(np.ones(5), size=9)
        g = rng.standard_normal((9, 2))
        p = rng.dirichlet(np.ones(9))
        joint = p[:, None] * x  # P(sample i, token l)
        frequency = joint.sum(axis=0)  # P(l|m)
        if variant == "control":
            frequency = x.mean(axis=0)
        sample_given_token = joint / joint.sum(axis=0)  # P(sample | token)
        discriminancy = variant.factor("discriminancy") * (sample_given_token.T @ g)  # (M, K)
        product = discriminancy * variant.factor("frequency") * frequency[:, None]
        delta = variant.factor("E[g x]") * Task(x, g, p).saliency().delta
        yield largest(delta - product)


@claim(
    "T2.correlation",
    kind=Kind.UNSAID,
    source="Section 3.1, beyond distinct and common tokens",
    statement=(
        "E_{l,q=m}[g] > 0 means that token l is positively correlated to the backpropagated "
        "gradient g."
    ),
    tolerance=0.0,
    measures=(
        "share of tokens and nodes whose E_{l,q=m}[g] has another sign than the covariance of x_l "
        "and g over the samples: 20 tasks with nine weighted samples, five tokens, three nodes"
    ),
    condition=(
        "E_{q=m}[g] = 0, as for a softmax loss whose outputs have the frequencies of the labels. "
        "With the gradient of Section 2, g ~ 1[y₀ = k], E_{l,q=m}[g] = P(y₀ = k | l) is positive "
        "for every token"
    ),
    counterexample=(
        "two samples with g = 1 and 3, and a token with x_l = ½ in both: E_{l,q=m}[g] = 2 > 0, and "
        "x_l, which is constant, is correlated with nothing. So a common token can have Δ_lm = 1, "
        "not 0"
    ),
    control="E[g] over the samples without their weights",
    paper_formula=(r"$\mathbb E_{l,q=m}[g_{h_k}]>0\iff l$ is positively correlated to $g_{h_k}$"),
    corrected_formula=(
        r"$\mathrm{Cov}(x_l,g_{h_k})=\big(\mathbb E_{l,q=m}[g_{h_k}]-\mathbb "
        r"E_{q=m}[g_{h_k}]\big)\,\mathbb P(l|m)$"
    ),
    derivation=(
        r"$\mathrm{Cov}(x_l,g)=\mathbb E[gx_l]-\mathbb E[g]\,\mathbb E[x_l]$, with $\mathbb "
        r"E[gx_l]=\mathbb E_l[g]\,\mathbb P(l|m)$ (T2.saliency) and $\mathbb E[x_l]=\mathbb P(l|m)$."
    ),
    mutants={"E[g] = 0.1": "a mean gradient of a tenth of its spread is left"},
)
def t2_correlation(variant: Variant) -> Iterator[float]:
    """Compare the sign of E_l[g] with that of the covariance."""
    rng = np.random.default_rng(29)
    for _ in range(20):
        x = rng.dirichlet(np.ones(5), size=9)
        g = 0.5 + rng.standard_normal((9, 3))
        p = rng.dirichlet(np.ones(9))
        weights = variant.choose(p, {"control": np.full(9, 1 / 9)})
        if variant != "printed":
            g = g - weights @ g
        if variant.has("E[g] = 0.1"):
            g = g + 0.1
        frequency = p @ x  # P(l|m)
        discriminancy = (p[:, None] * x).T @ g / frequency[:, None]  # E_l[g], (M, K)
        deviation = x - frequency
        covariance = (p[:, None] * deviation).T @ (g - p @ g)  # (M, K)
        yield float(((discriminancy > 0) != (covariance > 0)).mean())


@claim(
    "T2.softmax_remark",
    root="softmax",
    kind=Kind.WRONG,
    source="Theorem 2, remarks",
    statement=(
        "For softmax attention, if A[i] remains constant across samples and all elements of b̄ are "
        "the same, Theorem 2 also applies."
    ),
    tolerance=1e-9,
    measures=(
        "relative spread over tokens of erf(v_l/√2)/Δ_l (the corrected Theorem 2) and of v_l/Δ_l, "
        "on flows that fulfil both conditions at all times (A[i] = 1 and b̄ = 1/M to 1e-12 at t = "
        "2; six draws)"
    ),
    correction=(
        "v_l/Δ_lm is common to all tokens: both conditions for all time force x̄_l e^{z_l} = A/M "
        "with Σ_l z_l constant, so z is constant and v grows linearly. Fulfilled at the start "
        "only, they are lost as soon as attention learns"
    ),
    counterexample=(
        "Three tokens, alone (g = 2, −3, −3) and in the pairs 12, 13, 23 (g = 0, 0, 4), equally "
        "often, K = 1. At z = 0, A[i] = 1, b̄ = (⅓, ⅓, ⅓), Δ = E[g x] = (2, −1, −1)/6 and (diag Δ − "
        "E[g b bᵀ])Δ = 0, so z = 0 for ever and v = Δ t. At t = 6, v = (2, −1, −1): erf(v/√2)/Δ = "
        "(2.86, 4.10, 4.10)"
    ),
    control="erf(v_l/2)/Δ_l, as printed in Theorem 2",
    paper_formula=(
        r"$A[i]=A,\ \bar b_m=\mathbf 1/M\;\Rightarrow\;\operatorname{erf}(v_l/2)/\Delta_{lm}$ is "
        r"common to all $l$"
    ),
    corrected_formula=(
        r"$A[i]=A,\ \bar b_m=\mathbf 1/M\;\Rightarrow\;\dot z_m=0$ and $v_l/\Delta_{lm}$ is common "
        r"to all $l$"
    ),
    derivation=(
        r"$\bar b_l=\bar x_l e^{z_l}/A=1/M$ fixes $z_l$ up to $\ln A$, and $\sum_l z_l$ is "
        r"constant under softmax, so $z$ is constant. Then $\dot v_l=\Delta_{lm}e^{z_l}/A$ with "
        r"constant factors: linear growth, no erf."
    ),
    terms=("one Δ",),
    mutants={"next token": "Δ of token l + 1"},
)
def t2_softmax_remark(variant: Variant) -> Iterator[float]:
    """Measure the spread of the ratio while b̄ is uniform and A equal for all samples."""
    for g in _gradients_at_rest():
        M = int(np.sqrt(2 * len(g)))
        task = Task(contexts(M), g[:, None])
        delta = task.saliency().delta[:, 0]
        path = JointFlow(task, "softmax", "linear").integrate(2.0 / np.abs(delta).max(), times=3)
        A = task.x @ np.exp(path.z[-1])
        b_bar = task.p @ path.attention()
        if max(largest(A - 1), largest(b_bar - 1 / M)) > 1e-12:
            raise ArithmeticError("the conditions of the remark are not fulfilled")
        v = path.v[-1, :, 0]
        delta = _varied(delta, variant)
        if variant == "corrected":
            yield _spread(v / delta)
        else:
            divisor = variant.choose(np.sqrt(2), {"control": 2.0})
            yield _spread(erf(v / divisor) / delta)


def _gradients_at_rest() -> Iterator[Array]:
    """Gradients of `contexts` under which softmax attention never moves."""
    rng = np.random.default_rng(2)
    yield np.array([2.0, -3.0, -3.0, 0.0, 0.0, 4.0])
    for M in (3, 3, 4, 4, 5):
        size = rng.uniform(0.3, 1.0, size=M)
        yield attention_at_rest(size * rng.choice([-1, 1], size=M))
