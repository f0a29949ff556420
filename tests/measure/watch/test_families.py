"""Attention of many families under a watch, against brute force."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import joma
from tests.measure.watch.models import (
    LENGTH,
    VOCABULARY,
    HandWrittenGPT,
    ManyHeads,
    entropy_of,
    entropy_of_probabilities,
    sharpen,
)

transformers = pytest.importorskip("transformers")
SMALL = {
    "vocab_size": VOCABULARY, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 40, "max_position_embeddings": 32,
}  # fmt: skip
NO_TOKENS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
GPT2 = {"vocab_size": VOCABULARY, "n_embd": 24, "n_layer": 2, "n_head": 4, "n_positions": 32}
OPT = {key: value for key, value in SMALL.items() if key != "intermediate_size"}
FAMILIES = {
    "gpt2": ("GPT2", GPT2, "CausalLM"),
    "neox": ("GPTNeoX", SMALL, "CausalLM"),
    "opt": ("OPT", {**OPT, "ffn_dim": 40, "word_embed_proj_dim": 24}, "CausalLM"),
    "llama": ("Llama", {**SMALL, "num_key_value_heads": 2}, "CausalLM"),
    "gemma2": ("Gemma2", {**SMALL, "num_key_value_heads": 2, "head_dim": 8, "sliding_window": 6}, "CausalLM"),
    "bert": ("Bert", SMALL, "MaskedLM"),
    "albert": ("Albert", {**SMALL, "embedding_size": 16}, "MaskedLM"),
}  # fmt: skip
LOWER = {
    "gpt2": "transformer.h.{}.mlp.c_fc",
    "neox": "gpt_neox.layers.{}.mlp.dense_h_to_4h",
    "opt": "model.decoder.layers.{}.fc1",
    "llama": "model.layers.{}.mlp.gate_proj",
    "gemma2": "model.layers.{}.mlp.gate_proj",
    "bert": "bert.encoder.layer.{}.intermediate.dense",
}


def build(family: str, how: str) -> nn.Module:
    name, config, _ = FAMILIES[family]
    settings = getattr(transformers, f"{name}Config")(**config, **NO_TOKENS)
    torch.manual_seed(0)
    head = {"gpt2": "GPT2LMHeadModel"}.get(family, f"{name}For{FAMILIES[family][2]}")
    model = getattr(transformers, head)._from_config(settings, attn_implementation=how)
    return sharpen(model).eval()


def batch() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(1, VOCABULARY, (3, LENGTH), generator=generator)
    mask = torch.ones_like(tokens)
    mask[1, 9:] = 0
    mask[2, 5:] = 0
    return {"input_ids": tokens, "attention_mask": mask}


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize(
    ("family", "how"),  # Gemma 2 caps its scores: transformers has no sdpa path for it
    [
        (family, how)
        for family in FAMILIES
        for how in ("sdpa", "eager")
        if (family, how) != ("gemma2", "sdpa")
    ],
)
def test_entropy_of_transformers(family, how, side):
    inputs = batch()
    if side == "left":
        inputs = {name: value.flip(1) for name, value in inputs.items()}
    model = build(family, how)
    with torch.no_grad():
        truth = build(family, "eager")(**inputs, output_attentions=True).attentions
    with joma.watch(model, every=1, gauges=("entropy", "normalised_entropy", "sink_mass")) as w:
        model(**inputs)
        metrics = w.step()
        frame = w.frame()
    real = inputs["attention_mask"].bool()
    assert len(w.layers) == len(truth) == 2
    for n, p in enumerate(truth):
        mine = frame[(frame.gauge == "entropy") & (frame.layer == n)].sort_values("head")["value"]
        expected = entropy_of_probabilities(p, real)
        assert torch.allclose(torch.tensor(mine.to_numpy()), expected, atol=2e-5), (
            n,
            mine,
            expected,
        )
        assert metrics[f"joma/entropy/layer_0{n}"] == pytest.approx(
            float(expected.mean()), abs=2e-5
        )
        first = p.double()[torch.arange(3), :, :, real.int().argmax(1)]  # (B, H, Tq)
        sink = first.transpose(1, 2)[real].mean()
        assert metrics[f"joma/sink_mass/layer_0{n}"] == pytest.approx(float(sink), abs=2e-5)


def test_multi_query_keys_that_all_heads_share():
    """Falcon gives sdpa one key head for all, without enable_gqa."""
    settings = {
        "vocab_size": VOCABULARY,
        "hidden_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    config = transformers.FalconConfig(**settings, multi_query=True, alibi=False, **NO_TOKENS)
    models = []
    for how in ("sdpa", "eager"):
        torch.manual_seed(0)
        models.append(
            sharpen(
                transformers.FalconForCausalLM._from_config(config, attn_implementation=how)
            ).eval()
        )
    tokens = batch()["input_ids"]
    with torch.no_grad():
        truth = models[1](tokens, output_attentions=True).attentions
    for model in models:
        with joma.watch(model, every=1, gauges="entropy") as w:
            model(tokens)
            values = list(w.step().values())
        assert values == pytest.approx(
            [float(entropy_of_probabilities(p).mean()) for p in truth], abs=2e-5
        )


def test_learned_sinks_of_gpt_oss():
    config = transformers.GptOssConfig(
        **SMALL, num_key_value_heads=2, head_dim=8, num_local_experts=2, num_experts_per_tok=1, sliding_window=6,
        layer_types=["sliding_attention", "full_attention"], **NO_TOKENS,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.GptOssForCausalLM._from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.sinks.normal_()
    tokens = batch()["input_ids"][:1]
    with joma.watch(model, every=1, gauges=("entropy", "sink_mass", "nonsink_entropy")) as w:
        truth = model(tokens, output_attentions=True).attentions
        metrics = w.step()
    for n, keys in enumerate(truth):  # (1, H, T, T), without the learned column
        keys = keys.detach().double()
        learned = 1 - keys.sum(-1, keepdim=True)
        p = torch.cat([keys, learned], dim=-1)
        assert metrics[f"joma/entropy/layer_0{n}"] == pytest.approx(
            float(entropy_of_probabilities(p).mean()), abs=2e-5
        )
        sinks = float((learned[..., 0] + keys[..., 0]).mean())
        assert metrics[f"joma/sink_mass/layer_0{n}"] == pytest.approx(sinks, abs=2e-5)


@pytest.mark.parametrize("how", ["sdpa", "eager"])
def test_encoder_decoder(how):
    """Self- and cross-attention; padding of the source is not padding of the target, though both have one length."""
    settings = transformers.T5Config(
        vocab_size=VOCABULARY, d_model=24, d_kv=6, d_ff=40, num_layers=2, num_heads=4, decoder_start_token_id=0,
        pad_token_id=0, dropout_rate=0.0,
    )  # fmt: skip

    def model_of(how):
        torch.manual_seed(0)
        return sharpen(
            transformers.T5ForConditionalGeneration._from_config(settings, attn_implementation=how),
            2,
        ).eval()

    inputs = batch()
    inputs["labels"] = inputs["input_ids"].flip(1)
    with torch.no_grad():
        truth = model_of("eager")(**inputs, output_attentions=True)
    model = model_of(how)
    with joma.watch(model, every=1, gauges=("entropy", "stable_rank")) as w:
        model(**inputs)
        w.step()
        heads = (
            w.frame()
            .query("gauge == 'entropy'")
            .pivot_table(index="layer", columns="head", values="value")
        )
    real = inputs["attention_mask"].bool()
    expected = [entropy_of_probabilities(p, real) for p in truth.encoder_attentions]
    expected += [
        entropy_of_probabilities(p) for p in (*truth.decoder_attentions, *truth.cross_attentions)
    ]
    assert torch.allclose(torch.tensor(heads.to_numpy()), torch.stack(expected), atol=3e-5)
    kinds = ["SelfAttention"] * 4 + [
        "EncDecAttention"
    ] * 2  # what a block has more than one of comes after all blocks
    assert [name.split(".")[-1] for name in w.layers] == kinds
    assert w.matrices["mlp_in"] == [
        *(f"encoder.block.{n}.layer.1.DenseReluDense.wi" for n in range(2)),
        *(f"decoder.block.{n}.layer.2.DenseReluDense.wi" for n in range(2)),
    ]


@pytest.mark.parametrize("how", ["sdpa", "softmax", "einsum"])
def test_hand_written(how):
    torch.manual_seed(0)
    model = sharpen(HandWrittenGPT(how))
    tokens = torch.randint(VOCABULARY, (3, LENGTH))
    with joma.watch(model, every=1) as w:
        model(tokens).sum().backward()
        w.step(loss=1.0)
    heads = (
        w.frame()
        .query("gauge == 'entropy'")
        .pivot_table(index="layer", columns="head", values="value")
        .to_numpy()
    )
    expected = torch.stack([entropy_of(block.attn.last) for block in model.blocks])
    assert torch.allclose(torch.tensor(heads), expected, atol=1e-5)
    assert w.layers == ["blocks.0.attn", "blocks.1.attn"]
    assert w.matrices == {"mlp_in": ["blocks.0.mlp.0", "blocks.1.mlp.0"]}
    sigma = torch.linalg.svdvals(model.blocks[1].mlp[0].weight.detach().double())
    rank = w.frame().query("gauge == 'stable_rank' and layer == 1")["value"].item()
    assert rank == pytest.approx(float((sigma**2).sum() / sigma[0] ** 2), rel=1e-6)


def test_parallel_head_modules_are_the_heads_of_one_layer():
    torch.manual_seed(0)
    model = nn.Sequential(ManyHeads(16, 4), nn.LayerNorm(16), ManyHeads(16, 4))
    x = 3 * torch.randn(2, LENGTH, 16)
    with joma.watch(model, every=1, gauges="entropy") as w:
        model(x)
        w.step()
    expected = [torch.cat([entropy_of(head.last) for head in model[n].heads]) for n in (0, 2)]
    assert w.layers == ["0.heads", "2.heads"]
    table = w.frame().query("gauge == 'entropy'")
    heads = table.pivot_table(index="layer", columns="head", values="value").to_numpy()
    assert torch.allclose(torch.tensor(heads), torch.stack(expected), atol=1e-5)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_transformer_encoder(training, dropout):
    """nn.TransformerEncoder with padding, both paths of nn.MultiheadAttention, causal or not."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=dropout, batch_first=True)
    model = sharpen(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), 4).train(training)
    x = torch.randn(3, LENGTH, 16)
    padded = torch.zeros(3, LENGTH, dtype=torch.bool)
    padded[1, 9:] = True
    causal = nn.Transformer.generate_square_subsequent_mask(LENGTH).isinf()
    seen = []

    def keep(module, args, output):
        seen.append(args[0])

    handles = [layer.self_attn.register_forward_hook(keep) for layer in model.layers]
    with (
        joma.watch(model, every=1, gauges=("entropy", "stable_rank")) as w,
        torch.set_grad_enabled(training),
    ):
        model(x, mask=causal, src_key_padding_mask=padded)
        w.step()
    for handle in handles:
        handle.remove()
    assert w.layers == ["layers.0.self_attn", "layers.1.self_attn"]
    assert w.matrices["mlp_in"] == ["layers.0.linear1", "layers.1.linear1"]
    table = (
        w.frame()
        .query("gauge == 'entropy'")
        .pivot_table(index="layer", columns="head", values="value")
        .to_numpy()
    )
    for n, layer in enumerate(model.layers):
        attention = layer.self_attn
        q, k, _ = nn.functional.linear(
            seen[n], attention.in_proj_weight, attention.in_proj_bias
        ).chunk(3, dim=-1)
        q, k = (t.detach().double().unflatten(-1, (4, 4)).transpose(1, 2) for t in (q, k))
        scores = (q @ k.mT / 2).masked_fill(causal | padded[:, None, None], -torch.inf)
        assert torch.allclose(torch.tensor(table[n]), entropy_of(scores, ~padded), atol=2e-5)


