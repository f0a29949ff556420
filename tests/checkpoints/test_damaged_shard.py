"""A damaged shard costs its own layers; the row keeps what could be measured."""

import json

import torch
from safetensors.torch import save_file

import joma

SHAPES = {"up_proj": (64, 16), "down_proj": (16, 64)}


def save_sharded(folder, seed):
    """Write two layers, each in a shard of its own."""
    folder.mkdir(parents=True)
    generator = torch.Generator().manual_seed(seed)
    file_of = {}
    for layer in range(2):
        name = f"model-0000{layer + 1}-of-00002.safetensors"
        tensors = {}
        for part, shape in SHAPES.items():
            tensors[f"layers.{layer}.mlp.{part}.weight"] = torch.randn(*shape, generator=generator)
        save_file(tensors, folder / name)
        file_of |= dict.fromkeys(tensors, name)
    index = {"metadata": {}, "weight_map": file_of}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def test_a_cut_off_shard_costs_its_own_layers_only(tmp_path):
    for step in range(2):
        save_sharded(tmp_path / "series" / f"step-{step}", seed=step)
    whole = joma.scan(tmp_path / "series", run=tmp_path / "whole", gauges="stable_rank").frame()
    shard = tmp_path / "series/step-1/model-00002-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1000])
    scan = joma.scan(tmp_path / "series", run=tmp_path / "damaged", gauges="stable_rank")
    measured = scan.frame()
    assert measured[["step", "layer"]].to_numpy().tolist() == [[0, 0], [0, 1], [1, 0]]
    assert measured.value.tolist() == whole.value.tolist()[:3]
    assert scan.failed == ["step-1"]
    assert "model-00002-of-00002.safetensors is cut off" in str(scan.remarks())
