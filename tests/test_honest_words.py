"""Sentences that were found to be false stay out of README, documentation, headings and claims."""

import json
import re
from pathlib import Path

import pytest

from joma.paper.claims import claims, get
from joma.paper.exhibits import exhibits
from joma.paper.records import FOLDER

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
# false: under fixed gradients and from a large bias the activation alone decides (test_linear_nonlinear.py)
ACTIVATION = r"not on the activation|whatever the activation|not the activation's|activation does not decide|"
ACTIVATION += r"what decides is \[?the targets|no attention comes back|not linearity"
# false once V grows at the expense of ξ, while E < 0
FOR_EVER = (
    r"weights that grow once grow for ever|no weight comes to rest|fixed gradients never let go"
)
# no evidence: 5 of 8 recorded cells match, the worst loss among them
BEST = r"best learning rate is one|best run is one that dips"
FALSE = re.compile("|".join((ACTIVATION, FOR_EVER, BEST)), flags=re.I)


def texts():
    """All texts that a reader is shown, by where they stand; line breaks are spaces."""
    for file in (
        ROOT / "README.md",
        *(ROOT / "docs").glob("*.md"),
        *(ROOT / "examples").glob("*.ipynb"),
    ):
        yield file.name, file.read_text()
    for file in FOLDER.glob("*.json"):
        stored = json.loads(file.read_text())
        yield (
            file.name,
            " ".join(
                str(stored.get(key, "")) for key in ("summary", "rule", "measured", "statement")
            ),
        )
    for id, exhibit in exhibits().items():
        yield f"heading of {id}", " / ".join(exhibit.messages.values())
    for claim in claims():
        shown = (
            claim.statement,
            claim.remark,
            claim.condition,
            claim.counterexample,
            claim.derivation,
        )
        yield claim.id, " / ".join(filter(None, shown))


def test_no_text_repeats_what_was_found_to_be_false():
    wrong = [(name, FALSE.search(" ".join(text.split()))) for name, text in texts()]
    assert [(name, match[0]) for name, match in wrong if match] == []


def test_the_readme_tells_when_attention_comes_back_and_its_scope():
    said = " ".join(README.split())
    assert "Attention comes back where weights have large finite targets" in said
    assert (
        "Under the paper's fixed gradients only nonlinear nodes can have them, and only from a large bias"
        in said
    )
    assert "nonlinear nodes end on a committee of tokens, linear ones on one" in said


def test_that_attention_can_be_thrown_away_is_said_with_its_scope_in_the_same_sentence():
    sentence = re.search(
        r"\*\*Attention can be thrown away, exactly\*\*[^.]*\.", " ".join(README.split())
    )[0]
    assert all(
        words in sentence
        for words in ("free logits", "frozen orthonormal embeddings", "plain gradient descent")
    )


@pytest.mark.parametrize(
    ("id", "regime"),
    [
        (
            "S4.nonlinear_bounce",
            ("fixed gradients", "exp attention", "large bias", "a₊F(D) < a₋F(0)"),
        ),
        ("S4.rank_nodes", ("squared loss", "exp attention", "from a small start")),
    ],
)
def test_a_claim_on_the_contrast_names_the_regime_that_its_check_tests(id, regime):
    (claim,) = get([id])
    assert [words for words in regime if words not in claim.condition] == []
    assert "from a small start" in claim.counterexample


def test_the_claim_on_convexity_leaves_room_for_a_large_bias():
    (claim,) = get(["S4.convex"])
    assert "E < 0" in claim.remark
    assert "large bias" in claim.remark
