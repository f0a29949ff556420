"""What checkpoints of the wild do: experts, scales, other shapes, shared caches, killed scans."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tests.scan.models import quiet, save, stable_rank
from tests.scan.test_hub import EXPECTED, REPO, cache, put, revisions, server  # noqa: F401

import joma
from joma._scan import hub
from joma._scan.plan import plan
from joma._scan.series import Checkpoint, series, step_of
from joma._scan.tensors import Tensors

transformers = pytest.importorskip("transformers")
SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 40, "pad_token_id": 0,
         "num_key_value_heads": 2}  # fmt: skip


@pytest.fixture(autouse=True)
def own(tmp_path, monkeypatch):
    monkeypatch.setenv("JOMA_CACHE", str(tmp_path / "joma"))
    return tmp_path / "joma/downloads"


# experts


def experts(family):
    if family == "olmoe":
        config = transformers.OlmoeConfig(**SMALL, intermediate_size=16, num_experts=3)
        model = transformers.OlmoeForCausalLM(config)
        return model, [e[:16] for layer in model.model.layers for e in layer.mlp.experts.gate_up_proj]
    config = transformers.Qwen2MoeConfig(
        **SMALL, intermediate_size=48, moe_intermediate_size=16, shared_expert_intermediate_size=24, num_experts=3,
        mlp_only_layers=[0],
    )  # fmt: skip
    model = transformers.Qwen2MoeForCausalLM(config)
    dense, moe = (layer.mlp for layer in model.model.layers)
    gates = [e[:16] for e in moe.experts.gate_up_proj]
    return model, [dense.gate_proj.weight, *gates, moe.shared_expert.gate_proj.weight]


@pytest.mark.parametrize("family", ["olmoe", "qwen2"])
@pytest.mark.parametrize("config", [True, False])
def test_experts_narrower_than_the_model_and_what_is_beside_them(family, config, tmp_path):
    torch.manual_seed(0)
    model, lower = experts(family)
    with torch.no_grad():
        for p in model.parameters():
            p.normal_()
    with quiet():
        model.save_pretrained(tmp_path / "model")
    if not config:
        (tmp_path / "model/config.json").unlink()
    scan = joma.scan(str(tmp_path / "model"))
    assert scan.failed == [], scan.checkpoints().note[0]
    assert scan.frame().value.tolist() == pytest.approx([stable_rank(w.detach()) for w in lower], rel=1e-4)


def test_gates_that_take_turns_are_read_from_the_file(tmp_path):
    config = transformers.GptOssConfig(**SMALL, intermediate_size=150, num_local_experts=2, head_dim=8)
    torch.manual_seed(0)
    model = transformers.GptOssForCausalLM(config)
    with torch.no_grad():
        for p in model.parameters():
            p.normal_()
    with quiet():
        model.save_pretrained(tmp_path / "model")
    gates = [e[:, ::2].detach() for layer in model.model.layers for e in layer.mlp.experts.gate_up_proj]
    assert joma.scan(str(tmp_path / "model")).frame().value.tolist() == pytest.approx(
        [stable_rank(w) for w in gates], rel=1e-4
    )


def test_a_fused_projection_of_an_unknown_family_is_refused_and_of_a_known_one_split(tmp_path):
    fused = torch.randn(3 * 32, 32)
    save_file({"layers.0.attn.query_key_value.weight": fused}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"model_type": "who knows", "num_attention_heads": 4}')
    scan = joma.scan(str(tmp_path), gauges="stable_rank.q")
    assert "of a family that is known" in scan.checkpoints().note[0]
    (tmp_path / "config.json").write_text('{"model_type": "bloom", "num_attention_heads": 4}')
    opened = Tensors.open(tmp_path)
    (found,) = plan(opened, ["q"])["q"]
    assert torch.equal(found.read(opened)[0], fused.view(4, 3, 8, 32)[:, 0].reshape(32, 32))


# plans and types


def test_rows_do_not_depend_on_which_checkpoint_came_first(tmp_path):
    generator = torch.Generator().manual_seed(0)
    for step, h in ((0, 24), (1, 12), (2, 12)):
        weights = {"layers.0.fc1.weight": (h, 8), "layers.0.fc2.weight": (8, h)}
        made = {name: torch.randn(shape, generator=generator) for name, shape in weights.items()}
        save_file(made, tmp_path / f"model-{step}.safetensors")
    together = joma.scan(str(tmp_path))
    assert together.failed == []
    alone = [joma.scan(str(tmp_path / f"model-{step}.safetensors")).frame().value.item() for step in range(3)]
    assert together.frame().value.tolist() == alone


def test_weights_with_scales_and_of_unknown_types_are_refused(tmp_path):
    weights = {"layers.0.fc1.weight": torch.randn(8, 4), "layers.0.fc2.weight": torch.randn(4, 8)}
    eight = {name: w.to(torch.float8_e4m3fn) for name, w in weights.items()}
    save_file(eight, tmp_path / "plain-0.safetensors")
    save_file({**eight, "layers.0.fc1.weight_scale_inv": torch.ones(1, 1)}, tmp_path / "scaled-1.safetensors")
    save_file(weights, tmp_path / "odd-2.safetensors")
    data = (tmp_path / "odd-2.safetensors").read_bytes().replace(b'"F32","shape":[8,4]', b'"F9X","shape":[8,4]')
    (tmp_path / "odd-2.safetensors").write_bytes(data)
    table = joma.scan(str(tmp_path), pattern=r".*fc1").checkpoints()
    assert table.status.tolist() == ["ok", "failed", "failed"]
    assert "is quantised with scales" in table.note[1]
    odd = joma.scan(str(tmp_path / "odd-2.safetensors"))
    assert odd.failed
    opened = Tensors.open(tmp_path / "odd-2.safetensors")
    assert opened.entry("layers.0.fc1.weight").stored == "F9X"


def test_an_index_that_names_a_tensor_of_an_unknown_type(tmp_path):
    save("neox", tmp_path / "model")
    file = tmp_path / "model/model.safetensors"
    name = b'"gpt_neox.layers.1.mlp.dense_h_to_4h.weight":{"dtype":"'
    data = file.read_bytes()
    assert name + b"F32" in data
    file.write_bytes(data.replace(name + b"F32", name + b"F9X"))
    note = joma.scan(str(tmp_path / "model")).checkpoints().note[0]
    assert "dense_h_to_4h.weight is of type F9X: quantised weights cannot be measured" in note


def test_a_pattern_without_a_gauge_of_lower_matrices(tmp_path):
    save("neox", tmp_path / "model")
    with pytest.raises(ValueError, match=r"no gauge of those is asked for: stable_rank\.q"):
        joma.scan(str(tmp_path / "model"), pattern=".*", gauges="stable_rank.q")


# the hub


def test_nothing_in_the_hubs_cache_is_deleted(server, cache, revisions, own):  # noqa: F811
    """Two models share a blob, as with huggingface_hub's store of Xet files; one of them lacks its weights."""
    put(cache, "step0", revisions["step0"])
    (snapshot,) = cache.glob("snapshots/*")
    store = cache.parent / "blobs/ab"
    store.mkdir(parents=True)
    blob = (snapshot / "model.safetensors").resolve()
    blob.rename(store / blob.name)
    blob.symlink_to(store / blob.name)
    (snapshot / "model.safetensors").unlink()  # this model's link: the blob is others' now
    before = {path: path.is_symlink() or path.stat().st_size for path in cache.parent.rglob("*")}
    scan = joma.scan(REPO, revisions="step0,step1")
    assert scan.failed == []
    assert {path: path.is_symlink() or path.stat().st_size for path in cache.parent.rglob("*")} == before
    assert list(own.iterdir()) == []
    assert "step0/config.json" not in server.log  # it was in the cache


