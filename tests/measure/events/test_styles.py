"""Small replicas of the ways in which public models attend: right to 1e-5, or refused with the true reason.

Each replica keeps its scores (B, H, Tq, Tk) in ``truth``, from which entropies are computed in float64.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional

import joma
from tests.measure.watch.models import entropy_of, entropy_of_probabilities

T, D, H = 14, 32, 4
SIZE = D // H
BATCHES = [1, 3, H]


def states(batch: int = 3, length: int = T, seed: int = 1) -> torch.Tensor:
    return torch.randn(batch, length, D, generator=torch.Generator().manual_seed(seed))


def padding(batch: int) -> torch.Tensor:
    """(B, T), False at padding: one token in the first sample, two in the second, …"""
    return torch.arange(T) < T - 1 - torch.arange(batch)[:, None]


class Replica(nn.Module):
    """Projections of heads that differ much in sharpness, and a way to attend with them."""

    def __init__(
        self, attend: Callable[..., torch.Tensor], keys: int = D, **layers: nn.Module
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q = nn.Linear(D, D)
        self.k = nn.Linear(D, keys)
        self.v = nn.Linear(D, keys)
        self.attend = attend
        for name, layer in layers.items():
            setattr(self, name, layer)
        with torch.no_grad():
            for h in range(H):
                self.q.weight[SIZE * h : SIZE * (h + 1)] *= 1 + 2 * h
        self.truth = torch.empty(0)

    def keep(self, scores: torch.Tensor) -> None:
        """Keep scores (B, H, Tq, Tk) for brute force."""
        self.truth = scores.detach().double()

    def forward(self, x, *others):
        return self.attend(self, x, *others)


class Attention(Replica):
    """Its name says that it should be seen."""


def split(x: torch.Tensor) -> torch.Tensor:
    return x.unflatten(-1, (-1, SIZE)).transpose(1, 2)  # (B, H, T, d)


def join(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(1, 2).flatten(2)  # (B, T, D)


def measured(model: nn.Module, *inputs: torch.Tensor, **options) -> list[list[float]]:
    """Return the entropy per layer and head; two steps must report the same, without a warning."""
    results = []
    with joma.watch(model, every=1, gauges="entropy", live=False, **options) as w:
        for _ in range(2):
            model(*inputs).square().mean().backward()
            w.step()
            rows = w.frame().query("gauge == 'entropy' and step == @w.last_step")
            results.append(
                [part.sort_values("head")["value"].tolist() for _, part in rows.groupby("layer")]
            )
    assert results[0] == results[1]
    return results[0]


def reasons(model: nn.Module, *inputs: torch.Tensor) -> str:
    """Return what a watch reports about a model of which nothing may be measured."""
    expected = model(*inputs)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with joma.watch(model, every=1, gauges="entropy", live=False) as w:
            assert torch.equal(model(*inputs), expected)
            assert w.step() == {}
    return "\n".join(str(warning.message) for warning in caught)


# Styles that are measured


def hand_written(self, x, real=None):
    """minGPT: a causal mask of −∞."""
    q, k, v = split(self.q(x)), split(self.k(x)), split(self.v(x))
    scores = q @ k.transpose(-2, -1) * (1.0 / math.sqrt(k.size(-1)))
    scores = scores.masked_fill(torch.ones(T, T).tril() == 0, float("-inf"))
    self.keep(scores)
    return join(functional.softmax(scores, dim=-1) @ v)


def whisper(self, x, real=None):
    """Queries and keys are scaled by d^-1/4 each, keys are transposed when heads are split."""
    q, k, v = self.q(x), self.k(x), self.v(x)
    scale = SIZE**-0.25
    q = q.view(*q.shape[:2], H, -1).permute(0, 2, 1, 3) * scale
    k = k.view(*k.shape[:2], H, -1).permute(0, 2, 3, 1) * scale
    v = v.view(*v.shape[:2], H, -1).permute(0, 2, 1, 3)
    scores = (q @ k).float()
    self.keep(scores)
    return (
        (functional.softmax(scores, dim=-1).to(q.dtype) @ v)
        .permute(0, 2, 1, 3)
        .flatten(start_dim=2)
    )


def t5(self, x, real=None):
    """No scale, a position bias per head, an additive mask of the smallest number, softmax in float32."""
    q, k, v = split(self.q(x)), split(self.k(x)), split(self.v(x))
    scores = torch.matmul(q, k.transpose(3, 2)) / 4
    distance = (torch.arange(T)[None] - torch.arange(T)[:, None]).abs().clamp(max=7)
    bias = self.bias(distance).permute(2, 0, 1)[None]
    if real is not None:
        bias = bias + (~real)[:, None, None] * torch.finfo(x.dtype).min
    scores += bias
    self.keep(scores)
    p = functional.softmax(scores.float(), dim=-1).type_as(scores)
    return torch.matmul(functional.dropout(p, 0.0), v).transpose(1, 2).contiguous().view(*x.shape)


def ctrl(self, x, real=None):
    """A causal mask of −1e4."""
    q, k, v = split(self.q(x)), split(self.k(x)), split(self.v(x))
    scores = torch.matmul(q, k.permute(0, 1, 3, 2)) / math.sqrt(SIZE)
    scores = scores + torch.triu(torch.ones(T, T), 1) * -1e4
    if real is not None:
        scores = scores + (~real)[:, None, None] * torch.finfo(x.dtype).min
    self.keep(scores)
    return torch.matmul(torch.softmax(scores, dim=-1), v).permute(0, 2, 1, 3).reshape(*x.shape)


def relative_shift(x: torch.Tensor) -> torch.Tensor:
    """(Tq, Tk, B, H), as in Transformer-XL."""
    zeros = torch.zeros(x.shape[0], 1, *x.shape[2:])
    padded = torch.cat([zeros, x], dim=1)
    return padded.view(x.shape[1] + 1, x.shape[0], *x.shape[2:])[1:].view_as(x)


def time_first(self, x):
    x = x.transpose(0, 1)  # (T, B, D)
    q, k, v = (
        layer(x).unflatten(-1, (H, SIZE)) for layer in (self.q, self.k, self.v)
    )  # (T, B, H, d)
    positions = self.r(torch.linspace(-1, 1, T)[:, None] * torch.ones(D)).unflatten(-1, (H, SIZE))
    content = q + self.content_bias
    position = q + self.position_bias
    return content, position, positions, k, v


def transformer_xl(self, x, real=None):
    """Keys along the second axis of four, a term of positions, masked at (Tq, Tk, B, 1)."""
    content, position, positions, k, v = time_first(self, x)
    scores = torch.einsum("ibnd,jbnd->ijbn", content, k)
    scores = scores + relative_shift(torch.einsum("ibnd,jnd->ijbn", position, positions))
    scores.mul_(SIZE**-0.5)
    mask = torch.ones(T, T).triu(1).bool()[..., None]  # (Tq, Tk, 1)
    if real is not None:
        mask = mask | ~real.T[None]
    scores = scores.float().masked_fill(mask[..., None], -1e30)
    self.keep(scores.permute(2, 3, 0, 1))
    p = functional.dropout(functional.softmax(scores, dim=1), 0.0)
    return torch.einsum("ijbn,jbnd->ibnd", p, v).flatten(2).transpose(0, 1)


def xlnet(self, x, real=None):
    content, position, positions, k, v = time_first(self, x)
    scores = torch.einsum("ibnd,jbnd->bnij", content, k)
    scores = scores + torch.einsum("ibnd,jnd->bnij", position, positions)
    scores = scores * SIZE**-0.5
    if real is not None:
        scores = scores - 1e30 * torch.einsum("ijbn->bnij", (~real).float().T[None, :, :, None])
    self.keep(scores)
    p = functional.softmax(scores, dim=3)
    return torch.einsum("bnij,jbnd->ibnd", p, v).flatten(2).transpose(0, 1)


def keys_then_queries(self, x, real=None):
    """Scores (B, Tk, Tq, H), normalised along the second axis."""
    q, k, v = (layer(x).unflatten(-1, (H, SIZE)) for layer in (self.q, self.k, self.v))
    scores = torch.einsum("bqhd,bkhd->bkqh", q, k) / math.sqrt(SIZE)
    if real is not None:
        scores = scores.masked_fill(~real[:, :, None, None], -math.inf)
    self.keep(scores.permute(0, 3, 2, 1))
    return torch.einsum("bkqh,bkhd->bqhd", scores.softmax(dim=1), v).flatten(2)


def values_first(self, x, real=None):
    """Channels first, as CoAtNet and BoTNet have them: v @ p.transpose(-1, -2)."""
    q, k, v = (split(layer(x)).mT for layer in (self.q, self.k, self.v))  # (B, H, d, T)
    scores = (q.mT @ k) / math.sqrt(SIZE)
    if real is not None:
        scores = scores.masked_fill(~real[:, None, None], -math.inf)
    self.keep(scores)
    return (v @ scores.softmax(dim=-1).transpose(-1, -2)).flatten(1, 2).transpose(1, 2)


def values_first_of_keys_first(self, x, real=None):
    """The same of scores (B, H, Tk, Tq) that are normalised along the last axis but one: v @ p."""
    q, k, v = (split(layer(x)).mT for layer in (self.q, self.k, self.v))  # (B, H, d, T)
    scores = (k.mT @ q) / math.sqrt(SIZE)
    if real is not None:
        scores = scores.masked_fill(~real[:, None, :, None], -math.inf)
    self.keep(scores.mT)
    return (v @ scores.softmax(dim=-2)).flatten(1, 2).transpose(1, 2)


def implicit_output(self, x, real=None):
    """Equations without "->": the output's axes are in alphabetical order."""
    q, k, v = split(self.q(x)), split(self.k(x)), split(self.v(x))
    scores = torch.einsum("...iz,...jz", q, k) / math.sqrt(SIZE)
    if real is not None:
        scores = scores.masked_fill(~real[:, None, None], -math.inf)
    self.keep(scores)
    return join(torch.einsum("...ij,...jk", scores.softmax(dim=-1), v))


