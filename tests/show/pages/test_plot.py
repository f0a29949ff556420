"""Pictures say what is in the run."""

import json
import re

import altair as alt
import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import joma
from joma._runs import Run, RunError, RunWriter
from joma._show.pages.plot import plot
from joma._show.plots import watch as figure
from joma._train.simulate import simulate
from joma.cli import app
from joma.models.parts import PARTS

PHASES = ["dense", "sparsifying", "bouncing", "collapsed"]


def write_run(path, steps, layers=3, matrices=None, phases=None, loss=True, status=None):
    """A watch run whose numbers are known: entropy of layer l and head h at step s is s + 10 l + h."""
    matrices = layers if matrices is None else matrices
    axes = {"entropy": ["layer", "head"], "stable_rank": ["layer"], "phase": ["layer"]}
    config = {"model": "Tiny", "parameters": 12_345, "gauges": ["entropy", "stable_rank"]}
    writer = RunWriter.create(path, kind="watch", config=config, axes=axes)
    blocks = [f"h.{n}.attn" for n in range(layers)]
    writer.note(
        layers={
            "entropy": blocks,
            "stable_rank": [f"h.{n}.mlp" for n in range(matrices)],
            "phase": blocks,
        },
        phases=PHASES,
    )
    for s in steps:
        entropy = s + 10.0 * np.arange(layers)[:, None] + np.arange(2)
        row = {"entropy": entropy, "stable_rank": np.arange(1.0, 1 + matrices)}
        row["phase"] = [0] * layers if phases is None else phases(s)
        if loss:
            row["loss"] = 1.0 / s
        writer.write(s, row)
    if status is None:
        writer.finish()
    elif status != "running":
        writer.finish("failed", status)
    return Run(path)


def panels(chart):
    """Title of the y axis -> the layers of that panel, as Vega-Lite with their data."""
    with alt.data_transformers.disable_max_rows():
        specification = chart.to_dict()
    data = specification["datasets"]
    found = {}
    for panel in specification["concat"]:
        layers = panel.get("layer", [panel])
        for layer in layers:
            layer["rows"] = pd.DataFrame(data[layer.get("data", panel.get("data"))["name"]])
        found[layers[0]["encoding"]["y"]["title"]] = layers
    return found


def test_on_the_clock_curves_stand_at_the_sums_of_learning_rates(tmp_path):
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 1).eval()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    rates = [0.5, 0.25, 0.125, 0.0625]
    with joma.watch(
        model,
        tmp_path / "run",
        every=1,
        gauges=("stable_rank", "stable_rank.q"),
        optimizer=optimizer,
    ) as w:
        for rate in rates:
            optimizer.param_groups[0]["lr"] = rate
            model(torch.randn(1, 3, 8)).sum().backward()
            optimizer.step()
            w.step()
    (layer,) = panels(figure.draw(Run(tmp_path / "run"), clock=True))["stable rank"]
    assert layer["encoding"]["x"]["title"].startswith("τ")
    assert layer["rows"].tau.tolist() == pytest.approx(np.cumsum(rates))
    assert layer["rows"].step.tolist() == [1, 2, 3, 4]
    write_run(tmp_path / "plain", [1, 2])
    with pytest.raises(RunError, match="no learning rates, and so no clock"):
        plot(tmp_path / "plain", clock=True)
    simulate("two-tokens", tmp_path / "theory", t_end=0.1, times=3)
    with pytest.raises(RunError, match="kind 'simulate', which has no optimiser"):
        plot(tmp_path / "theory", clock=True)


def test_lines_are_means_over_heads_with_the_names_of_modules(tmp_path):
    drawn = panels(figure.draw(write_run(tmp_path / "run", [1, 2, 3])))
    assert list(drawn) == ["attention entropy (nats)", "stable rank", "loss"]
    (lines,) = drawn["attention entropy (nats)"]
    rows = lines["rows"].sort_values(["layer", "step"])
    assert rows.value.tolist() == [s + 10 * layer + 0.5 for layer in range(3) for s in (1, 2, 3)]
    assert rows.module.unique().tolist() == ["h.0.attn", "h.1.attn", "h.2.attn"]
    assert {t["field"] for t in lines["encoding"]["tooltip"]} == {"layer", "module", "step"}
    assert drawn["stable rank"][0]["rows"].module.unique().tolist() == [
        "h.0.mlp",
        "h.1.mlp",
        "h.2.mlp",
    ]
    assert drawn["loss"][0]["rows"].value.tolist() == [1.0, 1 / 2, 1 / 3]


