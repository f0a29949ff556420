"""Words and sentences of the pages: `python docs/_build/prose.py` prints a table of both.

Start and guides have limits, which `tests/test_docs.py` checks: readers give up on long pages and long sentences.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

DOCS = Path(__file__).parents[1]
START = ("getting-started", "tutorial", "reading", "worries", "faq", "glossary", "compare")
GUIDES = (
    "watch",
    "loggers",
    "explain",
    "charges",
    "scan",
    "audit",
    "forecast",
    "report",
    "cluster",
    "extend",
)
MAX_GUIDE_WORDS = 1_500
MAX_WORDS = 25_000  # of start and guides together
MAX_SENTENCE = 17.0  # words, in the mean over all sentences of start and guides

_CODE = re.compile(r"^```.*?^```[ \t]*$", flags=re.M | re.S)
_COMMENT = re.compile(r"<!--.*?-->", flags=re.S)
_PICTURE = re.compile(r"^!\[.*$", flags=re.M)
_LINK = re.compile(r"\[([^\]]*)\]\([^)]*\)")
_TABLE = re.compile(r"^\|.*$", flags=re.M)
_HEADING = re.compile(r"^#.*$", flags=re.M)
_FORMULA = re.compile(r"\$\$.*?\$\$|\$[^$\n]+\$", flags=re.S)
_ITEM = re.compile(r"^(?:[-*]|\d+\.) ", flags=re.M)
_SENTENCE_END = re.compile(r"(?<=[.!?])[*_)\"”]*\s+(?=[*_(\[\"“`]*[A-Z0-9`τ])|\n\s*\n|\n(?=\0)")
_WORD = re.compile(r"[\w`'’./@^=+*-]*\w[\w`'’./@^=+*-]*")


def prose(text: str) -> str:
    """Return a page without code, pictures, addresses and comments."""
    for pattern in (_CODE, _COMMENT, _PICTURE):
        text = pattern.sub("\n", text)
    return _LINK.sub(r"\1", text)


def word_count(text: str) -> int:
    """Return the words of a page outside of code; tables count."""
    return len(_WORD.findall(prose(text)))


def sentence_lengths(text: str) -> list[int]:
    """Return the words in each sentence of the running text: no code, tables or headings.

    >>> sentence_lengths("Attention is `dense`. It falls:\\n\\n- to 0,\\n- or back.\\n")
    [3, 2, 2, 2]
    """
    text = prose(text)
    for pattern in (_TABLE, _HEADING):
        text = pattern.sub("\n\n", text)
    text = _FORMULA.sub("formula", text)
    text = _ITEM.sub("\0", text)
    counts = [len(_WORD.findall(sentence)) for sentence in _SENTENCE_END.split(text)]
    return [count for count in counts if count]


def mean_sentence(texts: list[str]) -> float:
    """Return the mean number of words per sentence."""
    lengths = [length for text in texts for length in sentence_lengths(text)]
    return sum(lengths) / len(lengths)


def page_text(name: str) -> str:
    """Return the source of a page."""
    return (DOCS / f"{name}.md").read_text(encoding="utf-8")


def main() -> None:
    """Print words and mean sentence of pages: those named, or start and guides."""
    names = sys.argv[1:] or [*START, *GUIDES]
    for name in names:
        text = page_text(name)
        print(f"{name:20} {word_count(text):6} words {mean_sentence([text]):6.1f} per sentence")
    texts = [page_text(name) for name in names]
    total = sum(map(word_count, texts))
    print(f"{'together':20} {total:6} words {mean_sentence(texts):6.1f} per sentence")


if __name__ == "__main__":
    main()
