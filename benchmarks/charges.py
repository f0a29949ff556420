"""What the charges of a model cost in training at every = 100: Pythia-70M's shape with its head, batch 2 × 512."""

from __future__ import annotations

from typing import Any

import torch
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

import joma
from benchmarks._timing import alternate, row
from benchmarks.pythia import SHAPE

EVERY = 100
GAUGES = ("charge.qk", "charge.vo", "charge.mlp", "charge.norm", "charge.stream")


def run(rounds: int = 5) -> list[dict[str, Any]]:
    """A plain step against one that is measured: all balances, and the gradient identity of all exact charges."""
    tokens = torch.randint(50304, (2, 512), generator=torch.Generator().manual_seed(0))
    model = GPTNeoXForCausalLM._from_config(GPTNeoXConfig(**SHAPE), attn_implementation="sdpa")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    due = [False]
    w = joma.watch(model, every=lambda step: due[0], gauges=GAUGES, optimizer=optimizer)

    def plain() -> None:
        model(tokens, labels=tokens, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    def measured() -> None:
        due[0] = True
        w._loop.arm()
        plain()
        due[0] = False
        w.step()

    (base, _), (always, _) = alternate(plain, measured, rounds=rounds)
    w.close()
    share = (always - base) / EVERY / base
    what = f"training step of Pythia-70M's shape with all charges, batch 2 × 512, every={EVERY}"
    accuracy = (
        f"{100 * share:+.2f} %, a hundredth of a measured step's excess of {always - base:.2f} s"
    )
    return [
        row(
            what,
            "`joma.watch`",
            "without",
            base * (1 + share),
            base,
            accuracy,
            measured_seconds=always,
        )
    ]
