"""Computational graphs against finite differences, autograd, closed forms and brute force over signals."""

import networkx as nx
import numpy as np
import pytest
import torch

from joma.theory import CDAG
from joma.theory.cdag import NONLINEARITIES, cosine, implied, triples

SPEC = {"h": ["x", "y"], "k": ["x", "h"], "out": ["h", "k", "x"], "other": ["k"]}


def random_graph(seed, nodes=9):
    rng = np.random.default_rng(seed)
    return nx.DiGraph(
        (int(i), int(j)) for j in range(1, nodes) for i in range(j) if rng.random() < 0.5
    )


def data(graph, seed=0, n=40):
    rng = np.random.default_rng(seed)
    x, target = (
        rng.standard_normal((n, len(graph.inputs))),
        rng.standard_normal((n, len(graph.outputs))),
    )
    return graph.small_weights(1.5, rng), x, target


def losses(graph, w, x, target, loss):
    f = graph.forward(w, x)[0][:, list(graph.outputs)]
    if loss == "squared":
        return 0.5 * np.mean(((target - f) ** 2).sum(axis=1))
    if loss == "logistic":
        return np.mean((np.logaddexp(0, f) - target * f).sum(axis=1))
    return np.mean(np.log(np.exp(f).sum(axis=1)) - (target * f).sum(axis=1))


@pytest.mark.parametrize("loss", ["squared", "logistic", "softmax"])
@pytest.mark.parametrize("seed", range(3))
def test_weight_gradients_are_those_of_finite_differences_on_random_graphs(seed, loss):
    directed = random_graph(seed)
    kinds = sorted(set(NONLINEARITIES) - {"relu", "leaky_relu"})
    named = {
        node: kinds[i % len(kinds)] for i, node in enumerate(directed) if directed.in_degree(node)
    }
    graph = CDAG(directed, named)
    w, x, target = data(graph, seed)
    if loss == "softmax":
        target = np.abs(target) / np.abs(target).sum(axis=1, keepdims=True)
    step = 1e-6 * np.eye(len(w))
    numeric = [
        (losses(graph, w + e, x, target, loss) - losses(graph, w - e, x, target, loss)) / 2e-6
        for e in step
    ]
    np.testing.assert_allclose(graph.signals(w, x, target, loss).dw, -np.array(numeric), atol=2e-8)


def test_node_gradients_are_those_of_autograd_with_relu():
    graph = CDAG(SPEC, "relu")
    w, x, target = data(graph)
    weight = {
        (graph.nodes[j], graph.nodes[k]): torch.tensor(w[e]) for e, (j, k) in enumerate(graph.edges)
    }
    value = {name: torch.tensor(x[:, i], requires_grad=True) for i, name in enumerate(("x", "y"))}
    for node in ("h", "k", "out", "other"):
        total = sum(weight[node, k] * value[k] for k in SPEC[node])
        value[node] = torch.relu(total) if node in ("h", "k") else total
        value[node].retain_grad()
    out = torch.stack([value[graph.nodes[i]] for i in graph.outputs], dim=1)
    (0.5 * ((torch.tensor(target) - out) ** 2).sum()).backward()
    signals = graph.signals(w, x, target)
    for node in ("x", "y", "h", "k", "out"):
        np.testing.assert_allclose(
            signals.g[:, graph.index(node)], -value[node].grad.numpy(), atol=1e-12
        )


def test_a_node_is_asked_for_the_sum_of_what_its_successors_send_it():
    graph = CDAG(SPEC)
    w, x, target = data(graph)
    signals = graph.signals(w, x, target)
    sent = np.zeros_like(signals.g)
    for e, (j, k) in enumerate(graph.edges):
        sent[:, k] += w[e] * signals.u[:, j]
    inner = [i for i in range(len(graph.nodes)) if i not in graph.outputs]
    np.testing.assert_allclose(signals.g[:, inner], sent[:, inner], atol=1e-12)


def test_the_flow_of_one_linear_node_is_the_closed_form():
    graph = CDAG({"y": ["x"]})
    x, target = np.array([[1.0], [2.0], [-1.0]]), np.array([[1.0], [3.0], [0.5]])
    times = np.linspace(0, 3, 7)
    second, first = np.mean(x**2), np.mean(x * target)
    expected = first / second + (0.1 - first / second) * np.exp(-second * times)
    path = graph.train(x, target, [0.1], times, rtol=1e-10)
    np.testing.assert_allclose(path.w[:, 0], expected, atol=1e-9)


def test_the_flow_is_the_limit_of_gradient_descent():
    graph = CDAG(SPEC)
    w, x, target = data(graph)
    w = 0.3 * w
    end = graph.train(x, target, w, [0.0, 1.0]).w[-1]
    gaps = []
    for steps in (200, 400):
        v = w.copy()
        for _ in range(steps):
            v = v + graph.signals(v, x, target).dw / steps
        gaps.append(np.abs(v - end).max())
    assert gaps[1] < 1e-3
    assert gaps[0] / gaps[1] == pytest.approx(2, abs=0.1)  # Euler: first order


