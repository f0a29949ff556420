"""Change between checkpoints: ‖ΔW‖/‖W‖ and the stable rank of ΔW against NumPy, on checkpoints of transformers."""

from __future__ import annotations

import copy
import itertools
import json
import shutil
from functools import partial

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import joma
from joma._checkpoints.budget import needed, show_bytes, transfer
from joma._checkpoints.checkpoints import Checkpoint
from joma._checkpoints.row import ScanRequest
from tests.checkpoints import models
from tests.checkpoints.hubserver import Hub

pytest.importorskip("transformers")
STEPS = (0, 1, 4)


def moved(family: str, folder, seed: int = 0, steps=STEPS):
    """A series of checkpoints, each with its model; from the second on, all matrices move."""
    generator, model, states = (
        torch.Generator().manual_seed(seed),
        copy.deepcopy(models.model(family)),
        {},
    )
    for step in steps:
        model.save_pretrained(folder / f"step-{step}")
        states[step] = {
            name: p.detach().clone().double().numpy() for name, p in model.named_parameters()
        }
        with torch.no_grad():
            for p in model.parameters():
                p += 0.01 * (1 + step) * torch.randn(p.shape, generator=generator)
    return states


def expected(new: np.ndarray, old: np.ndarray) -> tuple[float, float]:
    change = new - old
    sigma = np.linalg.svd(change, compute_uv=False)
    return float(np.linalg.norm(change) / np.linalg.norm(old)), float(
        (sigma**2).sum() / sigma[0] ** 2
    )


def by_layer(scan, gauge: str, step: int) -> list[float]:
    frame = scan.frame()
    return frame[(frame.gauge == gauge) & (frame.step == step)].sort_values("layer").value.tolist()


NAMES = {
    ("llama", "change"): "model.layers.{}.mlp.gate_proj.weight",
    ("llama", "change.o"): "model.layers.{}.self_attn.o_proj.weight",
    ("neox", "change.mlp_out"): "gpt_neox.layers.{}.mlp.dense_4h_to_h.weight",
    ("gpt2", "change"): "transformer.h.{}.mlp.c_fc.weight",
}


@pytest.mark.parametrize(("family", "gauge"), NAMES)
def test_change_and_its_rank_are_those_of_numpy(family, gauge, tmp_path):
    states = moved(family, tmp_path / "series")
    rank = gauge.replace("change", "change_rank")
    scan = joma.scan(tmp_path / "series", gauges=[gauge, rank, "stable_rank"])
    for before, step in itertools.pairwise(STEPS):
        for layer in range(models.LAYERS):
            name = NAMES[family, gauge].format(layer)
            size, stable = expected(states[step][name], states[before][name])
            assert by_layer(scan, gauge, step)[layer] == pytest.approx(size, rel=1e-5)
            assert by_layer(scan, rank, step)[layer] == pytest.approx(stable, rel=1e-4)
    frame = scan.frame()
    assert set(frame[frame.step == 0].gauge) == {
        "stable_rank"
    }  # the first has none, and its note says so
    assert frame.groupby("step").since.first().tolist()[1:] == ["step-0", "step-1"]
    assert scan.failed == []
    assert f"{gauge}, {rank}: there is no checkpoint before it" in scan.checkpoints().note[0]


def test_of_a_fused_tensor_the_rows_that_count_and_products_are_refused(tmp_path):
    """GPT-NeoX has queries, keys and values in one; a product is known up to rotations only."""
    states = moved("neox", tmp_path / "series", steps=(0, 1))
    scan = joma.scan(tmp_path / "series", gauges="change.q,change.v")
    name, size = "gpt_neox.layers.1.attention.query_key_value.weight", models.D // models.H
    old, new = (states[step][name].reshape(models.H, 3, size, models.D) for step in (0, 1))
    for part, at in (("q", 0), ("v", 2)):
        rows = [w[:, at].reshape(models.D, models.D) for w in (new, old)]
        assert by_layer(scan, f"change.{part}", 1)[1] == pytest.approx(expected(*rows)[0], rel=1e-5)
    with pytest.raises(
        ValueError, match="there is no part 'qk' of the gauge 'change'; parts are mlp_in"
    ):
        joma.scan(tmp_path / "series", gauges="change.qk")


