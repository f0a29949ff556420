"""Gauges of the residual stream, of hidden neurons and of routers, over all real tokens of the passes measured."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from joma._measure.gauges.kernels import widened
from joma._measure.gauges.rank import effective_rank
from joma._measure.gauges.registry import gauge

ACTIVE = 0.1  # of the layer's RMS: a hidden neuron above this is active at a token


@dataclass(frozen=True, eq=False)
class Stream:
    """The residual stream of real tokens after a block, (n, d), and what attention and the MLP have written to it."""

    states: Tensor = field(repr=False)
    attention: Tensor | None = field(default=None, repr=False)
    mlp: Tensor | None = field(default=None, repr=False)


@dataclass(frozen=True, eq=False)
class Routing:
    """A router's logits (n, experts) for real tokens, and the experts chosen (n, k)."""

    logits: Tensor = field(repr=False)
    chosen: Tensor = field(repr=False)


@gauge("stream_rms", on="stream")
def stream_rms(stream: Stream) -> float:
    """Root mean square of the residual stream after the block, over all tokens."""
    return _rms(stream.states)


@gauge("massive_activation", on="stream", reduce="max")
def massive_activation(stream: Stream) -> float | None:
    """Largest entry of the residual stream over the median, by size: some thousand where activations are massive."""
    size = stream.states.float().abs()
    median = float(size.median())
    return None if median == 0 else float(size.max()) / median


@gauge("attention_share", on="stream")
def attention_share(stream: Stream) -> float | None:
    """RMS of what attention writes to the residual stream, over that of the stream after the block."""
    return _written(stream.attention, stream.states, "attention")


@gauge("mlp_share", on="stream")
def mlp_share(stream: Stream) -> float | None:
    """RMS of what the MLP writes to the residual stream, over that of the stream after the block."""
    return _written(stream.mlp, stream.states, "the MLP")


@gauge("hidden_rank", on="hidden")
def hidden_rank(states: Tensor) -> float:
    """Effective rank of the representations of tokens at a layer's input: 1 where all have become one."""
    return float(effective_rank(states)) if bool(states.isfinite().all()) else math.nan


@gauge("active_neurons", on="neurons")
def active_neurons(neurons: Tensor) -> float:
    """Share of hidden neurons that are active at a token: above a tenth of the layer's RMS."""
    return float(_active(neurons).double().mean())


@gauge("dead_neurons", on="neurons")
def dead_neurons(neurons: Tensor) -> float:
    """Share of hidden neurons that are active at no token."""
    return 1.0 - float(_active(neurons).any(dim=0).double().mean())


@gauge("router_entropy", on="router")
def router_entropy(routing: Routing) -> float:
    """Mean entropy of the softmax over a router's logits, over that of uniform routing."""
    logits = widened(routing.logits)
    p = logits.softmax(dim=-1)
    return float(torch.special.entr(p).sum(dim=-1).mean()) / math.log(logits.shape[-1])


@gauge("router_load", on="router", reduce="max")
def router_load(routing: Routing) -> float:
    """Choices of the busiest expert over their mean: 1 if balanced, the number of experts if all go to one."""
    experts = routing.logits.shape[-1]
    load = torch.bincount(routing.chosen.flatten(), minlength=experts)
    return float(load.max()) * experts / max(1, int(load.sum()))


def _rms(x: Tensor) -> float:
    return float(widened(x).square().mean().sqrt())


def _written(part: Tensor | None, states: Tensor, who: str) -> float | None:
    if part is None:
        raise ValueError(f"what {who} writes was not seen")
    size = _rms(states)
    return None if size == 0 else _rms(part) / size


def _active(neurons: Tensor) -> Tensor:
    """Which neurons are active at which tokens (n, h); an error if that cannot be said."""
    if not bool(neurons.isfinite().all()):
        raise ValueError("hidden neurons are not finite")
    return neurons.float().abs() > ACTIVE * _rms(neurons)
