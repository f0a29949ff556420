"""Claims on training with momentum, weight decay, sign descent and Adam (beyond Theorems 1 and 2)."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice

import numpy as np

from joma.paper.claims._registry import Kind, Variant, claim
from joma.theory.flows import JointFlow
from joma.theory.optimisers import SGD, Adam, Optimiser, SignDescent, sgd_law, walk
from joma.theory.setting import Array, Task
from joma.theory.tasks import random_gradients, small_start
from joma.theory.trajectory import Trajectory


@functools.cache
def _trained(attention: str, optimiser: Optimiser, nodes: int = 3, steps: int = 80) -> Trajectory:
    rng = np.random.default_rng(0)
    task = random_gradients(rng, samples=10, tokens=4, nodes=nodes)
    start = small_start(task, rng, 0.5)
    flow = JointFlow(task, attention, "gelu", mlp_lr=0.8, attention_lr=1.7, temperature=1.4)
    path = flow.descend(
        steps, 0.02, start.v0, start.xi0, start.z0 - 2 * (attention == "exp"), optimiser=optimiser
    )
    if not path.done:
        raise ArithmeticError(path.status)
    return path


@claim(
    "OPT.sgd",
    kind=Kind.EXTENSION,
    source="Theorem 1, under SGD with momentum and weight decay",
    statement=(
        "Per step Q = z − (r/2T) Σ v² changes by R_t − (r/2T) Σ Δv_t² with R_t = μ (R_{t−1} − "
        "(r/T) Σ Δv_{t−1}²) + h ((r/T) λ_v Σ v_t² − λ_z z_t), exactly; likewise for linear "
        "attention and for Nesterov's momentum."
    ),
    tolerance=1e-13,
    measures=(
        "largest deviation over 80 steps, relative to max(1, max|z|): five settings, both "
        "attentions"
    ),
    control="the law of plain gradient descent",
    derivation=(
        "the gradient identity ∂_z = (1/T) Σ_k v_k ∂_{v_k} makes B(θ, gradient) vanish; what is "
        "left of B(θ, Δ) is what momentum remembers and decay takes. In continuous time Q̈ + γQ̇ = "
        "−(r/T) Σ v̇², and a kernel (r/T)(λ_v − λ_z/2)"
    ),
    paper_formula=r"gradient flow: $z-\tfrac12\sum_k v_k^2=c$",
    corrected_formula=r"$\Delta Q_t=R_t-\tfrac{r}{2T}\sum_k(\Delta v_{k,t})^2$, $R_t$ as stated",
    terms=("the law",),
    mutants={
        "μ × 1.01": "the momentum",
        "λ_v × 1.01": "the decay of v",
        "λ_z × 0.99": "the decay of z",
        "Nesterov taken for the heavy ball": "the look ahead left out",
    },
)
def opt_sgd(variant: Variant) -> Iterator[float]:
    """The law along trained paths."""
    settings = (
        SGD(0.7),
        SGD(0.7, 0.05),
        SGD(0.0, (0.1, 0.03)),
        SGD(0.8, nesterov=True),
        SGD(0.8, (0.1, 0.2), True),
    )
    for attention in ("exp", "linear"):
        for optimiser in settings:
            path = _trained(attention, optimiser)
            value = path.invariant().value
            stated = SGD() if variant == "control" else _mutated(optimiser, variant)
            law = variant.factor("the law") * sgd_law(path.flow, stated, 0.02, path.v, path.z)
            yield float(np.abs(value - value[0] - law).max() / max(1.0, np.abs(path.z).max()))


def _mutated(optimiser: SGD, variant: Variant) -> SGD:
    """The optimiser whose law the variant states."""
    decay = optimiser.weight_decay
    of_v, of_z = decay if isinstance(decay, tuple) else (decay, decay)
    of_v, of_z = (
        of_v * (1.01 if variant.has("λ_v × 1.01") else 1.0),
        of_z * (0.99 if variant.has("λ_z × 0.99") else 1.0),
    )
    momentum = optimiser.momentum * (1.01 if variant.has("μ × 1.01") else 1.0)
    nesterov = optimiser.nesterov and not variant.has("Nesterov taken for the heavy ball")
    return replace(optimiser, momentum=momentum, weight_decay=(of_v, of_z), nesterov=nesterov)


@functools.cache
def _decayed() -> tuple[Trajectory, ...]:
    """Training with one weight decay to rest, three rates and temperatures."""
    rng = np.random.default_rng(1)
    out = []
    for r, T in ((0.5, 0.8), (1.0, 1.0), (2.5, 1.3)):
        task = random_gradients(rng, samples=9, tokens=4, nodes=3)
        flow = JointFlow(task, "exp", attention_lr=r, temperature=T)
        out.append(
            flow.descend(3000, 0.04, *small_start(task, rng, 0.5), optimiser=SGD(weight_decay=0.7))
        )
    return tuple(out)


@claim(
    "OPT.rest",
    kind=Kind.EXTENSION,
    source="Theorem 1, under weight decay",
    statement=(
        "With one weight_decay for all parameters, exp attention comes to rest at z = Σ_k v_k²/T, "
        "whatever the learning rates: at T = 1 twice the printed coefficient."
    ),
    tolerance=1e-8,
    measures="largest |z − Σ v²/T| after training to rest, three rates and temperatures",
    control="z = (r/2T) Σ v²",
    derivation="at rest λz = ∂_z = (1/T) Σ v ∂_v = (λ/T) Σ v²",
    paper_formula=r"without decay: $z=\tfrac12\sum_k v_k^2+c$",
    corrected_formula=r"at rest $z=\tfrac1T\sum_k v_k^2$",
    terms=("Σ v²",),
)
def opt_rest(variant: Variant) -> Iterator[float]:
    """Logits at rest."""
    for path in _decayed():
        r, T = path.flow.ratio, path.flow.attention.temperature
        coefficient = r / (2 * T) if variant == "control" else variant.factor("Σ v²") / T
        yield float(np.abs(path.z[-1] - coefficient * (path.v[-1] ** 2).sum(axis=1)).max())


@claim(
    "OPT.sign",
    kind=Kind.EXTENSION,
    source="Theorem 1, under sign descent",
    statement=(
        "With one node, sign descent conserves z − r|v| in every step in which v keeps its sign."
    ),
    tolerance=1e-13,
    measures="largest change per step, over the steps in which v keeps its sign",
    control="z − (r/2T) v²",
    derivation="Δz = h η_z sgn(v) sgn(∂_v) = r sgn(v) Δv",
    paper_formula=r"gradient flow: $z-\tfrac12v^2=c$",
    corrected_formula=r"$z-r|v|=c$ while $v$ keeps its sign",
    terms=("|v|",),
)
def opt_sign(variant: Variant) -> float:
    """The change per step."""
    path = _trained("exp", SignDescent(), nodes=1)
    v, r, T = path.v[:, :, 0], path.flow.ratio, path.flow.attention.temperature
    kept = np.sign(v[1:]) == np.sign(v[:-1])
    q = path.z - (
        r / (2 * T) * v**2 if variant == "control" else variant.factor("|v|") * r * np.abs(v)
    )
    return float(np.abs(np.diff(q, axis=0)[kept]).max())


def _memory(beta: float, rate: float, steps: int) -> tuple[list[Array], Array, JointFlow, Array]:
    rng = np.random.default_rng(1)
    task = random_gradients(rng, samples=20, tokens=6, nodes=3)
    start = small_start(task, rng, 0.5)
    flow = JointFlow(task, "exp")
    system = flow._system((start.v0, start.xi0, start.z0 - 2, None))
    moments = list(islice(walk(system, Adam((beta, 0.999)), rate), steps))
    states = np.stack([system.y0, *(m.y for m in moments)])
    return [m.memory[0] for m in moments], states, flow, np.stack([m.memory[2] for m in moments])


def adam_error(beta: float, rate: float, steps: int, factor: float = 1.0) -> float:
    """‖D_z Δz − (r/T) Σ_k v_k D_k Δv_k‖ / ‖D_z Δz‖ over a run of Adam: zero for β₁ = 0 (the sum times ``factor``)."""
    _, states, flow, divisor = _memory(beta, rate, steps)
    M, K = flow.task.tokens, flow.task.nodes
    weighed = divisor * np.diff(states, axis=0)
    of_z, of_v = weighed[:, M * K + K :], weighed[:, : M * K].reshape(-1, M, K)
    predicted = (states[:-1, : M * K].reshape(-1, M, K) * of_v).sum(axis=2)
    return float(np.linalg.norm(of_z - factor * predicted) / np.linalg.norm(of_z))


@claim(
    "OPT.adam",
    kind=Kind.EXTENSION,
    source="Theorem 1, under Adam",
    statement="Under Adam with β₁ = 0, √ν_z Δz = (r/T) Σ_k v_k √ν_k Δv_k per step.",
    tolerance=1e-10,
    measures="deviation relative to √ν_z Δz over 200 steps, learning rates 1e-2, 1e-3",
    remark=(
        "For β₁ = 0.9 it is off by 0.3, 1.4 and 12 % at learning rates 1e-4, 1e-3 and 1e-2 (3,000, "
        "1,000 and 100 steps), and the averaged gradient m has the exact law m_z − (1/T) Σ v m_v = "
        "P_t, P_t = β₁ (P_{t−1} − (1/T) Σ Δv m_v|_{t−1})"
    ),
    control="β₁ = 0.5",
    derivation=(
        "Adam with β₁ = 0 moves each parameter by rate × gradient/√ν, so √ν Δ is the gradient, and "
        "∂_z = (1/T) Σ_k v_k ∂_{v_k}"
    ),
    paper_formula=r"gradient flow: $\dot z=\sum_k v_k\circ\dot v_k$",
    corrected_formula=r"$\sqrt{\nu_z}\,\Delta z=\tfrac rT\sum_k v_k\sqrt{\nu_k}\,\Delta v_k$",
    terms=("Σ v √ν Δv",),
    mutants={"β₁ = 0.01": "a short memory"},
)
def opt_adam(variant: Variant) -> Iterator[float]:
    """How far off Adam's law is."""
    beta = 0.5 if variant == "control" else 0.01 if variant.has("β₁ = 0.01") else 0.0
    for rate in (1e-2, 1e-3):
        yield adam_error(beta, rate, 200, variant.factor("Σ v √ν Δv"))


