"""Scans of several models: names, tables, pictures, pages, changes, packaged models, bad input."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import joma
from joma._checkpoints.checkpoints import find_checkpoints, select_checkpoints
from joma._checkpoints.scan import Scan
from joma._data.packaged import MODELS, packaged
from joma._data.token_ids import read_token_ids
from joma.cli import app
from tests.checkpoints.models import FAMILIES, H, lower, model, save, stable_rank


@pytest.fixture(scope="module")
def zoo(tmp_path_factory):
    """One tiny model of each family, in folders without a step in their names."""
    folder = tmp_path_factory.mktemp("zoo")
    for family in FAMILIES:
        save(family, folder / family)
    return folder


# names and numbers


def test_models_are_compared_by_name_with_the_numbers_of_each_alone(zoo):
    names = ["llama", "bert", "gpt2"]
    scan = joma.scan([zoo / name for name in names])
    assert scan.is_comparison
    assert scan.status() == dict.fromkeys(names, "ok")
    frame = scan.frame()
    assert frame.columns.tolist() == [
        "checkpoint",
        "layer",
        "gauge",
        "value",
        "module",
        "same_as",
    ]
    for name in names:
        rows = frame[frame.checkpoint == name]
        alone = joma.scan(zoo / name).frame()
        assert rows.value.tolist() == alone.value.tolist()
        assert rows.module.tolist() == alone.module.tolist()  # each model has its own layers
        assert rows.value.tolist() == pytest.approx([stable_rank(w) for w in lower(name)], rel=1e-4)


def test_a_folder_of_models_without_steps_is_a_comparison(zoo):
    selection = select_checkpoints(zoo)
    assert selection.is_comparison
    assert selection.names == sorted(FAMILIES)
    assert select_checkpoints(zoo, "opt,bert").names == ["opt", "bert"]
    with pytest.raises(ValueError, match="has no model 'gpt9': it has bert, gpt2"):
        select_checkpoints(zoo, "gpt9")
    with pytest.raises(ValueError, match=r"models whose names have no step .* joma scan compares"):
        find_checkpoints(zoo)


def test_one_model_inside_a_folder_is_that_model(tmp_path):
    save("bert", tmp_path / "outer/model")
    selection = select_checkpoints(tmp_path / "outer")
    assert (selection.names, selection.is_comparison) == (["model"], False)


def test_equal_names_get_a_folder_more_and_the_same_path_twice_is_refused(tmp_path):
    for parent in ("a", "b"):
        save("bert", tmp_path / parent / "model")
    assert select_checkpoints([tmp_path / "a/model", tmp_path / "b/model"]).names == [
        "a/model",
        "b/model",
    ]
    with pytest.raises(ValueError, match="a/model is given twice"):
        select_checkpoints([tmp_path / "a/model", tmp_path / "a/model/"])
    scan = joma.scan([tmp_path / "a/model", tmp_path / "b/model"])
    assert scan.checkpoints().same_as.tolist() == ["b/model", "a/model"]


def test_a_killed_comparison_continues_and_another_list_gets_another_folder(zoo, tmp_path, capfd):
    run = tmp_path / "run"
    sources = [zoo / "bert", zoo / "gpt2", zoo / "opt"]

    def stop(done, total, text):
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        joma.scan(sources, run=run, report=stop)
    assert len(Scan(run).status()) == 2
    resumed = joma.scan(sources, run=run)
    fresh = joma.scan(sources)
    lines = [(scan.path / "metrics.jsonl").read_text() for scan in (resumed, fresh)]
    assert lines[0] == lines[1]
    assert joma.scan(sources[:2], run=run).path == tmp_path / "run-2"
    capfd.readouterr()


def test_the_table_the_picture_and_the_page_of_all_families(zoo, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    gauges = "stable_rank,stable_rank.qk,charge.mlp"
    done = CliRunner().invoke(
        app, ["scan", str(zoo), "--gauges", gauges, "--report", "page.html", "--out", "run"]
    )
    assert done.exit_code == 1  # mixtral has no charge of neurons
    lines = done.stdout.splitlines()
    assert lines[0].split() == ["model", *gauges.split(","), "status"]
    assert [line.split()[0] for line in lines[1:8]] == sorted(FAMILIES)
    assert "mixtral: charge.mlp: " in done.stdout  # the missing part, named per model
    assert lines[-1] == "7 models: 0 failed, 1 measured in part"
    drawn = json.loads(Path("run/figure.json").read_text())
    panels = drawn["concat"]
    assert len(panels) == 3
    colours = panels[0]["encoding"]["color"]["scale"]
    assert colours["domain"] == sorted(FAMILIES)
    assert len(set(colours["range"])) == len(FAMILIES)
    page = Path("page.html").read_text()
    assert "7 models: 6 measured, 1 in part." in page
    assert "<b>mixtral</b>: charge.mlp: " in page
    assert '<th scope="col">step</th>' not in page


# changes


@pytest.fixture
def tuned(tmp_path):
    """A base, and two models with the same names: one fine-tuned, one without the prefix."""
    save("bert", tmp_path / "base")
    generator = torch.Generator().manual_seed(0)
    state = load_file(tmp_path / "base/model.safetensors")
    moved = {}
    for name, weight in state.items():
        moved[name] = weight + 0.1 * torch.randn(weight.shape, generator=generator)
    for folder, prefix in (("tuned", ""), ("bare", "bert.")):
        shutil.copytree(tmp_path / "base", tmp_path / folder)
        renamed = {name.removeprefix(prefix): weight for name, weight in moved.items()}
        save_file(renamed, tmp_path / folder / "model.safetensors")
    return tmp_path


def test_what_fine_tuning_changed_per_block_and_part(tuned):
    scan = joma.scan(
        [tuned / "base", tuned / "tuned", tuned / "bare"],
        gauges="change.all,change_rank,stable_rank",
    )
    assert set(scan.status().values()) == {"ok"}
    frame = scan.frame()
    assert set(frame.gauge) == {
        "change_rank",
        "stable_rank",
        *(f"change.{part}" for part in ("mlp_in", "mlp_out", "q", "k", "v", "o")),
    }
    old = load_file(tuned / "base/model.safetensors")
    new = load_file(tuned / "tuned/model.safetensors")
    for layer in range(3):
        name = f"bert.encoder.layer.{layer}.attention.self.query.weight"
        expected = float((new[name] - old[name]).norm() / old[name].norm())
        rows = frame[(frame.gauge == "change.q") & (frame.layer == layer)]
        assert rows.checkpoint.tolist() == ["tuned", "bare"]  # the base has no change
        assert rows.value.tolist() == pytest.approx([expected, expected], rel=1e-5)
        assert set(rows.since) == {"base"}
    assert "the other models are compared with this one" in scan.checkpoints().note[0]


def test_models_with_nothing_in_common_say_so(zoo, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(
        app, ["scan", str(zoo / "bert"), str(zoo / "gpt2"), "--gauges", "change"]
    )
    assert done.exit_code == 1
    assert "gpt2: no change since bert can be measured: it has no " in done.stdout
    assert done.stdout.splitlines()[-1].endswith(
        "no gauge was measured on two of them: there is nothing to compare"
    )


# packaged models


@pytest.fixture
def packages(tmp_path, monkeypatch):
    """Two installed packages with the layout of rxnfp and rxnmapper, whose code must not run."""
    site = tmp_path / "site"
    layout = {"rxnfp": MODELS["rxnfp"].names, "rxnmapper": ("albert_heads_8",)}
    for package, folders in layout.items():
        record = [f"{package}/__init__.py,,"]
        for place, folder in enumerate(folders):
            inside = f"{package}/models/transformers/{folder}"
            made = model("bert")
            (site / inside).mkdir(parents=True)
            config = made.config.to_dict()
            if place < 2:  # as transformers wrote it in 2019
                del config["model_type"]
                del config["architectures"]
            (site / inside / "config.json").write_text(json.dumps(config))
            state = {name: weight + 0.01 * place for name, weight in made.state_dict().items()}
            if place == 1:  # saved without its head
                state = {name.removeprefix("bert."): weight for name, weight in state.items()}
            torch.save(
                state, site / inside / "pytorch_model.bin", _use_new_zipfile_serialization=False
            )
            torch.save({"lr": 1}, site / inside / "training_args.bin")
            for file in ("config.json", "pytorch_model.bin", "training_args.bin"):
                record.append(f"{inside}/{file},,")
        (site / package / "__init__.py").write_text("raise SystemExit('imported')")
        about = site / f"{package}-1.0.dist-info"
        about.mkdir()
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        (about / "RECORD").write_text("\n".join(record) + "\n")
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.chdir(tmp_path)
    return site


def test_a_package_with_several_models_is_a_comparison(packages):
    scan = joma.scan("rxnfp", gauges="change,stable_rank")
    assert scan.status() == dict.fromkeys(MODELS["rxnfp"].names, "ok")  # the base first
    assert MODELS["rxnfp"].about in scan.checkpoints().note[0]
    assert "unknown step" not in scan.checkpoints().note[0]
    frame = scan.frame()
    assert (frame[frame.gauge == "change"].value > 0).all()
    alone = joma.scan("rxnfp/bert_ft")
    assert alone.frame().value.tolist() == pytest.approx(
        frame[(frame.checkpoint == "bert_ft") & (frame.gauge == "stable_rank")].value.tolist()
    )
    with pytest.raises(ValueError, match="rxnfp has no model 'bert': it has bert_pretrained"):
        packaged("rxnfp/bert")
    together = select_checkpoints(["rxnfp", "rxnmapper"])
    assert together.names == [*MODELS["rxnfp"].names, "albert_heads_8"]


def test_a_config_without_a_family_is_completed_by_the_names_of_the_tensors(packages):
    ids = np.arange(48) % 50
    options = {"gauges": "entropy", "data": ids, "tokens": 48, "length": 24}
    scan = joma.scan("rxnfp", **options)
    assert set(scan.status().values()) == {"ok"}
    assert joma.embedding_geometry("rxnfp/bert_pretrained", ids, length=24).layers
    with pytest.raises(ValueError, match="rxnfp holds 3 models: give one of them, as rxnfp/bert_p"):
        joma.embedding_geometry("rxnfp", ids)


def test_a_package_that_lacks_a_file_is_refused(packages):
    (packages / "rxnfp/models/transformers/bert_ft/pytorch_model.bin").unlink()
    with pytest.raises(ValueError, match=r"without its weights \(pytorch_model.bin\): pip install"):
        joma.scan("rxnfp")


# token ids


def test_token_ids_come_from_arrays_and_files(zoo, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ids = np.random.default_rng(0).integers(0, 60, 100)
    np.save("ids.npy", ids)
    Path("ids.txt").write_text(" ".join(map(str, ids)))
    options = {"gauges": "entropy", "tokens": 96, "length": 24}
    tables = []
    for data in (ids, "ids.npy", "ids.txt", ids.tolist(), torch.from_numpy(ids)):
        scan = joma.scan(zoo / "gpt2", data=data, **options)
        assert scan.failed == []
        tables.append(scan.frame())
    assert all(table.equals(tables[0]) for table in tables)
    assert len(tables[0]) == 3 * H
    done = CliRunner().invoke(
        app,
        ["scan", str(zoo / "gpt2"), "--gauges", "entropy", "--data", "ids.npy", "--length", "24"],
    )
    assert done.exit_code == 0, done.output
    np.save("matrix.npy", ids[:96].reshape(4, 24))
    for geometry in (
        joma.embedding_geometry(zoo / "gpt2", "matrix.npy"),
        joma.embedding_geometry(zoo / "gpt2", ids[:96].reshape(4, 24)),
    ):
        assert geometry.layers
    found = joma.superpose(zoo / "gpt2", "ids.npy", layer=0, length=24, masked=0)
    assert found.info["tokens"] == 96  # whole windows


def test_bad_token_ids_are_refused(tmp_path):
    np.save(tmp_path / "floats.npy", np.zeros(3))
    np.save(tmp_path / "objects.npy", np.array([{}], dtype=object), allow_pickle=True)
    (tmp_path / "text.npy").write_text("no array")
    (tmp_path / "prose.txt").write_text("12 monkeys")
    with pytest.raises(ValueError, match="tokens must be whole numbers"):
        read_token_ids(tmp_path / "floats.npy")
    for name in ("objects.npy", "text.npy"):
        with pytest.raises(ValueError, match=f"{name} cannot be read as an array of token ids"):
            read_token_ids(tmp_path / name)
    with pytest.raises(ValueError, match="there is no file"):
        read_token_ids(tmp_path / "nothing.npy")
    assert read_token_ids(tmp_path / "prose.txt") is None


def test_a_tokenizer_that_does_not_know_the_text_is_refused(tmp_path):
    save("bert", tmp_path / "model")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "C", "N", "O"]
    (tmp_path / "model/vocab.txt").write_text("\n".join(words))
    scan = joma.scan(tmp_path / "model", gauges="entropy,stable_rank", tokens=64, length=16)
    assert scan.status() == {"model": "partly"}
    problem = scan.checkpoints().problems[0]["entropy"]
    assert problem.startswith("the tokenizer does not know ")
    assert "token ids (--data IDS.npy)" in problem


# bad input


def test_a_folder_that_is_a_model_and_a_series_is_its_model_in_a_comparison(tmp_path):
    for name in ("out", "out/checkpoint-1", "out/checkpoint-2", "other"):
        save("bert", tmp_path / name)
    selection = select_checkpoints([tmp_path / "other", tmp_path / "out"])
    assert selection.names == ["other", "out"]
    assert selection.checkpoints[1].note == (
        "the folder also holds checkpoint-1, checkpoint-2, which are not compared: name them for that"
    )
    shutil.move(tmp_path / "out/model.safetensors", tmp_path / "gone.safetensors")
    with pytest.raises(ValueError, match=r"out is a series of 2 checkpoints .*: give one of them"):
        select_checkpoints([tmp_path / "other", tmp_path / "out"])
    chosen = select_checkpoints([tmp_path / "other", tmp_path / "out/checkpoint-1"])
    assert chosen.names == ["other", "checkpoint-1"]


def test_an_empty_folder_and_an_empty_list(tmp_path):
    with pytest.raises(ValueError, match="the folder is empty"):
        joma.scan(tmp_path)
    with pytest.raises(ValueError, match="no model: give a folder"):
        joma.scan([])


def test_a_checkpoint_that_vanishes_during_the_scan(tmp_path):
    for name in ("step-1", "step-2", "step-3"):
        save("bert", tmp_path / "series" / name)

    def vanish(done, total, text):
        if done == 1:
            shutil.rmtree(tmp_path / "series/step-2", ignore_errors=True)

    scan = joma.scan(tmp_path / "series", report=vanish)
    assert scan.status() == {"step-1": "ok", "step-2": "failed", "step-3": "ok"}
    assert scan.checkpoints().note[1].startswith("step-2 vanished during the scan: ")
