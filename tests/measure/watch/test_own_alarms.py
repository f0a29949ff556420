"""The table of alarms: those of joma, and those that users add."""

import inspect
import json
import re
import warnings
from dataclasses import dataclass, field, fields
from pathlib import Path

import pytest
import torch

import joma
from joma._measure.watch.alarms import Alarms
from joma._measure.watch.alarms.alarm_table import BUILTIN, all_alarms, find_alarm, remove_alarm
from joma._measure.watch.readings import LayerReading, Reading
from joma._runs.alerts import read_alerts
from tests.measure.watch.models import LENGTH, VOCABULARY, HandWrittenGPT

PAGE = Path(__file__).parents[3] / "docs" / "extend.md"


@pytest.fixture(autouse=True)
def _table():
    """Alarms that a test registers are gone after it."""
    yield
    for alarm in all_alarms():
        if alarm not in BUILTIN:
            remove_alarm(alarm.kind)


def register_high_loss(**attributes):
    """Register an alarm for a loss above 3 for the third time in a row."""

    @dataclass
    class HighLossAlarm(joma.Alarm):
        kind = "high loss"
        level = "warning"
        what_to_do = "look at the data"
        limit: float = 3.0
        count: int = field(default=0, init=False)

        def observe(self, reading):
            self.count = self.count + 1 if reading.loss > self.limit else 0
            if self.count >= 3:
                yield self.finding("loss", reading.loss, self.limit, is_everywhere=True)

    for name, value in attributes.items():
        setattr(HighLossAlarm, name, value)
    return joma.alarm(HighLossAlarm)


