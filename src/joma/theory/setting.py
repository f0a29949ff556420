"""The setting of the paper (Section 2, Eqns. 1-2): tasks, attention functions and activations.

One query token m sees weighted samples of context frequencies ``x`` (N, M). A block computes

    b = σ(z) ∘ x / A,     a_k = v_kᵀ b + ξ_k,     h_k = φ(a_k)

and receives back-propagated gradients ``g`` (N, K). With orthonormal embeddings the lower MLP weights are
``w_k = U_C v_k + u_m ξ_k`` (Eqn. 60 with ξ := u_mᵀ w), so ``(v, ξ, z)`` is the whole state.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import erf, expit

from joma._attention import Array, Attention
from joma._suggest import unknown_name

__all__ = [
    "ACTIVATIONS",
    "Activation",
    "Array",
    "Attention",
    "Loss",
    "Saliency",
    "Task",
    "as_activation",
    "finite",
]

Loss = Literal["fixed", "classification", "regression"]


def finite(value: ArrayLike, name: str, ndim: int) -> Array:
    """``value`` as a float64 array of ``ndim`` dimensions without NaN or infinity, or a ValueError."""
    try:
        array = np.array(value, dtype=np.float64, order="C")
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} must be an array of numbers: {error}") from None
    if array.ndim != ndim:
        raise ValueError(f"{name} must have {ndim} dimension(s), got shape {array.shape}")
    bad = np.argwhere(~np.isfinite(array))
    if bad.size:
        where = tuple(int(i) for i in bad[0])
        raise ValueError(
            f"{name}{list(where)} is {array[where]}; {name} must be finite, clean it first"
        )
    return array


@dataclass(frozen=True, eq=False)
class Saliency:
    """Saliency Δ of a task, split as in Section 3.1: Δ_lk = E[g_k | l] · P(l)."""

    delta: Array  # (M, K)  E[g_k x_l]
    discriminancy: Array  # (M, K)  E[g_k x_l] / E[x_l], 0 for tokens that never occur
    frequency: Array  # (M,)  E[x_l]


@dataclass(frozen=True, eq=False, init=False)
class Task:
    """What one query token sees: samples of context frequencies and the gradients sent to the hidden nodes.

    Arguments:
        x: (N, M) context frequencies, non-negative unless ``signed=True``.
        g: (N, K) gradients sent to the K hidden nodes, constant in time (Assumption 1).
        p: (N,) sample weights, uniform by default; they are normalised to sum to 1.
        signed: admit negative entries of x (isotropic inputs).

    ``Task.classification`` and ``Task.regression`` make tasks whose gradients move with the outputs.
    """

    x: Array
    g: Array  # the targets, for losses other than "fixed"
    p: Array
    signed: bool
    loss: Loss

    def __init__(
        self,
        x: ArrayLike,
        g: ArrayLike,
        p: ArrayLike | None = None,
        signed: bool = False,
        *,
        loss: Loss = "fixed",
    ) -> None:
        x, g = finite(x, "x", 2), finite(g, "g", 2)
        if x.size == 0 or g.size == 0:
            raise ValueError(
                f"the task is empty: x has shape {x.shape}, g has shape {g.shape}; give at least one sample"
            )
        if len(x) != len(g):
            raise ValueError(
                f"x has {len(x)} samples (rows) but g has {len(g)}; they must be the same samples"
            )
        if not signed and (x < 0).any():
            i, l = np.argwhere(x < 0)[0]
            raise ValueError(
                f"x[{i}, {l}] = {x[i, l]:g} is negative; frequencies are ≥ 0 (signed=True admits signed inputs)"
            )
        p = np.full(len(x), 1.0) if p is None else finite(p, "p", 1)
        if len(p) != len(x):
            raise ValueError(f"p has {len(p)} weights for {len(x)} samples")
        if (p < 0).any() or p.sum() <= 0:
            raise ValueError(
                f"weights p must be ≥ 0 with a positive sum; the smallest is {p.min():g}, the sum {p.sum():g}"
            )
        for name, value in (("x", x), ("g", g), ("p", p / p.sum())):
            value.setflags(write=False)
            object.__setattr__(self, name, value)
        object.__setattr__(self, "signed", signed)
        object.__setattr__(self, "loss", loss)

    @classmethod
    def classification(
        cls,
        x: ArrayLike,
        labels: ArrayLike,
        *,
        classes: int | None = None,
        p: ArrayLike | None = None,
        signed: bool = False,
    ) -> Task:
        """Cross-entropy on the hidden nodes: g = 1[y = k] − softmax(h)_k moves with training.

        ``labels`` are (N,) integers in 0 … classes − 1, or (N, K) label distributions.
        """
        y = finite(labels, "labels", np.ndim(labels))
        if y.ndim == 1:
            if (y < 0).any() or (y != np.round(y)).any():
                raise ValueError(
                    f"labels must be integers ≥ 0, got {y[(y < 0) | (y != np.round(y))][0]:g}"
                )
            count = int(y.max(initial=-1)) + 1
            if classes is not None and count > classes:
                raise ValueError(f"label {count - 1} does not fit into classes={classes}")
            y = np.eye(classes or count)[y.astype(int)]
        elif y.ndim != 2 or (y < 0).any() or not np.allclose(y.sum(axis=1), 1):
            raise ValueError(
                f"labels must be (N,) integers or (N, K) distributions with rows that sum to 1, got shape {y.shape}"
            )
        return cls(x, y, p, signed, loss="classification")

    @classmethod
    def regression(
        cls, x: ArrayLike, y: ArrayLike, *, p: ArrayLike | None = None, signed: bool = False
    ) -> Task:
        """Squared loss on the hidden nodes: g = y − h moves with training; y is (N, K)."""
        return cls(x, y, p, signed, loss="regression")

    @property
    def samples(self) -> int:
        """N, the number of samples."""
        return self.x.shape[0]

    @property
    def tokens(self) -> int:
        """M, the number of context tokens."""
        return self.x.shape[1]

    @property
    def nodes(self) -> int:
        """K, the number of hidden nodes."""
        return self.g.shape[1]

    def gradient(self, h: Array) -> Array:
        """(N, K) gradients sent to the nodes when their outputs are ``h`` (N, K)."""
        if self.loss == "fixed":
            return self.g
        if self.loss == "regression":
            return self.g - h
        e = np.exp(h - h.max(axis=1, keepdims=True))
        return self.g - e / e.sum(axis=1, keepdims=True)

    def merged(self, rows: Array | None = None) -> tuple[Task, NDArray[np.intp]]:
        """The same task with equal rows of x merged, and the first original index of each new row.

        Equal rows share their pre-activations for ever, so only Σ p g over them matters. This is exact, also for
        moving gradients (they are affine in the targets). On a ReLU kink it is needed: one gate acts on all of
        them, and apart, a row that slides and one that is crossed would have two.

        ``rows`` (N, M) stands in for x where other rows are equal too, see ``Attention.rows``.
        """
        first, inverse = _equal_rows(self.x if rows is None else rows)
        if len(first) == self.samples:
            return self, np.arange(self.samples)
        p = np.bincount(inverse, weights=self.p).astype(np.float64)
        g = np.zeros((len(first), self.nodes))
        np.add.at(g, inverse, self.p[:, None] * self.g)
        g /= np.where(p > 0, p, 1.0)[:, None]
        return replace(self, x=self.x[first], g=g, p=p), first

    def saliency(self, h: Array | None = None) -> Saliency:
        """Δ_lk = E[g_k x_l] and its two factors (Section 3.1, footnote 1), at outputs ``h`` (zero by default)."""
        g = self.gradient(np.zeros((self.samples, self.nodes)) if h is None else h)
        delta = self.x.T @ (self.p[:, None] * g)
        frequency = self.p @ self.x
        safe = np.where(frequency == 0, 1.0, frequency)
        return Saliency(
            delta, np.where(frequency[:, None] == 0, 0.0, delta / safe[:, None]), frequency
        )


def _equal_rows(x: Array) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """The first index of each set of rows equal to rounding, and which set each row belongs to."""
    # sorted along a direction that no data know of, equal rows are neighbours
    order = np.argsort(x @ np.cos(np.arange(1.0, x.shape[1] + 1) ** 2), kind="stable")
    one, next_one = x[order[:-1]], x[order[1:]]
    new = (np.abs(next_one - one) > 1e-13 * np.abs(one)).any(axis=1)
    inverse = np.empty(len(x), np.intp)
    inverse[order] = np.concatenate([[0], np.cumsum(new)])
    _, first, inverse = np.unique(inverse, return_index=True, return_inverse=True)
    return first, inverse


@dataclass(frozen=True)
class Activation:
    """φ and φ′; ``slopes`` (c₋, c₊) for the piecewise linear ones, whose gates switch at a = 0."""

    name: str
    phi: Callable[[Array], Array]
    derivative: Callable[[Array], Array]
    slopes: tuple[float, float] | None = None


def _leaky(name: str, low: float) -> Activation:
    # φ′(0) = c₋, as in PyTorch; the flow treats the kink itself as Filippov does
    return Activation(
        name, lambda a: np.where(a > 0, a, low * a), lambda a: np.where(a > 0, 1.0, low), (low, 1.0)
    )


def _normal_cdf(a: Array) -> Array:
    return 0.5 * (1 + erf(a / np.sqrt(2)))


def _silu_derivative(a: Array) -> Array:
    s = expit(a)
    return s * (1 + a * (1 - s))


ACTIVATIONS = {
    "linear": Activation("linear", lambda a: a, np.ones_like),
    "relu": _leaky("relu", 0.0),
    "leaky_relu": _leaky("leaky_relu", 0.01),
    "gelu": Activation(
        "gelu",
        lambda a: a * _normal_cdf(a),
        lambda a: _normal_cdf(a) + a * np.exp(-0.5 * a * a) / np.sqrt(2 * np.pi),
    ),
    "silu": Activation("silu", lambda a: a * expit(a), _silu_derivative),
}


def as_activation(value: Any) -> Activation:
    """An ``Activation`` from its name, a pair of callables (φ, φ′), or itself."""
    if isinstance(value, Activation):
        return value
    if isinstance(value, str):
        if value not in ACTIVATIONS:
            raise ValueError(
                unknown_name(value, ACTIVATIONS, "activation")
                + " Or give a pair of callables (φ, φ′)."
            )
        return ACTIVATIONS[value]
    if isinstance(value, tuple) and len(value) == 2 and all(callable(f) for f in value):
        return Activation("custom", value[0], value[1])
    raise TypeError(f"activation must be a name or a pair of callables (φ, φ′), got {value!r}")
