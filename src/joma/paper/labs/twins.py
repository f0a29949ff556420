"""A joint `JoMABlock` and its folded twin, trained side by side on the same minibatches and compared."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from joma.nn import JoMABlock
from joma.paper.labs.text_block import Places

# name -> learning rate, rate of attention over it, momentum that the optimiser has, and that the block is told of
OPTIMISERS: dict[str, tuple[float, float, float, float]] = {
    "SGD": (1.0, 10.0, 0.0, 0.0),
    "momentum": (0.1, 10.0, 0.9, 0.9),
    "momentum, untold": (0.1, 10.0, 0.9, 0.0),
    "Adam": (3e-3, 1.0, 0.0, 0.0),
}


@dataclass(frozen=True)
class Fold:
    """Which attention is folded, and how."""

    attention: str
    pattern: Literal["per_query", "shared"]
    carry: Literal["weights", "parts"]

    @property
    def name(self) -> str:
        """As figures call it."""
        return f"{self.attention}, {'one pattern' if self.pattern == 'shared' else 'per query'}"

    def exact(self, optimiser: str) -> bool:
        """Whether the theory says that folded is joint."""
        if optimiser == "SGD":
            return not (self.attention == "softmax" and self.carry == "weights")
        return optimiser == "momentum" and self.carry == "weights" and self.attention != "softmax"

    def possible(self, optimiser: str) -> bool:
        """Whether the block accepts it."""
        return not (
            optimiser == "momentum" and self.carry == "weights" and self.attention == "softmax"
        )


FOLDS = (
    Fold("linear", "shared", "weights"), Fold("exp", "shared", "weights"), Fold("softmax", "shared", "weights"),
    Fold("linear", "per_query", "parts"), Fold("exp", "per_query", "parts"), Fold("softmax", "per_query", "parts"),
)  # fmt: skip


class Data(NamedTuple):
    """Places to learn from, the numbers of words, queries and targets."""

    places: Places
    words: int
    queries: int
    targets: int


def topics(
    rng: np.random.Generator, words: int = 60, queries: int = 6, classes: int = 8, count: int = 4000
) -> Data:
    """A synthetic task: the context is drawn from the class's distribution of words, the query at random."""
    share = rng.gamma(0.3, size=(classes, words))
    share /= share.sum(axis=1, keepdims=True)
    target = rng.integers(classes, size=count)
    edges = share.cumsum(axis=1)[target]
    context = (rng.random((count, 12, 1)) > edges[:, None, :-1]).sum(axis=2)
    return Data(Places(rng.integers(queries, size=count), context, target), words, queries, classes)


class Twin:
    """A block with a linear head, its optimiser, and what a step costs."""

    def __init__(
        self, block: JoMABlock, head: nn.Linear, optimiser: str, pace: float = 1.0
    ) -> None:
        lr, _, momentum, _ = OPTIMISERS[optimiser]
        lr *= pace
        self.block, self.head = block, copy.deepcopy(head)
        groups = [*block.parameter_groups(lr), {"params": list(self.head.parameters()), "lr": lr}]
        self.optimiser: torch.optim.Optimizer = (
            torch.optim.Adam(groups, lr=lr)
            if optimiser == "Adam"
            else torch.optim.SGD(groups, lr=lr, momentum=momentum)
        )
        self.seconds: list[float] = []
        self.losses: list[float] = []

    def step(self, query: Tensor, context: Tensor, target: Tensor) -> None:
        """One step of training."""
        start = time.perf_counter()
        self.optimiser.zero_grad()
        loss = nn.functional.cross_entropy(self.head(self.block(query, context)), target)
        loss.backward()
        self.optimiser.step()
        self.seconds.append(time.perf_counter() - start)
        self.losses.append(float(loss.detach()))

    def held(self) -> int:
        """Bytes of the block between two steps: parameters, gradients, buffers, and the optimiser's state."""
        tensors: list[Any] = [*self.block.buffers()]
        if self.block.carried is not None:
            tensors += self.block.carried.pending()
        for parameter in self.block.parameters():
            tensors += [parameter, parameter.grad, *self.optimiser.state[parameter].values()]
        return sum(t.numel() * t.element_size() for t in tensors if isinstance(t, Tensor))


def compare(
    fold: Fold,
    optimiser: str,
    data: Data,
    *,
    nodes: int,
    batch: int,
    steps: int,
    every: int,
    seed: int,
    pace: float = 1.0,
) -> Iterator[tuple[int, dict[str, float]]]:
    """Train both; every so many steps: how far apart they are, and what they cost. ``pace``: of the learning rates."""
    _, ratio, _, told = OPTIMISERS[optimiser]
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        joint = JoMABlock(
            data.words, nodes, queries=data.queries, attention=fold.attention, pattern=fold.pattern, ratio=ratio,
            dtype=torch.float64,
        )  # fmt: skip
        head = nn.Linear(nodes, data.targets, dtype=torch.float64)
    start = joint.logits
    one, two = (
        Twin(block, head, optimiser, pace) for block in (joint, joint.fold(fold.carry, told))
    )
    query, context, target = (torch.as_tensor(part) for part in data.places.__dict__.values())
    for step in range(1, steps + 1):
        pick = torch.randint(len(query), (batch,), generator=generator)
        for twin in (one, two) if step % 2 else (two, one):
            twin.step(query[pick], context[pick], target[pick])
        if step % every == 0 or step == steps:
            yield step, _difference(one, two, start, every)


def _difference(joint: Twin, folded: Twin, start: Tensor, last: int) -> dict[str, float]:
    z, z_folded = joint.block.logits, folded.block.logits
    way, way_folded = z - start, z_folded - start
    norms = float(way.norm()), float(way_folded.norm())
    losses = np.array(joint.losses), np.array(folded.losses)
    return {
        "gap": float((z - z_folded).abs().max()) / max(1.0, float(z.abs().max())),
        "loss_gap": float(np.abs(losses[0] - losses[1]).max()),
        "nc": float((way * way_folded).sum()) / (norms[0] * norms[1]) if min(norms) > 0 else 0.0,
        "size": norms[1] / norms[0],
        "loss_joint": float(losses[0][-last:].mean()),
        "loss_folded": float(losses[1][-last:].mean()),
        "off_descent": folded.block.off_descent,
        "seconds_joint": float(np.median(joint.seconds)),
        "seconds_folded": float(np.median(folded.seconds)),
        "bytes_joint": float(joint.held()),
        "bytes_folded": float(folded.held()),
    }
