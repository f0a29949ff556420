"""The explanation of a running watch: the rows of `joma.explain`, from the passes of training."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from joma._measure.watch.explain import ExplanationBuilder
from joma._measure.watch.instruments import Instruments
from joma._measure.watch.record import Record
from joma._runs.explanation import Explanation
from joma.models.structure import find as find_structure


class WatchExplanation:
    """Explains what a watch saw so far, and keeps the explanation in the run folder up to date.

    Arguments:
        instruments: of the watch.
        mlp: the lower MLP matrices, if the user names them.
    """

    def __init__(self, instruments: Instruments, mlp: str | Sequence[str] | None) -> None:
        self._instruments = instruments
        self._mlp = mlp
        self._written_contents: object = None

    def build(self) -> Explanation:
        """Return one row per attention and per MLP.

        Facts are those of the last pass in which an attention was examined: its first one, and one
        of new shapes.
        """
        watched = self._instruments.watched
        passes = self._instruments.passes
        calls: Counter[str] = Counter()
        for layer in watched.layers.layers:
            calls.update(name for name, _ in layer.keys)
        notes = []
        if self._instruments.pass_gauges and not calls:
            notes.append("No attention was measured yet.")
        lowers = None
        if self._mlp is not None:
            matrices = find_structure(watched.model).matrices("mlp_in", self._mlp)
            lowers = [matrix.name for matrix in matrices]
        builder = ExplanationBuilder(
            passes.source, passes.unseen, calls, watched.order.around, lowers
        )
        return builder.build(notes)

    def write_changes(self, record: Record) -> None:
        """Write the explanation if an attention is new, refused, or read in another way."""
        contents = self._contents()
        if contents != self._written_contents and record.write_explanation(self.build()):
            self._written_contents = contents

    def _contents(self) -> object:
        """Return what an explanation is about, which is compared at each measurement."""
        source = self._instruments.passes.source
        unseen = self._instruments.passes.unseen
        around = self._instruments.watched.order.around
        readings = {}
        for place, facts in source.guard.facts.items():
            reason = None
            if facts.refusal is not None:
                reason = facts.refusal.reason
            readings[place] = (facts.backend, facts.heads, reason)
        return readings, (*source.problems, *unseen, *around)
