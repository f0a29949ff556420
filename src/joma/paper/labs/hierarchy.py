"""The hierarchy experiment (Section 6, Table 1): the paper's small Transformer and its training loop.

Three post-norm blocks with one causal head and no positions; the class is read off at the last position. Embeddings
have d = 1024 dimensions, MLPs 4M hidden nodes (M the vocabulary). Adam, weight decay 1e-4, 10,000 minibatches of 128.
The text says lr 1e-5, the filter with which the authors made the table 1e-4; the latter is the default.

Without noise the loop works on the distinct positions of the distinct sequences (`joma.paper.labs.distinct`): the same
steps, an order of magnitude cheaper. ``method="plain"`` is the loop that one would write, and the only one for ρ < 1.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from joma.paper.labs.distinct import Distinct, distinct_logits, find_distinct
from joma.paper.labs.hierarchy_data import Hierarchy

Method = Literal["auto", "plain", "distinct"]


class TreeBlock(nn.Module):
    """One head of causal attention and an MLP, each with a residual and a LayerNorm behind it."""

    def __init__(self, d: int, hidden: int) -> None:
        super().__init__()
        self.query = nn.Linear(d, d, bias=False)
        self.key = nn.Linear(d, d, bias=False)
        self.value = nn.Linear(d, d, bias=False)
        self.norm1, self.norm2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.lower, self.upper = nn.Linear(d, hidden), nn.Linear(hidden, d)

    def mlp(self, mixed: Tensor) -> tuple[Tensor, Tensor]:
        """Output and hidden activations, from attention plus residual."""
        normed = self.norm1(mixed)
        hidden = functional.relu(self.lower(normed))
        return self.norm2(normed + self.upper(hidden)), hidden

    def forward(self, h: Tensor) -> tuple[Tensor, Tensor]:
        """(B, T, d) -> output (B, T, d) and hidden activations (B, T, hidden)."""
        mixed = functional.scaled_dot_product_attention(
            self.query(h), self.key(h), self.value(h), is_causal=True
        )
        return self.mlp(h + mixed)


class HierarchyTransformer(nn.Module):
    """Sequences of words -> logits of classes at the last position.

    Arguments:
        M: size of the vocabulary.
        C: number of classes.
        d: embedding dimension.
        hidden: hidden nodes of an MLP, 4M by default.
        layers: number of blocks.
    """

    def __init__(
        self, M: int, C: int, d: int = 1024, hidden: int | None = None, layers: int = 3
    ) -> None:
        super().__init__()
        for name, value in {"M": M, "C": C, "d": d, "hidden": hidden, "layers": layers}.items():
            if value is not None and (
                isinstance(value, bool) or not isinstance(value, int) or value < 1
            ):
                raise ValueError(f"{name} must be a positive integer, got {value!r}")
        self.embed = nn.Embedding(M, d)
        self.blocks = nn.ModuleList(
            TreeBlock(d, 4 * M if hidden is None else hidden) for _ in range(layers)
        )
        self.classes = nn.Linear(d, C)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T) -> logits (B, C)."""
        return self.hidden(x)[0]

    def hidden(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        """(B, T) -> logits (B, C) and the hidden activations of each block, (B, T, hidden)."""
        h, activations = self.embed(x), []
        for block in self.blocks:
            h, a = block(h)
            activations.append(a)
        return self.classes(h[:, -1]), activations


@dataclass(frozen=True)
class Training:
    """How to train: the paper's values by default.

    Attributes:
        steps: minibatches.
        batch: sequences a minibatch.
        lr: Adam's rate.
        weight_decay: L2, added to the gradient as in `torch.optim.Adam`.
        method: "distinct" (needs ρ = 1), "plain", or "auto": the first where it can.
    """

    steps: int = 10_000
    batch: int = 128
    lr: float = 1e-4
    weight_decay: float = 1e-4
    method: Method = "auto"

    def __post_init__(self) -> None:
        if self.steps < 0 or self.batch < 1:
            raise ValueError(f"steps must be ≥ 0 and batch ≥ 1, got {self.steps} and {self.batch}")
        if not (self.lr > 0 and self.weight_decay >= 0):
            raise ValueError(
                f"lr must be > 0 and weight_decay ≥ 0, got {self.lr} and {self.weight_decay}"
            )
        if self.method not in ("auto", "plain", "distinct"):
            raise ValueError(f"method must be 'auto', 'plain' or 'distinct', got {self.method!r}")


class Trained(NamedTuple):
    """What training says about itself."""

    losses: list[float]  # of each minibatch, before its step
    method: str


def plain_loss(model: HierarchyTransformer, x: Tensor, labels: Tensor) -> Tensor:
    """Mean cross-entropy of a minibatch."""
    return functional.cross_entropy(model(x), labels)


def distinct_loss(model: HierarchyTransformer, distinct: Distinct, labels: Tensor) -> Tensor:
    """The same number, from the distinct positions and how often each class was drawn."""
    of_class = functional.log_softmax(distinct_logits(model, distinct), dim=1)[
        distinct.sequence
    ]  # (C, C)
    counts = torch.bincount(labels, minlength=len(of_class))
    return -(of_class.diagonal() * counts).sum() / len(labels)


def train(
    model: HierarchyTransformer,
    data: Hierarchy,
    training: Training,
    seed: int = 0,
    progress: Callable[[int], None] | None = None,
) -> Trained:
    """Train ``model`` in place. The same seed draws the same minibatches whatever the method.

    Arguments:
        progress: called with the number of steps done, every hundred.
    """
    method = training.method
    if method == "auto":
        method = "distinct" if data.rho == 1 else "plain"
    if method == "distinct" and data.rho != 1:
        raise ValueError(
            f"method 'distinct' needs data without noise, rho is {data.rho}: use 'plain' or 'auto'"
        )
    rng = np.random.default_rng((seed, 1))
    device = model.embed.weight.device
    if method == "distinct":
        distinct = find_distinct(data).to(device, model.embed.weight.dtype)
    optimiser = torch.optim.Adam(
        model.parameters(),
        lr=training.lr,
        weight_decay=training.weight_decay,
        fused=method == "distinct",
    )
    losses: list[float] = []
    for step in range(training.steps):
        labels = data.draw_labels(training.batch, rng)
        y = torch.from_numpy(labels).to(device)
        if method == "distinct":
            loss = distinct_loss(model, distinct, y)
        else:
            loss = plain_loss(model, torch.from_numpy(data.sample(labels, rng).x).to(device), y)
        losses.append(loss.item())
        if not np.isfinite(losses[-1]):
            raise FloatingPointError(
                f"the loss is {losses[-1]} at step {step}: take a smaller lr than {training.lr}"
            )
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        if progress is not None and (step + 1) % 100 == 0:
            progress(step + 1)
    return Trained(losses, method)