def values_first_by_einsum(self, x, real=None):
    q, k, v = (split(layer(x)).mT for layer in (self.q, self.k, self.v))  # (B, H, d, T)
    scores = torch.einsum("b h d i, b h d j -> b h i j", q, k) / math.sqrt(SIZE)
    if real is not None:
        scores = scores.masked_fill(~real[:, None, None], -math.inf)
    self.keep(scores)
    return (
        torch.einsum("b h i j, b h d j -> b h i d", scores.softmax(dim=-1), v)
        .transpose(1, 2)
        .flatten(2)
    )


def multi_query(self, x, real=None):
    """Keys and values of one head, without an axis of heads."""
    q, k, v = split(self.q(x)), self.k(x), self.v(x)
    scores = torch.einsum("b h i d, b j d -> b h i j", q, k) * SIZE**-0.5
    if real is not None:
        scores = scores.masked_fill(~real[:, None, None], -torch.finfo(scores.dtype).max)
    self.keep(scores)
    p = scores.softmax(dim=-1, dtype=torch.float32)
    return torch.einsum("b h i j, b j d -> b h i d", p, v).transpose(1, 2).flatten(2)


def multi_query_broadcast(self, x, real=None):
    """The same by a broadcast axis of one head (falcon, MPT)."""
    q, k, v = split(self.q(x)), self.k(x)[:, None], self.v(x)[:, None]
    scores = q @ k.mT * SIZE**-0.5
    if real is not None:
        scores = scores.masked_fill(~real[:, None, None], -math.inf)
    self.keep(scores)
    return join(scores.softmax(dim=-1) @ v)


