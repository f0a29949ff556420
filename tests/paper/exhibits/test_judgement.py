"""Judgements: sentences are rendered from the numbers, and cannot hold others."""

import ast
import inspect
import json

import numpy as np
import pandas as pd
import pytest

from joma._runs import write_json
from joma.paper.exhibits import ORDER, Judgement, get
from joma.paper.exhibits.judgement import render
from joma.paper.verdict import Verdict

CURVES = {"a": {"start": 1.25, "end": 3.0}, "b": {"start": 0.5, "end": float("nan")}}


@pytest.mark.parametrize(
    ("template", "sentence"),
    [
        ("gap {gap:.0e} in {cases.held} cases", "gap 2e-09 in 3 cases"),
        ("Figure 6 and Eqn. 18 on WikiText-2", "Figure 6 and Eqn. 18 on WikiText-2"),
        ("{depths}", "1, 2"),
        ("{losses:.1f}", "5.4, 5.2"),
        ("{nothing}", "none"),
        ("{losses:{value:.2f} ({key})}", "5.36 (1), 5.25 (2)"),
        ("{curves:{key}: {start:.2f} → {end:.1f}}", "a: 1.25 → 3.0, b: 0.50 → nan"),
        ("{curves:{key}, {start:g}}", "a, 1.25; b, 0.5"),
        ("{nested:{key} {inner:{value}{unit}}}", "x 1 s, 2 s"),
        ("{lr 0.1}", "7"),
    ],
)
def test_a_template_is_filled_in_from_the_numbers(template, sentence):
    numbers = {
        "gap": 2e-9,
        "cases": {"held": 3},
        "depths": (1, 2),
        "losses": {1: 5.357, 2: 5.25},
        "nothing": [],
        "curves": CURVES,
        "nested": {"x": {"inner": [1, 2], "unit": " s"}},
        "lr 0.1": 7,
    }
    assert Judgement(Verdict.HOLDS, numbers, template).summary == sentence


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("holds in 90 % of the draws", "has the digit '9'"),
        ("{curves:{key} at 5 {start}}", "has the digit '5'"),
        ("to ¼ of it", "has the digit '¼'"),
        ("{missing:.2f}", "needs 'missing', which the numbers do not have: curves"),
        ("{curves.a.middle}", "needs 'curves.a.middle'"),
        ("{curves:{middle}}", "needs 'middle'"),
    ],
)
def test_a_number_that_the_numbers_do_not_have_is_refused(template, message):
    for templates in ((template, ""), ("", template)):
        with pytest.raises(ValueError, match=message):
            Judgement(Verdict.HOLDS, {"curves": CURVES}, *templates)


def test_a_number_that_is_missing_is_not_rendered_as_if_it_were_there():
    with pytest.raises(TypeError):
        Judgement(Verdict.HOLDS, {"loss": None}, "{loss:.2f}")


def test_a_judgement_is_the_same_after_it_was_stored(tmp_path):
    numbers = {
        "array": np.arange(3) / 7,
        "series": pd.Series([True, False]),
        "curves": CURVES,
        "by depth": {1: np.float64(0.5), 2: np.inf},
        "pair": (1, None),
    }
    made = Judgement(Verdict.UNDER, numbers, "{array:.3f}; {by depth}", "{curves:{end}}")
    write_json(tmp_path / "verdict.json", made.as_dict())
    stored = json.loads((tmp_path / "verdict.json").read_text())
    again = Judgement.from_dict(stored)
    assert (again.verdict, again.summary, again.measured) == (
        made.verdict,
        made.summary,
        made.measured,
    )
    assert stored["summary"] == made.summary
    assert repr(again.numbers) == repr(made.numbers)


def test_changed_numbers_change_every_sentence():
    made = Judgement(Verdict.HOLDS, {"gap": 0.5}, "a gap of {gap}", "{gap}")
    other = Judgement.from_dict(made.as_dict() | {"numbers": {"gap": 0.7}})
    assert (other.summary, other.measured) == ("a gap of 0.7", "0.7")


def test_an_entry_shadows_the_numbers_around_it():
    assert render("{runs:{lr}}; {lr}", {"lr": 1, "runs": {"a": {"lr": 2}}}) == "2; 1"


@pytest.mark.parametrize("id", ORDER)
def test_judges_give_templates_and_not_sentences(id):
    """A sentence that an f-string has rendered hides which number it shows."""
    (exhibit,) = get([id])
    assert exhibit.rule
    assert bool(exhibit.would_decide) == (Verdict.INCONCLUSIVE in exhibit.messages)
    judge = ast.parse(inspect.getsource(exhibit.experiment.judge))
    formatted = []
    for call in ast.walk(judge):
        is_judgement = isinstance(call, ast.Call) and getattr(call.func, "id", "") == "Judgement"
        if is_judgement:
            for node in ast.walk(call):
                if isinstance(node, ast.FormattedValue) and node.format_spec is not None:
                    formatted.append(ast.unparse(node))
    assert formatted == []
