"""The one table of alarms: those of joma, and those that users register."""

from __future__ import annotations

from typing import TypeVar, get_args

from joma._measure.watch.alarms.broken_gradient import BrokenGradientAlarm
from joma._measure.watch.alarms.collapse import CollapseAlarm
from joma._measure.watch.alarms.diverging import DivergingAlarm
from joma._measure.watch.alarms.logit_growth import LogitGrowthAlarm
from joma._measure.watch.alarms.massive_activation import MassiveActivationAlarm
from joma._measure.watch.alarms.never_begins import NeverBeginsAlarm
from joma._measure.watch.alarms.not_finite import NotFiniteAlarm
from joma._measure.watch.alarms.rank_loss import RankLossAlarm
from joma._measure.watch.alarms.rule import Alarm, AlertLevel
from joma._measure.watch.alarms.update_spike import UpdateSpikeAlarm

AlarmClass = TypeVar("AlarmClass", bound=type[Alarm])

# In the order in which they look at a reading. If several critical alerts hold for a layer, the
# first of them names its phase: a loss that is NaN says more than the collapse that comes with it.
BUILTIN: tuple[type[Alarm], ...] = (
    BrokenGradientAlarm,
    NotFiniteAlarm,
    DivergingAlarm,
    CollapseAlarm,
    NeverBeginsAlarm,
    LogitGrowthAlarm,
    MassiveActivationAlarm,
    RankLossAlarm,
    UpdateSpikeAlarm,
)
_TABLE: dict[str, type[Alarm]] = {builtin.kind: builtin for builtin in BUILTIN}


def alarm(rule: AlarmClass) -> AlarmClass:
    """Register a subclass of `joma.Alarm`; every watch that is created afterwards applies it.

    Arguments:
        rule: the class. It can be created without arguments, and has a kind of its own.

    Returns:
        The class, so that this serves as a decorator.

    >>> from dataclasses import dataclass
    >>> @alarm
    ... @dataclass
    ... class HighLossAlarm(Alarm):
    ...     "Alarm for a loss above a limit."
    ...
    ...     kind = "high loss"
    ...     level = "warning"
    ...     what_to_do = "look at the data"
    ...     limit: float = 10.0
    ...
    ...     def observe(self, reading):
    ...         if reading.loss is not None and reading.loss > self.limit:
    ...             yield self.finding("loss", reading.loss, self.limit)
    >>> find_alarm("high loss").level
    'warning'
    >>> remove_alarm("high loss")
    """
    if not (isinstance(rule, type) and issubclass(rule, Alarm)):
        raise TypeError(f"an alarm must be a subclass of joma.Alarm; got {rule!r}")
    if "__dataclass_fields__" not in vars(rule):
        raise TypeError(f"{rule.__name__} is not a dataclass: put @dataclass below @joma.alarm")
    for name in ("kind", "level", "what_to_do"):
        if not isinstance(getattr(rule, name, None), str):
            raise ValueError(f"{rule.__name__} needs a text {name}, for example kind = 'high loss'")
    if rule.level not in get_args(AlertLevel):
        levels = ", ".join(get_args(AlertLevel))
        name = rule.__name__
        raise ValueError(f"the level of {name} must be one of {levels}; got {rule.level!r}")
    gauges: object = rule.gauges
    if isinstance(gauges, str):
        raise ValueError(f"gauges of {rule.__name__} must be a tuple: ({gauges!r},)")
    try:
        rule()
    except TypeError as error:
        raise TypeError(f"{rule.__name__} cannot be created without arguments: {error}") from None
    namesake = _TABLE.get(rule.kind)
    if namesake is not None and not _is_redefined(namesake, rule):
        raise ValueError(f"there is an alarm {rule.kind!r} already; choose another kind")
    _TABLE[rule.kind] = rule
    return rule


def _is_redefined(old: type[Alarm], new: type[Alarm]) -> bool:
    """Return True if both are one class of a user's, defined again in a notebook."""
    if old in BUILTIN:
        return False
    return (old.__module__, old.__qualname__) == (new.__module__, new.__qualname__)


def remove_alarm(kind: str) -> None:
    """Remove an alarm that was registered."""
    del _TABLE[kind]


def all_alarms() -> list[type[Alarm]]:
    """Return all alarms, those of users last."""
    return list(_TABLE.values())


def find_alarm(kind: str) -> type[Alarm]:
    """Return the alarm that raises alerts of this kind."""
    return _TABLE[kind]
