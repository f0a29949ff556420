"""Audits: planted faults are found, healthy series are not accused, and what the hub knows is not downloaded."""

from __future__ import annotations

import inspect
import json
import os
import random
import re
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from benchmarks.audit import FAULTS, make_series
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import joma
from joma._checkpoints.audit import audit as module
from joma._checkpoints.audit import faults as faults_module
from joma._checkpoints.audit import gathered as gathered_module
from joma._checkpoints.audit.facts import SLICE, Facts, TensorFact, gather
from joma._checkpoints.audit.faults import Fault, find_faults
from joma._checkpoints.audit.gathered import Gathered
from joma._checkpoints.budget import parse_bytes
from joma._runs import Run, RunWriter
from joma.cli import app
from tests.checkpoints.hubserver import Hub

BY_HASHES = {"duplicate step", "shard of another step", "truncated file", "renamed tensor"}


@pytest.fixture(scope="module")
def healthy(tmp_path_factory):
    pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("series") / "llama"
    make_series("llama", 0, folder, (0, 1, 2, 4, 8, 16, 24, 32, 40))
    return folder


@pytest.fixture
def series(healthy, tmp_path):
    shutil.copytree(healthy, tmp_path / "series")
    return tmp_path / "series"


@pytest.mark.parametrize("level", ["hashes", "slices", "full"])
def test_a_healthy_series_is_not_accused(level, healthy):
    result = joma.audit(healthy, level=level)
    assert result.ok, [fault.text for fault in result.faults]
    table = result.checkpoints()
    assert table.step.tolist() == [0, 1, 2, 4, 8, 16, 24, 32, 40]
    assert table.change.notna().sum() == (0 if level == "hashes" else 8)
    assert ("level slices" in result.not_judged) == (level == "hashes")


def test_it_is_said_that_too_few_checkpoints_cannot_be_judged(tmp_path):
    folder = written(
        tmp_path / "series",
        [{name: t + 0.01 * n for name, t in state(100).items()} for n in range(3)],
    )
    result = joma.audit(folder)
    assert result.ok
    assert result.not_judged == "how one step follows another: that takes 4 checkpoints, here are 3"
    (folder / "step-3").mkdir()
    (folder / "step-3/model.safetensors").write_bytes(b"cut off")
    assert joma.audit(folder).not_judged == result.not_judged  # what cannot be read does not count


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_found(fault, series):
    """A small version of ``python -m benchmarks.audit``, whose figures are in the documentation."""
    wrong = FAULTS[fault](series, random.Random(3))
    for level in ("hashes", "full") if fault in BY_HASHES else ("full",):
        faults = joma.audit(series, level=level).faults
        assert wrong & {name for found in faults for name in found.checkpoints}, (level, wrong)


def test_changes_are_those_of_the_weights(healthy):
    changes = joma.audit(healthy, level="full").changes().set_index(["checkpoint", "tensor"])
    name = "model.layers.1.mlp.up_proj.weight"
    file = json.loads((healthy / "step-8/model.safetensors.index.json").read_text())["weight_map"][
        name
    ]
    a, b = (load_file(healthy / step / file)[name].double() for step in ("step-4", "step-8"))
    expected = float((b - a).norm() / ((a.norm() + b.norm()) / 2))
    assert changes.change[("step-8", name)] == pytest.approx(expected, rel=1e-6)


def state(rows: int = 40_000, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "a.weight": torch.randn(rows, 8, generator=generator),
        "b.weight": torch.randn(64, 8, generator=generator),
    }


def written(folder, states):
    for n, tensors in enumerate(states):
        (folder / f"step-{n}").mkdir(parents=True)
        save_file(tensors, folder / f"step-{n}/model.safetensors")
    return folder


def kinds(result):
    return {(fault.kind, fault.checkpoints) for fault in result.faults}


