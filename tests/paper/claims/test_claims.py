"""The claims: every one decides, every control is rejected, and the rule behind the verdicts."""

import importlib.util
import json
import math
import re
import sys
from pathlib import Path

import pytest

from joma.paper import claims as registry
from joma.paper.claims import Claim, Kind, Result, Variant, check, claim
from joma.paper.claims.mutation import mutate
from joma.paper.claims.roots import ROOTS, Weight
from joma.paper.verdict import Verdict

PRINTED, WRONG, UNSAID, EXTENSION, DRAFT, OTHER = Kind
HOLDS, CORRECTED, UNDER = Verdict.HOLDS, Verdict.CORRECTED, Verdict.UNDER
# the verdict that the derivation gives, by kind
EXPECTED = {
    (
        PRINTED,
        HOLDS,
    ): "A1.per_hidden_loss T1.linear T1.exp T1.zero_init E60 T2.winner T2.saliency E33 T3.stability S4.rank L6 L7 "
    "T3.necessary T4.ratio T4.order T4.bound T5 S7.dimension S7.semantic A4.sides A4.convex S4.cooccurrence S2.values "
    "S4.linear_sparse",
    (
        WRONG,
        CORRECTED,
    ): "T1.softmax T1.softmax_hypothesis T2.invariant T2.softmax_remark L1 L2 L4 L5 E56 "
    "E56.sufficiency E59.exists E57.inverse A4.superposition T3.form E6 T4.threshold L9 E103 T5.rho0 E8 "
    "A1.layerwise",
    (
        UNSAID,
        UNDER,
    ): "T2.correlation L3 E59.homogeneous S4.shift S4.critical S4.nonlinear_bounce S4.rank_nodes "
    "T4.gap S5.picked_up",
    (DRAFT, UNDER): "CDAG.T1 CDAG.recursion",
    (DRAFT, HOLDS): "CDAG.E3",
    (OTHER, HOLDS): "GaLore.B6",
    (
        EXTENSION,
        HOLDS,
    ): "T1.rates T1.descent_law T1.queries.exp T1.queries.linear T1.heads F4.joint T5.class S7.trained "
    "LAWS.count LAWS.softmax LAWS.no_go LAWS.velocity END.identity END.unique END.mirror OPT.sgd OPT.rest "
    "OPT.sign OPT.adam OPT.theorem2 FOLD.exp FOLD.linear FOLD.momentum FOLD.queries "
    "S5.root_labels S5.leaf_labels S2.trained_values S4.convex S4.finite_target S4.committee A4.two_queries",
}
DERIVED = {id: both for both, ids in EXPECTED.items() for id in ids.split()}


def test_every_claim_is_listed_here():
    assert {claim.id for claim in registry.claims()} == set(DERIVED)


@pytest.mark.parametrize("id", DERIVED)
def test_the_verdict_is_the_derived_one_and_the_control_is_rejected(id):
    (claim,) = registry.get([id])
    result = check(claim)
    assert result.error is None
    assert result.control_rejected, f"the check accepts its own control: {result.control_value}"
    assert (claim.kind, result.verdict) == DERIVED[id]
    if claim.kind is not PRINTED:  # an entry of the errata has all its parts
        assert all("$" in text for text in (claim.paper_formula, claim.corrected_formula))
        assert claim.derivation
    if claim.kind is WRONG:
        assert claim.correction
        assert claim.counterexample
    if claim.kind is UNSAID:
        assert claim.condition
        assert claim.counterexample


def test_each_claim_declares_mutants_and_why_some_say_the_same():
    for each in registry.claims():
        names = each.all_mutants()
        assert names, each.id
        assert len(set(names)) == len(names)
        assert set(each.equivalent) <= set(names)
        assert len(each.equivalent) < len(names)


# the others take longer; `make mutate` runs all mutants of all claims
CHEAP = (
    "A1.per_hidden_loss T1.softmax_hypothesis T2.saliency E33 E57.inverse L4 L5 L9 T4.threshold T5 T5.rho0 T5.class "
    "E8 E59.homogeneous A4.convex T3.necessary T4.gap T2.correlation S4.convex LAWS.no_go LAWS.velocity OPT.sign "
    "OPT.adam S5.picked_up GaLore.B6"
)


@pytest.mark.parametrize("id", CHEAP.split())
def test_the_check_rejects_the_claims_mutants_and_accepts_what_says_the_same(id):
    results = mutate(registry.get([id])[0])
    assert results
    assert [r.mutant for r in results if not r.ok] == []


def test_a_mutant_that_gets_through_is_seen():
    def lax(variant):
        return (
            5.0
            if variant == "control"
            else abs(variant.factor("x") - 1) / 100 + variant.has("worse")
        )

    fields = {
        "check": lax,
        "terms": ("x",),
        "mutants": {"worse": "by 1"},
        "equivalent": {"−x": "no reason"},
    }
    made = Claim("X", "nowhere", "?", 1e-3, "?", "?", **fields)
    assert {r.mutant: (r.rejected, r.ok) for r in mutate(made)} == {
        "x × 1.01": (False, False),
        "x × 0.99": (False, False),
        "−x": (True, False),
        "worse": (True, True),
    }
    with pytest.raises(KeyError):
        Variant("printed", made).factor("y")  # not a term of this claim


