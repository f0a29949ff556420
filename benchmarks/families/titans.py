"""The Llama of torchtitan in its debug size, with its backends of attention."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torchtitan.models.llama3 import llama3_configs

from benchmarks.families.measure import Case, Row, measure


def models() -> list[str]:
    """Return the title of the only model."""
    return ["llama3 debugmodel"]


def rows(title: str) -> Iterator[Row]:
    """Measure the debug model with each backend."""
    for backend in ("sdpa", "flex"):
        variant = f"{backend}, float32, none"
        yield measure("torchtitan", title, variant, lambda b=backend: _case(b))


def _case(backend: str) -> Case:
    torch.manual_seed(0)
    model = llama3_configs["debugmodel"](backend).build()
    model.init_weights()
    tokens = torch.randint(0, 2048, (2, 16), generator=torch.Generator().manual_seed(1))
    return Case(model, lambda m: m(tokens), 16, {}, None, frozenset({16}))
