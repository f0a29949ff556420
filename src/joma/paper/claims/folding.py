"""Claims behind `joma.nn.JoMABlock`: blocks that are trained without attention parameters, step by step (Section 3)."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from joma.paper.claims._registry import Kind, Variant, claim
from joma.theory.flows import JointFlow
from joma.theory.optimisers import SGD
from joma.theory.queries import BlockFlow
from joma.theory.setting import Array
from joma.theory.tasks import random_gradients, small_start

STEPS, STEP, ACTIVATIONS = 200, 0.01, ("relu", "gelu")
Law = Callable[[JointFlow, Array, Array, Array], Array]  # flow, v, Δv, z -> Δz


def _gap(attention: str, law: Law, momentum: float = 0.0) -> Iterator[float]:
    """The largest difference in z and v between joint descent and a block whose z moves by a law of v alone."""
    rng = np.random.default_rng(14)
    for activation in ACTIVATIONS:
        task = random_gradients(rng, samples=20, tokens=8, nodes=4)
        v, xi, z = small_start(task, rng, 0.5)
        z = z + 0.1 if attention == "linear" else z - 1.0
        flow = JointFlow(task, attention, activation, attention_lr=3.0, temperature=0.8)
        step = (6 * STEP if attention == "linear" else STEP) * (1 - momentum)
        path = flow.descend(STEPS, step, v, xi, z, optimiser=SGD(momentum))
        if not path.done:
            raise ArithmeticError(path.status)
        if attention == "linear" and not (np.sign(path.z) != np.sign(path.z[0])).any():
            raise ArithmeticError("no logit passed through 0: nothing was checked there")
        step_v, step_xi, worst = np.zeros_like(v), np.zeros_like(xi), 0.0
        for n in range(STEPS):
            velocity = flow.block.smooth_velocity(v, xi, z)
            step_v = momentum * step_v + step * velocity.v
            step_xi = momentum * step_xi + step * velocity.xi
            z = z + law(flow, v, step_v, z)
            v, xi = v + step_v, xi + step_xi
            worst = max(
                worst,
                float(np.abs(z - path.z[n + 1]).max()),
                float(np.abs(v - path.v[n + 1]).max()),
            )
        yield worst / float(np.abs(path.z - path.z[0]).max())


def _factor(flow: JointFlow, variant: Variant) -> float:
    """r/T, or r for linear attention; as the variant has it."""
    T = (
        1.0
        if flow.attention.kind == "linear" or variant.has("T left out")
        else flow.attention.temperature
    )
    return (1.0 if variant.has("r left out") else flow.ratio) / T


_MUTANTS = {
    "r left out": "the ratio of the rates",
    "v after the step": "v + Δv in the place of v",
    "next token": "Σ v ∘ Δv of token l + 1 in the place of token l",
}
_MEASURES = (
    "largest difference in z and v from the block with trained attention over 200 steps, relative "
    "to the way of z, ReLU and GELU"
)


def _drive(flow: JointFlow, v: Array, dv: Array, variant: Variant) -> Array:
    """(r/T) Σ v ∘ Δv, (M,)."""
    at = v + dv if variant.has("v after the step") else v + dv / 2 if variant == "control" else v
    total = variant.factor("Σ v ∘ Δv") * _factor(flow, variant) * (at * dv).sum(axis=1)
    return np.roll(total, 1) if variant.has("next token") else total


@claim(
    "FOLD.exp",
    kind=Kind.EXTENSION,
    source="Section 3: no need to update attention; for gradient descent",
    statement=(
        "A block without attention parameters whose logits move by Δz = (r/T) Σ_k v_k ∘ Δv_k when "
        "a step moves v by Δv is the block with exp attention trained by gradient descent, to "
        "rounding."
    ),
    tolerance=1e-11,
    measures=_MEASURES,
    control="the first integral of the flow, z = (r/2T) Σ v² + c, at every step",
    derivation=(
        "∂L/∂z = (1/T) Σ v ∘ ∂L/∂v for exp attention, and both are stepped by descent. It is the "
        "first integral with the exact term of its steps: Δ(½v²) = v ∘ Δv + ½Δv²"
    ),
    paper_formula=r"gradient flow: $z=\tfrac12\sum_kv_k^2+c$",
    corrected_formula=r"gradient descent: $\Delta z=\tfrac rT\sum_kv_k\circ\Delta v_k$",
    terms=("Σ v ∘ Δv",),
    mutants={**_MUTANTS, "T left out": "the temperature"},
)
def fold_exp(variant: Variant) -> Iterator[float]:
    """Folded against joint descent."""
    return _gap("exp", lambda flow, v, dv, z: _drive(flow, v, dv, variant))


@claim(
    "FOLD.linear",
    kind=Kind.EXTENSION,
    source="Section 3: no need to update attention; for gradient descent",
    statement=(
        "With Δz = r Σ_k v_k ∘ Δv_k / z the same holds for linear attention, through zeros of z "
        "too, where z changes its sign."
    ),
    tolerance=1e-10,
    measures=_MEASURES,
    remark=(
        "A logit that is exactly 0 stays there in the folded block, which has to refuse it: v of "
        "that token does not move"
    ),
    control="v + Δv/2 in the place of v",
    derivation="∂L/∂v = z ∘ X and ∂L/∂z = Σ v ∘ X with the same X, so z ∘ Δz = r Σ v ∘ Δv",
    paper_formula=r"gradient flow: $z^2=\sum_kv_k^2+c$",
    corrected_formula=r"gradient descent: $z\circ\Delta z=r\sum_kv_k\circ\Delta v_k$",
    terms=("Σ v ∘ Δv",),
    mutants={**_MUTANTS, "z after the step": "z + Δz in the place of z"},
)
def fold_linear(variant: Variant) -> Iterator[float]:
    """Folded against joint descent."""

    def law(flow: JointFlow, v: Array, dv: Array, z: Array) -> Array:
        dz: Array = _drive(flow, v, dv, variant) / z
        return _drive(flow, v, dv, variant) / (z + dz) if variant.has("z after the step") else dz

    return _gap("linear", law)


@claim(
    "FOLD.momentum",
    kind=Kind.EXTENSION,
    source="Section 3: no need to update attention; for SGD with momentum",
    statement=(
        "Under heavy-ball momentum μ both hold with R added to Σ v ∘ Δv, where R⁺ = μ (R − (r/T) Σ "
        "Δv²) for exp and R⁺ = μ (R + Δz² − r Σ Δv²) for linear attention: one number per token."
    ),
    tolerance=1e-9,
    measures=_MEASURES,
    control="R left out: the law of plain gradient descent",
    derivation=(
        "B(θ, Δ) = Δz − (r/T) Σ v ∘ Δv vanishes for the gradient; momentum carries on what it was "
        "in the step before, at the new θ: R⁺ = μ (R + B(Δ, Δ)), see OPT.sgd"
    ),
    paper_formula=r"gradient flow: $z=\tfrac12\sum_kv_k^2+c$",
    corrected_formula=(
        r"$\Delta z=\tfrac rT\sum_kv_k\circ\Delta v_k+R,\quad R^+=\mu\,(R-\tfrac rT\sum_k(\Delta "
        r"v_k)^2)$"
    ),
    terms=("Σ v ∘ Δv", "Δv²", "Δz²"),
    mutants={"μ × 1.01": "the momentum"},
)
def fold_momentum(variant: Variant) -> Iterator[float]:
    """Folded against joint descent with momentum."""
    mu = 0.7 * (1.01 if variant.has("μ × 1.01") else 1.0)
    for attention in ("exp", "linear"):
        memory = np.zeros(8)

        def law(
            flow: JointFlow, v: Array, dv: Array, z: Array, linear: bool = attention == "linear"
        ) -> Array:
            nonlocal memory
            scale = flow.ratio if linear else flow.ratio / flow.attention.temperature
            drive = variant.factor("Σ v ∘ Δv") * scale * (v * dv).sum(axis=1)
            dz = drive if variant == "control" else drive + memory
            dz = dz / z if linear else dz
            square = variant.factor("Δz²") * dz**2 if linear else 0.0
            memory = mu * (memory + square - variant.factor("Δv²") * scale * (dv**2).sum(axis=1))
            return np.asarray(dz)

        for worst in _gap(attention, law, 0.7):
            memory = np.zeros(8)  # of the next activation
            yield worst


@claim(
    "FOLD.queries",
    kind=Kind.EXTENSION,
    source="Section 3: no need to update attention; many queries",
    statement=(
        "Queries that share the MLP: with ΔV_m, what query m's samples bring to v in a step, Δz_m "
        "= (r/T) Σ_k v_k ∘ ΔV_mk (exp) and z_m ∘ Δz_m = r Σ_k v_k ∘ ΔV_mk (linear) are exact. The "
        "weights alone fix the sum over m."
    ),
    tolerance=1e-10,
    measures=(
        "largest difference in z from the block with trained attention over 100 steps, relative to "
        "the way of z: three queries, both attentions"
    ),
    control="every query is given the mean ΔV_m of all queries",
    derivation=(
        "v is shared, so that ∂L/∂z_m = (1/T) Σ v ∘ ∂L_m/∂v with L_m the loss of query m's "
        "samples, Δv = Σ_m ΔV_m"
    ),
    paper_formula=r"one query: $z_m=\tfrac12\sum_kv_k^2+c$",
    corrected_formula=(
        r"many: $\Delta z_m=\tfrac rT\sum_kv_k\circ\Delta V_{mk},\quad\Delta v=\sum_m\Delta V_m$"
    ),
    terms=("Σ v ∘ ΔV",),
    mutants={
        "next query": "the part of query m + 1",
        "T left out": "the temperature, in exp",
        "own part for v": "V_m in the place of v",
    },
)
def fold_queries(variant: Variant) -> Iterator[float]:
    """Folded by parts against joint descent."""
    rng = np.random.default_rng(15)
    for attention in ("exp", "linear"):
        task = random_gradients(rng, samples=18, tokens=6, nodes=3)
        flow = BlockFlow(
            task, np.arange(18) % 3, attention, "gelu", attention_lr=3.0, temperature=0.8
        )
        v0 = 0.5 * rng.standard_normal((6, 3))
        z0 = 0.3 * rng.standard_normal((3, 6)) + (1.5 if attention == "linear" else -1.0)
        path = flow.descend(100, 0.02, v0, None, z0)
        v, xi, z, total = v0, path.xi[0], z0, np.zeros((3, 6, 3))
        scale = flow.ratio / (0.8 if attention == "exp" and not variant.has("T left out") else 1.0)
        for _ in range(100):
            b, a = flow.block.forward(v, xi, z)
            s = flow.block.forces(a, flow.activation.derivative(a))
            parts = 0.02 * np.einsum("iq,il,ik->qlk", flow.block.one_hot, b, s)  # (Q, M, K)
            xi, total = xi + 0.02 * flow.block.one_hot.T @ s, total + parts
            used = (
                np.broadcast_to(parts.mean(axis=0), parts.shape) if variant == "control" else parts
            )
            used = np.roll(used, 1, axis=0) if variant.has("next query") else used
            along = variant.factor("Σ v ∘ ΔV") * (
                (total if variant.has("own part for v") else v) * used
            ).sum(axis=2)
            z = z + scale * (along / z if attention == "linear" else along)
            v = v + parts.sum(axis=0)
        yield float(np.abs(z - path.z[-1]).max() / np.abs(path.z[-1] - z0).max())
