"""`joma runs`, `joma status`, `joma watch`, `joma gauges` and `joma report`: what a newcomer types first."""

import json
import os

import pandas as pd
import pytest
import torch
from torch import nn

import joma
from joma import Run
from joma._checkpoints.scan import DEFAULT_GAUGES as SCAN_GAUGES
from joma._measure.watch.options import DEFAULT_GAUGES as WATCH_GAUGES
from joma._runs import RunWriter
from joma._runs.listing import runs_below, standings
from tests.cli.test_cli import joma as run_joma

AXES = {"entropy": ["layer"], "phase": ["layer"]}


def write_run(folder, loss, *, status="done", alert=None, kind="train"):
    writer = RunWriter.create(folder, kind=kind, config={"steps": 100}, axes=AXES)
    writer.note(phases=["dense", "sparsifying", "bouncing", "collapsed"])
    writer.write(5, {"loss": loss, "entropy": [2.5, 1.5], "phase": [0, 1]})
    writer.finish(status)
    if alert is not None:
        fields = {"step": 5, "kind": "collapse", "level": alert, "layer": 0, "heads": []}
        fields |= {"gauge": "entropy", "module": "a", "later": [], "value": 0.1, "threshold": 0.2}
        fields["what_to_do"] = "Lower the rate."
        (folder / "alerts.jsonl").write_text(json.dumps(fields) + "\n")


@pytest.fixture
def runs(tmp_path):
    folder = tmp_path / "runs"
    write_run(folder / "mine", 1.5, alert="warning", kind="watch")
    write_run(folder / "sweep/a", 2.5)
    write_run(folder / "sweep/b", float("nan"), status="diverged", alert="critical")
    (folder / ".fig3.partial-1").mkdir()
    (folder / ".fig3.partial-1/run.json").write_text("{")
    return folder


def test_runs_at_any_depth_are_listed_with_state_step_loss_and_worst_alert(runs):
    lines = run_joma("runs", runs, check=0).stdout.splitlines()
    assert [line.split() for line in lines] == [
        ["run", "kind", "status", "step", "loss", "worst", "alert"],
        ["mine", "watch", "done", "5", "1.5", "warning"],
        ["sweep/a", "train", "done", "5", "2.5"],
        ["sweep/b", "train", "diverged", "5", "NaN", "critical"],
    ]
    rows = json.loads(run_joma("runs", runs, "--json", check=0).stdout)
    assert [(row["run"], row["loss"], row["alert"]) for row in rows] == [
        ("mine", 1.5, "warning"),
        ("sweep/a", 2.5, None),
        ("sweep/b", "nan", "critical"),
    ]


def test_the_folder_that_commands_write_to_is_the_default(runs):
    here = run_joma("runs", cwd=runs.parent, check=0).stdout
    assert here == run_joma("runs", runs, check=0).stdout
    assert "sweep/b" in run_joma("status", cwd=runs.parent).stdout


def test_a_folder_of_runs_has_the_exit_status_of_its_worst_alert(runs):
    assert run_joma("status", runs / "sweep/a").returncode == 0
    assert run_joma("status", runs / "mine").returncode == 4
    done = run_joma("status", runs)
    assert done.returncode == 5
    assert "dense sparsifying" in done.stdout
    assert json.loads(run_joma("status", runs, "--json").stdout) == json.loads(
        run_joma("runs", runs, "--json").stdout
    )


def test_a_run_that_cannot_be_read_does_not_hide_the_others(runs):
    (runs / "mine/run.json").write_text("{")
    first, *others = standings(runs)
    assert first["status"] == "unreadable"
    assert "run.json" in first["reason"]
    assert [row["run"] for row in others] == ["sweep/a", "sweep/b"]
    assert "unreadable" in run_joma("runs", runs, check=0).stdout


def test_links_that_lead_back_are_not_followed(runs):
    os.symlink(runs, runs / "again")
    assert len(runs_below(runs)) == 3


