"""The training step of a checkpoint, from the names of its revision, folder or file, or from a trainer's state.

A number in a model's name is no step: `smollm2` and `bert_4bit` say nothing about training. What counts is a word for
it (`step1000`, `checkpoint-1000`, `iter_1000`), a name that is a number, and among files that differ in one
number only (`model-9.pt`, `model-10.pt`) that number.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

_WORDS = (  # the first that a name matches; sizes as in 7b, 70m or 1.4b are no steps
    re.compile(r"(?<![a-z])steps?[-_=]?(\d+)", re.IGNORECASE),
    re.compile(
        r"(?<![a-z])(?:checkpoint|ckpt|iter(?:ation)?)[-_=]?(\d+)(?!\d|\.\d|[bm](?![a-z]))",
        re.IGNORECASE,
    ),
)
_LAST = re.compile(r"(.*[-_.=])(\d+)")
_DIGITS = 18  # more is a date with a time, or no number of steps at all


def step_of(name: str) -> int | None:
    """The step in a name: 1000 of "step1000", "checkpoint-1000", "step1000-tokens4B", "epoch=2-step=1000", "1000"."""
    numbers = [match[1] for word in _WORDS if (match := word.search(name))] or [
        name
    ] * name.isdecimal()
    return int(numbers[0]) if numbers and len(numbers[0]) <= _DIGITS else None


def steps_of_files(files: Iterable[Path]) -> dict[Path, int]:
    """Files -> their steps, those that have one; also the last number of names that are equal but for it."""
    files = list(files)
    series = Counter(_series(file) for file in files)
    steps = {}
    for file in files:
        step = step_of(file.stem)
        if step is None and (key := _series(file)) is not None and series[key] > 1:
            step = int(_LAST.fullmatch(file.stem)[2])  # type: ignore[index]
        if step is not None:
            steps[file] = step
    return steps


def _series(file: Path) -> tuple[str, str] | None:
    match = _LAST.fullmatch(file.stem)
    return (match[1], file.suffix) if match and len(match[2]) <= _DIGITS else None


def trained_steps(folder: Path) -> int | None:
    """How many steps a Trainer made that left its state in the folder."""
    try:
        step = json.loads((folder / "trainer_state.json").read_text(encoding="utf-8"))[
            "global_step"
        ]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return step if isinstance(step, int) and 0 <= step < 10**_DIGITS else None
