"""Claims on Theorem 2: linear activations, winner takes all."""

from __future__ import annotations

import numpy as np
from scipy.special import erf, erfinv

from joma.theory.claims._registry import Kind, claim
from joma.theory.flows import JointFlow
from joma.theory.setting import Array, Task
from joma.theory.winner import winner_take_all


def _spread(v: Array, delta: Array, divisor: float) -> float:
    """Relative spread over tokens of erf(v_l / divisor) / Δ_l."""
    ratio = erf(v / divisor) / delta
    return float((ratio.max() - ratio.min()) / np.abs(ratio).mean())


@claim(
    "T2.invariant",
    kind=Kind.WRONG,
    source="Theorem 2, Eqn. 4",
    statement="erf(v_l(t)/2)/Δ_lm is the same for all tokens l (exp attention, linear activation, zero start).",
    tolerance=1e-8,
    measures="relative spread of the ratio over tokens at 0.9 of the blow-up time",
    correction="erf(v_l/√2)/Δ_lm",
    control="v_l/Δ_lm, as without attention",
    derivation="v̇_l = Δ_l exp(v_l²/2)/A, so ∫ exp(−v²/2) dv = Δ_l t/A, and ∫₀^v exp(−u²/2) du = √(π/2) erf(v/√2).",
    paper_formula=r"$\frac{\operatorname{erf}(v_l(t)/2)}{\Delta_{lm}}=\frac{\operatorname{erf}(v_{l'}(t)/2)}{\Delta_{l'm}}$",
    corrected_formula=r"$\frac{\operatorname{erf}(v_l(t)/\sqrt2)}{\Delta_{lm}}=\frac{\operatorname{erf}(v_{l'}(t)/\sqrt2)}{\Delta_{l'm}}$",
)
def t2_invariant(variant: str) -> float:
    """Spread of the ratio along the joint flow."""
    rng = np.random.default_rng(0)
    x = rng.random((12, 7))
    flow = JointFlow(Task(x, rng.standard_normal((12, 1))), "exp", "linear")
    delta = flow.task.saliency().delta[:, 0]
    v = flow.integrate(0.9 * np.sqrt(np.pi / 2) / np.abs(delta).max(), times=3).v[-1, :, 0]
    if variant == "control":
        ratio = v / delta
        return float((ratio.max() - ratio.min()) / np.abs(ratio).mean())
    return _spread(v, delta, 2.0 if variant == "printed" else np.sqrt(2))


@claim(
    "T2.winner",
    kind=Kind.UNSAID,
    source="Theorem 2, remarks",
    statement="With l* = argmax |Δ_lm|, v_l* → sign(Δ_l*m) · ∞ and all other v_l converge to finite numbers.",
    tolerance=1e-6,
    measures="at the flow's own blow-up: relative error of its time, and of the other tokens against their predicted "
    "limits √2 erfinv(Δ_l/|Δ_l*|)",
    condition="the largest |Δ_lm| is unique; tokens that tie blow up together. The blow-up comes in finite time, at "
    "t* = A √(π/2)/max|Δ_lm|",
    control="the token with the second largest |Δ_lm| wins",
    paper_formula=r"$v_{l^*}(t)\to\operatorname{sign}(\Delta_{l^*m})\cdot\infty$ for the one $l^*=\arg\max_l|\Delta_{lm}|$",
    corrected_formula=r"every $l$ with $|\Delta_{lm}|=\max_{l'}|\Delta_{l'm}|$ blows up, at $t^*=A\sqrt{\pi/2}/\max_l|\Delta_{lm}|$; "
    r"the others stop at $\sqrt2\operatorname{erfinv}(\Delta_{lm}/\max|\Delta_{lm}|)$",
    derivation=r"$\sqrt{\pi/2}\operatorname{erf}(v_l/\sqrt2)=\Delta_{lm}t/A$. The left side is below $\sqrt{\pi/2}$, so $v_l$ is infinite "
    r"when $|\Delta_{lm}|t/A$ gets there: first, and together, for all tokens with the largest $|\Delta_{lm}|$.",
)
def t2_winner(variant: str) -> float:
    """Joint flow at its blow-up against the closed form."""
    rng = np.random.default_rng(1)
    x = rng.random((12, 6))
    if variant == "printed":  # a tie: tokens 0 and 1 always occur together
        x[:, 1] = x[:, 0]
        x[:, 0:2] += 2.0
    flow = JointFlow(Task(x, np.abs(rng.standard_normal((12, 1)))), "exp", "linear")
    exact = winner_take_all(flow)
    delta = exact.delta[:, 0]
    order = np.argsort(-np.abs(delta))
    winner = order[1] if variant == "control" else order[0]
    path = flow.integrate(2 * exact.blow_up_time)
    others = np.delete(np.arange(len(delta)), winner)
    ratio = np.clip(delta[others] / np.abs(delta[winner]), -1, 1)
    with np.errstate(divide="ignore"):
        limits = np.sqrt(2) * erfinv(ratio)
    time_error = abs(path.t[-1] * np.abs(delta[winner]) / np.sqrt(np.pi / 2) - 1)
    return float(max(time_error, np.abs(path.v[-1, others, 0] - limits).max()))


@claim(
    "T2.softmax_remark",
    kind=Kind.WRONG,
    source="Theorem 2, remarks",
    statement="For softmax attention Theorem 2 also applies if A[i] is constant across samples and all elements of b̄ are "
    "the same.",
    tolerance=1e-6,
    measures="relative spread of erf(v_l/√2)/Δ_l over tokens, for a flow that starts with both conditions fulfilled",
    correction="Both conditions for all time force x̄_l e^{z_l} = A/M with Σ_l z_l constant, so z is constant and v_l/Δ_l is "
    "common to all tokens, not the erf ratio; fulfilled at the start only, they are lost as soon as attention learns",
    control="the printed erf(v/2) on the exp flow",
    paper_formula=r"$A[i]=A,\ \bar b_m=\mathbf 1/M\;\Rightarrow\;\operatorname{erf}(v_l/2)/\Delta_{lm}$ is common to all $l$",
    corrected_formula=r"$A[i]=A,\ \bar b_m(t)=\mathbf 1/M\ \forall t\;\Rightarrow\;\dot z_m=0$ and $v_l/\Delta_{lm}$ is common to all $l$",
    derivation=r"$\bar b_l=\bar x_l e^{z_l}/A=1/M$ fixes $z_l$ up to $\ln A$, and $\sum_l z_l$ is constant under softmax, so $z$ is "
    r"constant. Then $\dot v_l=\Delta_{lm}e^{z_l}/A$ with constant factors: linear growth, no erf.",
    reference="exp attention on the same task",
)
def t2_softmax_remark(variant: str) -> float:
    """Spread of the ratio when b̄ is uniform and A equal for all samples at t = 0."""
    rng = np.random.default_rng(2)
    row = rng.random(6)
    x = np.stack([np.roll(row / row.sum(), n) for n in range(6)])  # doubly stochastic: A = 1, b̄ uniform at z = 0
    task = Task(x, np.abs(rng.standard_normal((6, 1))))
    attention = "softmax" if variant == "printed" else "exp"
    flow = JointFlow(task, attention, "linear")
    delta = task.saliency().delta[:, 0]
    t_end = 0.8 * np.sqrt(np.pi / 2) / np.abs(delta).max()
    v = flow.integrate(t_end, times=3).v[-1, :, 0]
    return _spread(v, delta, 2.0 if variant == "control" else np.sqrt(2))
