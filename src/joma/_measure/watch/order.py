"""Maps around attention, which the order of calls tells from those of an MLP.

An MLP's two maps run one after the other. If attention is computed after the first and before the
second, in the module that holds both, they are projections into attention and out of it. Their
names do not always show that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

from joma._measure.events.events import AttentionEvent, Event


class CallOrder:
    """An observer of attention that looks for maps on both sides of it.

    Arguments:
        pairs: (lower map, upper map) of each MLP whose role is not certain.

    Attributes:
        around: lower map -> (upper map, module), for pairs with attention between them.
        ran: the modules that ran in this step so far, in their order.
    """

    wants: tuple[type[Event], ...] = (AttentionEvent,)

    def __init__(self, pairs: Sequence[tuple[str, str]]) -> None:
        self.pairs = list(pairs)
        self.around: dict[str, tuple[str, str]] = {}
        self.ran: Mapping[str, Any] = {}

    @property
    def observers(self) -> list[CallOrder]:
        """The observer itself, if there is a pair whose role is not certain."""
        if self.pairs:
            return [self]
        return []

    def observe(self, event: AttentionEvent) -> None:
        """Find the pairs of which one map ran before this attention and the other did not."""
        # The module may have returned since: `ran_before` counts the modules at that time.
        module = event.call.name
        is_root = len(event.calls) == 1
        before = frozenset(islice(self.ran, event.call.ran_before))
        for lower, upper in self.pairs:
            are_inside = lower.startswith(f"{module}.") and upper.startswith(f"{module}.")
            if (is_root or are_inside) and lower in before and upper not in before:
                self.around[lower] = (upper, module)
