"""Hierarchical binary latent trees, HBLT (Section 5, Appendix A.5): exact co-occurrence and fast sampling.

A class y₀ sets the binary variables right below it, P[y = 0 | y₀ = k] = q_k, and every other variable copies its parent
with P[y_β = y_α] = ½(1 + ρ). In spins s = 1 − 2y ∈ {+1, −1} an edge is one number, E[s_β | y_α] = ρ s_α, so that along
paths the ρ multiply (Lemmas 8, 9) and all means and pair moments are products:

    E[s_i] = ρ_{i|top} E_k[2q − 1],        E[s_i s_j] = ρ_{i|c} ρ_{j|c}                             c a latent,
                                           E[s_i s_j] = ρ_{i|a} ρ_{j|b} E_k[(2q_a − 1)(2q_b − 1)]   c the class,

with c the lowest common ancestor, and a, b the variables right below the class.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from joma.theory.setting import Array, finite

if TYPE_CHECKING:
    import networkx as nx

Index = NDArray[np.intp]
Bits = NDArray[np.uint8]
CLASS = -1  # stands for the class node where an index of a variable is expected
_BLOCK = 4096  # samples drawn together: their bits stay in cache


@dataclass(frozen=True, eq=False)
class HBLTSamples:
    """Samples of a tree. Arrays are stored variable by variable, (n, ·) are views of that."""

    tree: HBLT
    classes: Index  # (n,)
    y: Bits  # (n, N) all variables, in the order of the tree

    @property
    def tokens(self) -> Bits:
        """(n, M) with 1 where the token occurs."""
        return self._columns(self.tree.tokens)

    @property
    def latents(self) -> tuple[Bits, ...]:
        """The latents of each layer (n, N_s), from right below the class downwards."""
        latent = np.ones(self.tree.size, dtype=bool)
        latent[self.tree.tokens] = False
        layers = (np.arange(self.tree.size)[layer][latent[layer]] for layer in self.tree.layers)
        return tuple(self._columns(nodes) for nodes in layers if nodes.size)

    def _columns(self, nodes: Index) -> Bits:
        if nodes[-1] - nodes[0] + 1 == nodes.size:  # neighbours: a view will do
            return self.y[:, nodes[0] : nodes[-1] + 1]
        return self.y[:, nodes]

    def sequences(self, length: int = 30, pad: int | None = None) -> NDArray[np.int64]:
        """(n, length) token ids as the paper's experiment feeds them: ascending, padded in front with ``pad`` (M)."""
        return sequences(self.tokens, length, pad)


