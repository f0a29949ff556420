"""What runs came to, side by side: losses, phases, alerts, and the trough and bounce of each layer."""

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
    """Heading -> what stands below it; nothing where the run has no such number."""
    return {
        "last step": f"{run.step:,}" if run.step else "",
        "loss": _number(run.loss),
        "best validation loss": ""
        if run.valid_step is None
        else f"{run.valid_loss:.4g} (step {run.valid_step:,})",
        "phases": _phases(run.phases),
        "alerts": ", ".join(f"{count} {level}" for level, count in _levels(run).items()),
    }


def worst(run: Outcome) -> str:
    """The level of the worst alert; "" if there is none."""
    return worst_level(run.alerts) or ""


def _levels(run: Outcome) -> Counter[str]:
    return Counter(str(alert["level"]) for alert in run.alerts)


def _number(value: float | None) -> str:
    return "" if value is None else readable(value)


def _phases(phases: Sequence[str | None]) -> str:
    """Runs of equal ones together: "0: dense, 1–3: bouncing"."""
    parts = []
    for phase, group in groupby(enumerate(phases), key=lambda item: item[1]):
        layers = [n for n, _ in group]
        if phase is not None:
            parts.append(f"{layers[0]}{f'–{layers[-1]}' * (len(layers) > 1)}: {phase}")
    return ", ".join(parts)


@dataclass(frozen=True)
class LayerTable:
    """One gauge: a row per layer, a column per run.

    Attributes:
        gauge: its name.
        rows: layer -> per run its curve, and τ at the trough (None if not known); None where it has no such layer.
        rules: what counts as a dip and as a bounce, in words; several if the runs are judged by different ones.
    """

    gauge: str
    rows: dict[int, list[tuple[Curve, float | None] | None]]
    rules: list[str]


def by_layer(runs: Sequence[Outcome]) -> list[LayerTable]:
    """The trough and bounce of each layer, for each gauge that the one rule is told of."""
    tables = []
    for gauge in dict.fromkeys(gauge for run in runs for gauge in run.curves):
        layers = sorted({n for run in runs for n in run.curves.get(gauge, ())})
        rows = {n: [_cell(run, gauge, n) for run in runs] for n in layers}
        rules = [
            f"{(rule := run.rules[gauge]).smoothed()}{rule}" for run in runs if gauge in run.curves
        ]
        tables.append(LayerTable(gauge, rows, list(dict.fromkeys(rules))))
    return tables


def _cell(run: Outcome, gauge: str, layer: int) -> tuple[Curve, float | None] | None:
    if (curve := run.curves.get(gauge, {}).get(layer)) is None:
        return None
    return curve, run.clock.get(curve.trough_step)
