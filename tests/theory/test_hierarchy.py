"""Hierarchical trees against enumeration, networkx, Monte Carlo and the paper's closed forms."""

import networkx as nx
import numpy as np
import pytest

from joma.paper.claims.hierarchy import enumerate_states
from joma.theory import HBLT
from joma.theory.hierarchy import CLASS, eqn8, sequences, theorem5, through_class

Q = [[0.9, 0.2], [0.35, 0.6], [0.75, 1.0]]


def uneven(seed=0):
    """Tokens at two depths, an edge of its own ρ each, both signs and both extremes."""
    rng = np.random.default_rng(seed)
    rho = rng.uniform(-1, 1, size=9)
    rho[:2] = 1.0, -1.0
    return HBLT(3, [[1, 2], [2, 0, 4]], rho, class_to_latent=Q, class_prior=[0.2, 0.3, 0.5])


@pytest.mark.parametrize("seed", range(3))
def test_pair_moments_are_those_of_the_enumerated_distribution(seed):
    tree = uneven(seed)
    y, p = enumerate_states(tree)
    assert p.sum() == pytest.approx(1, abs=1e-12)
    np.testing.assert_allclose(tree.marginal(), p @ y, atol=1e-14)
    np.testing.assert_allclose(tree.joint(range(tree.size)), (y * p[:, None]).T @ y, atol=1e-14)
    tokens = y[:, tree.tokens]
    joint = (tokens * p[:, None]).T @ tokens
    np.testing.assert_allclose(tree.cooccurrence(), joint / np.diag(joint), atol=1e-13)


@pytest.mark.parametrize("seed", range(3))
def test_posteriors_are_those_of_the_enumerated_distribution(seed):
    tree = uneven(seed)
    y, p = enumerate_states(tree)
    tokens = y[:, tree.tokens]
    key = tokens @ (1 << np.arange(tokens.shape[1]))
    total = np.bincount(key, p)
    possible = np.flatnonzero(total > 0)
    exact = np.array(
        [np.bincount(key, p * y[:, i])[possible] / total[possible] for i in range(tree.size)]
    ).T
    patterns = (possible[:, None] >> np.arange(tokens.shape[1])) & 1
    of_class, of_variable = tree.posterior(patterns)
    np.testing.assert_allclose(of_variable, exact, atol=1e-12)
    np.testing.assert_allclose(total[possible] @ of_class, tree.prior, atol=1e-12)


def test_posteriors_of_many_tokens_do_not_vanish_and_impossible_ones_are_refused():
    tree = HBLT(2, 3000, 0.5, class_to_latent=[[0.9], [0.1]])
    of_class, of_variable = tree.posterior(tree.sample(3, 0).tokens)
    assert np.isfinite(of_variable).all()
    np.testing.assert_allclose(of_class.sum(axis=1), 1)
    copies = HBLT(2, 2, 1.0, class_to_latent=[[0.5]])
    with pytest.raises(ValueError, match=r"tokens\[1\] has probability 0"):
        copies.posterior([[1, 1], [0, 1]])


def test_samples_have_the_exact_pair_probabilities():
    tree, n = uneven(1), 200_000
    sample = tree.sample(n, 7)
    y = sample.y.astype(float)
    exact = tree.joint(range(tree.size))
    error = np.abs(y.T @ y / n - exact) / np.sqrt(exact * (1 - exact) / n + 1e-300)
    assert error[exact > 1e-6].max() < 5
    assert (y.T @ y)[exact < 1e-15].max(initial=0) == 0
    classes = np.bincount(sample.classes, minlength=3) / n
    assert np.abs(classes - tree.prior).max() < 5 * 0.5 / np.sqrt(n)
    for k in range(3):  # given the class, too
        mean = y[sample.classes == k][:, :2].mean(axis=0)
        assert np.abs(mean - (1 - np.array(Q[k]))).max() < 5 * 0.5 / np.sqrt(0.2 * n)


def test_certain_edges_copy_or_flip_exactly():
    tree = HBLT(2, 2, [1.0, -1.0], class_to_latent=[[0.0], [1.0]])
    sample = tree.sample(50_000, 0)
    assert (sample.y[:, 0] == 1 - sample.classes).all()
    assert (sample.tokens[:, 0] == sample.y[:, 0]).all()
    assert (sample.tokens[:, 1] != sample.y[:, 0]).all()


