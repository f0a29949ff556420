"""Which checkpoints: names, steps, revisions."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest

from joma._scan.series import log_spaced, pythia_steps, series, step_of


def test_pythia_has_154_checkpoints():
    steps = pythia_steps()
    assert len(steps) == 154
    assert steps[:12] == [0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1000]
    assert steps[-1] == 143_000


@pytest.mark.parametrize(
    ("name", "step"),
    [("step1000", 1000), ("step-00000500", 500), ("checkpoint-12", 12), ("step1000-tokens4B", 1000), ("model_7", 7),
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
    assert [c.step for c in series(str(folder), revisions)] == steps


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
    assert [c.name for c in series(str(tmp_path))] == ["model-9.pt", "model-10.pt"]
    assert [c.step for c in series(str(tmp_path / "model-9.pt"))] == [9]
    (tmp_path / "pythia").mkdir()
    (tmp_path / "pythia/pytorch_model.bin").touch()
    assert [c.name for c in series(str(tmp_path / "pythia"))] == ["pythia"]


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
        series(str(folder), revisions)


def test_bad_sources(tmp_path):
    with pytest.raises(ValueError, match="no checkpoints in"):
        series(str(tmp_path))
    with pytest.raises(ValueError, match="there is no folder or file"):
        series(str(tmp_path / "nope"))
    with pytest.raises(ValueError, match="there is no folder or file"):
        series("a/b/c")
    (tmp_path / "x.txt").touch()
    with pytest.raises(ValueError, match="no file of weights"):
        series(str(tmp_path / "x.txt"))
    with pytest.raises(ValueError, match="no model"):
        series("")
