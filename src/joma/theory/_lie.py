"""The dimension of the orbit of a family of vector fields: the rank of the Lie algebra that they generate.

A family is θ̇ = Σ_f c_f F_f(θ) with free coefficients c, given as one function of (θ, c). Whatever data come, in any
order, the state stays on the orbit of its start. The orbit's tangent space is spanned by the fields and their iterated
brackets [F, G] = DG·F − DF·G (Nagano and Sussmann, for analytic fields), and left-normed brackets of the generators,
[F₁, [F₂, … F_d]], span them all. D minus its dimension bounds the number of independent conserved quantities.

Derivatives are contour integrals: the fields are analytic, so eight points on a circle give them to rounding, also
nested ones. ``endpoint_rank`` is the independent check: the rank of the end-point map's Jacobian, by integration.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.integrate import solve_ivp

from joma.theory.setting import Array

Complex = NDArray[np.complex128]
Points = Array | Complex  # (P, D)

# d/dε by the mean over a circle, of unit direction: the error is ρ⁸ f⁽⁹⁾/9! ≈ 1e-16 f⁽⁹⁾, and 1e-16/ρ of rounding
_RADIUS = 0.05
_CIRCLE = np.exp(2j * np.pi * np.arange(8) / 8)
# the singular value above the cut must exceed the one below by this factor, or the rank is not decided
GAP = 1e6
_MARGIN = 6  # more fields than dimensions, so that a random draw misses nothing


@dataclass(frozen=True)
class Family:
    """Vector fields of θ (P, D), linear in coefficients c (P, F): ``field(θ, c)`` is (P, D), analytic in θ.

    The coordinates are expected in natural units: fields change by a factor of order one over a distance of one.
    """

    field: Callable[[Points, Array], Points]
    dimension: int
    generators: int


@dataclass(frozen=True)
class Rank:
    """A numerical rank per depth of brackets (1: the fields alone), and the singular-value gap of the last."""

    ranks: tuple[int, ...]
    gap: float

    @property
    def rank(self) -> int:
        """The last and largest rank."""
        return self.ranks[-1]


def derivative(function: Callable[[Points], Points], at: Points, along: Points) -> Points:
    """d/dε function(at + ε·along) at ε = 0, (P, n)."""
    length = np.linalg.norm(along, axis=1, keepdims=True)
    way = _RADIUS * along / np.where(length > 0, length, 1.0)
    return length * sum(function(at + e * way) / e for e in _CIRCLE) / (len(_CIRCLE) * _RADIUS)


def _bracket(family: Family, coefficients: list[Array], at: Points) -> Points:
    """[F₁, [F₂, … F_d]] at θ (P, D), each F_i with its own coefficients (P, F)."""
    first, rest = coefficients[0], coefficients[1:]
    if not rest:
        return family.field(at, first)
    inner = _bracket(family, rest, at)
    outer = family.field(at, first)
    return derivative(lambda y: _bracket(family, rest, y), at, outer) - derivative(
        lambda y: family.field(y, first), at, inner
    )


def numerical_rank(rows: Array, size: Array) -> tuple[int, float]:
    """The rank of rows (P, D) whose rounding errors are of the order of ``size`` (P,), and the gap it rests on.

    Rows that are zero to rounding are left out, the others have unit length.
    """
    norm = np.linalg.norm(rows, axis=1)
    kept = norm > 1e-9 * np.maximum(size, 1e-300)
    if not kept.any():
        return 0, np.inf
    singular = np.linalg.svd(rows[kept] / norm[kept, None], compute_uv=False)
    singular = np.maximum(singular / singular[0], 1e-16)
    ratios = singular[:-1] / singular[1:]
    if singular[-1] > 1 / GAP or not ratios.size:
        return len(singular), np.inf if len(singular) == rows.shape[1] else GAP
    cut = int(np.argmax(ratios))
    return cut + 1, float(ratios[cut])


def lie_rank(
    family: Family, at: Array, rng: np.random.Generator, *, depth: int = 4, goal: int | None = None
) -> Rank:
    """The rank of the Lie algebra at θ (D,): brackets are added depth by depth until the rank stalls.

    At a generic point a stall is the end: the span is then closed under brackets with the generators nearby. At
    special points it proves nothing; there, give the generic rank as the ``goal``, and brackets are added until it is
    reached or ``depth`` is, after which the rank is a lower bound.
    """
    D = family.dimension
    rows, sizes = np.empty((0, D)), np.empty(0)
    ranks: list[int] = []
    gap = np.inf
    for level in range(1, depth + 1):
        count = D + _MARGIN
        points = np.broadcast_to(at, (count, D))
        coefficients = [rng.standard_normal((count, family.generators)) for _ in range(level)]
        new = np.real(_bracket(family, coefficients, points))
        # what a bracket is made of, and so the size of its rounding errors, is of the size of the fields
        size = np.linalg.norm(family.field(points, coefficients[0]), axis=1)
        rows, sizes = np.vstack([rows, new]), np.concatenate([sizes, np.full(count, size.max())])
        rank, gap = numerical_rank(rows, sizes)
        if gap < GAP:
            raise ArithmeticError(
                f"the rank at depth {level} is not decided: the singular values fall by {gap:.1e} only at {rank} of {D}"
            )
        ranks.append(rank)
        if rank in (D, goal) or (goal is None and level > 1 and rank == ranks[-2]):
            break
    return Rank(tuple(ranks), gap)


def endpoint_rank(
    family: Family,
    start: Array,
    rng: np.random.Generator,
    *,
    segments: int | None = None,
    length: float = 0.2,
) -> tuple[int, float, Array]:
    """The rank of the end-point map's Jacobian, its singular-value gap, and the singular values.

    The state is driven by one random combination of fields after the other, each for time ``length``; the columns are
    the derivatives of the end with respect to each duration, carried to the end by the variational equation. Both are
    integrated to 1e-12. No bracket is ever formed.
    """
    D = family.dimension
    count = D + _MARGIN if segments is None else segments
    state, columns = start.astype(np.float64), np.empty((D, 0))
    for _ in range(count):
        c = rng.standard_normal((1, family.generators)) / np.sqrt(family.generators)
        first = np.real(family.field(state[None], c)[0])
        # of unit size, and towards the start rather than away from it: exp attention must not blow up on the way
        c *= (-1.0 if first @ (state - start) > 0 else 1.0) / max(float(np.abs(first).max()), 1e-12)

        def motion(_: float, flat: Array, c: Array = c) -> Array:
            y = flat.reshape(-1, D)  # the state, then the columns
            pushed = np.repeat(y[:1], len(y), axis=0) + 1e-20j * np.vstack(
                [np.zeros((1, D)), y[1:]]
            )
            out = family.field(pushed, np.repeat(c, len(y), axis=0))
            return np.vstack([out[:1].real, out[1:].imag * 1e20]).ravel()

        flat = np.vstack([state, columns.T]).ravel()
        solved = solve_ivp(motion, (0.0, length), flat, method="DOP853", rtol=1e-12, atol=1e-12)
        if not solved.success:
            raise ArithmeticError(f"the end-point map was not integrated: {solved.message}")
        end = solved.y[:, -1].reshape(-1, D)
        state = end[0]
        columns = np.hstack([end[1:].T, np.real(family.field(state[None], c)).T])
    rows = columns.T
    singular = np.linalg.svd(rows, compute_uv=False)
    rank, gap = numerical_rank(rows, np.linalg.norm(rows, axis=1))
    return rank, gap, singular / singular[0]
