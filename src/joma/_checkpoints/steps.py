"""The training step of a checkpoint, from its name or from the state that a trainer left.

A number in a model's name is no step: `smollm2` and `bert_4bit` say nothing about training. A step
is a number after a word for it (`step1000`, `checkpoint-1000`, `iter_1000`), a name that is a
number, and, among files that differ in one number only (`model-9.pt`, `model-10.pt`), that number.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

# The first one that a name matches decides. Sizes of models, as in 7b, 70m or 1.4b, are no steps.
_STEP_WORDS = (
    re.compile(r"(?<![a-z])steps?[-_=]?(\d+)", re.IGNORECASE),
    re.compile(
        r"(?<![a-z])(?:checkpoint|ckpt|iter(?:ation)?)[-_=]?(\d+)(?!\d|\.\d|[bm](?![a-z]))",
        re.IGNORECASE,
    ),
)
# What files of one series share, and the number in which they differ: "model-" and "10".
_LAST_NUMBER = re.compile(r"(.*[-_.=])(\d+)")
_MAX_DIGITS = 18  # more digits are a date with a time, or no number of steps at all


def step_of(name: str) -> int | None:
    """Return the step in a name.

    That is 1000 for "step1000", "checkpoint-1000", "step1000-tokens4B", "epoch=2-step=1000" and
    "1000".
    """
    digits = ""
    if name.isdecimal():
        digits = name
    # Reversed, so that the first word that matches is the last to be written.
    for word in reversed(_STEP_WORDS):
        match = word.search(name)
        if match is not None:
            digits = match[1]
    if not digits or len(digits) > _MAX_DIGITS:
        return None
    return int(digits)


def steps_of_files(files: Iterable[Path]) -> dict[Path, int]:
    """Return the steps of those files that have one."""
    series = {file: _series_and_number(file) for file in files}
    series_sizes = Counter(key for key, _ in series.values())
    steps = {}
    for file, (key, number) in series.items():
        step = step_of(file.stem)
        # One file alone may be called "llama-7.pt": its number is a step only among others.
        if step is None and number is not None and series_sizes[key] > 1:
            step = number
        if step is not None:
            steps[file] = step
    return steps


def _series_and_number(file: Path) -> tuple[tuple[str, str] | None, int | None]:
    """Return what files of a series share, and the last number in a file's name."""
    match = _LAST_NUMBER.fullmatch(file.stem)
    if match is None or len(match[2]) > _MAX_DIGITS:
        return None, None
    return (match[1], file.suffix), int(match[2])


def trained_steps(folder: Path) -> int | None:
    """Return how many steps a Trainer has made, by the state that it left in a folder."""
    try:
        state = json.loads((folder / "trainer_state.json").read_text(encoding="utf-8"))
        step = state["global_step"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    if isinstance(step, int) and 0 <= step < 10**_MAX_DIGITS:
        return step
    return None