@pytest.mark.parametrize(
    ("steps", "kind"),
    [([1, 50, 100], "linear"), ([1, 50, 101], "log"), ([5, 600], "log"), ([0, 999], "linear")],
)
def test_steps_over_more_than_two_decades_are_on_a_log_axis(tmp_path, steps, kind):
    run = write_run(tmp_path / "run", steps, loss=False)
    for layers in panels(figure.draw(run)).values():
        assert layers[0]["encoding"]["x"]["scale"]["type"] == kind


def test_a_mark_stands_where_a_phase_begins_on_the_line_of_its_layer(tmp_path):
    run = write_run(
        tmp_path / "run", range(1, 8), phases=lambda s: [0, int(s >= 3) + int(s >= 6), 3 * (s >= 5)]
    )
    _, marks = panels(figure.draw(run))["attention entropy (nats)"]
    found = sorted(
        marks["rows"][["step", "layer", "phase", "value"]].itertuples(index=False, name=None)
    )
    assert found == [
        (3, 1, "sparsifying", 13.5),
        (5, 2, "collapsed", 25.5),
        (6, 1, "bouncing", 16.5),
    ]
    scale = marks["encoding"]["shape"]["scale"]
    assert scale["domain"] == ["sparsifying", "bouncing", "collapsed"]
    assert len(set(scale["range"])) == 3


def test_without_a_change_of_phase_there_are_no_marks(tmp_path):
    drawn = panels(figure.draw(write_run(tmp_path / "run", [1, 2])))
    assert [len(layers) for layers in drawn.values()] == [1, 1, 1]


def test_a_layer_has_one_colour_in_all_gauges_however_many_layers_they_have(tmp_path):
    drawn = panels(figure.draw(write_run(tmp_path / "run", [1, 2], layers=3, matrices=5)))
    colours = [
        drawn[title][0]["encoding"]["color"]
        for title in ("attention entropy (nats)", "stable rank")
    ]
    assert colours[0] == colours[1]
    assert colours[0]["type"] == "ordinal"
    assert colours[0]["scale"]["domain"] == [0, 1, 2, 3, 4]


def test_entropy_starts_at_zero_and_uniform_attention_is_drawn_where_it_is_known(tmp_path):
    drawn = panels(figure.draw(write_run(tmp_path / "run", [1, 2])))
    assert drawn["attention entropy (nats)"][0]["encoding"]["y"]["scale"]["zero"]
    assert not drawn["stable rank"][0]["encoding"]["y"]["scale"]["zero"]
    assert figure.uniform_levels({"kind": "watch", "config": {"length": 35}}) == {}
    levels = figure.uniform_levels({"kind": "train", "config": {"length": 35}})
    assert levels["entropy"] == pytest.approx(np.log(np.arange(1, 36)).mean())  # ln(T!)/T
    assert (
        figure.uniform_levels({"kind": "watch", "config": {}, "uniform": [2.0, None, 2.0]})[
            "entropy"
        ]
        == 2.0
    )
    assert figure.uniform_levels({"kind": "watch", "config": {}, "uniform": [2.0, 1.0]}) == {}


def test_a_long_run_of_a_deep_model_is_thinned_but_keeps_its_ends_and_its_marks(tmp_path):
    run = write_run(
        tmp_path / "run", range(1, 602), layers=40, phases=lambda s: [int(s >= 378)] * 40
    )
    lines, marks = panels(figure.draw(run))["attention entropy (nats)"]
    steps = np.sort(lines["rows"].step.unique())
    assert (steps[0], steps[-1]) == (1, 601)
    assert len(lines["rows"]) <= figure.MOST_OF_PANEL
    assert marks["rows"].step.tolist() == [378] * 40
    plot(tmp_path / "run")  # beyond the 5000 rows that Altair takes by itself


def test_a_stretch_that_was_run_again_is_drawn_once(tmp_path):
    run = write_run(tmp_path / "run", [1, 2, 3, 2, 3, 4])
    (lines,) = panels(figure.draw(run))["attention entropy (nats)"]
    assert lines["rows"].groupby("layer")["step"].apply(list).tolist() == [[1, 2, 3, 4]] * 3


def test_a_value_that_is_not_finite_breaks_the_line_and_not_the_picture(tmp_path):
    path = tmp_path / "run"
    axes = {"sink_mass": ["layer", "head"]}
    with RunWriter.create(path, kind="watch", config={"model": "Tiny"}, axes=axes) as writer:
        for s, value in enumerate([0.1, np.nan, np.inf, 0.2], 1):
            writer.write(s, {"sink_mass": [[value, value]], "loss": value})
    plot(path)
    (lines,) = panels(figure.draw(Run(path)))["attention on the first token"]
    assert lines["rows"].value.isna().tolist() == [False, True, True, False]


