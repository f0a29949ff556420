"""Maps around attention: what ran shows that a matrix is not an MLP's, where its name does not.

An MLP's two maps run one after the other. If attention is computed after the first and before the second, in the module
that holds both, they are projections into attention and out of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

from joma._measure.events.events import AttentionEvent, Event


class CallOrder:
    """An observer of attention, which looks for maps on both sides of it.

    Attributes:
        around: lower map -> (upper map, module), of pairs that were taken for an MLP and have attention between them.
    """

    wants: tuple[type[Event], ...] = (AttentionEvent,)

    def __init__(self, pairs: Sequence[tuple[str, str]]) -> None:
        self.pairs = list(pairs)
        self.around: dict[str, tuple[str, str]] = {}
        self.ran: Mapping[str, Any] = {}  # the modules that ran in this step so far

    @property
    def observers(self) -> list[CallOrder]:
        """Of passes, if there is a pair whose role is not certain."""
        return [self] if self.pairs else []

    def observe(self, event: AttentionEvent) -> None:
        """Attention was computed in a module, which may have come to its end meanwhile."""
        module = event.call.name
        is_root = len(event.calls) == 1
        before = frozenset(islice(self.ran, event.call.ran_before))
        for lower, upper in self.pairs:
            is_inside = is_root or (
                lower.startswith(f"{module}.") and upper.startswith(f"{module}.")
            )
            if is_inside and lower in before and upper not in before:
                self.around[lower] = (upper, module)
