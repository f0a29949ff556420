"""Computational directed acyclic graphs, CDAG (the multi-layer appendix): nodes, gradients, training, Theorem 1.

A node collects its precedents, f_j = σ_j(Σ_k w_jk f_k) (Eqn. 1). With u_j = σ_j′ g_j the chain rule gives

    g_{j→k} = w_jk u_j,        g_k = Σ_j g_{j→k},        ẇ_jk = E[f_k u_j].

Signals are vectors over samples, and correlations are inner products of them. Theorem 1 asks when a latent z_β that
node k carries is also what node j asks of it, E[z_β g_{j→k}] > 0. See :func:`implied`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.integrate import solve_ivp
from scipy.special import expit, softmax

from joma._suggest import unknown_name
from joma.theory.setting import ACTIVATIONS, Activation, Array, as_activation, finite

if TYPE_CHECKING:
    import networkx as nx

NONLINEARITIES = ACTIVATIONS | {
    "tanh": Activation("tanh", np.tanh, lambda a: 1 - np.tanh(a) ** 2),
    "sigmoid": Activation("sigmoid", expit, lambda a: expit(a) * expit(-a)),
}
LOSSES: dict[str, Callable[[Array], Array]] = {
    "squared": lambda f: f,
    "logistic": lambda f: np.asarray(expit(f)),
    "softmax": lambda f: np.asarray(softmax(f, axis=1)),
}


Method = Literal["RK23", "RK45", "DOP853", "Radau", "BDF", "LSODA"]
Index = NDArray[np.intp]


@dataclass(frozen=True, eq=False)
class _Step:
    """One generation of nodes, computed together."""

    nodes: slice
    reads: Index  # all nodes that one of them reads
    edges: Index  # their edges
    where: Index  # the place of each edge in the flat weight matrix (reads, nodes)
    activations: tuple[tuple[Activation, list[int]], ...]  # each with the nodes it belongs to

    def matrix(self, w: Array) -> Array:
        matrix = np.zeros((len(self.reads), self.nodes.stop - self.nodes.start))
        matrix.flat[self.where] = w[self.edges]
        return matrix


@dataclass(frozen=True, eq=False)
class Signals:
    """Everything that flows through a graph for N samples, with V nodes and E edges."""

    f: Array  # (N, V) what nodes say
    slope: Array  # (N, V) σ′, 1 for inputs
    g: Array  # (N, V) what is asked of them
    dw: Array  # (E,) E[f_k u_j]

    @property
    def u(self) -> Array:
        """u = σ′ g, (N, V)."""
        return self.slope * self.g


class CDAG:
    """A computational graph whose weights can be trained.

    Arguments:
        graph: {node: the nodes it reads}, or a networkx.DiGraph whose edges point along the computation. Nodes that
            read nothing are inputs, nodes that nobody reads are outputs.
        activation: σ of the nodes between: a name, a pair of callables (σ, σ′), or {node: either}, tanh for those
            that are not named. Outputs are linear unless named.
    """

    nodes: tuple[Hashable, ...]  # in an order of computation
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    edges: Index  # (E, 2) of (j, k): j reads k

    def __init__(
        self, graph: Mapping[Any, Iterable[Any]] | nx.DiGraph, activation: Any = "tanh"
    ) -> None:
        import networkx as nx

        from joma.theory._graphs import acyclic_order

        if isinstance(graph, Mapping):
            directed = nx.DiGraph()
            for node, precedents in graph.items():
                directed.add_node(node)
                directed.add_edges_from((k, node) for k in precedents)
        else:
            directed = graph
            if not directed.is_directed():
                raise ValueError(
                    "the graph is undirected; give a networkx.DiGraph with edges along the computation"
                )
        if directed.number_of_edges() == 0:
            raise ValueError("the graph is empty: it needs at least one node that reads another")
        generations = acyclic_order(directed)
        self.nodes = tuple(node for generation in generations for node in generation)
        place = {node: i for i, node in enumerate(self.nodes)}
        self.inputs = tuple(i for i, node in enumerate(self.nodes) if directed.in_degree(node) == 0)
        self.outputs = tuple(
            i for i, node in enumerate(self.nodes) if directed.out_degree(node) == 0
        )
        both = set(self.inputs) & set(self.outputs)
        if both:
            raise ValueError(
                f"node {self.nodes[min(both)]!r} reads nothing and is read by nobody; drop it"
            )
        self.edges = np.array(
            [(j, place[k]) for j, n in enumerate(self.nodes) for k in directed.predecessors(n)]
        )
        named = dict(activation) if isinstance(activation, Mapping) else {}
        for node in named:
            if node not in place:
                raise ValueError(unknown_name(node, [str(n) for n in self.nodes], "node"))
        common = "tanh" if isinstance(activation, Mapping) else activation
        self.activations = tuple(
            _nonlinearity(named.get(node, "linear" if i in self.outputs else common))
            for i, node in enumerate(self.nodes)
        )
        self._steps = [self._step(generation, place) for generation in generations[1:]]

    def _step(self, generation: list[Hashable], place: dict[Hashable, int]) -> _Step:
        nodes = slice(place[generation[0]], place[generation[-1]] + 1)
        edges = np.flatnonzero((self.edges[:, 0] >= nodes.start) & (self.edges[:, 0] < nodes.stop))
        reads, row = np.unique(self.edges[edges, 1], return_inverse=True)
        where = row * (nodes.stop - nodes.start) + self.edges[edges, 0] - nodes.start
        used: dict[int, tuple[Activation, list[int]]] = {}
        for i, activation in enumerate(self.activations[nodes]):
            used.setdefault(id(activation), (activation, []))[1].append(i)
        return _Step(nodes, reads, edges, where, tuple(used.values()))

    def __repr__(self) -> str:
        return f"CDAG({len(self.inputs)} inputs, {len(self.nodes)} nodes, {len(self.edges)} edges)"

    def index(self, node: Hashable) -> int:
        """The column of a node in signals."""
        if node not in self.nodes:
            raise ValueError(unknown_name(node, [str(n) for n in self.nodes], "node"))
        return self.nodes.index(node)

    def small_weights(self, scale: float, rng: np.random.Generator | int | None = None) -> Array:
        """Gaussian weights (E,) of standard deviation ``scale`` / √(precedents)."""
        fan = np.bincount(self.edges[:, 0], minlength=len(self.nodes))[self.edges[:, 0]]
        return scale * np.random.default_rng(rng).standard_normal(len(self.edges)) / np.sqrt(fan)

    def forward(self, w: Array, x: Array) -> tuple[Array, Array]:
        """f and σ′ of all nodes, (N, V) both, for weights (E,) and inputs (N, inputs)."""
        f = np.empty((len(x), len(self.nodes)), order="F")
        slope = np.ones_like(f)
        f[:, list(self.inputs)] = x
        for step in self._steps:
            a = f[:, step.reads] @ step.matrix(w)
            for activation, places in step.activations:
                nodes, inputs = [step.nodes.start + i for i in places], a[:, places]
                f[:, nodes], slope[:, nodes] = activation.phi(inputs), activation.derivative(inputs)
        return f, slope

    def backward(self, w: Array, f: Array, slope: Array, g_out: Array) -> Signals:
        """All signals, from what is asked of the outputs, ``g_out`` (N, outputs)."""
        g = np.zeros_like(f)
        g[:, list(self.outputs)] = g_out
        dw = np.empty(len(self.edges))
        for step in reversed(self._steps):
            u = slope[:, step.nodes] * g[:, step.nodes]
            g[:, step.reads] += u @ step.matrix(w).T
            dw[step.edges] = (f[:, step.reads].T @ u / len(f)).ravel()[step.where]
        return Signals(f, slope, g, dw)

    def signals(self, w: Array, x: Array, target: Array, loss: str = "squared") -> Signals:
        """Forward and backward, with g = target − prediction at the outputs."""
        f, slope = self.forward(w, x)
        return self.backward(w, f, slope, target - LOSSES[loss](f[:, list(self.outputs)]))

    def train(
        self,
        x: ArrayLike,
        target: ArrayLike,
        w0: ArrayLike,
        times: ArrayLike,
        *,
        loss: str = "squared",
        method: Method = "DOP853",
        rtol: float = 1e-7,
    ) -> CDAGPath:
        """Gradient flow ẇ = E[f u] of the weights from ``w0`` (E,), at ``times`` (T,).

        ``loss`` is "squared" (g = target − f), "logistic" or "softmax" (g = target − their probabilities).
        """
        x, target, w0, t = (
            finite(x, "x", 2),
            finite(target, "target", 2),
            finite(w0, "w0", 1),
            finite(times, "times", 1),
        )
        if loss not in LOSSES:
            raise ValueError(unknown_name(loss, LOSSES, "loss"))
        for name, value, shape in (
            ("x", x, (len(x), len(self.inputs))),
            ("target", target, (len(x), len(self.outputs))),
            ("w0", w0, (len(self.edges),)),
        ):
            if value.shape != shape:
                raise ValueError(f"{name} has shape {value.shape}; this graph needs {shape}")
        if t.size < 2 or (np.diff(t) <= 0).any():
            raise ValueError(f"times must rise and be at least two, got {t.tolist()[:4]}")
        path = solve_ivp(
            lambda _, w: self.signals(w, x, target, loss).dw,
            (t[0], t[-1]),
            w0,
            method,
            t,
            rtol=rtol,
            atol=rtol * 1e-3,
        )
        if not path.success:
            raise RuntimeError(f"the training flow stopped at t = {path.t[-1]:g}: {path.message}")
        return CDAGPath(self, x, target, loss, t, path.y.T)


@dataclass(frozen=True, eq=False)
class CDAGPath:
    """A training run: weights over time, and the signals at any of its times."""

    graph: CDAG
    x: Array  # (N, inputs)
    target: Array  # (N, outputs)
    loss: str
    t: Array  # (T,)
    w: Array  # (T, E)

    def signals(self, i: int) -> Signals:
        """All signals at the i-th time."""
        return self.graph.signals(self.w[i], self.x, self.target, self.loss)


def _nonlinearity(value: Any) -> Activation:
    if isinstance(value, str) and value not in NONLINEARITIES:
        raise ValueError(
            unknown_name(value, NONLINEARITIES, "activation")
            + " Or give a pair of callables (σ, σ′)."
        )
    return as_activation(NONLINEARITIES[value] if isinstance(value, str) else value)


def cosine(a: Array, b: Array) -> Array:
    """Normalised correlations (A, B) of the columns of a (N, A) and b (N, B); 0 where a column vanishes."""
    norms = np.linalg.norm(a, axis=0)[:, None] * np.linalg.norm(b, axis=0)
    return np.asarray(np.divide(a.T @ b, norms, out=np.zeros(norms.shape), where=norms > 0))


def implied(c1: ArrayLike, c2: ArrayLike, c3: ArrayLike) -> Array:
    """C₄ that Theorem 1 implies for normalised correlations, or NaN where it implies none.

    For c₁ = cos(z_α, u_j), c₂ = cos(z_β, f_k), c₃ = |cos(z_α, z_β)| > 0 and w_jk = ⟨f_k, u_j⟩,

        ⟨z_β, g_{j→k}⟩ / (‖z_β‖ ‖f_k‖ ‖u_j‖²) = cos(z_β, u_j) cos(f_k, u_j) ≥ cos(a₁ + a₃) cos(a₁ + a₂ + a₃),

    with a = arccos c, if a₁ + a₂ + a₃ < π/2. Sharp: beyond, some signals with these correlations have the other sign.
    """
    with np.errstate(invalid="ignore"):
        a1, a2, a3 = (
            np.arccos(np.minimum(np.abs(np.asarray(c, dtype=np.float64)), 1.0))
            for c in (c1, c2, c3)
        )
    total = a1 + a2 + a3
    positive = (np.asarray(c1) > 0) & (np.asarray(c2) > 0) & (total < np.pi / 2)
    return np.asarray(np.where(positive, np.cos(a1 + a3) * np.cos(total), np.nan))


@dataclass(frozen=True, eq=False)
class Triples:
    """Theorem 1 for every edge (j, k) and every pair of latents (α, β), all (E, A, B), at one time."""

    c1: Array  # cos(z_α, u_j)
    c2: Array  # cos(z_β, f_k)
    c3: Array  # |cos(z_α, z_β)|
    c4: Array  # cos(z_β, g_{j→k}), the conclusion

    @property
    def premises(self) -> NDArray[np.bool_]:
        """The theorem's premises as printed: all three correlations positive."""
        return (self.c1 > 0) & (self.c2 > 0) & (self.c3 > 0)

    @property
    def condition(self) -> NDArray[np.bool_]:
        """The premises with the missing condition, arccos c₁ + arccos c₂ + arccos c₃ < π/2."""
        return np.isfinite(implied(self.c1, self.c2, self.c3))


def triples(graph: CDAG, w: Array, signals: Signals, z: Array) -> Triples:
    """The four correlations of Theorem 1 on a graph, for latents z (N, Z) and each z with either sign as z_β."""
    z = np.concatenate([z, -z], axis=1)
    j, k = graph.edges.T
    zu = cosine(z, signals.u)  # (2Z, V)
    shape = (len(j), z.shape[1], z.shape[1])
    c4 = np.sign(w)[:, None] * zu[:, j].T
    return Triples(
        np.broadcast_to(zu[:, j].T[:, :, None], shape),
        np.broadcast_to(cosine(z, signals.f)[:, k].T[:, None, :], shape),
        np.broadcast_to(np.abs(cosine(z, z))[None], shape),
        np.broadcast_to(c4[:, None, :], shape),
    )
