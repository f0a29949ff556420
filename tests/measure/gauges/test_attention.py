"""Attention statistics against brute force in float64: masks, shapes, types, paths."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from joma._measure.gauges import attention, kernels
from joma._measure.gauges.attention import attention_stats, attention_stats_from_scores
from joma._measure.gauges.logits import max_logit


def brute_force(q, k, mask=None, is_causal=False, scale=None, softcap=None):
    """Scores (B, H, Tq, Tk) in float64 with −inf where masked, and the statistics from the definition."""
    q, k = q.double(), k.double().repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    s = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    if is_causal:
        s = s.masked_fill(~torch.ones(s.shape[-2:], dtype=torch.bool).tril(), -math.inf)
    if mask is not None:
        s = s.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else s + mask.double()
    return s, *statistics(s)


def statistics(s):
    seen = s > -1e300
    none = ~seen.any(-1, keepdim=True)
    p = torch.softmax(s.masked_fill(none, 0.0), dim=-1).masked_fill(none, 0.0)
    entropy = -torch.special.xlogy(p, p).sum(-1)
    sink = seen.any(dim=2, keepdim=True).int().argmax(-1, keepdim=True)
    mass = p.gather(-1, sink.expand(*p.shape[:3], 1))[..., 0]
    return entropy, torch.logsumexp(s, -1), mass, seen.sum(-1)


def close(stats, expected, tolerance):
    entropy, lse, mass, visible = expected
    assert (stats.entropy - entropy).abs().max() <= tolerance
    seen = visible > 0
    assert torch.equal(stats.visible, visible)
    assert (stats.entropy[~seen] == 0).all()
    scale = 1 + lse[seen].abs().max() if seen.any() else 1
    assert not seen.any() or (stats.logsumexp[seen] - lse[seen]).abs().max() <= 1e-5 * scale
    assert (stats.sink_mass - mass).abs().max() <= 1e-4


MASKS = ("none", "causal", "bool", "padding", "rows", "minus_inf", "finfo_min", "bias", "alibi")


def make_mask(kind, B, H, Tq, Tk, generator):
    if kind in ("none", "causal"):
        return None
    if (
        kind == "padding"
    ):  # some keys of each sequence, the same for all queries; at least one stays
        keep = torch.rand(B, 1, 1, Tk, generator=generator) > 0.4
        keep[..., -1] = True
        return keep
    keep = torch.rand(B, 1, Tq, Tk, generator=generator) > 0.4
    keep[..., 0] = True
    if kind == "bool":
        return keep
    if kind == "rows":  # some queries see nothing at all
        return keep & (torch.rand(B, H, Tq, 1, generator=generator) > 0.5)
    if kind == "minus_inf":
        return torch.zeros(keep.shape).masked_fill(~keep, -math.inf)
    if kind == "finfo_min":
        return torch.zeros(keep.shape).masked_fill(~keep, torch.finfo(torch.float32).min)
    if kind == "bias":
        return torch.randn(1, H, Tq, Tk, generator=generator)
    slopes = 2.0 ** -torch.arange(1, H + 1)[:, None, None]
    return -slopes * (torch.arange(Tq)[:, None] - torch.arange(Tk)).abs()  # (H, Tq, Tk)


@settings(max_examples=150, deadline=None)
@given(
    kind=st.sampled_from(MASKS),
    B=st.integers(1, 3),
    Hk=st.integers(1, 3),
    group=st.integers(1, 3),
    Tq=st.integers(1, 9),
    Tk=st.integers(1, 9),
    d=st.sampled_from([1, 4, 8, 17]),
    size=st.sampled_from([0.0, 1.0, 6.0]),
    seed=st.integers(0, 2**31),
)
def test_every_mask_and_shape_agrees_with_brute_force(kind, B, Hk, group, Tq, Tk, d, size, seed):
    generator = torch.Generator().manual_seed(seed)
    H = Hk * group
    q = size * torch.randn(B, H, Tq, d, generator=generator)
    k = torch.randn(B, Hk, Tk, d, generator=generator)
    mask = make_mask(kind, B, H, Tq, Tk, generator)
    causal = kind == "causal"
    stats = attention_stats(q, k, mask, is_causal=causal, enable_gqa=True)
    if kind == "finfo_min":
        mask = mask.masked_fill(mask < -1e30, -math.inf)
    close(stats, brute_force(q, k, mask, causal)[1:], 1e-4)


@pytest.mark.parametrize("kind", ["none", "causal", "bool", "rows", "bias"])
def test_scores_up_to_100_at_2048_tokens_within_1e_4_nats(kind):
    generator = torch.Generator().manual_seed(0)
    T = 2048
    q, k = (math.sqrt(17) * torch.randn(1, 2, T, 64, generator=generator) for _ in range(2))
    mask = make_mask(kind, 1, 2, T, T, generator)
    scores, *expected = brute_force(q, k, mask, kind == "causal")
    assert 80 < scores[scores.isfinite()].abs().max() < 120
    close(attention_stats(q, k, mask, is_causal=kind == "causal"), expected, 1e-4)


@pytest.mark.parametrize("case", ["huge", "offset", "one_hot", "bfloat16", "float16"])
def test_where_low_precision_hurts_it_stays_within_1e_3_nats(case):
    generator = torch.Generator().manual_seed(1)
    q, k = (torch.randn(1, 2, 300, 64, generator=generator) for _ in range(2))
    if case == "huge":
        q = q * 900
    elif case == "offset":
        q, k = 3 * q, k + 300 * torch.randn(64, generator=generator)
    elif case == "one_hot":
        q = 30 * k.roll(1, dims=2)
    else:
        q, k = ((4 * x).to(getattr(torch, case)) for x in (q, k))
    scores, *expected = brute_force(q, k, is_causal=True)
    if case == "huge":
        assert scores[scores.isfinite()].abs().max() > 3000
    stats = attention_stats(q, k, is_causal=True)
    assert stats.entropy.dtype == torch.float32
    assert (stats.entropy - expected[0]).abs().max() <= 1e-3


def test_fused_and_chunked_paths_agree(monkeypatch):
    q, k = torch.randn(2, 3, 50, 16), torch.randn(2, 3, 70, 16)
    mask = torch.rand(2, 1, 50, 70) > 0.3
    for arguments in ({}, {"is_causal": True}, {"attn_mask": mask}):
        fused = attention_stats(q, k, **arguments)
        with monkeypatch.context() as patch:
            patch.setattr(attention, "has_kernel", lambda device: False)
            chunked = attention_stats(q, k, **arguments)
        for name in ("entropy", "logsumexp", "sink_mass"):
            torch.testing.assert_close(
                getattr(fused, name), getattr(chunked, name), atol=2e-5, rtol=2e-5
            )


def test_chunks_do_not_change_the_answer(monkeypatch):
    q, k, bias = torch.randn(2, 4, 33, 8), torch.randn(2, 2, 33, 8), torch.randn(33, 33)
    for mask in (None, bias):
        whole = attention_stats(q, k, mask, enable_gqa=True)
        with monkeypatch.context() as patch:
            patch.setattr(kernels, "CHUNK_ELEMENTS", 200)
            patch.setattr("joma._measure.gauges.scores.TILE_ELEMENTS", 200)
            parts = attention_stats(q, k, mask, enable_gqa=True)
        torch.testing.assert_close(whole.entropy, parts.entropy, atol=1e-6, rtol=0)


def test_soft_capping():
    q, k = 8 * torch.randn(1, 2, 20, 8), torch.randn(1, 2, 20, 8)
    mask = torch.ones(20, 20, dtype=torch.bool).tril()
    close(attention_stats(q, k, mask, softcap=5.0), brute_force(q, k, mask, softcap=5.0)[1:], 1e-5)


def test_uniform_causal_attention_over_35_tokens():
    q = torch.zeros(1, 1, 35, 8)
    stats = attention_stats(q, q, is_causal=True)
    assert abs(stats.mean().item() - math.lgamma(36) / 35) <= 1e-6
    torch.testing.assert_close(stats.effective_tokens[0, 0], torch.arange(1.0, 36))


def test_normalised_entropy_is_one_for_uniform_attention_and_left_out_for_a_single_key():
    q = torch.zeros(1, 1, 5, 4)
    normalised = attention_stats(q, q, is_causal=True).normalised_entropy[0, 0]
    assert normalised[0].isnan()
    torch.testing.assert_close(normalised[1:], torch.ones(4))


def test_nonsink_entropy_is_the_entropy_of_what_is_left():
    s = 3 * torch.randn(2, 3, 6, 9)
    stats = attention_stats_from_scores(s)
    p = torch.softmax(s.double(), -1)[..., 1:]
    p = p / p.sum(-1, keepdim=True)
    torch.testing.assert_close(
        stats.nonsink_entropy.double(), -torch.special.xlogy(p, p).sum(-1), atol=1e-5, rtol=0
    )
    parked = torch.tensor([[[[60.0, 0.0, 0.0]]]])
    assert attention_stats_from_scores(parked).nonsink_entropy.item() == pytest.approx(math.log(2))


@pytest.mark.parametrize("strength", [2.0, 8.0, 16.0, 40.0, 200.0])
@pytest.mark.parametrize(
    "path",
    [
        "all",
        "causal",
        "documents",
        "window",
        "bias",
        "softcap",
        "eager",
        "softmax",
        "half",
        "learned",
    ],
)
def test_what_is_next_to_a_sink_has_all_its_digits(path, strength):
    """The first key of each document takes all but about exp(−strength) of the attention."""
    T, d = 48, 16
    q, k = torch.randn(2, 3, T, d), torch.randn(2, 3, T, d)
    at = torch.arange(T)
    start = torch.where(at < 20, 0, 20) if path == "documents" else torch.zeros(T, dtype=torch.long)
    q[..., 0] = 1.0
    k[..., 0] = 0.0
    k[:, :, start.unique(), 0] = strength * math.sqrt(d)
    keep = (at <= at[:, None]) & (start == start[:, None])
    keep &= (at[:, None] - at < 30) if path == "window" else True
    keep |= path in ("all", "softcap")
    capped = {"softcap": 2 * strength} if path == "softcap" else {}
    s = q.double() @ k.double().mT / math.sqrt(d)
    s = 2 * strength * torch.tanh(s / (2 * strength)) if capped else s
    bias = -0.1 * (at[:, None] - at).abs() if path == "bias" else torch.zeros(T, T)
    s = (s + bias).masked_fill(~keep, -math.inf)
    sink = torch.full((2, 3, T, 1), 3.0, dtype=torch.float64) if path == "learned" else s[..., :0]
    p = torch.cat([s, sink], -1).softmax(-1)
    if path in ("eager", "softmax", "half", "learned"):
        kind = torch.bfloat16 if path == "half" else torch.float32
        scores = torch.cat([s, sink], -1).to(kind)
        given = {
            "learned": {"learned_sink": T},
            "softmax": {"probabilities": scores.softmax(-1)},
        }.get(path, {})
        given |= {"probabilities": scores.softmax(-1)} if path == "half" else {}
        stats = attention_stats_from_scores(scores, **given)
        s = scores.double()[..., :T]
        p = scores.double().softmax(-1)
    elif path in ("all", "causal", "softcap"):
        stats = attention_stats(q, k, is_causal=path == "causal", **capped)
    else:
        mask = keep if path != "bias" else bias.masked_fill(~keep, -math.inf)
        stats = attention_stats(q, k, mask)
    rest = (
        s.scatter(-1, start[:, None].expand(2, 3, T, 1), -math.inf).softmax(-1).nan_to_num()
    )  # none: nothing is left
    entropy = -torch.special.xlogy(rest, rest).sum(-1)
    torch.testing.assert_close(stats.nonsink_entropy.double(), entropy, atol=2e-5, rtol=0)
    on_sinks = p.gather(-1, start[:, None].expand(2, 3, T, 1))[..., 0] + p[..., T:].sum(-1)
    torch.testing.assert_close(stats.sink_mass.double(), on_sinks, atol=2e-5, rtol=0)
    torch.testing.assert_close(
        stats.entropy.double(), torch.special.entr(p).sum(-1), atol=2e-5, rtol=0
    )


def test_left_padding_moves_the_sink_to_the_first_real_token():
    q, k = torch.randn(1, 1, 4, 8), torch.randn(1, 1, 4, 8)
    mask = torch.tensor([False, True, True, True])[None, None, None]
    _, _, _, mass, _ = brute_force(q, k, mask)
    torch.testing.assert_close(
        attention_stats(q, k, mask).sink_mass.double(), mass, atol=1e-6, rtol=0
    )


@pytest.mark.parametrize("probability", [False, True])
def test_from_scores_and_from_probabilities(probability):
    s = 2 * torch.randn(2, 3, 7, 11)
    s[:, :, torch.ones(7, 11, dtype=torch.bool).triu(4)] = -math.inf
    given_ = torch.softmax(s, -1) if probability else s
    stats = attention_stats_from_scores(given_, is_probability=probability)
    entropy, _, mass, visible = statistics(s.double())
    torch.testing.assert_close(stats.entropy.double(), entropy, atol=1e-5, rtol=0)
    torch.testing.assert_close(stats.sink_mass.double(), mass, atol=1e-6, rtol=0)
    assert torch.equal(stats.visible, visible)


@pytest.mark.parametrize(
    "shape",
    [((0, 2, 3, 4), (0, 2, 5, 4)), ((2, 2, 0, 4), (2, 2, 5, 4)), ((2, 2, 3, 4), (2, 2, 0, 4))],
)
def test_empty_inputs(shape):
    stats = attention_stats(torch.randn(shape[0]), torch.randn(shape[1]))
    assert stats.entropy.shape == shape[0][:3]
    assert (stats.entropy == 0).all()
    assert stats.mean().isnan().all() or shape[1][2] > 0


def test_one_token_and_fewer_dimensions():
    assert attention_stats(torch.randn(1, 4), torch.randn(1, 4)).entropy.tolist() == [[[0.0]]]
    q, k = torch.randn(3, 5, 4), torch.randn(3, 5, 4)
    assert torch.equal(
        attention_stats(q, k).entropy[0], attention_stats(q[None], k[None]).entropy[0]
    )


def test_mean_leaves_out_padding_and_blind_queries():
    q, k = torch.randn(2, 2, 4, 8), torch.randn(2, 2, 4, 8)
    mask = torch.ones(2, 1, 4, 4, dtype=torch.bool)
    mask[0, :, 0] = False  # a blind query
    stats = attention_stats(q, k, mask)
    rows = torch.ones(2, 1, 4, dtype=torch.bool)
    rows[1, :, 2:] = False  # padding
    kept = torch.cat([stats.entropy[0, :, 1:], stats.entropy[1, :, :2]], dim=1)
    torch.testing.assert_close(stats.mean(rows=rows), kept.mean(1))


def test_no_gradient_and_no_change_of_the_inputs():
    q = torch.randn(1, 1, 3, 4, requires_grad=True)
    before = q.detach().clone()
    assert not attention_stats(q, q).entropy.requires_grad
    assert torch.equal(q.detach(), before)


@pytest.mark.parametrize(
    ("q", "k", "arguments", "message"),
    [
        ((1, 4, 3, 8), (1, 2, 3, 8), {}, "enable_gqa=True"),
        ((1, 4, 3, 8), (1, 3, 3, 8), {"enable_gqa": True}, "do not fit"),
        ((1, 4, 3, 8), (1, 4, 3, 7), {}, "same d"),
        (
            (1, 4, 3, 8),
            (1, 4, 5, 8),
            {"attn_mask": torch.ones(3, 4, dtype=torch.bool)},
            "does not broadcast",
        ),
        (
            (1, 4, 3, 8),
            (1, 4, 3, 8),
            {"attn_mask": torch.ones(3, 3), "is_causal": True},
            "not both",
        ),
    ],
)
def test_bad_input(q, k, arguments, message):
    with pytest.raises(ValueError, match=message):
        attention_stats(torch.randn(q), torch.randn(k), **arguments)


@pytest.mark.parametrize(
    "path", ["causal", "bool", "float", "bias", "softcap", "large", "eager", "eager, no softmax"]
)
def test_every_path_is_exact_to_1e_6_nats(path):
    """Against float64 by the definition, scores as float32 models have them; large: up to ± 150."""
    T, generator = 384, torch.Generator().manual_seed(5)
    q, k = torch.randn(2, 1, 3, T, 64, generator=generator)
    q = 35 * q if path == "large" else q
    keep = torch.ones(T, T, dtype=torch.bool).tril()
    float_mask = torch.zeros(T, T).masked_fill(~keep, -math.inf)
    slopes = 2.0 ** -torch.arange(1, 4)[:, None, None]
    mask = {
        "causal": None, "bool": keep, "float": float_mask, "large": keep, "softcap": float_mask,
        "bias": float_mask - slopes * (torch.arange(T)[:, None] - torch.arange(T)).abs(),
    }.get(path)  # fmt: skip
    causal, softcap = path == "causal", 3.0 if path == "softcap" else None
    if path.startswith("eager"):
        scores = (q @ k.mT / 8).masked_fill(~keep, -math.inf)
        softmax = scores.softmax(-1) if path == "eager" else None
        stats, expected = (
            attention_stats_from_scores(scores, probabilities=softmax),
            statistics(scores.double()),
        )
    else:
        stats = attention_stats(q, k, mask, causal, softcap=softcap)
        expected = brute_force(q, k, mask, causal, softcap=softcap)[1:]
    assert (stats.entropy - expected[0]).abs().max() <= 1e-6
    assert (stats.sink_mass - expected[2]).abs().max() <= 2e-6
    assert torch.equal(stats.visible.expand(expected[3].shape), expected[3])


LENGTHS = (4, 7, 1, 9)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("how", ["bool", "float", "bias", "eager"])
def test_packed_documents_have_a_sink_each(how, causal):
    """As if each document were alone: sink mass and non-sink entropy of its own first token."""
    generator = torch.Generator().manual_seed(2)
    T = sum(LENGTHS)
    q, k = torch.randn(2, 1, 2, T, 8, generator=generator)
    documents = torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS))
    keep = documents[:, None] == documents
    keep = keep.tril() if causal else keep
    bias = 0.1 * torch.randn(T, T, generator=generator) if how == "bias" else torch.zeros(T, T)
    mask = keep if how == "bool" else bias.masked_fill(~keep, -math.inf)
    if how == "eager":
        stats = attention_stats_from_scores((q @ k.mT / math.sqrt(8)) + mask)
    else:
        stats = attention_stats(q, k, mask)
    start = 0
    for length in LENGTHS:
        own = slice(start, start + length)
        alone = attention_stats(
            q[:, :, own], k[:, :, own], mask[own, own] if how == "bias" else keep[own, own]
        )
        for name in ("entropy", "sink_mass", "nonsink_entropy"):
            torch.testing.assert_close(
                getattr(stats, name)[..., own], getattr(alone, name), atol=2e-6, rtol=0
            )
        start += length


def test_a_sliding_window_is_one_document():
    q, k = torch.randn(2, 1, 1, 12, 4, generator=torch.Generator().manual_seed(0))
    position = torch.arange(12)
    window = (position[:, None] >= position) & (position[:, None] - position < 3)
    stats = attention_stats(q, k, window)
    assert (stats.sink_mass[..., 3:] == 0).all()  # the first token is out of sight
    assert (stats.sink_mass[..., :3] > 0).all()
    uniform = attention_stats(torch.zeros_like(q), k, window)
    torch.testing.assert_close(uniform.nonsink_entropy[..., 3:], torch.full((1, 1, 9), math.log(3)))
    torch.testing.assert_close(uniform.nonsink_entropy[..., 2], torch.full((1, 1), math.log(2)))


@pytest.mark.parametrize("column", [0, -1])
def test_a_learned_sink_is_a_sink(column):
    """Its mass counts with that of the first token, and what is left is the entropy of the other keys."""
    generator = torch.Generator().manual_seed(0)
    keys = torch.randn(1, 2, 6, 9, generator=generator)
    learned = torch.randn(1, 2, 1, 1, generator=generator).expand(-1, -1, 6, 1)
    scores = torch.cat([learned, keys] if column == 0 else [keys, learned], dim=-1)
    stats = attention_stats_from_scores(scores, learned_sink=column)
    p = scores.double().softmax(-1)
    p_keys = p[..., 1:] if column == 0 else p[..., :-1]
    torch.testing.assert_close(
        stats.sink_mass.double(), p[..., column] + p_keys[..., 0], atol=1e-6, rtol=0
    )
    rest = p_keys[..., 1:] / p_keys[..., 1:].sum(-1, keepdim=True)
    torch.testing.assert_close(
        stats.nonsink_entropy.double(), -torch.special.xlogy(rest, rest).sum(-1), atol=1e-5, rtol=0
    )
    with pytest.raises(ValueError, match="first or the last of 10 columns, not 4"):
        attention_stats_from_scores(scores, learned_sink=4)


@pytest.mark.parametrize("causal", [True, False])
def test_packed_documents_by_their_bounds_are_those_of_the_block_diagonal_mask(causal):
    generator = torch.Generator().manual_seed(4)
    T = sum(LENGTHS)
    q, k = torch.randn(T, 4, 8, generator=generator), torch.randn(T, 2, 8, generator=generator)
    bounds = torch.tensor([0, *LENGTHS, 0], dtype=torch.int32).cumsum(
        0
    )  # the last document is empty
    documents = torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS))
    keep = documents[:, None] == documents
    keep = keep.tril() if causal else keep
    stats = attention_stats(q, k, is_causal=causal, enable_gqa=True, cu_seqlens=bounds)
    four = q.transpose(0, 1)[None], k.transpose(0, 1)[None]
    entropy, lse, _, visible = brute_force(*four, keep)[1:]
    assert (stats.entropy - entropy).abs().max() <= 1e-6
    assert (stats.logsumexp - lse).abs().max() <= 1e-5
    assert torch.equal(stats.visible, visible)
    masked = attention_stats(*four, keep, enable_gqa=True)
    torch.testing.assert_close(stats.sink_mass, masked.sink_mass, atol=2e-6, rtol=0)
    for arguments, message in (
        ({"attn_mask": keep}, "not both"),
        ({"cu_seqlens": bounds[:-2]}, "must rise from 0"),
    ):
        with pytest.raises(ValueError, match=message):
            attention_stats(q, k, **{"cu_seqlens": bounds, "enable_gqa": True} | arguments)


def test_nested_tensors_are_packed_documents():
    generator = torch.Generator().manual_seed(0)
    lengths = (3, 1, 7)
    q, k = ([torch.randn(n, h, 8, generator=generator) for n in lengths] for h in (4, 2))
    nested = [torch.nested.nested_tensor(x, layout=torch.jagged).transpose(1, 2) for x in (q, k)]
    stats = attention_stats(*nested, is_causal=True, enable_gqa=True)
    alone = [attention_stats(a.transpose(0, 1), b.transpose(0, 1), is_causal=True, enable_gqa=True)
             for a, b in zip(q, k, strict=True)]  # fmt: skip
    for name in ("entropy", "logsumexp", "sink_mass", "nonsink_entropy"):
        expected = torch.cat([getattr(part, name) for part in alone], dim=-1)
        torch.testing.assert_close(getattr(stats, name), expected)
    shorter = torch.nested.nested_tensor(k[:2], layout=torch.jagged).transpose(1, 2)
    for keys, message in (
        (nested[1].transpose(1, 2).values(), "must both be"),
        (shorter, "the same lengths"),
    ):
        with pytest.raises(ValueError, match=message):
            attention_stats(nested[0], keys, enable_gqa=True)
    with pytest.raises(ValueError, match="not both"):
        attention_stats(*nested, cu_seqlens=torch.tensor([0, 3, 4, 11]))


@pytest.mark.parametrize("garbage", [1e6, 1e15, 1e30])
@pytest.mark.parametrize("how", ["causal", "bool", "minus_inf", "per head", "grouped", "bias"])
def test_keys_that_no_query_sees_may_hold_anything(how, garbage):
    """A cache that is not filled yet: attention does not depend on it, so neither do its statistics."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 4, 6, 8, generator=generator)
    k = torch.randn(2, 2 if how == "grouped" else 4, 12, 8, generator=generator)
    keep = torch.ones(6, 12, dtype=torch.bool).tril()  # the last six keys are seen by none
    options = {
        "causal": {"is_causal": True},
        "bool": {"attn_mask": keep},
        "minus_inf": {"attn_mask": torch.zeros(6, 12).masked_fill(~keep, -math.inf)},
        "per head": {"attn_mask": keep.expand(2, 4, 6, 12).clone()},
        "grouped": {"attn_mask": keep.expand(1, 4, 6, 12).clone(), "enable_gqa": True},
        "bias": {"attn_mask": torch.full((6, 12), 0.5).masked_fill(~keep, -math.inf)},
    }[how]
    expected = attention_stats(q, k, **options)
    largest = max_logit(q, k, **options)
    filled = k.clone()
    filled[:, :, 6:] = garbage * torch.randn(filled[:, :, 6:].shape, generator=generator)
    stats = attention_stats(q, filled, **options)
    assert torch.allclose(stats.entropy, expected.entropy, rtol=0, atol=1e-6)
    assert torch.allclose(stats.logsumexp, expected.logsumexp, rtol=1e-6)
    assert torch.equal(stats.visible, expected.visible)
    assert torch.allclose(max_logit(q, filled, **options).value, largest.value)
    assert torch.equal(filled[:, :, :6], k[:, :, :6])  # the keys are not changed