def multi_query_sdpa(self, x, real=None):
    q, k, v = split(self.q(x)), self.k(x)[:, None], self.v(x)[:, None]
    scores = q @ k.mT * SIZE**-0.5
    mask = None if real is None else real[:, None, None]
    self.keep(scores if mask is None else scores.masked_fill(~mask, -math.inf))
    k, v = (t.expand(-1, H, -1, -1) for t in (k, v))
    return join(functional.scaled_dot_product_attention(q, k, v, attn_mask=mask))


def fairseq(self, x, real=None):
    """Time first, samples and heads merged, masked after a view."""
    x = x.transpose(0, 1)  # (T, B, D)
    B = x.shape[1]
    q, k, v = self.q(x) * SIZE**-0.5, self.k(x), self.v(x)
    q, k, v = (t.contiguous().view(T, B * H, SIZE).transpose(0, 1) for t in (q, k, v))
    scores = torch.bmm(q, k.transpose(1, 2))
    if real is not None:
        scores = (
            scores.view(B, H, T, T)
            .masked_fill(~real[:, None, None], float("-inf"))
            .view(B * H, T, T)
        )
    self.keep(scores.view(B, H, T, T))
    p = functional.softmax(scores, dim=-1, dtype=torch.float32).type_as(scores)
    return torch.bmm(p, v).transpose(0, 1).contiguous().view(T, B, D).transpose(0, 1)


def perceiver(self, x, real=None):
    """Learned latents attend to tokens; "b n (h d) -> (b h) n d"."""
    B = len(x)
    latents = self.latents.expand(B, -1, -1)
    q, k, v = (
        split(layer(t)).flatten(0, 1) for layer, t in ((self.q, latents), (self.k, x), (self.v, x))
    )
    scores = torch.einsum("b i d, b j d -> b i j", q, k) * SIZE**-0.5
    if real is not None:
        mask = real.repeat_interleave(H, dim=0)[:, None]
        scores.masked_fill_(~mask, -torch.finfo(scores.dtype).max)
    self.keep(scores.unflatten(0, (B, H)))
    return join(
        torch.einsum("b i j, b j d -> b i d", scores.softmax(dim=-1), v).unflatten(0, (B, H))
    )


def memory_key_values(self, x, real=None):
    """x-transformers: learned keys and values stand before those of the tokens."""
    q, k, v = split(self.q(x)), split(self.k(x)), split(self.v(x))
    k, v = (
        torch.cat([m.expand(len(x), -1, -1, -1), t], dim=-2)
        for m, t in ((self.memory, k), (self.memory, v))
    )
    scores = torch.einsum("b h i d, b h j d -> b h i j", q, k) * SIZE**-0.5
    if real is not None:
        mask = functional.pad(real, (3, 0), value=True)[:, None, None]
        scores = scores.masked_fill(~mask, -torch.finfo(scores.dtype).max)
    self.keep(scores)
    return join(torch.einsum("b h i j, b h j d -> b h i d", scores.softmax(dim=-1), v))


def memory_behind(self, x, real=None):
    """Likewise behind them, in a fused kernel, as nn.MultiheadAttention(add_bias_kv=True) has them."""
    q, k, v = split(self.q(x)), split(self.k(x)), split(self.v(x))
    k, v = (torch.cat([t, self.memory.expand(len(x), -1, -1, -1)], dim=-2) for t in (k, v))
    scores = q @ k.mT * SIZE**-0.5
    mask = None if real is None else functional.pad(real, (0, 3), value=True)[:, None, None]
    self.keep(scores if mask is None else scores.masked_fill(~mask, -math.inf))
    return join(functional.scaled_dot_product_attention(q, k, v, attn_mask=mask))


def cosine(self, x, real=None):
    """Queries and keys of length 1, a learned temperature per head (Swin v2, x-transformers)."""
    q, k, v = split(self.q(x)), split(self.k(x)), split(self.v(x))
    scores = functional.normalize(q, dim=-1) @ functional.normalize(k, dim=-1).transpose(-2, -1)
    scores = scores * torch.linspace(1, 20, H)[:, None, None]
    if real is not None:
        scores = scores.masked_fill(~real[:, None, None], -math.inf)
    self.keep(scores)
    return join(scores.softmax(dim=-1) @ v)


def talking_before_softmax(self, x, real=None):
    """Heads are mixed before the softmax: what is normalised is what is multiplied."""
    q, k, v = split(self.q(x)), split(self.k(x)), split(self.v(x))
    scores = torch.einsum("b h i j, h g -> b g i j", q @ k.mT * SIZE**-0.5, self.mix)
    if real is not None:
        scores = scores.masked_fill(~real[:, None, None], -math.inf)
    self.keep(scores)
    return join(scores.softmax(dim=-1) @ v)


def gated(self, x, real=None):
    """The output of each head has a gate (Qwen3-Next, x-transformers)."""
    q, k, v = split(self.q(x)), split(self.k(x)), split(self.v(x))
    mask = None if real is None else real[:, None, None]
    scores = q @ k.mT * SIZE**-0.5
    self.keep(scores if mask is None else scores.masked_fill(~mask, -math.inf))
    return join(functional.scaled_dot_product_attention(q, k, v, mask)) * self.k(x).sigmoid()


