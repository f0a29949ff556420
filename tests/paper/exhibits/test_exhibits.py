"""Exhibits: quick presets give the verdicts of the docs, pictures are not empty, judges can say no."""

import json
import re
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from scipy.integrate import solve_ivp
from scipy.special import lambertw

from joma import Run
from joma._runs import RunError, RunWriter
from joma.paper.exhibits import (
    PRESETS,
    cdag,
    fig2,
    fig3,
    fig4,
    fig5,
    fig9,
    folding,
    get,
    make_exhibit,
    table1,
)
from joma.paper.labs.association import association_time

EXPECTED = {
    "folding": "holds under a condition",
    "fig2": "holds under a condition",
    "fig3": "holds",
    "fig4": "holds under a condition",
    "fig9": "holds under a condition",
    "fig5": "holds under a condition",
}


# Of exhibits that take long at every preset: enough to be changed, too little to decide.
SMALL = {"cdag": cdag.SETTINGS["laptop"] | {"samples": 500, "draws": 2}}


class Made(dict):
    """Outcomes of exhibits by id, each made when it is first asked for."""

    def __init__(self, out):
        self.out = out

    def __missing__(self, id):
        (exhibit,) = get([id])
        preset = "default"
        if id in SMALL:
            preset = "laptop"
            settings = {preset: SMALL[id]}
            exhibit = replace(exhibit, experiment=replace(exhibit.experiment, settings=settings))
        self[id] = make_exhibit(exhibit, preset, self.out)
        return self[id]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return Made(tmp_path_factory.mktemp("exhibits"))


@pytest.mark.parametrize("id", EXPECTED)
def test_quick_preset(made, id):
    outcome = made[id]
    assert outcome.verdict.verdict == EXPECTED[id]
    assert re.search(r"\d", outcome.verdict.measured)
    svg = (outcome.path / "figure.svg").read_text()
    assert len(re.findall(r"<path", svg)) > 20
    assert "NaN" not in svg
    assert Run(outcome.path).done
    assert (
        json.loads((outcome.path / "verdict.json").read_text())["summary"]
        == outcome.verdict.summary
    )


@pytest.mark.parametrize("id", EXPECTED)
def test_every_preset_has_settings(id):
    (exhibit,) = get([id])
    assert set(exhibit.experiment.settings) == set(PRESETS)


def test_figure_2_reports_min_mean_and_max_for_both_data_sets_and_all_seeds(made):
    frame = Run(made["fig2"].path).frame("nc")
    assert frame.groupby("case").draw.nunique().to_dict() == {"smooth": 20, "random": 20}
    for case, numbers in made["fig2"].verdict.numbers["cases"].items():
        values = frame[frame.case == case].value
        assert (numbers["nc_min"], numbers["nc_max"]) == (values.min(), values.max())
        assert numbers["nc_min"] <= numbers["nc_mean"] <= numbers["nc_max"]


def test_folding_is_exact_through_a_sign_change_of_z(made):
    numbers = made["folding"].verdict.numbers
    assert numbers["linear"] <= 1e-7
    assert numbers["exp"] <= 1e-7
    assert numbers["z_changes_sign"]
    assert numbers["softmax"] > 1e-4  # approximate, and seen to be


def doctored(path, tmp_path, axes, change, copies=1):
    """A copy of a run with its rows changed; ``copies`` of each draw."""
    source = Run(path)
    with RunWriter.create(tmp_path / "doctored", kind="exhibit", config={}, axes=axes) as writer:
        for row in source.rows():
            extra = {k: v for k, v in row.items() if k not in ("step", "gauge", "value")}
            writer.write(row["step"], {row["gauge"]: change(row)}, **extra)
            for copy in range(1, copies):
                writer.write(
                    row["step"],
                    {row["gauge"]: change(row)},
                    **extra | {"draw": row["draw"] + 2 * copy},
                )
    return Run(tmp_path / "doctored")