class HBLT:
    """A hierarchical binary latent tree.

    Arguments:
        depth: L ≥ 1, the edges from the class to a token.
        children: children of each latent: one number, or one entry for each of the depth − 1 layers of latents, which
            is a number or one number for each latent of the layer (a latent with 0 children is a token).
        rho: ρ in [−1, 1]: one number, one for each of those layers, or one for each edge between two variables, in
            the order of the tree (layer by layer, siblings together).
        class_to_latent: (C, n₁), P[y = 0 | class] for the n₁ variables right below the class.
        class_prior: (C,) probabilities of the classes, uniform by default.

    Variables are numbered layer by layer, so that parents come first. ``from_networkx`` takes a tree of any shape.
    """

    parent: Index  # (N,) of each variable, CLASS right below the class; parents come first
    rho: Array  # (N,) of the edge above each variable; NaN right below the class
    q: Array  # (C, n₁)
    prior: Array  # (C,)
    names: tuple[Hashable, ...]  # (N,)
    depth: Index  # (N,) edges from the class
    layers: tuple[slice, ...]  # the variables of each depth
    tokens: Index  # (M,) the variables without children

    def __init__(
        self,
        depth: int,
        children: int | Sequence[Any] = 2,
        rho: ArrayLike = 0.9,
        *,
        class_to_latent: ArrayLike,
        class_prior: ArrayLike | None = None,
    ) -> None:
        q = finite(class_to_latent, "class_to_latent", 2)
        if depth < 1 or depth != int(depth):
            raise ValueError(
                f"depth = {depth}: a tree has at least one edge from the class to a token, and whole ones"
            )
        if q.shape[1] == 0:
            raise ValueError(
                "the tree is empty: class_to_latent has no column, so nothing hangs below the class"
            )
        per_layer = (
            [children] * (depth - 1) if isinstance(children, int | np.integer) else list(children)
        )
        if len(per_layer) != depth - 1:
            raise ValueError(
                f"children has {len(per_layer)} entries for the {depth - 1} layers of latents that depth = {depth} has"
            )
        layer, parent = np.arange(q.shape[1]), [np.full(q.shape[1], CLASS)]
        size = layer.size
        for s, counts in enumerate(per_layer):
            counts = np.asarray(counts)
            if (
                counts.dtype.kind not in "iu"
                or (counts < 0).any()
                or counts.shape not in ((), layer.shape)
            ):
                raise ValueError(
                    f"children[{s}] = {counts.tolist()} must be one number ≥ 0, or one for each of {layer.size} latents"
                )
            parent.append(np.repeat(layer, counts))
            layer = np.arange(size, size + parent[-1].size)
            size += layer.size
        edges = np.asarray(rho, dtype=np.float64)
        sizes = [p.size for p in parent[1:]]
        if edges.shape == (depth - 1,):
            edges = np.repeat(edges, sizes)
        self._set(np.concatenate(parent), edges, q, class_prior, None)

    @classmethod
    def from_networkx(
        cls,
        graph: nx.Graph,
        root: Hashable | None = None,
        rho: float = 0.9,
        *,
        class_to_latent: ArrayLike,
        class_prior: ArrayLike | None = None,
    ) -> HBLT:
        """A tree from a networkx graph: its root is the class, edges may carry ``rho`` (or take the default ``rho``).

        Edges of a directed graph point away from the class; an undirected one needs ``root``. The columns of
        ``class_to_latent`` follow the order in which the root's neighbours were added. ``tree.names`` has the nodes.
        """
        from joma.theory._graphs import rooted_tree

        names, parent, edges = rooted_tree(graph, root, rho)
        tree = cls.__new__(cls)
        tree._set(
            np.array(parent, dtype=np.intp),
            np.array(edges),
            finite(class_to_latent, "class_to_latent", 2),
            class_prior,
            names,
        )
        return tree

    def _set(
        self,
        parent: Index,
        edges: Array,
        q: Array,
        prior: ArrayLike | None,
        names: Sequence[Hashable] | None,
    ) -> None:
        """Check everything and store it; ``edges`` holds one ρ, or one for each edge between two variables."""
        top = int(np.count_nonzero(parent == CLASS))
        if not parent.size:
            raise ValueError("the tree is empty: it needs at least one variable below the class")
        if q.shape[0] == 0 or q.shape[1] != top:
            raise ValueError(
                f"class_to_latent has shape {q.shape}; it needs a row for each class and {top} columns, one for each "
                "variable right below the class"
            )
        if (q < 0).any() or (q > 1).any():
            k, i = np.argwhere((q < 0) | (q > 1))[0]
            raise ValueError(
                f"class_to_latent[{k}, {i}] = {q[k, i]:g} is a probability and must lie in [0, 1]"
            )
        if edges.shape not in ((), (parent.size - top,)):
            raise ValueError(
                f"rho has shape {edges.shape}; give one number, one for each layer of edges, or {parent.size - top}, "
                "one for each edge between two variables"
            )
        bad = edges[~(np.abs(edges) <= 1)]
        if bad.size:
            raise ValueError(f"rho = {bad[0]:g} is outside [−1, 1]")
        p = np.full(len(q), 1 / len(q)) if prior is None else finite(prior, "class_prior", 1)
        if p.shape != (len(q),) or (p < 0).any() or abs(p.sum() - 1) > 1e-9:
            raise ValueError(
                f"class_prior must be {len(q)} probabilities that sum to 1, got {p.tolist()}"
            )
        self.parent, self.q, self.prior = parent.astype(np.intp), q, p / p.sum()
        self.rho = np.full(parent.size, np.nan)
        self.rho[top:] = edges
        self.names = tuple(names) if names is not None else tuple(range(parent.size))
        self.depth = np.ones(parent.size, dtype=np.intp)
        for i in range(top, parent.size):
            self.depth[i] = self.depth[parent[i]] + 1
        ends = np.searchsorted(self.depth, np.arange(1, self.depth[-1] + 2))
        self.layers = tuple(slice(int(a), int(b)) for a, b in itertools.pairwise(ends))
        leaf = np.ones(parent.size, dtype=bool)
        leaf[parent[top:]] = False
        self.tokens = np.flatnonzero(leaf)
        for array in (self.parent, self.rho, self.q, self.prior, self.depth, self.tokens):
            array.setflags(write=False)

    def __repr__(self) -> str:
        return (
            f"HBLT({len(self.prior)} classes, {self.size - len(self.tokens)} latents, {len(self.tokens)} tokens, "
            f"L = {self.L})"
        )

    @property
    def size(self) -> int:
        """N, the number of variables below the class."""
        return self.parent.size

    @property
    def L(self) -> int:  # noqa: N802
        """The edges from the class to the deepest token."""
        return int(self.depth.max())

    @property
    def rho0(self) -> Array:
        """ρ₀ = 2 P[y = 0] − 1 of the variables right below the class, (n₁,)."""
        return np.asarray(2 * (self.prior @ self.q) - 1)

    def moments(self) -> tuple[Array, Array]:
        """E[s_i] (N,) and E[s_i s_j] (N, N) of the spins s = 1 − 2y, exactly."""
        spin, top = 2 * self.q - 1, self.q.shape[1]
        mean, pair = np.empty(self.size), np.empty((self.size, self.size))
        mean[:top] = self.prior @ spin
        pair[:top, :top] = (spin * self.prior[:, None]).T @ spin
        np.fill_diagonal(pair[:top, :top], 1.0)
        for i in range(top, self.size):
            mean[i] = self.rho[i] * mean[self.parent[i]]
            pair[i, :i] = pair[:i, i] = self.rho[i] * pair[self.parent[i], :i]
            pair[i, i] = 1.0
        return mean, pair

    def marginal(self) -> Array:
        """P[y_i = 1] of all variables, (N,)."""
        return (1 - self.moments()[0]) / 2

    def joint(self, nodes: ArrayLike | None = None) -> Array:
        """P[y_i = 1, y_j = 1] of pairs among ``nodes`` (the tokens by default); P[y_i = 1] on the diagonal."""
        mean, pair = self.moments()
        chosen = self.tokens if nodes is None else np.asarray(nodes, dtype=np.intp)
        mean, pair = mean[chosen], pair[np.ix_(chosen, chosen)]
        return (1 - mean[:, None] - mean[None, :] + pair) / 4

    def cooccurrence(self, nodes: ArrayLike | None = None) -> Array:
        """P[y_l = 1 | y_m = 1] as a matrix [l, m] over ``nodes`` (the tokens by default); NaN where P[y_m = 1] = 0."""
        joint = self.joint(nodes)
        given = np.diag(joint)
        return np.where(given > 0, joint / np.where(given > 0, given, 1.0), np.nan)

    def ancestors(self, nodes: ArrayLike | None = None) -> Index:
        """The lowest common ancestor of each pair of ``nodes`` (the tokens by default), ``CLASS`` for the class."""
        lowest = np.full((self.size, self.size), CLASS)
        for i in range(self.size):
            if self.parent[i] != CLASS:
                lowest[i, :i] = lowest[:i, i] = lowest[self.parent[i], :i]
            lowest[i, i] = i
        chosen = self.tokens if nodes is None else np.asarray(nodes, dtype=np.intp)
        return lowest[np.ix_(chosen, chosen)]

    def heights(self) -> Index:
        """H, the edges from a token up to the lowest common ancestor of each pair of tokens; L when it is the class."""
        c = self.ancestors()
        return self.depth[self.tokens][:, None] - np.where(c == CLASS, 0, self.depth[c])

    def posterior(self, tokens: ArrayLike) -> tuple[Array, Array]:
        """P[class | tokens] (n, C) and P[y = 1 | tokens] of all variables (n, N): all that tokens (n, M) can tell."""
        from joma.theory._posterior import posterior

        return posterior(self, tokens)

    def sample(self, n: int, rng: np.random.Generator | int | None = None) -> HBLTSamples:
        """``n`` independent samples: the class and all variables."""
        if n < 1:
            raise ValueError(f"n = {n}: ask for at least one sample")
        rng, top = np.random.default_rng(rng), self.q.shape[1]
        classes = np.searchsorted(np.cumsum(self.prior)[:-1], rng.random(n), side="right")
        y = np.empty((self.size, n), dtype=np.uint8)
        one, flip = _Coin((1 - self.q).T), _Coin((1 - self.rho[top:, None]) / 2)
        for start in range(0, n, _BLOCK):
            k = classes[start : start + _BLOCK]
            block = y[:, start : start + len(k)]
            one.toss(block[:top], rng, k)
            flip.toss(block[top:], rng)
            for layer in self.layers[1:]:
                block[layer] ^= block.take(self.parent[layer], axis=0)
        return HBLTSamples(self, classes, y.T)


