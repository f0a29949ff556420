"""Hierarchical data of Table 1 (Sections 5 and 6): class → N₁ latents → N₀ latents → tokens.

Each latent of a layer owns a combination of ``N_ch`` variables of the layer below, no two the same; so does each class.
Layer s = 0 owns tokens, layer s = 1 owns latents of layer 0, a class owns latents of layer 1. A variable is on when
one of its owners is. A sequence lists the tokens that are on, in index order, after padding up to length T (the last
of the M words is the padding).

Noise, as in HBLT(ρ): a variable that is on reaches each child with probability (1 + ρ)/2, one that is off with
(1 − ρ)/2, each edge on its own, and a child is on when at least one edge reached it. The class is the one parent of
all latents of layer 1, "on" for those that it owns. With ρ = 1 there is no noise and one sequence per class.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

_REDRAWS = 1000  # of a noisy sequence that is empty or longer than T


class HierarchySamples(NamedTuple):
    """Sequences with the latents that made them."""

    x: Ints  # (B, T)
    labels: Ints  # (B,)
    latents: tuple[Bools, Bools]  # (B, N0), (B, N1)


@dataclass(frozen=True, eq=False)
class Hierarchy:
    """A drawn hierarchy; `make_hierarchy` makes one.

    Attributes:
        owns: who owns what: (N0, M - 1), (N1, N0) and (C, N1), each row with ``N_ch`` ones.
        T: length of a sequence.
        rho: 1 without noise; below, edges err with probability (1 − ρ)/2.
    """

    owns: tuple[Bools, Bools, Bools]
    T: int
    rho: float

    @property
    def M(self) -> int:  # noqa: N802
        """Size of the vocabulary, padding included."""
        return self.owns[0].shape[1] + 1

    @property
    def C(self) -> int:  # noqa: N802
        """Number of classes."""
        return self.owns[2].shape[0]

    @property
    def pad(self) -> int:
        """The padding word."""
        return self.M - 1

    def draw_labels(self, size: int, rng: np.random.Generator) -> Ints:
        """Classes of a minibatch, uniform and independent."""
        return rng.integers(self.C, size=size)

    def sample(self, labels: Ints, rng: np.random.Generator | None = None) -> HierarchySamples:
        """A sequence for each label, with noise if ρ < 1; noisy ones that are empty or too long are drawn again."""
        if self.rho == 1:
            y1 = self.owns[2][labels]
            y0, tokens = (y1 @ self.owns[1]), (y1 @ self.owns[1]) @ self.owns[0]
            return HierarchySamples(self._write(tokens), labels, (y0, y1))
        if rng is None:
            raise ValueError(
                f"rho is {self.rho}: noisy sequences need a random generator, sample(labels, rng)"
            )
        y1, y0, tokens = self._noisy(labels, rng)
        for _ in range(_REDRAWS):
            unfit = np.flatnonzero(~_fits(tokens, self.T))
            if not unfit.size:
                return HierarchySamples(self._write(tokens), labels, (y0, y1))
            y1[unfit], y0[unfit], tokens[unfit] = self._noisy(labels[unfit], rng)
        raise ValueError(
            f"with rho = {self.rho} nearly all sequences of some class are empty or longer than T = {self.T}: "
            "take rho nearer to 1, or a larger T"
        )

    def distinct(self) -> HierarchySamples:
        """One sequence for each class, without noise: all that there are when ρ = 1."""
        return Hierarchy(self.owns, self.T, 1.0).sample(np.arange(self.C))

    def _noisy(self, labels: Ints, rng: np.random.Generator) -> tuple[Bools, Bools, Bools]:
        err = (1 - self.rho) / 2
        y1 = self.owns[2][labels] ^ (rng.random((len(labels), self.owns[2].shape[1])) < err)
        y0 = _reach(y1, self.owns[1], err, rng)
        return y1, y0, _reach(y0, self.owns[0], err, rng)

    def _write(self, tokens: Bools) -> Ints:
        """Rows of ``tokens`` (B, M - 1) as sequences (B, T): index order, padding first."""
        order = np.argsort(
            tokens, axis=1, kind="stable"
        )  # what is off first, then what is on, each in index order
        x = np.where(np.take_along_axis(tokens, order, axis=1), order, self.pad)
        padding = np.full((len(x), max(0, self.T - x.shape[1])), self.pad)
        return np.concatenate([padding, x], axis=1)[:, -self.T :]


def _reach(parents: Bools, owns: Bools, err: float, rng: np.random.Generator) -> Bools:
    """Children (B, n) that at least one edge reached; the edges of an orphan are none, so it stays off."""
    # an edge fails with probability err under a parent that is on, 1 − err under one that is off: of k on and j off
    # edges none reaches the child with probability errᵏ (1 − err)ʲ
    on = parents.astype(float) @ owns
    off = (~parents).astype(float) @ owns
    silent = np.power(err, on) * np.power(1 - err, off)
    return rng.random(silent.shape) >= silent


def _fits(tokens: Bools, T: int) -> Bools:
    count = tokens.sum(axis=1)
    return (count > 0) & (count <= T)


def make_hierarchy(
    N0: int = 10, N1: int = 20, N_ch: int = 2, C: int = 20, *, M: int = 100, T: int = 30, rho: float = 1.0,
    seed: int = 0,
) -> Hierarchy:  # fmt: skip
    """Draw the combinations of a hierarchy.

    Arguments:
        N0, N1: latents in layer 0, which owns tokens, and in layer 1, which owns latents of layer 0.
        N_ch: how many variables of the layer below each latent and each class owns.
        C: number of classes.
        M: size of the vocabulary; its last word is the padding.
        T: length of a sequence; the longest class must fit.
        rho: 1 for no noise, else in [0, 1).
        seed: of the combinations.
    """
    for name, value in {"N0": N0, "N1": N1, "N_ch": N_ch, "C": C, "M": M, "T": T}.items():
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
            raise ValueError(f"{name} must be a positive integer, got {value!r}")
    if not 0 <= rho <= 1:
        raise ValueError(f"rho must be in [0, 1], got {rho}; 1 is no noise")
    rng = np.random.default_rng(seed)
    sizes = {"the M - 1 tokens": M - 1, "the N0 latents": N0, "the N1 latents": N1}
    owns = []
    for owners, (what, size) in zip((N0, N1, C), sizes.items(), strict=True):
        if math.comb(size, N_ch) < owners:
            raise ValueError(
                f"{owners} different combinations of N_ch = {N_ch} out of {what} ({size}) are asked for; "
                f"there are {math.comb(size, N_ch)}"
            )
        owns.append(_combinations(owners, size, N_ch, rng))
    hierarchy = Hierarchy((owns[0], owns[1], owns[2]), T, float(rho))
    longest = int((owns[2] @ owns[1] @ owns[0]).sum(axis=1).max())
    if longest > T:
        raise ValueError(
            f"the longest class has {longest} tokens and T is {T}: take a larger T or a smaller N_ch"
        )
    return hierarchy


def _combinations(owners: int, size: int, N_ch: int, rng: np.random.Generator) -> Bools:
    """(owners, size) rows with ``N_ch`` ones each, uniform among those that are all different."""
    owns = np.zeros((owners, size), dtype=bool)
    drawn: set[tuple[int, ...]] = set()
    while len(drawn) < owners:
        combination = tuple(sorted(rng.choice(size, N_ch, replace=False).tolist()))
        if combination not in drawn:
            owns[len(drawn), list(combination)] = True
            drawn.add(combination)
    return owns
