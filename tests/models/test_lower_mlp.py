"""The lower MLP matrix is never inside attention, a pooler, a router or a position bias."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from joma.models import find

D, H = 16, 40


def names(model: nn.Module, part: str = "mlp_in") -> list[str]:
    return [matrix.name for matrix in find(model).matrices(part)]


def holder(**children: nn.Module) -> nn.Module:
    module = nn.Module()
    for name, child in children.items():
        module.add_module(name, child)
    return module


def square(*names: str) -> dict[str, nn.Module]:
    return {name: nn.Linear(D, D) for name in names}


class Attention(nn.Module):
    """As in x-transformers and vit-pytorch: an element of a list."""

    def __init__(self, inner: int = D) -> None:
        super().__init__()
        self.to_q, self.to_k, self.to_v = (nn.Linear(D, inner, bias=False) for _ in range(3))
        self.to_out = nn.Linear(inner, D, bias=False)


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ff = nn.Sequential(
            nn.Sequential(nn.Linear(D, H), nn.GELU()), nn.Dropout(0.0), nn.Linear(H, D)
        )


@pytest.mark.parametrize("inner", [D, 2 * D])
def test_layers_that_alternate_attention_and_feed_forward_in_one_list(inner):
    layers = nn.ModuleList(
        nn.ModuleList([nn.LayerNorm(D), layer, nn.Identity()])
        for layer in (Attention(inner), FeedForward(), Attention(inner), FeedForward())
    )
    model = holder(attn_layers=holder(layers=layers))
    assert names(model) == ["attn_layers.layers.1.1.ff.0.0", "attn_layers.layers.3.1.ff.0.0"]
    assert names(model, "mlp_out") == ["attn_layers.layers.1.1.ff.2", "attn_layers.layers.3.1.ff.2"]


ATTENTIONS = {
    "XLM": square("q_lin", "k_lin", "v_lin", "out_lin"),
    "to": {**square("to_q", "to_out"), "to_kv": nn.Linear(D, 2 * D)},
    "fused": {"query_key_value": nn.Linear(D, 3 * D), **square("dense", "dense_gate")},
    "Wqkv": {"Wqkv": nn.Linear(D, 3 * D), "out_proj": nn.Linear(D, D), "gate": nn.Linear(D, D)},
    "c_attn": {"c_attn": nn.Linear(D, 3 * D), **square("c_proj", "c_gate")},
    "Funnel": square("q_head", "k_head", "v_head", "post_proj"),
    "words": square("query_layer", "key_layer", "value_layer", "output_layer"),
    "wide": {
        "wq": nn.Linear(D, H), "wk": nn.Linear(D, H), "wv": nn.Linear(D, H), "wo": nn.Linear(H, D),
    },
    "LeViT": {"queries_keys_values": nn.Linear(D, 4 * D), "projection": nn.Linear(2 * D, D)},
    "wrapped output": {**square("to_q", "to_k", "to_v"), "to_out": nn.Sequential(nn.Linear(D, D))},
}  # fmt: skip


@pytest.mark.parametrize("style", ATTENTIONS)
def test_a_list_of_attention_modules_has_no_mlp(style):
    def blocks() -> nn.ModuleList:
        return nn.ModuleList(holder(**ATTENTIONS[style]) for _ in range(2))

    assert names(holder(layers=blocks())) == []
    ffns = nn.ModuleList(holder(lin1=nn.Linear(D, H), lin2=nn.Linear(H, D)) for _ in range(2))
    assert names(holder(mixers=blocks(), ffns=ffns)) == ["ffns.0.lin1", "ffns.1.lin1"]
    inside = nn.ModuleList(
        holder(**ATTENTIONS[style], fc1=nn.Linear(D, D), fc2=nn.Linear(D, D)) for _ in range(2)
    )
    assert names(holder(layers=inside)) == ["layers.0.fc1", "layers.1.fc1"]


def block(**more: nn.Module) -> nn.Module:
    return holder(attn=holder(**square("q_proj", "k_proj", "v_proj", "o_proj")), **more)


def mlp(d: int = D, h: int = H) -> nn.Sequential:
    return nn.Sequential(nn.Linear(d, h), nn.GELU(), nn.Linear(h, d))


@pytest.mark.parametrize(
    "other",
    [
        "pooler", "attention_pool", "router", "gate.router_mlp", "rel_pos_bias", "cpb_mlp", "pos_mlp",
        "position_bias_net", "adapter", "bbox_embed", "squeeze_excitation", "timestep_embedder",
    ],
)  # fmt: skip
def test_other_maps_of_the_same_shape_are_no_lower_mlp(other):
    wide = mlp(h=4 * H)  # wider than the MLP itself
    first, _, rest = other.partition(".")
    inside = block(**{first: holder(**{rest: wide}) if rest else wide}, mlp=mlp())
    assert names(holder(layers=nn.ModuleList([inside]))) == ["layers.0.mlp.0"]
    alone = block(**{first: holder(**{rest: mlp()}) if rest else mlp()})
    assert names(holder(layers=nn.ModuleList([alone]))) == []
    assert names(holder(layers=nn.ModuleList([block(mlp=mlp())]), **{first: wide})) == [
        "layers.0.mlp.0"
    ]


class ConditionalPositionBias(nn.Module):
    """Swin v2: a bias of as many heads as there are coordinates."""

    def __init__(self) -> None:
        super().__init__()
        self.cpb_mlp = nn.Sequential(nn.Linear(2, 512), nn.ReLU(), nn.Linear(512, 2, bias=False))
        self.qkv, self.proj = nn.Linear(D, 3 * D), nn.Linear(D, D)


def test_a_position_bias_inside_attention():
    blocks = nn.ModuleList(holder(attn=ConditionalPositionBias(), mlp=mlp()) for _ in range(2))
    assert names(holder(layers=blocks)) == ["layers.0.mlp.0", "layers.1.mlp.0"]


def test_relative_position_bias_of_t5_has_no_matrix_of_an_mlp():
    attention = holder(**square("q", "k", "v", "o"), relative_attention_bias=nn.Embedding(32, 4))
    dense = holder(wi=nn.Linear(D, H), wo=nn.Linear(H, D))
    layer = nn.ModuleList([holder(SelfAttention=attention), holder(DenseReluDense=dense)])
    assert names(holder(block=nn.ModuleList([holder(layer=layer)]))) == [
        "block.0.layer.1.DenseReluDense.wi"
    ]


class Mixer(nn.Module):
    """A selective state space, as in Mamba."""

    def __init__(self) -> None:
        super().__init__()
        self.A_log = nn.Parameter(torch.zeros(2 * D, 4))
        self.in_proj, self.out_proj = nn.Linear(D, 4 * D), nn.Linear(2 * D, D)
        self.conv1d = nn.Conv1d(2 * D, 2 * D, 4, groups=2 * D)


class AttentionDecoderLayer(nn.Module):
    """Zamba's shared block: its class says attention, and its MLP is one."""

    def __init__(self) -> None:
        super().__init__()
        self.self_attn = holder(**square("q_proj", "k_proj", "v_proj", "o_proj"))
        self.feed_forward = holder(
            gate_proj=nn.Linear(D, H), up_proj=nn.Linear(D, H), down_proj=nn.Linear(H, D)
        )


