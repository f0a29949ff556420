"""Optimisers on the joint flow: the same steps as PyTorch's, and their exact laws."""

from itertools import islice

import numpy as np
import pytest
import torch

from joma.theory import BlockFlow, JointFlow, Task
from joma.theory.optimisers import SGD, Adam, AdamW, SignDescent
from joma.theory.optimisers import walk as steps_of
from joma.theory.tasks import random_gradients, small_start

RATES = {"mlp_lr": 0.8, "attention_lr": 1.7, "temperature": 1.4}
STEP = 0.02


def walk(flow, optimiser, start, steps=100, step=STEP):
    """The trajectory, and the optimiser's memory after each step."""
    system = flow._system((*start, None))
    memory = [moment.memory for moment in islice(steps_of(system, optimiser, step), steps)]
    path = flow.descend(steps, step, *start, optimiser=optimiser)
    assert path.done
    return path, memory


def example(attention, nodes=3, seed=0, activation="gelu", **rates):
    rng = np.random.default_rng(seed)
    task = random_gradients(rng, samples=9, tokens=4, nodes=nodes)
    return JointFlow(task, attention, activation, **(rates or RATES)), small_start(task, rng, 0.5)


@pytest.mark.parametrize(
    ("optimiser", "theirs"),
    [
        (SGD(), lambda groups: torch.optim.SGD(groups)),
        (SGD(0.9, 0.05), lambda groups: torch.optim.SGD(groups, momentum=0.9, weight_decay=0.05)),
        (
            SGD(0.9, 0.05, True),
            lambda groups: torch.optim.SGD(groups, momentum=0.9, weight_decay=0.05, nesterov=True),
        ),
        (Adam(weight_decay=0.1), lambda groups: torch.optim.Adam(groups, weight_decay=0.1)),
        (AdamW((0.8, 0.99)), lambda groups: torch.optim.AdamW(groups, betas=(0.8, 0.99))),
    ],
)
def test_the_steps_are_those_of_pytorch(optimiser, theirs):
    flow, start = example("softmax", activation="linear")
    path, _ = walk(flow, optimiser, start, steps=40)
    x, g, p = (torch.tensor(np.array(a)) for a in (flow.task.x, flow.task.g, flow.task.p))
    V, X, Z = (torch.tensor(np.array(a), requires_grad=True) for a in start)
    groups = [
        {"params": [V, X], "lr": STEP * flow.mlp_lr},
        {"params": [Z], "lr": STEP * flow.attention_lr},
    ]
    other = theirs(groups)
    for _ in range(40):
        other.zero_grad()
        weights = x * torch.exp(Z / flow.attention.temperature)
        b = weights / weights.sum(dim=1, keepdim=True)
        (-(p[:, None] * g * (b @ V + X)).sum()).backward()
        other.step()
    for ours, their in ((path.v, V), (path.xi, X), (path.z, Z)):
        np.testing.assert_allclose(ours[-1], their.detach().numpy(), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("attention", ["exp", "linear"])
@pytest.mark.parametrize(
    "optimiser",
    [
        SGD(),
        SGD(0.7),
        SGD(0.7, 0.05),
        SGD(0.0, (0.1, 0.03)),
        SGD(0.8, nesterov=True),
        SGD(0.8, (0.1, 0.2), True),
    ],
)
def test_sgd_with_momentum_and_decay_has_an_exact_law(attention, optimiser):
    flow, start = example(attention)
    z0 = start.z0 - 2 * (attention == "exp")
    invariant = walk(flow, optimiser, (start.v0, start.xi0, z0), steps=60)[0].invariant()
    assert invariant.law_error <= 1e-13
    assert np.abs(invariant.law).max() > 1e-6  # and it says something


def test_other_optimisers_have_no_law_of_their_own():
    flow, start = example("exp")
    assert walk(flow, Adam(), start, steps=3)[0].invariant().law is None


@pytest.mark.parametrize(
    ("optimiser", "kept"), [(SGD(), 1.0), (SGD(0.9), 1.0), (SGD(0.0, 0.1), None)]
)
def test_softmax_sums_under_sgd(optimiser, kept):
    flow, start = example("softmax")
    path, _ = walk(flow, optimiser, start, steps=1000)
    v, xi, z = path.v, path.xi, path.z
    shrink = np.ones((2, 1001))
    if kept is None:
        rate = STEP * 0.1 * np.array([[flow.mlp_lr], [flow.attention_lr]])
        shrink = (1 - rate) ** np.arange(1001)
    sums = v.sum(axis=1) - xi
    assert np.abs(sums - sums[0] * shrink[0][:, None]).max() <= 1e-12 * np.abs(v).max()
    assert np.abs(z.sum(axis=1) - z[0].sum() * shrink[1]).max() <= 1e-12 * np.abs(z).max()


def test_sign_descent_keeps_z_minus_r_v_until_v_changes_sign():
    flow, start = example("exp", nodes=1)
    path, _ = walk(flow, SignDescent(), start, steps=150, step=0.01)
    size = path.v[:, :, 0]
    q = path.z - flow.ratio * np.abs(size)
    same = np.sign(size[1:]) == np.sign(size[:-1])
    change = np.abs(np.diff(q, axis=0))
    assert change[same].max() <= 1e-14
    assert change[~same].min() > 1e-6
    z = walk(flow, SignDescent(), (0 * start.v0, start.xi0, start.z0), steps=3, step=0.01)[0].z
    assert (
        z[1] == z[0]
    ).all()  # at v = 0 attention has no gradient, so a zero start loses one step
    assert (np.abs(z[2] - z[1]) > 0).all()


@pytest.mark.parametrize("beta", [0.0, 0.9])
def test_adam_has_a_law_per_step_with_the_memory_of_its_average(beta):
    flow, start = example("exp", activation="linear")
    path, memory = walk(flow, Adam((beta, 0.99)), start, steps=50, step=0.003)
    v = path.v
    M, K, T = flow.task.tokens, flow.task.nodes, flow.attention.temperature
    carried = np.zeros(M)
    for n, (m, _, _) in enumerate(memory):
        of_v, of_z = m[: M * K].reshape(M, K), m[M * K + K :]
        residual = of_z - (v[n] * of_v).sum(axis=1) / T
        np.testing.assert_allclose(residual, carried, atol=1e-15)
        carried = beta * (residual - ((v[n + 1] - v[n]) * of_v).sum(axis=1) / T)
    assert (np.abs(carried).max() > 1e-6) == (beta > 0)


def test_at_rest_one_weight_decay_gives_twice_the_printed_coefficient():
    flow, start = example("exp", activation="linear", attention_lr=2.5, temperature=1.3)
    path, _ = walk(flow, SGD(0.0, 0.6), start, steps=2500, step=0.03)
    v, z = path.v, path.z
    assert np.abs(np.diff(z[-2:], axis=0)).max() < 1e-12
    np.testing.assert_allclose(z[-1], (v[-1] ** 2).sum(axis=1) / 1.3, atol=1e-9)
    assert np.abs(z[-1]).max() > 0.01


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SGD(1.0), "momentum < 1"),
        (lambda: SGD(nesterov=True), "momentum > 0"),
        (lambda: SGD(weight_decay=-0.1), "weight_decay ≥ 0"),
        (lambda: Adam((0.9, 1.5)), r"betas\[1\] < 1"),
    ],
)
def test_bad_settings_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    "optimiser", [SGD(momentum=0.9, weight_decay=(0.1, 0.2)), Adam(), SignDescent()]
)
@pytest.mark.parametrize("kind", ["exp", "softmax"])
def test_a_block_of_one_query_and_one_head_takes_the_steps_of_the_joint_flow(kind, optimiser):
    rng = np.random.default_rng(1)
    task = Task(rng.random((6, 3)), rng.standard_normal((6, 2)))
    v, xi, z = rng.standard_normal((3, 2)), rng.standard_normal(2), rng.standard_normal(3)
    joint = JointFlow(task, kind).descend(20, 0.05, v, xi, z, optimiser=optimiser)
    block = BlockFlow(task, np.zeros(6), kind).descend(
        20, 0.05, v, xi[None], z[None], optimiser=optimiser
    )
    np.testing.assert_allclose(block.v, joint.v, rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(block.z[:, 0], joint.z, rtol=1e-12, atol=1e-14)
    assert block.invariant().law is None


def test_what_acts_on_parameters_one_by_one_is_refused_where_v_is_none():
    task = Task(np.eye(3), np.ones((3, 1)))
    block = BlockFlow(task, np.zeros(3), "exp", heads=2, values="shared")
    block.descend(2, optimiser=SGD(momentum=0.9))
    with pytest.raises(ValueError, match="Adam acts on each parameter by itself"):
        block.descend(2, optimiser=Adam())


def test_momentum_keeps_the_sums_of_a_softmax_block_with_many_queries():
    rng = np.random.default_rng(2)
    task = Task(rng.dirichlet(np.ones(4), 9), rng.standard_normal((9, 2)))
    block = BlockFlow(task, np.arange(9) % 3, "softmax")
    path = block.descend(200, 0.05, rng.standard_normal((4, 2)), optimiser=SGD(momentum=0.9))
    invariant = path.invariant()
    assert np.abs(invariant.sums - invariant.sums[0]).max() <= 1e-12
    assert invariant.law_error <= 1e-12
    assert np.abs(path.z[-1] - path.z[0]).max() > 0.1
