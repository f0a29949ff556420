"""The options of a watch: checked when they are made, and the same for `joma.watch` and for trainers."""

from __future__ import annotations

import dataclasses
import inspect

import pytest

import joma
from joma._measure.watch.options import WatchOptions
from joma.integrations._deferred_watch import WatchKeywords

DERIVED = {"periods", "chosen_gauges"}
OPTIONS = {field.name for field in dataclasses.fields(WatchOptions)} - DERIVED


def test_they_are_the_arguments_of_watch():
    assert set(inspect.signature(joma.watch).parameters) == {"model", *OPTIONS}


def test_trainers_take_all_of_them_but_the_optimiser():
    assert set(WatchKeywords.__annotations__) == OPTIONS - {"run", "every", "gauges", "optimizer"}


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"run": 3}, TypeError, "run must be the path"),
        ({"overwrite": True, "resume": True}, ValueError, "give one of them"),
        ({"on_alert": "halt"}, TypeError, "on_alert must be"),
        ({"gauges": "entropi"}, ValueError, "Did you mean 'entropy'"),
        ({"gauges": ()}, ValueError, "no gauges to measure"),
        ({"every": 0}, ValueError, "every must be"),
    ],
)
def test_a_mistake_is_an_error_at_once(options, error, message):
    with pytest.raises(error, match=message):
        WatchOptions(**options)


def test_gauges_from_a_generator_survive_a_change_of_another_option():
    options = WatchOptions(gauges=(name for name in ("entropy", "sink_mass")))
    changed = dataclasses.replace(options, live=False)
    assert [gauge.name for gauge in changed.chosen_gauges] == ["entropy", "sink_mass"]


def test_they_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        WatchOptions().live = True
