"""Exhibits: quick presets give the verdicts of the docs, pictures are not empty, judges can say no."""

import json
import re

import pandas as pd
import pytest

from joma import Run
from joma._exhibits import EXHIBITS, PRESETS, fig2, fig3, fig4, folding, get, reproduce
from joma._run import RunError, RunWriter

EXPECTED = {
    "folding": "holds under",
    "fig2": "holds as corrected",
    "fig3": "holds",
    "fig4": "holds under",
    "table1": "fails",
}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    out = tmp_path_factory.mktemp("exhibits")
    return {exhibit.id: reproduce(exhibit, out=out) for exhibit in EXHIBITS.values()}


@pytest.mark.parametrize("id", EXPECTED)
def test_quick_preset(made, id):
    outcome = made[id]
    assert outcome.verdict.verdict == EXPECTED[id]
    svg = (outcome.path / "figure.svg").read_text()
    assert len(re.findall(r"<path", svg)) > 20
    assert "NaN" not in svg
    assert Run(outcome.path).done
    assert json.loads((outcome.path / "verdict.json").read_text())["summary"] == outcome.verdict.summary


@pytest.mark.parametrize("id", EXPECTED)
def test_every_preset_has_settings(id):
    (exhibit,) = get([id])
    assert set(exhibit.module.SETTINGS) == set(PRESETS)


def test_figure_2_reports_min_mean_and_max_for_both_data_sets_and_five_seeds(made):
    frame = Run(made["fig2"].path).frame("nc")
    assert frame.groupby("case").draw.nunique().to_dict() == {"smooth": 5, "random": 5}
    for case, numbers in made["fig2"].verdict.numbers.items():
        values = frame[frame.case == case].value
        assert (numbers["nc_min"], numbers["nc_max"]) == (values.min(), values.max())
        assert numbers["nc_min"] <= numbers["nc_mean"] <= numbers["nc_max"]


def test_folding_is_exact_through_a_sign_change_of_z(made):
    numbers = made["folding"].verdict.numbers
    assert numbers["linear"] <= 1e-7
    assert numbers["exp"] <= 1e-7
    assert numbers["z_changes_sign"]
    assert numbers["softmax"] > 1e-4  # approximate, and seen to be


def doctored(path, tmp_path, axes, change):
    """A copy of a run with its rows changed."""
    source = Run(path)
    with RunWriter.create(tmp_path / "doctored", kind="exhibit", config={}, axes=axes) as writer:
        for row in source.rows():
            extra = {k: v for k, v in row.items() if k not in ("step", "gauge", "value")}
            writer.write(row["step"], {row["gauge"]: change(row)}, **extra)
    return Run(tmp_path / "doctored")


def test_the_judges_reject_what_they_should(made, tmp_path):
    low = doctored(made["fig2"].path, tmp_path / "a", fig2.AXES, lambda r: 0.5 if r["gauge"] == "nc" else r["value"])
    assert fig2.judge(low).verdict == "fails"
    flat = doctored(
        made["fig4"].path, tmp_path / "b", fig4.AXES, lambda r: 2.0 if r["gauge"] == "entropy" else r["value"]
    )
    assert fig4.judge(flat).verdict == "fails"
    apart = doctored(
        made["folding"].path, tmp_path / "c", folding.AXES, lambda r: 1e-3 if r["gauge"] == "difference" else r["value"]
    )
    assert folding.judge(apart).verdict == "fails"
    even = doctored(
        made["fig3"].path,
        tmp_path / "d",
        fig3.AXES,
        lambda r: [r["step"] * 1.0] * 20 if r["gauge"] == "v0" else r["value"],
    )
    assert fig3.judge(even).verdict == "fails"


def test_dips_reads_depth_and_rebound():
    entropy = pd.DataFrame({"case": "c", "draw": 0, "t": [0, 1, 2, 3], "value": [2.0, 1.5, 0.5, 1.0]})
    (row,) = fig4.dips(entropy).to_dict("records")
    assert (row["start"], row["depth"], row["rebound"]) == (2.0, 1.5, 0.5)


def test_unknown_exhibit_and_foreign_folder(tmp_path):
    with pytest.raises(ValueError, match="Did you mean 'fig2'"):
        get(["fig22"])
    (tmp_path / "fig3").mkdir()
    (tmp_path / "fig3/precious.txt").write_text("mine")
    with pytest.raises(RunError, match="not a run"):
        reproduce(EXHIBITS["fig3"], out=tmp_path)
    assert (tmp_path / "fig3/precious.txt").read_text() == "mine"
