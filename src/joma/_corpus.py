"""Real text as words: the standard library's own documentation, and WikiText-2 where a folder holds it.

The word rules are those of the paper's experiments (``basic_english``): lower-case; double quotes dropped; apostrophes
and ``. , ( ) ! ?`` split off as words of their own; ``; :`` dropped; then split at white space. On WikiText-2 they give
the paper's 28,782 different words.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

_SPLIT_OFF = re.compile(r"(['.,()!?])")
_DROPPED = str.maketrans({'"': "", ";": " ", ":": " "})


def words(text: str) -> list[str]:
    """The words of ``text`` under the rules above.

    >>> words('He said: "No, (really)!"')
    ['he', 'said', 'no', ',', '(', 'really', ')', '!']
    """
    return _SPLIT_OFF.sub(r" \1 ", text.lower().translate(_DROPPED)).split()


def pydoc_words() -> list[str]:
    """Python's language reference, as it comes with every interpreter (``pydoc_data.topics``): some 80,000 words."""
    from pydoc_data.topics import topics

    return words("\n".join(topics[name] for name in sorted(topics)))


def wikitext_words(folder: str | os.PathLike[str] | None = None, split: str = "train") -> list[str]:
    """WikiText-2's words from ``wiki.<split>.tokens`` in ``folder``, or in the folder that $JOMA_DATA names."""
    folder = folder if folder is not None else os.environ.get("JOMA_DATA")
    if not folder:
        raise ValueError("WikiText-2 is not part of joma: set JOMA_DATA to a folder that holds wiki.train.tokens")
    name = f"wiki.{split}.tokens"
    for path in (Path(folder) / name, Path(folder) / "wikitext-2" / name):
        if path.is_file():
            return words(path.read_text(encoding="utf-8"))
    raise ValueError(f"there is no {name} in {folder} (JOMA_DATA), nor in its folder wikitext-2")


def most_frequent(tokens: Sequence[str], size: int) -> tuple[NDArray[np.int64], list[str]]:
    """``tokens`` as numbers of the ``size`` most frequent words (−1 for all others), and these words in order."""
    vocabulary = [word for word, _ in Counter(tokens).most_common(size)]
    number = {word: n for n, word in enumerate(vocabulary)}
    return np.fromiter((number.get(word, -1) for word in tokens), np.int64, len(tokens)), vocabulary
