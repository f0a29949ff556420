"""The structure of a model: the parts are the family's own, their views agree, and nothing is guessed."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import joma.models
from joma.models.skeleton import skeleton
from joma.models.weights import flat_rows

transformers = pytest.importorskip("transformers")
from tests.measure.charges.families import FAMILIES, make  # noqa: E402

# Family -> query heads, key heads, final norm, head, is gated.
EXPECTED = {
    "GPT-2": (2, 2, "transformer.ln_f", "lm_head", False),
    "GPT-NeoX": (2, 2, "gpt_neox.final_layer_norm", "lm_head", False),
    "Llama": (4, 2, "model.norm", "lm_head", True),
    "OPT": (2, 2, "model.decoder.final_layer_norm", "lm_head", False),
    "BERT": (
        2,
        2,
        "bert.encoder.layer.1.output.LayerNorm",
        "cls.predictions.transform.dense",
        False,
    ),
    "ViT": (2, 2, "vit.layernorm", "classifier", False),
    "nn.TransformerEncoder": (2, 2, "norm", None, False),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_parts_of_a_usual_family(family):
    heads, key_heads, final_norm, head, is_gated = EXPECTED[family]
    structure = joma.models.find(make(family))
    assert len(structure.blocks) == 2
    assert structure.width == 16
    for index, block in enumerate(structure.blocks):
        assert block.index == index
        assert block.attention.heads == heads
        assert block.attention.key_heads == key_heads
        assert block.attention.output.outputs == 16
        assert block.mlp.neurons == block.mlp.lower.outputs
        assert block.mlp.is_gated is is_gated
        assert len(block.norms) == 2
        assert block.placement == ("post" if family == "BERT" else "pre")
    assert structure.final_norm.name == final_norm
    if head is None:
        assert structure.head is None
        assert "0 linear maps" in structure.missing["head"]
    else:
        assert structure.head.name == head
    assert bool(structure.embeddings) is (family != "nn.TransformerEncoder")


@pytest.mark.parametrize("family", FAMILIES)
def test_gauges_and_charges_see_the_same_rows(family):
    """The matrix of a map is the rows of its parameter, fused or transposed as it may be."""
    structure = joma.models.find(make(family))
    maps = [linear for mlp in structure.mlps for linear in (mlp.lower, mlp.upper)]
    for attention in structure.attentions:
        maps += [attention.query, attention.key, attention.value, attention.output]
    for linear in maps:
        rows = linear.rows(linear.weight_parameter)
        assert rows.shape == linear.shape
        assert torch.equal(rows, flat_rows(linear.weight))
        assert torch.equal(rows, linear.matrix().read()[0])
        if linear.bias_parameter is not None:
            assert linear.bias.shape == (linear.outputs,)


@pytest.mark.parametrize("family", FAMILIES)
def test_names_and_shapes_of_a_file_have_the_structure_of_the_model(family):
    model = make(family)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    config = model.config.to_dict() if hasattr(model, "config") else None
    live = joma.models.find(model)
    file = joma.models.find(skeleton(list(shapes), shapes.__getitem__, config))
    assert file.block_names == live.block_names
    parts = ["mlp_in", "mlp_out"]
    if family != "nn.TransformerEncoder":  # a tensor in_proj_weight is no module of a skeleton
        parts += ["q", "k", "v", "o", "qk", "vo"]
    for part in parts:
        of_file = [(m.name, m.heads, [v.shape for v in m.views()]) for m in file.matrices(part)]
        of_model = [(m.name, m.heads, [v.shape for v in m.views()]) for m in live.matrices(part)]
        assert of_file == of_model, part


def test_the_gate_is_told_from_the_factor_by_name():
    structure = joma.models.find(make("Llama"))
    mlp = structure.blocks[0].mlp
    assert mlp.lower is mlp.gate
    assert mlp.gate.name.endswith("gate_proj")
    assert mlp.factor.name.endswith("up_proj")
    assert mlp.readers == (mlp.gate, mlp.factor)
    assert torch.equal(
        mlp.activation(torch.tensor([1.0, -2.0])),
        nn.functional.silu(torch.tensor([1.0, -2.0])),
    )


def test_halves_of_a_fused_gate():
    config = transformers.Phi3Config(
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        vocab_size=40,
        pad_token_id=0,
    )
    model = transformers.Phi3Model(config)
    mlp = joma.models.find(model).blocks[0].mlp
    fused = model.layers[0].mlp.gate_up_proj.weight
    assert mlp.is_gated
    assert torch.equal(mlp.gate.weight, fused[:24])
    assert torch.equal(mlp.factor.weight, fused[24:])
    assert [reader.shape for reader in mlp.readers] == [(48, 16)]


def test_each_expert_is_an_mlp_of_its_block():
    config = transformers.MixtralConfig(
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=3,
        vocab_size=40,
        pad_token_id=0,
    )
    model = transformers.MixtralModel(config)
    structure = joma.models.find(model)
    assert [len(block.mlps) for block in structure.blocks] == [3, 3]
    assert structure.blocks[1].attention.key_heads == 2
    assert structure.blocks[1].mlps[2].neurons == 24


class UnknownFusion(nn.Module):
    """Queries, keys and values of other sizes in one map, as only its own code can split them."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = 2
        self.in_proj = nn.Linear(8, 25)
        self.out_proj = nn.Linear(8, 8)


def test_a_fused_projection_that_cannot_be_split_is_left_out_with_a_reason():
    model = nn.Sequential(UnknownFusion(), UnknownFusion())
    structure = joma.models.find(model)
    attention = structure.attentions[0]
    assert attention.query is None
    assert structure.matrices("q") == structure.matrices("qk") == []
    assert [matrix.name for matrix in structure.matrices("o")] == ["0.o", "1.o"]
    assert "no query, key and value" in structure.missing["0"]


def test_a_skeleton_of_an_unknown_family_keeps_its_fused_projection_closed():
    shapes = {"layers.0.attn.qkv.weight": (24, 8), "layers.0.attn.proj.weight": (8, 8)}
    structure = joma.models.find(skeleton(list(shapes), shapes.__getitem__))
    assert structure.attentions[0].query is None
    assert "order of the rows" in structure.missing["layers.0.attn"]


def test_a_model_without_attention_has_reasons_for_everything():
    structure = joma.models.find(nn.Linear(3, 4))
    assert structure.blocks == structure.embeddings == ()
    assert structure.width is None
    assert structure.final_norm is None
    assert structure.head is None
    assert set(structure.missing) == {"blocks", "embeddings", "final_norm", "head"}


def test_an_unknown_part_is_refused_with_the_parts_that_there_are():
    with pytest.raises(ValueError, match="no part 'mlp'; parts are mlp_in"):
        joma.models.find(nn.Linear(3, 4)).matrices("mlp")


def test_wrappers_do_not_show_in_names():
    model = make("Llama")
    names = [block.name for block in joma.models.find(torch.compile(model, backend="eager")).blocks]
    assert names == [block.name for block in joma.models.find(model).blocks]


def test_the_text_has_a_line_per_block():
    text = str(joma.models.find(make("Llama")))
    assert text.splitlines()[2] == (
        "block 0     model.layers.0: self_attn (4 heads, 2 key heads); mlp.gate_proj → "
        "mlp.down_proj (16 → 24, gated); input_layernorm, post_attention_layernorm (pre)"
    )
    assert text.splitlines()[-1] == "head        lm_head"
