"""Functions of Hugging Face's `AttentionInterface`: seen whatever they are, told by what they compute."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import joma
from tests.measure.watch.models import LENGTH, VOCABULARY, entropy_of_probabilities, sharpen

transformers = pytest.importorskip("transformers")
SETTINGS = {
    "vocab_size": VOCABULARY, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 40, "max_position_embeddings": 32, "num_key_value_heads": 2, "head_dim": 8,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0,
}  # fmt: skip
KEPT: list[
    torch.Tensor
] = []  # attention (B, H, T, T) that the kernel computed, without a learned sink


def kernel(sees):
    """A kernel that nothing of PyTorch looks into: NumPy, with the keys that ``sees`` says."""

    def function(module, query, key, value, attention_mask, scaling=None, dropout=0.0, **settings):
        q, k, v = (x.detach().double().numpy() for x in (query, key, value))
        k, v = (np.repeat(x, q.shape[1] // x.shape[1], axis=1) for x in (k, v))
        s = q @ k.swapaxes(-1, -2) * scaling
        i, j = np.indices(s.shape[-2:])
        s = np.where(sees(i, j, settings.get("sliding_window")), s, -np.inf)
        if (sinks := settings.get("s_aux")) is not None:
            s = np.concatenate(
                [s, np.broadcast_to(sinks.detach().numpy()[:, None, None], (*s.shape[:3], 1))],
                axis=-1,
            )
        p = np.exp(s - s.max(-1, keepdims=True))
        p = (p / p.sum(-1, keepdims=True))[..., : k.shape[2]]
        KEPT.append(torch.from_numpy(p))
        return torch.from_numpy((p @ v).swapaxes(1, 2).copy()).to(query.dtype), None

    return function


def plain(module, query, key, value, attention_mask, scaling=None, dropout=0.0, **settings):
    out = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=scaling, enable_gqa=True, dropout_p=dropout
    )
    return out.transpose(1, 2), None


FUNCTIONS = {
    "joma_plain": plain,
    "joma_causal": kernel(lambda i, j, window: j <= i),
    "joma_window": kernel(lambda i, j, window: (j <= i) & (i - j < (window or 1000))),
    "joma_full": kernel(lambda i, j, window: j >= 0),
    "joma_odd": kernel(lambda i, j, window: (j <= i) & (j % 2 == i % 2)),
}


@pytest.fixture(autouse=True)
def _registered():
    KEPT.clear()
    for name, function in FUNCTIONS.items():
        transformers.AttentionInterface.register(name, function)
    yield
    for name in FUNCTIONS:
        del transformers.AttentionInterface._global_mapping[name]
    assert "__getitem__" not in vars(transformers.AttentionInterface)  # nothing is left behind


def build(name: str, kind: str = "Llama", **settings):
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**SETTINGS, **settings)
    model = getattr(transformers, f"{kind}ForCausalLM")._from_config(
        config, attn_implementation=name
    )
    return sharpen(model).eval()


def tokens() -> torch.Tensor:
    return torch.randint(1, VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", ["joma_causal", "joma_full"])
def test_a_kernel_is_measured_by_what_it_computes(name):
    """Also where transformers gives it no mask, since no mask function of its name is registered."""
    model = build(name)
    with joma.watch(model, every=1, gauges="entropy") as w:
        for _ in range(2):
            KEPT.clear()
            model(tokens())
            values = list(w.step().values())
            assert values == pytest.approx(
                [float(entropy_of_probabilities(p).mean()) for p in KEPT], abs=2e-5
            )


def test_a_function_that_calls_sdpa_is_seen_in_it():
    expected = build("eager")(tokens(), output_attentions=True).attentions
    model = build("joma_plain")
    with joma.watch(model, every=1, gauges="entropy") as w:
        model(tokens())
        values = list(w.step().values())
    assert values == pytest.approx(
        [float(entropy_of_probabilities(p).mean()) for p in expected], abs=2e-5
    )


def test_sliding_windows_and_learned_sinks_are_honoured():
    model = build(
        "joma_window", "GptOss", num_local_experts=2, num_experts_per_tok=1, sliding_window=5,
        layer_types=["sliding_attention", "full_attention"],
    )  # fmt: skip
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.sinks.normal_()
    with joma.watch(model, every=1, gauges=("entropy", "sink_mass", "nonsink_entropy")) as w:
        model(tokens())
        metrics = w.step()
    for n, keys in enumerate(KEPT):
        learned = 1 - keys.sum(-1, keepdim=True)
        p = torch.cat([keys, learned], dim=-1)
        assert metrics[f"joma/entropy/layer_0{n}"] == pytest.approx(
            float(entropy_of_probabilities(p).mean()), abs=2e-5
        )
        sinks = (learned[..., 0] + keys[..., 0]).mean()
        assert metrics[f"joma/sink_mass/layer_0{n}"] == pytest.approx(float(sinks), abs=2e-5)
        rest = keys[..., 1:]
        left = rest / rest.sum(-1, keepdim=True).clamp(min=1e-300)
        nonsink = -torch.special.xlogy(left, left).sum(-1).mean()
        assert metrics[f"joma/nonsink_entropy/layer_0{n}"] == pytest.approx(
            float(nonsink), abs=1e-4
        )


def test_what_no_mask_explains_is_refused_by_name():
    model = build("joma_odd")
    expected = model(tokens()).logits
    with joma.watch(model, every=1, gauges="entropy") as w:
        assert torch.equal(model(tokens()).logits, expected)
        with pytest.warns(
            joma.JomaWarning,
            match=r"attn_implementation='joma_odd' is not softmax.*causal, all keys",
        ):
            w.step()