def test_a_run_itself_is_a_list_of_one(runs):
    assert [row["run"] for row in standings(runs / "sweep/a")] == ["a"]


def test_gauges_mark_the_defaults_and_begin_with_them():
    rows = json.loads(run_joma("gauges", "--json", check=0).stdout)["gauges"]
    default_of = {row["gauge"]: row["default"] for row in rows}
    for command, names in (("watch", WATCH_GAUGES), ("scan", SCAN_GAUGES)):
        assert {name for name, used in default_of.items() if command in used} == set(names)
    counts = [len(used) for used in default_of.values()]
    assert counts == sorted(counts, reverse=True)
    assert list(default_of)[:2] == ["stable_rank", "entropy"]


def test_a_gauge_is_explained():
    text = run_joma("gauges", "stable_rank.qk", check=0, columns=200).stdout
    assert "W_Q W_Kᵀ per head" in text
    assert "one per head" in text
    assert "joma scan checkpoints/ --gauges stable_rank.qk" in text
    change = json.loads(run_joma("gauges", "change", "--json", check=0).stdout)
    assert (change["in_training"], change["in_scans"]) == (False, True)
    update = json.loads(run_joma("gauges", "update_ratio", "--json", check=0).stdout)
    assert (update["in_training"], update["in_scans"]) == (True, False)


class Module(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)

    def forward(self, x):
        return self.layer(x)


def test_the_lines_for_a_training_loop_watch_a_model(tmp_path):
    run = tmp_path / 'a "run"'
    code = json.loads(run_joma("watch", run, "--in", "loop", "--json", check=0).stdout)
    model = Module()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def train_step(batch):
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    data = [torch.randn(4, 8, 16) for _ in range(3)]
    exec(code["programs"]["loop"], {"model": model, "data": data, "train_step": train_step})
    assert Run(run).status == "done"
    assert "loss" in set(Run(run).frame().gauge)


def test_the_lines_for_trainers_name_what_there_is():
    programs = json.loads(run_joma("watch", "--json", check=0).stdout)["programs"]
    assert set(programs) == {"loop", "transformers", "lightning"}
    for code in programs.values():
        compile(code, "watch", "exec")
    assert callable(joma.integrations.transformers.watch)
    assert callable(joma.integrations.lightning.WatchCallback)


def test_the_report_of_a_folder_of_runs_is_a_page(runs, tmp_path):
    page = tmp_path / "page.html"
    assert str(page) in run_joma("report", runs / "sweep", "--out", page, check=0).stdout


def test_a_report_is_a_page_a_picture_or_numbers(runs, tmp_path):
    files = [
        tmp_path / f"out{ending}" for ending in (".html", ".svg", ".PNG", ".pdf", ".json", ".csv")
    ]
    outs = [word for file in files for word in ("--out", file)]
    said = run_joma("report", runs / "sweep/a", *outs, check=0).stdout
    assert all(str(file) in said for file in files)
    starts = {
        ".html": b"<!doctype",
        ".svg": b"<svg",
        ".png": b"\x89PNG",
        ".pdf": b"%PDF",
        ".json": b"{",
    }
    for file in files[:-1]:
        assert file.read_bytes()[:20].lower().startswith(starts[file.suffix.lower()].lower()), file
    table = pd.read_csv(files[-1])
    pd.testing.assert_frame_equal(table, Run(runs / "sweep/a").frame(), check_dtype=False)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["mine", "sweep/a", "--out", "x.svg"], "x.svg is of one run, and there are 2"),
        (["mine", "--out", "x.jpg"], "the name has to end in one of .html, .svg"),
        (["mine", "--out", "x.svg", "--title", "a"], "leave out the title"),
        (["mine", "--out", "x.csv", "--open"], "--open is for a page"),
    ],
)
def test_what_cannot_be_written_is_refused(runs, words, message):
    done = run_joma("report", *words, cwd=runs, check=2)
    assert message in done.stderr