def test_hybrids_of_mixers_and_a_shared_block():
    assert names(holder(layers=nn.ModuleList(holder(mixer=Mixer()) for _ in range(3)))) == []
    shared = AttentionDecoderLayer()
    layers = nn.ModuleList(
        holder(shared_transf=shared, linear=nn.Linear(D, D), mamba_decoder=holder(mamba=Mixer()))
        if n % 2
        else holder(mamba=Mixer())
        for n in range(4)
    )
    assert names(holder(layers=layers)) == ["layers.1.shared_transf.feed_forward.gate_proj"]


def test_maps_of_different_elements_of_a_list_are_no_pair():
    assert names(holder(layers=nn.ModuleList(holder(up=nn.Linear(D, H)) for _ in range(2)),
                        others=nn.ModuleList(holder(down=nn.Linear(H, D)) for _ in range(2)))) == []  # fmt: skip
    assert (
        names(nn.Sequential(holder(linear=nn.Linear(D, D)), holder(linear=nn.Linear(D, D)))) == []
    )


def test_maps_without_a_name_that_tells_their_role_are_refused_if_they_are_square():
    assert names(holder(layers=nn.ModuleList([holder(**square("a", "b", "c", "d"))]))) == []
    assert names(holder(layers=nn.ModuleList([holder(net=mlp(h=D))]))) == ["layers.0.net.0"]
    assert names(holder(layers=nn.ModuleList([holder(a=nn.Linear(D, H), b=nn.Linear(H, D))]))) == [
        "layers.0.a"
    ]


