"""From a neuron's contexts to its patterns, by rules that are fixed:

fires      a context fires the neuron if it is positive and at least ``FIRES`` of the neuron's strongest.
attended   of the query's attention, averaged over heads, the mass on the first token of the window (the usual sink) and
           on the query itself is left out. Attended are the fewest keys that hold more than ``HALF`` of the rest. Where
           that takes more than ``MOST`` keys, or more than a quarter of those there are, attention is spread, and the
           context says nothing about patterns.
pattern    contexts belong together if they attend to a common word (the token's text without spaces around it, in
           lower case), directly or through others: connected components. A component is a pattern if ``SUPPORT``
           different contexts speak for it. Two patterns of a neuron therefore share no attended word.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import networkx as nx
import numpy as np
from numpy.typing import NDArray

from joma._superpose.collect import Strongest

FIRES, HALF, MOST, SUPPORT = 0.5, 0.5, 8, 3
Word = Callable[[int], str]  # a token's number -> its text


@dataclass(frozen=True)
class Context:
    """A place in the corpus that excites a neuron."""

    activation: float
    position: int  # of the query in the corpus
    query: int  # its place in the window
    tokens: list[int]  # of the window
    attended: list[int]  # places in the window, by falling attention; empty where attention is spread
    mass: list[float]  # attention of the query on each token of the window
    along: list[float]  # the neuron's activation along the window


@dataclass(frozen=True)
class Pattern:
    """Contexts that attend to common words, and those words, the most frequent first."""

    words: list[str]
    contexts: list[Context]

    @property
    def strongest(self) -> float:
        """The largest activation."""
        return max(context.activation for context in self.contexts)


def attended(mass: NDArray[np.floating], query: int) -> list[int]:
    """The places that a query attends to, given its attention (T,) over the window.

    >>> attended(np.array([0.6, 0.0, 0.2, 0.0, 0.02, 0.0, 0.02, 0.0, 0.02, 0.0, 0.14]), query=10)
    [2]
    """
    mass = np.asarray(mass[:query], dtype=np.float64)  # without the query
    candidates = len(mass) - 1
    total = mass[1:].sum()
    if candidates < 1 or total <= 0:
        return []
    order = 1 + np.argsort(-mass[1:], kind="stable")
    count = int(np.searchsorted(np.cumsum(mass[order]), HALF * total, side="right")) + 1
    return [int(place) for place in order[:count]] if count <= min(MOST, max(1, candidates // 4)) else []


def contexts(found: Strongest, neuron: int) -> list[Context]:
    """The contexts that fire a neuron, the strongest first."""
    value = found.value[neuron].cpu().numpy()
    strongest = value.max(initial=-np.inf)
    if not strongest > 0:
        return []
    order = [int(n) for n in np.argsort(-value, kind="stable") if value[n] >= FIRES * strongest]
    # one transfer an array
    tokens, mass, along = (x[neuron].cpu().numpy() for x in (found.tokens, found.mass, found.along))
    query, position = found.query[neuron].tolist(), found.position[neuron].tolist()
    result = []
    for n in order:
        length = int((tokens[n] >= 0).sum())
        result.append(
            Context(
                float(value[n]), position[n], query[n], tokens[n, :length].tolist(), attended(mass[n], query[n]),
                mass[n, :length].astype(float).tolist(), along[n, :length].astype(float).tolist(),
            )
        )  # fmt: skip
    return result


def patterns(contexts: Sequence[Context], word: Word) -> list[Pattern]:
    """The patterns among contexts, the one with the strongest context first."""
    words = [attended_words(context, word) for context in contexts]
    found = []
    for members in grouped(words):
        count = Counter(name for n in members for name in words[n])
        names = sorted(count, key=lambda name: (-count[name], name))
        found.append(Pattern(names, [contexts[n] for n in members]))
    return sorted(found, key=lambda pattern: -pattern.strongest)


def grouped(words: Sequence[set[str]]) -> list[list[int]]:
    """Numbers of the contexts of each pattern, given the attended words of the contexts."""
    graph: nx.Graph = nx.Graph()
    for n, own in enumerate(words):
        graph.add_edges_from((n, name) for name in own)  # numbers are contexts, strings are words
    components = (sorted(node for node in part if isinstance(node, int)) for part in nx.connected_components(graph))
    return [members for members in components if len(members) >= SUPPORT]


def attended_words(context: Context, word: Word) -> set[str]:
    """The words that the query attends to; none where attention is spread."""
    return {normalised(word(context.tokens[place])) for place in context.attended}


def normalised(text: str) -> str:
    """What makes two tokens the same word: " Every" and "every" are; white space stays itself."""
    return text.strip().casefold() or text
