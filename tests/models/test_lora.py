"""Matrices with low-rank updates: base + update is what is measured, and the update alone where that is asked for."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import joma
from joma.models import find
from tests.measure.watch.models import VOCABULARY, HandWrittenGPT


class Lora(nn.Module):
    """As peft builds it: names, shapes and formula of ``peft.tuners.lora.Linear``."""

    def __init__(self, base: nn.Module, rank: int = 2, scaling: float = 0.7) -> None:
        super().__init__()
        self.base_layer = base
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base.in_features, rank, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(rank, base.out_features, bias=False)})
        self.scaling = {"default": scaling}
        self.active_adapters, self.disable_adapters, self.merged = ["default"], False, False
        self.lora_magnitude_vector = nn.ModuleDict()

    def forward(self, x):
        update = self.lora_B["default"](self.lora_A["default"](x)) * self.scaling["default"]
        return self.base_layer(x) + (0 if self.disable_adapters else update)


class SeparateAttention(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.num_heads = 2
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(d, d) for _ in range(4))

    def forward(self, x):
        q, k, v = (
            f(x).unflatten(-1, (2, -1)).transpose(1, 2)
            for f in (self.q_proj, self.k_proj, self.v_proj)
        )
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(y.transpose(1, 2).flatten(2))


def build() -> nn.Module:
    torch.manual_seed(0)
    model = HandWrittenGPT(layers=2)
    for block in model.blocks:
        block.attn = SeparateAttention(16)
        block.attn.q_proj, block.mlp[0] = Lora(block.attn.q_proj), Lora(block.mlp[0])
        block.mlp[2] = Lora(block.mlp[2])
    return model.requires_grad_(True)


def acts_as(module: nn.Module) -> torch.Tensor:
    """The matrix (out, in) of a map, by what it does to unit vectors."""
    n = module.base_layer.in_features
    return (module(torch.eye(n)) - module(torch.zeros(n, n))).T.detach().double()


def stable_rank(w: torch.Tensor) -> float:
    sigma = torch.linalg.svdvals(w.double())
    return float((sigma**2).sum() / sigma[0] ** 2)


def test_the_matrix_that_acts_is_measured_and_the_update_of_its_own():
    model = build()
    gauges = (
        "stable_rank",
        "stable_rank.q",
        "stable_rank.q_update",
        "stable_rank.mlp_in_update",
        "stable_rank.mlp_out",
    )
    with joma.watch(model, every=1, gauges=gauges) as w:
        model(torch.randint(VOCABULARY, (2, 5)))
        metrics = w.step()
    assert w.matrices["mlp_in"] == ["blocks.0.mlp.0", "blocks.1.mlp.0"]
    assert w.matrices["q_update"] == ["blocks.0.attn.q (update)", "blocks.1.attn.q (update)"]
    for n, block in enumerate(model.blocks):
        q, low, high = block.attn.q_proj, block.mlp[0], block.mlp[2]
        expected = {
            "stable_rank": acts_as(low), "stable_rank.q": acts_as(q), "stable_rank.mlp_out": acts_as(high),
            "stable_rank.q_update": acts_as(q) - q.base_layer.weight.detach(),
            "stable_rank.mlp_in_update": acts_as(low) - low.base_layer.weight.detach(),
        }  # fmt: skip
        for name, matrix in expected.items():
            assert metrics[f"joma/{name}/layer_0{n}"] == pytest.approx(
                stable_rank(matrix), rel=1e-4
            ), name


def test_adapters_that_are_merged_off_or_of_dora():
    model = build()
    layer = model.blocks[0].mlp[0]
    (matrix, _) = find(model).matrices("mlp_in")
    base = layer.base_layer.weight.detach()
    layer.disable_adapters = True
    torch.testing.assert_close(matrix.read()[0], base)
    layer.disable_adapters, layer.merged = False, True
    torch.testing.assert_close(matrix.read()[0], base)
    layer.merged = False
    magnitude = nn.Module()
    magnitude.weight = nn.Parameter(torch.rand(40) + 0.5)
    layer.lora_magnitude_vector["default"] = magnitude
    rows = torch.linalg.vector_norm(matrix.read()[0], dim=1)
    torch.testing.assert_close(rows, magnitude.weight)


def test_a_model_without_adapters_has_no_update():
    with pytest.raises(
        ValueError, match=r"no matrix found for 'q_update'.*Looked for modules with base_layer"
    ):
        joma.watch(HandWrittenGPT(), gauges="stable_rank.q_update")


def test_peft_itself():
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    model = HandWrittenGPT(layers=1)
    config = peft.LoraConfig(r=2, lora_alpha=3, target_modules=["mlp.0"], init_lora_weights=False)
    adapted = peft.get_peft_model(model, config)
    (matrix,) = find(adapted).matrices("mlp_in")
    layer = model.blocks[0].mlp[0]
    torch.testing.assert_close(matrix.read()[0].double(), acts_as(layer), atol=1e-5, rtol=1e-5)
