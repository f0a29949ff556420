"""The claims: every one decides, every control is rejected, and the rule behind the verdicts."""

import importlib.util
import json
import math
import sys
from pathlib import Path

import pytest

from joma.theory import claims as registry
from joma.theory.claims import Claim, Result, check, claim
from joma.theory.verdict import Verdict

EXPECTED = {
    "A1.per_hidden_loss": "holds",
    "T1.linear": "holds",
    "T1.exp": "holds",
    "T1.softmax": "holds under",
    "T1.rates": "holds as corrected",
    "T1.zero_init": "holds under",
    "T1.softmax_hypothesis": "holds as corrected",
    "T1.descent_law": "holds",
    "T1.queries.exp": "holds as corrected",
    "T1.queries.linear": "holds as corrected",
    "T1.heads": "holds under",
    "T2.invariant": "holds as corrected",
    "T2.winner": "holds under",
    "T2.softmax_remark": "fails",
    "L1": "holds as corrected",
    "L2": "holds as corrected",
    "L3": "holds under",
    "L4": "holds as corrected",
    "L5": "holds as corrected",
    "E56": "holds as corrected",
    "E56.sufficiency": "holds as corrected",
    "E58": "holds as corrected",
    "E59.range": "holds under",
    "T3.form": "holds as corrected",
    "T3.stability": "holds as corrected",
    "E6": "holds as corrected",
    "T4.ratio": "holds",
    "T4.order": "holds under",
    "T4.bound": "holds",
    "T4.threshold": "holds as corrected",
    "T4.linear_attention": "holds",
    "L6": "holds",
    "L7": "holds",
    "S7.dimension": "holds as corrected",
    "S7.trained": "holds as corrected",
    "L8": "holds",
    "L9": "holds as corrected",
    "E103": "holds as corrected",
    "T5": "holds",
    "T5.rho0": "holds as corrected",
    "T5.class": "holds as corrected",
    "E8": "holds as corrected",
    "CDAG.T1": "holds under",
    "CDAG.recursion": "holds under",
    "CDAG.E2": "holds",
    "CDAG.E3": "holds under",
}


def test_every_claim_is_listed_here():
    assert {claim.id for claim in registry.claims()} == set(EXPECTED)


@pytest.mark.parametrize("id", EXPECTED)
def test_the_verdict_is_the_derived_one_and_the_control_is_rejected(id):
    (claim,) = registry.get([id])
    result = check(claim)
    assert result.error is None
    assert result.control_rejected, f"the check accepts its own control: {result.control_value}"
    assert result.verdict == EXPECTED[id]
    if result.verdict in ("holds as corrected", "fails"):
        assert claim.correction
        assert all("$" in text for text in (claim.paper_formula, claim.corrected_formula))  # for docs/errata.md
        assert claim.derivation
    if result.verdict == "holds under":
        assert claim.condition


