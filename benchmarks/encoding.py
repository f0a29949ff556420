"""Encoding a text into word numbers: joma's stream against torchtext's way of doing it.

`python -m benchmarks.encoding` encodes a made-up text of WikiText-103's length (100 million words, 300,000 distinct
ones, Zipf's law) in a process of its own and prints time and peak memory.
"""

from __future__ import annotations

import re
import resource
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks._timing import alternate, row
from joma._data.corpora import corpus

_RULES = [
    (re.compile(pattern), replacement)
    for pattern, replacement in [
        (r"\'", " '  "),
        (r"\"", ""),
        (r"\.", " . "),
        (r"<br \/>", " "),
        (r",", " , "),
        (r"\(", " ( "),
        (r"\)", " ) "),
        (r"\!", " ! "),
        (r"\?", " ? "),
        (r"\;", " "),
        (r"\:", " "),
        (r"\s+", " "),
    ]
]


def basic_english(line: str) -> list[str]:
    """torchtext's rules, as regular expressions in its order."""
    line = line.lower()
    for pattern, replacement in _RULES:
        line = pattern.sub(replacement, line)
    return line.split()


def _torchtext(path: Path) -> np.ndarray[Any, Any]:
    """Build the vocabulary from the lines, then encode them, all in memory."""
    with path.open() as lines:
        counts = Counter(word for line in lines for word in basic_english(line))
    counts.pop("<unk>", None)
    words = ["<unk>", *sorted(counts, key=lambda word: (-counts[word], word))]
    numbers = {word: i for i, word in enumerate(words)}
    with path.open() as lines:
        parts = [
            np.array([numbers[word] for word in basic_english(line)], np.int64) for line in lines
        ]
    return np.concatenate(parts)


def _write(path: Path, words: int, distinct: int) -> None:
    rng = np.random.default_rng(0)
    share = 1 / np.arange(1, distinct + 1)
    edges = np.cumsum(share / share.sum())
    names = np.array(
        [f"{'Word' if i % 7 else 'name'}{i}{'' if i % 11 else ','}" for i in range(distinct)]
    )
    with path.open("w") as stream:
        for start in range(0, words, 100_000):
            drawn = names[np.searchsorted(edges, rng.random(min(100_000, words - start)))]
            stream.writelines(
                " ".join(drawn[i : i + 60]) + " .\n" for i in range(0, len(drawn), 60)
            )


def run(rounds: int = 3) -> list[dict[str, Any]]:
    """Compare on a million words."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _write(folder / "train.txt", 1_000_000, 30_000)
        _write(folder / "valid.txt", 100, 100)

        def ours() -> np.ndarray[Any, Any]:
            with tempfile.TemporaryDirectory() as cache:  # empty
                return np.array(corpus(folder, cache=cache).train)

        def theirs() -> np.ndarray[Any, Any]:
            return _torchtext(folder / "train.txt")

        (fast, mine), (slow, other) = alternate(ours, theirs, rounds=rounds)
    return [
        row(
            f"{len(mine) / 1e6:.1f} million words into numbers",
            "`corpus`, streamed to disk",
            "torchtext's rules, line by line, in memory",
            fast,
            slow,
            "equal tokens" if np.array_equal(mine, other) else "tokens differ",
        )
    ]


def _long(words: int = 100_000_000) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _write(folder / "train.txt", words, 300_000)
        _write(folder / "valid.txt", 100, 100)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        wall, cpu = time.perf_counter(), time.process_time()
        c = corpus(folder, cache=folder / "cache")
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        unit = 1 << (20 if sys.platform == "darwin" else 10)
        print(
            f"{len(c.train) / 1e6:.1f} million words, {c.size:,} distinct: {wall:.0f} s ({cpu:.0f} s of CPU, "
            f"{len(c.train) / cpu / 1e6:.1f} million per s), peak {peak / unit:.0f} MB ({before / unit:.0f} before)"
        )


if __name__ == "__main__":
    _long()