def latent_kernel(self, x, real, fused):
    """DeepSeek's MLA: queries of a latent; keys with a rotary part that heads share; values of another size."""
    q = self.up(self.norm(self.down(x))).unflatten(-1, (H, 12)).transpose(1, 2)  # (B, H, T, 8 + 4)
    q, q_rotary = q.split([8, 4], dim=-1)
    angle = torch.arange(T)[:, None] * torch.tensor([1.0, 0.3])
    cos, sin = angle.cos().repeat(1, 2), angle.sin().repeat(1, 2)

    def rotated(t):
        first, second = t.chunk(2, dim=-1)
        return t * cos + torch.cat([-second, first], dim=-1) * sin

    k = split(self.k(x))
    shared = rotated(x[:, None, :, :4]).expand(-1, H, -1, -1)
    q = torch.cat([q, rotated(q_rotary)], dim=-1)
    k = torch.cat([k, shared], dim=-1)
    v = self.values(x).unflatten(-1, (H, 6)).transpose(1, 2)
    scores = q @ k.mT * 12**-0.5
    mask = None if real is None else real[:, None, None]
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf)
    self.keep(scores)
    if fused:
        return join(functional.scaled_dot_product_attention(q, k, v, attn_mask=mask))
    return join(scores.softmax(dim=-1) @ v)


def latent(self, x, real=None):
    return latent_kernel(self, x, real, False)


def latent_sdpa(self, x, real=None):
    return latent_kernel(self, x, real, True)


def pairs_disentangled(self, x, real=None):
    """DeBERTa: terms of content and position are added to the scores, and gathered by distance."""
    B = len(x)
    q, k, v = (split(layer(x)).flatten(0, 1) for layer in (self.q, self.k, self.v))  # (B·H, T, d)
    scores = torch.bmm(q, k.transpose(-1, -2) / math.sqrt(3 * SIZE))
    table = split(self.k(self.table.weight[None])).squeeze(0).repeat(B, 1, 1)  # (B·H, 2T, d)
    distance = (torch.arange(T)[:, None] - torch.arange(T) + T).expand(B * H, T, T)
    scores = scores + torch.gather(
        torch.bmm(q, table.transpose(-1, -2)) / math.sqrt(3 * SIZE), -1, distance
    )
    scores = scores.view(B, H, T, T)
    if real is not None:
        scores = scores.masked_fill(~real[:, None, None], torch.finfo(x.dtype).min)
    self.keep(scores)
    p = functional.softmax(scores, dim=-1)
    return join(torch.bmm(p.view(B * H, T, T), v).view(B, H, T, SIZE))


def sinked(self, x, real=None):
    """GPT-OSS: a learned logit per head next to the keys, left out after the softmax."""
    q, k, v = split(self.q(x)), split(self.k(x)), split(self.v(x))
    scores = q @ k.mT * SIZE**-0.5
    if real is not None:
        scores = scores + (~real)[:, None, None] * torch.finfo(x.dtype).min
    scores = torch.cat(
        [scores, torch.arange(4.0)[None, :, None, None].expand(len(x), -1, T, 1)], dim=-1
    )
    scores = scores - scores.max(dim=-1, keepdim=True).values
    self.keep(scores)
    return join(functional.softmax(scores, dim=-1)[..., :-1] @ v)


def bias() -> nn.Embedding:
    torch.manual_seed(3)
    return nn.Embedding(8, H)


def relative_layers() -> dict[str, nn.Module]:
    torch.manual_seed(3)
    return {
        "r": nn.Linear(D, D), "content_bias": nn.Parameter(torch.randn(H, SIZE)),
        "position_bias": nn.Parameter(torch.randn(H, SIZE)),
    }  # fmt: skip


def latent_layers() -> dict[str, nn.Module]:
    torch.manual_seed(3)
    return {
        "down": nn.Linear(D, 20), "norm": nn.RMSNorm(20), "up": nn.Linear(20, H * 12), "values": nn.Linear(D, H * 6),
    }  # fmt: skip


def parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape, generator=torch.Generator().manual_seed(3)))


MEASURED: dict[Callable[..., torch.Tensor], Callable[[], dict]] = {
    hand_written: dict,
    whisper: dict,
    t5: lambda: {"bias": bias()},
    ctrl: dict,
    transformer_xl: relative_layers,
    xlnet: relative_layers,
    keys_then_queries: dict,
    values_first: dict,
    values_first_of_keys_first: dict,
    values_first_by_einsum: dict,
    implicit_output: dict,
    multi_query: lambda: {"keys": SIZE},
    multi_query_broadcast: lambda: {"keys": SIZE},
    multi_query_sdpa: lambda: {"keys": SIZE},
    fairseq: dict,
    memory_key_values: lambda: {"memory": parameter(1, H, 3, SIZE)},
    memory_behind: lambda: {"memory": parameter(1, H, 3, SIZE)},
    perceiver: lambda: {"latents": parameter(1, 6, D)},
    cosine: dict,
    talking_before_softmax: lambda: {"mix": parameter(H, H)},
    gated: dict,
    latent: latent_layers,
    latent_sdpa: latent_layers,
    pairs_disentangled: lambda: {"table": nn.Embedding(2 * T, D)},
    sinked: dict,
}