class _Coin:
    """Coins with probabilities ``p`` (rows, kinds): 16 random bits decide a toss, and more where these tie."""

    def __init__(self, p: Array) -> None:
        steps = np.minimum(np.floor(p * 65536), 65535)
        self.steps, self.rest = steps.astype(np.uint16), p * 65536 - steps

    def toss(self, out: Bits, rng: np.random.Generator, kind: Index | None = None) -> None:
        """Fill ``out`` (rows, n) with tosses, column i with the coins of ``kind[i]``."""
        n = out.shape[1]
        words = rng.integers(0, 2**64, -(-out.size // 4), dtype=np.uint64)
        u = words.view(np.uint16)[: out.size].reshape(out.shape)
        steps = self.steps if kind is None else self.steps[:, kind]
        np.less(u, steps, out=out.view(np.bool_))
        row, column = np.divmod(np.flatnonzero(u == steps), n)
        out[row, column] = (
            rng.random(row.size) < self.rest[row, 0 if kind is None else kind[column]]
        )


def sequences(tokens: ArrayLike, length: int = 30, pad: int | None = None) -> NDArray[np.int64]:
    """Token ids (n, length) of samples (n, M) of zeros and ones, as the paper's experiment uses them.

    Ascending ids, padded in front (the last position holds a token) with the id ``pad``, by default M.
    """
    present = np.asarray(tokens)
    if present.ndim != 2:
        raise ValueError(f"tokens must be (n, M), got shape {present.shape}")
    count = np.count_nonzero(present, axis=1)
    if count.size and count.max() > length:
        i = int(np.argmax(count))
        raise ValueError(
            f"sample {i} has {count[i]} tokens, more than length = {length}; ask for longer sequences"
        )
    result = np.full(
        (len(present), length), present.shape[1] if pad is None else pad, dtype=np.int64
    )
    for start in range(0, len(present), _BLOCK):
        rows = slice(start, start + _BLOCK)
        # filled from the left, row by row, both sides have the same order
        result[rows][np.arange(length) >= length - count[rows, None]] = np.nonzero(
            np.ascontiguousarray(present[rows])
        )[1]
    return result


def theorem5(rho: ArrayLike, rho0: ArrayLike, H: ArrayLike, L: ArrayLike) -> Array:
    """Theorem 5: P[y_l = 1 | y_m = 1] in HBLT(ρ) for tokens whose common *latent* ancestor is H ≤ L − 1 edges up.

    ρ₀ = 2 P[y = 0] − 1 of the variable right below the class. Where the common ancestor is the class, see
    :func:`through_class`.
    """
    rho, rho0, H, L = (np.asarray(value, dtype=np.float64) for value in (rho, rho0, H, L))
    bias = rho ** (L - 1) * rho0
    return np.asarray((1 + rho ** (2 * H) - 2 * bias) / (1 - bias) / 2)


def through_class(
    rho: ArrayLike, rho_l: ArrayLike, rho_m: ArrayLike, kappa: ArrayLike, L: ArrayLike
) -> Array:
    """P[y_l = 1 | y_m = 1] in HBLT(ρ) where only the class is above both: the case that Theorem 5 leaves out.

    ``rho_l``, ``rho_m`` are ρ₀ of the two variables right below the class and κ = E_k[(2q_l − 1)(2q_m − 1)].
    """
    rho, rho_l, rho_m, kappa, L = (
        np.asarray(value, dtype=np.float64) for value in (rho, rho_l, rho_m, kappa, L)
    )
    path = rho ** (L - 1)
    return np.asarray((1 - path * (rho_l + rho_m) + path**2 * kappa) / (1 - path * rho_m) / 2)


def eqn8(H: ArrayLike, L: ArrayLike, epsilon: ArrayLike = 0.0) -> Array:
    """Eqn. 8 with its first remainder: 1 − H/L + ε H(2H − L)/(2L) + O(ε²), for ρ = ρ₀ = 1 − ε."""
    H, L, epsilon = (np.asarray(value, dtype=np.float64) for value in (H, L, epsilon))
    return np.asarray(1 - H / L + epsilon * H * (2 * H - L) / (2 * L))