def test_adapters_change_with_their_base_or_alone(tmp_path):
    """Of LoRA, base + B A, or B A as an update; an update that was zero has no relative change."""
    generator, base = torch.Generator().manual_seed(0), models.model("llama")
    base.save_pretrained(tmp_path / "base")
    settings = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["gate_proj"]}
    updates = []
    for n in range(3):
        folder, tensors = tmp_path / f"series/step-{n}", {}
        folder.mkdir(parents=True)
        for layer in range(models.LAYERS):
            a = torch.randn(2, models.D, generator=generator)
            b = torch.randn(80, 2, generator=generator) * (n > 0)
            front = f"base_model.model.model.layers.{layer}.mlp.gate_proj"
            tensors |= {f"{front}.lora_A.weight": a, f"{front}.lora_B.weight": b}
            updates += [2.0 * (b @ a).double().numpy()] if layer == 1 else []
        save_file(tensors, folder / "adapter_model.safetensors")
        (folder / "adapter_config.json").write_text(json.dumps(settings))
    weight = base.model.layers[1].mlp.gate_proj.weight.detach().double().numpy()
    whole = joma.scan(tmp_path / "series", gauges="change,change_rank", base=tmp_path / "base")
    for gauge, value in zip(
        ("change", "change_rank"), expected(weight + updates[2], weight + updates[1]), strict=True
    ):
        assert by_layer(whole, gauge, 2)[1] == pytest.approx(value, rel=1e-4)
    alone = joma.scan(tmp_path / "series", gauges="change.mlp_in_update", base=tmp_path / "base")
    assert by_layer(alone, "change.mlp_in_update", 2)[1] == pytest.approx(
        expected(updates[2], updates[1])[0], rel=1e-5
    )
    assert by_layer(alone, "change.mlp_in_update", 1) == []
    assert "it was zero in step-0: no change is relative to that" in alone.checkpoints().note[1]
    refused = joma.scan(tmp_path / "series", gauges="change")
    assert refused.failed == ["step-1", "step-2"]
    assert (
        "it is a LoRA adapter, which adds to a base model: name that with --base"
        in refused.checkpoints().note[2]
    )


def test_nothing_that_changed_has_no_rank_and_no_size_has_no_change(tmp_path):
    moved("llama", tmp_path / "series", steps=(0, 1))
    shutil.copytree(tmp_path / "series/step-1", tmp_path / "series/step-2")
    scan = joma.scan(tmp_path / "series", gauges="change,change_rank")
    assert by_layer(scan, "change", 2) == [0.0] * models.LAYERS
    assert by_layer(scan, "change_rank", 2) == []
    assert "mlp.gate_proj: unchanged since step-1" in scan.checkpoints().note[2]


def test_what_is_before_decides_what_is_measured_again(tmp_path):
    """A scan that goes on with other checkpoints measures the changes anew whose beginning is another."""
    moved("llama", tmp_path / "series")
    run = tmp_path / "run"
    few = joma.scan(tmp_path / "series", run=run, revisions="step-0,step-4", gauges="change")
    assert set(few.frame().since) == {"step-0"}
    whole = joma.scan(tmp_path / "series", run=run, gauges="change")
    fresh = joma.scan(tmp_path / "series", gauges="change", workers=2)
    assert whole.frame().equals(fresh.frame())
    lines = (run / "metrics.jsonl").read_bytes()
    joma.scan(tmp_path / "series", run=run, gauges="change")
    assert (run / "metrics.jsonl").read_bytes() == lines


def test_a_damaged_checkpoint_costs_the_next_one_its_change_only(tmp_path):
    moved("llama", tmp_path / "series")
    (tmp_path / "series/step-1/model.safetensors").write_bytes(b"cut off")
    scan = joma.scan(tmp_path / "series", gauges="stable_rank,change")
    assert scan.status() == {"step-0": "ok", "step-1": "failed", "step-4": "partly"}
    assert set(scan.frame()[scan.frame().step == 4].gauge) == {"stable_rank"}
    assert "change: the checkpoint before, step-1, cannot be read" in scan.checkpoints().note[2]


def test_both_checkpoints_are_in_the_bytes_and_in_the_budget(tmp_path, monkeypatch):
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setenv("JOMA_CACHE", str(tmp_path / "joma"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    moved("llama", tmp_path / "series")
    alone = joma.scan(tmp_path / "series", gauges="stable_rank").checkpoints().bytes_read
    both = joma.scan(tmp_path / "series", gauges="stable_rank,change,change_rank")
    assert both.checkpoints().bytes_read.tolist() == [alone[0], 2 * alone[1], 2 * alone[2]]
    hub = Hub("someone/model", {f"step{n}": tmp_path / f"series/step-{n}" for n in STEPS})
    with hub.serving() as url:
        monkeypatch.setattr(constants, "ENDPOINT", url)
        monkeypatch.setattr(
            constants,
            "HUGGINGFACE_CO_URL_TEMPLATE",
            url + "/{repo_id}/resolve/{revision}/{filename}",
        )
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        announced: list[str] = []
        options = {
            "revisions": "all",
            "gauges": "change",
            "report": lambda done, total, what: announced.append(what),
        }
        remote = joma.scan("someone/model", **options)
        spent = remote.checkpoints().transferred
        each = transfer(
            [Checkpoint("step1", 1, repo="someone/model")],
            partial(needed, request=ScanRequest(gauges=("change",))),
        )
        assert spent[1] == spent[2] == each
        assert (
            f"to be transferred from the hub: about {show_bytes(3 * each)}, 3 × {show_bytes(each)}"
            in announced
        )
        assert joma.scan("someone/model", **options, budget=3 * each).failed == []
        with pytest.raises(ValueError, match=r"3 checkpoints of .* and the budget is"):
            joma.scan("someone/model", **options, budget=3 * each - 1)
        assert (
            remote.frame().value.tolist()
            == joma.scan(tmp_path / "series", gauges="change").frame().value.tolist()
        )
    assert [path for path in (tmp_path / "joma").rglob("*") if path.is_file()] == []


def test_in_training_it_is_refused_with_what_there_is_instead():
    with pytest.raises(
        ValueError, match=r"change_rank\.q is measured between checkpoints .* it is update_rank\.q"
    ):
        joma.watch(torch.nn.Linear(2, 2), gauges="change_rank.q")