def name_of(attend: Callable[..., torch.Tensor]) -> str:
    return attend.__name__


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("attend", MEASURED, ids=name_of)
def test_the_entropy_of_each_head_is_that_of_brute_force(attend, batch):
    model = Replica(attend, **MEASURED[attend]())
    (heads,) = measured(model, states(batch))
    assert heads == pytest.approx(entropy_of(model.truth).tolist(), abs=1e-5)


PADDED = [attend for attend in MEASURED if attend not in (hand_written, whisper, perceiver)]


@pytest.mark.parametrize("batch", [2, H])
@pytest.mark.parametrize("attend", PADDED, ids=name_of)
def test_padded_queries_do_not_count(attend, batch):
    model = Replica(attend, **MEASURED[attend]())
    real = padding(batch)
    (heads,) = measured(model, states(batch), real)
    assert heads == pytest.approx(entropy_of(model.truth, real).tolist(), abs=1e-5)


# Cross-attention, caches, convolutions


def cross(self, x, memory, real=None):
    q, k, v = split(self.q(x)), split(self.k(memory)), split(self.v(memory))
    scores = q @ k.mT * SIZE**-0.5
    if real is not None:
        scores = scores.masked_fill(~real[:, None, None], -math.inf)
    self.keep(scores)
    return join(scores.softmax(dim=-1) @ v)


def cross_fused(self, x, memory, real=None):
    q, k, v = split(self.q(x)), split(self.k(memory)), split(self.v(memory))
    mask = None if real is None else real[:, None, None]
    scores = q @ k.mT * SIZE**-0.5
    self.keep(scores if mask is None else scores.masked_fill(~mask, -math.inf))
    return join(functional.scaled_dot_product_attention(q, k, v, mask))


def cached(self, x, past):
    """Keys of earlier tokens stand before those of the tokens."""
    q, k, v = split(self.q(x)), split(self.k(x)), split(self.v(x))
    past_k, past_v = split(self.k(past)), split(self.v(past))
    k, v = torch.cat([past_k, k], dim=2), torch.cat([past_v, v], dim=2)
    seen = torch.ones(x.shape[1], k.shape[2]).tril(past.shape[1]).bool()
    scores = q @ k.mT * SIZE**-0.5
    self.keep(scores.masked_fill(~seen, -math.inf))
    return join(functional.scaled_dot_product_attention(q, k, v, attn_mask=seen))


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("lengths", [(T, 9), (5, T), (1, T)])
@pytest.mark.parametrize("attend", [cross, cross_fused, cached], ids=name_of)
def test_other_numbers_of_keys_than_queries(attend, lengths, batch):
    model = Replica(attend)
    queries, keys = lengths
    (heads,) = measured(model, states(batch, queries), states(batch, keys, seed=2))
    assert heads == pytest.approx(entropy_of(model.truth).tolist(), abs=1e-5)


@pytest.mark.parametrize("attend", [cross, cross_fused], ids=name_of)
def test_padding_of_what_is_attended_to_is_no_padding_of_queries(attend):
    model = Replica(attend)
    (heads,) = measured(model, states(3, 9), states(3, T, seed=2), padding(3))
    assert heads == pytest.approx(entropy_of(model.truth).tolist(), abs=1e-5)


