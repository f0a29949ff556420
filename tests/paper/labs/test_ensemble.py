"""Many flows at once are the flows one by one, and refuse what they cannot do."""

import numpy as np
import pytest

from joma.paper.labs.contrast import GRADIENTS, INPUTS, flows, inputs, late_times, with_gradients
from joma.paper.labs.ensemble import integrate_all, stable_rank
from joma.theory import JointFlow
from joma.theory.tasks import small_start
from joma.theory.winner import winner_take_all


@pytest.mark.parametrize("activation", ["linear", "relu", "gelu"])
@pytest.mark.parametrize("attention", ["exp", "softmax"])
@pytest.mark.parametrize("kind", GRADIENTS)
def test_each_flow_is_that_of_the_integrator(kind, attention, activation):
    times = late_times(8.0, 12)
    tasks, starts = [], []
    for seed in range(3):
        rng = np.random.default_rng(seed)
        task = inputs("random", rng, 4)
        starts.append(small_start(task, rng, 0.3))
        tasks.append(with_gradients(task, kind, activation, rng, 8.0))
    all_of_them = integrate_all(tasks, starts, times, attention=attention, activation=activation)
    path = JointFlow(tasks[1], attention, activation).integrate(
        8.0, *starts[1], times=times, rtol=1e-8, atol=1e-10
    )
    assert path.done
    np.testing.assert_allclose(all_of_them.v[:, 1], path.v, atol=5e-3)
    np.testing.assert_allclose(all_of_them.z[:, 1], path.z, atol=5e-3)
    np.testing.assert_allclose(all_of_them.entropy()[:, 1], path.entropy(), atol=2e-3)


def test_a_blow_up_is_where_the_closed_form_has_it():
    rng = np.random.default_rng(0)
    task = with_gradients(inputs("uneven", rng, 4), "fixed", "linear", rng, 1.0)
    start = small_start(task, rng, 0.0)
    expected = winner_take_all(JointFlow(task, "exp", "linear")).blow_up_time
    times = np.array([0.0, 2 * expected])
    path = integrate_all([task], [start], times, attention="exp", activation="linear", rtol=1e-6)
    np.testing.assert_allclose(path.blown, expected, rtol=1e-4)
    assert path.z.max() > 30


def test_a_flow_does_not_depend_on_its_company():
    times = late_times(3.0, 5)
    alone = flows("uneven", "cross-entropy", "softmax", "relu", [(0, 1)], times)
    beside = flows("uneven", "cross-entropy", "softmax", "relu", [(0, 0), (0, 1), (0, 2)], times)
    np.testing.assert_allclose(beside.v[:, 1], alone.v[:, 0], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", INPUTS)
def test_the_same_seed_has_the_same_inputs_under_all_kinds_of_gradients(name):
    tasks = []
    for kind in GRADIENTS:
        rng = np.random.default_rng(3)
        tasks.append(with_gradients(inputs(name, rng), kind, "relu", rng, 1.0))
    assert all(np.array_equal(task.x, tasks[0].x) for task in tasks)


def test_stable_rank_of_known_matrices():
    np.testing.assert_allclose(
        stable_rank(np.stack([np.eye(3), np.diag([2.0, 1.0, 0.0])])), [3.0, 1.25]
    )


def test_tasks_that_differ_in_shape_are_refused():
    rng = np.random.default_rng(0)
    tasks = [inputs("random", rng, 4), inputs("random", rng, 6)]
    with pytest.raises(ValueError, match="2 tasks of 2 kinds"):
        integrate_all(
            tasks,
            [small_start(t, rng) for t in tasks],
            late_times(1.0),
            attention="exp",
            activation="relu",
        )
