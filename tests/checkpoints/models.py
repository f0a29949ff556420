"""Tiny models of the families that scans know, and where their matrices are by the families' own attributes."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

D, H, LAYERS = 32, 4, 3
FAMILIES = ("neox", "opt", "gpt2", "llama", "bert", "mixtral", "phi3")


@cache
def model(family: str) -> Any:
    """A model with weights that are not tiny, so that spectra differ."""
    import transformers as t

    small = {"hidden_size": D, "num_hidden_layers": LAYERS, "num_attention_heads": H, "intermediate_size": 80,
             "vocab_size": 60, "max_position_embeddings": 64, "pad_token_id": 0}  # fmt: skip
    grouped = {**small, "num_key_value_heads": 2}
    configs = {
        "neox": lambda: t.GPTNeoXForCausalLM(t.GPTNeoXConfig(**small)),
        "opt": lambda: t.OPTForCausalLM(t.OPTConfig(**small, ffn_dim=80, word_embed_proj_dim=D)),
        "gpt2": lambda: t.GPT2LMHeadModel(
            t.GPT2Config(
                n_embd=D, n_layer=LAYERS, n_head=H, n_inner=80, vocab_size=60, n_positions=64
            )
        ),
        "llama": lambda: t.LlamaForCausalLM(t.LlamaConfig(**grouped)),
        "bert": lambda: t.BertForMaskedLM(t.BertConfig(**small)),
        "mixtral": lambda: t.MixtralForCausalLM(t.MixtralConfig(**grouped, num_local_experts=4)),
        "phi3": lambda: t.Phi3ForCausalLM(t.Phi3Config(**grouped)),
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(sum(map(ord, family)))
        made = configs[family]().eval()
        with torch.no_grad():
            for p in made.parameters():
                if p.dim() >= 2:
                    p.normal_(0, 0.3)
                    p.view(-1, p.shape[-1])[0] *= 4  # a spike
    return made


def lower(family: str) -> list[torch.Tensor]:
    """The lower MLP matrices, (h, d) each, by the family's own names."""
    m = model(family)
    if family == "neox":
        found = [layer.mlp.dense_h_to_4h.weight for layer in m.gpt_neox.layers]
    elif family == "opt":
        found = [layer.fc1.weight for layer in m.model.decoder.layers]
    elif family == "gpt2":
        found = [layer.mlp.c_fc.weight.T for layer in m.transformer.h]
    elif family == "llama":
        found = [layer.mlp.gate_proj.weight for layer in m.model.layers]
    elif family == "bert":
        found = [layer.intermediate.dense.weight for layer in m.bert.encoder.layer]
    elif family == "phi3":  # gate and up in one
        found = [layer.mlp.gate_up_proj.weight.chunk(2)[0] for layer in m.model.layers]
    else:  # experts are stacked in memory: gate and up in one
        found = [e.chunk(2)[0] for layer in m.model.layers for e in layer.mlp.experts.gate_up_proj]
    return [w.detach() for w in found]


def queries_and_keys(family: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(W_Q, W_K) a layer, rows by head, by the family's own conventions."""
    m = model(family)
    if family == "neox":  # rows are (head, q k v, head size)
        fused = [
            layer.attention.query_key_value.weight.view(H, 3, D // H, D)
            for layer in m.gpt_neox.layers
        ]
        found = [(w[:, 0].reshape(D, D), w[:, 1].reshape(D, D)) for w in fused]
    elif family == "gpt2":
        found = [tuple(layer.attn.c_attn.weight.T.split(D)[:2]) for layer in m.transformer.h]
    elif family == "llama":
        found = [
            (layer.self_attn.q_proj.weight, layer.self_attn.k_proj.weight)
            for layer in m.model.layers
        ]
    else:
        raise ValueError(family)
    return [(q.detach(), k.detach()) for q, k in found]


def values_and_outputs(family: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(W_V, W_O) per layer, rows of W_V and columns of W_O by head, by the family's own conventions."""
    m = model(family)
    if family == "neox":
        layers = [layer.attention for layer in m.gpt_neox.layers]
        found = [
            (a.query_key_value.weight.view(H, 3, D // H, D)[:, 2].reshape(D, D), a.dense.weight)
            for a in layers
        ]
    elif family == "gpt2":
        found = [
            (b.attn.c_attn.weight.T.split(D)[2], b.attn.c_proj.weight.T) for b in m.transformer.h
        ]
    elif family == "llama":
        found = [
            (layer.self_attn.v_proj.weight, layer.self_attn.o_proj.weight)
            for layer in m.model.layers
        ]
    elif family == "bert":
        layers = [layer.attention for layer in m.bert.encoder.layer]
        found = [(a.self.value.weight, a.output.dense.weight) for a in layers]
    else:
        raise ValueError(family)
    return [(v.detach(), o.detach()) for v, o in found]


def stable_rank(w: torch.Tensor) -> float:
    """By LAPACK, in float64."""
    sigma = np.linalg.svd(w.double().numpy(), compute_uv=False)
    return float((sigma**2).sum() / sigma[0] ** 2)


def save(
    family: str, folder: Path, how: str = "safetensors", dtype: torch.dtype = torch.float32
) -> None:
    """In the hub's formats: one file or shards, safetensors or pickled, zip or legacy."""
    made = model(family)
    if how in ("safetensors", "sharded") and dtype == torch.float32:
        with quiet():
            made.save_pretrained(folder, max_shard_size="20KB" if how == "sharded" else "1GB")
        return
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    made.config.save_pretrained(folder)
    state = {name: value.to(dtype).contiguous() for name, value in made.state_dict().items()}
    state.pop("lm_head.weight", None)  # tied in some
    if how == "safetensors":
        save_file(state, folder / "model.safetensors")
    elif how in ("bin", "legacy"):
        torch.save(state, folder / "pytorch_model.bin", _use_new_zipfile_serialization=how == "bin")
    elif how == "sharded bin":
        names = list(state)
        parts = {f"pytorch_model-{n + 1:05d}-of-00003.bin": names[n::3] for n in range(3)}
        for file, inside in parts.items():
            torch.save({name: state[name] for name in inside}, folder / file)
        index = {
            "metadata": {},
            "weight_map": {name: file for file, inside in parts.items() for name in inside},
        }
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))


def quiet() -> Any:
    from joma._data.pretrained import quiet

    return quiet()