class Image(nn.Module):
    """Convolutional queries, keys and values with channels first, weights on the right (CoAtNet, BoTNet, MaxViT)."""

    def __init__(self, order: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv, self.order = nn.Conv2d(6, 3 * D, 1), order
        with torch.no_grad():
            for h in range(H):
                self.qkv.weight[SIZE * h : SIZE * (h + 1)] *= 1 + 2 * h
        self.truth = torch.empty(0)

    def forward(self, x):
        q, k, v = self.qkv(x).flatten(2).unflatten(1, (3, H, SIZE)).unbind(1)  # (B, H, d, XY)
        q = q * SIZE**-0.5
        if self.order == "queries first":
            scores = q.transpose(-1, -2) @ k
            self.truth = scores.detach()
            y = v @ scores.softmax(dim=-1).transpose(-1, -2)
        else:
            scores = k.transpose(-1, -2) @ q
            self.truth = scores.detach().mT
            y = v @ scores.softmax(dim=-2)
        return y.flatten(1, 2).view(len(x), D, *x.shape[2:])


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("order", ["queries first", "keys first"])
def test_channels_first(order, batch):
    model = Image(order)
    (heads,) = measured(
        model, torch.randn(batch, 6, 3, 5, generator=torch.Generator().manual_seed(1))
    )
    assert heads == pytest.approx(entropy_of(model.truth).tolist(), abs=1e-5)


class MaskedSoftmax(torch.autograd.Function):
    """DeBERTa's and SEW-D's own softmax: masked in place before and after, with a gradient of its own."""

    @staticmethod
    def forward(ctx, scores, mask):
        hidden = ~mask.bool()
        p = torch.softmax(scores.masked_fill(hidden, torch.finfo(scores.dtype).min), dim=-1)
        p.masked_fill_(hidden, 0)
        ctx.save_for_backward(p)
        return p

    @staticmethod
    def backward(ctx, gradient):
        (p,) = ctx.saved_tensors
        return p * (gradient - (p * gradient).sum(-1, keepdim=True)), None


def own_softmax(self, x, real=None):
    q, k, v = (split(layer(x)).flatten(0, 1) for layer in (self.q, self.k, self.v))
    scores = torch.bmm(q, k.transpose(-1, -2)).unflatten(0, (len(x), H)) * SIZE**-0.5
    mask = (
        torch.ones(len(x), 1, T, T) if real is None else (real[:, None] & real[:, :, None])[:, None]
    )
    self.keep(scores.masked_fill(mask == 0, -1e30))
    p = MaskedSoftmax.apply(scores, mask)
    return join(torch.bmm(p.flatten(0, 1), v).unflatten(0, (len(x), H)))


@pytest.mark.parametrize("batch", [2, H])
@pytest.mark.parametrize("is_padded", [False, True])
def test_a_softmax_with_a_gradient_of_its_own(is_padded, batch):
    model = Replica(own_softmax)
    real = padding(batch) if is_padded else None
    (heads,) = measured(model, states(batch), *([real] if is_padded else []))
    assert heads == pytest.approx(entropy_of(model.truth, real).tolist(), abs=1e-5)


# Styles that are refused


def sigmoid(self, x):
    q, k, v = split(self.q(x)), split(self.k(x)), split(self.v(x))
    return join((q @ k.mT * SIZE**-0.5 - math.log(T)).sigmoid() @ v)


def squared_relu(self, x):
    q, k, v = split(self.q(x)), split(self.k(x)), split(self.v(x))
    return join(((q @ k.mT * SIZE**-0.5).relu().square() / T) @ v)


def sparsemax(self, x):
    q, k, v = split(self.q(x)), split(self.k(x)), split(self.v(x))
    scores = q @ k.mT * SIZE**-0.5
    ordered = scores.sort(dim=-1, descending=True).values
    total = ordered.cumsum(dim=-1) - 1
    counts = torch.arange(1, T + 1)
    support = (ordered * counts > total).sum(dim=-1, keepdim=True)
    threshold = total.gather(-1, support - 1) / support
    return join((scores - threshold).clamp(min=0) @ v)


def retention(self, x):
    """RetNet: scores decay with the distance, and no softmax follows."""
    q, k, v = split(self.q(x)), split(self.k(x)), split(self.v(x))
    decay = (
        0.9 ** (torch.arange(T)[:, None] - torch.arange(T)).clamp(min=0) * torch.ones(T, T).tril()
    )
    return join((q @ k.mT * decay) @ v)


def linear(self, x):
    """Positive features instead of a softmax, keys times values first."""
    q, k, v = split(self.q(x)), split(self.k(x)), split(self.v(x))
    q, k = functional.elu(q) + 1, functional.elu(k) + 1
    context = torch.einsum("bhnd,bhne->bhde", k, v)
    norm = 1 / torch.einsum("bhnd,bhd->bhn", q, k.sum(dim=2))
    return join(torch.einsum("bhde,bhnd,bhn->bhne", context, q, norm))


def linear_by_matmul(self, x):
    q, k, v = split(self.q(x)), split(self.k(x)), split(self.v(x))
    return join(q.relu() @ (k.relu().mT @ v / T))


def linear_with_softmaxes(self, x):
    """Efficient attention: queries are normalised over channels, keys over tokens."""
    q, k, v = split(self.q(x)), split(self.k(x)), split(self.v(x))
    context = torch.einsum("bhnd,bhne->bhde", k.softmax(dim=-2), v)
    return join(torch.einsum("bhnd,bhde->bhne", q.softmax(dim=-1), context))


def performer(self, x):
    """Random features of queries and keys."""
    q, k, v = split(self.q(x)), split(self.k(x)), split(self.v(x))
    features = torch.randn(SIZE, 20, generator=torch.Generator().manual_seed(5))
    q, k = ((t @ features - t.square().sum(-1, keepdim=True) / 2).exp() for t in (q / 3, k / 3))
    return join(q @ (k.mT @ v) / (q @ k.sum(dim=2)[..., None]))


def lightning(self, x):
    """MiniMax: in blocks; scores without a softmax inside of a block, linear attention to the blocks before."""
    q, k, v = split(self.q(x)), split(self.k(x)), split(self.v(x))
    context = torch.zeros(len(x), H, SIZE, SIZE)
    parts = []
    for n in range(0, T, 7):
        block = slice(n, n + 7)
        inside = (q[:, :, block] @ k[:, :, block].mT).tril() @ v[:, :, block]
        parts.append(inside + q[:, :, block] @ context)
        context = 0.9 * context + k[:, :, block].mT @ v[:, :, block]
    return join(torch.cat(parts, dim=2))


def recurrence(self, x):
    """RWKV: a running mean, channel by channel."""
    weights = self.k(x).exp()
    return (weights * self.v(x)).cumsum(dim=1) / weights.cumsum(dim=1) * self.q(x).sigmoid()


def outlook(self, x):
    """VOLO: weights of a token's neighbours are projected from the token itself."""
    values = functional.pad(self.v(x), (0, 0, 1, 1)).unfold(1, 3, 1)  # (B, T, D, 3)
    values = values.unflatten(2, (H, SIZE)).permute(0, 2, 1, 4, 3)  # (B, H, T, 3, d)
    weights = self.weights(x).unflatten(-1, (H, 1, 3)).transpose(1, 2)  # (B, H, T, 1, 3)
    return join((weights.softmax(dim=-1) @ values).squeeze(-2))


def additive(self, x):
    """Bahdanau: scores are a map of the sum of a query and a key."""
    q, k, v = split(self.q(x)), split(self.k(x)), split(self.v(x))
    scores = torch.tanh(q[:, :, :, None] + k[:, :, None]).sum(dim=-1)  # (B, H, T, T)
    return join(scores.softmax(dim=-1) @ v)


def sliding_chunks(self, x):
    """Longformer: scores of overlapping chunks are rearranged so that each token has a row of its neighbours."""
    q, k, v = split(self.q(x)), split(self.k(x)), split(self.v(x))
    padded_k, padded_v = (
        functional.pad(t, (0, 0, 2, 2)).unfold(2, 5, 1) for t in (k, v)
    )  # (B, H, T, d, 5)
    chunks = (q.unflatten(2, (7, 2)) @ k.unflatten(2, (7, 2)).mT).flatten(3)  # (B, H, 7, 4)
    neighbours = (q[..., None] * padded_k).sum(dim=3)  # (B, H, T, 5)
    p = (neighbours + chunks.mean()).softmax(dim=-1)
    return join((p[:, :, :, None] * padded_v).sum(dim=-1))


def talking_after_softmax(self, x):
    q, k, v = split(self.q(x)), split(self.k(x)), split(self.v(x))
    p = (q @ k.mT * SIZE**-0.5).softmax(dim=-1)
    return join(torch.einsum("b h i j, h g -> b g i j", p, self.mix) @ v)


def renormalised(self, x):
    """Weights are divided by their sum over the queries (slot attention)."""
    q, k, v = split(self.q(x)), split(self.k(x)), split(self.v(x))
    p = (q @ k.mT * SIZE**-0.5).softmax(dim=-2) + 1e-8
    return join((p / p.sum(dim=-1, keepdim=True)) @ v)


def masked_after_softmax(self, x):
    """Some weights are set to 0 and the others are left as they are."""
    q, k, v = split(self.q(x)), split(self.k(x)), split(self.v(x))
    p = (q @ k.mT * SIZE**-0.5).softmax(dim=-1)
    return join(p.tril() @ v)


def channels(self, x):
    """XCiT."""
    q, k, v = (split(layer(x)).mT for layer in (self.q, self.k, self.v))  # (B, H, d, T)
    p = (functional.normalize(q, dim=-1) @ functional.normalize(k, dim=-1).mT).softmax(dim=-1)
    return join((p @ v).mT)


def blocks(self, x):
    """A loop over blocks of queries, as large as the batch, as block-sparse attention has it."""
    q, k, v = split(self.q(x)), split(self.k(x)), split(self.v(x))
    n = len(x)
    parts = [(q[:, :, i : i + n] @ k.mT).softmax(dim=-1) @ v for i in range(0, T, n)]
    return join(torch.cat(parts, dim=2))


REFUSED = [
    (sigmoid, "no-softmax"),
    (squared_relu, "no-softmax"),
    (sparsemax, "no-softmax"),
    (retention, "no-softmax"),
    (linear, "linear"),
    (linear_by_matmul, "linear"),
    (linear_with_softmaxes, "linear"),
    (performer, "linear"),
    (lightning, "linear"),
    (recurrence, "unseen"),
    (outlook, "not-dot-product"),
    (additive, "not-dot-product"),
    (sliding_chunks, "chunks"),
    (talking_after_softmax, "no-product"),
    (renormalised, "no-product"),
    (masked_after_softmax, "no-product"),
    (channels, "channels"),
    (blocks, "pieces"),
]


@pytest.mark.parametrize("batch", [2])
@pytest.mark.parametrize(
    ("attend", "code"), REFUSED, ids=lambda value: getattr(value, "__name__", value)
)
def test_what_cannot_be_measured_is_refused_with_the_true_reason(attend, code, batch):
    model = Attention(attend, mix=parameter(H, H), weights=nn.Linear(D, 3 * H))
    text = reasons(model, states(batch))
    assert text.endswith(f"[{code}]")
    assert "Attention" in text


@pytest.mark.parametrize(
    ("attend", "code"), REFUSED, ids=lambda value: getattr(value, "__name__", value)
)
def test_a_layer_that_is_refused_does_not_hide_another_one(attend, code):
    refused = Attention(attend, mix=parameter(H, H), weights=nn.Linear(D, 3 * H))
    model = nn.Sequential(refused, Replica(hand_written))
    with joma.watch(model, every=1, gauges="entropy", live=False) as w:
        model(states(2))
        with pytest.warns(joma.JomaWarning, match=rf"\b0\b.*\[{code}\]"):
            w.step()
        assert set(w.frame().module) == {"1"}


@pytest.mark.parametrize("compiler", ["script", "trace"])
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_torchscript_is_named(compiler):
    class Scripted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(D, 3 * D)

        def forward(self, x):
            q, k, v = self.qkv(x).chunk(3, dim=-1)
            return torch.softmax(q @ k.transpose(-1, -2), dim=-1) @ v

    inner = Scripted()
    inner = torch.jit.script(inner) if compiler == "script" else torch.jit.trace(inner, states(2))
    text = reasons(nn.Sequential(inner, nn.Linear(D, D)), states(2))
    assert "0 (Scripted)" in text
    assert text.endswith("[torchscript]")


class Talking(nn.Module):
    """CaiT: heads are mixed before and after the softmax, by matrices that begin near the identity."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv, self.proj = nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.proj_l, self.proj_w = nn.Linear(H, H), nn.Linear(H, H)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, H, SIZE)).permute(2, 0, 3, 1, 4).unbind(0)
        scores = q * SIZE**-0.5 @ k.transpose(-2, -1)
        scores = self.proj_l(scores.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        p = scores.softmax(dim=-1)
        p = self.proj_w(p.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return self.proj(join(p @ v))


@pytest.mark.parametrize("length", [T, 197])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_talking_heads_are_refused_in_every_precision(dtype, length):
    text = reasons(Talking().to(dtype), states(2, length).to(dtype))
    assert text.endswith("[no-product]")


class Kernel(nn.Module):
    """A module without parameters around the fused kernel."""

    def forward(self, q, k, v):
        return functional.scaled_dot_product_attention(q, k, v)


class Differential(nn.Module):
    """The maps come from modules inside, and the difference is made outside of them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv, self.kernel = nn.Linear(D, 3 * D), Kernel()

    def forward(self, x):
        q, k, v = (split(t) for t in self.qkv(x).chunk(3, dim=-1))
        (q1, q2), (k1, k2) = q.chunk(2, dim=-1), k.chunk(2, dim=-1)
        return join(self.kernel(q1, k1, v) - 0.3 * self.kernel(q2, k2, v))


def test_a_difference_of_maps_that_modules_inside_compute_is_refused():
    assert reasons(Differential(), states(2)).endswith("[difference]")


# Modules of PyTorch, and models of transformers


@pytest.mark.parametrize("needs_weights", [False, True])
@pytest.mark.parametrize("extra", ["add_bias_kv", "add_zero_attn"])
def test_extra_keys_of_multihead_attention_are_no_padding(extra, needs_weights):
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.attention = nn.MultiheadAttention(D, H, batch_first=True, **{extra: True})

        def forward(self, x, is_padding):
            return self.attention(x, x, x, key_padding_mask=is_padding, need_weights=needs_weights)[
                0
            ]

    model = Model()
    real = padding(3)
    _, p = model.attention(
        states(3), states(3), states(3), key_padding_mask=~real, average_attn_weights=False
    )
    (heads,) = measured(model, states(3), ~real)
    assert heads == pytest.approx(entropy_of_probabilities(p, real).tolist(), abs=1e-5)


SMALL = {
    "vocab_size": 61, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 40, "max_position_embeddings": 64,
}  # fmt: skip


def public(name: str, **settings) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**settings)
    model = getattr(transformers, f"{name}Model")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)  # attention that is not uniform
    return model


