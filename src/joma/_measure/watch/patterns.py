"""Attention patterns of the probe's first sequence: at the start, at the sparsest step, and now."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from joma._measure.events.events import AttentionEvent, AttentionRefused, Event, PassBegins, Place
from joma._measure.watch.layers import AttentionLayer
from joma._measure.watch.record import Record
from joma._runs.names import harmless
from joma._runs.patterns import Pattern, Patterns, as_bytes, chosen

# Limits that keep a file of three patterns below 300 kB.
MAX_TOKENS = 64
MAX_LAYERS = 12

# A file is written when the step has grown by this factor, and at the end.
STEP_FACTOR = 1.25


@dataclass(frozen=True)
class HeadSum:
    """Attention weights (T, T) of one call, summed over its heads."""

    weights: Tensor
    heads: int


class PatternKeeper:
    """An observer of the probe's attention.

    A failure is reported once, and nothing is recorded from then on. It never stops the training.

    Arguments:
        words: the tokens of the probe's first sequence, as text.
        is_on: False to observe nothing.
    """

    def __init__(self, words: Sequence[str] | None, is_on: bool) -> None:
        self.wants: tuple[type[Event], ...] = ()
        if is_on:
            self.wants = (PassBegins, AttentionEvent, AttentionRefused)
        self._words: list[str] | None = None
        if words is not None:
            self._words = [harmless(word) for word in words[:MAX_TOKENS]]
        self._problem: str | None = None
        self._calls: dict[Place, HeadSum] = {}  # of the last pass
        self._layers: dict[int, str] = {}
        self._patterns: list[Pattern] | None = None  # None until those of the folder are read
        self._written_step = 0

    def observe(self, event: PassBegins | AttentionEvent | AttentionRefused) -> None:
        """Take an event of a pass of the probe."""
        try:
            if isinstance(event, PassBegins):
                self._calls.clear()
            elif isinstance(event, AttentionRefused):
                self._forget(event.call.name)
            elif self._problem is None:
                self._calls[event.place] = _first_sequence(event)
        except Exception as error:  # training goes on, and so do the gauges
            self._fail(error)

    def _forget(self, module: str) -> None:
        for place in list(self._calls):
            if place[0].split("/")[0] == module:
                del self._calls[place]

    def _fail(self, error: Exception) -> None:
        self._problem = f"{type(error).__name__}: {error}"

    def continue_run(self, record: Record, step: int) -> None:
        """Read what the folder has of earlier steps, before the first step of this watch."""
        if not self.wants or self._patterns is not None:
            return
        self._patterns = []
        stored = record.read_patterns()
        if stored is None:
            return
        self._patterns = [pattern for pattern in stored.kept if pattern.step < step]
        if self._patterns:
            self._layers = stored.layers
            self._written_step = max(pattern.step for pattern in self._patterns)

    def take(
        self, step: int, layers: Sequence[AttentionLayer], entropy: float, record: Record
    ) -> None:
        """Keep the last pass as the pattern of a step.

        Arguments:
            step: of the measurement.
            layers: of attention.
            entropy: of the top layer, in nats.
            record: of the run.
        """
        try:
            if self._problem is None and self._calls and not math.isnan(entropy):
                self._keep(step, layers, entropy)
                if not self._written_step or step >= STEP_FACTOR * self._written_step:
                    self.write(record)
        except Exception as error:
            self._fail(error)
        if self._problem is not None:
            record.report_once(
                "patterns", f"attention patterns are no longer recorded: {self._problem}"
            )

    def _keep(self, step: int, layers: Sequence[AttentionLayer], entropy: float) -> None:
        calls_of: dict[int, list[HeadSum]] = {}
        for number, layer in enumerate(layers):
            calls = [self._calls[key] for key in layer.keys if key in self._calls]
            if calls:
                calls_of[number] = calls
        numbers = _evenly(list(calls_of))
        if list(self._layers) != numbers:
            self._patterns = []  # other layers than before: patterns could not be compared
        self._layers = {number: layers[number].name for number in numbers}
        weights = []
        for number in numbers:
            total = sum(call.weights for call in calls_of[number])
            heads = sum(call.heads for call in calls_of[number])
            weights.append(as_bytes(total / heads))
        self._patterns = chosen([*(self._patterns or []), Pattern(step, entropy, weights)])

    def write(self, record: Record) -> None:
        """Write the patterns, if there is a new one."""
        if not self._patterns or self._patterns[-1].step == self._written_step:
            return
        if record.write_patterns(Patterns(self._layers, self._words, self._patterns)):
            self._written_step = self._patterns[-1].step


def _first_sequence(event: AttentionEvent) -> HeadSum:
    """Return the weights of the first sequence, summed over heads, without a learned sink."""
    tokens = min(MAX_TOKENS, event.shape[2])
    rows = event.rows(0, torch.arange(tokens, device=event.device)).detach()  # (H, T, Tk)
    sink = getattr(event, "learned_sink", None)
    if sink is not None:
        rows = torch.cat([rows[..., :sink], rows[..., sink + 1 :]], dim=-1)  # (H, T, Tk - 1)
    weights = rows[..., :MAX_TOKENS].double().sum(dim=0).cpu()  # (T, T)
    return HeadSum(weights, len(rows))


def _evenly(numbers: list[int]) -> list[int]:
    """Return at most `MAX_LAYERS` of the numbers at even distances, with the first and the last."""
    if len(numbers) <= MAX_LAYERS:
        return numbers
    last = len(numbers) - 1
    places = {round(index * last / (MAX_LAYERS - 1)) for index in range(MAX_LAYERS)}
    return [numbers[place] for place in sorted(places)]


def check_patterns(patterns: bool | None, words: Sequence[str] | None, has_probe: bool) -> bool:
    """Return True if patterns are recorded; refuse arguments that contradict each other."""
    if patterns and not has_probe:
        raise ValueError("patterns=True needs one batch that stays the same: give probe=batch")
    if words is not None:
        is_list = not isinstance(words, str) and all(isinstance(word, str) for word in words)
        if not is_list:
            raise TypeError(
                "words must be a list of strings, one per token of the probe's first sequence; got "
                f"{words!r}"
            )
        if patterns is False or not has_probe:
            raise ValueError(
                "words name the tokens of attention patterns, and none are recorded: give "
                "probe=batch, and do not give patterns=False"
            )
    if patterns is None:
        return has_probe
    return patterns
