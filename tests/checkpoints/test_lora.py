"""Adapters that peft wrote: base + B·A against peft's own merged model, updates against peft's own product."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from safetensors.torch import load_file, save_file

import joma
from tests.checkpoints.models import lower, model, quiet, save, stable_rank

peft = pytest.importorskip("peft")
TARGETS = {
    "llama": ["q_proj", "v_proj", "gate_proj", "up_proj", "down_proj"],
    "gpt2": ["c_attn", "c_fc", "c_proj"],  # (in, out)
    "neox": ["query_key_value", "dense_h_to_4h", "dense_4h_to_h"],
}


def adapted(family, folder, **settings):
    """A model with an adapter that is not zero, saved; the model."""
    config = peft.LoraConfig(r=3, lora_alpha=8, target_modules=TARGETS[family], **settings)
    with quiet(), pytest.warns() if family == "gpt2" else quiet():
        made = peft.get_peft_model(copy.deepcopy(model(family)), config)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "lora_" in name:
                parameter.normal_(0, 0.3, generator=generator)
    made.save_pretrained(folder)
    return made


def frame(folder, **options):
    scan = joma.scan(str(folder), **options)
    assert scan.failed == [], scan.checkpoints().note[0]
    return scan.frame()


def lower_modules(made, family):
    inner = made.base_model.model
    return {
        "llama": lambda: [layer.mlp.gate_proj for layer in inner.model.layers],
        "gpt2": lambda: [layer.mlp.c_fc for layer in inner.transformer.h],
        "neox": lambda: [layer.mlp.dense_h_to_4h for layer in inner.gpt_neox.layers],
    }[family]()


@pytest.mark.parametrize(
    ("family", "settings"),
    [("llama", {}), ("gpt2", {}), ("neox", {"use_rslora": True}),
     ("gpt2", {"rank_pattern": {"c_fc": 2}, "alpha_pattern": {"c_fc": 5}})],
)  # fmt: skip
def test_base_and_update(family, settings, tmp_path):
    made = adapted(family, tmp_path / "out/checkpoint-7", **settings)
    save(family, tmp_path / "base")
    updates = [m.get_delta_weight("default").detach() for m in lower_modules(made, family)]
    alone = frame(tmp_path / "out", gauges="stable_rank.mlp_in_update")
    assert alone.value.tolist() == pytest.approx([stable_rank(w) for w in updates], rel=1e-4)
    assert alone.step.tolist() == [7] * 3
    assert all(value <= 3 for value in alone.value)  # the rank
    gauges = "stable_rank,stable_rank.mlp_in_update,entropy"
    both = frame(
        tmp_path / "out", gauges=gauges, data=list(range(48)), length=16, base=tmp_path / "base"
    )
    again = both[both.gauge == "stable_rank.mlp_in_update"]
    assert again.value.tolist() == pytest.approx(alone.value.tolist(), rel=1e-5)
    merged = made.merge_and_unload()
    with quiet():
        merged.save_pretrained(tmp_path / "merged")
    truth = frame(
        tmp_path / "merged", gauges="stable_rank,entropy", data=list(range(48)), length=16
    )
    for gauge in ("stable_rank", "entropy"):
        expected = truth[truth.gauge == gauge].value.tolist()
        assert both[both.gauge == gauge].value.tolist() == pytest.approx(expected, rel=1e-4)
    plain = [stable_rank(w) for w in lower(family)]
    assert truth[truth.gauge == "stable_rank"].value.tolist() != pytest.approx(
        plain, rel=1e-2
    )  # it does change them


def test_without_its_base_an_adapter_is_refused_by_name(tmp_path):
    adapted("llama", tmp_path / "adapter")
    for path in (tmp_path / "adapter", tmp_path / "adapter/adapter_model.safetensors"):
        for gauge in ("stable_rank", "charge.qk", "entropy"):
            scan = joma.scan(str(path), gauges=gauge, data=list(range(48)), length=16)
            assert scan.failed
            assert "it is a LoRA adapter, which adds to" in scan.checkpoints().note[0]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"peft_type": "IA3"}, "of the type 'IA3'"),
        ({"use_dora": True}, "with use_dora"),
        ({"lora_alpha": "x"}, "lora_alpha is 'x', no number"),
        ({"alpha_pattern": {"(a+)+$": 3}}, "no plain name"),
        (None, "without adapter_config.json"),
    ],
)
def test_adapters_that_would_be_measured_wrongly(change, why, tmp_path):
    adapted("neox", tmp_path / "adapter")
    settings = tmp_path / "adapter/adapter_config.json"
    if change is None:
        settings.unlink()
    else:
        settings.write_text(json.dumps(json.loads(settings.read_text()) | change))
    scan = joma.scan(str(tmp_path / "adapter"), gauges="stable_rank.mlp_in_update")
    assert why in scan.checkpoints().note[0]


def test_an_adapter_of_another_model(tmp_path):
    adapted("neox", tmp_path / "adapter")
    save("llama", tmp_path / "base")
    scan = joma.scan(str(tmp_path / "adapter"), base=tmp_path / "base")
    assert "which the base does not have: is it another model's?" in scan.checkpoints().note[0]


def test_a_part_that_the_adapter_does_not_change_and_matrices_that_do_not_fit(tmp_path):
    adapted("llama", tmp_path / "adapter")
    scan = joma.scan(str(tmp_path / "adapter"), gauges="stable_rank.k_update")
    assert "no matrix found for 'k'" in scan.checkpoints().note[0]
    file = tmp_path / "adapter/adapter_model.safetensors"
    state = load_file(file)
    name = next(name for name in state if "gate_proj.lora_A" in name)
    save_file({**state, name: torch.ones(5, 5)}, file)
    assert "do not fit one another" in joma.scan(str(tmp_path / "adapter")).checkpoints().note[0]


def test_the_whole_state_of_a_wrapped_model_is_refused(tmp_path):
    made = adapted("llama", tmp_path / "adapter")
    torch.save(made.state_dict(), tmp_path / "state.pt")
    note = joma.scan(str(tmp_path / "state.pt")).checkpoints().note[0]
    assert "LoRA matrices beside the weights: save model.merge_and_unload()" in note
