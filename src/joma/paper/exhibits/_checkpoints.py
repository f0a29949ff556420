"""Curves over the checkpoints of models: one table of all of them, what each did, and the layers in groups."""

from __future__ import annotations

import pandas as pd

from joma._runs import Run
from joma._runs.curve import CHECKPOINTS, Curve, describe_all


def table(run: Run) -> tuple[pd.DataFrame, dict[str, list[str]]]:
    """model, gauge, layer, step, value: means over heads; and per model, the checkpoints left out as copies."""
    from joma._checkpoints.audit.copies import settled, without_copies

    frame, dropped = without_copies(settled(run.frame(), "model"), "model")
    return frame.groupby(
        ["model", "gauge", "layer", "step"], sort=False
    ).value.mean().reset_index(), dropped


def shapes(frame: pd.DataFrame) -> dict[tuple[str, str, int], Curve]:
    """(model, gauge, layer) -> what its curve did; models of fewer than three checkpoints have none."""
    long = frame[frame.groupby(["model", "gauge", "layer"]).step.transform("count") >= 3]
    curves = {
        (model, gauge, int(layer)): curve
        for gauge, rule in CHECKPOINTS.items()
        for (model, layer), curve in describe_all(
            long[long.gauge == gauge], rule, ["model", "layer"]
        ).items()
    }
    models = list(dict.fromkeys(frame.model))
    return dict(sorted(curves.items(), key=lambda item: models.index(item[0][0])))


def thirds(curves: list[Curve]) -> tuple[list[Curve], list[Curve]]:
    """The curves of the bottom and of the top layers, of all of them in order: a third each, at least one."""
    size = max(1, len(curves) // 3)
    return curves[:size], curves[-size:]


def path(curve: Curve) -> str:
    """Start, trough and end."""
    return f"{curve.start:.3g} → {curve.trough:.3g} → {curve.end:.3g}"


def in_words(curve: Curve) -> str:
    """The same, and the pattern."""
    return f"{path(curve)}, {curve.pattern}"
