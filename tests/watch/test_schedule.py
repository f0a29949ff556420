"""When a watch measures: multiples reached or passed, whatever the increments of the step are."""

from __future__ import annotations

import pytest

from joma._watch.schedule import Schedule


def measured(every, steps):
    schedule, due = Schedule(every), []
    for step in steps:
        schedule.arm()
        if schedule.advance(step):
            due.append(schedule.step)
    return due


@pytest.mark.parametrize(
    ("every", "steps", "expected"),
    [
        (10, range(1, 31), [1, 10, 20, 30]),
        (10, [None] * 21, [1, 10, 20]),
        (10, range(5, 41, 5), [5, 10, 20, 30, 40]),
        (10, range(4, 41, 4), [4, 12, 20, 32, 40]),
        (10, range(50, 201, 50), [50, 100, 150, 200]),
        (10, [1, 2, 3, 13, 14, 15, 16], [1, 14]),  # 10 was passed unexpectedly: made up for in the next step
        (10, [501, 502, 510, 511], [501, 511]),
        (10, [501, *range(502, 511)], [501, 510]),
        (3, [0, 1, 2, 3], [0, 1, 3]),
        ("log", range(1, 11), [1, 2, 3, 4, 5, 6, 7, 8, 10]),
        ("log", range(8, 41, 8), [8, 16, 24, 32, 40]),
        (lambda step: step % 10 == 0, range(5, 31, 5), [10, 20, 30]),
    ],
)
def test_multiples_that_are_reached_or_passed_are_due(every, steps, expected):
    assert measured(every, steps) == expected


def test_steps_made_again_are_measured_again():
    assert measured(2, [1, 2, 3, 4, 5, 6, 3, 4, 5, 6]) == [1, 2, 4, 6, 4, 6]


@pytest.mark.parametrize("cut", range(1, 12))
def test_a_restored_schedule_goes_on_as_an_unbroken_one(cut):
    steps = [5 * n for n in range(1, 13)]
    expected = [step for step in measured(15, steps) if step > 5 * cut]
    schedule = Schedule(15)
    for step in steps[:cut]:
        schedule.arm()
        schedule.advance(step)
    other, due = Schedule(15), []
    other.restore(schedule.state())
    for step in steps[cut:]:
        other.arm()
        if other.advance(step):
            due.append(step)
    assert due == expected
