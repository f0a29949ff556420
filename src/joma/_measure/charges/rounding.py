"""The precision that gradients were computed in, read from the gradients themselves.

Autocast leaves no mark on a model: parameters and gradients stay in float32, and the passes are
over when a check is called. Two things in the gradients show it.

*Significands.* A matrix product in bfloat16 has 8 significant bits, one in float16 has 11, and the
cast to float32 adds zeros. Sums over micro-batches and processes fill more bits, and clipping
multiplies all values by one factor, but few distinct significands stay few: among n values m·2ᵉ,
about n²/2²⁴ repeat a significand if all 24 bits were computed, and many more if not. Equal values
count once, since inputs that are alike give a gradient columns that are alike.

*Residuals.* A healthy gradient misses its identity by rounding alone. Rounding the gradients once
more, to bfloat16, shows how much that is for this charge. Relative to it, passes in bfloat16 miss
the identity by 0.3 to 13, in float16 by 0.04 to 10, and in float32 by at most 0.0005. This was
measured on Llamas of width 16 to 512, at the start and at the end of training.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from joma._measure.charges.charge import Charge, gradient_of
from joma.models.sharded import gather

# The coarsest type that passes are expected in, unless computed_in= says otherwise.
COARSEST = torch.bfloat16

# Below this share of the residual that rounding to bfloat16 causes, passes ran in float32. It is
# ten times more than float32 leaves, and ten times less than float16 does.
_FLOAT32_SHARE = 1 / 256

# Above this multiple of it, rounding does not explain it. It is twice what bfloat16 left in a model
# that had converged, where gradients cancel and rounding is a larger part of the rest.
_LARGEST_MULTIPLE = 32

# Values of one gradient that are looked at. If they have 24 bits, about one repeats a significand.
_SAMPLE = 4096

# Repeats count as many if they exceed the expected number by this many standard deviations, plus
# a few, since small numbers have longer tails.
_STANDARD_DEVIATIONS = 6.0
_MIN_REPEATS = 8


def shown_precision(gradients: Iterable[Tensor]) -> torch.dtype | None:
    """Return the type that gradients show they were computed in, or None if it may be float32.

    It is float16 if most of the gradients that show a lower precision fit into it. Otherwise it is
    `COARSEST`, also where the type is unknown: sums of several products have more bits than one.

    >>> g = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    >>> shown_precision([g]), shown_precision([g.half().float()])
    (None, torch.float16)
    >>> shown_precision([0.3 * g.bfloat16().float()])
    torch.bfloat16
    """
    types: list[torch.dtype] = []  # of the gradients that show a lower precision
    all_repeats = 0
    all_expected = 0.0
    for gradient in gradients:
        if torch.finfo(gradient.dtype).bits < 32:
            types.append(gradient.dtype)
            continue
        significands = _significands(gradient)
        repeats = len(significands) - len(significands.unique())
        expected = len(significands) ** 2 / 2**24
        all_repeats += repeats
        all_expected += expected
        if _are_many(repeats, expected):
            types.append(_type_of(significands))
    # Most, not all: a bug that scales one gradient fills its bits.
    if 2 * types.count(torch.float16) > len(types):
        return torch.float16
    # Matrices that are too small to show it one by one may show it together.
    if types or _are_many(all_repeats, all_expected):
        return COARSEST
    return None


def rounding_residual(charge: Charge) -> Tensor | None:
    """Return the residual per head that rounding the gradients to bfloat16 causes.

    None for a charge with one side: normalisations that run in float32 keep it, whatever the
    precision of the products.
    """
    if not charge.two_sided:
        return None
    return charge.residual(_rounding_error, against=gradient_of)


def is_float32(residual: Tensor, rounding: Tensor) -> Tensor:
    """True where a residual is so small that the passes ran in float32."""
    return (rounding > 0) & (residual < _FLOAT32_SHARE * rounding)


def is_beyond_rounding(residual: Tensor, rounding: Tensor) -> Tensor:
    """True where a residual is larger than rounding in bfloat16 explains."""
    return (rounding > 0) & (residual > _LARGEST_MULTIPLE * rounding)


def _rounding_error(parameter: Tensor) -> Tensor | None:
    if parameter.grad is None:
        return None
    gradient = parameter.grad.detach()
    return gradient.to(COARSEST).to(gradient.dtype) - gradient


def _significands(gradient: Tensor) -> Tensor:
    """Return the significands of a sample of a gradient, in [1/2, 1), equal values once."""
    values = gather(gradient.detach()).flatten()
    # An odd stride, so that a matrix whose width is a power of two is not sampled in one column.
    stride = max(1, len(values) // _SAMPLE) | 1
    values = values[::stride].float().abs()  # (about _SAMPLE,)
    values = values[torch.isfinite(values) & (values > 0)].unique()
    return torch.frexp(values).mantissa


def _are_many(repeats: int, expected: float) -> bool:
    return repeats > expected + _STANDARD_DEVIATIONS * expected**0.5 + _MIN_REPEATS


def _type_of(significands: Tensor) -> torch.dtype:
    """Return float16 if all significands fit into it, but not into bfloat16; else `COARSEST`."""
    fits_half = bool((significands.to(torch.float16) == significands).all())
    fits_coarsest = bool((significands.to(COARSEST) == significands).all())
    if fits_half and not fits_coarsest:
        return torch.float16
    return COARSEST
