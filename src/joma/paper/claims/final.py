"""Claims on where attention ends (beyond Theorems 1 and 2)."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import numpy as np
from scipy.special import lambertw

from joma.paper.claims._registry import Kind, Variant, claim
from joma.theory.final import final_attention
from joma.theory.flows import JointFlow
from joma.theory.setting import Array, Task


def rest(
    flow: JointFlow, v: Array, xi: Array, z: Array, tolerance: float = 1e-10
) -> tuple[Array, Array, Array]:
    """(v, ξ, z) of a joint flow where no component of the loss's gradient in (u, ξ) exceeds the tolerance."""
    task, span = flow.task, 20.0
    while span < 1e8:
        path = flow.integrate(
            span, v, xi, z, times=2, rtol=1e-9, atol=1e-12, method="LSODA", max_steps=100_000
        )
        if not path.done:
            raise ArithmeticError(path.status)
        v, xi, z = path.v[-1], path.xi[-1], path.z[-1]
        g = task.p[:, None] * task.gradient(flow.attention.weights(z, task.x) @ v + xi)
        if (
            max(np.abs(task.x.T @ g / flow.attention.A).max(), np.abs(g.sum(axis=0)).max())
            <= tolerance
        ):
            return v, xi, z
        span *= 3
    raise ArithmeticError("the flow has not come to rest")


def random_task(
    rng: np.random.Generator,
    nodes: int,
    *,
    samples: int = 12,
    tokens: int = 3,
    labels: bool = False,
) -> Task:
    """A task whose loss has a unique minimiser if there are more samples than tokens; soft labels never separate."""
    x, p = rng.random((samples, tokens)), rng.random(samples) + 0.1
    if labels:
        return Task.classification(x, rng.dirichlet(np.ones(nodes), samples), p=p)
    return Task.regression(x, rng.standard_normal((samples, nodes)), p=p)


def random_start(rng: np.random.Generator, task: Task) -> tuple[Array, Array, Array]:
    """v, ξ and z away from zero."""
    M, K = task.tokens, task.nodes
    return 0.7 * rng.standard_normal((M, K)), rng.standard_normal(K), 0.5 * rng.standard_normal(M)


@claim(
    "END.identity",
    kind=Kind.EXTENSION,
    source="Theorem 1, exp attention and linear nodes",
    statement=(
        "At all times, for any K and any start, z_l = c_l + (T/2) W((r/T²) e^{−2c_l/T} ‖u_l‖²) "
        "with u = e^{z/T} v, c = z(0) − (r/2T) ‖v(0)‖² and Lambert's W."
    ),
    tolerance=1e-9,
    measures="largest deviation along joint flows with moving and constant gradients, K = 1 … 4",
    control="W(r ‖u_l‖²/T²), without the factor e^{−2c_l/T}",
    derivation=(
        "q = (r/T²)‖v‖² = 2(z − c)/T by Theorem 1, and ‖u‖² = e^{2z/T}‖v‖², so q e^q = (r/T²) "
        "e^{−2c/T} ‖u‖²"
    ),
    paper_formula=r"$z=\tfrac12\sum_k v_k^2+c$ (exp attention)",
    corrected_formula=r"$z_l=c_l+\tfrac T2 W(\tfrac{r}{T^2}e^{-2c_l/T}\|u_l\|^2)$",
    terms=("T/2", "‖u‖²", "c"),
)
def end_identity(variant: Variant) -> Iterator[float]:
    """z from u along flows."""
    rng = np.random.default_rng(0)
    for nodes in (1, 2, 3, 4):
        task = random_task(rng, nodes, labels=nodes == 3)
        r, T = float(rng.uniform(0.3, 3)), float(rng.uniform(0.6, 1.6))
        start = random_start(rng, task)
        path = JointFlow(task, "exp", attention_lr=r, temperature=T).integrate(3.0, *start, times=7)
        c = variant.factor("c") * (start[2] - r / (2 * T) * (start[0] ** 2).sum(axis=1))
        square = variant.factor("‖u‖²") * np.exp(2 * path.z / T) * (path.v**2).sum(axis=2)
        weight = 1.0 if variant == "control" else np.exp(-2 * c / T)
        z = c + variant.factor("T/2") * T / 2 * lambertw(r / T**2 * weight * square).real
        yield float(np.abs(z - path.z).max())


@functools.cache
def _rests() -> tuple[tuple[Task, float, float, tuple[Array, Array, Array], Array], ...]:
    """Tasks with one minimiser: (task, r, T, start, z of the joint flow at rest)."""
    rng = np.random.default_rng(1)
    out = []
    for n, nodes in enumerate((1, 2, 4, 3, 5)):
        task = random_task(rng, nodes, labels=n in (1, 4))
        r, T = float(rng.uniform(0.2, 3)), float(rng.uniform(0.6, 1.6))
        start = random_start(rng, task)
        if n == 3:
            start = (0 * start[0], 0 * start[1], 0 * start[2])
        z = rest(JointFlow(task, "exp", attention_lr=r, temperature=T), *start)[2]
        out.append((task, r, T, start, z))
    return tuple(out)


