"""Claims on Theorem 2: linear activations, winner takes all."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import numpy as np
from scipy.special import erf, erfc, erfinv

from joma.paper.claims._registry import Kind, Variant, claim
from joma.paper.claims.softmax import attention_at_rest, contexts
from joma.theory.flows import JointFlow
from joma.theory.setting import Array, Task
from joma.theory.trajectory import Trajectory

DRAWS = 12


def _spread(ratio: Array) -> float:
    """Relative spread over tokens."""
    return float((ratio.max() - ratio.min()) / np.abs(ratio).mean())


@functools.cache
def _paths(share: float, draws: int = DRAWS) -> tuple[tuple[Array, float, Trajectory], ...]:
    """Δ (M,), A and the flow of random linear tasks with exp attention up to that share of the blow-up time.

    Gradients of both signs, so Δ has both; in half of the draws the token that wins has Δ < 0.
    """
    rng = np.random.default_rng(0)
    paths = []
    for n in range(draws):
        x, g, A = rng.random((12, 7)), rng.standard_normal((12, 1)), float(rng.uniform(0.5, 2.0))
        delta = Task(x, g).saliency().delta[:, 0]
        winner = float(delta[np.abs(delta).argmax()])
        g = g if (winner < 0) == (n % 2 == 0) else -g
        flow = JointFlow(Task(x, g), "exp", "linear", A=A)
        delta = flow.task.saliency().delta[:, 0]
        paths.append(
            (
                delta,
                A,
                flow.integrate(share * A * np.sqrt(np.pi / 2) / np.abs(delta).max(), times=3),
            )
        )
    return tuple(paths)


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
    """Spread of the ratio along the joint flow."""
    for delta, _, path in _paths(0.9):
        v, factors = path.v[-1, :, 0], np.ones(len(delta))
        factors[0] = variant.factor("one Δ")
        delta = delta * factors * (1.01 if variant.has("all Δ × 1.01") else 1.0)
        delta = np.roll(delta, 1) if variant.has("next token") else delta
        argument = (
            variant.factor("argument of erf") * v / (2.0 if variant == "printed" else np.sqrt(2))
        )
        yield _spread((v if variant == "control" else erf(argument)) / delta)


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
    """Joint flow at its blow-up against the closed form."""
    for delta, A, path in _paths(2.0, 6):
        if path.done:
            raise ArithmeticError("the flow did not blow up")
        size = delta if variant.has("largest Δ") else np.abs(delta)
        winner = np.argsort(-size)[1 if variant == "control" else 0]
        sign = 1.0 if variant.has("v → +∞") else np.sign(delta[winner])
        yield float(erfc(sign * path.v[-1, winner, 0] / np.sqrt(2)))
        t_star = variant.factor("blow-up time") * A * np.sqrt(np.pi / 2) / np.abs(delta[winner])
        yield float(abs(path.t[-1] / t_star - 1))
        others = np.delete(np.arange(len(delta)), winner)
        with np.errstate(divide="ignore"):
            limits = np.sqrt(2) * erfinv(np.clip(delta[others] / np.abs(delta[winner]), -1, 1))
        yield float(
            np.abs(path.v[-1, others, 0] - variant.factor("limits of the others") * limits).max()
        )


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
    """E[g x_l] against the two factors, enumerated."""
    rng = np.random.default_rng(2)
    for _ in range(20):
        x, g, p = (
            rng.dirichlet(np.ones(5), size=9),
            rng.standard_normal((9, 2)),
            rng.dirichlet(np.ones(9)),
        )
        joint = p[:, None] * x  # P(sample i, token l)
        share = x.mean(axis=0) if variant == "control" else joint.sum(axis=0)  # P(l|m)
        given = joint / joint.sum(axis=0)  # P(sample | token)
        product = (
            variant.factor("discriminancy")
            * (given.T @ g)
            * variant.factor("frequency")
            * share[:, None]
        )
        yield float(
            np.abs(variant.factor("E[g x]") * Task(x, g, p).saliency().delta - product).max()
        )


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
    """Spread of the ratio while b̄ is uniform and A equal for all samples."""
    rng = np.random.default_rng(2)
    gradients = [np.array([2.0, -3.0, -3.0, 0.0, 0.0, 4.0])]
    gradients += [
        attention_at_rest(rng.uniform(0.3, 1.0, size=M) * rng.choice([-1, 1], size=M))
        for M in (3, 3, 4, 4, 5)
    ]
    for g in gradients:
        M = int(np.sqrt(2 * len(g)))
        task = Task(contexts(M), g[:, None])
        delta = task.saliency().delta[:, 0]
        path = JointFlow(task, "softmax", "linear").integrate(2.0 / np.abs(delta).max(), times=3)
        A, b_bar = task.x @ np.exp(path.z[-1]), task.p @ path.attention()
        if max(np.abs(A - 1).max(), np.abs(b_bar - 1 / M).max()) > 1e-12:
            raise ArithmeticError("the conditions of the remark are not fulfilled")
        v, factors = path.v[-1, :, 0], np.ones(M)
        factors[0] = variant.factor("one Δ")
        delta = delta * factors
        delta = np.roll(delta, 1) if variant.has("next token") else delta
        if variant == "corrected":
            yield _spread(v / delta)
        else:
            yield _spread(erf(v / (2.0 if variant == "control" else np.sqrt(2))) / delta)