def test_a_watched_training_is_drawn_and_hovering_names_its_layers(tmp_path):
    torch.manual_seed(0)
    model = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2, enable_nested_tensor=False
    )
    optimiser = torch.optim.SGD(model.parameters(), 0.1)
    with joma.watch(model, run=tmp_path / "run", every=1, live=False) as watched:
        for _ in range(3):
            loss = model(torch.randn(2, 5, 16)).square().mean()
            loss.backward()
            optimiser.step()
            watched.step(loss.detach())
    done = files = [tmp_path / "figure.svg", tmp_path / "figure.png"]
    outs = [word for file in files for word in ("--out", str(file))]
    done = CliRunner().invoke(app, ["report", str(tmp_path / "run"), *outs])
    assert done.exit_code == 0, done.output
    svg = files[0].read_text()
    assert set(re.findall("<title>(.*?)</title>", svg)) >= {
        f"layer {n}: layers.{n}.self_attn" for n in (0, 1)
    }
    assert files[1].read_bytes().startswith(b"\x89PNG")
    assert Run(tmp_path / "run").done


def test_a_run_under_way_killed_or_failed_can_be_drawn_and_says_so(tmp_path):
    for name, status in (("a", "running"), ("b", "RuntimeError: no memory")):
        run = write_run(tmp_path / name, [1, 2], status=status)
        title = figure.draw(run).to_dict()["title"]
        assert title["text"] == name
        assert ("killed" if status == "running" else status) in title[
            "subtitle"
        ]  # its writer is gone
        assert "12.3k parameters" in title["subtitle"]
    writer = RunWriter.resume(tmp_path / "a", Run(tmp_path / "a").info["config"])
    assert figure.draw(Run(tmp_path / "a")).to_dict()["title"]["subtitle"].endswith("running")
    writer.finish()


def test_a_simulation_and_its_redrawing_are_the_same_picture(tmp_path):
    simulate("two-tokens", tmp_path / "run", t_end=1.0, times=11)
    drawn = (tmp_path / "run/figure.json").read_text()
    assert plot(tmp_path / "run", tmp_path / "deep/out") == tmp_path / "deep/out"
    assert (tmp_path / "deep/out/figure.json").read_text() == drawn


def test_runs_that_cannot_be_drawn_are_refused_by_name_and_nothing_is_written(tmp_path):
    out = tmp_path / "out"
    with pytest.raises(RunError, match="is not a run: it does not exist"):
        plot(tmp_path / "nothing", out)
    write_run(tmp_path / "empty", [])
    with pytest.raises(RunError, match=r"empty has no measurements yet \(status: done\)"):
        plot(tmp_path / "empty", out)
    RunWriter.create(tmp_path / "other", kind="other", config={}).finish()
    with pytest.raises(
        RunError, match="kind 'other'; pictures are of watch, train, scan, audit, simulate, exhibit"
    ):
        plot(tmp_path / "other", out)
    with RunWriter.create(tmp_path / "bare", kind="watch", config={}) as writer:
        writer.write(1, {"lr": 0.1})
    with pytest.raises(RunError, match="neither a gauge with layers nor a loss"):
        plot(tmp_path / "bare", out)
    assert not out.exists()


def test_the_command_shows_gauges_and_parts():
    out = CliRunner().invoke(app, ["gauges"]).output
    flat = " ".join(out.split())
    for name, gauge in joma.gauges().items():
        assert re.search(rf"^{name} +([a-z, ]+ )?{gauge.on} ", out, re.MULTILINE)
        assert gauge.help.split(":")[0].split("(")[0].strip()[:30] in flat
    for part in PARTS:
        assert re.search(rf"^{part} ", out, re.MULTILINE)


def test_an_exhibit_is_drawn_from_its_run(tmp_path):
    from joma.paper.exhibits import get, make_exhibit

    path = make_exhibit(get(["fig3"])[0], "default", tmp_path).path
    before = json.loads((path / "figure.json").read_text())
    plot(path, tmp_path / "again")
    assert json.loads((tmp_path / "again/figure.json").read_text()) == before


def test_the_numbers_as_a_table_beside_the_picture(tmp_path):
    path = tmp_path / "run"
    write_run(path, [1, 2, 3])
    done = CliRunner().invoke(app, ["report", str(path), "--out", str(tmp_path / "numbers.csv")])
    assert done.exit_code == 0, done.output
    pd.testing.assert_frame_equal(
        pd.read_csv(tmp_path / "numbers.csv"), Run(path).frame(), check_dtype=False
    )