def test_the_upper_of_a_gated_mlp_without_expansion_is_the_map_back():
    gated = holder(gate_proj=nn.Linear(D, D), up_proj=nn.Linear(D, D), down_proj=nn.Linear(D, D))
    model = holder(layers=nn.ModuleList([block(mlp=gated)]))
    assert names(model) == ["layers.0.mlp.gate_proj"]
    assert names(model, "mlp_out") == ["layers.0.mlp.down_proj"]


def test_projections_of_all_heads_in_one_stack_are_no_experts():
    attention = nn.Module()
    attention.W_Q = nn.Parameter(torch.randn(4, D, 4))
    attention.W_O = nn.Parameter(torch.randn(4, 4, D))
    model = holder(blocks=nn.ModuleList([holder(attn=attention, mlp=mlp())]))
    assert names(model) == ["blocks.0.mlp.0"]
    scales = nn.Module()
    scales.scale_1 = nn.Parameter(torch.randn(D, 1, 1))
    scales.scale_2 = nn.Parameter(torch.randn(D, 1, 1))
    assert names(holder(blocks=nn.ModuleList([scales]))) == []


@pytest.mark.parametrize("kind", [nn.Conv1d, nn.Conv2d])
@pytest.mark.parametrize("groups", [1, 4])
def test_convolutions_of_kernel_one_are_linear_maps(kind, groups):
    layer = block(
        intermediate=holder(conv=kind(D, 4 * D, 1, groups=groups)),
        output=holder(conv=kind(4 * D, D, 1)),
    )
    (matrix,) = find(holder(layers=nn.ModuleList([layer]))).matrices("mlp_in")
    assert matrix.name == "layers.0.intermediate.conv"
    convolution = layer.intermediate.conv
    with torch.no_grad():
        unit = torch.eye(D).reshape(D, D, *([1] * (kind is nn.Conv2d)), 1)  # (B, channels, 1, …)
        acts = (convolution(unit) - convolution(torch.zeros_like(unit))).flatten(1).T
    torch.testing.assert_close(matrix.read()[0].detach(), acts)


def test_pointwise_convolutions_around_a_wider_one_are_no_mlp():
    inverted = holder(
        expand=nn.Conv2d(D, H, 1), depthwise=nn.Conv2d(H, H, 3, groups=H), reduce=nn.Conv2d(H, D, 1)
    )
    assert names(holder(blocks=nn.ModuleList([inverted]))) == []
    convnext = holder(
        dw=nn.Conv2d(D, D, 7, groups=D), pw1=nn.Conv2d(D, H, 1), pw2=nn.Conv2d(H, D, 1)
    )
    assert names(holder(blocks=nn.ModuleList([convnext]))) == ["blocks.0.pw1"]


