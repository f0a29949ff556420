"""x-transformers with its options, and the Transformer of local-attention."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from local_attention import LocalTransformer
from x_transformers import Decoder, Encoder, TransformerWrapper

from benchmarks.families.measure import Case, Row, measure

VOCABULARY = 96
LENGTH = 16
HEADS = 4
LOCAL = "LocalTransformer"
KINDS = {"encoder": Encoder, "decoder": Decoder}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "rotary positions": {"rotary_pos_emb": True},
    "ALiBi": {"alibi_pos_bias": True},
    "relative position bias": {"rel_pos_bias": True},
    "dynamic position bias": {"dynamic_pos_bias": True},
    "one key head": {"attn_one_kv_head": True},
    "two key heads": {"attn_kv_heads": 2},
    "query and key norm": {"attn_qk_norm": True},
    "talking heads": {"attn_pre_talking_heads": True, "attn_post_talking_heads": True},
    "top-k": {"attn_sparse_topk": 4},
    "memory keys": {"attn_num_mem_kv": 3},
    "gated values": {"attn_gate_values": True},
    "head scale": {"attn_head_scale": True},
    "soft clamp": {"attn_softclamp_logits": True},
    "shared keys and values": {"attn_shared_kv": True},
    "learned temperature": {"attn_qk_norm": True, "attn_qk_norm_dim_scale": True},
    "residual attention": {"residual_attn": True},
    "sandwich": {"sandwich_coef": 1},
    "macaron": {"macaron": True},
    "RMSNorm, GLU": {"use_rmsnorm": True, "ff_glu": True},
    "zero key and value": {"attn_add_zero_kv": True},
    "differential": {"attn_differential": True},
    "on attention": {"attn_on_attn": True},
}


def models() -> list[str]:
    """Return encoder and decoder with each option, and the local Transformer."""
    names = [LOCAL]
    for kind in KINDS:
        names += [f"{kind}, {option}" for option in OPTIONS]
    return names


def rows(name: str) -> Iterator[Row]:
    """Measure a model, fused and eager, padded and not, in both types."""
    if name == LOCAL:
        yield from _local_rows()
        return
    for dtype in DTYPES:
        for kernel in ("sdpa", "eager"):
            for padding in ("none", "left", "right"):
                variant = f"{kernel}, {dtype}, {padding}"
                arguments = (name, kernel, dtype, padding)
                yield measure("x-transformers", name, variant, lambda v=arguments: _case(*v))


def _local_rows() -> Iterator[Row]:
    for dtype in DTYPES:
        variant = f"eager, {dtype}, none"
        yield measure("local-attention", LOCAL, variant, lambda d=dtype: _local(d))


def _sharpened(model: torch.nn.Module, dtype: str) -> torch.nn.Module:
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "to_q" in key and parameter.dim() == 2:
                parameter.mul_(4)
    return model.to(DTYPES[dtype]).eval()


def _case(name: str, kernel: str, dtype: str, padding: str) -> Case:
    torch.manual_seed(0)
    kind, _, option = name.partition(", ")
    layers = KINDS[kind]
    settings = OPTIONS[option]
    inner = layers(
        dim=32, depth=2, heads=HEADS, attn_dim_head=8, attn_flash=kernel == "sdpa", **settings
    )
    model = _sharpened(
        TransformerWrapper(num_tokens=VOCABULARY, max_seq_len=80, attn_layers=inner), dtype
    )
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(1, VOCABULARY, (3, LENGTH), generator=generator)
    lengths = torch.tensor([[LENGTH], [LENGTH - 4], [LENGTH - 7]])
    positions = torch.arange(LENGTH)
    real = torch.ones(3, LENGTH, dtype=torch.bool)
    if padding == "left":
        real = positions >= LENGTH - lengths
    if padding == "right":
        real = positions < lengths
    mask = None if padding == "none" else real
    more = frozenset(range(LENGTH, LENGTH + 4))
    return Case(
        model, lambda m: m(tokens, mask=mask), HEADS, {LENGTH: real}, None, more, DTYPES[dtype]
    )


def _local(dtype: str) -> Case:
    torch.manual_seed(0)
    model = LocalTransformer(
        num_tokens=VOCABULARY,
        dim=32,
        depth=2,
        max_seq_len=64,
        local_attn_window_size=8,
        heads=HEADS,
    )
    model = _sharpened(model, dtype)
    tokens = torch.randint(1, VOCABULARY, (3, 40), generator=torch.Generator().manual_seed(1))
    return Case(model, lambda m: m(tokens), HEADS, {}, None, frozenset(range(4, 65)), DTYPES[dtype])