def test_the_judges_reject_what_they_should(made, tmp_path):
    low = doctored(
        made["fig2"].path,
        tmp_path / "a",
        fig2.AXES,
        lambda r: 0.5 if r["gauge"] == "nc" else r["value"],
    )
    assert fig2.judge(low).verdict == "fails"
    parts = doctored(
        made["fig2"].path,
        tmp_path / "parts",
        fig2.AXES,
        lambda r: 0.5 if r["gauge"] in ("nc1", "nc2") else r["value"],
    )
    assert fig2.judge(parts).verdict == "holds"
    flat = doctored(
        made["fig4"].path,
        tmp_path / "b",
        fig4.AXES,
        lambda r: 2.0 if r["gauge"] == "entropy" else r["value"],
    )
    assert fig4.judge(flat).verdict == "fails"
    apart = doctored(
        made["folding"].path,
        tmp_path / "c",
        folding.AXES,
        lambda r: 1e-3 if r["gauge"] == "difference" else r["value"],
    )
    assert folding.judge(apart).verdict == "fails"
    even = doctored(
        made["fig3"].path,
        tmp_path / "d",
        fig3.AXES,
        lambda r: [r["step"] * 1.0] * 20 if r["gauge"] == "v0" else r["value"],
    )
    assert fig3.judge(even).verdict == "fails"
    for gauge, value in (("pairs", 0.0), ("level", [1.0] * 161), ("norm", 1.0)):
        wrong = doctored(
            made["fig9"].path,
            tmp_path / f"e-{gauge}",
            fig9.AXES,
            lambda r, gauge=gauge, value=value: value if r["gauge"] == gauge else r["value"],
        )
        assert fig9.judge(wrong).verdict == "fails"


@pytest.mark.parametrize(
    ("gains", "chance", "settings", "verdict"),
    [
        ((0.1, 0.1), 0.0, {}, "holds"),
        ((0.1, 0.0), 0.0, {}, "holds under a condition"),
        ((0.0, 0.0), 0.0, {}, "reproduces; does not discriminate"),
        ((-0.6, -0.6), 0.0, {}, "fails"),
        ((0.1, 0.1), 0.0, {"d": 64}, "inconclusive"),
        ((0.1, 0.1), 0.0, {"steps": 100}, "inconclusive"),
        # training raises the chance level by more than the value at s = 1, and by more than both
        ((0.1, 0.04), 0.06, {}, "holds under a condition"),
        ((0.05, 0.04), 0.06, {}, "reproduces; does not discriminate"),
    ],
)
def test_the_judge_of_table_1_pools_paired_differences(tmp_path, gains, chance, settings, verdict):
    """Trained networks are above untrained ones by ``gains`` (s = 0 and 1), their chance level by ``chance``."""
    settings = {**table1.SETTINGS["laptop"], "columns": 2, **settings}
    rng = np.random.default_rng(0)
    with RunWriter.create(
        tmp_path, kind="exhibit", config={"settings": settings}, axes=table1.AXES
    ) as writer:
        for column in list(table1.TABLE1)[:2]:
            paper = np.array([mean for mean, _ in table1.TABLE1[column]])
            labels = dict(zip(("C", "N_ch", "N0", "N1"), column, strict=True)) | {"lr": 1e-4}
            for draw in range(3):
                baseline = paper + 0.03 * rng.standard_normal(
                    2
                )  # larger than the gain of a seed may be seen without pairs
                trained = baseline + np.array(gains) + 0.005 * np.array([-1, 1, 0])[draw]
                values = dict.fromkeys(table1.STATES, baseline - 0.2)
                values |= {"trained": trained, "untrained": baseline}
                values["permuted"] = baseline - 0.2 + chance
                for state, value in values.items():
                    writer.write(1, {"ncorr": value}, state=state, draw=draw, **labels)
                writer.write(1, {"accuracy": 1.0, "possible accuracy": 1.0}, draw=draw, **labels)
    found = table1.judge(Run(tmp_path))
    assert found.verdict == verdict
    both = found.numbers["best"]["layers"]["s = 1"]["gains"]
    assert both["gain beyond chance"]["mean"] == pytest.approx(gains[1] - chance)
    gain = both["trained − untrained"]
    assert gain["mean"] == pytest.approx(gains[1])
    assert gain["low"] < gains[1] < gain["high"]
    assert (gain["low"] > 0) == (gains[1] > 0)


