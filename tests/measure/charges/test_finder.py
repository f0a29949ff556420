"""Of models with experts, gates and several kinds of mixers, nothing is claimed that gradients deny."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from joma._measure.charges.charge import Status, gradient_of
from joma._measure.charges.table import charges

transformers = pytest.importorskip("transformers")

SMALL = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 40,
    "pad_token_id": 0,
}


def qwen_moe():
    config = transformers.Qwen2MoeConfig(
        **SMALL,
        moe_intermediate_size=12,
        shared_expert_intermediate_size=20,
        num_experts=3,
        num_experts_per_tok=2,
    )
    return transformers.Qwen2MoeForCausalLM(config)


def mixtral():
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**SMALL, num_local_experts=3))


def gated_attention():
    config = transformers.AfmoeConfig(
        **SMALL,
        head_dim=4,
        moe_intermediate_size=12,
        num_experts=4,
        num_experts_per_tok=2,
        num_dense_layers=1,
    )
    return transformers.AfmoeForCausalLM(config)


@pytest.mark.parametrize("build", [qwen_moe, mixtral, gated_attention])
@pytest.mark.parametrize("norm", [None, "pre"])
def test_exact_charges_have_no_residual(build, norm):
    torch.manual_seed(0)
    model = build().train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    tokens = torch.randint(1, 40, (4, 12))
    model(input_ids=tokens, labels=tokens).loss.backward()
    exact = [charge for charge in charges(model, norm=norm) if charge.status is Status.EXACT]
    assert exact
    for charge in exact:
        # Experts multiply in float32 only; a wrong claim has a residual of 1e-2 here.
        assert float(charge.residual(gradient_of).max()) < 1e-5, charge.name


def test_the_mlp_of_a_layer_is_not_the_gate_of_its_attention():
    names = [charge.name for charge in charges(gated_attention()) if charge.kind == "mlp"]
    assert names == ["model.layers.0.mlp.neurons", "model.layers.1.mlp.shared_experts.neurons"]


def test_a_norm_that_experts_read_is_not_held_against_one_of_them():
    norms = [charge for charge in charges(mixtral(), norm="pre") if charge.kind == "norm"]
    reasons = {charge.name.split(".")[-2]: charge.reason for charge in norms}
    assert reasons["post_attention_layernorm"] == "experts and their router read it as well"


class CrossAttention(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.attention = nn.MultiheadAttention(24, 3, batch_first=True, **options)
        for parameter in self.attention.parameters():
            if parameter.dim() == 1:  # biases, which begin at zero
                nn.init.normal_(parameter)

    def forward(self, queries, keys, values):
        return self.attention(queries, keys, values)[0]


NOT_OF_BIAS_KV = {"qk", "key_bias", "vo"}


@pytest.mark.parametrize(
    ("options", "refused"),
    [
        ({}, set()),
        ({"kdim": 10, "vdim": 8}, set()),
        ({"add_zero_attn": True}, {"key_bias"}),
        ({"add_bias_kv": True}, NOT_OF_BIAS_KV),
        ({"kdim": 10, "vdim": 8, "add_bias_kv": True}, NOT_OF_BIAS_KV),
    ],
)
def test_multihead_attention_with_other_keys(options, refused):
    torch.manual_seed(0)
    model = CrossAttention(**options).double()
    queries = torch.randn(4, 6, 24).double()
    keys = torch.randn(4, 7, options.get("kdim", 24)).double()
    values = torch.randn(4, 7, options.get("vdim", 24)).double()
    found = charges(model)
    (model(queries, keys, values) * torch.randn(4, 6, 24).double()).sum().backward()
    status = {charge.kind: charge.status for charge in found}
    for kind in NOT_OF_BIAS_KV:
        expected = Status.NONE if kind in refused else Status.EXACT
        assert status[kind] is expected, kind
    for charge in found:
        if charge.status is Status.EXACT:
            # A wrong claim has a residual of 1e-3 and more.
            assert float(charge.residual(gradient_of).max()) < 1e-12, charge.name
