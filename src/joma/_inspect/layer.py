"""The patterns of a neuron: words that its contexts attend to more often than those of its layer.

over-represented  k of a neuron's n focused contexts attend to a word, and a share q of all focused contexts of the
                  layer: the word is over-represented if P[Binomial(n, q) ≥ k] × words ≤ ``ALPHA``, the exact tail,
                  corrected (Bonferroni) for the words of the layer. Common words, which join any three contexts, are as
                  common in the layer.
one concept       two over-represented words that one context attends to, or whose embeddings are alike
                  (`joma._inspect.similar`), belong together, directly or through others.
pattern           such a group of words, if its contexts, those that attend to one of the words, are too many by the
                  same test, corrected for words × neurons of the layer; and if they are ``SUPPORT`` or more, at
                  ``PLACES`` places of the text or more that are ``APART`` tokens apart: not one document that repeats
                  itself.

Two patterns of a neuron therefore share no context and no word, and none of their words are alike.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from functools import lru_cache
from typing import NamedTuple

from joma._inspect.collect import Strongest
from joma._inspect.group import Word, attended_words, contexts

ALPHA, SUPPORT, PLACES, APART = 0.01, 3, 3, 1024
Alike = Callable[[str, str], bool]  # two words -> are their embeddings alike?


class Case(NamedTuple):
    """A context, reduced to what decides: its place in the corpus, and the words it attends to (none if spread)."""

    position: int
    words: frozenset[str]


class Group(NamedTuple):
    """A pattern among cases."""

    words: list[str]  # the most frequent first
    members: list[int]  # which cases
    p: float  # of so many by chance, corrected
    places: int  # of the text, `APART` tokens apart
    expected: float  # the share of the layer's contexts that attend to one of the words


class Layer:
    """What all neurons of a layer attend to.

    Attributes:
        neurons: the cases of each neuron that fire it, the strongest first.
    """

    def __init__(self, neurons: list[list[Case]]) -> None:
        self.neurons = neurons
        self._where: dict[
            str, set[int]
        ] = {}  # word -> contexts of the layer that attend to it, by number
        self.focused = 0
        for cases in neurons:
            for case in cases:
                if case.words:
                    for word in case.words:
                        self._where.setdefault(word, set()).add(self.focused)
                    self.focused += 1
        self.firing = sum(any(case.words for case in cases) for cases in neurons)

    @classmethod
    def of(cls, kept: Strongest, word: Word) -> Layer:
        """From the strongest contexts."""
        return cls([cases(kept, neuron, word) for neuron in range(len(kept.value))])

    def over_represented(self, cases: Sequence[Case]) -> list[str]:
        """Words that these contexts of one neuron attend to more often than the layer's."""
        n = sum(bool(case.words) for case in cases)
        counts = Counter(word for case in cases for word in case.words)
        tested = (
            (word, k, len(self._where.get(word, ()))) for word, k in counts.items() if k >= SUPPORT
        )
        return [word for word, k, all_of_it in tested if self._p(k, n, all_of_it) <= ALPHA]

    def groups(self, cases: Sequence[Case], alike: Alike | None) -> list[Group]:
        """The patterns among contexts of one neuron, in the order of their first contexts."""
        n = sum(bool(case.words) for case in cases)
        groups = []
        for names in _concepts(self.over_represented(cases), cases, alike):
            members = [m for m, case in enumerate(cases) if not names.isdisjoint(case.words)]
            everywhere = len(set().union(*(self._where.get(word, ()) for word in names)))
            p = min(1.0, self.firing * self._p(len(members), n, everywhere))
            places = apart([cases[m].position for m in members])
            if p <= ALPHA and len(members) >= SUPPORT and places >= PLACES:
                count = Counter(word for m in members for word in names & cases[m].words)
                words = sorted(names, key=lambda word: (-count[word], word))
                groups.append(Group(words, members, p, places, everywhere / self.focused))
        return sorted(groups, key=lambda group: group.members[0])

    def _p(self, k: int, n: int, everywhere: int) -> float:
        """Of k of n contexts by chance, where so many of the layer's are; corrected for the layer's words."""
        return len(self._where) * tail(k, n, everywhere, self.focused)


def cases(kept: Strongest, neuron: int, word: Word) -> list[Case]:
    """The contexts that fire a neuron, the strongest first, as cases."""
    return [Case(c.position, frozenset(attended_words(c, word))) for c in contexts(kept, neuron)]


@lru_cache(maxsize=1 << 16)
def tail(k: int, n: int, count: int, total: int) -> float:
    """P[Binomial(n, count/total) ≥ k].

    >>> round(tail(2, 2, 1, 4), 6)
    0.0625
    """
    from scipy.special import bdtrc  # what scipy.stats.binom calls, which takes a second to import

    return float(bdtrc(k - 1, n, min(1.0, count / max(1, total))))


def apart(positions: Sequence[int]) -> int:
    """How many of these places are `APART` tokens or more from one another, at most.

    >>> apart([0, 500, 1024, 5000])
    3
    """
    count, last = 0, -APART
    for position in sorted(positions):
        if position - last >= APART:
            count, last = count + 1, position
    return count


def _concepts(over: Collection[str], cases: Sequence[Case], alike: Alike | None) -> list[set[str]]:
    """Over-represented words in groups: those of one context, or alike, are together, directly or through others."""
    linked = [case.words.intersection(over) for case in cases]
    if alike is not None:
        names = sorted(over)
        linked += [frozenset((a, b)) for n, a in enumerate(names) for b in names[:n] if alike(a, b)]
    parts: list[set[str]] = []
    for names_of_one in linked:
        if names_of_one:
            joined = [part for part in parts if not part.isdisjoint(names_of_one)]
            parts = [part for part in parts if part.isdisjoint(names_of_one)]
            parts.append(set(names_of_one).union(*joined))
    return parts
