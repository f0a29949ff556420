"""What a checkpoint may not do: hostile files and names, and numbers that would be wrong without a word."""

from __future__ import annotations

import argparse
import json
import math
import os
import pathlib
import xml.etree.ElementTree
import zipfile

import pytest
import torch
from safetensors.torch import load_file, save_file

import joma
from joma._checkpoints.formats import open_file
from joma._checkpoints.reading import BadCheckpoint, LocalFile
from joma._checkpoints.tensors import Tensors
from tests.checkpoints.models import lower, save, stable_rank

pytest.importorskip("transformers")


class Program:
    """Pickled as a call that makes a folder."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


def matrices(layers=1):
    generator = torch.Generator().manual_seed(0)
    shapes = {"fc1": (8, 4), "fc2": (4, 8)}
    return {f"layers.{n}.{name}.weight": torch.randn(shape, generator=generator) for n in range(layers)
            for name, shape in shapes.items()}  # fmt: skip


def header(table: bytes, data: int = 64) -> bytes:
    return len(table).to_bytes(8, "little") + table + bytes(data)


@pytest.mark.parametrize(
    ("table", "why"),
    [
        (b'{"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}, '
         b'"b": {"dtype": "F32", "shape": [4], "data_offsets": [12, 28]}}', "a and b overlap"),
        (b'{"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}, '
         b'"a": {"dtype": "F32", "shape": [4], "data_offsets": [16, 32]}}', "a key twice"),
        (b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested too deeply"),
        (b'{"a": [' + b"[]," * 1_000_000 + b"[]]}", "more than 1,000,000 lists"),
    ],
)  # fmt: skip
def test_tables_of_safetensors_files_that_are_refused(table, why, tmp_path):
    (tmp_path / "model.safetensors").write_bytes(header(table))
    with pytest.raises(BadCheckpoint, match=why):
        Tensors.open(tmp_path)


def test_a_zip_that_inflates_beyond_reason_is_refused(tmp_path):
    path = tmp_path / "pytorch_model.bin"
    torch.save({"a.weight": torch.zeros(1 << 20)}, path)
    with zipfile.ZipFile(path) as archive:
        items = {item.filename: archive.read(item) for item in archive.infolist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in items.items():
            archive.writestr(name, content + bytes(60 << 20) * ("/data/" in name))
    assert path.stat().st_size < 200_000
    with pytest.raises(BadCheckpoint, match="claims to hold 67,"):
        Tensors.open(tmp_path)


def test_a_tensor_that_repeats_its_numbers_takes_no_memory(tmp_path):
    torch.save({"a.weight": torch.zeros(1, 1).expand(1 << 20, 1 << 20)}, tmp_path / "a.pt")
    with pytest.raises(BadCheckpoint, match="does not hold what is asked"):
        Tensors.open(tmp_path / "a.pt").read("a.weight")
    torch.save(
        {"a": torch.zeros(1).expand(1 << 40)},
        tmp_path / "b.pt",
        _use_new_zipfile_serialization=False,
    )
    with pytest.raises(BadCheckpoint, match="repeats its numbers"):
        Tensors.open(tmp_path / "b.pt")


def test_dicts_that_refer_to_one_another_are_not_walked_through_for_ever(tmp_path):
    content = {"a.weight": torch.zeros(2)}
    for _ in range(40):
        content = {"x": content, "y": content}
    torch.save(content, tmp_path / "a.pt")
    with pytest.raises(BadCheckpoint, match="nested beyond reason"):
        Tensors.open(tmp_path / "a.pt")


@pytest.mark.parametrize("layers", [10**6, 10**12])
def test_a_config_of_too_many_layers_is_refused(layers, tmp_path):
    save("neox", tmp_path / "model")
    config = json.loads((tmp_path / "model/config.json").read_text())
    (tmp_path / "model/config.json").write_text(json.dumps(config | {"num_hidden_layers": layers}))
    for gauge in ("stable_rank", "entropy"):
        scan = joma.scan(str(tmp_path / "model"), gauges=gauge, data=list(range(40)), length=8)
        assert scan.failed == ["model"]
        assert "refused" in scan.checkpoints().note[0]


def test_a_config_does_not_choose_code(tmp_path):
    save("neox", tmp_path / "model")
    config = json.loads((tmp_path / "model/config.json").read_text())
    code = {"_attn_implementation": "someone/kernel", "auto_map": {"AutoModel": "someone/repo--code.Model"},
            "attn_implementation": "someone/kernel:run", "architectures": ["Trainer"]}  # fmt: skip
    (tmp_path / "model/config.json").write_text(json.dumps(config | code))
    scan = joma.scan(
        str(tmp_path / "model"), gauges="stable_rank,entropy,charge.qk", data=list(range(40)), length=8
    )  # fmt: skip
    assert scan.failed == [], scan.checkpoints().note[0]


def inspections(folder):
    tokens = list(range(40))
    return {
        "superpose": lambda: joma.superpose(folder, tokens, length=20),
        "geometry": lambda: joma.embedding_geometry(folder, tokens, length=20),
        "scan": lambda: joma.scan(str(folder), gauges="entropy", data=tokens, length=20),
    }


@pytest.mark.parametrize("how", ["scan", "superpose", "geometry"])
@pytest.mark.parametrize(
    ("fault", "why"),
    [("outside", "outside of the checkpoint: refused"), ("absolute", "outside of the checkpoint: refused"),
     ("truncated", "cut off"), ("nested", "nested too deeply"), ("pickle", "nothing of it was executed"),
     ("adapter", "no weights")],
)  # fmt: skip
def test_one_guarded_way_in_for_all_that_loads_models(how, fault, why, tmp_path):
    folder, marker = tmp_path / "model", tmp_path / "executed"
    save("neox", folder)
    weights = folder / "model.safetensors"
    if fault in ("outside", "absolute"):
        elsewhere = weights.rename(tmp_path / "elsewhere.safetensors")
        shard = "../elsewhere.safetensors" if fault == "outside" else str(elsewhere)
        index = {"weight_map": dict.fromkeys(load_file(elsewhere), shard)}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    elif fault == "truncated":
        os.truncate(weights, weights.stat().st_size - 10)
    elif fault == "nested":
        (folder / "config.json").write_text('{"a":' * 100_000 + "1" + "}" * 100_000)
    elif fault == "pickle":
        torch.save({"a": Program(marker)}, folder / "pytorch_model.bin")
        weights.unlink()
    else:  # transformers would go where an adapter's settings send it
        weights.unlink()
        (folder / "adapter_config.json").write_text(
            '{"base_model_name_or_path": "../elsewhere", "peft_type": "LORA"}'
        )
    run = inspections(folder)[how]
    if how == "scan" and fault != "adapter":
        assert why in run().checkpoints().note[0]
    else:
        with pytest.raises(ValueError, match="no checkpoints" if how == "scan" else why):
            run()
    assert not marker.exists()


def test_refusals_of_pickles_give_no_advice_that_would_execute_them(tmp_path):
    cases = {
        "a": Program(tmp_path / "executed"),
        "b": eval,
        "c": {1, Program(tmp_path / "executed")},
    }
    for name, content in cases.items():
        for zipped in (True, False):
            torch.save({"w.weight": torch.ones(2, 2), "x": content}, tmp_path / f"{name}.pt",
                       _use_new_zipfile_serialization=zipped)  # fmt: skip
            with pytest.raises(BadCheckpoint, match="save the weights alone") as error:
                Tensors.open(tmp_path / f"{name}.pt")
            assert "weights_only" not in str(error.value)
            assert "safe_globals" not in str(error.value)
    assert not (tmp_path / "executed").exists()


def test_pickles_of_too_many_references_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("joma._checkpoints.formats.unpickling._MAX_MEMOS", 1000)
    (tmp_path / ".metadata").write_bytes(b"\x80\x04N" + b"\x94" * 2000 + b".")
    with pytest.raises(BadCheckpoint, match="more than 1,000 references"):
        Tensors.open(tmp_path)


def test_weights_that_are_not_finite_are_no_success(tmp_path, monkeypatch):
    from typer.testing import CliRunner

    from joma.cli import app

    monkeypatch.chdir(tmp_path)
    weights = matrices(2)
    weights["layers.1.fc1.weight"][3, 2] = math.nan
    save_file(weights, tmp_path / "model.safetensors")
    done = CliRunner().invoke(app, ["scan", str(tmp_path / "model.safetensors")])
    assert done.exit_code == 1
    assert "NaN or infinite: layers.1.fc1.weight" in done.output
    assert done.output.strip().splitlines()[-1] == "1 checkpoint: 0 failed, 1 measured in part"
    first, second = joma.scan(str(tmp_path / "model.safetensors")).frame().value
    assert first == pytest.approx(stable_rank(weights["layers.0.fc1.weight"]), rel=1e-4)
    assert math.isnan(second)


def test_names_are_made_harmless(tmp_path, monkeypatch):
    from typer.testing import CliRunner

    from joma.cli import app

    monkeypatch.chdir(tmp_path)
    root = tmp_path / "series"
    escaped = {f"a\x1b[31m.{name}": w for name, w in matrices().items()}
    root.mkdir()
    save_file(escaped, root / "red\x1b[2J-step1.safetensors")
    save_file(escaped, root / "other.safetensors")
    os.rename(root / "other.safetensors", os.fsencode(root) + b"/\xff\xfe-step2.safetensors")
    done = CliRunner().invoke(app, ["scan", str(root)])
    assert done.exit_code == 0, done.output
    assert all(c == "\n" or c.isprintable() for c in done.output)
    assert "red\\x1b[2J-step1" in done.output
    assert "\\udcff\\udcfe-step2" in done.output
    xml.etree.ElementTree.parse(tmp_path / "runs/scan-series/figure.svg")
    modules = joma.scan(str(root)).frame().module
    assert modules[0].startswith("a\\x1b[31m.")


def test_metadata_beside_the_weights_gets_stand_ins(tmp_path):
    """As in Megatron's files; Lightning's own are in test_formats."""
    state = {f"encoder.{name}": w for name, w in matrices().items()}
    args = argparse.Namespace(data=pathlib.Path("here"), size=3, kind={"a": 1})
    content = {"args": args, "checkpoint_version": 3.0, "iteration": 7, "model": {"language_model": state},
               "optimizer": {"state": {0: torch.ones(3, 3)}}}  # fmt: skip
    torch.save(content, tmp_path / "a.pt")
    file = open_file(LocalFile(tmp_path / "a.pt"))
    assert file.names() == [f"language_model.{name}" for name in state]
    assert "argparse.Namespace" in file.note
    scan = joma.scan(str(tmp_path / "a.pt"))
    assert scan.failed == []
    assert scan.frame().value.item() == pytest.approx(
        stable_rank(state["encoder.layers.0.fc1.weight"]), rel=1e-4
    )


def test_a_weight_that_is_no_plain_tensor_is_refused_by_name(tmp_path):
    """A stand-in must not make a matrix vanish."""
    state = {**matrices(), "layers.1.fc1.weight": argparse.Namespace(packed=torch.ones(3))}
    torch.save({"state_dict": state}, tmp_path / "a.pt")
    with pytest.raises(
        BadCheckpoint, match=r"layers\.1\.fc1\.weight is a argparse\.Namespace, no plain tensor"
    ):
        Tensors.open(tmp_path / "a.pt")


def test_the_tokenizer_can_be_elsewhere(tmp_path):
    import tokenizers
    from transformers import PreTrainedTokenizerFast

    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"the": 0, "cat": 1}, unk_token="the"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=made).save_pretrained(tmp_path / "tokenizer")
    (tmp_path / "text.txt").write_text("the cat " * 500)
    save("neox", tmp_path / "model")
    options = {"gauges": "entropy", "data": str(tmp_path / "text.txt"), "tokens": 64, "length": 16}
    assert (
        "named by --tokenizer"
        in joma.scan(str(tmp_path / "model"), **options).checkpoints().note[0]
    )
    scan = joma.scan(str(tmp_path / "model"), **options, tokenizer=tmp_path / "tokenizer")
    assert scan.failed == [], scan.checkpoints().note[0]


def test_entry_points_are_read_once(tmp_path, monkeypatch):
    from joma._measure.gauges import registry

    calls = []
    monkeypatch.setattr(registry, "entry_points", lambda group: calls.append(group) or [])
    for step in range(5):
        save_file(matrices(), tmp_path / f"step-{step}.safetensors")
    assert len(joma.scan(str(tmp_path)).status()) == 5
    assert calls == ["joma.gauges"]


def test_families_are_loaded_as_transformers_does(tmp_path):
    """Weights that went through the guard give the hidden states that `from_pretrained` gives."""
    import transformers

    from joma._checkpoints.model import load_model, open_tensors
    from tests.checkpoints.models import FAMILIES

    ids = torch.arange(12).reshape(1, 12)
    for family in FAMILIES:
        save(family, tmp_path / family, "sharded")
        ours = load_model(open_tensors(tmp_path / family))
        theirs = transformers.AutoModel.from_pretrained(tmp_path / family, dtype="float32").eval()
        with torch.no_grad():
            states = [model(input_ids=ids).last_hidden_state for model in (ours, theirs)]
        assert torch.equal(*states), family
    assert len(lower("neox")) == 3
