"""Models of torchtune."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torchtune.models import gemma, gemma2, llama2, llama3, llama3_1, mistral, phi3, qwen2

from benchmarks.families.measure import Case, Row, measure

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
SMALL: dict[str, Any] = {
    "vocab_size": 96, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "embed_dim": 32, "max_seq_len": 64,
    "intermediate_dim": 40,
}  # fmt: skip
MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama2": lambda: llama2.llama2(**SMALL),
    "llama3": lambda: llama3.llama3(**SMALL),
    "llama3_1": lambda: llama3_1.llama3_1(**SMALL),
    "mistral": lambda: mistral.mistral(**SMALL),
    "phi3": lambda: phi3.phi3(**SMALL),
    "qwen2": lambda: qwen2.qwen2(**SMALL),
    "gemma": lambda: gemma.gemma(**SMALL, head_dim=8),
    "gemma2": lambda: gemma2.gemma2(**SMALL, head_dim=8, hidden_capping_value=50.0, final_capping_value=30.0,
                                    sliding_window_size=6, query_pre_attn_scalar=8),
    "lora_llama3": lambda: llama3.lora_llama3(["q_proj", "v_proj"], lora_rank=4, lora_alpha=8, **SMALL),
}  # fmt: skip


def models() -> list[str]:
    """Return the names of the models."""
    return list(MODELS)


def rows(name: str) -> Iterator[Row]:
    """Measure a model with and without a mask (B, T, T), in both types."""
    for dtype in DTYPES:
        for padding in ("none", "left", "right"):
            variant = f"sdpa, {dtype}, {padding}"
            arguments = (name, dtype, padding)
            yield measure("torchtune", name, variant, lambda v=arguments: _case(*v))


def _case(name: str, dtype: str, padding: str) -> Case:
    torch.manual_seed(0)
    model = MODELS[name]().to(DTYPES[dtype]).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "attn" in key and parameter.dim() == 2:
                parameter.mul_(4)
    tokens = torch.randint(0, 96, (3, 14), generator=torch.Generator().manual_seed(1))
    lengths = torch.tensor([[14], [10], [7]])
    positions = torch.arange(14)
    real = torch.ones(3, 14, dtype=torch.bool)
    if padding == "left":
        real = positions >= 14 - lengths
    if padding == "right":
        real = positions < lengths
    mask = None
    if padding != "none":
        causal = torch.ones(14, 14, dtype=torch.bool).tril()
        # a padded query sees itself, so that it sees something
        mask = (causal & real[:, None]) | torch.eye(14, dtype=torch.bool)
    return Case(
        model, lambda m: m(tokens, mask=mask), 4, {14: real}, None, frozenset({14}), DTYPES[dtype]
    )