def test_multihead_attention_with_weights_and_without_batch():
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(16, 4)
    x = torch.randn(LENGTH, 3, 16)
    for need in (True, False):
        with joma.watch(attention, every=1, gauges="entropy") as w:
            _, p = attention(x, x, x, need_weights=True, average_attn_weights=False)
            w.step()
            attention(x, x, x, need_weights=need)
            w.step()
            attention(x[:, 0], x[:, 0], x[:, 0], need_weights=need)
            w.step()
        heads = (
            w.frame()
            .query("gauge == 'entropy'")
            .pivot_table(index="step", columns="head", values="value")
            .to_numpy()
        )
        expected = entropy_of_probabilities(p)
        assert torch.allclose(torch.tensor(heads[:2]), expected.expand(2, 4), atol=1e-5)
        assert torch.allclose(torch.tensor(heads[2]), entropy_of_probabilities(p[:1]), atol=1e-5)


def test_shared_weights_are_layers_of_their_own():
    torch.manual_seed(0)
    model = HandWrittenGPT("sdpa", layers=1)
    model.blocks = nn.ModuleList([model.blocks[0]] * 3)
    with joma.watch(model, every=1, gauges="entropy") as w:
        model(torch.randint(VOCABULARY, (2, LENGTH)))
        w.step()
    assert w.layers == ["blocks.0.attn", "blocks.0.attn#1", "blocks.0.attn#2"]


