"""Audits: planted faults are found, healthy series are not accused, and what the hub knows is not downloaded."""

from __future__ import annotations

import json
import random
import shutil

import numpy as np
import pytest
import torch
from benchmarks.audit import FAULTS, make_series
from safetensors.torch import load_file, save_file
from tests.scan.hubserver import Hub
from typer.testing import CliRunner

import joma
from joma._scan.facts import SLICE, Facts, TensorFact
from joma._scan.faults import find_faults
from joma._scan.fit import misfits
from joma.cli import app

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
    folder = written(tmp_path / "series", [{name: t + 0.01 * n for name, t in state(100).items()} for n in range(3)])
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
    file = json.loads((healthy / "step-8/model.safetensors.index.json").read_text())["weight_map"][name]
    a, b = (load_file(healthy / step / file)[name].double() for step in ("step-4", "step-8"))
    expected = float((b - a).norm() / ((a.norm() + b.norm()) / 2))
    assert changes.change[("step-8", name)] == pytest.approx(expected, rel=1e-6)


def state(rows: int = 40_000, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {"a.weight": torch.randn(rows, 8, generator=generator), "b.weight": torch.randn(64, 8, generator=generator)}


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
    assert kinds(joma.audit(folder, level="full")) == {("not finite", ("step-1",)), ("not finite", ("step-2",))}


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
        assert ("identical", ("step-1", "step-4")) in kinds(joma.audit(tmp_path / "series", level=level))


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
    if kind == "straight":
        return start + np.arange(steps)[:, None, None] * draw.normal(size=(matrices, 400))
    return start + (noise.cumsum(axis=0) if kind == "random" else noise)


def facts_of(points: np.ndarray) -> list[Facts]:
    def change(a, b):
        return {f"m{m}": float(np.linalg.norm(a[m] - b[m])) for m in range(len(a))}

    found = []
    for n, point in enumerate(points):
        facts = Facts(
            f"step{n}", n, tensors={f"m{m}": TensorFact(f"f{m // 2}", "f", (20, 20)) for m in range(len(point))}
        )
        facts.change = change(point, points[n - 1]) if n else {}
        facts.change2 = change(point, points[n - 2]) if n > 1 else {}
        found.append(facts)
    return found


@pytest.mark.parametrize("kind", ["straight", "random", "jitter"])
@pytest.mark.parametrize("seed", range(5))
def test_ways_of_training_are_no_misfits_and_strangers_are(kind, seed):
    points = walk(seed, kind)
    assert misfits(facts_of(points)) == []
    at = 1 + seed * 6
    wrong = points.copy()
    wrong[at] = 10 * np.random.default_rng(99).normal(size=points[at].shape)
    assert [misfit.checkpoint for misfit in misfits(facts_of(wrong))] == [f"step{at}"]
    shard = points.copy()
    shard[at, 2:4] = wrong[at, 2:4]
    (found,) = misfits(facts_of(shard))
    assert (found.checkpoint, found.tensors) == (f"step{at}", ("m2", "m3"))
    if kind != "jitter":  # where nothing moves, no order can be told
        swapped = points.copy()
        swapped[[at, at + 1]] = points[[at + 1, at]]
        assert {f"step{at}", f"step{at + 1}"} & {misfit.checkpoint for misfit in misfits(facts_of(swapped))}


def test_problems_are_faults_and_the_others_are_judged():
    points = facts_of(walk(0, "random"))
    points[3] = Facts("step3", 3, problem="it is cut off")
    faults = find_faults(points)
    assert ("unreadable", ("step3",)) in {(fault.kind, fault.checkpoints) for fault in faults}


def test_by_hashes_of_the_hub_no_weight_is_transferred(healthy, tmp_path, monkeypatch):
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setenv("JOMA_CACHE", str(tmp_path / "joma"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    revisions = {path.name.replace("-", ""): path for path in healthy.iterdir()}
    revisions["step36"] = healthy / "step-16"
    hub = Hub("someone/model", revisions)
    with hub.serving() as url:
        monkeypatch.setattr(constants, "ENDPOINT", url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        result = joma.audit("someone/model", level="hashes")
        assert [name for name in hub.log if name.endswith(".safetensors")] == []
        assert kinds(result) == {("identical", ("step16", "step36"))}
        remote = joma.audit("someone/model", revisions="0..8", level="slices")
        local = joma.audit(healthy, revisions="0..8", level="slices")
        assert remote.changes().change.tolist() == local.changes().change.tolist()
        assert remote.checkpoints().transferred.min() > 0
    assert [path for path in (tmp_path / "joma").rglob("*") if path.is_file()] == []


def test_the_command(series, tmp_path):
    runner = CliRunner()
    good = runner.invoke(
        app, ["audit", str(series), "--json", str(tmp_path / "a.json"), "--out", str(tmp_path / "out")]
    )
    assert good.exit_code == 0, good.output
    assert "no faults found" in good.output
    assert (tmp_path / "out/figure.svg").stat().st_size > 5000
    written = json.loads((tmp_path / "a.json").read_text())
    assert len(written["checkpoints"]) == 9
    assert all(len(t["digest"]) == 64 for c in written["checkpoints"] for t in c["tensors"].values())
    shutil.rmtree(series / "step-8")
    shutil.copytree(series / "step-24", series / "step-8")
    bad = runner.invoke(app, ["audit", str(series), "--level", "hashes"])
    assert bad.exit_code == 1
    assert "step-8, step-24 have the same weights" in bad.output
    with pytest.raises(ValueError, match="there is no level 'all'"):
        joma.audit(series, level="all")
    with pytest.raises(ValueError, match="one checkpoint only"):
        joma.audit(series / "step-8")