def test_the_errata_hold_what_differs_from_the_paper_and_nothing_else():
    path = Path(__file__).parents[2] / "docs/_build/claim_pages.py"
    spec = importlib.util.spec_from_file_location("claim_pages", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    text = module.errata([check(claim) for claim in registry.get(["T2.invariant", "L6"])])
    (differs,) = registry.get(["T2.invariant"])
    assert "`L6`" not in text
    for part in (differs.paper_formula, differs.corrected_formula, differs.derivation, "as derived"):
        assert part in text


def made_up(values, tolerance=1.0, **fields):
    return Claim("X", "nowhere", "?", tolerance, "?", "?", check=values.__getitem__, **fields)


@pytest.mark.parametrize(
    ("values", "fields", "verdict", "value"),
    [
        ({"printed": 0.5, "control": 2}, {}, "holds", 0.5),
        ({"printed": 3, "control": 2}, {}, "fails", 3),
        ({"printed": 3, "corrected": 0.1, "control": 2}, {"correction": "c"}, "holds as corrected", 0.1),
        ({"printed": 3, "corrected": 9, "control": 2}, {"correction": "c"}, "fails", 3),
        ({"printed": 3, "condition": 0.2, "control": 2}, {"condition": "c"}, "holds under", 0.2),
        ({"printed": 3, "reference": 0, "control": 2}, {"correction": "c", "reference": "r"}, "fails", 3),
    ],
)
def test_the_rule_that_makes_verdicts(values, fields, verdict, value):
    result = check(made_up(values, **fields))
    assert (result.verdict, result.value, result.ok) == (verdict, value, True)


def test_a_control_that_is_accepted_is_not_ok():
    result = check(made_up({"printed": 0.5, "control": 0.9}))
    assert not result.control_rejected
    assert not result.ok


@pytest.mark.parametrize(
    "bad", [{"printed": math.nan, "control": 2}, {"control": 2}, {"printed": 0.1, "control": math.nan}]
)
def test_a_check_that_cannot_measure_is_an_error_and_never_a_verdict(bad):
    result = check(made_up(bad))
    assert result.verdict == "error"
    assert not result.ok


def test_a_check_that_rejects_what_is_true_is_an_error():
    result = check(made_up({"printed": 3, "reference": 5, "control": 9}, reference="r"))
    assert result.verdict == "error"
    assert "rejects what is true" in result.error


@pytest.mark.parametrize("empty", [[], (), iter(())])
def test_a_check_that_had_nothing_to_check_is_an_error(empty):
    result = check(made_up({"printed": empty, "control": 2}))
    assert result.verdict is Verdict.ERROR
    assert "nothing to check" in result.error


def test_the_largest_error_of_all_cases_counts():
    result = check(made_up({"printed": [0.1, 0.9, 0.4], "control": [0.0, 2.0]}))
    assert (result.verdict, result.value, result.cases, result.control_value) == (Verdict.HOLDS, 0.9, 3, 2.0)
    assert check(made_up({"printed": [0.1, math.nan], "control": 2})).verdict is Verdict.ERROR


def test_a_result_goes_through_json_and_keeps_its_claim():
    result = check(made_up({"printed": 0.5, "control": 2}, remark="r"))
    again = Result.from_dict(json.loads(json.dumps(result.as_dict())))
    assert again == result
    assert (again.claim.id, again.note, again.ok) == ("X", "r", True)


FIELDS = {"source": "here", "statement": "s", "tolerance": 0.5, "measures": "m", "control": "c"}


def test_users_register_claims_of_their_own(monkeypatch):
    @claim("Z.mine", **FIELDS)
    def mine(variant):
        return 1.0 if variant == "control" else 0.0

    try:
        assert registry.claims()[-1].id == "Z.mine"
        assert check(registry.get(["Z"])[0]).verdict is Verdict.HOLDS
        with pytest.raises(ValueError, match=r"there is a claim 'Z.mine' already"):
            claim("Z.mine", **FIELDS)(mine)
    finally:
        registry.remove("Z.mine")


def test_packages_bring_claims_by_an_entry_point(tmp_path, monkeypatch):
    (tmp_path / "their_claims.py").write_text(
        "from joma.theory.claims import claim\n"
        f"@claim('Z.theirs', **{FIELDS!r})\n"
        "def theirs(variant):\n    return 1.0 if variant == 'control' else 0.0\n"
    )
    info = tmp_path / "theirs-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[joma.claims]\ntheirs = their_claims\n")
    monkeypatch.syspath_prepend(tmp_path)
    try:
        for _ in range(2):  # it is loaded once
            assert [c.id for c in registry.get(["Z.theirs"])] == ["Z.theirs"]
    finally:
        registry.remove("Z.theirs")
        sys.modules.pop("their_claims", None)


def test_groups_and_near_misses():
    assert [c.id for c in registry.get(["T2"])] == ["T2.invariant", "T2.winner", "T2.softmax_remark"]
    with pytest.raises(ValueError, match=r"Did you mean 'T2.invariant'"):
        registry.get(["T2.invariance"])
