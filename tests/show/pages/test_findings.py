"""The first section of the paper's page: findings, the map, and the counts are those of the stored verdicts."""

import html
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from joma._data.packaged import MODELS
from joma._show.pages.document import Page
from joma._show.pages.findings import SENTENCES, Shown, findings_section, groups, map_rows, sentence
from joma._show.pages.page import write_report
from joma.paper.claims import Kind
from joma.paper.exhibits import get, make_exhibit
from joma.paper.exhibits.judgement import Judgement
from joma.paper.verdict import Verdict

from .pages import results


@pytest.fixture(scope="module")
def fig4(tmp_path_factory):
    return make_exhibit(get(["fig4"])[0], out=tmp_path_factory.mktemp("findings")).path


def plain(markup):
    """The words of a piece of HTML."""
    words = " ".join(html.unescape(re.sub("<[^>]*>", " ", str(markup))).split())
    return re.sub(r" ([:;,.])", r"\1", words)


def shown_with(id, verdict, measured="1 of 2", settings=()):
    """An exhibit on the page with that verdict."""
    (exhibit,) = get([id])
    judgement = None
    if verdict is not Verdict.ERROR:
        judgement = Judgement(verdict, {"measured": measured}, "summary", "{measured}")
    return Shown(exhibit, id, Path("nowhere"), judgement, dict(settings))


def section(shown, claims=None, error=None):
    return findings_section(Page(Path("page.html")), shown, claims, error)


def test_findings_say_what_the_stored_verdict_says(fig4):
    stored = json.loads((fig4 / "verdict.json").read_text())
    numbers = stored["numbers"]
    numbers["cases"]["eqn6"] |= {"depth": 1.234, "rebound": 0.567}
    (fig4 / "verdict.json").write_text(json.dumps(stored | {"verdict": "fails"}))
    (exhibit,) = get(["fig4"])
    text = write_report(fig4.parent, [exhibit], None, preset="default", seed=0).read_text()
    card = re.search(r'<ol class="findings">(.*?)</ol>', text, flags=re.S)[1]
    said = plain(re.sub(r"<svg.*?</svg>", "", card, flags=re.S))
    assert said.startswith(exhibit.message(Verdict.FAILS))
    assert "falls by 1.23 nats and rises again by 0.57" in said
    assert "fails" in said
    assert card.count('<svg class="still"') == 1


@pytest.mark.parametrize("id", SENTENCES)
def test_every_finding_has_a_picture_and_numbers_of_its_verdict(id):
    (exhibit,) = get([id])
    assert exhibit.experiment.headline is not None
    names = set(re.findall(r"{(\w+)", SENTENCES[id]))
    assert names <= {"message", "measured", "paper", "numbers"}
    assert not re.search(r"\d", re.sub(r"{[^}]*}", "", SENTENCES[id]))  # no number is typed


def test_a_question_is_followed_by_no_colon():
    one = shown_with("cdag", Verdict.INCONCLUSIVE, "bottom-up at 0 of 3 levels")
    assert sentence(one).endswith("? bottom-up at 0 of 3 levels.")


def test_each_statement_is_counted_once_in_its_group():
    shown = [
        shown_with("fig9", Verdict.UNDER),
        shown_with("fig3", Verdict.HOLDS),
        shown_with("fig7", Verdict.INCONCLUSIVE),
        shown_with("softmax", Verdict.UNDER),
        shown_with("lowrank", Verdict.UNDER),
        shown_with("width", Verdict.ERROR),
    ]
    checked = results()
    papers, corrections, ours, others = groups(shown, checked)
    assert dict(papers.exhibits) == {Verdict.HOLDS: 1, Verdict.INCONCLUSIVE: 1, Verdict.ERROR: 1}
    assert dict(corrections.exhibits) == {Verdict.UNDER: 1}
    assert dict(ours.exhibits) == {Verdict.UNDER: 1}
    assert dict(others.exhibits) == {Verdict.UNDER: 1}  # GaLore's
    for verdict in Verdict:
        kinds = [r.claim.kind for r in checked if r.verdict is verdict]
        of_paper = sum(kind.is_papers for kind in kinds)
        assert papers.claims[verdict] + corrections.claims[verdict] == of_paper
        assert ours.claims[verdict] == kinds.count(Kind.EXTENSION)
        assert others.claims[verdict] == len(kinds) - of_paper - kinds.count(Kind.EXTENSION)
    assert not {Verdict.HOLDS, Verdict.FAILS} & set(corrections.claims)
    marks = [mark for row in map_rows(shown, checked).values() for mark in row]
    assert len(marks) == len(shown) + len(checked)
    text = section(shown, checked)
    assert text.count('class="mark ') == len(marks)
    assert text.count(' beyond"') == sum(not mark.is_papers for mark in marks)


def test_what_is_missing_is_named():
    said = plain(
        section([shown_with("fig7", Verdict.INCONCLUSIVE), shown_with("width", Verdict.ERROR)])
    )
    assert "Inconclusive: Figure 7." in said
    assert "Not made: Over-parameterisation." in said
    assert "The claims were not checked." in said
    assert "could not be checked: broken." in plain(section([], None, "broken"))


def test_hostile_titles_stay_text():
    one = shown_with("fig7", Verdict.HOLDS)
    odd = replace(one, exhibit=replace(one.exhibit, title="<img src=x>"))
    assert "<img" not in section([odd])


def test_a_verdict_that_rests_on_one_packaged_model_says_so():
    smollm2 = MODELS["smollm2"].about
    lowrank = shown_with("lowrank", Verdict.HOLDS, settings={"model": "smollm2"}.items())
    other = shown_with(
        "fig3", Verdict.HOLDS, settings={"models": {"smollm2": None, "m": None}}.items()
    )
    assert lowrank.model == smollm2
    assert other.model == ""
    assert f"One model alone, {smollm2}: Is the gradient" in plain(section([lowrank, other]))