def changed(made, tmp_path, name, gauge, change):
    """The verdict on fig5 or cdag when ``change(row, array)`` stands in for the values of one gauge."""

    def one(row):
        return (
            change(row, np.array(row["value"])).tolist() if row["gauge"] == gauge else row["value"]
        )

    module = {"fig5": fig5, "cdag": cdag}[name]
    copies = (
        5 if name == "cdag" else 1
    )  # of its two draws: with fewer than six the order is not decided
    return module.judge(doctored(made[name].path, tmp_path, module.AXES, one, copies))


def test_the_judge_of_figure_5_needs_order_and_good_samples(made, tmp_path):
    def near_is_slow(row, times):
        return times + 9 if row["pair"] == "m–l" else times

    def latents_last(row, times):
        return times + 9 if row["pair"] == "β–β′" else times

    def biased(row, value):
        return value + 0.1 if row["source"] == "sampled" else value

    assert changed(made, tmp_path / "a", "fig5", "association", near_is_slow).verdict == "fails"
    assert changed(made, tmp_path / "b", "fig5", "association", latents_last).verdict == "fails"
    assert changed(made, tmp_path / "c", "fig5", "cooccurrence", biased).verdict == "fails"


def test_the_judge_of_figure_5_names_the_part_of_the_grid(made, tmp_path):
    def far_is_slow(row, times):
        return times + 1e3 if row["pair"] == "m–l′" else times

    assert changed(made, tmp_path / "a", "fig5", "association", far_is_slow).verdict == "holds"

    def but_for_one_cell_of_one_draw(row, times):
        times = far_is_slow(row, times)
        if row["pair"] == "m–l′" and row["case"] == "deep" and row["draw"] == 3:
            times[1, 4] = 0.0
        return times

    def as_soon_as_the_latents(row, times):  # in one cell of one draw: after the near pairs still
        times = far_is_slow(row, times)
        if row["pair"] == "m–l′" and row["case"] == "deep" and row["draw"] == 3:
            near = next(
                np.array(other["value"])
                for other in rows
                if other["pair"] == "β–β′"
                and (other["draw"], other["variant"]) == (row["draw"], row["variant"])
            )
            times[1, 4] = near[1, 4]
        return times

    rows = [
        row
        for row in Run(made["fig5"].path).rows()
        if row["gauge"] == "association" and row["case"] == "deep"
    ]
    early = changed(made, tmp_path / "b", "fig5", "association", but_for_one_cell_of_one_draw)
    assert early.verdict == "fails"  # a far pair before a near one
    verdict = changed(made, tmp_path / "c", "fig5", "association", as_soon_as_the_latents)
    assert verdict.verdict == "holds under a condition"
    assert verdict.numbers["near"] == 48
    assert "scale 1–12 at level 50.0%; 1–4, 6–12 at level 90.0%;" in verdict.summary
    assert (verdict.numbers["paper"]["in order"], verdict.numbers["paper"]["cells"]) == (47, 48)


def test_the_judge_of_graphs_needs_order_shares_and_the_theorem(made, tmp_path):
    def one_failure(row, value):  # against the theorem under its condition: one too many
        return value * 0 + 1 if row["kind"] == "persistent" else value

    def top_down(row, times):
        return 1000.0 - times

    def by_outputs(row, owner):
        return owner * 0 + cdag.NODES.index("c0")

    assert changed(made, tmp_path / "a", "cdag", "failed", one_failure).verdict == "fails"
    assert changed(made, tmp_path / "b", "cdag", "learned", top_down).verdict == "fails"
    assert changed(made, tmp_path / "c", "cdag", "owner", by_outputs).verdict == "fails"


