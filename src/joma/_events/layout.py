"""Which axes of an attention matrix are samples, heads, queries and keys: told by the product with the values.

In p·V, keys are what is summed over. An axis of p that V does not have is an axis of queries; where there are several
(groups of heads that share keys and values have none of their own in V either), the one as long as the module's input
is that of the queries. Of the other axes one is as long as the batch, and the rest are heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from joma._events.events import Call


class Unclear(ValueError):
    """It cannot be told which axis is which, or the attention is not one that can be measured."""


@dataclass(frozen=True)
class Layout:
    """How a tensor of scores (any axes, keys last) becomes (B, H, Tq, Tk)."""

    order: tuple[int, ...]  # of the axes: samples, heads, queries, keys
    lead: tuple[int, int]  # B, H

    def __call__(self, scores: Tensor) -> Tensor:
        """(B, H, Tq, Tk)"""
        moved = scores if self.order == tuple(range(scores.dim())) else scores.permute(self.order)
        return moved.reshape(*self.lead, *moved.shape[-2:])


@dataclass(frozen=True, eq=False)
class Product:
    """A product of two activations, as `torch.einsum` or as matrices."""

    operands: tuple[Tensor, ...]
    labels: tuple[str, ...] | None  # of the operands' axes, and of the output's; None for a product of matrices
    output: Tensor

    @classmethod
    def of(cls, function: Any, output: Any, args: tuple[Any, ...]) -> Product | None:
        """What a function that multiplies was given; None if that is not two tensors."""
        flat = args[1] if len(args) == 2 and isinstance(args[1], (list, tuple)) else args
        tensors = tuple(a for a in (args[:1] if flat is not args else ()) + tuple(flat) if isinstance(a, Tensor))
        if function in (torch.baddbmm, Tensor.baddbmm):
            tensors = tensors[1:]
        if len(tensors) != 2 or min(t.dim() for t in tensors) < 2 or not isinstance(output, Tensor):
            return None
        if function is not torch.einsum:
            return cls(tensors, None, output)
        return cls(tensors, _labels(args[0], tensors, output), output) if isinstance(args[0], str) else None

    def weights(self) -> list[tuple[Tensor, Tensor, tuple[int, ...]]]:
        """Operands that may be attention (keys, the last axis, are summed over), the other one, and the axes that the
        other one does not have."""
        a, b = self.operands
        if self.labels is None:
            return [(a, b, (a.dim() - 2,))]
        *given, out = self.labels
        candidates = []
        for n, (labels, others) in enumerate(zip(given, reversed(given), strict=True)):
            summed = [label for label in labels if label in others and label not in out]
            if summed == [labels[-1]]:
                alone = tuple(axis for axis, label in enumerate(labels) if label not in others)
                candidates.append((self.operands[n], self.operands[1 - n], alone))
        return candidates


def _labels(equation: str, operands: tuple[Tensor, ...], output: Tensor) -> tuple[str, ...] | None:
    """One letter per axis of the operands and of the output; digits stand for what "..." does."""
    left, arrow, right = equation.replace(" ", "").partition("->")
    given = left.split(",")
    if not arrow or len(given) != len(operands):
        return None
    sides = []
    for text, tensor in zip((*given, right), (*operands, output), strict=True):
        hidden = tensor.dim() - len(text.replace("...", ""))
        sides.append(text.replace("...", "".join(chr(0x2460 + n) for n in reversed(range(hidden)))))
    return tuple(sides)


def layout_of(scores: Tensor, query_axes: tuple[int, ...], call: Call) -> Layout:
    """The layout of scores (keys last) whose queries are along one of ``query_axes``."""
    last = scores.dim() - 1
    if len(query_axes) != 1:
        tokens = _tokens(call, scores.shape[:-1])
        fitting = [axis for axis in query_axes if scores.shape[axis] in tokens]
        if len(fitting) != 1:
            raise Unclear(f"it cannot be told which axis of its scores {tuple(scores.shape)} is that of the queries")
        query_axes = (fitting[0],)
    (query,) = query_axes
    others = [axis for axis in range(last) if axis != query]
    sizes = [scores.shape[axis] for axis in others]
    Tq, Tk = scores.shape[query], scores.shape[last]
    if len(others) == 1:
        lead = batch_and_heads(call, sizes[0], Tq)
    else:
        batch = _batch(call, Tq)
        first = sizes.index(batch) if batch in sizes else 0
        others = [*others[first : first + 1], *others[:first], *others[first + 1 :]]
        lead = (scores.shape[others[0]] if others else 1, prod(scores.shape[axis] for axis in others[1:]))
    check_queries(call, (*sizes, Tq), lead[1], Tk, pieces=len(others) > 2)
    return Layout((*others, query, last), lead)


def check_queries(call: Call, sizes: tuple[int, ...], H: int, Tk: int, *, pieces: bool) -> None:
    """Refuse attention over heads instead of tokens, and over windows of a sequence that would count as heads.

    ``sizes`` are those of the axes of the scores but for keys, that of the queries last.
    """
    tokens, Tq = _tokens(call, sizes), sizes[-1]
    if not tokens or Tq in tokens:
        return
    if H in tokens and Tq == Tk:
        raise Unclear(f"it attends over {Tq} heads at each of {H} tokens, not over tokens: are two axes swapped?")
    if pieces:
        raise Unclear(f"it attends in blocks: {Tq} queries at a time, of {tokens[0]} tokens")


def _tokens(call: Call, sizes: Sequence[int]) -> tuple[int, ...]:
    """How many tokens the module was given, (B, T, d), or (T, B, d) if an axis fits that batch; () if unknown."""
    states = call.states
    if states is None or states.dim() != 3:
        return ()
    B, T = states.shape[:2]
    return (T, B) if T != B and any(size % T == 0 for size in sizes if size != B) else (T,)


def in_pieces(call: Call, Tq: int) -> bool:
    """Are these fewer queries than the module has tokens?"""
    states = call.states
    return states is not None and states.dim() == 3 and Tq not in states.shape[:2] and Tq < states.shape[1]


def _batch(call: Call, Tq: int) -> int | None:
    states = call.states
    if states is None or states.dim() != 3:
        return None
    return states.shape[1] if states.shape[0] == Tq != states.shape[1] else states.shape[0]


def batch_and_heads(call: Call, N: int, Tq: int) -> tuple[int, int]:
    """(batch, heads) of a merged leading dimension of N, from what the module was given."""
    states = call.states
    if states is not None and states.dim() == 3:
        for axis in (0, 1):
            if states.shape[1 - axis] == Tq and N % states.shape[axis] == 0:
                return states.shape[axis], N // states.shape[axis]
    return N, 1
