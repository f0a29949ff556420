"""`--set key=value`: settings of an exhibit other than its preset's, typed as the presets have them.

>>> presets = {
...     "default": {"steps": 100, "lr": [1e-3], "vocabulary": None},
...     "laptop": {"vocabulary": 4000},
... }
>>> choose(presets, "default", ["steps=200", "lr=1e-4,1e-3", "vocabulary=500"])
{'steps': 200, 'lr': [0.0001, 0.001], 'vocabulary': 500}
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from joma._suggest import unknown_name
from joma.paper.exhibits.base import Exhibit
from joma.paper.exhibits.sense import check_sense


def with_settings(exhibit: Exhibit, preset: str, texts: Iterable[str]) -> Exhibit:
    """Return the exhibit with some settings of a preset changed, as `choose` reads them.

    Values that make no sense are refused. What makes sense for an exhibit that a user registered is
    not known here.
    """
    experiment = exhibit.experiment
    if preset not in experiment.settings:
        raise ValueError(
            f"--set: {exhibit.id} is not computed at the preset {preset}, which has no settings to "
            f"change: choose --preset {' or '.join(experiment.settings)}"
        )
    texts = list(texts)
    chosen = choose(experiment.settings, preset, texts)
    if exhibit.is_jomas:
        for key, value in chosen.items():
            examples = [
                settings[key] for settings in experiment.settings.values() if key in settings
            ]
            check_sense(key, value, examples, exhibit.id)
    settings = {**experiment.settings, preset: {**experiment.settings[preset], **chosen}}
    return replace(exhibit, experiment=replace(experiment, settings=settings), changed=tuple(texts))


def choose(
    presets: Mapping[str, Mapping[str, Any]], preset: str, texts: Iterable[str]
) -> dict[str, Any]:
    """The settings that ``texts`` ("key=value") name, as values of the presets' types.

    A list is given with commas between its values; a mapping, or a list of lists, as JSON; None as "none" where one of
    the presets has it.
    """
    known = presets[preset]
    chosen: dict[str, Any] = {}
    for text in texts:
        key, sign, value = text.partition("=")
        key = key.strip()
        if not sign:
            raise ValueError(f"--set {text!r} is not key=value. Keys: {', '.join(known)}.")
        if key not in known:
            raise ValueError("--set: " + unknown_name(key, known, "setting"))
        if key in chosen:
            raise ValueError(f"--set: {key} is given twice")
        examples = [settings[key] for settings in presets.values() if key in settings]
        chosen[key] = _value(key, value.strip(), examples)
    return chosen


def _value(key: str, text: str, examples: list[Any]) -> Any:
    """``text`` as a value like one of the examples: a list before the word that any text is."""
    for example in sorted(examples, key=lambda example: isinstance(example, str)):
        try:
            return _read(text, example)
        except ValueError:
            continue
    words = " or ".join(dict.fromkeys(_describe(example) for example in examples))
    shown = " or ".join(
        dict.fromkeys(json.dumps(example, ensure_ascii=False) for example in examples)
    )
    raise ValueError(f"--set: {key} must be {words}, got {text!r}; the presets have {shown}")


def _read(text: str, example: Any) -> Any:
    """``text`` as a value of the example's type, or a ValueError."""
    if isinstance(example, dict) or _is_nested(example):
        value = json.loads(text)
        if not isinstance(value, type(example)):
            raise ValueError(text)
        return value
    if isinstance(example, (list, tuple)):
        return [_read(part.strip(), example[0]) for part in text.split(",")]
    if example is None or isinstance(example, bool):
        words = {"none": None} if example is None else {"true": True, "false": False}
        if text.lower() not in words:
            raise ValueError(text)
        return words[text.lower()]
    value = type(example)(text)
    if not text or (isinstance(value, float) and not math.isfinite(value)):
        raise ValueError(text)
    return value


def _is_nested(example: Any) -> bool:
    return isinstance(example, (list, tuple)) and (
        not example or isinstance(example[0], (list, tuple, dict))
    )


def _describe(example: Any) -> str:
    if isinstance(example, dict) or _is_nested(example):
        return "JSON"
    if isinstance(example, (list, tuple)):
        return f"a list with commas, each item {_describe(example[0])}"
    names = {
        type(None): "none",
        bool: "true or false",
        int: "a whole number",
        float: "a number",
        str: "a word",
    }
    return names[type(example)]
