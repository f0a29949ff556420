"""Formats as their own libraries write them, against the model that they were written from."""

from __future__ import annotations

import argparse
import copy
import io
import json
import multiprocessing
import os
import pathlib
import pickle
import shutil
import warnings

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import joma
from joma._checkpoints.formats.gguf import GgufFile
from joma._checkpoints.reading import BadCheckpoint, LocalFile
from joma._checkpoints.tensors import Tensors
from tests.checkpoints.gguf_files import llama_gguf
from tests.checkpoints.models import LAYERS, D, H, lower, model, queries_and_keys, save, stable_rank

pytest.importorskip("transformers")


def measured(path, **options):
    scan = joma.scan(str(path), **options)
    assert scan.failed == [], scan.checkpoints().note[0]
    return scan


def value(path, **options):
    return measured(path, **options).frame().value.tolist()


# GGUF


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q5_1"])
def test_gguf_is_measured_as_its_blocks_stand(kind, tmp_path, monkeypatch):
    monkeypatch.setattr("joma._checkpoints.formats.gguf._BLOCK_BYTES", 200)  # many blocks of rows
    kept = llama_gguf(tmp_path / "model.gguf", kind)
    gates = [kept[f"model.layers.{n}.mlp.gate_proj.weight"] for n in range(LAYERS)]
    scan = measured(tmp_path)
    assert scan.frame().value.tolist() == pytest.approx([stable_rank(w) for w in gates], rel=1e-5)
    assert scan.checkpoints().bytes_read[0] < (tmp_path / "model.gguf").stat().st_size
    original = [stable_rank(w) for w in lower("llama")]
    error = {"F32": 1e-5, "F16": 1e-3, "BF16": 1e-2, "Q8_0": 1e-2}.get(
        kind, 0.3
    )  # the quantisation's own
    assert scan.frame().value.tolist() == pytest.approx(original, rel=error)
    if kind == "F32":
        heads = value(tmp_path, gauges="spectral_norm.qk")
        for layer, (q, k) in enumerate(queries_and_keys("llama")):
            for head in range(H):
                size, group = D // H, head * len(k) // len(q)
                product = q[head * size :][:size].T.double() @ k[group * size :][:size].double()
                norm = float(torch.linalg.svdvals(product)[0])
                assert heads[layer * H + head] == pytest.approx(norm, rel=1e-5)


