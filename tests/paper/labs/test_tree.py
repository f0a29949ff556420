"""Transformers on latent trees: kinship, attention by brute force, held-out NCorr, and a run from the command line."""

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from joma import Run
from joma._data.trees import DEFAULTS
from joma._data.trees import tree as make_tree
from joma.cli import app
from joma.paper.claims.hierarchy import enumerate_states
from joma.paper.labs.hierarchy import HierarchyTransformer
from joma.paper.labs.ncorr import best_correlation, held_out_correlation
from joma.paper.labs.tree import (
    Kinship,
    Lesson,
    Objective,
    TreeSettings,
    attention_over_uniform,
    follow,
    occurrence_given_others,
)
from joma.theory.hierarchy import HBLT

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


def small_tree():
    """Two classes, two latents above two tokens each: 64 states."""
    return HBLT(2, 2, 0.7, class_to_latent=[[0.9, 0.2], [0.3, 0.6]], class_prior=[0.6, 0.4])


def test_a_token_as_label_is_hidden_and_asked_for():
    tree = small_tree()
    examples = Lesson(tree, Objective.TOKEN).examples(200, seed=3)
    M = tree.tokens.size
    asked = examples.x[:, -1].numpy() - M - 1
    assert set(asked) == set(range(M))
    tokens = examples.samples.tokens
    for sequence, label, m, present in zip(
        examples.x.numpy(), examples.labels.numpy(), asked, tokens, strict=True
    ):
        assert label == present[m]
        others = [l for l in range(M) if present[l] and l != m]
        assert sequence[sequence < M].tolist() == others
        assert (sequence[: M - 1 - len(others)] == M).all()


def test_a_class_as_label_comes_with_all_tokens():
    tree = small_tree()
    examples = Lesson(tree, Objective.CLASS).examples(50, seed=3)
    assert (examples.labels.numpy() == examples.samples.classes).all()
    for sequence, present in zip(examples.x.numpy(), examples.samples.tokens, strict=True):
        assert sequence[sequence < 4].tolist() == np.flatnonzero(present).tolist()


def test_occurrence_of_a_token_given_all_others_by_enumeration():
    tree = small_tree()
    y, probability = enumerate_states(tree)
    tokens = y[:, tree.tokens]
    patterns = np.unique(tokens, axis=0)
    of_variable = tree.posterior(patterns)[1]
    for m, leaf in enumerate(tree.tokens):
        others = np.delete(np.arange(tree.tokens.size), m)
        predicted = occurrence_given_others(
            of_variable[:, tree.parent[leaf]], patterns[:, m], np.full(len(patterns), 0.7)
        )
        for pattern, value in zip(patterns, predicted, strict=True):
            same_others = (tokens[:, others] == pattern[others]).all(axis=1)
            with_token = same_others & (tokens[:, m] == 1)
            exact = probability[with_token].sum() / probability[same_others].sum()
            assert value == pytest.approx(exact, abs=1e-12)


@pytest.mark.parametrize("objective", list(Objective))
def test_bayes_accuracy_by_enumeration(objective):
    tree = small_tree()
    y, probability = enumerate_states(tree)
    tokens = y[:, tree.tokens]
    exact = 0.0
    if objective is Objective.CLASS:
        for pattern in np.unique(tokens, axis=0):
            seen = (tokens == pattern).all(axis=1)
            of_class = tree.posterior(pattern[None])[0][0]
            exact += probability[seen].sum() * of_class.max()
    else:
        for m in range(tree.tokens.size):
            others = np.delete(tokens, m, axis=1)
            for pattern in np.unique(others, axis=0):
                seen = (others == pattern).all(axis=1)
                one = probability[seen & (tokens[:, m] == 1)].sum()
                exact += max(one, probability[seen].sum() - one) / tree.tokens.size
    estimate = Lesson(tree, objective).bayes_accuracy(seed=5)
    assert estimate == pytest.approx(exact, abs=0.02)


def test_attention_of_the_position_that_asks():
    """Under the objective token, only the last position attends, for the token that it asks for."""
    torch.manual_seed(0)
    M = 3
    model = HierarchyTransformer(2 * M + 1, 2, d=8, hidden=6, layers=1)
    x = torch.tensor([[3, 0, 1, 6], [3, 1, 2, 4]])  # asks for token 2, then for token 0
    (lift,) = attention_over_uniform(model, x, M, first_reader=M + 1)
    h = model.embed(x).detach()
    block = model.blocks[0]
    for b, m, read in ((0, 2, {0: 1, 1: 2}), (1, 0, {1: 1, 2: 2})):
        scores = block.query(h)[b, 3] @ block.key(h)[b].T / 8**0.5
        row = 4 * torch.softmax(scores.detach(), dim=0)
        for l, place in read.items():
            assert lift[m, l] == pytest.approx(float(row[place]), rel=1e-5)
    assert np.isnan(lift[1]).all()


@pytest.mark.parametrize("objective", list(Objective))
@pytest.mark.parametrize(("depth", "layers"), [(3, 2), (2, 1), (3, 1), (3, 3)])
def test_what_is_measured_on_the_way(depth, layers, objective):
    rows = list(follow(TreeSettings(**TINY, depth=depth, layers=layers, objective=objective)))
    assert [(step, tree) for step, tree, _ in rows] == [
        (s, t) for s in (0, 2, 4) for t in ("tree", "permuted")
    ]
    first = rows[0][2]
    assert len(first["attention_siblings"]) == layers
    assert ("attention_cousins" in first) == (depth == 3)
    assert ("ncorr_alpha" in first) == (depth == 3 and layers > 1)
    assert rows[0][2] != rows[4][2]  # it learns


def test_the_command_writes_a_run(tmp_path):
    words = [f"--{name}={value}" for name, value in TINY.items()]
    done = CliRunner().invoke(
        app, ["hierarchy", "--rho", "0.8", *words, "--out", str(tmp_path / "run")]
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
        ({"objective": "root"}, "objective must be class or token, got 'root'"),
        ({"lr": float("inf")}, "the learning rate must be positive"),
        ({"steps": 0}, "steps must be a whole number"),
        ({"lr": 0.0}, "the learning rate must be positive"),
    ],
)
def test_settings_that_make_no_sense_are_refused(change, words):
    with pytest.raises(ValueError, match=words):
        TreeSettings(**change).checked()
