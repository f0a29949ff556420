"""An attention of a module call, until it is emitted or refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from joma._measure.events.axes import Layout, RecordedProjection
from joma._measure.events.events import AttentionEvent, Call, DotProduct, Scores
from joma._measure.events.guard.comparison import NOT_COMPARED, Comparison
from joma._measure.events.reasons import Refusal

# Shapes and types of an attention and of its module's input. While they stay the same, an attention
# that was found right is not examined.
Signature = tuple[Any, ...]


@dataclass(eq=False)
class AttentionCandidate:
    """An attention of a module call, until it is emitted or refused.

    Attributes:
        kind: the event that it becomes.
        call: the module that attends.
        calls: the running modules down to that one.
        signature: shapes and types.
        keys: the keys, held so that no other tensor gets their memory.
        fields: the fields of the event, with the axes that the module gave them.
        output_without_dropout: computes the output (H, Tq, dv) of one sample again without dropout;
            None if there was none.
        ordinal: number of the attention in this call of the module.
        values: the values; None until they are seen.
        read_queries: returns the queries (axes of the scores …, d), if they can be read.
        read_keys: returns the keys (…, d), given the axis of queries, if they can be read.
        query_axis: the axis of queries; None until it is settled.
        projections: outputs of modules that ran before in the same module.
        is_self: True if queries and keys come from the same tokens; None until it is settled.
        layout: brings the fields to (B, H, Tq, …); None until it is settled.
        refusal: why it cannot be measured, if so.
        backend: the function that computes it.
        comparison: how it was verified.
        is_new: True if it was not examined with this signature before.
    """

    kind: type[AttentionEvent]
    call: Call
    calls: tuple[Call, ...]
    signature: Signature
    keys: Tensor | None = field(repr=False)
    fields: dict[str, Any] = field(repr=False)
    output_without_dropout: Callable[[int], Tensor] | None = None
    ordinal: int = 0
    values: Tensor | None = field(default=None, repr=False)
    read_queries: Callable[[], Tensor | None] | None = field(default=None, repr=False)
    read_keys: Callable[[int], Tensor | None] | None = field(default=None, repr=False)
    query_axis: int | None = None
    projections: tuple[RecordedProjection, ...] = field(default=(), repr=False)
    is_self: bool | None = None
    layout: Layout | None = None
    refusal: Refusal | None = None
    backend: str = ""
    comparison: Comparison = NOT_COMPARED
    is_new: bool = False

    @property
    def place(self) -> tuple[str, int]:
        """Name of the module, and number of the attention in one call of it."""
        return self.call.name, self.ordinal

    @property
    def is_settled(self) -> bool:
        """True if there is nothing more to wait for."""
        return self.query_axis is not None or self.refusal is not None

    @property
    def per_query(self) -> Tensor:
        """The queries or the scores."""
        tensor: Tensor
        if self.kind is DotProduct:
            tensor = self.fields["query"]
        else:
            tensor = self.fields["scores"]
        return tensor

    @property
    def shape(self) -> tuple[int, ...]:
        """All axes of the queries or scores but the last."""
        return tuple(self.per_query.shape[:-1])

    @property
    def key_count(self) -> int:
        """Number of keys."""
        if self.kind is DotProduct:
            return int(self.fields["key"].shape[-2])
        return int(self.fields["scores"].shape[-1])

    def queries(self) -> Tensor | None:
        """Return the queries (axes of the scores …, d); None if they cannot be read."""
        if self.read_queries is None:
            return None
        return self.read_queries()

    def event_fields(self) -> dict[str, Any]:
        """Return the fields of the event, brought to (B, H, Tq, …)."""
        assert self.layout is not None
        if self.layout.is_plain:
            return self.fields
        if self.kind is Scores:
            fields = dict(self.fields)
            for name, value in self.fields.items():
                if isinstance(value, Tensor):
                    fields[name] = self.layout(value)
            return fields
        return self.fields | _arranged(self.fields, self.layout)


# Queries (12, 14, 8) of 3 samples of 4 heads: query, key, value and output become (3, 4, 14, 8),
# and a mask (14, 14) becomes (3, 4, 14, 14).
def _arranged(fields: dict[str, Any], layout: Layout) -> dict[str, Any]:
    """Return queries, keys, values, mask and output of a fused attention as (B, H, T, …)."""
    query: Tensor = fields["query"]
    lead = query.shape[:-2]
    arranged: dict[str, Any] = {
        "query": layout(query),
        "output": layout(fields["output"]),
        "gqa": False,
    }
    for name in ("key", "value"):
        tensor: Tensor = fields[name]
        if fields["gqa"]:
            groups = lead[-1] // tensor.shape[-3]
            if groups > 1:
                tensor = tensor.repeat_interleave(groups, dim=-3)  # (…, Hk, Tk, d) -> (…, H, Tk, d)
        arranged[name] = layout(tensor.expand(*lead, *tensor.shape[-2:]))
    mask: Tensor | None = fields["mask"]
    if mask is not None:
        arranged["mask"] = layout(mask.expand(*lead, query.shape[-2], fields["key"].shape[-2]))
    return arranged


def shared_axis(candidate: AttentionCandidate) -> int | None:
    """Return the axis of fused queries along which keys or a mask are shared; None if none is.

    Heads share keys and masks, samples never do.
    """
    if candidate.kind is not DotProduct or candidate.fields["query"].dim() != 4:
        return None
    query = candidate.fields["query"]
    key = candidate.fields["key"]
    mask = candidate.fields["mask"]
    # query (3, 4, 14, 8), key (3, 2, 14, 8): 2 key heads serve the 4 heads of axis 1
    if query.shape[0] == key.shape[0] and key.shape[1] < query.shape[1]:
        return 1
    # query (3, 4, 14, 8), mask (3, 1, 14, 14): one mask per sample, for the 4 heads of axis 1
    if mask is None or mask.dim() != 4:
        return None
    if mask.shape[0] > 1 and mask.shape[1] == 1 < query.shape[1]:
        return 1
    return None