@claim(
    "OPT.theorem2",
    kind=Kind.EXTENSION,
    source="Theorem 2, under Adam",
    statement=(
        "Full-batch Adam with linear nodes and exp attention has no winner: all tokens grow alike "
        "and entropy stays."
    ),
    tolerance=0.05,
    measures=(
        "loss of attention entropy in nats, from a small start with tokens of different saliency, "
        "until v has reached 2"
    ),
    control="gradient descent, to the same size of v",
    derivation=(
        "|Δv| ≈ h whatever the gradient's size, so saliency drops out: v_l ≈ t sgn Δ_l and z_l ≈ t "
        "for all l"
    ),
    paper_formula=r"gradient flow: $v_l$ of the largest $|\Delta_l|$ wins",
    corrected_formula=r"$\dot v_l=\mathrm{sgn}\,\Delta_l$ for all $l$",
    mutants={
        "momentum in the place of Adam": "heavy ball, μ = 0.9",
        "ε above all gradients": "Adam that divides by (almost) a constant",
        "sign descent in the place of Adam": "every weight moves by the learning rate",
    },
    equivalent={
        ("sign descent in the place of Adam"): (
            "Adam's limit where gradients change slowly: all tokens grow alike"
        )
    },
)
def opt_theorem2(variant: Variant) -> float:
    """Entropy lost by the time the largest weight is 2."""
    task = Task([[1.0, 0.8, 0.6, 0.4]], [[1.0]])
    flow = JointFlow(task, "exp")
    start = np.full((4, 1), 1e-3)
    optimiser: Optimiser = Adam()
    rate = 1e-3
    if variant == "control":
        optimiser = SGD()
    elif variant.has("momentum in the place of Adam"):
        optimiser, rate = SGD(0.9), 1e-4
    elif variant.has("ε above all gradients"):
        optimiser, rate = Adam(eps=1e3), 1.0
    elif variant.has("sign descent in the place of Adam"):
        optimiser = SignDescent()
    path = flow.descend(4000, rate, start, optimiser=optimiser)
    reached = int(np.argmax(np.abs(path.v).max(axis=(1, 2)) >= 2.0))
    if reached == 0:
        raise ArithmeticError("v has not reached 2")
    entropy = path.entropy()
    return float(entropy[0] - entropy[reached])