class TorchtuneLoRA(nn.Module):
    """Names, shapes and formula of torchtune's ``LoRALinear``."""

    def __init__(self, inputs: int, outputs: int, rank: int = 3, alpha: float = 5.0) -> None:
        super().__init__()
        self.in_dim, self.out_dim, self.rank, self.alpha = inputs, outputs, rank, alpha
        self.weight = nn.Parameter(torch.randn(outputs, inputs))
        self.disabled, self.merged = False, False
        self.lora_a = nn.Linear(inputs, rank, bias=False)
        self.lora_b = nn.Linear(rank, outputs, bias=False)

    def forward(self, x):
        out = nn.functional.linear(x, self.weight)
        return (
            out if self.disabled else out + (self.alpha / self.rank) * self.lora_b(self.lora_a(x))
        )


class LitgptLoRA(nn.Module):
    """Names, shapes and formula of litgpt's ``LoRALinear``."""

    def __init__(self, inputs: int, outputs: int, rank: int = 3, alpha: float = 5.0) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)
        self.r, self.merged, self.scaling = rank, False, alpha / rank
        self.lora_A = nn.Parameter(torch.randn(rank, inputs))
        self.lora_B = nn.Parameter(torch.randn(outputs, rank))

    def forward(self, x):
        if self.merged:
            return self.linear(x)
        return self.linear(x) + (x @ self.lora_A.T @ self.lora_B.T) * self.scaling


class Loralib(nn.Linear):
    """Names, shapes and formula of loralib's ``Linear``: the map itself has the factors."""

    def __init__(self, inputs: int, outputs: int, rank: int = 3, alpha: float = 5.0) -> None:
        super().__init__(inputs, outputs)
        self.r, self.merged, self.scaling = rank, False, alpha / rank
        self.lora_A = nn.Parameter(torch.randn(rank, inputs))
        self.lora_B = nn.Parameter(torch.randn(outputs, rank))

    def forward(self, x):
        return super().forward(x) + (x @ self.lora_A.T @ self.lora_B.T) * self.scaling


