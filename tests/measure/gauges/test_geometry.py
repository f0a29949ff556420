"""Embedding geometry against closed forms and brute force in NumPy."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

import joma
from joma._measure.gauges.embedding import centred, embedding_coherence, random_cosine
from joma._measure.gauges.registry import get


def _cosines(x):
    unit = x / np.linalg.norm(x, axis=1, keepdims=True)
    return (unit @ unit.T)[np.triu_indices(len(x), 1)]


def test_signed_mean_and_histogram_are_those_of_all_pairs():
    x = np.random.default_rng(0).normal(0.3, 1.0, (200, 12))
    found, cosines = embedding_coherence(torch.from_numpy(x)), _cosines(x)
    assert found.signed_mean == pytest.approx(cosines.mean(), abs=1e-5)
    expected, _ = np.histogram(np.abs(cosines), bins=16, range=(0, 1))
    assert (
        np.abs(found.histogram(16).numpy() - expected).max() <= 2
    )  # pairs at the edge of a bin, in float32
    assert int(found.histogram(64).sum()) == 200 * 199 // 2
    with pytest.raises(ValueError, match="bins is 60"):
        found.histogram(60)


def test_equal_rows_have_cosine_one_and_a_simplex_minus_one_over_n_when_centred():
    same = embedding_coherence(torch.ones(5, 3))
    assert (same.mean, same.signed_mean) == pytest.approx((1.0, 1.0))
    # centred orthonormal vectors are a regular simplex: all cosines −1/(n − 1)
    simplex = embedding_coherence(centred(torch.eye(9)))
    assert simplex.signed_mean == pytest.approx(-1 / 8, abs=1e-6)
    assert simplex.maximum == pytest.approx(1 / 8, abs=1e-6)


@pytest.mark.parametrize("d", [1, 2, 3, 64])
def test_the_mean_cosine_of_random_vectors_is_its_closed_form(d):
    closed = {1: 1.0, 2: 2 / math.pi, 3: 0.5}  # the sphere in 3 dimensions: cos is uniform
    if d in closed:
        assert random_cosine(d) == pytest.approx(closed[d])
    else:
        assert random_cosine(d) == pytest.approx(math.sqrt(2 / (math.pi * d)), rel=0.01)
    x = np.random.default_rng(d).normal(size=(700, d))
    assert np.abs(_cosines(x)).mean() == pytest.approx(random_cosine(d), rel=0.05)


def test_gauges_of_the_registry_are_brute_force():
    x = np.random.default_rng(1).normal(0.5, 1.0, (80, 10))
    c, cc = np.abs(_cosines(x)), np.abs(_cosines(x - x.mean(axis=0)))
    expected = {
        "coherence": c.max(), "coherence_centred": cc.max(), "mean_cosine": c.mean(), "mean_cosine_centred": cc.mean(),
    }  # fmt: skip
    for gauge in get(expected):
        assert gauge.on == "hidden"
        assert gauge.function(torch.from_numpy(x)) == pytest.approx(expected[gauge.name], abs=1e-5)
        assert math.isnan(gauge.function(torch.full((3, 2), math.nan)))


class _Block(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.qkv, self.mlp = nn.Linear(d, 3 * d), nn.Linear(d, d)

    def forward(self, x):
        q, k, v = self.qkv(x)[:, None].chunk(3, dim=-1)
        return x + self.mlp(F.scaled_dot_product_attention(q, k, v, is_causal=True)[:, 0])


class _Net(nn.Module):
    def __init__(self, vocabulary=40, d=8, layers=3):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, d)
        self.layers = nn.ModuleList(_Block(d) for _ in range(layers))

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return x


def test_geometry_of_a_model_is_that_of_the_states_its_blocks_are_given():
    torch.manual_seed(0)
    net = _Net().train()
    tokens = torch.randint(0, 40, (6, 10))
    inputs = []
    handles = [
        x.register_forward_pre_hook(lambda m, args: inputs.append(args[0].detach()))
        for x in net.layers
    ]
    net.eval()(tokens)
    for handle in handles:
        handle.remove()
    net.train()
    geometry = joma.embedding_geometry(net, tokens)
    assert net.training
    flat = tokens.flatten().tolist()
    first = sorted(
        flat.index(token) for token in set(flat)
    )  # the first place of each distinct token
    expected = [x.flatten(0, 1)[first].numpy() for x in inputs]
    assert len(geometry.layers) == 3
    table = geometry.frame().set_index(["kind", "layer"])
    for n, x in enumerate(expected):
        np.testing.assert_allclose(geometry.states[n], x, atol=1e-6)
        assert table["mean"]["raw", n] == pytest.approx(np.abs(_cosines(x)).mean(), abs=1e-5)
        assert table["maximum"]["centred", n] == pytest.approx(
            np.abs(_cosines(x - x.mean(axis=0))).max(), abs=1e-5
        )
        assert table["q90"]["raw", n] == pytest.approx(
            np.quantile(np.abs(_cosines(x)), 0.9), abs=5e-3
        )
    unit = [x / np.linalg.norm(x, axis=1, keepdims=True) for x in expected]
    brute = [[(a * b).sum(axis=1).mean() for b in unit] for a in unit]
    np.testing.assert_allclose(geometry.between(), brute, atol=1e-5)
    np.testing.assert_allclose(np.diag(geometry.between(centre=True)), 1.0, atol=1e-5)


def test_random_embeddings_are_almost_orthogonal_and_a_common_offset_is_undone_by_centring():
    torch.manual_seed(1)
    net = _Net(vocabulary=300, d=64, layers=1)
    tokens = torch.arange(300).reshape(3, 100)
    assert joma.embedding_geometry(net, tokens).orthogonal() == [True]
    with torch.no_grad():
        net.embed.weight += 2.0
    shifted = joma.embedding_geometry(net, tokens)
    assert shifted.orthogonal() == [False]
    assert shifted.orthogonal(centre=True) == [True]
    assert shifted.raw[0].signed_mean == pytest.approx(0.8, abs=0.02)  # 2²/(2² + 1)


def test_a_series_of_checkpoints_has_the_rows_of_each():
    nets = {step: _Net() for step in (0, 10)}
    table = joma.embedding_series(nets, np.arange(40), length=10)
    assert list(table.step.unique()) == [0, 10]
    own = joma.embedding_geometry(nets[10], np.arange(40), length=10).frame()
    np.testing.assert_allclose(table[table.step == 10]["mean"], own["mean"])


def test_bad_input_is_told(tmp_path):
    net = _Net()
    with pytest.raises(ValueError, match="whole numbers"):
        joma.embedding_geometry(net, [0.5, 1.0, 2.0])
    with pytest.raises(ValueError, match="comes without a tokenizer"):
        joma.embedding_geometry(net, "pydoc")
    with pytest.raises(ValueError, match="no checkpoints in"):
        joma.embedding_series(tmp_path, [1, 2])
    with pytest.raises(ValueError, match="there is no folder"):
        joma.embedding_series(tmp_path / "nowhere", [1, 2])
    with pytest.raises(ValueError, match="no attention was seen in Embedding"):
        joma.embedding_geometry(nn.Embedding(9, 3), [1, 2])
