"""The right matrices in every family and format, against LAPACK on the model's own attributes."""

from __future__ import annotations

import math

import pytest
import torch
from safetensors.torch import save_file

import joma
from joma._checkpoints import plan as planning
from joma._checkpoints.plan import plan
from joma._checkpoints.reading import BadCheckpoint
from joma._checkpoints.tensors import Tensors
from joma.models.parts import PARTS, UPDATE
from tests.checkpoints.models import (
    FAMILIES,
    D,
    H,
    lower,
    model,
    queries_and_keys,
    quiet,
    save,
    stable_rank,
    values_and_outputs,
)

transformers = pytest.importorskip("transformers")
SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 40, "pad_token_id": 0,
         "num_key_value_heads": 2}  # fmt: skip
FORMATS = ("safetensors", "sharded", "bin", "sharded bin", "legacy")


def values(source, **options):
    frame = joma.scan(str(source), **options).frame()
    return frame.value.tolist()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("config", [True, False])
def test_lower_mlp_matrices(family, config, tmp_path):
    save(family, tmp_path / "model", "sharded")
    if not config:
        (tmp_path / "model/config.json").unlink()
    expected = [stable_rank(w) for w in lower(family)]
    assert values(tmp_path / "model") == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("how", FORMATS)
def test_formats(how, tmp_path):
    save("neox", tmp_path / "model", how)
    expected = [stable_rank(w) for w in lower("neox")]
    scan = joma.scan(str(tmp_path / "model"))
    assert scan.frame().value.tolist() == pytest.approx(expected, rel=1e-4)
    point = scan.checkpoints().iloc[0]
    if how == "legacy":
        assert "read whole" in point.note
    else:
        assert point.bytes_read == sum(w.nbytes for w in lower("neox"))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("how", ["safetensors", "bin"])
def test_half_precision(dtype, how, tmp_path):
    save("gpt2", tmp_path / "model", how, dtype)
    expected = [stable_rank(w.to(dtype)) for w in lower("gpt2")]
    assert values(tmp_path / "model") == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("family", ["neox", "gpt2", "llama"])
def test_projections_and_their_product_a_head(family, tmp_path):
    save(family, tmp_path / "model")
    frame = joma.scan(
        str(tmp_path / "model"), gauges="stable_rank.q,stable_rank.k,spectral_norm.qk"
    ).frame()
    for layer, (q, k) in enumerate(queries_and_keys(family)):
        rows = frame[frame.layer == layer]
        assert rows[rows.gauge == "stable_rank.q"].value.item() == pytest.approx(
            stable_rank(q), rel=1e-4
        )
        assert rows[rows.gauge == "stable_rank.k"].value.item() == pytest.approx(
            stable_rank(k), rel=1e-4
        )
        size = D // H
        for head in range(H):
            group = head * len(k) // len(q)  # grouped-query heads share keys
            product = q[head * size :][:size].T.double() @ k[group * size :][:size].double()
            norm = float(torch.linalg.svdvals(product)[0])
            got = rows[(rows.gauge == "spectral_norm.qk") & (rows["head"] == head)].value.item()
            assert got == pytest.approx(norm, rel=1e-4)


@pytest.mark.parametrize("family", ["neox", "gpt2", "llama", "bert"])
def test_values_and_outputs_a_head(family, tmp_path):
    save(family, tmp_path / "model")
    frame = joma.scan(str(tmp_path / "model"), gauges="stable_rank.vo,spectral_norm.vo").frame()
    size = D // H
    for layer, (v, o) in enumerate(values_and_outputs(family)):
        for head in range(H):
            group = head * len(v) // D  # grouped-query heads share values
            product = o[:, head * size :][:, :size].double() @ v[group * size :][:size].double()
            rows = frame[(frame.layer == layer) & (frame["head"] == head)].set_index("gauge").value
            assert rows["stable_rank.vo"] == pytest.approx(stable_rank(product), rel=1e-4)
            assert rows["spectral_norm.vo"] == pytest.approx(
                float(torch.linalg.svdvals(product)[0]), rel=1e-4
            )


