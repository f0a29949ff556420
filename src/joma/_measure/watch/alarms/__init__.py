"""Alarms: rules over the readings of a run, the alerts that they raise, and their reports.

    rule.py             `Alarm`, the base class of all rules
    alarm_table.py      the one table of alarms; `joma.alarm` adds to it
    judge.py            `Alarms`: gives each reading to all alarms, and names the phases of layers
    alert.py            `Alert`: the findings of one kind in one layer
    reporting.py        `Alerts`: a warning, a row in the run folder, a call of the user's function
    notices.py          `Notices`: messages that are given once
    memory.py           what alarms remember between readings

Each of the other modules is one alarm, or two that look at the same numbers. There is one alert per
kind and layer (one for the model, if it is not finite or diverging), with all heads in which the
rule found something. An alert is reported when it begins, and again only if it was over in between.
The rules were written before the runs that score them (`benchmarks/trouble.py`) were looked at.
"""

from joma._measure.watch.alarms.alert import Alert
from joma._measure.watch.alarms.judge import Alarms

__all__ = ["Alarms", "Alert"]
