"""The outcomes of runs side by side: losses, phases, alerts, and the trough and bounce of each layer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from joma._runs.alerts import readable, worst_level
from joma._runs.curve import Curve
from joma._runs.outcome import Outcome

TONES = {"notice": "neutral", "warning": "fair", "critical": "bad"}  # of alerts


def numbers(run: Outcome) -> dict[str, str]:
    """Return heading -> text of the table of runs; "" where the run has no such number."""
    texts = dict.fromkeys(("last step", "loss", "best validation loss"), "")
    if run.step:
        texts["last step"] = f"{run.step:,}"
    if run.loss is not None:
        texts["loss"] = readable(run.loss)
    if run.valid_step is not None:
        texts["best validation loss"] = f"{run.valid_loss:.4g} (step {run.valid_step:,})"
    levels = Counter(str(alert["level"]) for alert in run.alerts)
    texts["phases"] = _phases(run.phases)
    texts["alerts"] = ", ".join(f"{count} {level}" for level, count in levels.items())
    return texts


def worst(run: Outcome) -> str:
    """Return the level of the worst alert; "" if there is none."""
    return worst_level(run.alerts) or ""


def _phases(phases: Sequence[str | None]) -> str:
    """Return the phases of the layers, equal neighbours together: "0: dense, 1–3: bouncing"."""
    parts: list[str] = []
    for phase, group in groupby(enumerate(phases), key=lambda item: item[1]):
        layers = [n for n, _ in group]
        if phase is None:
            continue
        if len(layers) == 1:
            parts.append(f"{layers[0]}: {phase}")
        else:
            parts.append(f"{layers[0]}–{layers[-1]}: {phase}")
    return ", ".join(parts)


@dataclass(frozen=True)
class LayerTable:
    """One gauge: a row per layer, a column per run.

    Attributes:
        gauge: its name.
        rows: layer -> per run its curve and τ at the trough (None if unknown); None if it has no such layer.
        rules: the definitions of a dip and a bounce, in words; several if they differ between the runs.
    """

    gauge: str
    rows: dict[int, list[tuple[Curve, float | None] | None]]
    rules: list[str]


def by_layer(runs: Sequence[Outcome]) -> list[LayerTable]:
    """Return the trough and bounce of each layer, one table per gauge that has a rule."""
    tables: list[LayerTable] = []
    for gauge in dict.fromkeys(gauge for run in runs for gauge in run.curves):
        having = [run for run in runs if gauge in run.curves]
        layers = sorted({n for run in having for n in run.curves[gauge]})
        rows = {n: [_cell(run, gauge, n) for run in runs] for n in layers}
        rules = dict.fromkeys(_rule(run, gauge) for run in having)
        tables.append(LayerTable(gauge, rows, list(rules)))
    return tables


def _rule(run: Outcome, gauge: str) -> str:
    """The rule by which the curves of a gauge are judged, in words."""
    rule = run.rules[gauge]
    return f"{rule.smoothed()}{rule}"


def _cell(run: Outcome, gauge: str, layer: int) -> tuple[Curve, float | None] | None:
    curve = run.curves.get(gauge, {}).get(layer)
    if curve is None:
        return None
    return curve, run.clock.get(curve.trough_step)
