"""Transformers on latent trees: kinship, attention by brute force, held-out NCorr, and a run from the command line."""

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from joma import Run
from joma._data.trees import DEFAULTS
from joma._data.trees import tree as make_tree
from joma.cli import app
from joma.paper.labs.hierarchy import HierarchyTransformer
from joma.paper.labs.ncorr import best_correlation, held_out_correlation
from joma.paper.labs.tree import Kinship, TreeSettings, attention_over_uniform, follow

TINY = {"latents": 2, "children": 2, "classes": 3, "width": 16, "steps": 4, "every": 2, "batch": 8}


def test_kinship_is_that_of_the_tree():
    kin = Kinship.of(
        make_tree({**DEFAULTS, "latents": 2, "children": 2})
    )  # tokens 0 1 | 2 3 || 4 5 | 6 7
    assert kin.siblings[0].nonzero()[0].tolist() == [1]
    assert kin.cousins[0].nonzero()[0].tolist() == [2, 3]
    assert kin.others[0].nonzero()[0].tolist() == [4, 5, 6, 7]
    assert not kin.siblings.diagonal().any()
    shallow = Kinship.of(make_tree({**DEFAULTS, "depth": 2, "latents": 2, "children": 2}))
    assert not shallow.cousins.any()
    moved = Kinship.of(
        make_tree({**DEFAULTS, "latents": 2, "children": 2}), np.array([0, 2, 1, 3, 4, 5, 6, 7])
    )
    assert moved.siblings[0].nonzero()[0].tolist() == [2]


def test_attention_over_uniform_by_brute_force():
    torch.manual_seed(0)
    model, M = HierarchyTransformer(5, 3, d=8, hidden=6, layers=2), 4
    x = torch.tensor([[4, 0, 1, 3], [4, 4, 1, 2], [0, 1, 2, 3]])
    found = attention_over_uniform(model, x, M)
    h = model.embed(x).detach()
    for block, lift in zip(model.blocks, found, strict=True):
        sums, counts = np.zeros((M, M)), np.zeros((M, M))
        q, k = block.query(h).detach(), block.key(h).detach()
        for b in range(3):
            for i in range(4):
                row = torch.softmax(q[b, i] @ k[b, : i + 1].T / 8**0.5, dim=0)
                for j in range(i + 1):
                    if x[b, i] < M and x[b, j] < M:
                        sums[x[b, i], x[b, j]] += float(row[j]) * (i + 1)
                        counts[x[b, i], x[b, j]] += 1
        with np.errstate(invalid="ignore"):
            np.testing.assert_allclose(lift, sums / counts, rtol=1e-5)
        h = block(h)[0].detach()


def test_held_out_ncorr_sees_no_luck_and_finds_what_is_there():
    rng = np.random.default_rng(0)
    latents, noise = rng.random((400, 6)) < 0.5, rng.standard_normal((400, 300))
    assert best_correlation(latents, noise).mean() > 0.12
    assert abs(held_out_correlation(latents, noise)) < 0.06
    noise[:, 7:13] = latents + 0.1 * rng.standard_normal((400, 6))
    assert held_out_correlation(latents, noise) > 0.97
    assert np.isnan(held_out_correlation(np.ones((400, 1)), noise))


@pytest.mark.parametrize(("depth", "layers"), [(3, 2), (2, 1), (3, 3)])
def test_what_is_measured_on_the_way(depth, layers):
    rows = list(follow(TreeSettings(**TINY, depth=depth, layers=layers)))
    assert [(step, tree) for step, tree, _ in rows] == [
        (s, t) for s in (0, 2, 4) for t in ("tree", "permuted")
    ]
    first = rows[0][2]
    assert len(first["attention_siblings"]) == layers
    assert ("ncorr_alpha" in first) == ("attention_cousins" in first) == (depth == 3)
    assert rows[0][2] != rows[4][2]  # it learns


def test_the_command_writes_a_run(tmp_path):
    words = [f"--{name}={value}" for name, value in TINY.items()]
    done = CliRunner().invoke(
        app, ["train", "hierarchy", "--rho", "0.8", *words, "--out", str(tmp_path / "run")]
    )
    assert done.exit_code == 0, done.output
    assert "attention_siblings" in done.output
    run = Run(tmp_path / "run")
    assert run.info["config"]["rho"] == 0.8
    assert set(run.frame().tree) == {"tree", "permuted"}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rho": 1.0}, "rho must be between 0 and 1"),
        ({"depth": 4}, "depth must be 2"),
        ({"layers": 1}, "take layers 2 or more"),
        ({"steps": 0}, "steps must be a whole number"),
        ({"lr": 0.0}, "the learning rate must be positive"),
    ],
)
def test_settings_that_make_no_sense_are_refused(change, words):
    with pytest.raises(ValueError, match=words):
        TreeSettings(**change).checked()