@pytest.mark.parametrize("family", ["neox", "gpt2", "llama", "bert", "opt"])
@pytest.mark.parametrize("how", ["safetensors", "sharded"])
def test_usual_families_are_planned_without_their_model_as_with_it(
    family, how, tmp_path, monkeypatch
):
    """And not if the file is not what its config says: then the model decides."""
    parts = [part for part in PARTS if not part.endswith(UPDATE)]
    save(family, tmp_path / "model", how)
    tensors = Tensors.open(tmp_path / "model")
    with monkeypatch.context() as patch:
        patch.setattr(planning, "model_of", None)  # it is not asked
        quick = plan(tensors, parts)
    monkeypatch.setattr(planning, "_USUAL_FAMILIES", ())
    assert planning._usual_plan(tensors, parts) is None
    slow = plan(tensors, parts)
    for part in parts:
        assert [m.slices for m in quick[part]] == [m.slices for m in slow[part]]
        assert [m.heads for m in quick[part]] == [m.heads for m in slow[part]]
        for a, b in zip(quick[part], slow[part], strict=True):
            assert all(
                torch.equal(x, y) for x, y in zip(a.read(tensors), b.read(tensors), strict=True)
            )
    monkeypatch.undo()
    wide = "ffn_dim" if family == "opt" else "n_inner" if family == "gpt2" else "intermediate_size"
    for key in (wide, "n_layer" if family == "gpt2" else "num_hidden_layers"):
        other = Tensors.open(tmp_path / "model")
        other.config = {**tensors.config, key: tensors.config[key] + 1}
        assert planning._usual_plan(other, ["mlp_in"]) is None


def test_a_part_of_a_fused_tensor_costs_a_part_of_it(tmp_path):
    save("neox", tmp_path / "model")
    point = joma.scan(str(tmp_path / "model"), gauges="stable_rank.q").checkpoints().iloc[0]
    assert point.bytes_read == sum(q.nbytes for q, _ in queries_and_keys("neox"))


def test_experts_are_rows_with_names(tmp_path):
    save("mixtral", tmp_path / "model")
    frame = joma.scan(str(tmp_path / "model")).frame()
    assert len(frame) == 3 * 4
    assert "layers.1" in frame.module[5]
    assert "experts.1" in frame.module[5]


def test_stacked_experts_in_the_file(tmp_path):
    experts = torch.randn(4, 2 * 24, 16), torch.randn(4, 16, 24)  # gate and up in one, then down
    names = ("layers.0.mlp.experts.gate_up_proj", "layers.0.mlp.experts.down_proj")
    save_file(dict(zip(names, experts, strict=True)), tmp_path / "model.safetensors")
    opened = Tensors.open(tmp_path)
    found = plan(opened, ["mlp_in"])["mlp_in"]
    assert [torch.equal(m.read(opened)[0], experts[0][e, :24]) for e, m in enumerate(found)] == [
        True
    ] * 4
    assert opened.bytes_read == experts[0].nbytes / 2


def test_lower_matrices_by_name(tmp_path):
    save("llama", tmp_path / "model")
    ups = [layer.mlp.up_proj.weight.detach() for layer in model("llama").model.layers]
    got = values(tmp_path / "model", mlp=r".*\.up_proj")
    assert got == pytest.approx([stable_rank(w) for w in ups], rel=1e-4)
    scan = joma.scan(str(tmp_path / "model"), mlp="nothing")
    assert "no matrix has a name that 'nothing' matches as a whole" in scan.checkpoints().note[0]
    with pytest.raises(ValueError, match="no regular expression"):
        joma.scan(str(tmp_path / "model"), mlp="(")


def test_prefixes_may_differ(tmp_path):
    save("neox", tmp_path / "model")
    from safetensors.torch import load_file

    state = load_file(tmp_path / "model/model.safetensors")
    bare = {name.removeprefix("gpt_neox."): w for name, w in state.items()}
    for prefix in ("", "module.model."):
        save_file(
            {prefix + name: w for name, w in bare.items()}, tmp_path / "model/model.safetensors"
        )
        assert values(tmp_path / "model") == pytest.approx(
            [stable_rank(w) for w in lower("neox")], rel=1e-4
        )


def test_shapes_that_do_not_fit_and_missing_tensors(tmp_path):
    save("neox", tmp_path / "model", "bin")
    state = torch.load(tmp_path / "model/pytorch_model.bin", weights_only=True)
    name = "gpt_neox.layers.1.mlp.dense_h_to_4h.weight"
    torch.save({**state, name: torch.zeros(7, D)}, tmp_path / "model/pytorch_model.bin")
    opened = Tensors.open(tmp_path / "model")
    planned = plan(opened, ["mlp_in"])["mlp_in"]
    with pytest.raises(
        BadCheckpoint, match=r"has shape \(7, 32\), which does not fit: \(80, 32\) is expected"
    ):
        planned[1].read(opened)
    del state[name]
    torch.save(state, tmp_path / "model/pytorch_model.bin")
    with pytest.raises(BadCheckpoint, match=r"dense_h_to_4h\.weight is missing"):
        plan(Tensors.open(tmp_path / "model"), ["mlp_in"])