@pytest.mark.parametrize("missing", [None, "order", "held"])
def test_the_judge_of_graphs_names_the_levels(made, tmp_path, missing):
    rank = np.array([{"β": 1.0, "α": 2.0, "class": 3.0}[layer] for layer in cdag.LAYER])

    def learned(row, times):
        times = np.tile(rank, (len(cdag.LEVELS), 1))
        if missing == "order" and row["draw"] == 1:  # in one draw of two, at one level
            times[1] = 4 - rank
        return times

    def best(row, value):
        value = value * 0 + 2.0
        if missing == "held":  # one β of twelve: less than 95 % of its layer
            value[6] = 0.96 * ceiling[row["draw"]][6] if row["draw"] == 0 else 2.0
        return value

    def one(row):
        change = {"learned": learned, "best": best}.get(row["gauge"])
        if row["gauge"] == "failed":
            return 0
        return change(row, np.array(row["value"])).tolist() if change else row["value"]

    ceiling = {
        row["draw"]: row["value"]
        for row in Run(made["cdag"].path).rows()
        if row["gauge"] == "ceiling"
    }
    few = cdag.judge(doctored(made["cdag"].path, tmp_path / "few", cdag.AXES, one))
    assert few.verdict == "inconclusive"
    assert "draws" in cdag.EXHIBIT.would_decide
    verdict = cdag.judge(doctored(made["cdag"].path, tmp_path / "many", cdag.AXES, one, copies=5))
    good = [level for level, row in verdict.numbers["tanh"]["levels"].items() if row["good"]]
    assert (
        good
        == {None: ["90%", "95%", "97%"], "order": ["90%", "97%"], "held": ["90%", "95%"]}[missing]
    )
    assert verdict.verdict == ("holds under a condition" if missing else "holds")
    assert f"these shares of the possible correlation: {', '.join(good)}, of" in verdict.summary


def test_association_times_are_those_of_an_ode_solver():
    level = 0.99
    for dynamics, end in (("eqn6", 2.0), ("joint", np.sqrt(lambertw(4.0).real))):

        def field(_, v, dynamics=dynamics):
            e = np.exp(v * v / 2)
            return (2.0 - (v * e if dynamics == "joint" else v)) * e

        def reached(_, v, end=end):
            return v[0] - level * end

        reached.terminal = True
        path = solve_ivp(field, (0, 50), [0.0], "DOP853", events=reached, rtol=1e-11, atol=1e-12)
        assert association_time(2.0, level, dynamics) == pytest.approx(path.t[-1], rel=1e-8)


def test_dips_reads_depth_and_rebound():
    entropy = pd.DataFrame(
        {"step": range(4), "case": "c", "draw": 0, "t": [0, 1, 2, 3], "value": [2.0, 1.5, 0.5, 1.0]}
    )
    (row,) = fig4.dips(entropy).to_dict("records")
    assert (row["start"], row["depth"], row["rebound"]) == (2.0, 1.5, 0.5)


def test_two_draws_do_not_decide_the_order_of_graphs(made):
    assert made["cdag"].verdict.verdict == "inconclusive"


def test_unknown_exhibit_and_foreign_folder(tmp_path):
    with pytest.raises(ValueError, match="Did you mean 'fig2'"):
        get(["fig22"])
    (tmp_path / "fig3").mkdir()
    (tmp_path / "fig3/precious.txt").write_text("mine")
    with pytest.raises(RunError, match="not a run"):
        make_exhibit(get(["fig3"])[0], out=tmp_path)
    assert (tmp_path / "fig3/precious.txt").read_text() == "mine"
