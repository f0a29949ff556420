"""Trouble on demand."""

from __future__ import annotations

import pytest

from joma._measure.watch.alarms import Alarms, Alert
from joma._measure.watch.readings import LOW


@pytest.fixture
def critical_at_step_3(monkeypatch):
    """Every watch tells of a collapse of two heads at its third step."""

    def update(self, reading, *names):
        if reading.step != 3:
            return []
        return [
            Alert(
                3, "collapse", layer, (0, 1), f"h.{layer}", "normalised non-sink entropy", 0.0, LOW
            )
            for layer in (0, 1)
        ]

    monkeypatch.setattr(Alarms, "update", update)
