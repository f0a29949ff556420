"""Gauges read the tensors they receive, and remember nothing of an earlier call.

Writing through ``.data``, NumPy or a fused optimizer does not change ``Tensor._version``, and the
identity of a tensor says nothing about its numbers. A result remembered by either would be returned
for weights that have changed since.
"""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from joma._measure.gauges.assumptions import PARTS, BlockMotion
from joma._measure.gauges.attention import attention_stats
from joma._measure.gauges.logits import logits_of
from joma._measure.gauges.registry import gauges
from joma._measure.gauges.stream import Routing, Stream

# With these numbers Eqn. 17 explains a part of the motion in both blocks.
SEED_OFFSET = 1
HEADS = 2
WIDTH = 8
BLOCK_SHAPES = {"q": (8, 8), "k": (8, 8), "v": (8, 8), "o": (8, 8), "mlp_in": (20, 8)}
QUERIES_AND_KEYS = {"q": (2, 3, 6, 8), "k": (2, 3, 6, 8), "value": (2, 3, 6, 8)}
# Kind -> the shapes of the tensors that its argument is made of.
SHAPES = {
    "attention": QUERIES_AND_KEYS,
    "keys": QUERIES_AND_KEYS,
    "stream": {"states": (30, 10), "attention": (30, 10), "mlp": (30, 10)},
    "neurons": {"neurons": (30, 40)},
    "router": {"logits": (30, 4), "chosen": (30, 2)},
    "weight": {"matrix": (40, 10)},
    "hidden": {"states": (30, 10)},
    "gradient": {"matrix": (40, 10)},
    "update": {"matrix": (40, 10)},
    "change": {"matrix": (40, 10)},
    "charge": {"balance": (3,), "drift": (3,), "residual": (3,)},
    "block": {
        **{f"before_{part}": BLOCK_SHAPES[part] for part in PARTS},
        **{f"after_{part}": BLOCK_SHAPES[part] for part in PARTS},
        "states": (12, WIDTH),
        "earlier": (20, WIDTH),
        "odd": (20, WIDTH),
        "even": (20, WIDTH),
    },
}


def make_tensors(kind, seed):
    generator = torch.Generator().manual_seed(seed + SEED_OFFSET)
    tensors = {}
    for name, shape in SHAPES[kind].items():
        if name == "chosen":
            tensors[name] = torch.randint(seed, shape, generator=generator)
        else:
            tensors[name] = seed * torch.randn(shape, generator=generator)
        if name == "matrix":
            tensors[name][:seed] = 0.0  # neurons that are correlated with none
        if name == "neurons":
            tensors[name][:, :seed] = 0.0  # dead neurons
        if name == "k" and seed == 2:
            tensors[name] *= 0.01  # no sink
    return tensors


def argument_of(kind, tensors):
    """Return what a gauge receives, made anew around these tensors, as a meter does per measurement."""
    if kind in ("attention", "keys"):
        q, k = tensors["q"], tensors["k"]
        logits = replace(logits_of(q, k), value=tensors["value"])
        if kind == "keys":
            return logits.received()
        return replace(attention_stats(q, k), logits=logits)
    if kind == "stream":
        return Stream(**tensors)
    if kind == "router":
        return Routing(**tensors)
    if kind == "charge":
        return SimpleNamespace(**tensors)
    if kind == "block":
        return BlockMotion(
            before={part: tensors[f"before_{part}"] for part in PARTS},
            after={part: tensors[f"after_{part}"] for part in PARTS},
            states=tensors["states"],
            heads=HEADS,
            earlier=tensors["earlier"],
            halves=(tensors["odd"], tensors["even"]),
        )
    (tensor,) = tensors.values()
    return tensor


def measure(gauge, tensors):
    argument = argument_of(gauge.on, tensors)
    if gauge.on in ("weight", "gradient", "update", "change"):
        value = gauge.measure(argument)
    else:
        value = gauge.function(argument)
    return torch.as_tensor(value, dtype=torch.float64).clone()


def write_through_data(tensor, new):
    tensor.data.copy_(new)


def write_through_numpy(tensor, new):
    tensor.numpy()[...] = new.numpy()


def write_through_dlpack(tensor, new):
    torch.from_dlpack(tensor).copy_(new)


@pytest.mark.parametrize("write", [write_through_data, write_through_numpy, write_through_dlpack])
@pytest.mark.parametrize("name", list(gauges()))
def test_a_tensor_changed_behind_its_version_gives_the_new_value(name, write):
    gauge = gauges()[name]
    tensors = make_tensors(gauge.on, seed=2)
    versions = {part: tensor._version for part, tensor in tensors.items()}
    old_value = measure(gauge, tensors)
    new_tensors = make_tensors(gauge.on, seed=3)
    expected = measure(gauge, new_tensors)
    assert not torch.equal(old_value, expected), "the test cannot fail: both values are equal"
    measure(gauge, tensors)
    for part, tensor in tensors.items():
        write(tensor, new_tensors[part])
    if write is not write_through_dlpack:
        assert versions == {part: tensor._version for part, tensor in tensors.items()}
    assert torch.equal(measure(gauge, tensors), expected)
