"""What fires the neurons of a model: their patterns, the tests that these pass, and the controls."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from joma._inspect.collect import LEAST, Strongest
from joma._inspect.group import FIRES, HALF, MOST, Context, Word, contexts
from joma._inspect.layer import ALPHA, APART, PLACES, SUPPORT, Case, Layer, cases
from joma._inspect.masking import LARGEST, MASKED, SIGN
from joma._inspect.patterns import NeuronPattern, dealt, merged, replication
from joma._inspect.similar import SIMILAR, Similarity

if TYPE_CHECKING:
    import pandas as pd

RULES = {
    "fires": FIRES, "share_of_attention": HALF, "most_attended": MOST, "least": LEAST, "alpha": ALPHA,
    "support": SUPPORT, "places": PLACES, "apart": APART, "similar": SIMILAR, "masked": MASKED, "sign": SIGN,
    "largest": LARGEST,
}  # fmt: skip
Found = dict[tuple[int, int], list[NeuronPattern]]  # (layer, neuron) -> its patterns
COLUMNS = ["patterns", "replicated", "passed", "second", "contexts", "spread", "strongest"]


@dataclass(frozen=True, eq=False)
class HeldOut:
    """The strongest contexts on held-out text, of the neurons that have a pattern.

    Attributes:
        rows: neuron -> its row in ``kept``.
        kept: their contexts.
    """

    rows: dict[int, int]
    kept: Strongest


class Superposition:
    """What fires the neurons of a model.

    Attributes:
        strongest: layer -> its neurons' strongest contexts, in the first half of the text.
        held_out: layer -> those in the second half, of the neurons that have a pattern.
        alike: are two words one concept? None where the model has no input embedding: nothing was compared then.
        info: where they come from: model, data, tokens, names of the MLPs.
    """

    def __init__(
        self, strongest: dict[int, Strongest], word: Word, info: dict[str, Any], patterns: Found | None = None,
        held_out: dict[int, HeldOut] | None = None, alike: Similarity | None = None,
    ) -> None:  # fmt: skip
        self.strongest, self.info, self.held_out, self.alike = (
            strongest,
            info,
            held_out or {},
            alike,
        )
        self.word: Word = cache(word)
        self._patterns: Found = patterns or {}

    def contexts(self, layer: int, neuron: int) -> list[Context]:
        """The contexts that fire a neuron, the strongest first."""
        return contexts(self.strongest[layer], self._checked(layer, neuron))

    def patterns(self, layer: int, neuron: int) -> list[NeuronPattern]:
        """The patterns of a neuron, those that pass all tests first, then by their strongest context."""
        self._checked(layer, neuron)
        return sorted(
            self._patterns.get((layer, neuron), []), key=lambda p: (-p.passes, -p.strongest)
        )

    def frame(self) -> pd.DataFrame:
        """One row per neuron, those with the most patterns that pass all tests first.

        Columns: layer, neuron; patterns, replicated (on held-out text), passed (all tests; not a number where two
        replicate and a test was not made); second (the second pattern's strongest activation over the first's),
        contexts (that fire it), spread (those among them whose attention is spread), strongest (activation).
        """
        return self._frame.copy()

    @cached_property
    def _frame(self) -> pd.DataFrame:
        import pandas as pd

        rows = []
        for layer, kept in self.strongest.items():
            for neuron in range(len(kept.value)):
                fires = contexts(kept, neuron)
                groups = self.patterns(layer, neuron)
                second = groups[1].strongest / groups[0].strongest if len(groups) > 1 else 0.0
                spread = sum(not context.attended for context in fires)
                strongest = fires[0].activation if fires else 0.0
                replicated = sum(group.replicated for group in groups)
                tried = replicated < 2 or (
                    self.alike is not None and any(group.masking for group in groups)
                )
                passed = float(sum(group.passes for group in groups)) if tried else math.nan
                rows.append(
                    (
                        layer,
                        neuron,
                        len(groups),
                        replicated,
                        passed,
                        second,
                        len(fires),
                        spread,
                        strongest,
                    )
                )
        table = pd.DataFrame(rows, columns=["layer", "neuron", *COLUMNS])
        order = ["passed", "replicated", "patterns", "second", "layer", "neuron"]
        return table.sort_values(
            order, ascending=[False] * 4 + [True] * 2, ignore_index=True, na_position="last"
        )

    def counts(self) -> pd.DataFrame:
        """One row per layer: neurons, and those with two patterns or more that were found, replicate, pass all tests.

        Columns: layer, neurons, patterns, replicated, passed, untried (by one of the tests).
        """
        import pandas as pd

        rows = [
            {"layer": layer, "neurons": len(part), **{name: int((part[name] >= 2).sum()) for name in COLUMNS[:3]},
             "untried": int(part.passed.isna().sum())}
            for layer, part in self._frame.groupby("layer")
        ]  # fmt: skip
        return pd.DataFrame(rows)

    def superposed(self, layer: int, neuron: int) -> bool:
        """Has it two patterns or more that pass all tests, and were they compared and found unrelated?"""
        return self.alike is not None and sum(p.passes for p in self.patterns(layer, neuron)) >= 2

    def save(
        self,
        run: str | os.PathLike[str],
        *,
        neuron: int | None = None,
        top: int = 20,
        force: bool = False,
    ) -> Path:
        """Write a run folder: counts for all neurons, page and JSON for the ``top`` neurons, or for one of them."""
        from joma._inspect.page import as_json, page
        from joma._runs import RunWriter, staged, write_atomic, write_json

        chosen = self.top(top, neuron)
        path = Path(run)
        with staged(path, overwrite=force) as folder:
            axes = {
                name: ["neuron"]
                for name in ("patterns", "replicated", "passed", "contexts", "strongest")
            }
            config = {key: value for key, value in self.info.items() if key != "mlps"}
            packages = ("joma", "torch", "transformers")
            with RunWriter.create(
                folder, kind="superpose", config=config, axes=axes, packages=packages
            ) as writer:
                writer.note(mlps=self.info["mlps"], rules=RULES)
                for layer in self.strongest:
                    part = self._frame[self._frame.layer == layer].sort_values("neuron")
                    writer.write(0, {name: part[name].to_numpy() for name in axes}, layer=layer)
                write_json(folder / "superpose.json", as_json(self, chosen))
                write_atomic(folder / "superpose.html", page(self, chosen))
        return path

    def top(self, count: int = 20, neuron: int | None = None) -> list[tuple[int, int]]:
        """(layer, neuron) of those that pass most; or the neuron of that number in each layer there is."""
        if neuron is not None:
            return [(layer, self._checked(layer, neuron)) for layer in self.strongest]
        if count < 1:
            raise ValueError(f"top is {count}: at least one neuron is to be shown")
        chosen = self._frame.head(count)
        return list(zip(chosen.layer.tolist(), chosen.neuron.tolist(), strict=True))

    def chance(self, shuffles: int, seed: int = 0) -> list[float]:
        """The share of neurons with two or more patterns when contexts are dealt out at random, once per shuffle.

        Each neuron gets as many contexts as it has, of any neurons of its layer. No further test is made of what is
        found, so that the share is at least that which would pass.
        """
        rng = np.random.default_rng(seed)
        several, total = np.zeros(shuffles), 0
        for _, layer in self._layers():
            several += [dealt(layer, self.alike, rng) for _ in range(shuffles)]
            total += len(layer.neurons)
        return [float(share) for share in several / max(1, total)]

    def power(self, pairs: int = 200, seed: int = 0) -> tuple[float, int]:
        """Two neurons made one must be found: the share of such pairs with two patterns that replicate; and how many.

        The neurons of a pair are of one layer and have one pattern each, which replicates; the merged one has the
        stronger half of the contexts of each. Masking is not tried: it looks at one pattern at a time.
        """
        rng = np.random.default_rng(seed)
        found = tried = 0
        layers = list(self.held_out)
        for number, layer in self._layers():
            if number not in self.held_out:
                continue
            single = [n for n in self.held_out[number].rows if self._single(number, n)]
            for _ in range(-(-pairs // max(1, len(layers))) if len(single) > 1 else 0):
                a, b = rng.choice(single, 2, replace=False)
                groups = layer.groups(merged(layer.neurons[a], layer.neurons[b]), self.alike)
                held_out = merged(self._held_out(number, a), self._held_out(number, b))
                count = sum(
                    replication(g, held_out, self._tested[number])[0] <= ALPHA for g in groups
                )
                found, tried = found + (count >= 2), tried + 1
        return (found / tried if tried else 0.0), tried

    def _single(self, layer: int, neuron: int) -> bool:
        groups = self._patterns.get((layer, neuron), [])
        return len(groups) == 1 and groups[0].replicated

    def _held_out(self, layer: int, neuron: int) -> list[Case]:
        return cases(self.held_out[layer].kept, self.held_out[layer].rows[neuron], self.word)

    @cached_property
    def _tested(self) -> dict[int, int]:
        """Layer -> the patterns found in it."""
        return {
            layer: sum(len(g) for (n, _), g in self._patterns.items() if n == layer)
            for layer in self.strongest
        }

    def _layers(self) -> Iterator[tuple[int, Layer]]:
        return ((number, Layer.of(kept, self.word)) for number, kept in self.strongest.items())

    def _checked(self, layer: int, neuron: int) -> int:
        if layer not in self.strongest:
            raise ValueError(
                f"layer {layer} was not measured; there are {', '.join(map(str, self.strongest))}"
            )
        size = len(self.strongest[layer].value)
        if not 0 <= neuron < size:
            raise ValueError(
                f"there is no neuron {neuron} in layer {layer}: it has {size}, 0 to {size - 1}"
            )
        return neuron

    def __repr__(self) -> str:
        return f"Superposition({self.info['model']!r} on {self.info['data']!r}, layers {list(self.strongest)})"
