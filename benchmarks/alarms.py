"""Planted bugs and healthy runs: what the charges of a small GPT find at every = 1. python -m benchmarks.alarms

A GPT-2 of two layers in float32 on a text of period 7 with noise, 20 steps. Healthy: 10 runs each of SGD with momentum
and AdamW. Bugs and controls: one run each; the first alarm is shown.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

import joma

STEPS, WIDTH = 20, 32
GAUGES = ("charge_residual.qk", "charge_residual.vo")
Bug = Callable[[Any, torch.optim.Optimizer], dict[str, Any]]


def small_gpt(seed: int) -> Any:
    """Two layers, two heads, without dropout."""
    torch.manual_seed(seed)
    config = GPT2Config(
        vocab_size=61,
        n_positions=32,
        n_embd=WIDTH,
        n_layer=2,
        n_head=2,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    return GPT2LMHeadModel(config)


def text(generator: torch.Generator) -> Tensor:
    """Tokens (8, 24) that go round in sevens, one in ten of them at random."""
    tokens = (torch.arange(24) + torch.randint(61, (8, 1), generator=generator)) % 7
    noise = torch.rand(8, 24, generator=generator) < 0.1
    return torch.where(noise, torch.randint(61, (8, 24), generator=generator), tokens)


def train(name: str, seed: int, bug: Bug | None = None) -> tuple[list[str], list[str]]:
    """Alarms of the gradient, and of SGD's law per step, in a run with or without a bug."""
    model = small_gpt(seed)
    settings = {"SGD": {"lr": 0.1, "momentum": 0.9}, "AdamW": {"lr": 1e-3}}[name]
    optimizer = getattr(torch.optim, name)(model.parameters(), **settings)
    planted = {} if bug is None else bug(model, optimizer)
    law = joma.charges(model).law(optimizer) if name == "SGD" else None
    generator, steps = torch.Generator().manual_seed(seed), []
    with warnings.catch_warnings(record=True) as record, joma.watch(
        model, every=1, gauges=GAUGES, optimizer=optimizer
    ) as watch:  # fmt: skip
        warnings.simplefilter("always")
        for n in range(STEPS):
            if not planted.get("keeps"):
                optimizer.zero_grad()
            tokens = text(generator)
            model(tokens, labels=tokens.flip(1) if planted.get("wrong") else tokens).loss.backward()
            planted.get("before", lambda: None)()
            if law is not None:
                law.before()
            optimizer.step()
            planted.get("after", lambda: None)()
            if law is not None:
                steps += [f"step {n + 1}: {deviation}" for deviation in law.after()]
            watch.step()
    return [
        str(w.message).split("joma.watch: ")[-1] for w in record if "breaks a law" in str(w.message)
    ], steps


def detached(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The query path of layer 1 is detached."""
    attention = model.transformer.h[1].attn.c_attn
    attention.register_forward_hook(
        lambda _, args, out: torch.cat([out[..., :WIDTH].detach(), out[..., WIDTH:]], -1)
    )
    return {}


def scaled(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The gradient of W_Q is half as large in head 1 of layer 0."""
    weight = model.transformer.h[0].attn.c_attn.weight
    return {"before": lambda: weight.grad[:, WIDTH // 2 : WIDTH].mul_(0.5)}


@torch.no_grad()
def _again(weight: Tensor, rate: float) -> None:
    assert weight.grad is not None
    weight -= rate * weight.grad


def twice(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The output projection of layer 0 is updated twice."""
    weight = model.transformer.h[0].attn.c_proj.weight
    return {"after": lambda: _again(weight, optimizer.param_groups[0]["lr"])}


def accumulated(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Gradients are never set to zero."""
    return {"keeps": True}


def softer(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Control: q and k are scaled alike, in all layers; no charge can see it."""
    for block in model.transformer.h:
        block.attn.scaling = block.attn.scaling / 2
    return {}


def wrong_loss(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Control: the labels are reversed; no charge can see it."""
    return {"wrong": True}


def main() -> None:
    """A table of bugs, and the number of healthy runs with an alarm."""
    bugs: list[Bug] = [detached, scaled, twice, accumulated]
    fine = True
    for bug in [*bugs, softer, wrong_loss]:
        for name in ("SGD", "AdamW"):
            if bug is twice and name == "AdamW":
                continue  # an error of the update, for which Adam has no law
            alarms, steps = train(name, 0, bug)
            found = alarms or steps
            fine &= bool(found) == (bug in bugs)
            said = found[0].split(". Usual")[0] if found else "nothing"
            print(
                f"{bug.__doc__} {name}: {len(alarms)} alarms of gradients, {len(steps)} of steps; first: {said}",
                flush=True,
            )
    for name in ("SGD", "AdamW"):
        healthy = [train(name, seed) for seed in range(1, 11)]
        bad = sum(bool(alarms or steps) for alarms, steps in healthy)
        fine &= not bad
        print(
            f"healthy, {name}: {bad} of {len(healthy)} runs of {STEPS} steps raise an alarm",
            flush=True,
        )
    sys.exit(0 if fine else 1)


if __name__ == "__main__":
    main()
