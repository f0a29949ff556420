"""Models of litgpt: one configuration of each family, made small."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from litgpt import GPT, Config
from litgpt.config import configs

from benchmarks.families.measure import Case, Row, measure

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def models() -> list[str]:
    """Return one configuration of each family."""
    families: dict[str, str] = {}
    for config in configs:
        name = config["name"]
        families.setdefault(name.split("-")[0].split("_")[0], name)
    return list(families.values())


def rows(name: str) -> Iterator[Row]:
    """Measure a configuration in both types."""
    for dtype in DTYPES:
        yield measure("litgpt", name, f"sdpa, {dtype}, none", lambda d=dtype: _case(name, d))


def _case(name: str, dtype: str) -> Case:
    original = Config.from_name(name)
    groups = original.n_query_groups
    key_heads = 4 if groups == original.n_head else 2
    if groups == 1:
        key_heads = 1
    settings = {
        "n_layer": 2, "n_head": 4, "n_embd": 32, "n_query_groups": key_heads, "head_size": 8, "intermediate_size": 40,
        "padded_vocab_size": 96, "vocab_size": 96, "block_size": 64,
    }  # fmt: skip
    if original.moe_intermediate_size:
        settings["moe_intermediate_size"] = 16
    config = Config.from_name(name, **settings)
    torch.manual_seed(0)
    model = GPT(config)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "attn" in key and parameter.dim() == 2:
                parameter.mul_(4)
    model = model.to(DTYPES[dtype]).eval()
    tokens = torch.randint(0, 96, (3, 14), generator=torch.Generator().manual_seed(1))
    return Case(model, lambda m: m(tokens), 4, {}, None, frozenset({14}), DTYPES[dtype])
