"""A training step of a `JoMABlock` with 4,000 words and 200 nodes: folded attention against trained attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from benchmarks._timing import alternate, row
from joma.nn import JoMABlock
from joma.paper.labs.twins import OPTIMISERS, Twin

WORDS, NODES, WINDOW, BATCH = 4_000, 200, 35, 64


def run(rounds: int = 7) -> list[dict[str, Any]]:
    """Seconds per step of both, alternately, and the bytes that each holds between two steps."""
    rows = []
    for pattern in ("per_query", "shared"):
        for optimiser in ("SGD", "momentum", "Adam"):
            joint, folded = _pair(pattern, optimiser)
            (usual, _), (quick, _) = alternate(_steps(joint), _steps(folded), rounds=rounds)
            held = [twin.held() / 2**20 for twin in (folded, joint)]
            text = f"the block holds {held[0]:.0f} against {held[1]:.0f} MiB between two steps (1/{held[1] / held[0]:.2f})"
            logits = "logits per query" if pattern == "per_query" else "one pattern for all queries"
            sizes = f"{WORDS:,} words, {NODES} nodes, {BATCH} places × {WINDOW} words"
            what = f"training step of a block, {sizes}, exp, {logits}, {optimiser}"
            rows.append(
                row(
                    what, "`JoMABlock(folded=True)`", "`folded=False`", quick, usual, text, mib=held
                )
            )
    return rows


def _pair(pattern: Any, optimiser: str) -> tuple[Twin, Twin]:
    """Joint and folded, in float32, from the same start."""
    torch.manual_seed(0)
    _, ratio, _, told = OPTIMISERS[optimiser]
    block = JoMABlock(WORDS, NODES, attention="exp", pattern=pattern, ratio=ratio)
    head = nn.Linear(NODES, WORDS)
    return Twin(block, head, optimiser), Twin(block.fold(momentum=told), head, optimiser)


def _steps(twin: Twin) -> Any:
    """One step on places with Zipf's frequencies, the same for both."""
    generator = torch.Generator().manual_seed(1)
    weights = 1 / torch.arange(1, WORDS + 1)

    def step() -> None:
        words = torch.multinomial(
            weights, BATCH * (WINDOW + 2), replacement=True, generator=generator
        )
        words = words.view(BATCH, WINDOW + 2)
        twin.step(words[:, 0], words[:, 1:-1], words[:, -1])

    return step
