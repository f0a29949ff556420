"""Headings: one message for every verdict that an exhibit can have; the meanings of verdicts, once."""

import re
from pathlib import Path

import pytest

from joma.paper.exhibits import ORDER, Exhibit, get
from joma.paper.verdict import Verdict

ROOT = Path(__file__).parents[3]
SOURCE = ROOT / "src/joma/paper/exhibits"


@pytest.mark.parametrize("id", ORDER)
def test_an_exhibit_has_a_message_for_every_verdict_that_its_judge_names(id):
    (exhibit,) = get([id])
    text = (SOURCE / f"{id}.py").read_text()
    rule, _, _ = text.partition("EXHIBIT = Exhibit(")  # its judge, without the messages themselves
    named = {Verdict[name] for name in re.findall(r"Verdict\.([A-Z]+)", rule)}
    assert named == set(exhibit.messages)
    for sentence in exhibit.messages.values():
        assert sentence
        assert not sentence.endswith(".")


def test_what_is_not_decided_is_a_question_and_what_has_no_message_its_title_and_verdict():
    (fig8,) = get(["fig8"])
    assert (
        fig8.message(Verdict.INCONCLUSIVE)
        == "Inconclusive: do runs that dip and bounce have lower losses?"
    )
    assert fig8.message(Verdict.ERROR) == "Not made: Figure 8: learning rates"
    mine = Exhibit(
        id="mine", title="My own", statement="s", rule="none", experiment=fig8.experiment
    )
    assert mine.message(Verdict.UNDER) == "My own: holds under a condition"
    assert mine.message(Verdict.INCONCLUSIVE) == "Inconclusive: My own"


def test_the_guide_explains_the_verdicts_in_the_words_of_the_page():
    rows = dict(
        re.findall(
            r"^\| ([a-z,; ]+) \| ([^|]+) \|$", (ROOT / "docs/reading.md").read_text(), flags=re.M
        )
    )
    assert {str(verdict): verdict.meaning for verdict in Verdict}.items() <= rows.items()