def test_the_model_is_put_together_from_the_cache_and_downloads(server, cache, revisions, own):  # noqa: F811
    put(cache, "step1", revisions["step1"])
    (snapshot,) = cache.glob("snapshots/*")
    shard = sorted(snapshot.glob("*.safetensors"))[0]
    shard.unlink()
    scan = joma.scan(REPO, revisions="step1", gauges="entropy", data=list(range(60)), length=20, tokens=60)
    assert scan.failed == [], scan.checkpoints().note[0]
    assert [name for name in server.log if name.endswith(".safetensors")] == [f"step1/{shard.name}"]
    assert list(own.iterdir()) == []


def test_a_scan_that_was_killed_leaves_whole_files_for_the_next(server, cache, own, tmp_path, monkeypatch):  # noqa: F811
    import joma._scan.scan as module

    def killed(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(module, "_write", killed)
        with pytest.raises(KeyboardInterrupt):
            joma.scan(REPO, tmp_path / "run", revisions="step0")
    (left,) = (path for path in own.iterdir() if path.is_dir())
    half = left / "models--someone--neox/blobs/abc.1234.incomplete"
    half.write_bytes(b"0")
    count = len(server.log)
    revision = Checkpoint("step0", 0, repo=REPO).revision()
    assert revision is not None
    assert revision.fetch("model.safetensors") is not None
    assert not half.exists()
    assert joma.scan(REPO, tmp_path / "run", revisions="step0").frame().value.tolist() == pytest.approx(
        EXPECTED, rel=1e-4
    )
    assert len(server.log) == count
    assert left.is_dir()  # another is reading it
    revision.forget()
    assert list(own.iterdir()) == []


def test_the_cache_stands_in_for_the_hub_only_without_a_connection(server, cache, revisions, monkeypatch):  # noqa: F811
    put(cache, "step0", revisions["step0"])
    hf = hub.library()
    assert hub.branches(REPO) == list(revisions)
    server.refuses = 403
    with pytest.raises(ValueError, match=r"the hub answers for someone/neox with an error .*403"):
        hub.branches(REPO)
    monkeypatch.setattr(hf.constants, "ENDPOINT", "http://127.0.0.1:9")
    assert hub.branches(REPO) == ["step0"]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES, errno.EROFS])