def test_keys_after_the_last_causal_query_may_be_no_numbers():
    """The kernel of the model does not read them."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(1, 2, 4, 8, generator=generator)
    k = torch.randn(1, 2, 7, 8, generator=generator)
    expected = attention_stats(q, k, is_causal=True).entropy
    k[:, :, 4:] = math.nan
    assert (
        functional.scaled_dot_product_attention(q, k, torch.ones(1, 2, 7, 8), is_causal=True)
        .isfinite()
        .all()
    )
    assert torch.allclose(
        attention_stats(q, k, is_causal=True).entropy, expected, rtol=0, atol=1e-6
    )


def test_keys_that_are_no_numbers_show_where_they_are_masked():
    """A masked score is NaN − ∞, so the model's attention is NaN, too."""
    q = torch.ones(1, 1, 2, 4)
    k = torch.ones(1, 1, 3, 4)
    k[:, :, 2] = math.nan
    keep = torch.tensor([True, True, False])
    assert (
        functional.scaled_dot_product_attention(q, k, torch.ones(1, 1, 3, 4), keep[None])
        .isnan()
        .all()
    )
    assert attention_stats(q, k, keep[None]).entropy.isnan().all()


@pytest.mark.parametrize("learned_sink", [0, -1])
def test_scores_whose_only_column_is_a_learned_sink_are_refused(learned_sink):
    with pytest.raises(ValueError, match="no key to attend to"):
        attention_stats_from_scores(torch.zeros(1, 2, 3, 1), learned_sink=learned_sink)
