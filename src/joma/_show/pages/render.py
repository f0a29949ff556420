"""The page's templates (``templates/``): Jinja escapes what they are given, but for the HTML that this package made."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import lru_cache
from importlib import resources
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from joma._runs.alerts import tell_alert
from joma._runs.state import State
from joma._show.pages.typeset import typeset
from joma.paper.verdict import Verdict

# the colour of a verdict: a class of the style
TONE: dict[str, str] = {
    Verdict.HOLDS: "good",
    Verdict.CORRECTED: "corrected",
    Verdict.UNDER: "condition",
    Verdict.INDISTINCT: "indistinct",
    Verdict.FAILS: "bad",
    Verdict.ERROR: "bad",
    Verdict.INCONCLUSIVE: "neutral",
}
MOST_LETTERS = 60  # of a value in a table
STATUS = {  # of a run
    "done": "good", "running": "fair", "interrupted": "fair", "failed": "bad", "diverged": "bad", "killed": "bad",
}  # fmt: skip


def tone_of(info: Mapping[str, Any], state: State, worst: str | None) -> str:
    """Return the tone of a run's state: "good", "fair" or "bad".

    A run with a critical alert, and an audit that found faults, are bad, though they are done; one with a warning is fair.
    ``worst`` is the level of the run's worst alert, if it has one.
    """
    if worst == "critical" or info.get("faults"):
        return "bad"
    if state.status == "done" and (info.get("reason") or worst == "warning"):
        return "fair"
    return STATUS.get(state.status, "fair")


def asset(name: str) -> str:
    """Return the text of a file in ``assets/``."""
    return (resources.files("joma._show.pages") / "assets" / name).read_text(encoding="utf-8")


def render(template: str, /, **values: Any) -> Markup:
    """Return the HTML of a template."""
    return Markup(_environment().get_template(template).render(values))


@lru_cache(maxsize=1)
def _environment() -> Environment:
    folder = str(resources.files("joma._show.pages") / "templates")
    environment = Environment(
        loader=FileSystemLoader(folder),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    environment.globals.update(TONE=TONE, STATUS=STATUS, Verdict=Verdict)
    environment.filters.update(
        typeset=typeset,
        number=_number,
        plain=_plain,
        told=tell_alert,
        json=json.dumps,
        short=_short,
        titled=_titled,
        day=lambda time: str(time)[:10],
        capital=capitalized,
    )
    return environment


def capitalized(text: str) -> str:
    """Return a text with a capital at its start, unless it starts with a symbol: ẑ is not Ẑ, and v is not V.

    >>> capitalized("the same"), capitalized("v grows"), capitalized("ẑ follows z")
    ('The same', 'v grows', 'ẑ follows z')
    """
    word = re.match(r"[a-z]{2,}\b|a\b", text)
    if word is None:
        return text
    return text[0].upper() + text[1:]


def _titled(gauge: str) -> str:
    from joma._show.plots.watch import titled

    return titled(gauge)


def _plain(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, str):
        return value
    if isinstance(value, float):
        return f"{value:.6g}"
    return json.dumps(value, ensure_ascii=False)


def _short(value: Any) -> str:
    text = _plain(value)
    if len(text) <= MOST_LETTERS:
        return text
    return text[: MOST_LETTERS - 3] + "…"


def _number(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:.2g}"
