"""A flow, integrated: the states over time and what is read off them (entropy, first integrals, a frame)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import numpy as np

from joma.theory.ending import Ending
from joma.theory.invariants import Invariant, first_integral
from joma.theory.optimisers import PLAIN, Optimiser
from joma.theory.setting import Array, Attention

if TYPE_CHECKING:
    import pandas as pd

    from joma.theory.flows import Flow


@dataclass(frozen=True)
class Slide:
    """A stretch of time in which a sample stayed on the kink of a node (Filippov sliding)."""

    sample: int
    node: int
    start: float
    end: float


@dataclass(frozen=True, eq=False)
class Trajectory:
    """A flow over time. ``ending`` says what ended it and when, ``status`` the same in a sentence."""

    flow: Flow = field(repr=False)
    t: Array = field(repr=False)  # (T,)
    v: Array = field(repr=False)  # (T, M, K)
    xi: Array = field(repr=False)  # (T, K)
    z: Array = field(repr=False)  # (T, M)
    ending: Ending
    switches: int = 0  # how many times a gate switched, started or stopped to slide
    slides: tuple[Slide, ...] = field(default=(), repr=False)
    w: Array | None = field(default=None, repr=False)  # (T, d, K) with an explicit embedding
    step: float | None = None  # step size of gradient descent, None for a flow
    optimiser: Optimiser = field(default=PLAIN, repr=False)  # of gradient descent

    @property
    def status(self) -> str:
        """How the flow ended, in a sentence: "done", or why and when it ended early."""
        return str(self.ending)

    @property
    def done(self) -> bool:
        """Whether the whole time span was covered."""
        return self.ending.done

    def attention(self, n: int = -1) -> Array:
        """Attention scores b (N, M) of all samples at output time ``n``."""
        return self.flow.attention.weights(self.z[n], self.flow.task.x)

    def preactivation(self, n: int = -1) -> Array:
        """Pre-activations a (N, K) of all samples at output time ``n``."""
        return self.attention(n) @ self.v[n] + self.xi[n]

    def entropy(self) -> Array:
        """Attention entropy in nats over time, (T,): the weighted mean over samples of the entropy of |b|/Σ|b|.

        Samples that attend to nothing (Σ|b| = 0, as under linear attention with z = 0) are left out.
        """
        task, attention = self.flow.task, self.flow.attention
        rows = task.x.any(axis=1)
        x, p = np.abs(task.x[rows]), task.p[rows]
        if attention.kind == "exp":  # its entropy is that of softmax, which does not overflow
            attention = Attention("softmax", attention.temperature)
        out = np.full(len(self.t), np.nan)
        for n in range(len(self.t) if rows.any() else 0):
            h, total = row_entropies(attention.weights(self.z[n], x))
            weight = p * (total > 0)
            out[n] = weight @ h / weight.sum() if weight.sum() > 0 else np.nan
        return out

    def invariant(self, b_bar: Literal["start", "current", "input"] = "start") -> Invariant:
        """The first integral of Theorem 1 along this trajectory; see ``Invariant``.

        ``b_bar`` matters under softmax only: b̄ at the start, at each time, or E[x] as in the authors' code.
        """
        return first_integral(self, b_bar)

    def to_frame(self) -> pd.DataFrame:
        """Long table: t, quantity ("v", "xi", "z"), token, node, value."""
        parts = {
            "v": (self.v, ("token", "node")),
            "xi": (self.xi, ("node",)),
            "z": (self.z, ("token",)),
        }
        return long_table(self.t, parts, ("token", "node"))


def row_entropies(b: Array) -> tuple[Array, Array]:
    """The entropy in nats of each row of |b|/Σ|b|, 0 where Σ|b| = 0, and Σ|b|, both (n,)."""
    b = np.abs(b)
    total = b.sum(axis=1)
    q = b / np.where(total > 0, total, 1.0)[:, None]
    return -(q * np.log(np.where(q > 0, q, 1.0))).sum(axis=1), total


def long_table(
    t: Array, parts: Mapping[str, tuple[Array, tuple[str, ...]]], columns: tuple[str, ...]
) -> pd.DataFrame:
    """One row per number: t, quantity, ``columns``, value.

    Arguments:
        t: the times, (T,).
        parts: quantity -> its values (T, …), and which columns the axes after the first are; others are missing.
        columns: of indices, in their order.
    """
    import pandas as pd

    frames = []
    for name, (values, axes) in parts.items():
        index = {
            axis: place.ravel()
            for axis, place in zip(("t", *axes), np.indices(values.shape), strict=True)
        }
        frames.append(pd.DataFrame({**index, "quantity": name, "value": values.ravel()}))
    frame = pd.concat(frames, ignore_index=True)
    frame["t"] = t[frame["t"].to_numpy()]
    for column in columns:
        frame[column] = frame[column].astype("Int64")
    return frame[["t", "quantity", *columns, "value"]]