@claim(
    "END.unique",
    kind=Kind.EXTENSION,
    source="Theorem 1, exp attention and linear nodes",
    statement=(
        "Where the loss has one minimiser, attention ends where one convex fit and the identity "
        "for z say, from any start; with a softmax loss u and v(0) are class-centred."
    ),
    tolerance=1e-6,
    measures=(
        "largest |z predicted − z of the joint flow at rest| (gradient ≤ 1e-10), K = 1 … 5, r and "
        "T varied, zero and other starts, squared and softmax losses"
    ),
    control=(
        "the start's v(0) not class-centred in c (softmax loss), or left out of it (squared loss)"
    ),
    derivation=(
        "L is convex in u = e^{z/T} v, so the flow ends in its one minimiser u*, and the identity "
        "for z (END.identity) holds there, too. A softmax loss moves no class mean, so u and v are "
        "taken relative to it"
    ),
    paper_formula=r"the end of training is left open; $z=\tfrac12\sum_k v_k^2+c$ on the way",
    corrected_formula=(
        r"$z_l=c_l+\tfrac T2 W(\tfrac{r}{T^2}e^{-2c_l/T}\|u_l\|^2)$ at the minimiser $u$ of the "
        r"loss"
    ),
    mutants={
        "r × 1.01": "attention's learning rate",
        "T × 0.99": "the temperature",
        "z(0) left out": "the start of the logits",
        "v(0) × 1.01": "the start of the weights",
    },
)
def end_unique(variant: Variant) -> Iterator[float]:
    """Predicted against integrated logits."""
    for task, r, T, start, z_rest in _rests():
        v0, xi0, z0 = start
        end = final_attention(
            task,
            v0 * (1.01 if variant.has("v(0) × 1.01") else 1.0),
            xi0,
            z0 * (0.0 if variant.has("z(0) left out") else 1.0),
            attention_lr=r * (1.01 if variant.has("r × 1.01") else 1.0),
            temperature=T * (0.99 if variant.has("T × 0.99") else 1.0),
        )
        z = end.z
        if variant == "control":
            v0 = start[0] if task.loss == "classification" else 0 * start[0]
            c = start[2] - r / (2 * T) * (v0**2).sum(axis=1)
            u = end.u - (
                end.u.mean(axis=1, keepdims=True) if task.loss == "classification" else 0.0
            )
            z = c + T / 2 * lambertw(r / T**2 * np.exp(-2 * c / T) * (u**2).sum(axis=1)).real
        yield float(np.abs(z - z_rest).max())


@claim(
    "END.mirror",
    kind=Kind.EXTENSION,
    source="Theorem 1, exp attention and linear nodes",
    statement=(
        "Where the loss has many minimisers and the block one node, flows from one start end in "
        "the same one, whatever the weights of the samples: the Bregman projection of the start."
    ),
    tolerance=1e-6,
    measures=(
        "largest |z − z′| at rest of two flows that fit the same three samples with different "
        "weights, and the distance from the projection"
    ),
    remark=(
        "For several nodes the inverse metric e^{−|v|²}(I − vvᵀ/(1 + |v|²)) of u is not a Hessian: "
        "no potential exists, and the end depends on the whole way"
    ),
    control="the second flow from another start",
    derivation=(
        "one node: u̇ = −(ds/du)⁻¹ ∇L is a mirror flow with the dual s(u) = ∫ e^{−z/T} dv, so s − "
        "s(0) stays in the span of the samples: the condition of the Bregman projection"
    ),
    paper_formula=r"the end of training is left open; $\dot v=\Delta\circ e^{z}$",
    corrected_formula=(
        r"$s(u)-s(u_0)=\sum_i\lambda_i x_i$ with $s=\int e^{-z/T}dv$, on the set of minimisers"
    ),
    mutants={
        "three nodes": "several nodes have no potential",
        "r × 1.01": "attention's learning rate, of the projection",
        "z(0) + 0.01": "the start of the logits, of the projection",
    },
)
def end_mirror(variant: Variant) -> Iterator[float]:
    """Two ways to one set of minimisers."""
    rng = np.random.default_rng(2)
    nodes = 3 if variant.has("three nodes") else 1
    x, y = rng.random((3, 5)), 2 * rng.standard_normal((3, nodes))
    ends = []
    for n, p in enumerate(([1.0, 1.0, 1.0], [1.0, 8.0, 0.2])):
        task = Task.regression(x, y, p=p)
        start = random_start(np.random.default_rng(n if variant == "control" else 0), task)
        ends.append(rest(JointFlow(task, "exp"), *start)[2])
        if nodes == 1:
            v0, xi0, z0 = start
            rate = 1.01 if variant.has("r × 1.01") else 1.0
            z0 = z0 + (0.01 if variant.has("z(0) + 0.01") else 0.0)
            yield float(
                np.abs(final_attention(task, v0, xi0, z0, attention_lr=rate).z - ends[-1]).max()
            )
    yield float(np.abs(ends[0] - ends[1]).max())