def claim_pages():
    path = Path(__file__).parents[3] / "docs/_build/claim_pages.py"
    spec = importlib.util.spec_from_file_location("claim_pages", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_errata_are_grouped_by_root_cause_and_hold_no_claim_of_another_kind():
    ids = ("E103", "T5.rho0", "L9", "L3", "CDAG.recursion", "T5.class", "T5", "GaLore.B6")
    results = [check(registry.get([id])[0]) for id in ids]
    text = claim_pages().errata(results)
    assert "`T5`" not in text
    assert "`GaLore.B6`" not in text
    parts = re.split(r"^## ", text, flags=re.M)[1:]
    assert [part.split("\n")[0] for part in parts] == [
        f"Wrong as printed: {Weight.ARGUMENT}",
        f"Wrong as printed: {Weight.FORMULA}",
        f"Wrong as printed: {Weight.TYPO}",
        *(title for title, _ in claim_pages().LISTS.values()),
    ]
    listed = [re.findall(r"^#### .*\(`([\w.]+)`\): ", part, flags=re.M) for part in parts]
    assert listed == [[], ["E103", "T5.rho0"], ["L9"], ["L3"], ["CDAG.recursion"], ["T5.class"]]
    # two formulas, one root cause
    assert parts[1].count("\n### ") == 1
    assert "no statements that the argument rests on" in text.lower()
    assert "one slips in formulas and one typos" in text
    wrong = parts[1]
    (claim,) = registry.get(["E103"])
    for part in (
        claim.source,
        claim.paper_formula,
        claim.corrected_formula,
        claim.derivation,
        "`joma claims E103`",
    ):
        assert part in wrong


def test_the_page_of_errata_holds_exactly_the_claims_of_its_lists():
    text = (Path(__file__).parents[3] / "docs/errata.md").read_text()
    titles = {kind: title for kind, (title, _) in claim_pages().LISTS.items()}
    for kind, title in {WRONG: "Wrong as printed: [^\n]*", **titles}.items():
        parts = re.findall(rf"^## {title}\n(.*?)(?=^## |\Z)", text, flags=re.M | re.S)
        listed = re.findall(r"^#### .*\(`([\w.]+)`\): ", "".join(parts), flags=re.M)
        assert sorted(listed) == sorted(each.id for each in registry.claims() if each.kind is kind)


def test_every_statement_that_is_wrong_as_printed_has_a_root_cause():
    wrong = [each for each in registry.claims() if each.kind is WRONG]
    assert {each.root for each in wrong} == {root.id for root in ROOTS}
    assert not [each.id for each in registry.claims() if each.root and each.kind is not WRONG]
    assert len({root.id for root in ROOTS}) == len(ROOTS)


def test_the_unfair_entries_are_gone():
    """The third reading found these unfair, trivial or duplicates: none is an erratum now."""
    errata = {each.id for each in registry.claims() if each.kind in (WRONG, UNSAID)}
    unfair = (
        "A4.sides E59.range S4.cooccurrence CDAG.T1 CDAG.recursion T3.remainder E58 L1.positive"
    )
    assert not errata & set(unfair.split())
    duplicates = {
        "softmax": "T1.softmax T1.softmax_hypothesis T2.softmax_remark",
        "norm": "L1 L2 L4 E56 T3.form",
        "rho0": "T5.rho0 E103",
    }
    for root, ids in duplicates.items():
        assert {each.id for each in registry.claims() if each.root == root} == set(ids.split())


def made_up(values, tolerance=1.0, **fields):
    return Claim("X", "nowhere", "?", tolerance, "?", "?", check=values.__getitem__, **fields)


@pytest.mark.parametrize(
    ("values", "fields", "verdict", "value"),
    [
        ({"printed": 0.5, "control": 2}, {}, "holds", 0.5),
        ({"printed": 3, "control": 2}, {}, "fails", 3),
        (
            {"printed": 3, "corrected": 0.1, "control": 2},
            {"correction": "c"},
            "wrong as printed, corrected",
            0.1,
        ),
        ({"printed": 3, "corrected": 9, "control": 2}, {"correction": "c"}, "fails", 3),
        (
            {"printed": 3, "condition": 0.2, "control": 2},
            {"condition": "c"},
            "holds under a condition",
            0.2,
        ),
        (
            {"printed": 3, "reference": 0, "control": 2},
            {"correction": "c", "reference": "r"},
            "fails",
            3,
        ),
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
    "bad",
    [{"printed": math.nan, "control": 2}, {"control": 2}, {"printed": 0.1, "control": math.nan}],
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
    assert (result.verdict, result.value, result.cases, result.control_value) == (
        Verdict.HOLDS,
        0.9,
        3,
        2.0,
    )
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
        "from joma.paper.claims import claim\n"
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
    assert [c.id for c in registry.get(["T2"])] == [
        "T2.invariant",
        "T2.winner",
        "T2.saliency",
        "T2.correlation",
        "T2.softmax_remark",
    ]
    with pytest.raises(ValueError, match=r"Did you mean 'T2.invariant'"):
        registry.get(["T2.invariance"])
