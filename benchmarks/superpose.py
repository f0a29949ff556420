"""One pass for the strongest contexts of all neurons of all layers, against the plain pass; memory at two lengths."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from benchmarks._timing import peak_memory, row
from joma._inspect.collect import collect
from joma._inspect.windows import batches

SHAPE = {
    "vocab_size": 8192, "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4,
    "intermediate_size": 1024, "max_position_embeddings": 128,
}  # fmt: skip
CONTEXTS, LENGTH, BATCH = 32, 64, 16


def run(tokens: int = 1_000_000) -> list[dict[str, Any]]:
    """Time on ``tokens`` tokens; peak memory there and on a quarter of them."""
    model = build()
    plain, mine = _interleaved(model, tokens)
    setup = "from benchmarks.superpose import *; model = build(); model(torch.zeros(BATCH, LENGTH, dtype=torch.long))"
    memory = {n: peak_memory(setup, f"strongest(model, {n})") for n in (tokens // 4, tokens)}
    shown = ", ".join(
        f"{n / 1e6:g} M: {mib:.0f} MiB" for n, mib in memory.items() if mib is not None
    )
    what = f"strongest contexts of all {4 * 1024:,} neurons of 4 layers (d = 256), {tokens / 1e6:g} M tokens"
    text = f"{mine / plain:.2f} × its time; peak memory {shown}"
    return [
        row(what, "`joma.superpose`", "the plain forward pass", mine, plain, text, memory=memory)
    ]


def build() -> Any:
    """The Transformer with random weights and without its head."""
    from transformers import GPTNeoXConfig, GPTNeoXModel

    torch.manual_seed(0)
    return GPTNeoXModel(GPTNeoXConfig(**SHAPE, use_cache=False)).eval()


def text(tokens: int) -> Iterator[np.ndarray[Any, Any]]:
    """Tokens with Zipf's frequencies, a block at a time: nothing of the corpus is kept."""
    rng = np.random.default_rng(0)
    share = 1 / np.arange(1, SHAPE["vocab_size"] + 1)
    edges = np.cumsum(share / share.sum())
    for start in range(0, tokens, 1 << 14):
        yield np.searchsorted(edges[:-1], rng.random(min(1 << 14, tokens - start)))


def strongest(model: Any, tokens: int) -> Any:
    """What is measured."""
    return collect(model, batches(text(tokens), LENGTH, BATCH), None, CONTEXTS, LENGTH)


def _interleaved(model: Any, tokens: int, parts: int = 8) -> tuple[float, float]:
    """Seconds of the plain pass and of ours, on parts of the corpus in turn."""
    plain = 0.0
    began = time.perf_counter()

    def again() -> Iterator[torch.Tensor]:
        """The batches for ours; now and then a stretch of them is run plainly too, on a clock of its own."""
        nonlocal plain
        kept: list[torch.Tensor] = []
        every = max(1, tokens // (LENGTH * BATCH * parts))
        for batch in batches(text(tokens), LENGTH, BATCH):
            kept.append(batch)
            if len(kept) == every:
                start = time.perf_counter()
                with torch.inference_mode():
                    for windows in kept:
                        _plain(model, windows)
                plain += time.perf_counter() - start
                kept.clear()
            yield batch

    collect(model, again(), None, CONTEXTS, LENGTH)
    return plain, time.perf_counter() - began - plain


def _plain(model: Any, windows: torch.Tensor) -> None:
    """A pass that nobody listens to."""
    from joma._measure.events.calls import call_pristine

    call_pristine(model, (windows,), {})