def test_slices_see_their_bytes_and_no_others(tmp_path):
    """Of 40,000 × 8 numbers, the 16,384 in the middle."""
    states = [{name: t + 0.01 * n for name, t in state().items()} for n in range(5)]
    middle = states[0]["a.weight"].numel() // 2
    states[1]["a.weight"].view(-1)[middle + SLICE // 8 - 1] = torch.nan
    states[2]["a.weight"].view(-1)[middle + SLICE // 8] = torch.inf
    folder = written(tmp_path / "series", states)
    assert kinds(joma.audit(folder, level="slices")) == {("not finite", ("step-1",))}
    assert kinds(joma.audit(folder, level="full")) == {
        ("not finite", ("step-1",)),
        ("not finite", ("step-2",)),
    }


def test_types_shapes_repeats_and_states(tmp_path):
    states = [{name: t + 0.01 * n for name, t in state(100).items()} for n in range(6)]
    states[1]["b.weight"] = states[1]["b.weight"].half()
    states[2]["a.weight"] = states[2]["a.weight"][:90]
    states[3]["c.weight"] = states[3]["b.weight"].clone()
    folder = written(tmp_path / "series", states)
    (folder / "step-4/trainer_state.json").write_text('{"global_step": 40}')
    (folder / "step-5/trainer_state.json").write_text('{"global_step": 5}')
    found = joma.audit(folder, level="full")
    assert kinds(found) == {
        ("type", ("step-1",)), ("type", ("step-2",)), ("tensors", ("step-3",)), ("repeated", ("step-3",)),
        ("state", ("step-4",)),
    }  # fmt: skip
    assert "b.weight is float16 (64, 8), and float32 (64, 8) in most" in found.faults[1].text


@pytest.mark.filterwarnings("ignore")  # of PyTorch, on a group of one process
def test_distributed_checkpoints(tmp_path):
    from torch.distributed import checkpoint

    for n in range(5):
        moved = {name: t + 0.01 * n for name, t in state(100).items()}
        checkpoint.save(moved, checkpoint_id=tmp_path / f"series/step-{n}", no_dist=True)
    assert joma.audit(tmp_path / "series", level="full").ok
    shutil.rmtree(tmp_path / "series/step-1")
    shutil.copytree(tmp_path / "series/step-4", tmp_path / "series/step-1")
    for level in ("hashes", "full"):
        assert ("identical", ("step-1", "step-4")) in kinds(
            joma.audit(tmp_path / "series", level=level)
        )


def test_tied_constant_and_frozen_tensors_are_no_faults(tmp_path):
    states = []
    for n in range(6):
        moving = state(100)["a.weight"] + 0.01 * n
        states.append(
            {"a": moving, "tied": moving.clone(), "norm1": torch.ones(128), "norm2": torch.ones(128),
             "frozen": state(100)["b.weight"]}
        )  # fmt: skip
    assert joma.audit(written(tmp_path / "series", states), level="full").ok


def walk(seed: int, kind: str, matrices: int = 6, steps: int = 30) -> np.ndarray:
    """(checkpoints, matrices, numbers): straight, random or jittering ways."""
    draw = np.random.default_rng(seed)
    noise = draw.normal(size=(steps, matrices, 400))
    start = 10 * draw.normal(size=(matrices, 400))
    if kind in ("straight", "log"):  # at even steps, or at 1, 2, 4, …
        at = np.arange(steps) if kind == "straight" else 2.0 ** np.arange(steps) / 2.0**steps
        return start + at[:, None, None] * draw.normal(size=(matrices, 400))
    return start + (noise.cumsum(axis=0) if kind == "random" else noise)


def faults_of(points: np.ndarray) -> tuple[list[Fault], tuple[str, ...]]:
    """What the rules say of a way through (checkpoints, matrices, numbers), two matrices per file."""
    gathered = Gathered()
    for n, point in enumerate(points):
        samples = {f"m{m}": torch.tensor(numbers) for m, numbers in enumerate(point)}
        tensors = {name: TensorFact(f"f{name[1:]}", "f", (20, 20), digest=f"{hash(samples[name].numpy().tobytes())}")
                   for name in samples}  # fmt: skip
        gathered.add(Facts(f"step{n}", n, tensors=tensors), samples, "")
    return find_faults(gathered.series, gathered.sketches)


def named(faults: list[Fault]) -> list[tuple[str, tuple[str, ...]]]:
    return [(fault.kind, fault.checkpoints) for fault in faults]


@pytest.mark.parametrize("kind", ["straight", "random", "jitter"])
@pytest.mark.parametrize("seed", range(5))
def test_ways_of_training_are_no_misfits_and_strangers_are(kind, seed):
    points = walk(seed, kind)
    assert faults_of(points)[0] == []
    at = 1 + seed * 6
    wrong = points.copy()
    wrong[at] = 10 * np.random.default_rng(99).normal(size=points[at].shape)
    assert named(faults_of(wrong)[0]) == [("misfit", (f"step{at}",))]
    part = points.copy()
    part[at, 2] = wrong[at, 2]
    (found,) = faults_of(part)[0]
    assert (found.checkpoints, found.tensors) == ((f"step{at}",), ("m2",))


@pytest.mark.parametrize("kind", ["straight", "random"])
@pytest.mark.parametrize(("at", "of"), [(2, 5), (3, 0), (2, 7), (6, 1), (4, 5)])
def test_a_step_with_the_weights_of_another_is_blamed_and_its_neighbours_are_not(kind, at, of):
    points = walk(3, kind, steps=8)
    points[at] = points[of]
    first, last = (f"step{n}" for n in sorted((at, of)))
    blamed = [
        checkpoints for fault, checkpoints in named(faults_of(points)[0]) if fault != "identical"
    ]
    assert blamed in (
        [],
        [(f"step{at}",)],
    )  # next to each other, the copy is none that does not fit
    assert ("identical", (first, last)) in named(faults_of(points)[0])


@pytest.mark.parametrize("kind", ["straight", "random"])
def test_of_two_strangers_both_are_blamed(kind):
    points = walk(4, kind, steps=12)
    strangers = 10 * np.random.default_rng(98).normal(size=(2, *points[0].shape))
    points[4], points[7] = strangers
    assert sorted(named(faults_of(points)[0])) == [("misfit", ("step4",)), ("misfit", ("step7",))]


@pytest.mark.parametrize("kind", ["straight", "random", "log"])
@pytest.mark.parametrize("pair", [(0, 1), (0, 2), (27, 29), (28, 29), (0, 29), (1, 2), (4, 20)])
def test_exchanged_checkpoints_are_named_and_no_others(kind, pair):
    points = walk(1, kind)
    points[[*pair]] = points[[*pair[::-1]]]
    faults, unknown = faults_of(points)
    assert named(faults) == [("exchanged", tuple(f"step{n}" for n in pair))]
    assert not any("comes first" in text for text in unknown)


def test_an_order_that_cannot_be_told_is_said_and_no_fault():
    """Weights that jitter around a point have none; nor have the last two if the last is where the jitter is over."""
    assert "which of step0 and step1 comes first, and of" in faults_of(walk(0, "jitter"))[1][1]
    draw = np.random.default_rng(0)
    for jitter in (0.3, 0.6, 1.0, 2.0):
        points = walk(0, "random") + jitter * draw.normal(size=(30, 6, 400))
        points[-1] = walk(0, "random")[-2]
        faults, unknown = faults_of(points)
        assert faults == []
        assert any(
            "which of step28 and step29" in text or "more pairs" in text for text in unknown
        ), jitter


def test_the_direction_of_a_series_is_told_by_its_initialisation(healthy, series, tmp_path):
    assert joma.audit(healthy).not_judged == ""
    steps = sorted(series.iterdir(), key=lambda path: int(path.name.split("-")[1]))
    for path, new in zip(steps, [path.name for path in reversed(steps)], strict=True):
        path.rename(tmp_path / new)
    shutil.rmtree(series)
    backwards = joma.audit(tmp_path)
    assert [(fault.kind, fault.checkpoints) for fault in backwards.faults] == [
        ("late", ("step-0", "step-40"))
    ]
    assert "step-40 looks like an initialisation" in backwards.faults[0].text
    shutil.rmtree(tmp_path / "step-40")
    assert joma.audit(tmp_path).ok
    assert joma.audit(tmp_path).not_judged.startswith(
        "whether the series as a whole runs backwards"
    )


def test_problems_are_faults_and_the_others_are_judged(series):
    (series / "step-4/model.safetensors.index.json").write_text("{}")
    result = joma.audit(series)
    assert kinds(result) == {("unreadable", ("step-4",))}
    assert result.checkpoints().set_index("checkpoint").change.isna().tolist() == [
        True,
        *[False] * 2,
        True,
        *[False] * 5,
    ]


def at_the_end_of(process) -> int:
    _, status = os.waitpid(process, 0)
    return os.WTERMSIG(status)


@pytest.mark.parametrize("moment", ["gather", "write_json", "write"])
def test_a_killed_audit_goes_on_with_the_same_result(moment, healthy, tmp_path, monkeypatch):
    """SIGKILL while a checkpoint is read, between its files, and before its row."""
    run = tmp_path / "run"
    if (process := os.fork()) == 0:
        owner = {"gather": module, "write_json": gathered_module, "write": RunWriter}[moment]
        real, calls = getattr(owner, moment), []

        def dying(*arguments, **options):
            calls.append(1)
            if len(calls) == 5:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*arguments, **options)

        setattr(owner, moment, dying)
        joma.audit(healthy, run=run)
        os._exit(1)
    assert at_the_end_of(process) == signal.SIGKILL
    rows = list(Run(run).rows())
    assert [row["checkpoint"] for row in rows] == ["step-0", "step-1", "step-2", "step-4"]
    read = []
    monkeypatch.setattr(
        module, "gather", lambda *arguments: read.append(arguments[0].name) or gather(*arguments)
    )
    again = joma.audit(healthy, run=run)
    assert read == ["step-8", "step-16", "step-24", "step-32", "step-40"]
    assert again.as_json() == joma.audit(healthy).as_json()
    assert sorted(path.name for path in (run / "gathered").glob("*.samples")) == [
        "7.samples",
        "8.samples",
    ]
    read.clear()
    assert joma.audit(healthy, run=run).as_json() == again.as_json()
    assert read == []


def test_what_was_gathered_counts_for_the_same_files_and_level_only(series, tmp_path, monkeypatch):
    run, read = tmp_path / "run", []
    monkeypatch.setattr(
        module, "gather", lambda *arguments: read.append(arguments[0].name) or gather(*arguments)
    )
    first = joma.audit(series, run=run, revisions="0..16")
    assert joma.audit(series, run=run).as_json() == joma.audit(series).as_json()  # it has grown
    assert read[:9] == [
        "step-0",
        "step-1",
        "step-2",
        "step-4",
        "step-8",
        "step-16",
        "step-24",
        "step-32",
        "step-40",
    ]
    shutil.rmtree(series / "step-8")
    shutil.copytree(series / "step-24", series / "step-8")
    read.clear()
    assert ("identical", ("step-8", "step-24")) in kinds(joma.audit(series, run=run))
    assert len(read) == 9
    assert first.ok


def test_an_audit_of_another_level_or_series_gets_a_numbered_folder(tmp_path, capfd, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for place in ("a", "b"):
        moved = [{name: t + 0.01 * n for name, t in state(100).items()} for n in range(4)]
        written(tmp_path / place / "series", moved)
    run = CliRunner().invoke
    assert "run: runs/audit-series-slices/" in run(app, ["audit", "a/series"]).output
    before = Run("runs/audit-series-slices").info
    other = run(app, ["audit", "b/series"])  # the same name, and another series
    assert (other.exit_code, "run: runs/audit-series-slices-2/" in other.output) == (0, True)
    assert (tmp_path / "runs/audit-series-slices-2/figure.svg").exists()
    assert Run("runs/audit-series-slices").info == before
    capfd.readouterr()
    assert joma.audit("a/series", run="runs/audit-series-slices").path == Path(
        "runs/audit-series-slices"
    )
    assert capfd.readouterr().err == ""
    again = joma.audit("b/series", run="runs/audit-series-slices")
    assert again.path == Path("runs/audit-series-slices-2")
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith(
        "joma.audit: runs/audit-series-slices holds the audit of another config (source: 'a/series'"
    )
    assert "this one goes on in runs/audit-series-slices-2" in line
    assert (
        joma.audit("a/series", run="runs/audit-series-slices", level="full").path.name
        == "audit-series-slices-3"
    )
    assert joma.audit("a/series").path is None


def test_what_was_found_is_in_the_run_folder(tmp_path):
    folder = written(
        tmp_path / "series",
        [{name: t + 0.01 * n for name, t in state(100).items()} for n in range(5)],
    )
    healthy = joma.audit(folder, run=tmp_path / "run")
    assert Run(tmp_path / "run").info["faults"] == []
    shutil.copy(folder / "step-3/model.safetensors", folder / "step-4/model.safetensors")
    found = joma.audit(folder, run=tmp_path / "run")
    assert (healthy.ok, found.ok) == (True, False)
    assert module.read_audit(tmp_path / "run").as_json() == found.as_json()
    info = Run(tmp_path / "run").info
    assert (info["status"], info["reason"]) == (
        "done",
        f"{len(found.faults)} fault in 2 of 5 checkpoints",
    )


def test_every_kind_of_fault_has_advice():
    kinds = set(re.findall(r'Fault\("([a-z ]+)"', inspect.getsource(faults_module))) | {
        "exchanged",
        "late",
    }
    assert kinds == set(faults_module.WHAT_TO_DO)


def test_by_hashes_of_the_hub_no_weight_is_transferred(healthy, tmp_path, monkeypatch):
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setenv("JOMA_CACHE", str(tmp_path / "joma"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    revisions = {path.name.replace("-", ""): path for path in healthy.iterdir()}
    revisions["step36"] = healthy / "step-16"
    hub = Hub("someone/model", revisions)
    with hub.serving() as url:
        monkeypatch.setattr(constants, "ENDPOINT", url)
        monkeypatch.setattr(
            constants,
            "HUGGINGFACE_CO_URL_TEMPLATE",
            url + "/{repo_id}/resolve/{revision}/{filename}",
        )
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        result = joma.audit("someone/model", level="hashes")
        assert [name for name in hub.log if name.endswith(".safetensors")] == []
        assert kinds(result) == {("identical", ("step16", "step36"))}
        remote = joma.audit("someone/model", revisions="0..8", level="slices")
        local = joma.audit(healthy, revisions="0..8", level="slices")
        assert remote.changes().change.tolist() == local.changes().change.tolist()
        assert remote.checkpoints().transferred.min() > 0
        said: list[str] = []
        for level in ("hashes", "slices", "full"):
            result = joma.audit(
                "someone/model", level=level, report=lambda done, total, what: said.append(what)
            )
            about = re.fullmatch(
                r"to be transferred from the hub: about (.*), 10 × .*", next(filter(None, said))
            )
            transferred = result.checkpoints().transferred
            assert parse_bytes(about[1]) == pytest.approx(10 * transferred.max(), rel=0.005), (
                level
            )  # in three digits
            said.clear()
        sent = hub.sent
        with pytest.raises(
            ValueError, match=r"10 checkpoints of .* and the budget is 200 kB: choose \d of them"
        ):
            joma.audit("someone/model", budget="200kB")
        assert (
            hub.sent - sent < 2 * remote.checkpoints().transferred.max()
        )  # the first was asked, and no other
        run = tmp_path / "run"
        assert (
            joma.audit("someone/model", run=run, revisions="0..8", budget="5MB").as_json()
            == remote.as_json()
        )
        hub.log.clear()
        assert joma.audit("someone/model", run=run, revisions="0..8").as_json() == remote.as_json()
        assert [name for name in hub.log if name.endswith(".safetensors")] == []
    assert [path for path in (tmp_path / "joma").rglob("*") if path.is_file()] == []


def test_the_command(series, tmp_path):
    runner = CliRunner()
    good = runner.invoke(app, ["audit", str(series), "--out", str(tmp_path / "out")])
    assert good.exit_code == 0, good.output
    assert "no faults found" in good.output
    assert (tmp_path / "out/figure.svg").stat().st_size > 5000
    again = runner.invoke(app, ["audit", str(series), "--json", "--out", str(tmp_path / "out")])
    assert again.exit_code == 0
    written = json.loads(again.stdout)
    assert len(written["checkpoints"]) == 9
    assert all(
        len(t["digest"]) == 64 for c in written["checkpoints"] for t in c["tensors"].values()
    )
    shutil.rmtree(series / "step-8")
    shutil.copytree(series / "step-24", series / "step-8")
    bad = runner.invoke(
        app, ["audit", str(series), "--level", "hashes", "--out", str(tmp_path / "hashes")]
    )
    assert bad.exit_code == 1
    assert "step-8, step-24 have the same weights" in bad.output
    with pytest.raises(ValueError, match="there is no level 'all'"):
        joma.audit(series, level="all")
    with pytest.raises(ValueError, match="one checkpoint only"):
        joma.audit(series / "step-8")