def tokens(length: int = 16) -> torch.Tensor:
    return torch.randint(3, 61, (2, length), generator=torch.Generator().manual_seed(1))


def layer_means(model: nn.Module, *inputs, **arguments) -> list[float]:
    with joma.watch(model, every=1, gauges="entropy", live=False) as w:
        model(*inputs, **arguments)
        return list(w.step().values())


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")  # of transformers
def test_disentangled_attention_is_right():
    """DeBERTa: terms of positions, and padded queries whose weights are set to 0."""
    model = public(
        "DebertaV2",
        **SMALL,
        relative_attention=True,
        pos_att_type=["p2c", "c2p"],
        position_buckets=8,
    )
    real = torch.arange(16) < torch.tensor([[16], [11]])
    attentions = model(tokens(), attention_mask=real.long(), output_attentions=True).attentions
    expected = [float(entropy_of_probabilities(p, real).mean()) for p in attentions]
    assert layer_means(model, tokens(), attention_mask=real.long()) == pytest.approx(
        expected, abs=1e-5
    )


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")  # of transformers
def test_disentangled_attention_of_speech_is_right():
    """SEW-D changes its weights in place, inside of a function with a gradient of its own."""
    model = public(
        "SEWD", hidden_size=24, num_hidden_layers=2, num_attention_heads=2, intermediate_size=40, conv_dim=(16, 16),
        conv_kernel=(4, 4), conv_stride=(4, 4), num_conv_pos_embeddings=8, num_conv_pos_embedding_groups=2,
        squeeze_factor=2, max_position_embeddings=64, position_buckets=8,
    )  # fmt: skip
    sound = torch.randn(2, 1000, generator=torch.Generator().manual_seed(1))
    attentions = model(sound, output_attentions=True).attentions
    expected = [float(entropy_of_probabilities(p).mean()) for p in attentions]
    assert layer_means(model, sound) == pytest.approx(expected, abs=1e-5)


