"""Which values make sense for the settings of joma's own exhibits: `check_sense`, for ``--set``.

Types are those of the presets, as `choices` reads them. A number has a range of its own in `RANGES`,
or else one that the presets imply: from 1 if it is whole, above 0 if it is not, to `FACTOR` times the
largest preset. Words name something that exists. Lists and mappings are checked item by item.

>>> check_sense("columns", 0, [6, 12])
Traceback (most recent call last):
ValueError: --set: columns must be a whole number of at least 1 and at most 12, got 0; the presets have 6 or 12
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from joma.paper.exhibits._series import SERIES
from joma.paper.labs.table1 import TABLE1

FACTOR = 1000  # times the largest preset: more than that is a slip of the keyboard


@dataclass(frozen=True)
class Range:
    """Numbers from ``least`` to ``most``, each end included unless it is open.

    An end that is None is the one that the presets imply.
    """

    least: float | None = None
    most: float | None = None
    is_open_below: bool = False
    is_open_above: bool = False

    def holds(self, value: float) -> bool:
        """True if the value is in the range."""
        assert self.least is not None
        assert self.most is not None
        is_above = value > self.least if self.is_open_below else value >= self.least
        is_below = value < self.most if self.is_open_above else value <= self.most
        return is_above and is_below

    def __str__(self) -> str:
        low = "above" if self.is_open_below else "of at least"
        high = "below" if self.is_open_above else "at most"
        return f"{low} {self.least:,.10g} and {high} {self.most:,.10g}"


_FROM_0 = Range(least=0)
_FROM_2 = Range(least=2)
# by the name of the setting, or by the exhibit and the name where that differs
RANGES = {
    "angles": Range(0, 0.999),  # cosines
    "biases": _FROM_0,
    "children": Range(2, 10),
    "classes": _FROM_2,
    "clock.steps": _FROM_0,  # by τ alone
    "columns": Range(1, len(TABLE1)),
    "components": _FROM_2,
    "depth": Range(2, 12),
    "embeddings.steps": _FROM_0,  # checkpoints, of which the first is 0
    "epsilon": Range(0, 0.5, True, True),
    "fig5.samples": Range(least=100),
    "folding.nodes": _FROM_2,
    "half": _FROM_2,
    "layers": Range(1, 100),
    "length": _FROM_2,
    "n": Range(2, 100),
    "orthogonality.M": _FROM_2,
    "other_layers": Range(1, 100),
    "parameterised.times": Range(least=20),
    "fig9.points": _FROM_2,
    "rho": Range(0, 1, True, True),
    "series.vocabulary": Range(least=256),  # byte pairs have a token for each byte
    "softmax.times": Range(least=20),
    "fig8.tau": _FROM_0,  # 0: by the number of steps
    "times": Range(least=3),
    "tokens": _FROM_2,
    "valid_every": _FROM_0,  # at every measurement
    "valid_windows": _FROM_0,  # all of them
    "vocabulary": _FROM_2,
    "window": _FROM_2,
    "zipf": _FROM_0,
}
REPEATABLE = ("fig6.steps",)  # one value per corpus
FREE_KEYS = ("models",)  # mappings from names that are the user's


def check_sense(name: str, value: Any, examples: Sequence[Any], exhibit: str = "") -> None:
    """Refuse a value that makes no sense for a setting, in a sentence that says what is expected.

    Arguments:
        name: of the setting; "noisy.rho" of an entry of a mapping.
        value: as `choices.choose` read it.
        examples: what the presets have.
        exhibit: the id of the exhibit.
    """
    if value is None and any(example is None for example in examples):
        return
    kinds = [example for example in examples if example is not None]
    if any(isinstance(example, Mapping) for example in kinds):
        _check_mapping(name, value, kinds, exhibit)
    elif any(isinstance(example, (list, tuple)) for example in kinds):
        _check_list(name, value, kinds, exhibit)
    elif any(isinstance(example, bool) for example in kinds):
        if not isinstance(value, bool):
            raise _refusal(name, "true or false", value, examples)
    elif any(isinstance(example, str) for example in kinds):
        _check_word(name, value, examples, exhibit)
    elif kinds:
        _check_number(name, value, kinds, exhibit)


def _check_mapping(
    name: str, value: Any, examples: Sequence[Mapping[str, Any]], exhibit: str
) -> None:
    if not isinstance(value, dict):
        raise _refusal(name, "a JSON object", value, examples)
    if name in FREE_KEYS:
        if not value:
            raise _refusal(name, "a JSON object with at least one entry", value, examples)
        for key, item in value.items():
            _check_word(name, key, [key for example in examples for key in example], exhibit)
            if item is not None and not isinstance(item, str):
                raise _refusal(f"{name}.{key}", "a text or null", item, examples)
        return
    known = dict.fromkeys(key for example in examples for key in example)
    if name == "series":  # what is left out is as usual
        examples = [SERIES]
        known = dict.fromkeys(SERIES)
    missing = [key for key in known if key not in value and name != "series"]
    unknown = [key for key in value if key not in known]
    if missing or unknown:
        expected = f"a JSON object with the keys {', '.join(known)}"
        if name == "series":
            expected = f"a JSON object with keys out of {', '.join(known)}"
        raise _refusal(name, expected, value, examples)
    for key, item in value.items():
        below = [example[key] for example in examples if key in example]
        check_sense(f"{name}.{key}", item, below, exhibit)


def _check_list(name: str, value: Any, examples: Sequence[Any], exhibit: str) -> None:
    if not isinstance(value, list) or not value:
        raise _refusal(name, "a list of at least one value", value, examples)
    items = [item for example in examples if isinstance(example, (list, tuple)) for item in example]
    for item in value:
        try:
            check_sense(name, item, items, exhibit)
        except ValueError as error:
            if len(value) == 1:
                raise
            raise ValueError(f"{error} (in {json.dumps(value, ensure_ascii=False)})") from None
    full = f"{exhibit}.{name}"
    repeated = [item for n, item in enumerate(value) if item in value[:n]]
    if repeated and full not in REPEATABLE:
        raise _refusal(name, "a list of different values", value, examples)


def _check_number(name: str, value: Any, examples: Sequence[Any], exhibit: str) -> None:
    is_whole = all(isinstance(example, int) for example in examples)
    noun = "a whole number" if is_whole else "a number"
    allowed = (int,) if is_whole else (int, float)
    if isinstance(value, bool) or not isinstance(value, allowed) or not math.isfinite(value):
        raise _refusal(name, noun, value, examples)
    limits = _range_of(name, examples, exhibit)
    if not limits.holds(value):
        raise _refusal(name, f"{noun} {limits}", value, examples)


def _range_of(name: str, examples: Sequence[float], exhibit: str) -> Range:
    """Return the range of a setting: its own, by the most specific name there is, or the implied one."""
    most = FACTOR * max(examples)
    is_whole = all(isinstance(example, int) for example in examples)
    implied = Range(1, most) if is_whole else Range(0, most, is_open_below=True)
    for key in (f"{exhibit}.{name}", name, name.rpartition(".")[2]):
        own = RANGES.get(key)
        if own is None:
            continue
        if own.least is not None:
            implied = replace(implied, least=own.least, is_open_below=own.is_open_below)
        if own.most is not None:
            implied = replace(implied, most=own.most, is_open_above=own.is_open_above)
        break
    return implied


def _check_word(name: str, value: Any, examples: Sequence[Any], exhibit: str) -> None:
    if not isinstance(value, str) or not value.strip() or re.search(r"[\[\]{}\"\n]", value):
        raise _refusal(name, "a word", value, examples)
    check = _WORDS.get(name.rpartition(".")[2])
    if check is not None:
        check(name, value, examples)


def _check_corpus(name: str, value: str, examples: Sequence[Any]) -> None:
    from joma._data.corpora import check_source

    try:
        check_source(value)
    except ValueError as error:
        raise ValueError(f"--set: {name}: {error}") from None


def _check_model(name: str, value: str, examples: Sequence[Any]) -> None:
    from joma._data.packaged import MODELS

    if value in examples or value in MODELS or Path(value).expanduser().exists():
        return
    if not re.fullmatch(r"[\w.-]+/[\w.-]+(/[\w./-]+)?", value):
        expected = f"a folder, an id of the hub (OWNER/NAME), or one of {', '.join(MODELS)}"
        raise _refusal(name, expected, value, examples)


def _check_gauge(name: str, value: str, examples: Sequence[Any]) -> None:
    from joma._measure.gauges.registry import in_training

    try:
        in_training([value])
    except ValueError as error:
        raise ValueError(f"--set: {name}: {error}") from None


def _check_choice(name: str, value: str, examples: Sequence[Any]) -> None:
    if value not in examples:
        raise _refusal(name, f"one of {', '.join(dict.fromkeys(examples))}", value, examples)


_WORDS: dict[str, Callable[[str, str, Sequence[Any]], None]] = {
    "data": _check_corpus,
    "text": _check_corpus,
    "model": _check_model,
    "models": _check_model,
    "gauges": _check_gauge,
    "inputs": _check_choice,
    "labels": _check_choice,
    "objectives": _check_choice,
}


def _refusal(name: str, expected: str, value: Any, examples: Sequence[Any]) -> ValueError:
    found = json.dumps(value, ensure_ascii=False)
    texts = dict.fromkeys(json.dumps(example, ensure_ascii=False) for example in examples)
    presets = " or ".join(texts)
    return ValueError(f"--set: {name} must be {expected}, got {found}; the presets have {presets}")
