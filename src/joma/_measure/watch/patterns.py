"""Who attends to whom on the first sequence of the probe: kept at the start, at the sparsest, and of late."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from joma._measure.events.events import AttentionEvent, AttentionRefused, Event, PassBegins, Place
from joma._measure.watch.record import Record
from joma._measure.watch.tally import Layer
from joma._runs.names import harmless
from joma._runs.patterns import Pattern, Patterns, as_bytes, chosen

MOST_TOKENS, MOST_LAYERS = 64, 12  # that are kept: three patterns stay below 300 kB
APART = 1.25  # a file is written when the step has grown by this factor, and at the end


class PatternKeeper:
    """An observer of the probe's attention; what goes wrong in it is said once, and nothing is kept from then on."""

    def __init__(self, words: Sequence[str] | None, on: bool) -> None:
        self.wants: tuple[type[Event], ...] = (
            (PassBegins, AttentionEvent, AttentionRefused) if on else ()
        )
        self._words = None if words is None else [harmless(word) for word in words][:MOST_TOKENS]
        self._problem: str | None = None
        self._seen: dict[
            Place, tuple[Tensor, int]
        ] = {}  # weights (T, T), summed over heads, and how many heads
        self._layers: dict[int, str] = {}
        self._kept: list[Pattern] | None = None  # None: those of the folder are not read yet
        self._written = 0  # the step of the last file

    def observe(self, event: PassBegins | AttentionEvent | AttentionRefused) -> None:
        """Keep the rows of the first sequence; the pass is the probe's."""
        try:
            if isinstance(event, PassBegins):
                self._seen.clear()
            elif isinstance(event, AttentionRefused):
                for place in [
                    place for place in self._seen if place[0].split("/")[0] == event.call.name
                ]:
                    del self._seen[place]
            elif self._problem is None:
                T = min(MOST_TOKENS, event.shape[2])
                rows = event.rows(0, torch.arange(T, device=event.device)).detach()  # (H, T, Tk)
                if (sink := getattr(event, "learned_sink", None)) is not None:
                    rows = torch.cat([rows[..., :sink], rows[..., sink + 1 :]], dim=-1)
                self._seen[event.place] = (
                    rows[..., :MOST_TOKENS].double().sum(dim=0).cpu(),
                    len(rows),
                )
        except Exception as error:  # training goes on, and so do the gauges
            self._problem = f"{type(error).__name__}: {error}"

    def go_on(self, record: Record, step: int) -> None:
        """Before the first step of this watch: what the folder has of earlier steps stays."""
        if self.wants and self._kept is None:
            stored = record.patterns()
            self._kept = (
                [pattern for pattern in stored.kept if pattern.step < step] if stored else []
            )
            self._layers = stored.layers if stored and self._kept else {}
            self._written = max((pattern.step for pattern in self._kept), default=0)

    def take(self, step: int, layers: Sequence[Layer], entropy: float, record: Record) -> None:
        """What the last pass showed is that of this step, where the top layer has this entropy."""
        try:
            if self._problem is None and self._seen and not math.isnan(entropy):
                self._keep(step, layers, entropy)
                if not self._written or step >= APART * self._written:
                    self.write(record)
        except Exception as error:
            self._problem = f"{type(error).__name__}: {error}"
        if self._problem is not None:
            record.tell_once(
                "patterns", f"attention patterns are not recorded any more: {self._problem}"
            )

    def _keep(self, step: int, layers: Sequence[Layer], entropy: float) -> None:
        shown = {
            n: [self._seen[key] for key in layer.keys if key in self._seen]
            for n, layer in enumerate(layers)
        }
        there = [n for n, parts in shown.items() if parts]
        if len(there) > MOST_LAYERS:  # evenly, with the first and the last
            there = sorted(
                {there[round(n * (len(there) - 1) / (MOST_LAYERS - 1))] for n in range(MOST_LAYERS)}
            )
        if list(self._layers) != there:
            self._kept = []  # other layers than before: patterns could not be compared
        self._layers = {n: layers[n].name for n in there}
        weights = [
            as_bytes(sum(w for w, _ in shown[n]) / sum(heads for _, heads in shown[n]))
            for n in there
        ]
        self._kept = chosen([*(self._kept or []), Pattern(step, entropy, weights)])

    def write(self, record: Record) -> None:
        """Write what is kept, if there is anything new."""
        if self._kept and self._kept[-1].step != self._written:
            is_written = record.write_patterns(Patterns(self._layers, self._words, self._kept))
            if is_written:
                self._written = self._kept[-1].step


def check(patterns: bool | None, words: Sequence[str] | None, probed: bool) -> bool:
    """Whether patterns are recorded; refuse what makes no sense."""
    if patterns and not probed:
        raise ValueError("patterns are of one batch that stays the same: give probe=batch")
    if words is not None and (
        isinstance(words, str) or not all(isinstance(word, str) for word in words)
    ):
        raise TypeError(
            "words are those of the probe's first sequence: give a list of strings, one per token"
        )
    if words is not None and (patterns is False or not probed):
        raise ValueError(
            "words name the tokens of attention patterns, and none are recorded: give probe=batch"
        )
    return probed if patterns is None else patterns