def test_blocks_of_tokens_are_right_though_the_last_one_is_padded():
    """LongT5 attends in blocks, which are averaged over like samples, and pads the last one."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 61,
        "d_model": 24,
        "d_kv": 12,
        "d_ff": 40,
        "num_layers": 2,
        "num_heads": 2,
    }
    model = transformers.LongT5EncoderModel(
        transformers.LongT5Config(**sizes, local_radius=3)
    ).eval()
    for length in (16, 14):
        attentions = model(
            tokens(length), output_attentions=True
        ).attentions  # (B, blocks, H, 4, 12)
        rows = [
            torch.special.entr(p.detach().double()).sum(-1).transpose(1, 2).flatten(2)
            for p in attentions
        ]
        expected = [float(row[..., :length].mean()) for row in rows]
        assert layer_means(model, tokens(length)) == pytest.approx(expected, abs=1e-5)


def code_of(model: nn.Module, length: int = 16) -> str:
    """Return the code of the message about a model of which nothing is measured."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with joma.watch(model, every=1, gauges="entropy", live=False) as w:
            model(tokens(length))
            assert w.step() == {}
    message = str(caught[-1].message)
    return message.rpartition("[")[2].partition("]")[0]


def test_public_models_are_refused_with_the_true_reason():
    assert code_of(public("Longformer", **SMALL, attention_window=4)) == "chunks"
    linear_layers = ["linear_attention", "linear_attention"]
    sizes = {"num_key_value_heads": 2, "head_dim": 12, "num_local_experts": 2, "block_size": 8}
    assert code_of(public("MiniMax", **SMALL, **sizes, layer_types=linear_layers)) == "linear"
    assert (
        code_of(
            public("Rwkv", vocab_size=61, context_length=32, hidden_size=24, num_hidden_layers=2)
        )
        == "unseen"
    )
    sparse = {"attention_type": "block_sparse", "block_size": 2, "num_random_blocks": 1}
    assert code_of(public("BigBird", **SMALL, **sparse), 32) == "pieces"
