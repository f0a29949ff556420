"""Outliers among token vectors: planted ones are found, and cosines without them are those of the rest."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import joma
from joma._inspect.outliers import find_outliers
from tests.measure.gauges.test_geometry import _cosines, _Net


def _vectors(seed=0, tokens=200, d=64):
    return torch.from_numpy(np.random.default_rng(seed).standard_normal((tokens, d)))


def test_gaussian_vectors_have_none():
    found = find_outliers(_vectors(), torch.arange(200) % 20)
    assert (found.dimensions, found.tokens, found.variance) == ([], [], 0.0)
    assert found.first == pytest.approx(1.0, abs=0.1)
    assert math.isnan(find_outliers(_vectors()).first)


def test_planted_dimensions_tokens_and_first_tokens_are_told_apart():
    x = _vectors()
    x[:, 7] *= 60.0
    x[:, 3] = 40.0 * x[:, 3] + 100.0
    x[17] *= 150.0
    positions = torch.arange(200) % 20
    x[positions == 0] *= 300.0
    found = find_outliers(x, positions)
    assert found.dimensions == [3, 7]  # by size, a mean included
    assert found.tokens == [17]
    assert found.first > 100
    assert found.at_first.sum() == 10
    rest = x[(positions != 0) & (torch.arange(200) != 17)]
    variance = rest.var(dim=0, correction=0)
    assert found.variance == pytest.approx(float(variance[[3, 7]].sum() / variance.sum()))
    assert found.variance > 0.98
    norms = x[positions != 0].norm(dim=1)
    assert found.norm == pytest.approx(float(norms.max() / norms.median()), rel=1e-9)
    kept = [d for d in range(64) if d not in (3, 7)]
    torch.testing.assert_close(found.inner(x), rest[:, kept])


def test_a_window_of_one_token_has_no_other_to_be_apart_from():
    found = find_outliers(_vectors(tokens=5), torch.zeros(5, dtype=torch.long))
    assert found.kept.all()
    assert not found.at_first.any()


def test_geometry_tells_outliers_and_cosines_with_and_without_them():
    torch.manual_seed(0)
    net = _Net(vocabulary=300, d=32, layers=2)
    with torch.no_grad():
        net.embed.weight[:, 5] += 60.0
        net.embed.weight[42] *= 500.0
    tokens = torch.arange(300).reshape(10, 30)
    geometry = joma.embedding_geometry(net, tokens)
    outliers = geometry.outlier_frame()
    assert outliers.dimensions[0] == [5]
    assert outliers.tokens[0] == [42]
    assert outliers["first"][0] == pytest.approx(1.0, abs=0.05)
    table = geometry.frame().set_index(["kind", "layer"])
    assert table["mean"]["raw", 0] > 0.95  # one dimension decides
    rows = [n for n in range(300) if n % 30 and n != 42]
    inner = np.delete(net.embed.weight.detach().numpy()[rows], 5, axis=1)
    assert table["mean"]["raw, no outliers", 0] == pytest.approx(
        np.abs(_cosines(inner)).mean(), abs=1e-5
    )
    centre = np.abs(_cosines(inner - inner.mean(axis=0))).mean()
    assert table["mean"]["centred, no outliers", 0] == pytest.approx(centre, abs=1e-5)
    assert table["dimension"]["raw, no outliers", 0] == 31
    first = net.embed.weight.detach().numpy()[::30]
    assert outliers.first_cosine[0] == pytest.approx(np.abs(_cosines(first)).mean(), abs=1e-5)
