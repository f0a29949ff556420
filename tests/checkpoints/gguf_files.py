"""GGUF files as llama.cpp's converter writes them, from models of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.checkpoints.models import model


def llama_gguf(path: Path, kind: str = "F32", family: str = "llama") -> dict[str, torch.Tensor]:
    """The tiny model of a family; returns its matrices as they are after quantisation."""
    return write_gguf(path, model(family), kind, words=[f"word {n}" for n in range(60)])


def write_gguf(
    path: Path,
    made: Any,
    kind: str = "F32",
    *,
    words: list[str] | None = None,
    keys: dict[str, Any] | None = None,
) -> dict[str, torch.Tensor]:
    """Named, ordered and quantised as the converter does it; ``keys`` are added to the header or replace its own."""
    gguf = pytest.importorskip("gguf")
    config = made.config
    name = config.model_type
    arch = {value: key for key, value in gguf.MODEL_ARCH_NAMES.items()}[name]
    writer = gguf.GGUFWriter(path, name)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if name == "llama":
        writer.add_rope_dimension_count(config.head_dim)
        writer.add_vocab_size(config.vocab_size)
    elif name == "qwen3":
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    if words is not None:
        writer.add_token_list(words)
    for key, value in (keys or {}).items():
        add = {
            str: writer.add_string,
            float: writer.add_float32,
            int: writer.add_uint32,
            list: writer.add_array,
        }
        add[type(value)](key, value)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    quantised = gguf.GGMLQuantizationType[kind]
    kept = {}
    for tensor_name, tensor in made.state_dict().items():
        if tensor_name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        data = tensor.float().numpy()
        size = gguf.GGML_QUANT_SIZES[quantised][0]
        if data.ndim > 1 and kind != "F32" and data.shape[-1] % size == 0:
            packed = gguf.quants.quantize(data, quantised)
            kept[tensor_name] = gguf.quants.dequantize(packed, quantised)
        else:
            packed, kept[tensor_name] = data, data
        if name == "llama" and "q_proj" in tensor_name:
            packed = _paired(packed, config.num_attention_heads)
        elif name == "llama" and "k_proj" in tensor_name:
            packed = _paired(packed, config.num_key_value_heads)
        raw = None if packed is data or packed.dtype == np.float32 else quantised
        writer.add_tensor(
            names.get_name(tensor_name, (".weight", ".bias")),
            np.ascontiguousarray(packed),
            raw_dtype=raw,
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return {name: torch.from_numpy(np.array(data, dtype=np.float32)) for name, data in kept.items()}


def _paired(rows: Any, heads: int) -> Any:
    """As `LlamaModel.permute` of llama.cpp's convert_hf_to_gguf.py."""
    return (
        rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
        .swapaxes(1, 2)
        .reshape(rows.shape)
    )
