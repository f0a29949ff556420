"""Failures of a watch: each is one warning, and none is raised into the training."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from joma._measure.events.reasons import Reason
from joma._measure.watch.alarms.notices import Notices
from joma._measure.watch.inputs import ArgumentMistake
from joma._measure.watch.schedule import Schedule
from joma._runs.warning import JomaWarning


class Failures:
    """Turns exceptions inside a watch into warnings.

    Arguments:
        notices: gives each warning once.
        schedule: knows the step that a warning names.
    """

    def __init__(self, notices: Notices, schedule: Schedule) -> None:
        self._notices = notices
        self._schedule = schedule

    @contextmanager
    def reported(self, part: str) -> Iterator[None]:
        """Go on after an exception in this block, with a warning that ``part`` failed.

        Two kinds are raised: a mistake in the user's arguments, and a warning that the user's
        filters turn into an error.
        """
        try:
            yield
        except (ArgumentMistake, JomaWarning):
            raise
        except Exception as error:
            self._report(part, error)

    def _report(self, part: str, error: Exception) -> None:
        cause = f"{type(error).__name__}: {error}"
        self._notices.problem(
            ("failure", part, type(error).__name__),
            f"{part} failed in step {self._schedule.step} with {cause}; training goes on "
            f"{Reason.INTERNAL}",
        )
