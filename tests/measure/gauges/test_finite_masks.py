"""A key that is hidden by a large finite number is not a visible key: −1e9, −65504 and −1e4 mean what −inf means."""

from __future__ import annotations

import math

import pytest
import torch

import joma
from joma._measure.gauges.attention import attention_stats_from_scores
from joma._measure.gauges.logits import EagerLogits, logits_of

B, H, T, D = 2, 3, 12, 8
FILLS = (-1e9, -65504.0, -1e4)
STATISTICS = ("entropy", "normalised_entropy", "nonsink_entropy", "sink_mass", "visible")


def queries_and_keys():
    generator = torch.Generator().manual_seed(0)
    return (2 * torch.randn(B, H, T, D, generator=generator) for _ in range(2))


def hidden_keys(kind: str) -> torch.Tensor:
    """True where a key is hidden, (B, 1, T, T)."""
    later = torch.ones(T, T, dtype=torch.bool).triu(1)
    padding = torch.arange(T) >= torch.tensor([T, 7])[:, None]  # (B, T)
    if kind == "causal":
        return later.expand(B, 1, T, T)
    if kind == "left":
        return padding.flip(1)[:, None, None].expand(B, 1, T, T)
    return later | padding[:, None, None]


def bias(kind: str) -> torch.Tensor:
    if kind == "none":
        return torch.zeros(1, H, T, T)
    slopes = 2.0 ** -torch.arange(1, H + 1)[:, None, None]
    distance = torch.arange(T)[:, None] - torch.arange(T)
    return -(slopes * distance.abs())[None]  # as ALiBi has it


def assert_same(first, second):
    for name in STATISTICS:
        torch.testing.assert_close(
            getattr(first, name), getattr(second, name), atol=2e-6, rtol=0, equal_nan=True
        )


@pytest.mark.parametrize("fill", FILLS)
@pytest.mark.parametrize("added", ["none", "alibi"])
@pytest.mark.parametrize("kind", ["causal", "left", "both"])
def test_fused_statistics_do_not_depend_on_how_a_mask_is_written(kind, added, fill):
    q, k = queries_and_keys()
    hidden = hidden_keys(kind)
    exact, finite = (
        bias(added).expand(B, H, T, T).masked_fill(hidden, low) for low in (-math.inf, fill)
    )
    assert_same(joma.attention_stats(q, k, finite), joma.attention_stats(q, k, exact))
    received, expected = (logits_of(q, k, mask).received() for mask in (finite, exact))
    torch.testing.assert_close(received.seen_by, expected.seen_by)


@pytest.mark.parametrize("fill", FILLS)
@pytest.mark.parametrize("kind", ["causal", "left", "both"])
def test_eager_statistics_do_not_depend_on_how_a_mask_is_written(kind, fill):
    q, k = queries_and_keys()
    scores = q @ k.mT
    hidden = hidden_keys(kind)
    exact, finite = (scores.masked_fill(hidden, low) for low in (-math.inf, fill))
    assert_same(attention_stats_from_scores(finite), attention_stats_from_scores(exact))
    summed = scores + torch.zeros(hidden.shape).masked_fill(hidden, fill)  # the logits stay in it
    assert_same(attention_stats_from_scores(summed), attention_stats_from_scores(exact))
    received, expected = (EagerLogits(s).received() for s in (summed, exact))
    torch.testing.assert_close(received.seen_by, expected.seen_by)


def test_sharp_attention_without_a_mask_sees_all_its_keys():
    """Logits of ±1,000 leave most keys without attention; they are visible all the same."""
    q, k = queries_and_keys()
    scores = q @ k.mT
    scores = 1000 * scores / scores.abs().max()
    assert bool((attention_stats_from_scores(scores).visible == T).all())
    assert bool((joma.attention_stats(300 * q, k).visible == T).all())


def test_a_row_that_is_hidden_as_a_whole_by_minus_1e4_attends_as_if_it_were_not():
    """Softmax does not see a common offset."""
    q, k = queries_and_keys()
    mask = torch.zeros(T, T)
    mask[3] = -1e4
    plain, offset = joma.attention_stats(q, k), joma.attention_stats(q, k, mask)
    assert bool((offset.visible == T).all())
    torch.testing.assert_close(
        offset.entropy, plain.entropy, atol=2e-3, rtol=0
    )  # −1e4 costs digits of the logits
