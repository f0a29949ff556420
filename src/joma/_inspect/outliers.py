"""What is far out of proportion among token vectors: a few dimensions, a few tokens, the first token of a window.

first      the first token of a window is apart: as attention's sink it often has a norm of its own in every model.
tokens     of the others, those whose norm is more than ``FAR`` times the median.
dimensions of what is left, those whose root mean square is more than ``FAR`` times the median dimension's.

Four such dimensions can hold nearly all of the variance, and then they alone decide cosines.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

FAR = 8.0


@dataclass(frozen=True, eq=False)
class Outliers:
    """Outliers among vectors (tokens, d).

    Attributes:
        dimensions: their numbers, the largest first.
        variance: the share that they hold of the variance over tokens, first ones and outliers apart.
        tokens: rows, the largest first.
        norm: the largest norm of a token that is not the first of a window, over the median.
        first: the median norm of first tokens over that of the others; not a number where there are none.
        at_first: (tokens,) which rows are first tokens.
        kept: (tokens,) which rows are neither first nor outliers.
    """

    dimensions: list[int]
    variance: float
    tokens: list[int]
    norm: float
    first: float
    at_first: Tensor
    kept: Tensor

    def inner(self, x: Tensor) -> Tensor:
        """The vectors (tokens, d) without all of these."""
        some = torch.ones(x.shape[1], dtype=torch.bool, device=x.device)
        some[self.dimensions] = False
        return x[self.kept][:, some]


def find_outliers(x: Tensor, positions: Tensor | None = None) -> Outliers:
    """Dimensions and tokens that are far out of proportion.

    Arguments:
        x: (tokens, d), one row per token.
        positions: (tokens,) their places in their windows; without, no token is the first.
    """
    x = x.detach().double()
    norm = torch.linalg.vector_norm(x, dim=1)
    at_first = torch.zeros(len(x), dtype=torch.bool) if positions is None else positions == 0
    others = ~at_first
    if not bool(others.any()):  # windows of one token
        others, at_first = at_first, others
    median = float(norm[others].median())
    far = others & (norm > FAR * median)
    kept = others & ~far
    inner = x[kept]
    size = inner.square().mean(dim=0).sqrt()  # (d,)
    large = (size > FAR * size.median()).nonzero()[:, 0]
    dimensions = large[size[large].argsort(descending=True)].tolist()
    spread = inner.var(dim=0, correction=0)
    total = float(spread.sum())
    rows = far.nonzero()[:, 0]
    scale = max(median, 1e-300)
    return Outliers(
        dimensions, float(spread[dimensions].sum()) / total if total else 0.0,
        rows[norm[rows].argsort(descending=True)].tolist(), float(norm[others].max()) / scale,
        float(norm[at_first].median()) / scale if bool(at_first.any()) else math.nan, at_first, kept,
    )  # fmt: skip
