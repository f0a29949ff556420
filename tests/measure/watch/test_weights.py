"""Weight gauges of a watch, against matrices whose singular values are known."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import joma


class Maps(nn.Module):
    """A lower and an upper map."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width, bias=False)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


def rotation(rows, columns, seed):
    generator = torch.Generator().manual_seed(seed)
    random = torch.randn(rows, columns, dtype=torch.float64, generator=generator)
    return torch.linalg.qr(random)[0]


@pytest.mark.parametrize("rate", [0.002, 0.02, 0.1])
@pytest.mark.parametrize("leading", ["flat", "spikes", "cluster"])
def test_a_singular_value_that_overtakes_the_others_is_followed(leading, rate):
    """Singular vectors keep still, so that nothing but the values shows which one is the largest."""
    width = 192
    sigma = torch.linspace(0.9, 0.2, width).double()
    if leading == "spikes":
        sigma[:4] = torch.tensor([3.0, 2.9, 2.8, 2.7])
    elif leading == "cluster":
        sigma[:6] = torch.tensor([1.0, 0.999, 0.998, 0.997, 0.996, 0.995])
    left = rotation(2 * width, width, seed=0)
    right = rotation(width, width, seed=1)
    model = Maps(width)
    expected = []
    with joma.watch(model, every=1, gauges="stable_rank,spectral_norm", mlp=["up"]) as watch:
        for step in range(14):
            values = sigma.clone()
            values[width // 2] = sigma[0] * (1 + rate * (step - 7))
            with torch.no_grad():
                model.up.weight.copy_((left * values) @ right.T)
            watch.step()
            largest = float(values.max())
            expected.append((float(values.square().sum()) / largest**2, largest))
    table = watch.frame()
    ranks = table[table.gauge == "stable_rank"].value.tolist()
    norms = table[table.gauge == "spectral_norm"].value.tolist()
    assert ranks == pytest.approx([rank for rank, _ in expected], rel=1e-6)
    assert norms == pytest.approx([norm for _, norm in expected], rel=1e-6)


def test_numbers_depend_on_the_weights_alone():
    """Whatever was measured before, the same weights have the same bits."""
    torch.manual_seed(0)
    model = Maps(192)
    first = model.up.weight.detach().clone()
    with joma.watch(model, every=1, gauges="stable_rank", mlp=["up"]) as watch:
        watch.step()
        with torch.no_grad():
            model.up.weight.normal_()
        watch.step()
        with torch.no_grad():
            model.up.weight.copy_(first)
        watch.step()
    values = watch.frame().value.tolist()
    assert values[0] == values[2] != values[1]
