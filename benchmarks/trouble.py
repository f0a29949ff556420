"""Planted trouble and healthy runs: what the alarms of a watch tell. python -m benchmarks.trouble

Small GPTs on a text that repeats three words per sequence, one token in twenty at random, so that attention is needed;
240 steps of AdamW, measured at every third. Trouble is planted at step 120, in 30 runs: learning rate × 50; queries and
keys × 20; queries × 1.1 at every step from then on; or, from the start, a learning rate of 0.3. It counts as told if
an alert of level warning or critical comes at or after the planting, and as told in time if that is before the loss is
10 % above that of the same run without trouble. 60 runs are healthy: three models, two lengths, four rates, five seeds;
any such alert is false. The rules (`joma._measure.watch.alarms`) were set on seed 0 and on those from 300 on (30 of
30 told, 11
of 15 in time, none false, before leaps were told at once), and fixed before those from 400 on, which are scored, were
run.
"""

from __future__ import annotations

import json
import statistics
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

import joma

STEPS, PLANTED, EVERY = 240, 120, 3
LR, FIRST_SEED = 2e-3, 400
GAUGES = ("entropy", "stable_rank", "max_logit", "massive_activation", "update_ratio")
MODELS = ((2, 2, 32, 24), (3, 4, 32, 24), (2, 4, 48, 32))  # layers, heads, width, tokens
Plant = Callable[[Any, torch.optim.Optimizer, int], None]  # called before each step


def made(shape: tuple[int, int, int, int], seed: int) -> Any:
    """A small GPT without dropout."""
    layers, heads, width, _ = shape
    torch.manual_seed(seed)
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=61, n_positions=64, n_embd=width, n_layer=layers, n_head=heads,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        )
    )  # fmt: skip


def text(generator: torch.Generator, tokens: int) -> Tensor:
    """Tokens (16, T): three random ones per sequence, again and again, one token in twenty at random."""
    words = torch.randint(61, (16, 3), generator=generator)
    noise = torch.rand(16, tokens, generator=generator) < 0.05
    return torch.where(
        noise,
        torch.randint(61, (16, tokens), generator=generator),
        words[:, torch.arange(tokens) % 3],
    )


def train(
    shape: tuple[int, int, int, int],
    lr: float,
    seed: int,
    plant: Plant | None = None,
    watched: bool = True,
) -> tuple[list[Any], list[float]]:
    """Alerts, none if it is not watched, and the loss of every step."""
    model = made(shape, seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    generator, losses = torch.Generator().manual_seed(seed), []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        watch = (
            joma.watch(model, every=EVERY, gauges=GAUGES, optimizer=optimizer) if watched else None
        )
        for step in range(1, STEPS + 1):
            if plant is not None:
                plant(model, optimizer, step)
            optimizer.zero_grad()
            tokens = text(generator, shape[3])
            loss = model(tokens, labels=tokens).loss
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
            if watch is not None:
                watch.step(loss)
        if watch is None:
            return [], losses
        watch.close()
    return [alert for alert in watch.alerts if alert.level != "notice"], losses


def faster(model: Any, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Learning rate × 50 from the planting on."""
    if step == PLANTED:
        for group in optimizer.param_groups:
            group["lr"] *= 50


def sharper(model: Any, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Queries and keys of all layers × 20."""
    if step == PLANTED:
        _scale(model, 20.0, 2)


def growing(model: Any, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Queries of all layers × 1.1 at every step from the planting on."""
    if step >= PLANTED:
        _scale(model, 1.1, 1)


def too_fast(model: Any, optimizer: torch.optim.Optimizer, step: int) -> None:
    """A learning rate of 0.3 from the start."""
    optimizer.param_groups[0]["lr"] = 0.3


@torch.no_grad()
def _scale(model: Any, factor: float, parts: int) -> None:
    """Queries, and keys too if two parts are to be scaled."""
    for block in model.transformer.h:
        attention = block.attn.c_attn
        width = attention.weight.shape[0]
        attention.weight[:, : parts * width].mul_(factor)
        attention.bias[: parts * width].mul_(factor)


def worse(losses: list[float], healthy: list[float]) -> int:
    """The first step at which the loss, a median of five, is 10 % above the healthy run's; beyond the end if none."""
    for step in range(5, len(losses) + 1):
        now, then = (statistics.median(x[step - 5 : step]) for x in (losses, healthy))
        if not now <= 1.1 * then:
            return step
    return len(losses) + 1


def main() -> None:
    """Both tables, and whether the goals are reached: 95 % told, one false alarm at most."""
    rows: list[dict[str, Any]] = []
    plants: dict[Plant, int] = {faster: 9, sharper: 9, growing: 6, too_fast: 6}
    for plant, count in plants.items():
        for n in range(count):
            shape, seed = MODELS[n % 3], FIRST_SEED + n
            healthy = train(shape, LR, seed, watched=False)[1]
            alerts, losses = train(shape, LR, seed, plant)
            since = 1 if plant is too_fast else PLANTED
            first = next((alert for alert in alerts if alert.step >= since), None)
            rows.append(
                {
                    "plant": plant.__name__, "told": first is not None, "step": first and first.step,
                    "kind": first and first.kind, "loss worse at": worse(losses, healthy),
                }
            )  # fmt: skip
            print(json.dumps(rows[-1]), flush=True)
    false = []
    for n in range(60):
        (*model, tokens), lr = MODELS[n % 3], (5e-4, 1e-3, 2e-3, 4e-3)[n // 3 % 4]
        shape, seed = (*model, tokens * (1 + n % 2)), FIRST_SEED + n // 12
        alerts, _ = train(shape, lr, seed)
        if alerts:
            false.append(
                {
                    "shape": shape,
                    "lr": lr,
                    "seed": seed,
                    "alert": str(alerts[0]),
                    "step": alerts[0].step,
                }
            )
            print(json.dumps(false[-1]), flush=True)
    told = [row for row in rows if row["told"]]
    first = [
        row for row in rows if row["plant"] in ("sharper", "growing")
    ]  # here attention moves before the loss
    early = [row for row in first if row["told"] and row["step"] < row["loss worse at"]]
    harmless = sum(row["loss worse at"] > STEPS for row in rows)
    print(
        f"told: {len(told)} of {len(rows)}; the loss never became 10 % worse in {harmless} of them"
    )
    print(f"told in time where queries or keys were scaled: {len(early)} of {len(first)}")
    print(f"false alarms: {len(false)} of 60 healthy runs")
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(
            json.dumps({"planted": rows, "false": false}, indent=1), encoding="utf-8"
        )
    sys.exit(0 if len(told) >= 0.95 * len(rows) and len(false) <= 1 else 1)


if __name__ == "__main__":
    main()