def test_rare_events_are_not_rounded_to_sixteen_bits():
    p, n = 3e-6, 10_000_000  # below 2⁻¹⁶ = 1.5e-5
    tree = HBLT(2, 1, 1 - 2 * p, class_to_latent=[[1.0]])
    count = int(tree.sample(n, 3).tokens.sum())
    assert abs(count - n * p) < 6 * np.sqrt(n * p)
    assert count > 0


def test_the_same_seed_gives_the_same_samples_and_shapes_are_those_of_the_layers():
    tree = uneven()
    a, b = tree.sample(5000, 3), tree.sample(5000, np.random.default_rng(3))
    assert (a.y == b.y).all()
    assert [layer.shape for layer in a.latents] == [(5000, 2), (5000, 2)]
    assert a.tokens.shape == (5000, 7)
    assert a.tokens.dtype == np.uint8
    np.testing.assert_array_equal(a.tokens, a.y[:, tree.tokens])
    flat = HBLT(1, class_to_latent=Q).sample(10, 0)
    assert flat.latents == ()
    assert flat.tokens.shape == (10, 2)


def test_sequences_are_ascending_and_padded_in_front():
    tokens = np.random.default_rng(0).random((9000, 12)) < 0.3
    length = int(tokens.sum(axis=1).max())
    for got, row in zip(sequences(tokens, length), tokens, strict=True):
        ids = [i for i, on in enumerate(row) if on]
        assert got.tolist() == [12] * (length - len(ids)) + ids
    assert sequences([[0, 1, 0]], 3, pad=-1).tolist() == [[-1, -1, 1]]
    with pytest.raises(ValueError, match="3 tokens, more than length = 2"):
        sequences([[0, 0, 0], [1, 1, 1]], 2)
    with pytest.raises(ValueError, match=r"must be \(n, M\)"):
        sequences([1, 0], 2)
    tree = HBLT(2, 4, class_to_latent=Q)
    assert tree.sample(6, 0).sequences().shape == (6, 30)


@pytest.mark.parametrize("rho", [0.9, -0.6])
def test_theorem_5_and_the_case_it_leaves_out_are_the_exact_co_occurrence(rho):
    tree = HBLT(4, 2, rho, class_to_latent=Q, class_prior=[0.2, 0.3, 0.5])
    exact, H = tree.cooccurrence(), tree.heights()
    top = np.repeat([0, 1], 8)
    kappa = tree.prior @ (2 * tree.q - 1).prod(axis=1)
    inside = theorem5(rho, tree.rho0[top][None, :], H, 4)
    across = through_class(rho, tree.rho0[top][:, None], tree.rho0[top][None, :], kappa, 4)
    np.testing.assert_allclose(exact, np.where(H < 4, inside, across), atol=1e-13)


def test_eqn_8_is_the_limit_and_its_remainder_the_slope():
    H, L = np.arange(1, 5), 5
    for epsilon in (1e-3, 1e-4):
        exact = theorem5(1 - epsilon, 1 - epsilon, H, L)
        assert np.abs(exact - eqn8(H, L, epsilon)).max() < 20 * epsilon**2
        assert np.abs(exact - eqn8(H, L)).max() > 0.3 * epsilon


def test_a_weak_edge_does_not_weaken_co_occurrence():
    for weak in (0.9, 0.5, 0.0):
        tree = HBLT(2, [[2]], [weak, 0.9], class_to_latent=[[0.95]])  # ρ₀ = ρ_m = 0.9
        assert tree.cooccurrence()[0, 1] == pytest.approx(0.5, abs=1e-14)


def test_a_networkx_tree_is_the_same_tree():
    graph = nx.DiGraph()
    graph.add_edges_from([("class", "a"), ("class", "b")])
    graph.add_edge("a", "x", rho=0.3)
    graph.add_edge("a", "y")
    graph.add_edge("b", "z", rho=-0.5)
    tree = HBLT.from_networkx(graph, rho=0.7, class_to_latent=Q)
    same = HBLT(2, [[2, 1]], [0.3, 0.7, -0.5], class_to_latent=Q)
    np.testing.assert_array_equal(tree.cooccurrence(), same.cooccurrence())
    assert [tree.names[i] for i in tree.tokens] == ["x", "y", "z"]
    undirected = HBLT.from_networkx(graph.to_undirected(), "class", 0.7, class_to_latent=Q)
    np.testing.assert_array_equal(undirected.cooccurrence(), same.cooccurrence())


