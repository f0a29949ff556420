"""A model whose modules or parameters are replaced in mid-training is looked at again."""

from __future__ import annotations

from joma._measure.watch.alarms.notices import Notices
from joma._measure.watch.instruments import Instruments
from joma._measure.watch.record import Record


class Follower:
    """Follows changes of the model's structure; training goes on whatever happens.

    Arguments:
        instruments: of the watch.
        record: takes the changes.
        notices: takes messages to the user.
    """

    def __init__(self, instruments: Instruments, record: Record, notices: Notices) -> None:
        self._instruments = instruments
        self._watched = instruments.watched
        self._record = record
        self._notices = notices

    def follow(self, step: int) -> None:
        """Find the structure again if it has changed since the last look."""
        if not self._watched.has_changed():
            return
        try:
            self._renew(step)
        except Warning:  # the user's filters turn warnings into errors
            raise
        except Exception as error:
            self._watched.matrices = {}
            self._renew_meters(step)
            self._notices.say(
                f"step {step}: the model was changed, and its matrices could not be found again "
                f"({type(error).__name__}: {error}): they are not measured any more. Make a new watch"
            )

    def _renew(self, step: int) -> None:
        names_before = self._instruments.look_again()
        changes = self._watched.renew(names_before, f"removed before step {step}")
        self._renew_meters(step)
        if changes:
            self._notices.say(
                f"step {step}: the model was changed ({'; '.join(changes)}); layers keep their "
                "numbers"
            )
            self._record.note_change(step, changes)
        self._record.note_matrices(self._watched.matrix_names)

    def _renew_meters(self, step: int) -> None:
        for meter in self._instruments.meters:
            try:
                meter.renew()
            except ValueError as error:
                names = ", ".join(gauge.name for gauge in meter.gauges)
                meter.gauges = []
                self._notices.say(f"step {step}: {names} cannot be measured any more: {error}")
