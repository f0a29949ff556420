"""Codes of refusals: each has a meaning and an advice, stands in the documentation, and is used."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import joma
from joma._measure.events.reasons import Reason, Refusal, message_of

ROOT = Path(__file__).parents[3]
SOURCE = Path(joma.__file__).parent
FILES = sorted(SOURCE.rglob("*.py"))


def table() -> dict[str, tuple[str, str]]:
    """Code -> meaning and advice, as the documentation has them."""
    page = (ROOT / "docs" / "watch-reference.md").read_text()
    section = page.split("## Codes\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `([a-z-]+)` \| (.+) \| (.+) \|$", section, flags=re.MULTILINE)
    return {code: (meaning, advice) for code, meaning, advice in rows}


def test_the_table_of_the_documentation_has_every_code_with_its_texts():
    assert table() == {reason.value: (reason.meaning, reason.advice) for reason in Reason}


@pytest.mark.parametrize("reason", Reason)
def test_a_code_is_short_and_its_texts_are_one_sentence_each(reason):
    assert re.fullmatch(r"[a-z]+(-[a-z]+)*", reason.value)
    for text in (reason.meaning, reason.advice):
        assert text.endswith(".")
        assert ". " not in text


@pytest.mark.parametrize("reason", Reason)
def test_every_code_is_used(reason):
    users = [file for file in FILES if f"Reason.{reason.name}" in file.read_text()]
    assert [file for file in users if file.name != "reasons.py"] or reason is Reason.INTERNAL


def has_code(call: ast.Call) -> bool:
    """True if a code, or a message that has one, is among the arguments of an exception."""
    text = ast.unparse(call)
    return "Reason." in text or any(
        name in text for name in ("refusal", "no_attention", "cannot_gather")
    )


def test_every_refusal_of_a_model_has_a_code():
    raised = []
    for file in FILES:
        for node in ast.walk(ast.parse(file.read_text())):
            is_refusal = isinstance(node, ast.Call) and ast.unparse(node.func) == "NotWatchable"
            if is_refusal and not has_code(node):
                raised.append(f"{file.name}:{node.lineno}")
    assert raised == []


def test_a_message_ends_with_its_code():
    assert message_of(Refusal(Reason.LINEAR, "as it is")) == "as it is [linear]"
    assert message_of(KeyError("x")) == "KeyError: 'x' [internal]"