def test_weights_that_are_zero_or_not_finite_are_told(tmp_path):
    layer = {"layers.0.fc1.weight": torch.zeros(8, 4), "layers.0.fc2.weight": torch.ones(4, 8)}
    other = {
        "layers.1.fc1.weight": torch.full((8, 4), math.nan),
        "layers.1.fc2.weight": torch.ones(4, 8),
    }
    save_file(layer | other, tmp_path / "model.safetensors")
    scan = joma.scan(str(tmp_path))
    zero, nan = scan.frame().value
    assert zero == 0
    assert math.isnan(nan)
    assert "the matrix is zero" in scan.checkpoints().note[0]
    assert "not finite" in scan.checkpoints().note[0]


def test_square_mlps_of_joma_train(tmp_path):
    """d = hidden, where shapes tell nothing: the order and the names must."""
    from joma._train.model import LanguageModel

    made = LanguageModel(50, layers=2, d=16, hidden=16, heads=2)
    for step in (5, 10):
        folder = tmp_path / f"checkpoints/step-{step:08d}"
        folder.mkdir(parents=True)
        save_file(made.state_dict(), folder / "model.safetensors")
    (tmp_path / "run.json").write_text('{"config": {"heads": 2}}')
    frame = joma.scan(str(tmp_path), gauges="stable_rank,stable_rank.q,spectral_norm.qk").frame()
    q, k, _ = made.encoder.layers[1].self_attn.in_proj_weight.detach().split(16)
    norms = [float(torch.linalg.svdvals(q[n : n + 8].T @ k[n : n + 8])[0]) for n in (0, 8)]
    products = frame[(frame.step == 5) & (frame.gauge == "spectral_norm.qk") & (frame.layer == 1)]
    assert products.value.tolist() == pytest.approx(norms, rel=1e-4)
    assert sorted(set(frame.step)) == [5, 10]
    first = frame[(frame.step == 5) & (frame.gauge == "stable_rank")].value.tolist()
    assert first == pytest.approx(
        [stable_rank(layer.linear1.weight.detach()) for layer in made.encoder.layers]
    )
    queries = [layer.self_attn.in_proj_weight[:16].detach() for layer in made.encoder.layers]
    got = frame[(frame.step == 5) & (frame.gauge == "stable_rank.q")].value.tolist()
    assert got == pytest.approx([stable_rank(w) for w in queries])


def experts(family):
    if family == "olmoe":
        config = transformers.OlmoeConfig(**SMALL, intermediate_size=16, num_experts=3)
        model = transformers.OlmoeForCausalLM(config)
        return model, [
            e[:16] for layer in model.model.layers for e in layer.mlp.experts.gate_up_proj
        ]
    config = transformers.Qwen2MoeConfig(
        **SMALL, intermediate_size=48, moe_intermediate_size=16, shared_expert_intermediate_size=24, num_experts=3,
        mlp_only_layers=[0],
    )  # fmt: skip
    model = transformers.Qwen2MoeForCausalLM(config)
    dense, moe = (layer.mlp for layer in model.model.layers)
    gates = [e[:16] for e in moe.experts.gate_up_proj]
    return model, [dense.gate_proj.weight, *gates, moe.shared_expert.gate_proj.weight]


@pytest.mark.parametrize("family", ["olmoe", "qwen2"])
@pytest.mark.parametrize("config", [True, False])
def test_experts_narrower_than_the_model_and_what_is_beside_them(family, config, tmp_path):
    torch.manual_seed(0)
    model, lower = experts(family)
    with torch.no_grad():
        for p in model.parameters():
            p.normal_()
    with quiet():
        model.save_pretrained(tmp_path / "model")
    if not config:
        (tmp_path / "model/config.json").unlink()
    scan = joma.scan(str(tmp_path / "model"))
    assert scan.failed == [], scan.checkpoints().note[0]
    assert scan.frame().value.tolist() == pytest.approx(
        [stable_rank(w.detach()) for w in lower], rel=1e-4
    )


