"""Fused attention: compare the output of a call with softmax(s)·V of its arguments."""

from __future__ import annotations

from typing import Any

import torch

from joma._measure.events.aside import exactly
from joma._measure.events.events import DotProduct, wide
from joma._measure.events.guard.candidate import AttentionCandidate
from joma._measure.events.guard.comparison import (
    OUTPUT_CHECK,
    Comparison,
    relative_tolerance,
    spread_rows,
)
from joma._measure.events.reasons import Reason, Refusal

# Outputs that are all near zero are compared with this scale instead of their own.
_LEAST_SCALE = 1e-6


# query (2, 12, 128, 64): 16 of the 128 queries of the last sample, in all heads, give
# p (12, 16, 128) @ v (12, 128, 64), to be compared with the output at these queries, (12, 16, 64).
def check_output(candidate: AttentionCandidate) -> Refusal | None:
    """Compare some rows of a fused attention's last sample; return why they differ, if they do."""
    with exactly(candidate.fields["query"].device.type):
        fields = _as_rounded_by_kernel(candidate.event_fields())
        event = DotProduct(call=candidate.call, calls=candidate.calls, **fields)
        sample = event.query.shape[0] - 1
        if candidate.output_without_dropout is None:
            output = event.output[sample]  # (H, Tq, dv)
        else:
            output = candidate.output_without_dropout(sample)
        queries = spread_rows(event.query.shape[2], event.query.device)  # (P,)
        probabilities = event.rows(sample, queries)  # (H, P, Tk)
        value = wide(event.value[sample])  # (Hk, Tk, dv)
        value = value.repeat_interleave(probabilities.shape[0] // value.shape[0], dim=0)
        computed = wide(output[:, queries])
        expected = probabilities @ value  # (H, P, dv)
        has_numbers = probabilities.isfinite().all(dim=-1, keepdim=True) & computed.isfinite()
        # Kernels that leave padding out return 0 there.
        has_numbers &= (computed != 0).any(dim=-1, keepdim=True)
        if not bool(has_numbers.any()):
            return None
        difference = float(torch.where(has_numbers, (expected - computed).abs(), 0.0).max())
        # The mean of many values is small, so what is compared sets the scale, not the values.
        largest = float(torch.where(has_numbers, expected.abs(), 0.0).max())
    scale = max(largest, _LEAST_SCALE)
    candidate.comparison = Comparison(OUTPUT_CHECK, difference / scale)
    if difference <= relative_tolerance(event.output) * scale:
        return None
    return Refusal(
        Reason.GUARD,
        "its output is not softmax(s)·V of its queries, keys and mask: they differ by "
        f"{difference:.2g}, with numbers up to {largest:.2g}",
    )


def _as_rounded_by_kernel(fields: dict[str, Any]) -> dict[str, Any]:
    """Round queries, keys and values to the type of the output, as kernels do under autocast."""
    dtype = fields["output"].dtype
    rounded = {name: fields[name].to(dtype) for name in ("query", "key", "value")}
    return fields | rounded
