"""Sampled queries: unbiased, with a standard error that is the spread of the estimates."""

from __future__ import annotations

import pytest
import torch

import joma
from tests.measure.watch.models import HandWrittenGPT, sharpen

T = 96


def model_and_tokens():
    torch.manual_seed(0)
    model = sharpen(HandWrittenGPT("sdpa", layers=1))
    return model, torch.randint(61, (2, T))


def heads(w, gauge, step):
    rows = w.frame().query("gauge == @gauge and step == @step").sort_values("head")
    return torch.tensor(rows["value"].to_numpy())


@pytest.mark.parametrize("padded", [False, True])
def test_estimates_are_unbiased_and_the_error_is_their_spread(padded):
    model, tokens = model_and_tokens()
    real = torch.ones(2, T, dtype=torch.bool)
    real[1, 40 if padded else T :] = False
    padding = (lambda args, kwargs: real) if padded else None
    with joma.watch(model, every=1, gauges="entropy", padding=padding) as w:
        model(tokens)
        w.step()
        exact = heads(w, "entropy", 1)
    draws = 120
    with joma.watch(model, every=1, gauges="entropy", padding=padding, queries=16) as w:
        for _ in range(draws):
            model(tokens)
            w.step()
        table = w.frame()
    values, errors = (
        torch.tensor(
            table[table.gauge == g]
            .pivot_table(index="step", columns="head", values="value")
            .to_numpy()
        )
        for g in ("entropy", "entropy_error")
    )
    spread = values.std(dim=0)
    assert ((values.mean(dim=0) - exact).abs() < 4 * spread / draws**0.5).all()
    torch.testing.assert_close(errors.square().mean(dim=0).sqrt(), spread, rtol=0.25, atol=0)


def test_with_as_many_queries_as_there_are_it_is_exact():
    model, tokens = model_and_tokens()
    with joma.watch(model, every=1, gauges="entropy") as w:
        model(tokens)
        exact = w.step()
    with joma.watch(model, every=1, gauges="entropy", queries=T) as w:
        model(tokens)
        assert w.step() == exact
        assert (heads(w, "entropy_error", 1) == 0).all()


@pytest.mark.parametrize(
    ("queries", "gauges", "message"),
    [(1, "entropy", "at least 2; got 1"), (8, "max_logsumexp", "all queries")],
)
def test_bad_input(queries, gauges, message):
    with pytest.raises(ValueError, match=message):
        joma.watch(HandWrittenGPT(), gauges=gauges, queries=queries)
