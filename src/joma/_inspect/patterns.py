"""A pattern of a neuron with all that speaks for it, and the controls: held-out text, dealt contexts, merged neurons.

replicated  on text that was not looked at when the pattern was found, the neuron's contexts attend to the pattern's
            words more often than the layer's did: the exact binomial tail, corrected for the patterns of the layer.
passes      a pattern that replicates, whose masking lowers the activation, and that w holds: `joma._inspect.masking`.
superposed  a neuron with two patterns that pass, if embeddings were compared: two that are unrelated, then.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from joma._inspect.group import Context
from joma._inspect.layer import ALPHA, Alike, Case, Group, Layer, tail
from joma._inspect.masking import Masking


@dataclass(frozen=True, eq=False)
class NeuronPattern:
    """Contexts of a neuron that attend to words which are over-represented in them.

    Attributes:
        words: those words, the most frequent first.
        contexts: that attend to one of them, the strongest first.
        p: of so many by chance, corrected.
        places: in the text, far from one another.
        expected: the share of the layer's contexts that attend to one of the words.
        held_out: the contexts on held-out text that attend to one of them; None where there is no such text.
        replication: p of so many by chance, corrected.
        masking: what masking does; None where it was not tried.
    """

    words: list[str]
    contexts: list[Context] = field(repr=False)
    p: float
    places: int
    expected: float
    held_out: list[Context] | None = field(default=None, repr=False)
    replication: float | None = None
    masking: Masking | None = None

    @property
    def strongest(self) -> float:
        """The largest activation."""
        return max(context.activation for context in self.contexts)

    @property
    def replicated(self) -> bool:
        """Is it there on held-out text too?"""
        return self.replication is not None and self.replication <= ALPHA

    @property
    def passes(self) -> bool:
        """Does it pass all tests?"""
        return (
            self.replicated
            and self.masking is not None
            and self.masking.lowers
            and self.masking.held
        )


def replication(
    group: Group | NeuronPattern, held_out: Sequence[Case], patterns: int
) -> tuple[float, list[int]]:
    """P that so many of the held-out contexts attend to the pattern's words, × the patterns tested; and which do."""
    words = set(group.words)
    focused = sum(bool(case.words) for case in held_out)
    members = [n for n, case in enumerate(held_out) if not words.isdisjoint(case.words)]
    scale = 1 << 40  # shares as whole numbers
    p = tail(len(members), focused, round(group.expected * scale), scale) if members else 1.0
    return min(1.0, patterns * p), members


def dealt(layer: Layer, alike: Alike | None, rng: np.random.Generator) -> int:
    """Neurons with two or more patterns when the layer's contexts are dealt out to its neurons at random.

    Each neuron gets as many contexts as it has, of any neurons of the layer; a place in the text counts once.
    """
    pool = [case for cases in layer.neurons for case in cases]
    order, start, several = rng.permutation(len(pool)), 0, 0
    for cases in layer.neurons:
        some = {pool[n].position: pool[n] for n in order[start : start + len(cases)]}
        several += len(layer.groups(list(some.values()), alike)) >= 2
        start += len(cases)
    return several


def merged(first: Sequence[Case], second: Sequence[Case]) -> list[Case]:
    """Contexts as one neuron would have them that both fire: the stronger half of each."""
    halves = [*first[: -(-len(first) // 2)], *second[: len(second) // 2]]
    return list({case.position: case for case in halves}.values())