def in_a_plane(*angles):
    return [np.array([np.cos(a), np.sin(a)]) for a in angles]


@pytest.mark.parametrize(("a1", "a2", "a3"), [(0.2, 0.5, 0.6), (0.0, 0.7, 0.7), (0.5, 0.01, 0.9)])
def test_the_implied_constant_is_reached_and_beyond_the_condition_the_sign_turns(a1, a2, a3):
    u, beta, f = in_a_plane(0.0, a1 + a3, a1 + a2 + a3)
    bound = implied(np.cos(a1), np.cos(a2), np.cos(a3))
    assert (u @ f) * (u @ beta) == pytest.approx(float(bound), abs=1e-12)
    more = np.pi / 2 - a1 - a3 + 0.01  # widen a₂ just beyond the condition
    _, _, f = in_a_plane(0.0, a1 + a3, a1 + more + a3)
    assert (u @ f) * (u @ beta) < 0
    assert np.isnan(implied(np.cos(a1), np.cos(more), np.cos(a3)))


def test_no_signals_fall_below_the_implied_constant():
    rng = np.random.default_rng(0)
    u = rng.standard_normal((20_000, 3))
    alpha, beta, f = (
        u + rng.uniform(0, 0.8, (len(u), 1)) * rng.standard_normal(u.shape) for _ in range(3)
    )

    def cos(a, b):
        return (a * b).sum(axis=1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1)

    bound = implied(cos(alpha, u), cos(beta, f), np.abs(cos(alpha, beta)))
    met = np.isfinite(bound)
    assert met.sum() > 1000
    assert (cos(beta, u) * cos(f, u) - bound)[met].min() > -1e-12


def test_triples_are_the_four_correlations_of_the_theorem():
    graph = CDAG(SPEC)
    w, x, target = data(graph)
    signals = graph.signals(w, x, target)
    z = np.random.default_rng(1).standard_normal((len(x), 3))
    found = triples(graph, w, signals, z)
    both = np.concatenate([z, -z], axis=1)
    e, a, b = 4, 1, 5
    j, k = graph.edges[e]
    sent = w[e] * signals.u[:, j]
    for name, (p, q) in {
        "c1": (both[:, a], signals.u[:, j]),
        "c2": (both[:, b], signals.f[:, k]),
        "c4": (both[:, b], sent),
    }.items():
        assert getattr(found, name)[e, a, b] == pytest.approx(
            p @ q / np.linalg.norm(p) / np.linalg.norm(q)
        )
    assert found.c3[e, a, b] == pytest.approx(abs(cosine(both[:, [a]], both[:, [b]])[0, 0]))
    assert (found.condition <= found.premises).all()


def test_inputs_outputs_and_an_order_of_computation():
    graph = CDAG(SPEC)
    assert {graph.nodes[i] for i in graph.inputs} == {"x", "y"}
    assert {graph.nodes[i] for i in graph.outputs} == {"out", "other"}
    assert (graph.edges[:, 1] < graph.edges[:, 0]).all()
    assert len(graph.edges) == sum(len(reads) for reads in SPEC.values())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: CDAG({"a": ["b"], "b": ["c"], "c": ["a", "x"]}), r"cycle: \w → \w → \w → \w"),
        (lambda: CDAG({"a": ["a"]}), "cycle: a → a"),
        (lambda: CDAG({}), "graph is empty"),
        (lambda: CDAG(nx.path_graph(3)), "undirected"),
        (lambda: CDAG({"a": ["x"], "alone": []}), "'alone' reads nothing and is read by nobody"),
        (lambda: CDAG(SPEC, "tahn"), "Did you mean 'tanh'"),
        (lambda: CDAG(SPEC, {"hh": "relu"}), "unknown node 'hh'. Did you mean 'h'"),
        (lambda: CDAG(SPEC).index("outt"), "Did you mean 'out'"),
        (
            lambda: CDAG(SPEC).train([[1.0]], [[1.0, 2.0]], np.zeros(8), [0, 1]),
            r"x has shape \(1, 1\)",
        ),
        (
            lambda: CDAG(SPEC).train([[1.0, 2]], [[1.0]], np.zeros(8), [0, 1]),
            r"target has shape \(1, 1\)",
        ),
        (
            lambda: CDAG(SPEC).train([[1.0, 2]], [[1.0, 2]], np.zeros(3), [0, 1]),
            r"w0 has shape \(3,\)",
        ),
        (lambda: CDAG(SPEC).train([[1.0, 2]], [[1.0, 2]], np.zeros(8), [1, 0]), "times must rise"),
        (
            lambda: CDAG(SPEC).train([[1.0, 2]], [[1.0, 2]], np.zeros(8), [0, 1], loss="square"),
            "Did you mean 'squared'",
        ),
    ],
)
def test_bad_graphs_are_refused_with_the_reason(make, message):
    with pytest.raises(ValueError, match=message):
        make()