def acts_as(module: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return (module(torch.eye(D)) - module(torch.zeros(D, D))).T


@pytest.mark.parametrize("kind", [TorchtuneLoRA, LitgptLoRA, Loralib])
def test_low_rank_updates_in_other_libraries_are_added_to_their_base(kind):
    torch.manual_seed(0)
    layer = block(mlp=holder(w1=kind(D, H), w2=kind(H, D), w3=kind(D, H)))
    layer.attn = holder(
        q_proj=kind(D, D), k_proj=kind(D, D), v_proj=kind(D, D), output_proj=kind(D, D)
    )
    model = holder(layers=nn.ModuleList([layer]))
    (matrix,) = find(model).matrices("mlp_in")
    assert matrix.name == "layers.0.mlp.w1"
    torch.testing.assert_close(
        matrix.read()[0].detach(), acts_as(layer.mlp.w1), rtol=1e-4, atol=1e-4
    )
    (update,) = find(model).matrices("mlp_in_update")
    base = layer.mlp.w1.linear if kind is LitgptLoRA else layer.mlp.w1
    torch.testing.assert_close(
        update.read()[0].detach(),
        acts_as(layer.mlp.w1) - base.weight.detach(),
        rtol=1e-4,
        atol=1e-4,
    )
    (query,) = find(model).matrices("q")
    torch.testing.assert_close(
        query.read()[0].detach(), acts_as(layer.attn.q_proj), rtol=1e-4, atol=1e-4
    )


def test_adapters_that_are_off_or_merged_in_other_libraries():
    for module, switch in ((TorchtuneLoRA(D, H), "disabled"), (LitgptLoRA(D, H), "merged")):
        model = holder(
            layers=nn.ModuleList([holder(mlp=holder(fc_1=module, proj=nn.Linear(H, D)))])
        )
        (matrix,) = find(model).matrices("mlp_in")
        setattr(module, switch, True)
        torch.testing.assert_close(matrix.read()[0].detach(), acts_as(module))


def test_factors_whose_scale_is_not_known_are_refused():
    module = TorchtuneLoRA(D, H)
    del module.alpha
    model = holder(layers=nn.ModuleList([block(mlp=holder(w1=module, w2=nn.Linear(H, D)))]))
    assert names(model) == []


@pytest.mark.parametrize("how", ["prune", "weight_norm", "spectral_norm", "parametrized"])
def test_weights_that_are_computed_are_read_as_the_next_pass_will_compute_them(how):
    torch.manual_seed(0)
    linear = nn.Linear(D, H)
    model = holder(
        layers=nn.ModuleList([holder(mlp=nn.Sequential(linear, nn.ReLU(), nn.Linear(H, D)))])
    )
    if how == "prune":
        nn.utils.prune.l1_unstructured(linear, "weight", amount=0.5)
    elif how == "parametrized":
        nn.utils.parametrizations.weight_norm(linear)
    else:
        with pytest.warns() if how == "weight_norm" else torch.no_grad():
            getattr(nn.utils, how)(linear)
    linear.eval()
    (matrix,) = find(model).matrices("mlp_in")
    with torch.no_grad():
        for parameter in linear.parameters():
            parameter.mul_(1.5).add_(0.1)  # a step of an optimiser
        expected = matrix.read()[0].clone()
        torch.testing.assert_close(expected, acts_as(linear))


def test_real_families():
    transformers = pytest.importorskip("transformers")
    small = {"vocab_size": 40, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    mamba = {"mamba_d_state": 4, "mamba_dt_rank": 4, "n_mamba_heads": 2, "use_mamba_kernels": False}
    models = {
        "ffns.0.lin1": transformers.XLMModel(transformers.XLMConfig(vocab_size=40, emb_dim=32, n_layers=1, n_heads=4)),
        "encoder.layers.0.intermediate.conv1d": transformers.SqueezeBertModel(
            transformers.SqueezeBertConfig(**small, embedding_size=32, intermediate_size=48)
        ),
        "encoder.layers.0.blocks.0.intermediate.dense": transformers.Swinv2Model(
            transformers.Swinv2Config(image_size=16, patch_size=4, embed_dim=16, depths=[1], num_heads=[2],
                                      window_size=4)
        ),
        "blocks.0.ffn.up_proj": transformers.MptModel(
            transformers.MptConfig(vocab_size=40, d_model=32, n_heads=4, n_layers=1)
        ),
        "encoder.blocks.0.0.ffn.linear_1": transformers.FunnelBaseModel(
            transformers.FunnelConfig(vocab_size=40, block_sizes=[1], d_model=32, n_head=4, d_head=8, d_inner=48)
        ),
        "layers.0.feed_forward.gate_proj": transformers.FalconH1Model(
            transformers.FalconH1Config(**small, num_key_value_heads=2, intermediate_size=48, mamba_d_ssm=32,
                                        mamba_n_heads=4, mamba_d_head=8, mamba_n_groups=1, mamba_d_state=4)
        ),
        "layers.1.shared_transf.feed_forward.gate_proj": transformers.ZambaModel(
            transformers.ZambaConfig(vocab_size=40, hidden_size=32, num_hidden_layers=6, num_attention_heads=4,
                                     num_key_value_heads=4, intermediate_size=48, attn_layer_period=2,
                                     attn_layer_offset=1, **mamba)
        ),
        "blocks.0.feed_forward.key": transformers.RwkvModel(
            transformers.RwkvConfig(vocab_size=40, hidden_size=32, num_hidden_layers=2, intermediate_size=48)
        ),
        "": transformers.MambaModel(
            transformers.MambaConfig(vocab_size=40, hidden_size=32, num_hidden_layers=2, state_size=4)
        ),
    }  # fmt: skip
    for name, model in models.items():
        kinds = {re.sub(r"\d+", "*", found) for found in names(model)}
        assert kinds == ({re.sub(r"\d+", "*", name)} if name else set()), type(model).__name__
