"""Run folders: bytes per measurement of a watch with 32 × 32 heads, and seconds to read 130,000 numbers as a table."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn

import joma
from benchmarks._timing import alternate, row
from joma._runs.writer import RunWriter

LAYERS = 32
HEADS = 32
MEASUREMENTS = 6
PROMISED_BYTES = 20_000
STEPS = 765  # of 12 layers with 12 heads: 130,050 rows


def run(rounds: int = 5) -> list[dict[str, Any]]:
    """Return the rows of both."""
    with tempfile.TemporaryDirectory() as folder:
        return [_bytes(Path(folder) / "watch"), _frame(Path(folder) / "table", rounds)]


class _Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(x).view(batch, length, 3, HEADS, width // HEADS)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # (B, H, T, width of a head) each
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(torch.relu(self.up(x)))


def _bytes(path: Path) -> dict[str, Any]:
    """Measure the files that grow, with the default gauges; the ratio is over what is promised."""
    torch.manual_seed(0)
    width = 4 * HEADS
    model = nn.Sequential(*[_Block(width) for _ in range(LAYERS)])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
    with joma.watch(model, path, every=1, optimizer=optimizer) as watch:
        for _ in range(MEASUREMENTS):
            loss = model(torch.randn(2, 24, width)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            watch.step(loss=loss)
    sizes = {
        name: (path / name).stat().st_size / MEASUREMENTS
        for name in ("metrics.jsonl", "phases.jsonl")
    }
    total = sum(sizes.values())
    accuracy = ", ".join(f"`{name}` {size / 1000:.1f} kB" for name, size in sizes.items())
    return row(
        f"one measurement of {LAYERS} × {HEADS} heads, default gauges, written at 1 MB/s",
        "`joma.watch`", "the promise of 20 kB", total / 1e6, PROMISED_BYTES / 1e6, accuracy, bytes=total,
    )  # fmt: skip


def _frame(path: Path, rounds: int) -> dict[str, Any]:
    """Read a run as a watch writes it, against a reader that parses line by line."""
    generator = np.random.default_rng(0)
    axes = {"entropy": ["layer", "head"], "stable_rank": ["layer"], "phase": ["layer"]}
    with RunWriter.create(path, kind="watch", config={}, axes=axes) as writer:
        for step in range(STEPS):
            entropy = np.float32(3 * generator.random((12, 12))).astype(str).astype(float)
            stable_rank = np.float32(50 * generator.random(12)).astype(str).astype(float)
            values = {
                "loss": 2.5,
                "lr": 1e-3,
                "entropy": entropy,
                "stable_rank": stable_rank,
                "phase": [0] * 12,
            }
            writer.write(step, values, tau=1e-3 * step)

    def line_by_line() -> pd.DataFrame:
        rows = []
        for line in (path / "metrics.jsonl").read_text().splitlines():
            record = json.loads(line)
            for place, value in np.ndenumerate(np.array(record["value"])):
                rows.append((record["step"], record["tau"], record["gauge"], place, value))
        return pd.DataFrame(rows, columns=["step", "tau", "gauge", "place", "value"])

    (fast, table), (slow, expected) = alternate(
        lambda: joma.Run(path).frame(), line_by_line, rounds=rounds
    )
    error = float((table.value - expected.value).abs().max())
    return row(
        f"table of a run, {len(table):,} rows", "`Run.frame`", "`json.loads` line by line", fast, slow,
        f"largest difference {error:.0e}", error=error,
    )  # fmt: skip
