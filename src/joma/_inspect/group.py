"""What fires a neuron, and what it attends to there:

fires      a context fires the neuron if it is positive and at least ``FIRES`` of the neuron's strongest.
attended   of the query's attention, averaged over heads, the mass on the first token of the window (the usual sink) and
           on the query itself is left out. Attended are the fewest keys that hold more than ``HALF`` of the rest. Where
           that takes more than ``MOST`` keys, or more than a quarter of those there are, attention is spread, and the
           context says nothing about patterns.
word       the token's text without spaces around it, in lower case.

Which of these words make a pattern is decided in `joma._inspect.layer`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from joma._inspect.collect import Strongest

FIRES, HALF, MOST = 0.5, 0.5, 8
Array = NDArray[np.floating[Any]]
Word = Callable[[int], str]  # a token's number -> its text


@dataclass(frozen=True, eq=False)
class Context:
    """A place in the corpus that excites a neuron."""

    activation: float
    position: int  # of the query in the corpus
    query: int  # its place in the window
    tokens: NDArray[np.integer[Any]]  # of the window
    attended: list[
        int
    ]  # places in the window, by falling attention; empty where attention is spread
    mass: Array  # attention of the query on each token of the window
    along: Array  # the neuron's activation along the window


def attended(mass: Array, query: NDArray[np.integer[Any]]) -> list[list[int]]:
    """The places that queries attend to, by falling attention, given their attention (n, T) and their places (n,).

    >>> attended(
    ...     np.array([[0.6, 0.0, 0.2, 0.0, 0.02, 0.0, 0.02, 0.0, 0.02, 0.0, 0.14]]), np.array([10])
    ... )
    [[2]]
    """
    keys = np.arange(mass.shape[1])
    mass = np.where((keys > 0) & (keys < query[:, None]), mass, 0.0)  # without sink and query
    order = np.argsort(-mass, axis=1, kind="stable")
    held = np.take_along_axis(mass, order, axis=1).cumsum(axis=1)
    count = 1 + (held <= HALF * held[:, -1:]).sum(axis=1)
    there = (query - 1).clip(min=0)
    focused = (held[:, -1] > 0) & (count <= np.minimum(MOST, np.maximum(1, there // 4)))
    return [
        row[:n].tolist() if ok else [] for row, n, ok in zip(order, count, focused, strict=True)
    ]


def contexts(kept: Strongest, neuron: int) -> list[Context]:
    """The contexts that fire a neuron, the strongest first."""
    value = kept.value[neuron].cpu().numpy()
    strongest = value.max(initial=-np.inf)
    if not strongest > 0:
        return []
    order = np.argsort(-value, kind="stable")
    order = order[value[order] >= FIRES * strongest]
    parts = (kept.tokens, kept.mass, kept.along, kept.query, kept.position)
    tokens, mass, along, query, position = (x[neuron].cpu().numpy()[order] for x in parts)
    lengths = (tokens >= 0).sum(axis=1)
    places = attended(mass.astype(np.float64), query)
    return [
        Context(
            float(value[slot]), int(position[n]), int(query[n]), tokens[n, : lengths[n]], places[n],
            mass[n, : lengths[n]], along[n, : lengths[n]],
        )
        for n, slot in enumerate(order)
    ]  # fmt: skip


def attended_words(context: Context, word: Word) -> set[str]:
    """The words that the query attends to; none where attention is spread."""
    return {normalised(word(int(context.tokens[place]))) for place in context.attended}


def normalised(text: str) -> str:
    """What makes two tokens the same word: " Every" and "every" are; white space stays itself."""
    return text.strip().casefold() or text
