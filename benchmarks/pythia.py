"""A watch on a whole model of Pythia-70M's shape, against the plain model and against `output_attentions=True`."""

from __future__ import annotations

import time
from typing import Any

import torch
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, GPTNeoXModel

import joma
from benchmarks._timing import alternate, peak_memory, row

SHAPE = {
    "vocab_size": 50304, "hidden_size": 512, "num_hidden_layers": 6, "num_attention_heads": 8,
    "intermediate_size": 2048, "max_position_embeddings": 8192,
}  # fmt: skip


def run(rounds: int = 5) -> list[dict[str, Any]]:
    """Forward passes at two lengths, their memory, and training."""
    return [*_forward(2048, rounds), *_forward(4096, max(2, rounds // 2)), *_training(rounds)]


def build(how: str = "sdpa") -> GPTNeoXModel:
    """The Transformer, with random weights and without the head, which would be half of the work."""
    torch.manual_seed(0)
    return GPTNeoXModel._from_config(GPTNeoXConfig(**SHAPE), attn_implementation=how).eval()


def entropy_formula(model: GPTNeoXModel, tokens: torch.Tensor) -> list[float]:
    """What one would write without joma."""
    attentions = model(tokens, output_attentions=True, use_cache=False).attentions
    return [float(-(p * torch.log(p + 1e-12)).sum(-1).mean()) for p in attentions]


def _forward(T: int, rounds: int) -> list[dict[str, Any]]:
    tokens = torch.randint(50304, (1, T), generator=torch.Generator().manual_seed(0))
    plain, watched, eager = build(), build(), build("eager")
    w = joma.watch(watched, every=1, gauges="entropy")

    def on() -> list[float]:
        watched(tokens, use_cache=False)
        return list(w.step().values())

    with torch.no_grad():
        (base, _), (mine, values), (slow, expected) = alternate(
            lambda: plain(tokens, use_cache=False),
            on,
            lambda: entropy_formula(eager, tokens),
            rounds=rounds,
        )
    w.close()
    error = max(abs(a - b) for a, b in zip(values, expected, strict=True))
    what = f"forward of a Pythia-70M-shaped model with attention statistics, T = {T:,}"
    memory = _memory(T)
    return [
        row(what, "`joma.watch`", "the plain forward", mine, base, f"{mine / base:.2f} × its time; {memory['text']}",
            **memory),
        row(what, "`joma.watch`", "eager, `output_attentions=True`, entropy formula", mine, slow,
            f"largest difference {error:.0e} nats", error=error),
    ]  # fmt: skip


def _memory(T: int) -> dict[str, Any]:
    setup = f"""
import torch, joma
from benchmarks.pythia import build, entropy_formula
model = build({{how!r}})
tokens = torch.randint(50304, (1, {T}))
torch.set_grad_enabled(False)
def watched(tokens):
    with joma.watch(model, every=1, gauges="entropy") as w:
        model(tokens, use_cache=False)
        w.step()
watched(tokens[:, :64])
"""
    plain = peak_memory(setup.format(how="sdpa"), "model(tokens, use_cache=False)")
    mine = peak_memory(setup.format(how="sdpa"), "watched(tokens)")
    eager = peak_memory(setup.format(how="eager"), "entropy_formula(model, tokens)")
    if plain is None or mine is None or eager is None:
        return {"text": "memory not measured"}
    text = f"{100 * (mine / plain - 1):+.1f} % peak memory (plain {plain:.0f} MiB; eager {eager:.0f} MiB)"
    return {"text": text, "plain_mib": plain, "watched_mib": mine, "eager_mib": eager}


def _training(rounds: int) -> list[dict[str, Any]]:
    """Batch 2, T = 512: a step without a watch, a step that is not measured, a step that is."""
    tokens = torch.randint(50304, (2, 512), generator=torch.Generator().manual_seed(0))
    model = GPTNeoXForCausalLM._from_config(GPTNeoXConfig(**SHAPE), attn_implementation="sdpa")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    due = [False]
    w = joma.watch(model, every=lambda step: due[0])

    def plain() -> torch.Tensor:
        loss = model(tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    def idle() -> None:
        w.step(loss=plain())

    def measured() -> None:
        due[0] = True
        w._loop.arm()
        loss = plain()
        due[0] = False
        w.step(loss=loss)

    (base, _), (not_due, _), (always, _) = alternate(plain, idle, measured, rounds=2 * rounds)
    w.close()
    start = time.perf_counter()
    quiet = joma.watch(model, every=lambda step: False)
    for _ in range(1000):
        quiet.step(loss=1.0)
    call = (time.perf_counter() - start) / 1000
    quiet.close()
    sometimes = base + call + (always - base) / 100
    what = "training step of the same model with its head, batch 2 × 512, entropy and stable rank"
    return [
        row(f"{what}, every=1", "`joma.watch`", "without", always, base, f"{100 * (always / base - 1):+.1f} %"),
        row(f"{what}, every=100", "`joma.watch`", "without", sometimes, base,
            f"{100 * (sometimes / base - 1):+.2f} % (a hundredth of a measured step's excess, and a call of "
            f"{1e6 * call:.0f} µs; idle steps as timed: {100 * (not_due / base - 1):+.1f} %, which is noise)",
            idle_seconds=not_due, call_seconds=call),
    ]  # fmt: skip
