"""Checkpoints of `joma train` in all tools that open a checkpoint."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import torch

import joma
from joma._checkpoints.language_model import find_language_model, load_language_model
from joma._checkpoints.tensors import Tensors
from joma._train.checkpoints import load
from joma._train.language import train
from joma._train.settings import Settings
from tests.checkpoints.models import save

STEPS = 8
SMALL = {"layers": 2, "width": 16, "hidden": 24, "heads": 2, "batch": 4, "length": 12, "every": 4}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    text = folder / "text.txt"
    words = np.random.default_rng(0).integers(0, 30, 4000)
    text.write_text(
        "\n".join(" ".join(f"w{word}" for word in row) for row in words.reshape(-1, 20))
    )
    settings = Settings(data=str(text), steps=STEPS, valid_windows=1, probe_windows=1, **SMALL)
    train(settings, folder / "run", checkpoint_every=4, keep=2)
    return folder / "run"


def test_the_loaded_model_is_the_trained_one(run):
    folder = find_language_model(run)
    assert folder == run / "checkpoints/step-00000008"
    model = load_language_model(folder, Tensors.open(folder))
    expected = load(run, STEPS).model
    assert model.state_dict().keys() >= expected.keys()
    for name, weight in expected.items():
        assert torch.equal(model.state_dict()[name], weight)
    assert not model.training


def test_attention_gauges_use_the_tokeniser_of_the_training(run):
    text = json.loads((run / "run.json").read_text())["config"]["data"]
    scan = joma.scan(run, gauges="entropy,stable_rank", data=text, tokens=48)
    assert scan.status() == {"step-00000004": "ok", "step-00000008": "ok"}
    entropy = scan.frame().query("gauge == 'entropy'")
    assert len(entropy) == 2 * 2 * 2  # checkpoints, layers, heads
    # the watch of the training measured the same model on other windows of the same text
    watched = joma.Run(run).frame("entropy")
    last = watched[watched.step == STEPS].value.mean()
    assert entropy[entropy.step == STEPS].value.mean() == pytest.approx(last, rel=0.1)
    ids = scan = joma.scan(run, gauges="entropy", data=np.arange(30), length=10)
    assert ids.failed == []


def test_runs_are_compared_by_their_last_checkpoints(run, tmp_path):
    shutil.copytree(run, tmp_path / "other")
    scan = joma.scan([run, tmp_path / "other"], gauges="stable_rank,change")
    assert list(scan.status()) == ["run", "other"]
    table = scan.checkpoints()
    assert "step-00000008, the last of 2 checkpoints" in table.note[0]
    assert table.same_as.tolist() == ["other", "run"]


def test_a_text_of_other_words_is_refused(run):
    scan = joma.scan(run, gauges="entropy", data="pydoc", tokens=48)
    assert set(scan.status().values()) == {"failed"}
    assert "the tokenizer does not know 100%" in scan.checkpoints().note[0]


def test_superpose_geometry_and_audit_take_them(run):
    text = json.loads((run / "run.json").read_text())["config"]["data"]
    for place in (run, run / "checkpoints/step-00000008"):
        geometry = joma.embedding_geometry(place, text, tokens=48, length=12)
        assert len(geometry.layers) == 2
    found = joma.superpose(run, text, layer=0, length=12, masked=0)
    assert found.info["tokens"] > 1000
    with pytest.raises(ValueError, match="length is 13, and the model takes at most 12"):
        joma.superpose(run, text, layer=0, length=13)
    assert joma.audit(run).ok
    table = joma.embedding_series(run, np.arange(30), length=10)
    assert sorted(set(table.step)) == [4, 8]


def test_a_damaged_run_is_refused_in_a_sentence(run, tmp_path):
    shutil.copytree(run, tmp_path / "run")
    path = tmp_path / "run/run.json"
    info = json.loads(path.read_text())
    info["config"]["heads"] = 5
    path.write_text(json.dumps(info))
    with pytest.raises(
        ValueError, match=r"cannot be built from its run.json: the width d = 16 is not"
    ):
        joma.embedding_geometry(tmp_path / "run", np.arange(30))
    save("bert", tmp_path / "checkpoints/step-1")  # of no training
    assert find_language_model(tmp_path / "checkpoints/step-1") is None
