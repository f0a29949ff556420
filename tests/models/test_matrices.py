"""Where the matrices of a family are: against the family's own code, run or read."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from joma.models import find

transformers = pytest.importorskip("transformers")
D, H, HD = 32, 4, 8
SMALL = {
    "hidden_size": D,
    "num_hidden_layers": 2,
    "num_attention_heads": H,
    "vocab_size": 40,
    "pad_token_id": 0,
}


def names(model, part="mlp_in"):
    return [matrix.name for matrix in find(model).matrices(part)]


def test_gate_and_up_take_turns_in_the_experts_of_gpt_oss():
    config = transformers.GptOssConfig(
        **SMALL,
        intermediate_size=24,
        num_local_experts=3,
        num_key_value_heads=2,
        head_dim=HD,
        num_experts_per_tok=1,
    )
    experts = transformers.GptOssModel(config).layers[1].mlp.experts
    holder = nn.Module()
    holder.experts = experts
    with torch.no_grad():
        for p in experts.parameters():
            p.normal_()
        x = torch.randn(5, D)
        product = x @ experts.gate_up_proj[2]
        seen = []
        original = torch.sigmoid

        def sigmoid(value):  # what the family's own code puts under its activation
            seen.append(value / experts.alpha)
            return original(value)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch, "sigmoid", sigmoid)
            experts.limit = 1e9
            experts._apply_gate(product)
        lower = find(holder).matrices("mlp_in")[2].read()[0]  # (d, h)
        upper = find(holder).matrices("mlp_out")[2].read()[0]
    torch.testing.assert_close(x @ lower, seen[0])
    assert torch.equal(upper, experts.down_proj[2])


def test_dense_layers_and_shared_experts_stand_beside_stacks_of_experts_in_order():
    config = transformers.Qwen2MoeConfig(
        **SMALL, intermediate_size=48, moe_intermediate_size=24, shared_expert_intermediate_size=40, num_experts=3,
        num_key_value_heads=2, mlp_only_layers=[0],
    )  # fmt: skip
    model = transformers.Qwen2MoeModel(config)
    assert names(model) == [
        "layers.0.mlp.gate_proj",
        *(f"layers.1.mlp.experts.gate_up_proj[{e}]" for e in range(3)),
        "layers.1.mlp.shared_expert.gate_proj",
    ]
    assert names(model, "mlp_out")[-1] == "layers.1.mlp.shared_expert.down_proj"
    config = transformers.DeepseekV3Config(
        **SMALL, intermediate_size=48, moe_intermediate_size=24, n_routed_experts=4, n_group=2, topk_group=1,
        num_experts_per_tok=2, first_k_dense_replace=1, q_lora_rank=8, kv_lora_rank=8, qk_rope_head_dim=4, v_head_dim=8,
        qk_nope_head_dim=8, num_key_value_heads=H,
    )  # fmt: skip
    found = names(transformers.DeepseekV3Model(config))
    assert found[0] == "layers.0.mlp.gate_proj"
    assert found[-1] == "layers.1.mlp.shared_experts.gate_proj"
    assert len(found) == 6


class Swiglu(nn.Module):
    def __init__(self, d, h):
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = (
            nn.Linear(d, h),
            nn.Linear(d, h),
            nn.Linear(h, d),
        )


def test_a_shared_expert_beside_experts_that_are_modules():
    layer = nn.Module()
    layer.experts = nn.ModuleList(Swiglu(8, 12) for _ in range(2))
    layer.gate, layer.shared_expert = nn.Linear(8, 2), Swiglu(8, 20)
    model = nn.Module()
    model.layers = nn.ModuleList([layer])
    assert names(model) == [
        "layers.0.experts.0.gate_proj", "layers.0.experts.1.gate_proj", "layers.0.shared_expert.gate_proj"
    ]  # fmt: skip


@pytest.mark.parametrize("h", [8, 12])  # square stacks too
def test_of_three_stacks_the_gate_is_the_lower(h):
    model = nn.Module()
    model.experts = nn.Module()
    for key, shape in {"gate": (h, 8), "up": (h, 8), "down": (8, h)}.items():
        model.experts.register_parameter(key, nn.Parameter(torch.randn(3, *shape)))
    assert names(model) == [f"experts.gate[{e}]" for e in range(3)]
    assert names(model, "mlp_out") == [f"experts.down[{e}]" for e in range(3)]
    assert torch.equal(find(model).matrices("mlp_in")[1].read()[0], model.experts.gate[1])


def falcon(**changes):
    config = transformers.FalconConfig(**SMALL, **changes)
    attention = transformers.FalconModel(config).h[0].self_attention

    def split(x):
        q, k, v = attention._split_heads(attention.query_key_value(x))  # (1, T, H, size)
        each = (
            H // attention.num_kv_heads if attention.new_decoder_architecture else 1
        )  # there keys are repeated
        return q, k[:, :, ::each], v[:, :, ::each]

    return attention, split


def codegen():
    config = transformers.CodeGenConfig(
        n_embd=64, n_layer=1, n_head=8, rotary_dim=4, vocab_size=40, n_inner=48
    )
    attention = transformers.CodeGenModel(config).h[0].attn

    def split(x):  # as in its forward
        qkv = attention.qkv_proj(x)
        q, v, k = qkv.reshape((*qkv.shape[:-1], 4, -1)).split(attention.head_dim * 8 // 4, dim=-1)
        return [attention._split_heads(part, 8, attention.head_dim, mp_num=4) for part in (q, k, v)]

    return attention, split


def deberta():
    config = transformers.DebertaConfig(
        **SMALL, intermediate_size=48, relative_attention=False, pos_att_type=[]
    )
    attention = transformers.DebertaModel(config).encoder.layer[0].attention.self

    def split(x):
        parts = attention.transpose_for_scores(attention.in_proj(x)).chunk(
            3, dim=-1
        )  # (1, H, T, size)
        return [part.transpose(1, 2) for part in parts]

    return attention, split


def bigcode(multi_query):
    config = transformers.GPTBigCodeConfig(
        n_embd=D, n_layer=1, n_head=H, vocab_size=40, n_inner=48, multi_query=multi_query
    )
    attention = transformers.GPTBigCodeModel(config).h[0].attn

    def split(x):
        if multi_query:
            q, k, v = attention.c_attn(x).split((D, HD, HD), dim=-1)
            return q.unflatten(-1, (H, HD)), k[:, :, None], v[:, :, None]
        parts = (
            attention.c_attn(x).view(*x.shape[:2], H, 3 * HD).transpose(1, 2).split(3 * [HD], dim=3)
        )
        return [part.transpose(1, 2) for part in parts]

    return attention, split


def bloom():
    attention = (
        transformers.BloomModel(transformers.BloomConfig(**SMALL, n_head=H)).h[0].self_attention
    )
    return attention, lambda x: [
        p.transpose(1, 2) for p in attention._reshape(attention.query_key_value(x))
    ]


FUSED = {
    "falcon of groups": lambda: falcon(new_decoder_architecture=True, num_kv_heads=2),
    "falcon-7b": lambda: falcon(multi_query=True),
    "falcon of heads": lambda: falcon(multi_query=False),
    "codegen": codegen,
    "deberta": deberta,
    "bigcode": lambda: bigcode(False),
    "bigcode, multi-query": lambda: bigcode(True),
    "bloom": bloom,
}


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # of transformers
@pytest.mark.parametrize("family", FUSED)
def test_fused_projections_are_split_as_the_familys_own_code_splits_them(family):
    torch.manual_seed(0)
    attention, split = FUSED[family]()
    with torch.no_grad():
        for p in attention.parameters():
            p.normal_() if p.dim() > 1 else p.zero_()
        x = torch.randn(
            1,
            5,
            attention.in_proj.in_features
            if family == "deberta"
            else 64
            if family == "codegen"
            else D,
        )
        for part, expected in zip("qkv", split(x), strict=True):
            (matrix,) = find(attention).matrices(part)
            w = matrix.read()[0]
            torch.testing.assert_close(x @ w.T, expected.flatten(2), msg=f"{family} {part}")
        q, k, _ = split(x)
        products = torch.stack(find(attention).matrices("qk")[0].read())
        heads, groups = q.shape[2], q.shape[2] // k.shape[2]
        (wq,), (wk,) = (find(attention).matrices(part)[0].read() for part in "qk")
        for head in range(heads):
            a, b = (
                wq.unflatten(0, (heads, -1))[head],
                wk.unflatten(0, (k.shape[2], -1))[head // groups],
            )
            largest = torch.linalg.matrix_norm(a.T @ b, 2)
            torch.testing.assert_close(
                torch.linalg.matrix_norm(products[head], 2), largest, rtol=1e-4, atol=1e-4
            )


def test_multihead_attention_with_three_weights_and_one_bias():
    attention = nn.MultiheadAttention(24, 3, kdim=10, vdim=8).requires_grad_(False)
    nn.init.normal_(attention.in_proj_bias)
    structure = find(nn.ModuleDict({"attention": attention}))
    for part in "qkv":
        (matrix,) = structure.matrices(part)
        assert matrix.name == f"attention.{part}"
        assert torch.equal(matrix.read()[0], getattr(attention, f"{part}_proj_weight"))
    (found,) = structure.attentions
    assert torch.equal(found.key.bias, attention.in_proj_bias[24:48])
    (products,) = structure.matrices("qk")
    expected = attention.q_proj_weight[:8].T @ attention.k_proj_weight[:8]  # of the first head
    exact = torch.linalg.svdvals(expected.double())
    assert torch.linalg.svdvals(products.read()[0].double()) == pytest.approx(exact[:8], rel=1e-5)
