"""Gauge names: built in, added by a user, unknown; and embedding coherence."""

import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from joma._measure.gauges.assumptions import BlockMotion
from joma._measure.gauges.attention import attention_stats
from joma._measure.gauges.builtin import correlated_neurons, effective_neurons, effective_vocabulary
from joma._measure.gauges.embedding import correlated_share, embedding_coherence
from joma._measure.gauges.logits import logits_of
from joma._measure.gauges.registry import gauge, gauges, get, remove
from joma._measure.gauges.stream import Routing, Stream


def test_every_built_in_gauge_measures_what_it_is_registered_on():
    q = torch.randn(2, 3, 5, 8)
    logits = replace(logits_of(q, q, is_causal=True), value=q)
    given = {
        "attention": (replace(attention_stats(q, q, is_causal=True), logits=logits), (2, 3, 5)),
        "keys": (logits.received(), (2, 3)),
        "stream": (Stream(*torch.randn(3, 30, 10)), ()),
        "neurons": (torch.randn(30, 40), ()),
        "router": (Routing(torch.randn(30, 4), torch.randint(4, (30, 2))), ()),
        "weight": (torch.randn(40, 10), ()),
        "hidden": (torch.randn(30, 10), ()),
        "gradient": (torch.randn(40, 10), ()),
        "update": (torch.randn(40, 10), ()),
        "change": (torch.randn(40, 10), ()),
        "charge": (
            SimpleNamespace(**dict.fromkeys(("balance", "drift", "residual"), torch.zeros(3))),
            (3,),
        ),
        "block": (BlockMotion({}, {}), ()),
    }
    assert {"entropy", "sink_mass", "stable_rank", "coherence"} <= set(gauges())
    for entry in gauges().values():
        argument, shape = given[entry.on]
        matrix = entry.on in ("weight", "gradient", "update", "change")
        value = entry.measure(argument) if matrix else entry.function(argument)
        assert np.shape(value) == shape
        assert entry.help.endswith(".")


def test_a_gauge_of_ones_own():
    @gauge("density", on="weight")
    def density(w):
        """Share of entries that are not zero."""
        return float((w != 0).float().mean())

    try:
        (found,) = get(["density"])
        assert found.function(torch.eye(4)) == 0.25
        assert found.help == "Share of entries that are not zero."
        with pytest.raises(ValueError, match="there is a gauge 'density' already"):
            gauge("density", on="weight")(lambda w: 0.0)
    finally:
        remove("density")


def test_wrong_names_and_places():
    with pytest.raises(ValueError, match="Did you mean 'entropy'"):
        get(["entropie"])
    with pytest.raises(ValueError, match="not on 'weights'"):
        gauge("x", on="weights")
    with pytest.raises(ValueError, match="must be an identifier"):
        gauge("two words", on="weight")


def test_coherence_against_all_pairs(monkeypatch):
    monkeypatch.setattr("joma._measure.gauges.embedding.BLOCK_ROWS", 7)
    u = torch.randn(50, 12, generator=torch.Generator().manual_seed(0))
    u[13] = 0.0
    rows = [i for i in range(50) if i != 13]
    unit = (u / u.norm(dim=1, keepdim=True))[rows].double().numpy()
    cosines = np.abs(unit @ unit.T)[np.triu_indices(49, 1)]
    result = embedding_coherence(u)
    assert result.maximum == pytest.approx(cosines.max(), abs=1e-6)
    assert result.mean == pytest.approx(cosines.mean(), abs=1e-6)
    assert result.rms == pytest.approx(np.sqrt((cosines**2).mean()), abs=1e-6)
    assert result.quantile(0.5) == pytest.approx(np.median(cosines), abs=1e-3)
    assert (result.rows, result.zero_rows, result.dimension) == (49, 1, 12)
    i, j = result.pair
    pair = (rows.index(i), rows.index(j))
    assert abs(unit[pair[0]] @ unit[pair[1]]) == pytest.approx(cosines.max(), abs=1e-6)
    assert result.sufficient_dimension == pytest.approx(
        8 * math.log(49) / cosines.max() ** 2, rel=1e-4
    )
    assert result.effective_number == pytest.approx(49**2 / ((unit @ unit.T) ** 2).sum(), rel=1e-5)
    largest = np.abs(unit @ unit.T - np.eye(49)).max(axis=1)
    for least in (0.3, 0.6, 0.8):
        assert correlated_share(u, least) == pytest.approx((largest >= least).sum() / 50)


def test_effective_number_of_orthogonal_parallel_and_few_rows():
    assert embedding_coherence(torch.eye(6)).effective_number == pytest.approx(6.0)
    assert embedding_coherence(torch.ones(5, 3)).effective_number == pytest.approx(1.0, rel=1e-6)
    assert embedding_coherence(torch.ones(1, 3)).effective_number == 1
    assert embedding_coherence(torch.zeros(2, 3)).effective_number == 0
    assert correlated_share(torch.cat([torch.eye(4), -torch.eye(4)[:1]])) == pytest.approx(2 / 5)
    bad = torch.full((2, 2), math.nan)
    assert all(
        math.isnan(measure(bad))
        for measure in (correlated_neurons, effective_neurons, effective_vocabulary)
    )


def test_coherence_of_orthogonal_single_and_bad_rows():
    assert embedding_coherence(torch.eye(6)).maximum == 0.0
    assert embedding_coherence(torch.ones(2, 3)).maximum == pytest.approx(1.0)
    assert math.isnan(embedding_coherence(torch.ones(1, 3)).mean)
    with pytest.raises(ValueError, match="row 1 of the embedding is not finite"):
        embedding_coherence(torch.tensor([[1.0, 2.0], [math.nan, 0.0]]))
    with pytest.raises(ValueError, match=r"got shape \(3,\)"):
        embedding_coherence(torch.ones(3))
