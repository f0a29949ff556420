"""The accuracies that joma promises for its flows, on the tasks that they are promised for."""

import functools

import numpy as np
import pytest

from joma.theory import EndingKind, FoldedFlow, JointFlow, Task, winner_take_all
from joma.theory.tasks import random_gradients, small_start


def start_of(task, rng, attention, scale=0.3):
    start = small_start(task, rng, scale)
    return start._replace(z0=start.z0 + 1.0) if attention == "linear" else start


@pytest.mark.parametrize("ratio", [0.1, 1.0, 3.0])
@pytest.mark.parametrize("activation", ["linear", "gelu", "silu"])
@pytest.mark.parametrize("attention", ["linear", "exp"])
def test_smooth_flows_keep_their_first_integral_to_1e_9(attention, activation, ratio):
    rng = np.random.default_rng(0)
    task = random_gradients(rng, samples=30, tokens=10, nodes=5)
    path = JointFlow(task, attention, activation, attention_lr=ratio).integrate(
        5.0, *start_of(task, rng, attention)
    )
    assert path.done
    assert np.abs(path.z[-1] - path.z[0]).max() > 1e-3  # something moved
    assert path.invariant().max_drift <= 1e-9


@functools.cache
def kinked(attention, activation, seed):
    """The flow of a random task with N = 50, M = 30, K = 10 that switches and slides a lot, its start, and its path."""
    rng = np.random.default_rng(seed)
    task = Task(1.5 * rng.random((50, 30)) / np.sqrt(30), rng.standard_normal((50, 10)))
    flow, start = JointFlow(task, attention, activation), start_of(task, rng, attention)
    return flow, start, flow.integrate(5.0, *start, times=101)


@pytest.mark.parametrize("activation", ["relu", "leaky_relu"])
@pytest.mark.parametrize("attention", ["linear", "exp", "softmax"])
def test_kinked_flows_keep_it_to_1e_8_and_slide_within_1e_9_of_the_hyperplane(
    attention, activation
):
    _, _, path = kinked(attention, activation, 0)
    assert path.done
    assert path.switches > 20
    invariant = path.invariant()
    assert (invariant.sum_drift.max() if attention == "softmax" else invariant.max_drift) <= 1e-8
    off = [
        abs(path.preactivation(n)[slide.sample, slide.node])
        for slide in path.slides
        for n in range(len(path.t))
        if slide.start <= path.t[n] <= slide.end
    ]
    assert off
    assert max(off) <= 1e-9


@pytest.mark.parametrize("activation", ["relu", "leaky_relu"])
@pytest.mark.parametrize("attention", ["linear", "exp", "softmax"])
def test_kinked_flows_are_the_limit_of_gradient_descent_whose_error_halves_with_the_step(
    attention, activation
):
    # descent chatters across the kinks on which the flow slides, so single times and tasks are noisy: the mean over
    # the trajectory, and over three tasks
    halvings = []
    for seed in (0, 2, 3):
        flow, start, path = kinked(attention, activation, seed)
        errors = [
            np.abs(flow.descend(steps, 5.0 / steps, *start).v[:: steps // 100] - path.v).mean()
            for steps in (1000, 4000)
        ]
        halvings.append(np.log2(errors[0] / errors[1]) / 2)
    assert np.mean(halvings) == pytest.approx(1.0, abs=0.25)  # the order in the step size


@pytest.mark.parametrize("activation", ["linear", "gelu", "silu", "relu", "leaky_relu"])
@pytest.mark.parametrize("attention", ["linear", "exp"])
def test_the_folded_flow_is_the_joint_flow_to_1e_7(attention, activation):
    rng = np.random.default_rng(3)
    task = random_gradients(rng, samples=30, tokens=10, nodes=5)
    start = start_of(task, rng, attention)
    joint, folded = (
        kind(task, attention, activation).integrate(5.0, *start) for kind in (JointFlow, FoldedFlow)
    )
    for name in ("v", "xi", "z"):
        assert np.abs(getattr(joint, name) - getattr(folded, name)).max() <= 1e-7


@pytest.mark.parametrize("nodes", [1, 4])
def test_folding_through_a_sign_change_of_z(nodes):
    rng = np.random.default_rng(4)
    task = random_gradients(rng, samples=20, tokens=5, nodes=nodes)
    delta = task.saliency().delta
    v0 = 0.5 * delta / np.linalg.norm(delta, axis=1, keepdims=True)  # pushes every logit up
    z0 = np.full(5, -0.02)
    joint, folded = (
        kind(task, "linear", "linear").integrate(8.0, v0, z0=z0) for kind in (JointFlow, FoldedFlow)
    )
    assert (joint.z[0] < 0).all()
    assert (joint.z[-1] > 0).sum() >= 3
    assert np.abs(joint.z - folded.z).max() <= 1e-7
    assert np.abs(joint.v - folded.v).max() <= 1e-7


@pytest.mark.parametrize("nodes", [1, 3])
@pytest.mark.parametrize("ratio", [0.3, 1.0, 2.0])
def test_the_closed_form_of_theorem_2_to_0_999_of_the_blow_up(nodes, ratio):
    rng = np.random.default_rng(5)
    task = random_gradients(rng, samples=12, tokens=7, nodes=nodes)
    flow = JointFlow(
        task, "exp", "linear", mlp_lr=1.5, attention_lr=1.5 * ratio, temperature=0.7, A=2.0
    )
    exact = winner_take_all(flow)
    times = exact.blow_up_time * np.append(np.linspace(0, 0.99, 100), 0.999)
    path = flow.integrate(times[-1], times=times)
    v, xi, z = exact.at(times)
    assert np.abs(path.v - v).max() <= 1e-8 * np.abs(v).max()
    assert np.abs(path.z - z).max() <= 1e-8 * np.abs(z).max()
    assert np.abs(path.xi - xi).max() <= 1e-8
    beyond = flow.integrate(3 * exact.blow_up_time)
    assert beyond.ending.kind is EndingKind.BLOW_UP
    assert beyond.t[-1] == pytest.approx(exact.blow_up_time, rel=1e-9)
