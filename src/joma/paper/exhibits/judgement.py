"""Judgements: a verdict, the numbers that it rests on, and templates of the sentences that report them.

A template is a text with fields, as for `str.format`, that name entries of the numbers:

| field | becomes |
|---|---|
| `{drift:.0e}` | the number `drift` |
| `{softmax.nc:.2f}` | the number `nc` in the mapping `softmax` |
| `{depths}`, `{losses:.2f}` | all values of a list or mapping: "1, 2" |
| `{losses:{key}: {value:.2f}}` | one clause per entry, with its name and its value |
| `{curves:{key}: {start:.2f} → {end:.2f}}` | the same, of entries that are mappings themselves |

Whatever has a number in it is a field: a template that writes one out is refused, and so is a field
without a number. Summary, page, terminal and `verdict.json` are rendered from the same numbers, so
they cannot differ.
"""

from __future__ import annotations

import re
import string
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from joma._runs.encoding import unspell
from joma._runs.files import plain
from joma.paper.verdict import Verdict

# Digits that belong to a name: "Figure 6", "Eqn. 18", "SmolLM2", "WikiText-2".
_NAMES = re.compile(
    r"(?:Figures?|Tables?|Theorems?|Lemmas?|Sections?|Appendix|Eqns?\.) (?:\w\.)?\d+(?:\.\d+)*"
    r"|[A-Za-z]+-?\d+"
)
_DIGITS = re.compile(r"[\d½¼¾]")


@dataclass(frozen=True)
class Judgement:
    """Outcome of a statement under its rule.

    Attributes:
        verdict: the outcome.
        numbers: everything that the verdict rests on, by name.
        template: the findings, in full; clauses are separated by semicolons. The module describes
            its fields.
        short_template: the deciding number, for tables; the findings if it is empty.
    """

    verdict: Verdict
    numbers: dict[str, Any] = field(default_factory=dict)
    template: str = ""
    short_template: str = ""

    def __post_init__(self) -> None:
        # As they are read again from verdict.json: names are strings, arrays are lists.
        object.__setattr__(self, "numbers", unspell(plain(self.numbers)))
        for template in (self.template, self.short_template):
            check_template(template)
        # A field without a number is an error here, not when the page is written.
        _ = self.summary, self.measured

    @cached_property
    def summary(self) -> str:
        """Findings with their numbers."""
        return render(self.template, self.numbers)

    @cached_property
    def measured(self) -> str:
        """Deciding number, with its name."""
        return render(self.short_template or self.template, self.numbers)

    def as_dict(self) -> dict[str, Any]:
        """Return the judgement for JSON, with its sentences."""
        return {
            "verdict": self.verdict,
            "numbers": self.numbers,
            "template": self.template,
            "short_template": self.short_template,
            "summary": self.summary,
            "measured": self.measured,
        }

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> Judgement:
        """Return a judgement that `as_dict` gave; its sentences are rendered again."""
        return cls(
            Verdict(stored["verdict"]),
            unspell(stored["numbers"]),
            stored["template"],
            stored["short_template"],
        )


def render(template: str, numbers: Mapping[str, Any]) -> str:
    """Return a template with its fields filled in.

    >>> render("{depths}: {loss:{value:.1f} ({key})}", {"depths": [1, 2], "loss": {"a": 1, "b": 2}})
    '1, 2: 1.0 (a), 2.0 (b)'
    """
    parts = []
    for text, name, form, conversion in string.Formatter().parse(template):
        parts.append(text)
        if name is None:
            continue
        if conversion is not None:
            raise ValueError(f"a field of a judgement has no !{conversion}: {template!r}")
        parts.append(_rendered(_value_of(name, numbers, template), form or "", numbers))
    return "".join(parts)


def _value_of(name: str, numbers: Mapping[str, Any], template: str) -> Any:
    # The name as a whole comes first: "lr 0.1" has a point and is no path.
    if name in numbers:
        return numbers[name]
    value: Any = numbers
    for part in name.split("."):
        if not isinstance(value, Mapping) or part not in value:
            known = ", ".join(map(str, numbers))
            raise ValueError(
                f"the template {template!r} needs {name!r}, which the numbers do not have: {known}"
            )
        value = value[part]
    return value


def _rendered(value: Any, form: str, numbers: Mapping[str, Any]) -> str:
    if isinstance(value, Mapping):
        entries = list(value.items())
    elif isinstance(value, (list, tuple)):
        entries = list(enumerate(value))
    elif "{" in form:
        raise ValueError(f"{form!r} is for each entry of a list or mapping, got {value!r}")
    else:
        return format(value, form)
    texts = []
    for key, item in entries:
        if "{" in form:
            fields = item if isinstance(item, Mapping) else {"value": item}
            texts.append(render(form, {**numbers, **fields, "key": key}))
        else:
            texts.append(format(item, form))
    return joined(texts)


def joined(texts: list[str]) -> str:
    """Return a list in words; entries with commas of their own are separated by semicolons.

    >>> joined(["a", "b"]), joined(["a, b", "c"]), joined([])
    ('a, b', 'a, b; c', 'none')
    """
    if not texts:
        return "none"
    separator = ", "
    if any(", " in text for text in texts):
        separator = "; "
    return separator.join(texts)


def check_template(template: str) -> None:
    """Refuse a template that writes out a number: it could differ from the one that decides."""
    for text, _, form, _ in string.Formatter().parse(template):
        match = _DIGITS.search(_NAMES.sub("", text))
        if match:
            raise ValueError(
                f"the template {template!r} has the digit {match.group()!r}: make it a field, and "
                "give its number among the numbers of the judgement"
            )
        if form and "{" in form:
            check_template(form)
