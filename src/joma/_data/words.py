"""Words of a corpus, for exhibits on real text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from joma._data.corpora import corpus
from joma._data.tokens import Words


def words_of(data: str) -> list[str]:
    """The training words of a corpus, by the paper's rules; of `pydoc`, which is small, all of it."""
    text = corpus(data)
    assert isinstance(text.tokeniser, Words)
    tokens = np.concatenate([text.train, text.valid]) if data == "pydoc" else text.train
    return np.array(text.tokeniser.words, dtype=object)[tokens].tolist()


def most_frequent(tokens: Sequence[str], size: int) -> tuple[NDArray[np.int64], list[str]]:
    """``tokens`` as numbers of the ``size`` most frequent words (−1 for all others), and these words in order."""
    vocabulary = [word for word, _ in Counter(tokens).most_common(size)]
    number = {word: n for n, word in enumerate(vocabulary)}
    return np.fromiter((number.get(word, -1) for word in tokens), np.int64, len(tokens)), vocabulary