def train(watch, losses):
    for loss in losses:
        watch.model(torch.zeros(1, LENGTH, dtype=torch.long) + VOCABULARY // 2)
        watch.step(loss=loss)


@pytest.mark.filterwarnings("ignore:joma.watch")
def test_an_alarm_of_a_user_reaches_callback_folder_and_watch(tmp_path):
    register_high_loss()
    heard = []
    with joma.watch(
        HandWrittenGPT(), tmp_path / "run", 1, "entropy", on_alert=heard.append
    ) as watch:
        train(watch, [2.0, 4.0, 4.0, 4.5, 4.0, 2.0, 4.0, 4.0, 4.0])
    assert [(alert.kind, alert.step, alert.value, alert.level) for alert in heard] == [
        ("high loss", 4, 4.5, "warning"),
        ("high loss", 9, 4.0, "warning"),
    ]
    assert watch.alerts == heard
    assert str(heard[0]) == "high loss: loss is 4.5 (threshold 3)"
    rows = read_alerts(tmp_path / "run")
    assert [(row["kind"], row["what_to_do"]) for row in rows] == [
        ("high loss", "look at the data")
    ] * 2


@pytest.mark.filterwarnings("ignore:joma.watch")
@pytest.mark.parametrize("way", ["folder", "checkpoint"])
def test_its_memory_survives_a_restart(tmp_path, way):
    register_high_loss()
    with joma.watch(HandWrittenGPT(), tmp_path / "run", 1, "entropy") as watch:
        train(watch, [4.0, 4.0])
        state = json.loads(json.dumps(watch.state_dict()["alarms"]))
        checkpoint = watch.state_dict() | {"alarms": state}
    options = {"resume": True} if way == "folder" else {"overwrite": True}
    with joma.watch(HandWrittenGPT(), tmp_path / "run", 1, "entropy", **options) as watch:
        if way == "checkpoint":
            watch.load_state_dict(checkpoint)
        train(watch, [4.0])
    assert [(alert.kind, alert.step) for alert in watch.alerts] == [("high loss", 3)]


@pytest.mark.filterwarnings("ignore:joma.watch")
def test_a_critical_one_makes_the_phase_failing_and_asks_to_stop():
    register_high_loss(level="critical")
    with joma.watch(HandWrittenGPT(), None, 1, "entropy", on_alert="stop") as watch:
        train(watch, [4.0, 4.0])
        assert not watch.should_stop
        train(watch, [4.0])
    assert watch.should_stop
    assert {phase.name for phase in watch.phases} == {"failing"}
    assert "high loss" in str(watch.phases)


def test_an_alarm_that_raises_is_reported_once_and_the_others_go_on():
    def observe(self, reading):
        raise KeyError("spread")

    register_high_loss(observe=observe)
    with warnings.catch_warnings(record=True) as record:
        warnings.simplefilter("always")
        with joma.watch(HandWrittenGPT(), None, 1, "entropy") as watch:
            train(watch, [2.0, 2.0, float("nan")])
    messages = [str(warning.message) for warning in record]
    assert (
        messages[0]
        == "joma.watch: step 1: the alarm 'high loss' raised KeyError: 'spread'; training goes on"
    )
    assert sum("high loss" in message for message in messages) == 1
    assert [alert.kind for alert in watch.alerts] == ["not finite"]


def test_an_alarm_gets_the_gauges_that_it_names():
    seen = []

    @joma.alarm
    @dataclass
    class ListeningAlarm(joma.Alarm):
        kind = "listening"
        level = "notice"
        what_to_do = "nothing"
        gauges = ("entropy", "frobenius_norm")

        def observe(self, reading):
            seen.extend(self.values(reading))
            return []

    with joma.watch(HandWrittenGPT(), None, 1, "entropy,stable_rank") as watch:
        train(watch, [2.0])
    entropy = watch.latest.values["entropy"]  # (layers, heads)
    assert [(value.gauge, value.layer, value.head) for value in seen] == [
        ("entropy", layer, head)
        for layer in range(entropy.shape[0])
        for head in range(entropy.shape[1])
    ]
    assert [value.value for value in seen] == entropy.flatten().tolist()


def test_an_alarm_that_a_checkpoint_does_not_know_begins_anew():
    state = json.loads(json.dumps(Alarms().state()))
    register_high_loss()
    alarms = Alarms.restored(state)
    alerts = [alarms.update(Reading(step, 4.0)) for step in (1, 2, 3)]
    assert [len(begun) for begun in alerts] == [0, 0, 1]


def without_observe():
    @dataclass
    class NoRuleAlarm(joma.Alarm):
        kind = "no rule"
        level = "notice"
        what_to_do = "nothing"

    return NoRuleAlarm


def without_dataclass():
    class PlainAlarm(joma.Alarm):
        kind = "plain"

    return PlainAlarm


@pytest.mark.parametrize(
    ("register", "error", "message"),
    [
        (lambda: joma.alarm(print), TypeError, "must be a subclass of joma.Alarm; got"),
        (
            lambda: joma.alarm(without_dataclass()),
            TypeError,
            "PlainAlarm is not a dataclass: put @dataclass below",
        ),
        (
            lambda: joma.alarm(without_observe()),
            TypeError,
            "NoRuleAlarm cannot be created without arguments",
        ),
        (
            lambda: register_high_loss(kind="collapse"),
            ValueError,
            "there is an alarm 'collapse' already",
        ),
        (
            lambda: register_high_loss(level="red"),
            ValueError,
            "must be one of notice, warning, critical; got 'red'",
        ),
        (lambda: register_high_loss(what_to_do=None), ValueError, "needs a text what_to_do"),
        (
            lambda: register_high_loss(gauges="entropy"),
            ValueError,
            r"must be a tuple: \('entropy',\)",
        ),
    ],
)
def test_an_alarm_that_cannot_work_is_refused_when_it_is_registered(register, error, message):
    with pytest.raises(error, match=message):
        register()
    assert all_alarms() == list(BUILTIN)


def test_a_cell_of_a_notebook_can_be_run_again():
    register_high_loss()
    second = register_high_loss()
    assert find_alarm("high loss") is second
    assert all_alarms() == [*BUILTIN, second]


@pytest.mark.parametrize("alarm", BUILTIN, ids=lambda alarm: alarm.kind)
def test_every_threshold_has_a_comment_and_every_memory_can_be_stored(alarm):
    source = inspect.getsource(alarm)
    for argument in fields(alarm):
        if argument.init:
            assert re.search(rf"^    {argument.name}: \w+ = .+  # \w", source, flags=re.M), (
                argument.name
            )
    rule = alarm()
    layer = LayerReading(1.0, 2.6, [0.01, 0.6], [0.1, 0.2], [5.0, 6.0])
    gauges = {"stable_rank": [[8.0, 1.0]], "update_ratio": [[1e-3]], "massive_activation": [[20.0]]}
    for step in range(1, 20):
        list(rule.observe(Reading(step, 2.0, [layer, layer], gauges)))
    again = alarm()
    again.restore(json.loads(json.dumps(rule.state())))
    assert json.dumps(again.state()) == json.dumps(rule.state())


def test_the_alarm_of_the_documentation_is_short():
    section = PAGE.read_text(encoding="utf-8").split("## An alarm\n")[1]
    code = re.search(r"```python\n(.*?)```", section, flags=re.S)[1]
    definition = code.split("warnings.simplefilter")[0]
    assert "@joma.alarm" in definition
    assert len([line for line in definition.splitlines() if line]) < 40
