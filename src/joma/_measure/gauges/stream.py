"""Gauges of the residual stream, of hidden neurons and of routers, over all real tokens of a pass."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from joma._measure.gauges.kernels import widened, widest_type
from joma._measure.gauges.rank import effective_rank
from joma._measure.gauges.registry import gauge

# A hidden neuron is active at a token if it is above this share of the RMS of its layer.
ACTIVE = 0.1


@dataclass(frozen=True, eq=False)
class Stream:
    """The residual stream after a block, and what the block wrote to it, for real tokens.

    Attributes:
        states: (n, d), after the block.
        attention: (n, d), written by attention; None if it was not seen.
        mlp: (n, d), written by the MLP; None if it was not seen.
    """

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
    if median == 0:
        return None
    return float(size.max()) / median


@gauge("attention_share", on="stream")
def attention_share(stream: Stream) -> float | None:
    """RMS of what attention writes to the residual stream, over that of the stream after the block."""
    return _share(stream.attention, stream.states, "attention")


@gauge("mlp_share", on="stream")
def mlp_share(stream: Stream) -> float | None:
    """RMS of what the MLP writes to the residual stream, over that of the stream after the block."""
    return _share(stream.mlp, stream.states, "the MLP")


@gauge("hidden_rank", on="hidden")
def hidden_rank(states: Tensor) -> float:
    """Effective rank of the representations of tokens at a layer's input: 1 where all have become one."""
    if not bool(states.isfinite().all()):
        return math.nan
    return float(effective_rank(states))


@gauge("active_neurons", on="neurons")
def active_neurons(neurons: Tensor) -> float:
    """Share of hidden neurons that are active at a token: above a tenth of the layer's RMS."""
    if not neurons.numel():
        return math.nan
    is_active = _is_active(neurons)  # (n, h)
    # Counted in integers: a seventh of the time of a mean in float64, and the same bits.
    count = int(is_active.sum(dim=-1, dtype=torch.int32).sum())
    return count / is_active.numel()


@gauge("dead_neurons", on="neurons")
def dead_neurons(neurons: Tensor) -> float:
    """Share of hidden neurons that are active at no token."""
    if not len(neurons):
        return 1.0
    is_ever_active = _is_active(neurons).amax(dim=0)  # (h,), faster than any()
    return 1.0 - int(is_ever_active.sum()) / len(is_ever_active)


@gauge("router_entropy", on="router")
def router_entropy(routing: Routing) -> float:
    """Mean entropy of the softmax over a router's logits, over that of uniform routing."""
    logits = widened(routing.logits)
    probabilities = logits.softmax(dim=-1)  # (n, experts)
    entropy = float(torch.special.entr(probabilities).sum(dim=-1).mean())
    return entropy / math.log(logits.shape[-1])


@gauge("router_load", on="router", reduce="max")
def router_load(routing: Routing) -> float:
    """Choices of the busiest expert over their mean: 1 if balanced, the number of experts if all go to one."""
    experts = routing.logits.shape[-1]
    load = torch.bincount(routing.chosen.flatten(), minlength=experts)  # (experts,)
    return float(load.max()) * experts / max(1, int(load.sum()))


def _rms(states: Tensor) -> float:
    # Squared in place: fresh memory for a second copy costs more than the arithmetic. Both gauges of
    # neurons on (1024, 1536) take 4.5 ms of processor time, and 24 ms with a second copy.
    squares = states.to(widest_type(states.device), copy=True).square_()
    return float(squares.mean().sqrt())


def _share(written: Tensor | None, states: Tensor, writer: str) -> float | None:
    if written is None:
        raise ValueError(f"what {writer} writes was not seen")
    size = _rms(states)
    if size == 0:
        return None
    return _rms(written) / size


def _is_active(neurons: Tensor) -> Tensor:
    """Return which neurons are active at which tokens, (n, h), as 0 and 1 in bytes.

    Both gauges of neurons ask for it. It is computed twice, since the same tensor may hold other
    numbers at the second call.
    """
    size = _rms(neurons)
    # An RMS that is finite has no other than finite neurons behind it: that saves a pass.
    if not math.isfinite(size) and not bool(neurons.isfinite().all()):
        raise ValueError("hidden neurons are not finite")
    return (neurons.float().abs() > ACTIVE * size).view(torch.uint8)
