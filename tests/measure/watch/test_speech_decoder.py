"""A speech model in the manner of openai-whisper: entropies are right, or NaN where the model is."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import joma
from tests.measure.watch.models import VOCABULARY, entropy_of

WIDTH, HEADS, FRAMES, CONTEXT = 32, 4, 12, 16


class Linear(nn.Linear):
    """Computes in the type of its input; the weights stay in float32."""

    def forward(self, x):
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return functional.linear(x, self.weight.to(x.dtype), bias)


class LayerNorm(nn.LayerNorm):
    def forward(self, x):
        return super().forward(x.float()).type(x.dtype)


class MultiHeadAttention(nn.Module):
    """Self- or cross-attention, fused ("sdpa") or with scores ("manual"); keeps its last scores."""

    def __init__(self, style: str) -> None:
        super().__init__()
        self.n_head, self.style = HEADS, style
        self.query = Linear(WIDTH, WIDTH)
        self.key = Linear(WIDTH, WIDTH, bias=False)
        self.value = Linear(WIDTH, WIDTH)
        self.out = Linear(WIDTH, WIDTH)
        self.last: tuple[Tensor, Tensor, bool] | None = None  # queries, keys, causal

    def forward(self, x, xa=None, mask=None, kv_cache=None):
        q = self.query(x)
        if kv_cache is None or xa is None or self.key not in kv_cache:
            k = self.key(x if xa is None else xa)
            v = self.value(x if xa is None else xa)
        else:
            k = kv_cache[self.key]
            v = kv_cache[self.value]
        return self.out(self.attend(q, k, v, mask))

    def attend(self, q, k, v, mask):
        queries = q.shape[1]
        is_causal = mask is not None and queries > 1
        q, k, v = (x.unflatten(-1, (HEADS, -1)).transpose(1, 2) for x in (q, k, v))  # (B, H, T, h)
        self.last = (q.detach(), k.detach(), is_causal)
        if self.style == "sdpa":
            y = functional.scaled_dot_product_attention(q, k, v, is_causal=is_causal)
        else:
            scale = q.shape[-1] ** -0.25
            scores = (q * scale) @ (k * scale).transpose(-1, -2)
            if mask is not None:
                scores = scores + mask[:queries, :queries]
            y = functional.softmax(scores.float(), dim=-1).to(q.dtype) @ v
        return y.transpose(1, 2).flatten(2)

    @property
    def entropy(self) -> Tensor:
        """By brute force in float64, (H,)."""
        q, k, is_causal = self.last
        scores = q.double() @ k.double().mT / math.sqrt(q.shape[-1])
        if is_causal:
            later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
            scores = scores.masked_fill(later, -math.inf)
        return entropy_of(scores)


class Block(nn.Module):
    def __init__(self, style: str, has_cross_attention: bool) -> None:
        super().__init__()
        self.attn, self.attn_ln = MultiHeadAttention(style), LayerNorm(WIDTH)
        self.cross_attn = MultiHeadAttention(style) if has_cross_attention else None
        self.cross_attn_ln = LayerNorm(WIDTH) if has_cross_attention else None
        self.mlp = nn.Sequential(Linear(WIDTH, 4 * WIDTH), nn.GELU(), Linear(4 * WIDTH, WIDTH))
        self.mlp_ln = LayerNorm(WIDTH)

    def forward(self, x, xa=None, mask=None, kv_cache=None):
        x = x + self.attn(self.attn_ln(x), mask=mask, kv_cache=kv_cache)
        if self.cross_attn is not None:
            x = x + self.cross_attn(self.cross_attn_ln(x), xa, kv_cache=kv_cache)
        return x + self.mlp(self.mlp_ln(x))


class Encoder(nn.Module):
    def __init__(self, style: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(style, False) for _ in range(2))
        self.ln_post = LayerNorm(WIDTH)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.ln_post(x)


class Decoder(nn.Module):
    """Its positional embedding is memory that nobody has written to, as in the original."""

    def __init__(self, style: str) -> None:
        super().__init__()
        self.token_embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.positional_embedding = nn.Parameter(torch.empty(CONTEXT, WIDTH))
        self.blocks = nn.ModuleList(Block(style, True) for _ in range(2))
        self.ln = LayerNorm(WIDTH)
        mask = torch.full((CONTEXT, CONTEXT), -math.inf).triu_(1)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, tokens, xa, kv_cache=None):
        offset = next(iter(kv_cache.values())).shape[1] if kv_cache else 0
        positions = self.positional_embedding[offset : offset + tokens.shape[-1]]
        x = (self.token_embedding(tokens) + positions).to(xa.dtype)
        for block in self.blocks:
            x = block(x, xa, mask=self.mask, kv_cache=kv_cache)
        return (self.ln(x) @ self.token_embedding.weight.to(x.dtype).T).float()


class SpeechModel(nn.Module):
    def __init__(self, style: str) -> None:
        super().__init__()
        self.encoder, self.decoder = Encoder(style), Decoder(style)

    def forward(self, frames, tokens):
        return self.decoder(tokens, self.encoder(frames))

    def cache_keys_and_values(self) -> dict[nn.Module, Tensor]:
        """Let hooks of the decoder's projections prepend what was computed before."""
        cache: dict[nn.Module, Tensor] = {}

        def save(module, inputs, output):
            if module not in cache or output.shape[1] > CONTEXT:
                cache[module] = output
            else:
                cache[module] = torch.cat([cache[module], output], dim=1).detach()
            return cache[module]

        for module in self.decoder.modules():
            if isinstance(module, MultiHeadAttention):
                module.key.register_forward_hook(save)
                module.value.register_forward_hook(save)
        return cache


