"""Trouble on demand."""

from __future__ import annotations

import pytest

from joma._watch.alarms import LOW, Alarms, Alert


@pytest.fixture
def critical_at_step_3(monkeypatch):
    """Every watch tells of a collapse of two heads at its third step."""

    def update(self, reading, *names):
        heads = (0, 1) if reading.step == 3 else ()
        return [Alert(3, "collapse", 0, head, "h.0", "normalised non-sink entropy", 0.0, LOW) for head in heads]

    monkeypatch.setattr(Alarms, "update", update)