def test_gates_that_take_turns_are_read_from_the_file(tmp_path):
    config = transformers.GptOssConfig(
        **SMALL, intermediate_size=150, num_local_experts=2, head_dim=8
    )
    torch.manual_seed(0)
    model = transformers.GptOssForCausalLM(config)
    with torch.no_grad():
        for p in model.parameters():
            p.normal_()
    with quiet():
        model.save_pretrained(tmp_path / "model")
    gates = [
        e[:, ::2].detach() for layer in model.model.layers for e in layer.mlp.experts.gate_up_proj
    ]
    assert joma.scan(str(tmp_path / "model")).frame().value.tolist() == pytest.approx(
        [stable_rank(w) for w in gates], rel=1e-4
    )


def test_a_fused_projection_of_an_unknown_family_is_refused_and_of_a_known_one_split(tmp_path):
    fused = torch.randn(3 * 32, 32)
    save_file({"layers.0.attn.query_key_value.weight": fused}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"model_type": "who knows", "num_attention_heads": 4}')
    scan = joma.scan(str(tmp_path), gauges="stable_rank.q")
    assert "of a family that is known" in scan.checkpoints().note[0]
    (tmp_path / "config.json").write_text('{"model_type": "bloom", "num_attention_heads": 4}')
    opened = Tensors.open(tmp_path)
    (found,) = plan(opened, ["q"])["q"]
    assert torch.equal(found.read(opened)[0], fused.view(4, 3, 8, 32)[:, 0].reshape(32, 32))


def test_rows_do_not_depend_on_which_checkpoint_came_first(tmp_path):
    generator = torch.Generator().manual_seed(0)
    for step, h in ((0, 24), (1, 12), (2, 12)):
        weights = {"layers.0.fc1.weight": (h, 8), "layers.0.fc2.weight": (8, h)}
        made = {name: torch.randn(shape, generator=generator) for name, shape in weights.items()}
        save_file(made, tmp_path / f"model-{step}.safetensors")
    together = joma.scan(str(tmp_path))
    assert together.failed == []
    alone = [
        joma.scan(str(tmp_path / f"model-{step}.safetensors")).frame().value.item()
        for step in range(3)
    ]
    assert together.frame().value.tolist() == alone


def test_weights_with_scales_and_of_unknown_types_are_refused(tmp_path):
    weights = {"layers.0.fc1.weight": torch.randn(8, 4), "layers.0.fc2.weight": torch.randn(4, 8)}
    eight = {name: w.to(torch.float8_e4m3fn) for name, w in weights.items()}
    save_file(eight, tmp_path / "model-0.safetensors")
    save_file(
        {**eight, "layers.0.fc1.weight_scale_inv": torch.ones(1, 1)},
        tmp_path / "model-1.safetensors",
    )
    save_file(weights, tmp_path / "model-2.safetensors")
    data = (
        (tmp_path / "model-2.safetensors")
        .read_bytes()
        .replace(b'"F32","shape":[8,4]', b'"F9X","shape":[8,4]')
    )
    (tmp_path / "model-2.safetensors").write_bytes(data)
    table = joma.scan(str(tmp_path), mlp=r".*fc1").checkpoints()
    assert table.status.tolist() == ["ok", "failed", "failed"]
    assert "is quantised with scales" in table.note[1]
    odd = joma.scan(str(tmp_path / "model-2.safetensors"))
    assert odd.failed
    opened = Tensors.open(tmp_path / "model-2.safetensors")
    assert opened.view("layers.0.fc1.weight").foreign_type == "F9X"


def test_an_index_that_names_a_tensor_of_an_unknown_type(tmp_path):
    save("neox", tmp_path / "model")
    file = tmp_path / "model/model.safetensors"
    name = b'"gpt_neox.layers.1.mlp.dense_h_to_4h.weight":{"dtype":"'
    data = file.read_bytes()
    assert name + b"F32" in data
    file.write_bytes(data.replace(name + b"F32", name + b"F9X"))
    note = joma.scan(str(tmp_path / "model")).checkpoints().note[0]
    assert "dense_h_to_4h.weight is of type F9X: quantised weights cannot be measured" in note


def test_a_pattern_without_a_gauge_of_lower_matrices(tmp_path):
    save("neox", tmp_path / "model")
    with pytest.raises(ValueError, match=r"no gauge of those is asked for: stable_rank\.q"):
        joma.scan(str(tmp_path / "model"), mlp=".*", gauges="stable_rank.q")