def test_common_ancestors_are_those_of_networkx():
    tree = uneven()
    graph = nx.DiGraph((int(p), i) for i, p in enumerate(tree.parent))
    found = tree.ancestors()
    for a, i in enumerate(tree.tokens):
        for b, j in enumerate(tree.tokens):
            assert found[a, b] == nx.lowest_common_ancestor(graph, int(i), int(j))
    assert (found == CLASS).any()
    depth = nx.shortest_path_length(graph, CLASS)
    assert tree.depth.tolist() == [depth[i] for i in range(tree.size)]
    assert tree.L == 3


def test_a_token_that_never_occurs_has_no_co_occurrence():
    tree = HBLT(1, class_to_latent=[[1.0, 0.5]])
    given = tree.cooccurrence()
    assert np.isnan(given[:, 0]).all()
    assert np.isfinite(given[:, 1]).all()


def graph_with(*edges):
    return nx.DiGraph(edges)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: HBLT(2, 2, 1.2, class_to_latent=Q), r"rho = 1.2 is outside \[−1, 1\]"),
        (lambda: HBLT(2, 2, float("nan"), class_to_latent=Q), "rho = nan"),
        (lambda: HBLT(2, 2, [0.1, 0.2, 0.3], class_to_latent=Q), r"rho has shape \(3,\)"),
        (lambda: HBLT(2, 2, class_to_latent=[[0.5, 1.5]]), r"class_to_latent\[0, 1\] = 1.5"),
        (lambda: HBLT(2, 2, class_to_latent=[[-0.1]]), r"must lie in \[0, 1\]"),
        (lambda: HBLT(2, 2, class_to_latent=np.empty((3, 0))), "tree is empty"),
        (lambda: HBLT(0, 2, class_to_latent=Q), "depth = 0"),
        (lambda: HBLT(2.5, 2, class_to_latent=Q), "depth = 2.5"),
        (lambda: HBLT(3, [2], class_to_latent=Q), "children has 1 entries"),
        (lambda: HBLT(2, [[1, -1]], class_to_latent=Q), r"children\[0\] = \[1, -1\]"),
        (lambda: HBLT(2, [[1, 2, 3]], class_to_latent=Q), "one for each of 2 latents"),
        (lambda: HBLT(2, 2, class_to_latent=Q, class_prior=[0.5, 0.2, 0.2]), "sum to 1"),
        (lambda: HBLT(2, 2, class_to_latent=Q).sample(0), "at least one sample"),
        (lambda: HBLT(2, 2, class_to_latent=Q).posterior([[1, 0]]), r"needs \(n, 4\)"),
        (lambda: HBLT.from_networkx(nx.DiGraph(), class_to_latent=Q), "tree is empty"),
        (
            lambda: HBLT.from_networkx(graph_with("ab", "bc", "cb"), class_to_latent=Q),
            "cycle: b → c → b",
        ),
        (
            lambda: HBLT.from_networkx(nx.cycle_graph(3), 0, class_to_latent=Q),
            "cycle: 0 → 1 → 2 → 0",
        ),
        (
            lambda: HBLT.from_networkx(graph_with("ab", "cd"), class_to_latent=Q),
            "disconnected: 2 nodes .* 'c' among",
        ),
        (
            lambda: HBLT.from_networkx(graph_with("ac", "bc"), class_to_latent=Q),
            r"'c' has 2 parents \(a, b\)",
        ),
        (lambda: HBLT.from_networkx(nx.path_graph(3), class_to_latent=Q), "needs root="),
        (
            lambda: HBLT.from_networkx(nx.path_graph(3), 9, class_to_latent=Q),
            "root 9 is not a node",
        ),
        (lambda: HBLT.from_networkx(graph_with("ab"), class_to_latent=Q), "1 columns"),
    ],
)
def test_bad_trees_are_refused_with_the_reason(make, message):
    with pytest.raises(ValueError, match=message):
        make()