def test_gguf_against_the_packages_own_reader(tmp_path):
    """Random blocks of kinds that it reads and does not write; parts and whole tensors, and a stack of experts."""
    gguf = pytest.importorskip("gguf")
    rng = np.random.default_rng(0)
    writer, kinds = (
        gguf.GGUFWriter(tmp_path / "a.gguf", "llama"),
        ("Q4_K", "Q6_K", "IQ4_XS", "Q2_K", "F32"),
    )
    for n, name in enumerate(kinds):
        kind = gguf.GGMLQuantizationType[name]
        block, size = gguf.GGML_QUANT_SIZES[kind]
        data = rng.integers(0, 64, (3, 5, 512 // block * size), dtype=np.uint8)
        writer.add_tensor(f"blk.{n}.ffn_up_exps.weight", data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = GgufFile(LocalFile(tmp_path / "a.gguf"))
    for n, theirs in enumerate(gguf.GGUFReader(tmp_path / "a.gguf").tensors):
        truth = torch.from_numpy(
            np.array(gguf.quants.dequantize(np.array(theirs.data), theirs.tensor_type))
        ).reshape(3, 5, 512)
        name = f"layers.{n}.mlp.experts.up_proj"
        tensor = file.view(name)
        assert torch.equal(file.read(tensor), truth)
        before = file.bytes_read
        assert torch.equal(file.read(tensor.part((5, 512), (512, 1), 5 * 512)), truth[1])
        assert file.bytes_read - before == theirs.n_bytes // 3  # one expert of three
        turned = truth.transpose(1, 2)[2, 3:9]
        view = tensor.part(tuple(turned.shape), turned.stride(), turned.storage_offset())
        assert torch.equal(file.read(view), turned)


def test_experts_in_gguf_and_what_a_model_is_needed_for(tmp_path):
    gguf = pytest.importorskip("gguf")
    stacks = {
        "gate": torch.randn(4, 24, 16),
        "up": torch.randn(4, 24, 16),
        "down": torch.randn(4, 16, 24),
    }
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    for name, stack in stacks.items():
        writer.add_tensor(f"blk.0.ffn_{name}_exps.weight", stack.numpy())
    writer.add_tensor("blk.0.ffn_gate_inp.weight", torch.randn(4, 16).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert value(tmp_path / "a.gguf") == pytest.approx(
        [stable_rank(w) for w in stacks["gate"]], rel=1e-5
    )
    note = (
        joma.scan(str(tmp_path / "a.gguf"), gauges="entropy", data=[1] * 40, length=8)
        .checkpoints()
        .note[0]
    )
    assert "no model is built from a.gguf" in note
    assert "its header does not tell llama.block_count" in note


def test_damaged_gguf(tmp_path):
    pytest.importorskip("gguf")
    llama_gguf(tmp_path / "good.gguf")
    good = (tmp_path / "good.gguf").read_bytes()
    array = good.index(b"tokenizer.ggml.tokens") + len(b"tokenizer.ggml.tokens") + 4
    endless = (1 << 62).to_bytes(8, "little")
    bad = {
        "no GGUF": b"GGXX" + good[4:],
        "version 77": good[:4] + (77).to_bytes(4, "little") + good[8:],
        "claims to have": good[:8] + (1 << 60).to_bytes(8, "little") + good[16:],
        "cut off": good[: len(good) // 2],
        "cut off at": good[:100],
        "an array of": good[: array + 4] + endless + good[array + 12 :],
        "cut off at byte": good[:array]
        + (0).to_bytes(4, "little")
        + (1 << 62).to_bytes(8, "little")
        + good[array + 12 :],
    }
    for words, content in bad.items():
        (tmp_path / "bad.gguf").write_bytes(content)
        with pytest.raises(BadCheckpoint, match=words):
            Tensors.open(tmp_path / "bad.gguf")


def test_parts_of_gguf(tmp_path):
    for n in (1, 2):
        (tmp_path / f"model-0000{n}-of-00002.gguf").write_bytes(b"GGUF")
    with pytest.raises(ValueError, match="llama-gguf-split --merge"):
        joma.scan(str(tmp_path))


# torch.distributed.checkpoint


def write_shards(rank, folder, meeting):
    """One of two processes, which writes its shards of every tensor."""
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
    mesh, state = init_device_mesh("cpu", (2,)), model("neox").state_dict()
    sharded = {
        n: distribute_tensor(w, mesh, [Shard(w.dim() - 1 if "4h" in n else 0)])
        for n, w in state.items()
    }
    moments = {name: {"exp_avg": weight * 0} for name, weight in sharded.items()}
    dcp.save({"model": sharded, "optimizer": {"state": moments}, "step": 7}, checkpoint_id=folder)
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def distributed(tmp_path_factory):
    """A model that two processes wrote, with the state of an optimiser."""
    root = tmp_path_factory.mktemp("dcp")
    model("neox")
    context = multiprocessing.get_context("fork")
    ranks = [
        context.Process(target=write_shards, args=(n, root / "series/step-7", root / "meeting"))
        for n in (0, 1)
    ]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(200)
        assert rank.exitcode == 0
    model("neox").config.save_pretrained(root / "series/step-7")
    return root / "series"


def test_a_checkpoint_that_two_processes_wrote(distributed):
    scan = measured(
        distributed,
        gauges="stable_rank,stable_rank.mlp_out,entropy",
        data=list(range(48)),
        length=16,
    )
    frame = scan.frame()
    assert set(frame.step) == {7}
    truth = [stable_rank(w) for w in lower("neox")]
    assert frame[frame.gauge == "stable_rank"].value.tolist() == pytest.approx(truth, rel=1e-5)
    outs = [
        stable_rank(layer.mlp.dense_4h_to_h.weight.detach())
        for layer in model("neox").gpt_neox.layers
    ]
    assert frame[frame.gauge == "stable_rank.mlp_out"].value.tolist() == pytest.approx(
        outs, rel=1e-5
    )
    opened = Tensors.open(distributed / "step-7")
    assert len(list((distributed / "step-7").glob("*.distcp"))) == 2
    for name, weight in model("neox").state_dict().items():
        if weight.is_floating_point():
            assert torch.equal(opened.read(name), weight.float())
    assert not any("exp_avg" in name for name in opened.names())
    (distributed / "step-7/config.json").rename(
        distributed / "config.json"
    )  # by names and shapes alone
    try:
        assert value(distributed / "step-7") == pytest.approx(truth, rel=1e-5)
    finally:
        (distributed / "config.json").rename(distributed / "step-7/config.json")


def test_damaged_checkpoints_of_two_processes(distributed, tmp_path):
    def bad(change):
        shutil.rmtree(tmp_path / "bad", ignore_errors=True)
        shutil.copytree(distributed / "step-7", tmp_path / "bad")
        change(tmp_path / "bad")
        return joma.scan(str(tmp_path / "bad")).checkpoints().note[0]

    table = (distributed / "step-7/.metadata").read_bytes()
    name = b"__0_0.distcp"
    assert name in table
    assert "cannot be read" in bad(lambda f: (f / "__1_0.distcp").unlink())
    assert "cut off" in bad(lambda f: os.truncate(f / "__0_0.distcp", 2000))
    assert "damaged" in bad(lambda f: (f / ".metadata").write_bytes(table[:500]))
    elsewhere = table.replace(name, b"../a.distcp\x00"[:12])
    assert "outside of the checkpoint" in bad(lambda f: (f / ".metadata").write_bytes(elsewhere))
    zeros = (distributed / "step-7/__0_0.distcp").stat().st_size
    assert "no zip" in bad(lambda f: (f / "__0_0.distcp").write_bytes(bytes(zeros)))


def test_the_table_of_chunks_runs_no_code_and_no_longer_than_it_should(tmp_path, monkeypatch):
    monkeypatch.setattr("joma._checkpoints.formats.unpickling._MAX_OBJECTS", 10_000)

    class Program:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "executed"),)

    def table(content):
        (tmp_path / ".metadata").write_bytes(content)
        (tmp_path / "__0_0.distcp").write_bytes(bytes(100))
        with pytest.raises(BadCheckpoint, match=r"damaged|no table") as error:
            Tensors.open(tmp_path)
        return str(error.value)

    table(pickle.dumps(Program()))
    table(pickle.dumps({"state_dict_metadata": Program()}))
    table(b"cos\nsystem\n(S'touch executed'\ntR.")
    assert "10,000 lists and objects" in table(b"\x80\x04" + b"]" * 20_000 + b".")
    table(b"\x80\x04" + b"N" + b"r\xff\xff\xff\xff" + b".")  # a memo of four billion places
    assert "plain" in table(
        b"\x80\x04})" + b"2\x86" * 200 + b"Ns."
    )  # a key whose hash takes 2^200 steps
    assert not (tmp_path / "executed").exists()


# files of trainers


class Settings:
    """Of a user's own: its class cannot be imported where the file is read."""

    def __init__(self):
        self.width = 8


def test_a_checkpoint_of_lightning(tmp_path):
    lightning = pytest.importorskip("lightning")
    truth = lower("neox")

    class Module(lightning.LightningModule):
        def __init__(self, **settings):
            super().__init__()
            self.save_hyperparameters()
            self.net = copy.deepcopy(model("neox"))

        def training_step(self, batch, index):
            return self.net(input_ids=batch).logits.sum() * 0

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), lr=0.0)

    made = Module(
        args=argparse.Namespace(path=pathlib.Path("here")), settings=Settings(), table={"a": {1, 2}}
    )
    quiet = {
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "logger": False,
        "enable_checkpointing": False,
    }
    trainer = lightning.Trainer(max_steps=2, accelerator="cpu", default_root_dir=tmp_path, **quiet)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(made, torch.utils.data.DataLoader(torch.randint(0, 60, (4, 8))))
    trainer.save_checkpoint(tmp_path / "checkpoints/epoch=0-step=2.ckpt")
    scan = measured(tmp_path / "checkpoints")
    assert scan.frame().value.tolist() == pytest.approx([stable_rank(w) for w in truth], rel=1e-5)
    assert set(scan.frame().step) == {2}
    assert "argparse.Namespace" in scan.checkpoints().note[0]
    assert not any(
        "exp_avg" in name
        for name in Tensors.open(tmp_path / "checkpoints/epoch=0-step=2.ckpt").names()
    )


def megatron(path, weights):
    """As Megatron writes it: arguments, versions, random states and an optimiser beside nested dicts of weights."""
    path.parent.mkdir(parents=True)
    args = argparse.Namespace(
        save=pathlib.PurePosixPath("here"), dtype=torch.float16, settings=Settings()
    )
    random = [np.random.RandomState(0).get_state()]
    state = {"args": args, "checkpoint_version": 3.0, "iteration": 1000, "rng_state": random,
             "model": {"language_model": {"encoder": {**weights, "final_norm._extra_state": io.BytesIO(b"x")}}},
             "optimizer": {"optimizer": {"state": {0: {"exp_avg": torch.ones(8, 8)}}}}}  # fmt: skip
    torch.save(state, path)


def test_a_checkpoint_of_megatron(tmp_path):
    weights = {f"layers.{n}.mlp.{name}.weight": torch.randn(shape) for n in range(2)
               for name, shape in (("dense_h_to_4h", (32, 8)), ("dense_4h_to_h", (8, 32)))}  # fmt: skip
    megatron(tmp_path / "iter_0001000/mp_rank_00/model_optim_rng.pt", weights)
    scan = measured(tmp_path)
    truth = [stable_rank(weights[f"layers.{n}.mlp.dense_h_to_4h.weight"]) for n in range(2)]
    assert scan.frame().value.tolist() == pytest.approx(truth, rel=1e-5)
    assert set(scan.frame().step) == {1000}
    assert "which was passed over" in scan.checkpoints().note[0]
    megatron(tmp_path / "iter_0001000/mp_rank_01/model_optim_rng.pt", weights)
    note = joma.scan(str(tmp_path)).checkpoints().note[0]
    assert "a Megatron checkpoint in 2 parts" in note


def test_a_lone_file_of_weights_and_plain_state_dicts(tmp_path):
    weights = {"0.weight": torch.randn(8, 4), "2.weight": torch.randn(4, 8)}
    (tmp_path / "one").mkdir()
    save_file(weights, tmp_path / "one/anything.safetensors")
    torch.save({}, tmp_path / "one/optimizer.pt")
    torch.save({}, tmp_path / "one/rng_state_0.pth")
    torch.save({}, tmp_path / "one/rng_state_1.pth")
    assert value(tmp_path / "one", mlp=r"0\.weight") == pytest.approx(
        [stable_rank(weights["0.weight"])], rel=1e-5
    )
    (tmp_path / "two").mkdir()
    torch.save(weights, tmp_path / "two/consolidated.00.pth")
    assert value(tmp_path / "two", mlp="0") == pytest.approx(
        [stable_rank(weights["0.weight"])], rel=1e-5
    )
    torch.save(weights, tmp_path / "two/consolidated.01.pth")
    with pytest.raises(ValueError, match="Meta's format, a part of each matrix per file"):
        joma.scan(str(tmp_path / "two"))


@pytest.mark.parametrize(
    ("files", "why"),
    [
        (["global_step10/mp_rank_00_model_states.pt", "global_step10/zero_pp_rank_0_mp_rank_00_optim_states.pt",
          "zero_to_fp32.py", "latest"], "zero_to_fp32.py"),
        (["zero_pp_rank_0_mp_rank_00_optim_states.pt"], "zero_to_fp32.py"),
        (["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"], "not their index"),
        (["tf_model.h5"], "TensorFlow"), (["flax_model.msgpack"], "Flax"), (["_CHECKPOINT_METADATA"], "Orbax"),
        (["common.pt", "metadata.json"], "zarr"),
    ],
)  # fmt: skip
def test_other_formats_are_named_with_the_way_out(files, why, tmp_path):
    for name in files:
        (tmp_path / "model/checkpoint-5" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "model/checkpoint-5" / name).write_bytes(b"x")
    assert why in joma.scan(str(tmp_path / "model")).checkpoints().note[0]


QUANTISED = {  # as the tools name their tensors
    "GPTQ": {"qweight": torch.int32, "qzeros": torch.int32, "scales": torch.float16, "g_idx": torch.int32},
    "AWQ": {"qweight": torch.int32, "qzeros": torch.int32, "scales": torch.float16},
    "bitsandbytes": {"weight": torch.uint8, "weight.absmax": torch.uint8, "weight.quant_map": torch.float32,
                     "weight.quant_state.bitsandbytes__nf4": torch.uint8},
    "bitsandbytes 8": {"weight": torch.int8, "SCB": torch.float32, "weight_format": torch.uint8},
    "torchao": {"_weight_qdata": torch.int8, "_weight_scale": torch.float32, "_weight_zero_point": torch.int8},
    "compressed-tensors": {"weight_packed": torch.int32, "weight_scale": torch.float16, "weight_shape": torch.int64},
}  # fmt: skip


@pytest.mark.parametrize("config", [True, False])
@pytest.mark.parametrize("method", list(QUANTISED))
def test_quantised_weights_are_refused_by_name(method, config, tmp_path):
    save("llama", tmp_path / "model")
    state = {name: w for name, w in model("llama").state_dict().items() if "proj" not in name}
    for n in range(LAYERS):
        for module in ("self_attn.q_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"):
            for part, dtype in QUANTISED[method].items():
                state[f"model.layers.{n}.{module}.{part}"] = torch.ones(8, 8).to(dtype)
    state = {name: w.clone() for name, w in state.items()}
    save_file(state, tmp_path / "model/model.safetensors")
    if config:
        settings = json.loads((tmp_path / "model/config.json").read_text())
        settings["quantization_config"] = {"quant_method": method.split()[0].lower()}
        (tmp_path / "model/config.json").write_text(json.dumps(settings))
    else:
        (tmp_path / "model/config.json").unlink()
    note = joma.scan(str(tmp_path / "model")).checkpoints().note[0]
    assert "quantised" in note
    assert method.split()[0] in note
    assert "scan the original" in note or "dequantize()" in note


def test_mxfp4_is_refused_by_name_and_what_is_not_quantised_is_measured(tmp_path):
    state = {"model.layers.0.self_attn.q_proj.weight": torch.randn(8, 8),
             "model.layers.0.mlp.experts.gate_up_proj_blocks": torch.ones(2, 16, 4, 16, dtype=torch.uint8),
             "model.layers.0.mlp.experts.gate_up_proj_scales": torch.ones(2, 16, 4, dtype=torch.uint8)}  # fmt: skip
    save_file(state, tmp_path / "model.safetensors")
    assert "(MXFP4)" in joma.scan(str(tmp_path)).checkpoints().note[0]
    expected = stable_rank(state["model.layers.0.self_attn.q_proj.weight"])
    assert value(tmp_path, gauges="stable_rank.q") == pytest.approx([expected], rel=1e-5)