@claim(
    "GaLore.B6",
    kind=Kind.OTHER,
    source="GaLore (arXiv 2403.03507), Lemma B.6, Eqns. 43 and 44, which builds on Theorem 2",
    statement=(
        "With K nodes, linear activation and exp attention, v̇_j = Δ_j e^{½ Σ_k v_k²} per token; "
        "the lemma has Δ_j Σ_k e^{v_k²/2} (its Eqn. 43) and Δ_j e^{v_j²/2} (its Eqn. 44)."
    ),
    tolerance=1e-9,
    measures="largest |v − v of the joint flow| at t = 0.6, one token, K = 2, Δ = (1, 0.7)",
    remark=(
        "An erratum of GaLore, not of JoMA: Theorem 1 has the sum in the exponent. GaLore's Eqns. "
        "43 (a sum of exponentials) and 44 (each node by itself) contradict it and each other. All "
        "of v keeps the direction of Δ, in closed form (winner_take_all)"
    ),
    control="its Eqn. 44, v̇_j = Δ_j e^{v_j²/2}",
    paper_formula=(
        r"one node: $\dot v=\Delta\,e^{v^2/2}$; in GaLore, for many, $\dot v_j=\Delta_j\sum_k "
        r"e^{v_k^2/2}$"
    ),
    corrected_formula=r"$\dot v_j=\Delta_j\,e^{\frac12\sum_k v_k^2}$",
    derivation=(
        r"$z=\tfrac12\sum_k v_k^2$ by Theorem 1, one $z$ for all nodes, and $\dot v_k=\Delta_k "
        r"e^{z}$."
    ),
    terms=("½ Σ v²",),
    mutants={"its Eqn. 43": "a sum of exponentials"},
)
def galore_b6(variant: Variant) -> float:
    """The joint flow against each equation, integrated by SciPy."""
    from scipy.integrate import solve_ivp

    delta = np.array([1.0, 0.7])
    joint = JointFlow(Task([[1.0]], [delta]), "exp").integrate(0.6, times=2).v[-1, 0]

    def field(_: float, v: Array) -> Array:
        if variant.has("its Eqn. 43"):
            return delta * np.exp(v**2 / 2).sum()
        return delta * np.exp(
            v**2 / 2 if variant == "control" else variant.factor("½ Σ v²") * (v**2).sum() / 2
        )

    alone = solve_ivp(field, (0.0, 0.6), np.zeros(2), rtol=1e-12, atol=1e-13)
    return float(np.abs(alone.y[:, -1] - joint).max())