@pytest.mark.parametrize("family", LOWER)
def test_lower_mlp_matrices(family):
    """Found by structure, Conv1D and gated included; against LAPACK."""
    model = build(family, "eager")
    with joma.watch(model, gauges=("stable_rank", "stable_rank.mlp_out")) as w:
        w.step()
    assert w.matrices["mlp_in"] == [LOWER[family].format(n) for n in range(2)]
    values = w.frame().query("gauge == 'stable_rank'")["value"].to_numpy()
    for n, name in enumerate(w.matrices["mlp_in"]):
        sigma = torch.linalg.svdvals(model.get_submodule(name).weight.detach().double())
        assert values[n] == pytest.approx(float((sigma**2).sum() / sigma[0] ** 2), rel=1e-6)


@pytest.mark.parametrize("family", ["gpt2", "neox", "opt", "llama", "bert"])
def test_projections_and_their_products(family):
    """Split out of fused matrices; W_Q W_Kᵀ a head by its definition."""
    model = build(family, "eager")
    gauges = [
        f"{g}.{part}" for g in ("stable_rank", "spectral_norm", "effective_rank") for part in "qkvo"
    ]
    with joma.watch(model, gauges=[*gauges, "stable_rank.qk", "spectral_norm.qk"]) as w:
        w.step()
    frame = w.frame()
    q, k = brute_force_projections(family, model)
    heads = (
        frame[(frame.gauge == "spectral_norm.qk") & (frame.layer == 0)]
        .sort_values("head")["value"]
        .to_numpy()
    )
    for h in range(4):
        product = q[h].T @ k[h * len(k) // 4]
        assert heads[h] == pytest.approx(float(torch.linalg.matrix_norm(product, 2)), rel=1e-5)
    norm = frame[(frame.gauge == "spectral_norm.q") & (frame.layer == 0)]["value"].item()
    assert norm == pytest.approx(float(torch.linalg.matrix_norm(q.flatten(0, 1), 2)), rel=1e-5)


def brute_force_projections(family, model):
    """Queries (H, size, d) and keys (Hk, size, d) of the first layer, by what it does to unit vectors."""
    size = 6
    layer = {
        "gpt2": lambda: model.transformer.h[0].attn.c_attn,
        "neox": lambda: model.gpt_neox.layers[0].attention.query_key_value,
    }
    if family in layer:
        fused = layer[family]()
        rows = (fused(torch.eye(24)) - fused(torch.zeros(24))).detach().double().T  # (3·24, 24)
        if family == "neox":  # as in its forward: view(…, heads, 3·size).chunk(3)
            q, k, _ = rows.T.view(24, 4, 3 * size).chunk(3, dim=-1)
        else:
            q, k, _ = (part.view(24, 4, size) for part in rows.T.split(24, dim=-1))
        return q.permute(1, 2, 0), k.permute(1, 2, 0)
    attention = {
        "opt": lambda: model.model.decoder.layers[0].self_attn,
        "llama": lambda: model.model.layers[0].self_attn,
        "bert": lambda: model.bert.encoder.layer[0].attention.self,
    }[family]()
    names = ("query", "key") if family == "bert" else ("q_proj", "k_proj")
    return tuple(
        getattr(attention, name).weight.detach().double().unflatten(0, (-1, size)) for name in names
    )


def test_experts_are_an_axis():
    settings = transformers.MixtralConfig(
        **SMALL, num_key_value_heads=2, num_local_experts=3, **NO_TOKENS
    )
    model = transformers.MixtralForCausalLM._from_config(settings, attn_implementation="sdpa")
    with joma.watch(model, gauges="stable_rank") as w:
        w.step()
    assert len(w.matrices["mlp_in"]) == 6
    gate = model.model.layers[1].mlp.experts.gate_up_proj[2][:40].detach().double()
    sigma = torch.linalg.svdvals(gate)
    table = w.frame()
    value = table.query("gauge == 'stable_rank' and layer == 1 and expert == 2")["value"].item()
    assert value == pytest.approx(float((sigma**2).sum() / sigma[0] ** 2), rel=1e-6)
    assert set(table["module"]) == {
        f"model.layers.{n}.mlp.experts.gate_up_proj[*]" for n in range(2)
    }
