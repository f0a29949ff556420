"""Which checkpoints: names, steps, revisions."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path

import pytest

import joma
from joma._checkpoints.checkpoints import find_checkpoints
from joma._checkpoints.revision_choice import log_spaced, pythia_steps
from joma._checkpoints.steps import step_of
from tests.checkpoints.models import save


def test_pythia_has_154_checkpoints():
    steps = pythia_steps()
    assert len(steps) == 154
    assert steps[:12] == [0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1000]
    assert steps[-1] == 143_000


@pytest.mark.parametrize(
    ("name", "step"),
    [("step1000", 1000), ("step-00000500", 500), ("checkpoint-12", 12), ("step1000-tokens4B", 1000),
     ("epoch=3-step=1000", 1000), ("iter_0001000", 1000), ("1000", 1000),
     ("global_step30", 30), ("pythia-70m-step512", 512), ("main", None)],
)  # fmt: skip
def test_steps_in_names(name, step):
    assert step_of(name) == step


@pytest.fixture
def folder(tmp_path):
    for n in (0, 1, 2, 10, 20, 100, 1000):
        (tmp_path / f"step-{n}").mkdir()
        (tmp_path / f"step-{n}/model.safetensors").touch()
    (tmp_path / "notes").mkdir()
    (tmp_path / ".step-5").mkdir()
    return tmp_path


@pytest.mark.parametrize(
    ("revisions", "steps"),
    [
        (None, [0, 1, 2, 10, 20, 100, 1000]),
        ("all", [0, 1, 2, 10, 20, 100, 1000]),
        ("2..20", [2, 10, 20]),
        ("0..1000:10", [0, 10, 20, 100, 1000]),
        ("step0..step2", [0, 1, 2]),
        ("step-20,step-1", [20, 1]),
        ("step20,step1", [20, 1]),
        (["step-1", "step-7"], [1, 7]),
        ("log:1", [1000]),
        ("log", [0, 1, 2, 10, 20, 100, 1000]),
    ],
)
def test_revisions_of_a_folder(folder, revisions, steps):
    assert [c.step for c in find_checkpoints(str(folder), revisions)] == steps


def test_log_spaced():
    available = [(f"step{n}", n) for n in pythia_steps()]
    for count in (2, 5, 20, 40):
        chosen = log_spaced(available, count)
        assert len(chosen) == count
        assert (chosen[0], chosen[-1]) == ("step0", "step143000")
        assert chosen == sorted(chosen, key=lambda name: int(name[4:]))
    places = [math.log1p(int(name[4:])) for name in log_spaced(available, 5)]
    gaps = [b - a for a, b in pairwise(places)]
    assert max(gaps) < 1.5 * min(gaps)


def test_files_and_single_models(tmp_path):
    for name in ("model-10.pt", "model-9.pt", "readme.md", "other-3.txt"):
        (tmp_path / name).touch()
    assert [c.name for c in find_checkpoints(str(tmp_path))] == ["model-9.pt", "model-10.pt"]
    assert [c.step for c in find_checkpoints(str(tmp_path / "model-9.pt"))] == [9]
    (tmp_path / "model-10.pt").unlink()  # alone, the number may be anything
    (alone,) = find_checkpoints(str(tmp_path))
    assert (alone.step, alone.note) == (0, "unknown step; plotted at step 0")
    (tmp_path / "pythia").mkdir()
    (tmp_path / "pythia/pytorch_model.bin").touch()
    assert [c.name for c in find_checkpoints(str(tmp_path / "pythia"))] == ["pythia"]


@pytest.mark.parametrize(
    ("revisions", "message"),
    [
        ("5..2", "range '5..2' is empty"),
        ("0..10:0", "is empty"),
        ("3..9", "no checkpoint has a step in 3..9"),
        ("log:0", "how many"),
        ("log:x", "how many"),
        ("step1,,step2", "'' is no revision"),
        ("../../etc", "is no revision"),
        ("/etc", "is no revision"),
    ],
)
def test_bad_revisions(folder, revisions, message):
    with pytest.raises(ValueError, match=message):
        find_checkpoints(str(folder), revisions)


def test_bad_sources(tmp_path):
    with pytest.raises(ValueError, match="no checkpoints in"):
        find_checkpoints(str(tmp_path))
    with pytest.raises(ValueError, match="there is no folder or file"):
        find_checkpoints(str(tmp_path / "nope"))
    with pytest.raises(ValueError, match="there is no folder or file"):
        find_checkpoints("a/b/c")
    (tmp_path / "x.txt").touch()
    with pytest.raises(ValueError, match="no file of weights"):
        find_checkpoints(str(tmp_path / "x.txt"))
    with pytest.raises(ValueError, match="no model"):
        find_checkpoints("")


def touch(*folders: Path) -> None:
    for folder in folders:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "model.safetensors").touch()


@pytest.mark.parametrize(
    ("name", "step"),
    [("ckpt_7b_step_1000", 1000), ("pythia-70m", None), ("olmo-1.4b", None), ("a3f09c6", None), ("1000000", 1000000),
     ("e83d1f0c9b7a6d5e4f3c2b1a0f9e8d7c6b5a4f36", None), ("model10", None),
     ("smollm2", None), ("f_bnb4", None), ("model_7", None), ("footstep2", None),
     ("stage1-step2000-tokens9B", 2000)],
)  # fmt: skip
def test_numbers_that_are_no_steps(name, step):
    assert step_of(name) == step


def test_the_output_folder_of_a_trainer(tmp_path):
    out = tmp_path / "out"
    touch(out, out / "checkpoint-500", out / "checkpoint-1000")
    found = find_checkpoints(str(out))
    assert [(c.name, c.step) for c in found] == [
        ("checkpoint-500", 500),
        ("checkpoint-1000", 1000),
        ("out", 1001),
    ]
    assert "step is not known" in found[-1].note
    (out / "trainer_state.json").write_text('{"global_step": 1200}')
    assert find_checkpoints(str(out))[-1].step == 1200
    assert [c.name for c in find_checkpoints(str(out / "checkpoint-500"))] == ["checkpoint-500"]


def test_one_step_twice_and_one_checkpoint_twice(tmp_path):
    for name in ("step-1", "step-2", "epoch0-step-2"):
        save("neox", tmp_path / name)
    scan = joma.scan(str(tmp_path))
    notes = scan.checkpoints().set_index("checkpoint").note
    assert notes["step-2"] == "step 2 is also that of epoch0-step-2"
    assert notes["step-1"] == ""
    assert len(scan.frame()) == 3 * 3
    assert [c.name for c in find_checkpoints(str(tmp_path), "step1,step-1")] == ["step-1"]
    with pytest.warns(UserWarning, match="step-2 is left out: epoch0-step-2 is of step 2 too"):
        table = joma.embedding_series(tmp_path, list(range(40)), length=10)
    assert sorted(set(table.step)) == [1, 2]