def test_a_disk_that_cannot_be_written_is_not_called_a_network(server, number, monkeypatch):  # noqa: F811
    def full(*args, **kwargs):
        raise OSError(number, os.strerror(number), "/somewhere")

    monkeypatch.setattr(hub.library(), "hf_hub_download", full)
    note = joma.scan(REPO, revisions="step0").checkpoints().note[0]
    assert f"cannot be written to the disk ([Errno {number}]" in note
    assert "network" not in note


# steps


@pytest.mark.parametrize(
    ("name", "step"),
    [("ckpt_7b_step_1000", 1000), ("pythia-70m", None), ("olmo-1.4b", None), ("a3f09c6", None), ("1000000", 1000000),
     ("e83d1f0c9b7a6d5e4f3c2b1a0f9e8d7c6b5a4f36", None), ("model10", 10), ("stage1-step2000-tokens9B", 2000)],
)  # fmt: skip
def test_numbers_that_are_no_steps(name, step):
    assert step_of(name) == step


def test_main_comes_after_the_steps(server):  # noqa: F811
    found = series(REPO, "step0,main,step1000")
    assert [(c.name, c.step) for c in found] == [("step0", 0), ("main", 1001), ("step1000", 1000)]
    assert "tells no step" in found[1].note


def touch(*folders: Path) -> None:
    for folder in folders:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "model.safetensors").touch()


def test_the_output_folder_of_a_trainer(tmp_path):
    out = tmp_path / "out"
    touch(out, out / "checkpoint-500", out / "checkpoint-1000")
    found = series(str(out))
    assert [(c.name, c.step) for c in found] == [("checkpoint-500", 500), ("checkpoint-1000", 1000), ("out", 1001)]
    assert "step is not known" in found[-1].note
    (out / "trainer_state.json").write_text('{"global_step": 1200}')
    assert series(str(out))[-1].step == 1200
    assert [c.name for c in series(str(out / "checkpoint-500"))] == ["checkpoint-500"]


def test_one_step_twice_and_one_checkpoint_twice(tmp_path):
    for name in ("step-1", "step-2", "epoch0-step-2"):
        save("neox", tmp_path / name)
    scan = joma.scan(str(tmp_path))
    notes = scan.checkpoints().set_index("checkpoint").note
    assert notes["step-2"] == "step 2 is also that of epoch0-step-2"
    assert notes["step-1"] == ""
    assert len(scan.frame()) == 3 * 3
    assert [c.name for c in series(str(tmp_path), "step1,step-1")] == ["step-1"]
    with pytest.warns(UserWarning, match="step-2 is left out: epoch0-step-2 is of step 2 too"):
        table = joma.embedding_series(tmp_path, list(range(40)), length=10)
    assert sorted(set(table.step)) == [1, 2]


# workers and the command


def test_the_last_line_counts_what_was_asked_for(tmp_path, monkeypatch):
    from typer.testing import CliRunner

    from joma.cli import app

    monkeypatch.chdir(tmp_path)
    save("neox", tmp_path / "series/step-1")
    touch(tmp_path / "series/step-2")
    run = CliRunner().invoke
    assert run(app, ["scan", "series"]).exit_code == 1
    good = run(app, ["scan", "series", "--revisions", "step-1"])
    assert good.output.strip().splitlines()[-1] == "1 checkpoint: 0 failed"
    assert good.exit_code == 0


def test_without_ray_it_is_told_how_to_get_it(tmp_path, monkeypatch):
    import importlib.util

    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name == "ray" else find(name, *more))
    touch(tmp_path / "step-1")
    with pytest.raises(ValueError, match=r"pip install 'joma\[ray\]'"):
        joma.scan(str(tmp_path), engine="ray")


# tokens


def test_settings_alone_are_no_tokenizer(tmp_path):
    from joma._data.pretrained import has_tokenizer, load_tokenizer

    (tmp_path / "tokenizer_config.json").write_text("{}")
    assert not has_tokenizer(tmp_path)
    with pytest.raises(ValueError, match="there is no tokenizer"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "ByT5Tokenizer"}')
    assert has_tokenizer(tmp_path)
    (tmp_path / "other").mkdir()
    (tmp_path / "other/spiece.model").touch()
    assert has_tokenizer(tmp_path / "other")
