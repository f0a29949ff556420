"""A training step of the paper's language model at its full vocabulary, against the plain loop."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks._timing import alternate, peak_memory, row
from joma._train.model import LanguageModel
from joma._train.step import Stepper

WORDS, LENGTH, STREAMS, LR, CLIP = 28_782, 35, 20, 1e-4, 0.5


class PlainLayer(nn.TransformerEncoderLayer):
    """As one writes it to get at the attention: with its weights."""

    def _sa_block(
        self, x: Tensor, attn_mask: Any, key_padding_mask: Any, is_causal: bool = False
    ) -> Tensor:
        out = self.self_attn(
            x,
            x,
            x,
            attn_mask=attn_mask,
            key_padding_mask=key_padding_mask,
            need_weights=True,
            is_causal=is_causal,
        )[0]
        return self.dropout1(out)


def model(dropout: float = 0.2) -> LanguageModel:
    """The paper's one-layer model."""
    torch.manual_seed(0)
    return LanguageModel(WORDS, dropout=dropout)


def plain(twin: LanguageModel) -> Any:
    """The loop that one would write: default Adam, cross-entropy over full logits, clipping as a pass of its own."""
    for layer in twin.encoder.layers:
        layer.__class__ = PlainLayer
    optimizer = torch.optim.Adam(twin.parameters(), lr=LR)
    criterion = nn.CrossEntropyLoss()

    def step(inputs: Tensor, targets: Tensor) -> float:
        optimizer.zero_grad()
        loss = criterion(twin(inputs).view(-1, WORDS), targets.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(twin.parameters(), CLIP)
        optimizer.step()
        return float(loss.detach())

    return step


def batches() -> Any:
    """Windows of random words, distributed as words are."""
    generator = torch.Generator().manual_seed(1)
    weights = 1 / torch.arange(1, WORDS + 1)
    while True:
        x = torch.multinomial(
            weights, STREAMS * (LENGTH + 1), replacement=True, generator=generator
        )
        x = x.view(STREAMS, LENGTH + 1)
        yield x[:, :-1].contiguous(), x[:, 1:].contiguous()


def run(rounds: int = 30) -> list[dict[str, Any]]:
    """Steps per second, gradients of one step, losses of a hundred, and memory."""
    ours, theirs = model(), model()
    fast, slow = Stepper(ours, LR, CLIP).step, plain(theirs)
    mine, other = batches(), batches()
    (quick, _), (usual, _) = alternate(
        lambda: fast(*next(mine)), lambda: slow(*next(other)), rounds=rounds
    )
    (least, _), _ = alternate(_products(), lambda: None, rounds=10)
    gap, drift = _same_arithmetic()
    memory = _memory()
    accuracy = f"gradients to {gap:.0e}, 100 losses to {drift:.0e} (dropout 0); the three products alone {least:.2g} s"
    if memory:
        accuracy += f"; peak memory {memory[0]:.0f} against {memory[1]:.0f} MiB"
    return [
        row(f"training step, {WORDS:,} words, {STREAMS} × {LENGTH} tokens", "`joma train`",
            "plain loop: default Adam, full logits, `need_weights=True`", quick, usual, accuracy,
            gradient_gap=gap, loss_gap=drift, memory_mib=memory),
    ]  # fmt: skip


def _products() -> Any:
    """The three matrix products of the decoder that no step can do without."""
    x, weight = torch.randn(STREAMS * LENGTH, 200), torch.randn(WORDS, 200)
    logits = torch.empty(len(x), WORDS)

    def step() -> None:
        torch.mm(x, weight.T, out=logits)
        torch.mm(logits, weight)
        torch.mm(logits.T, x)

    return step


def _same_arithmetic() -> tuple[float, float]:
    ours = model(dropout=0.0)
    theirs = copy.deepcopy(ours)
    stepper = Stepper(ours, LR, CLIP)
    windows = batches()
    inputs, targets = next(windows)
    stepper.gradients(inputs, targets)
    nn.functional.cross_entropy(theirs(inputs).view(-1, WORDS), targets.flatten()).backward()
    pairs = [(a.grad, b.grad) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True)]
    scale = max(float(b.abs().max()) for _, b in pairs if b is not None)
    gap = (
        max(float((a - b).abs().max()) for a, b in pairs if a is not None and b is not None) / scale
    )
    slow = plain(theirs)
    losses = []
    for _ in range(100):
        inputs, targets = next(windows)
        losses.append(abs(stepper.step(inputs, targets) - slow(inputs, targets)))
    return gap, max(losses)


def _memory() -> tuple[float, float] | None:
    setup = """
import torch
from benchmarks.language import Stepper, batches, model, plain, LR, CLIP
windows, fresh = batches(), model()
torch.zeros(100, 100) @ torch.zeros(100, 100)
"""
    run = "step = {}\nfor _ in range(3): step(*next(windows))"
    mine = peak_memory(setup, run.format("Stepper(fresh, LR, CLIP).step"))
    other = peak_memory(setup, run.format("plain(fresh)"))
    return None if mine is None or other is None else (mine, other)
