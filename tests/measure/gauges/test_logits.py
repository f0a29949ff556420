"""The largest logit within its certificate, and attention received, against brute force in float64."""

from __future__ import annotations

import math
import random

import pytest
import torch

import joma
from joma._measure.gauges.logits import EagerLogits, logits_of
from tests.measure.watch.models import LENGTH, VOCABULARY, HandWrittenGPT, sharpen


def brute_force(q, k, attn_mask=None, is_causal=False, scale=None, softcap=None):
    """Scores (B, H, Tq, Tk) in float64, −inf where masked."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    s = q.double() @ k.double().mT * scale
    if softcap is not None:
        s = softcap * torch.tanh(s / softcap)
    if is_causal:
        s = s.masked_fill(~torch.ones(s.shape[-2:], dtype=torch.bool).tril(), -math.inf)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        s = s.masked_fill(~attn_mask, -math.inf)
    elif attn_mask is not None:
        s = s + attn_mask.double()
        s = s.masked_fill(~(attn_mask > torch.finfo(attn_mask.dtype).min / 2), -math.inf)
    return s


def drawn(rng):
    """A random case: queries and keys whose scores reach up to ± 5,000, and arguments."""
    B, H, Tq, Tk, d = (
        rng.randint(1, 2),
        rng.choice([1, 2, 4]),
        rng.randint(1, 20),
        rng.randint(1, 20),
        rng.choice([1, 4, 16]),
    )
    Hk = rng.choice([h for h in (1, 2, 4) if H % h == 0])
    q, k = torch.randn(B, H, Tq, d), torch.randn(B, Hk, Tk, d)
    scale = rng.choice([None, 0.3, -1.0])
    reach = 10 ** rng.uniform(-2, math.log10(5000))
    q = q * reach / brute_force(q, k, scale=scale).abs().max().clamp(min=1e-9).float()
    settings = {"scale": scale, "is_causal": rng.random() < 0.3}
    if not settings["is_causal"]:
        shape = (rng.choice([1, B]), rng.choice([1, H]), rng.choice([1, Tq]), Tk)
        keep = torch.rand(shape) < rng.choice([0.1, 0.5, 1.0])
        bias = torch.randn(shape) * rng.choice([1.0, 1000.0])
        lowest = rng.choice([-math.inf, torch.finfo(torch.float32).min])
        masks = [
            None,
            keep,
            torch.zeros(shape).masked_fill(~keep, lowest),
            bias.masked_fill(~keep, lowest),
        ]
        settings["attn_mask"] = rng.choice(masks)
    settings["softcap"] = rng.choice([None, None, 30.0])
    return q, k, settings


def check(bounds, s):
    """The certificate holds, and is narrow."""
    exact = s.amax(dim=(-2, -1))
    assert bool(((bounds.lower <= exact) & (exact <= bounds.upper)).all()), (bounds, exact)
    seen = exact.isfinite()
    assert bool(
        ((bounds.upper - bounds.lower)[seen] <= 1e-3 * exact[seen].abs().clamp(min=1.0)).all()
    )
    assert bool((bounds.value[~seen] == -math.inf).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_thousand_maxima_lie_inside_their_certificates(dtype):
    """Never outside, and at most 0.1 % of max(1, |max|) wide."""
    seed = 0 if dtype == torch.float32 else 1
    rng = random.Random(seed)
    torch.manual_seed(seed)
    for _ in range(500):
        q, k, settings = drawn(rng)
        q, k = q.to(dtype), k.to(dtype)
        s = brute_force(q, k, **settings)
        check(joma.max_logit(q, k, enable_gqa=True, **settings), s)


def test_the_bounds_need_their_rounding():
    """Without it they are violated, so that the test above can fail."""
    torch.manual_seed(0)
    outside = 0
    for _ in range(100):
        q, k = 40 * torch.randn(1, 2, 16, 16), 40 * torch.randn(1, 2, 16, 16)
        logits = logits_of(q, k)
        largest = logits._in_tiles(None, is_wide=False)[0].amax(dim=-1)
        exact = brute_force(q, k).amax(dim=(-2, -1))
        outside += int((exact != largest).any())
    assert outside > 50


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_received_against_brute_force(dtype):
    """Of real queries, as a share of those that see the key."""
    rng = random.Random(1)
    torch.manual_seed(1)
    for _ in range(80):
        q, k, settings = drawn(rng)
        q, k = (q / max(1.0, float(q.abs().max()) / 20)).to(dtype), k.to(dtype)
        rows = rng.choice([None, torch.rand(q.shape[0], 1, q.shape[2]) < 0.7])
        s = brute_force(q, k, **settings)
        p = torch.where((s > -math.inf).any(dim=-1, keepdim=True), s.softmax(dim=-1), 0.0)
        real = (torch.ones((), dtype=torch.float64) if rows is None else rows.double()).expand(
            s.shape[:3]
        )
        mass = (p * real[..., None]).sum(dim=2)
        seen = ((s > -math.inf) * real[..., None]).sum(dim=2)
        received = joma.attention_received(q, k, enable_gqa=True, rows=rows, **settings)
        torch.testing.assert_close(received.seen_by.double(), seen, atol=0, rtol=0)
        torch.testing.assert_close(
            received.share.double(), mass / seen, atol=1e-4, rtol=0, equal_nan=True
        )
        eager = EagerLogits(s).received(rows)
        torch.testing.assert_close(
            eager.share.double(), mass / seen, atol=1e-4, rtol=0, equal_nan=True
        )


def test_the_largest_share_is_of_keys_that_are_seen_often():
    """The last key is seen by one query, which attends to it alone: no sink."""
    q = torch.tensor([[[[0.0], [0.0], [0.0], [1.0]]]])
    k = torch.tensor([[[[0.0], [0.0], [0.0], [50.0]]]])
    received = joma.attention_received(q, k, is_causal=True, scale=1.0)
    assert float(received.share[0, 0, 3]) == pytest.approx(1.0)
    # key 0: all of query 0, a half, a third and nothing of the others
    assert float(received.largest_share[0, 0]) == pytest.approx((1 + 1 / 2 + 1 / 3) / 4)


GAUGES = ("max_logit", "largest_share", "sink_rate", "query_norm", "key_norm", "value_norm")


@pytest.mark.parametrize("how", ["sdpa", "eager"])
def test_gauges_of_a_model(how):
    torch.manual_seed(0)
    model = sharpen(HandWrittenGPT(how), 12.0)
    chosen = GAUGES if how == "sdpa" else GAUGES[:3]
    batches = [torch.randint(VOCABULARY, (2, LENGTH)) for _ in range(2)]
    tops, shares = [], []
    with joma.watch(model, gauges=("entropy", *chosen)) as w:
        for tokens in batches:
            model(tokens).sum().backward()
            scores = torch.stack(
                [block.attn.last for block in model.blocks]
            ).double()  # (layers, B, H, T, T)
            tops.append(scores.amax(dim=(-2, -1)))
            seen = torch.arange(LENGTH, 0, -1)
            shares.append((scores.softmax(-1).sum(dim=-2) / seen)[..., : LENGTH // 2 + 1].amax(-1))
        metrics = w.step()
    top, share = (
        torch.cat(tops, dim=1).amax(dim=1),
        torch.cat(shares, dim=1),
    )  # (layers, H), (layers, B, H)
    torch.testing.assert_close(w.latest.values["max_logit"], top, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(
        w.latest.values["largest_share"], share.mean(dim=1), atol=1e-5, rtol=0
    )
    torch.testing.assert_close(w.latest.values["sink_rate"], (share > 0.3).double().mean(dim=1))
    assert metrics["joma/max_logit/layer_01"] == pytest.approx(float(top[1].max()), rel=1e-5)
    if how == "sdpa":
        norms = w.latest.values["query_norm"] * w.latest.values["key_norm"] / math.sqrt(8)
        assert bool((norms >= top).all())


def test_what_needs_queries_and_keys_says_so_of_eager_attention():
    model = HandWrittenGPT("eager")
    with joma.watch(model, gauges=("entropy", "key_norm")) as w:
        model(torch.randint(VOCABULARY, (2, LENGTH))).sum().backward()
        with pytest.warns(UserWarning, match="key_norm.*eager"):
            w.step()


def test_padding_sends_nothing():
    """Queries that are padding count neither in the maximum nor in what keys receive."""
    torch.manual_seed(0)
    model = sharpen(HandWrittenGPT("sdpa"), 10.0)
    tokens = torch.randint(VOCABULARY, (2, LENGTH))
    values = []
    for more in (0, 6):
        real = torch.arange(LENGTH + more).expand(2, -1) < LENGTH
        with joma.watch(
            model, gauges=GAUGES[:3], padding=lambda args, kwargs, real=real: real
        ) as w:
            model(torch.cat([tokens, torch.randint(VOCABULARY, (2, more))], dim=1)).sum().backward()
            w.step()
        values.append(w.latest.values)
    for gauge in GAUGES[:3]:
        torch.testing.assert_close(values[0][gauge], values[1][gauge], atol=1e-5, rtol=1e-5)


def test_not_a_number_shows():
    q = torch.randn(1, 1, 4, 8)
    q[0, 0, 2, 3] = math.nan
    assert joma.max_logit(q, torch.randn(1, 1, 4, 8)).value.isnan().all()


@pytest.mark.parametrize("gauge", ["max_logit", "largest_share"])
def test_a_sample_of_queries_cannot_tell_them(gauge):
    with pytest.raises(ValueError, match=f"{gauge}.*leave out queries="):
        joma.watch(HandWrittenGPT("sdpa"), gauges=gauge, queries=8)
