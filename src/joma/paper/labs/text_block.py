"""A block with free logits and orthonormal embeddings on text, trained by plain SGD on the next word.

The query is a word, its context the known words among the ``window`` before it, the target the word after it:

    a = Σ_l b_l v_l + ξ_q,     o = ReLU(a) W + c,     cross-entropy on o

The first integrals hold for any gradients from above, so W and c train too, and for any minibatches. The state is that
of ``joma.theory.queries`` (one head); context words are kept as indices, so a step costs what its words cost. Beside
the weights the block keeps ``part``, what each query's samples have brought to v, and ``law``, what the exact per-step
law says that the summed invariant has drifted.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from joma.theory.queries import predicted_logits
from joma.theory.setting import Array

Index = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Places:
    """N places in a text: query (N,), context (N, window) with −1 where there is none, target (N,)."""

    query: Index
    context: Index
    target: Index

    def mean_context(self, m: int, size: int) -> Array:
        """E_{q=m}[x], (V,): also the mean attention b̄_m of uniform softmax attention."""
        context = self.context[self.query == m]
        on = context >= 0
        weight = (on / on.sum(axis=1, keepdims=True))[on]
        return np.bincount(context[on], weight, size) / len(context)


def places(code: Index, window: int) -> Places:
    """All places of ``code`` whose query and next word are known (≥ 0) and that have a known word before them."""
    at = np.flatnonzero((code[:-1] >= 0) & (code[1:] >= 0))
    place = at[:, None] - np.arange(1, window + 1)
    context = np.where(place >= 0, code[np.maximum(place, 0)], -1)
    kept = (context >= 0).any(axis=1)
    return Places(code[at][kept], context[kept], code[at + 1][kept])


class TextBlock:
    """The block and its SGD; V words, K nodes."""

    def __init__(
        self,
        attention: str,
        V: int,
        K: int,
        rng: np.random.Generator,
        *,
        lr: float,
        attention_lr: float,
    ) -> None:
        self.attention, self.V, self.lr, self.attention_lr = attention, V, lr, attention_lr
        self.v, self.xi = 0.1 * rng.standard_normal((V, K)), np.zeros((V, K))
        self.z = np.full((V, V), 1.0 if attention == "linear" else 0.0)  # (query, token)
        self.W, self.c = rng.standard_normal((K, V)) / np.sqrt(K), np.zeros(V)
        self.v0, self.z0 = self.v.copy(), self.z.copy()
        self.part, self.law = np.zeros((V * V, K)), np.zeros(V)
        self._start = self.invariant()

    @property
    def ratio(self) -> float:
        """r = attention_lr / lr."""
        return self.attention_lr / self.lr

    def invariant(self) -> Array:
        """Σ_m z_m − (r/2) Σ v², Σ_m z_m² − r Σ v² (one number per context word), or Σ_l z_ml (one per query), (V,)."""
        square = (self.v**2).sum(axis=1)
        if self.attention == "exp":
            return self.z.sum(axis=0) - self.ratio / 2 * square
        if self.attention == "linear":
            return (self.z**2).sum(axis=0) - self.ratio * square
        return self.z.sum(axis=1)

    def drift(self) -> Array:
        """The invariant minus its start, (V,)."""
        return self.invariant() - self._start

    def scale(self) -> float:
        """The size of the summed logits, at least 1."""
        total = {"exp": self.z.sum(axis=0), "linear": (self.z**2).sum(axis=0), "softmax": self.z}[
            self.attention
        ]
        return max(1.0, float(np.abs(total).max()))

    def attend(self, query: Index, context: Index) -> tuple[Array, Array]:
        """b and x of each word in the context, (N, window)."""
        on = context >= 0
        x = on / on.sum(axis=1, keepdims=True)
        logits = self.z[query[:, None], np.maximum(context, 0)]
        if self.attention == "linear":
            return x * logits, x
        if self.attention == "exp":
            return x * np.exp(logits), x
        logits = np.where(on, logits, -np.inf)
        e = np.exp(logits - logits.max(axis=1, keepdims=True))
        return e / e.sum(axis=1, keepdims=True), x

    def step(self, batch: Places) -> float:
        """One step of SGD; the loss before it."""
        query, token, N, V = batch.query, np.maximum(batch.context, 0), len(batch.query), self.V
        b, x = self.attend(query, batch.context)
        rows = np.repeat(np.arange(N), b.shape[1])
        attended = sparse.csr_array((b.ravel(), (rows, token.ravel())), shape=(N, V))
        a = attended @ self.v + self.xi[query]
        h = np.maximum(a, 0.0)
        o = h @ self.W + self.c
        o -= o.max(axis=1, keepdims=True)
        p = np.exp(o)
        p /= p.sum(axis=1, keepdims=True)
        loss = -float(np.log(p[np.arange(N), batch.target]).mean())
        g = -p
        g[np.arange(N), batch.target] += 1.0
        g /= N
        s = (g @ self.W.T) * (a > 0)  # (N, K)
        u = np.einsum("nwk,nk->nw", self.v[token], s)
        pull = (x if self.attention == "linear" else b) * u
        if self.attention == "softmax":
            pull -= b * pull.sum(axis=1, keepdims=True)
        flat = (query[:, None] * V + token).ravel()
        dz = self.attention_lr * np.bincount(flat, pull.ravel(), V * V).reshape(V, V)
        dv = self.lr * (attended.T @ s)
        pairs, where = np.unique(flat, return_inverse=True)
        self.part[pairs] += self.lr * (
            sparse.csr_array((b.ravel(), (where, rows)), shape=(len(pairs), N)) @ s
        )
        if self.attention == "exp":
            self.law -= self.ratio / 2 * (dv**2).sum(axis=1)
        elif self.attention == "linear":
            self.law += (dz**2).sum(axis=0) - self.ratio * (dv**2).sum(axis=1)
        self.v += dv
        self.z += dz
        np.add.at(self.xi, query, self.lr * s)
        self.W += self.lr * (h.T @ g)
        self.c += self.lr * g.sum(axis=0)
        return loss

    def predicted(self, m: int, b_bar: Array, source: int | None = None) -> Array:
        """z_m − z_m(0) as the theory predicts it from query m's part of v (of query ``source``, as a control), (V,)."""
        part = self.part.reshape(self.V, self.V, -1)[m if source is None else source]
        return predicted_logits(
            part,
            self.v,
            self.v0,
            ratio=self.ratio,
            b_bar=b_bar if self.attention == "softmax" else None,
        )

    def learned(self, m: int) -> Array:
        """z_m − z_m(0); for linear attention (z_m² − z_m(0)²)/2, which is what has the integral, (V,)."""
        if self.attention == "linear":
            return (self.z[m] ** 2 - self.z0[m] ** 2) / 2
        return self.z[m] - self.z0[m]

    def drifts(self) -> dict[str, float]:
        """The largest drift of the invariant, what the law says that it is, and their difference, by `scale`."""
        drift, scale = self.drift(), self.scale()
        parts = {"drift": drift, "law": self.law, "law_error": drift - self.law}
        return {name: float(np.abs(values).max() / scale) for name, values in parts.items()}

    def agreement(self, m: int, other: int, b_bar: Array) -> dict[str, float]:
        """How well the logits that query m learned are predicted, over the words of its contexts.

        ``nc``: their correlation with the prediction from its part of v; ``nc_other``: from query ``other``'s part;
        ``nc_shared``: from Σv² of all queries; ``size``: of the prediction, in units of what was learned.
        """
        occurring = b_bar > 0
        learned, predicted = self.learned(m)[occurring], self.predicted(m, b_bar)[occurring]
        shared = (self.v**2 - self.v0**2).sum(axis=1)[occurring]
        return {
            "nc": _correlation(predicted, learned),
            "nc_other": _correlation(self.predicted(m, b_bar, source=other)[occurring], learned),
            "nc_shared": _correlation(shared, learned),
            "size": float(np.linalg.norm(predicted) / np.linalg.norm(learned)),
        }


def _correlation(a: Array, b: Array) -> float:
    """Pearson's; 0 where one side is constant."""
    a, b = a - a.mean(), b - b.mean()
    size = np.linalg.norm(a) * np.linalg.norm(b)
    return float(a @ b / size) if size > 0 else 0.0