def make(style: str, positions: float | None = None) -> SpeechModel:
    """A model with attention that is not uniform; ``positions`` fills its positional embedding."""
    torch.manual_seed(0)
    model = SpeechModel(style)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "attn.query" in name or "attn.key" in name:
                parameter.mul_(4)
        if positions is None:
            model.decoder.positional_embedding.normal_()
        else:
            model.decoder.positional_embedding.fill_(positions)
    return model


def batch(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    frames = torch.randn(3, FRAMES, WIDTH, generator=generator)
    return frames.to(dtype), torch.randint(0, VOCABULARY, (3, 10), generator=generator)


def entropies(watch) -> dict[str, Tensor]:
    """Module -> entropies by head (H,), of the last measurement."""
    frame = watch.frame()
    frame = frame[(frame.gauge == "entropy") & (frame.step == frame.step.max())]
    return {
        module: torch.tensor(rows.sort_values("head").value.to_list(), dtype=torch.float64)
        for module, rows in frame.groupby("module")
    }


def attentions(model) -> dict[str, MultiHeadAttention]:
    return {name: m for name, m in model.named_modules() if isinstance(m, MultiHeadAttention)}


# what the model itself rounds: "manual" has scores in half precision
TOLERANCES = {("sdpa", torch.float32): 1e-6, ("manual", torch.float32): 1e-6,
              ("sdpa", torch.float16): 1e-5, ("manual", torch.float16): 5e-3}  # fmt: skip


@pytest.mark.parametrize(("style", "dtype"), TOLERANCES)
@pytest.mark.parametrize("positions", [None, 0.0, 1e4])
def test_entropies_of_self_and_cross_attention_are_those_of_brute_force(style, dtype, positions):
    model = make(style, positions)
    with joma.watch(model, every=1, gauges="entropy") as watch:
        model(*batch(dtype))
        watch.step()
    measured = entropies(watch)
    assert set(measured) == set(attentions(model))
    for name, module in attentions(model).items():
        assert (measured[name] - module.entropy).abs().max() <= TOLERANCES[style, dtype], name


@pytest.mark.parametrize("style", ["sdpa", "manual"])
def test_entropies_with_a_cache_are_those_of_brute_force_token_by_token(style):
    model = make(style)
    frames, tokens = batch()
    cache = model.cache_keys_and_values()
    with joma.watch(model, every=1, gauges="entropy") as watch:
        features = model.encoder(frames)
        watch.step()
        for part in (tokens[:, :4], *tokens[:, 4:].split(1, dim=1)):
            model.decoder(part, features, kv_cache=cache)
            watch.step()
            measured = entropies(watch)
            for name, module in attentions(model.decoder).items():
                assert (measured[f"decoder.{name}"] - module.entropy).abs().max() <= 1e-5, name


@pytest.mark.parametrize("style", ["sdpa", "manual"])
@pytest.mark.parametrize("positions", [math.nan, math.inf, 1e30])
def test_a_parameter_that_was_never_initialised_makes_the_decoder_nan_and_the_encoder_not(
    style, positions
):
    """Memory that nobody has written to may hold zeros in one trial and this in another."""
    model = make(style, positions)
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore"
        )  # that they are not finite is said, but that is another test
        with joma.watch(model, every=1, gauges="entropy") as watch:
            logits = model(*batch())
            watch.step()
    assert logits.isnan().all()  # the model itself
    for name, values in entropies(watch).items():
        assert values.isnan().all() == name.startswith("decoder"), name
        assert torch.equal(values.isnan(), attentions(model)[name].entropy.isnan())


@pytest.mark.parametrize("style", ["sdpa", "manual"])
def test_no_number_comes_from_memory_that_joma_has_not_written_to(style):
    """Deterministic mode fills new memory with NaN."""
    model = make(style)
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(3).isnan().all()
        with joma.watch(model, every=1, gauges=["entropy", "max_logit", "largest_share"]) as watch:
            model(*batch())
            watch.step()
    finally:
        torch.use_deterministic_algorithms(False)
    assert watch.frame().value.notna().all()
    measured = entropies(watch)
    for name, module in attentions(model).items():
        assert (measured[name] - module.entropy).abs().max() <= 1e-6, name
