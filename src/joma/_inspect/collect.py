"""The strongest contexts of every neuron, in one pass over a corpus and a bounded memory.

A window of the corpus counts once per neuron: at its strongest token that sees at least ``LEAST`` tokens. Contexts
whose last ``LEAST`` tokens are equal (text that is repeated word by word) count once: the strongest of them. What is
kept is exactly the k strongest distinct contexts: one that is pushed out is no stronger than the k that stay, and these
only get stronger.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress

import torch
from torch import Tensor, nn

from joma._data.pretrained import check_tokens
from joma._inspect.seen import Neurons, Rows
from joma._measure.events.source import EventSource, PassComplete

LEAST = 8  # tokens that a query sees at least, itself included; so many decide whether two contexts are the same


class Strongest:
    """The k strongest contexts of h neurons; slots are in no order, and empty where ``value`` is −inf.

    Attributes:
        value: (h, k) activation of the query.
        query: (h, k) its place in the window.
        position: (h, k) its place in the corpus.
        tokens: (h, k, T) of the window, −1 after its end.
        mass: (h, k, T) attention of the query, the mean over heads.
        along: (h, k, T) activation of the neuron along the window.
    """

    def __init__(self, h: int, k: int, T: int, device: torch.device) -> None:
        self.value = torch.full((h, k), -math.inf, device=device)
        self._key = torch.zeros(h, k, dtype=torch.int64, device=device)
        self.query = torch.zeros(h, k, dtype=torch.int32, device=device)
        self.position = torch.full((h, k), -1, dtype=torch.int64, device=device)
        self.tokens = torch.full((h, k, T), -1, dtype=torch.int32, device=device)
        self.mass = torch.zeros(h, k, T, dtype=torch.float16, device=device)
        self.along = torch.zeros(h, k, T, dtype=torch.float16, device=device)

    def bytes(self) -> int:
        """How much memory the contexts take; it does not change."""
        return sum(x.numel() * x.element_size() for x in vars(self).values())

    def add(
        self, activations: Tensor, tokens: Tensor, keys: Tensor, start: Tensor, rows: Rows
    ) -> None:
        """Take in windows: activations (B, T, h), tokens and keys (B, T), first position in the corpus (B,)."""
        k, T = self.value.shape[1], tokens.shape[1]
        peak, at = activations[:, LEAST - 1 :].max(dim=1)  # (B, h)
        peak, at = peak.float(), at + (LEAST - 1)
        peak = peak.masked_fill(~peak.isfinite(), -math.inf)
        n = (peak > self.value.amin(dim=1)).any(dim=0).nonzero()[:, 0]  # neurons that change
        if not len(n):
            return
        value = torch.cat([self.value[n], peak[:, n].T], dim=1)  # (n, k + B)
        key = torch.cat([self._key[n], keys.gather(1, at[:, n]).T], dim=1)
        chosen = _strongest_distinct(value, key, k)
        kept, enter = chosen[:, :k], chosen[:, k:]  # (n, k), (n, B)
        self.value[n] = self.value[n].masked_fill(~kept, -math.inf)
        i, b = enter.nonzero(as_tuple=True)
        free = kept.int().argsort(dim=1, stable=True)  # slots that are free come first
        slot = free[i, enter.int().cumsum(dim=1)[i, b] - 1]
        t, i = at[b, n[i]], n[i]
        self.value[i, slot], self._key[i, slot] = peak[b, i], keys[b, t]
        self.query[i, slot], self.position[i, slot] = t.int(), start[b] + t
        self.tokens[i, slot, :T] = tokens[b].int()
        self.tokens[i, slot, T:] = -1
        self.mass[i, slot] = 0.0
        self.along[i, slot] = 0.0
        self.along[i, slot, :T] = activations[b, :, i].clamp(-6e4, 6e4).half()
        for window in b.unique():
            entries = (b == window).nonzero()[:, 0]
            queries, which = t[entries].unique(return_inverse=True)
            mass = rows(int(window), queries)[:, :T].half()
            self.mass[i[entries], slot[entries], :T] = mass[which]


def _strongest_distinct(value: Tensor, key: Tensor, k: int) -> Tensor:
    """Which of the columns of value (n, m) are the k largest finite ones with different keys: bool (n, m)."""
    order = value.sort(dim=1, descending=True, stable=True)
    by_key = key.gather(1, order.indices).sort(dim=1, stable=True)
    repeated = torch.zeros_like(value, dtype=torch.bool)
    repeated[:, 1:] = by_key.values[:, 1:] == by_key.values[:, :-1]
    repeated = torch.zeros_like(repeated).scatter(
        1, by_key.indices, repeated
    )  # in the order of values
    good = ~repeated & order.values.isfinite()
    good &= good.int().cumsum(dim=1) <= k
    return torch.zeros_like(good).scatter(1, order.indices, good)


def context_keys(tokens: Tensor) -> Tensor:
    """A number (B, T) for the last ``LEAST`` tokens at each place: equal for equal ones, by chance 2⁻⁶⁴ for others."""
    generator = torch.Generator().manual_seed(0)
    factors = torch.randint(-(2**62), 2**62, (LEAST,), generator=generator) * 2 + 1
    padded = torch.nn.functional.pad(tokens.long() + 1, (LEAST - 1, 0))
    return (padded.unfold(1, LEAST, 1) * factors.to(tokens.device)).sum(
        dim=-1
    )  # wraps around, as meant


def collect(
    model: nn.Module, batches: Iterable[Tensor], neurons: Mapping[int, Tensor | None] | None, k: int, T: int,
    done: Callable[[int], None] = lambda tokens: None, start: int = 0,
) -> dict[int, Strongest]:  # fmt: skip
    """Run the model over all batches of windows (B, ≤ T) and keep the k strongest contexts of each neuron.

    A pass ends with the last layer that is wanted: what comes after it runs once, in the first pass.

    Arguments:
        model: called with the tokens as its only argument; without its head, which is not needed.
        batches: windows of consecutive tokens, all of a batch of the same length.
        neurons: layer -> which of its neurons (n,), None for all of them; None for all layers.
        k: contexts per neuron.
        T: the longest window.
        done: called with the number of tokens after each batch.
        start: the place in the corpus where the first batch begins.
    """
    device = next(model.parameters()).device
    strongest: dict[int, Strongest] = {}
    windows: dict[str, Tensor] = {}  # of the batch that is running
    calls: Counter[int] = Counter()  # of each layer's MLP in the first pass

    def on_neurons(layer: int, activations: Tensor, rows: Rows) -> None:
        if neurons is not None:
            calls[layer] += 1
            if layer not in neurons:
                return
            chosen = neurons[layer]
            activations = activations if chosen is None else activations[..., chosen]
        if layer not in strongest:
            strongest[layer] = Strongest(activations.shape[2], k, T, device)
        strongest[layer].add(
            activations, windows["tokens"], windows["keys"], windows["start"], rows
        )

    source = EventSource(model, [Neurons(on_neurons)])
    count = start
    training = model.training
    model.eval()
    try:
        # Not inference mode: there the operations inside nn.MultiheadAttention cannot be observed.
        with torch.no_grad(), source.listening():
            for tokens in batches:
                B, length = tokens.shape
                check_tokens(model, tokens)
                tokens = tokens.to(device)
                first = count + length * torch.arange(B, device=device)
                windows |= {"tokens": tokens, "keys": context_keys(tokens), "start": first}
                with suppress(PassComplete):
                    model(tokens)
                source.raise_problems()
                last = max(neurons or (), default=None)
                if (
                    last is not None and calls[last] == 1
                ):  # not in ALBERT, whose layers share one MLP
                    source.until = last
                count += B * length
                done(count)
    finally:
        model.train(training)
    return dict(sorted(strongest.items()))
