"""What attention statistics cost on each path, against the attention that is measured: medians of ratios."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from transformers import GPTNeoXConfig, GPTNeoXModel

import joma
from benchmarks._timing import ratio, row
from benchmarks.pythia import SHAPE, build

T = 2048


def run(rounds: int = 3) -> list[dict[str, Any]]:
    """Watched models, and the statistics of one call with a bias, with a float mask, with large scores."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 1, 8, T, 64, generator=generator)
    keep = torch.ones(T, T, dtype=torch.bool).tril()
    float_mask = torch.zeros(1, 1, T, T).masked_fill(~keep, -math.inf)
    slopes = 2.0 ** -torch.arange(1, 9)[:, None, None]
    bias = (float_mask - slopes * (torch.arange(T)[:, None] - torch.arange(T)).abs()).contiguous()
    with torch.no_grad():
        return [
            *_models(rounds),
            _one("finite bias (ALiBi)", q, k, v, bias, rounds, "at most 6 ×"),
            _one("float mask", q, k, v, float_mask, rounds, "at most 1.3 ×"),
            _one("logits up to ± 200", 40 * q, k, v, float_mask, rounds, "at most 2 ×"),
            _floor(q, k, v, rounds),
        ]


def _one(
    what: str,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor,
    rounds: int,
    goal: str,
) -> dict[str, Any]:
    """The statistics of one attention call, against the call itself with the same mask."""
    return _row(
        f"attention statistics, 8 heads, T = {T:,}, {what}", "scaled_dot_product_attention with the same mask",
        lambda: joma.attention_stats(q, k, mask), lambda: F.scaled_dot_product_attention(q, k, v, mask), rounds, goal,
    )  # fmt: skip


def _floor(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rounds: int) -> dict[str, Any]:
    """Exact statistics take one more kernel call: that is the floor, whatever else they do."""
    return _row(
        f"attention statistics, 8 heads, T = {T:,}, causal", "the second kernel call that they cannot do without",
        lambda: joma.attention_stats(q, k, is_causal=True),
        lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True), rounds, "the floor is 1 ×",
    )  # fmt: skip


def _models(rounds: int) -> list[dict[str, Any]]:
    """Watched models against their own forward: eager attention; sdpa, exact and on a sample of queries."""
    settings = GPTNeoXConfig(**{**SHAPE, "num_hidden_layers": 2})
    torch.manual_seed(0)
    eager = GPTNeoXModel._from_config(settings, attn_implementation="eager").eval()
    what = f"forward of a Pythia-70M-shaped model, T = {T:,}, watched"
    return [
        _model(
            f"forward of 2 layers with eager attention, T = {T:,}, watched",
            eager,
            rounds,
            "at most 1.3 ×",
        ),
        _model(
            f"{what}, exact", build(), rounds, "at most 1.4 ×; one more kernel call is the floor"
        ),
        _model(f"{what}, `queries=256`", build(), rounds, "at most 1.15 ×", queries=256),
    ]


def _model(
    what: str, model: GPTNeoXModel, rounds: int, goal: str, queries: int | None = None
) -> dict[str, Any]:
    tokens = torch.randint(50304, (1, T), generator=torch.Generator().manual_seed(0))
    due = [False]
    w = joma.watch(model, every=lambda step: due[0], gauges="entropy", queries=queries)

    def watched() -> None:
        due[0] = True
        w._loop.arm()
        model(tokens, use_cache=False)
        due[0] = False
        w.step()

    result = _row(
        what, "the plain forward", watched, lambda: model(tokens, use_cache=False), rounds, goal
    )
    w.close()
    return result


def _row(
    what: str,
    against: str,
    mine: Callable[[], Any],
    plain: Callable[[], Any],
    rounds: int,
    goal: str,
) -> dict[str, Any]:
    seconds, other, times = ratio(mine, plain, rounds=rounds)
    text = f"{times:.2f} × its time (processor time, median of ratios; goal: {goal})"
    return row(what, "`joma.watch`" if "watched" in what else "`joma.attention_stats`", against, seconds, other, text,
               times=times)  # fmt: skip
