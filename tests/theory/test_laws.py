"""The count of conserved quantities: by Lie brackets, by the end-point map, by what is known; and the softmax laws."""

import numpy as np
import pytest

from joma.theory import BlockFlow, JointFlow, Task
from joma.theory.invariants import softmax_sums
from joma.theory.laws import WeightPair, endpoint_count, laws, split_logit_velocity

M, K = 3, 2


def task(nodes=K, loss="fixed", tokens=M, samples=6):
    rng = np.random.default_rng(0)
    x = rng.dirichlet(np.ones(tokens), samples)
    if loss == "fixed":
        return Task(x, rng.standard_normal((samples, nodes)))
    return Task.classification(x, np.arange(samples) % nodes, classes=nodes)


def embedding(orthogonal_query):
    E = np.random.default_rng(1).standard_normal((6, M + 1))
    if orthogonal_query:
        E[:, M] -= E[:, :M] @ np.linalg.lstsq(E[:, :M], E[:, M], rcond=None)[0]
    return E


NO_RESIDUAL = np.eye(M + 1) * ([1.0] * M + [0.0])
TWO = [0, 1, 0, 1, 0, 1]
CASES = {
    "linear": (lambda: JointFlow(task(), "linear", attention_lr=0.7, temperature=1.3), M),
    "exp": (lambda: JointFlow(task(), "exp", mlp_lr=0.01, attention_lr=3.0, temperature=0.4), M),
    "softmax": (lambda: JointFlow(task(), "softmax", attention_lr=0.7), K + 1),
    "softmax, gelu": (lambda: JointFlow(task(), "softmax", "gelu"), K + 1),
    "softmax, no residual": (lambda: JointFlow(task(), "softmax", embedding=NO_RESIDUAL), 1),
    "exp, no residual": (lambda: JointFlow(task(), "exp", embedding=NO_RESIDUAL), M),
    # Σ_k g_k = 0 adds Σ_k v_lk and Σ_k ξ_k; under softmax one of them is known already
    "exp, softmax loss": (lambda: JointFlow(task(loss="softmax"), "exp"), M + M + 1),
    "softmax, softmax loss": (lambda: JointFlow(task(loss="softmax"), "softmax"), K + 1 + M),
    "softmax, softmax loss, silu": (
        lambda: JointFlow(task(loss="softmax"), "softmax", "silu"),
        K + 1,
    ),
    "exp, any embedding": (lambda: JointFlow(task(), "exp", embedding=embedding(False)), 0),
    "exp, query orthogonal to the context": (
        lambda: JointFlow(task(), "exp", embedding=embedding(True)),
        1,
    ),
    "softmax, any embedding": (
        lambda: JointFlow(task(), "softmax", embedding=embedding(False)),
        K + 1,
    ),
    "frozen softmax": (lambda: JointFlow(task(), "softmax", attention_lr=0.0), M + K),
    "exp, heads": (lambda: BlockFlow(task(), TWO, "exp", heads=2), 2 * M),
    "exp, heads that share values": (
        lambda: BlockFlow(task(), TWO, "exp", heads=2, values="shared"),
        M + 2 * M,
    ),
    "linear, heads": (lambda: BlockFlow(task(), TWO, "linear", heads=2), 3 * M),
    "softmax, heads": (lambda: BlockFlow(task(), TWO, "softmax", heads=2), 4 + 2 * K),
    "weight pair": (lambda: WeightPair(hidden=2, rows=2, columns=3), 3),
}


@pytest.mark.parametrize("case", CASES)
def test_the_count_is_certified_and_that_of_the_end_point_map(case):
    make, expected = CASES[case]
    counted = laws(make())
    assert (counted.count, counted.certified) == (expected, True)
    assert counted.gap >= 1e6
    assert sum(law.count for law in counted.known) == expected
    count, gap = endpoint_count(make())
    assert count == expected
    assert gap >= 1e6


def test_brackets_matter_for_weight_pairs_and_at_a_zero_start():
    assert laws(WeightPair(2, 3, 3)).ranks[0] < laws(WeightPair(2, 3, 3)).rank
    start = laws(JointFlow(task(), "softmax"), z0=np.zeros(M))
    assert start.ranks[0] == M * K
    assert (start.count, start.certified) == (K + 1, True)


def test_linear_attention_that_starts_at_zero_stays_there():
    counted = laws(JointFlow(task(), "linear"), z0=np.array([0.0, 0.0, 1.0]))
    assert (counted.count, counted.certified) == (1 + 2 * (K + 1), True)


@pytest.mark.parametrize("kind", ["linear", "exp"])
def test_one_node_and_normalised_frequencies_have_one_more_law(kind):
    flow = JointFlow(task(nodes=1), kind, attention_lr=0.6, temperature=1.2)
    counted = laws(flow, normalised=True)
    assert (counted.count, counted.certified) == (M + 1, True)
    assert endpoint_count(flow, normalised=True)[0] == M + 1


def test_components_outside_the_embeddings_span_are_trivial():
    E = np.vstack([np.eye(M + 1), np.zeros((2, M + 1))])
    counted = laws(JointFlow(task(), "exp", embedding=E))
    assert (counted.count, counted.trivial) == (M, 2 * K)


def test_what_cannot_be_counted_is_refused():
    with pytest.raises(ValueError, match="which nodes are active together"):
        laws(JointFlow(task(loss="softmax"), "exp", "relu"))
    with pytest.raises(TypeError, match="JointFlow, a BlockFlow or a WeightPair"):
        laws(task())


@pytest.mark.parametrize("embedded", [False, True])
def test_softmax_sums_are_conserved_by_flow_and_descent(embedded):
    E = embedding(False) if embedded else None
    flow = JointFlow(task(), "softmax", "gelu", attention_lr=2.0, embedding=E)
    start = np.random.default_rng(3).standard_normal((M, K))
    for path in (flow.integrate(5.0, start, times=11), flow.descend(1000, 0.1, start)):
        sums = path.invariant().sums
        assert sums.shape == (len(path.t), K + 1)
        assert np.abs(sums - sums[0]).max() <= 1e-12 * max(1.0, np.abs(sums).max())


def test_dependent_embeddings_have_no_such_sum():
    E = np.random.default_rng(1).standard_normal((2, M + 1))
    assert softmax_sums(E.T @ E, np.zeros((1, M, K)), np.zeros((1, 1, K))).shape == (1, 0)
    assert laws(JointFlow(task(), "softmax", embedding=E)).count == 1


def test_the_velocity_of_softmax_logits_splits_exactly():
    flow = JointFlow(
        task(samples=9), "softmax", "gelu", mlp_lr=0.5, attention_lr=2.0, temperature=0.7
    )
    rng = np.random.default_rng(5)
    v, xi, z = rng.standard_normal((M, K)), rng.standard_normal(K), rng.standard_normal(M)
    transport, covariance = split_logit_velocity(flow, v, xi, z)
    z_dot = flow.block.smooth_velocity(v, xi, z).z
    np.testing.assert_allclose(transport + covariance, z_dot, rtol=1e-12, atol=1e-14)
    assert np.abs(covariance).max() > 1e-3 * np.abs(z_dot).max()
    with pytest.raises(ValueError, match="softmax"):
        split_logit_velocity(JointFlow(task(), "exp"), v, xi, z)
