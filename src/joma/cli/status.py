"""`joma status`: how a watched run is doing, for people and for programs."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any

import typer

# exit status by the worst alert; 1 and 2 are errors of the command
_EXITS = {"notice": 3, "warning": 4, "critical": 5}


def _status(
    run: Annotated[Path, typer.Argument(help="A run folder, finished or not.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")] = False,
) -> None:
    """Tell the step, the loss, each layer's phase and all alerts of a run; the exit status is that of the worst alert.

    0: no alert, 3: a notice, 4: a warning, 5: critical.
    """
    import json

    from rich.console import Console

    from joma._run import Run
    from joma._run.alerts import LEVELS, read_alerts
    from joma._run.folder import plain

    opened = Run(run)
    alerts = read_alerts(opened.path)
    facts = _facts(opened)
    worst = max((alert["level"] for alert in alerts), key=LEVELS.index, default=None)
    if as_json:
        typer.echo(json.dumps(plain({**facts, "worst": worst, "alerts": alerts})))
    else:
        console = Console(highlight=False)
        loss = "" if math.isnan(facts["loss"]) else f", loss {facts['loss']:.4g}"
        lines = [f"{facts['run']}: {facts['status']}, step {facts['step']:,}{loss}"]
        lines += [f"  layer {n}: {phase}" for n, phase in enumerate(facts["phases"]) if phase is not None]
        lines += [_line(alert) for alert in alerts] or ["no alerts"]
        for line in lines:
            console.print(line, markup=False, soft_wrap=True)
    raise typer.Exit(0 if worst is None else _EXITS[worst])


def _facts(run: Any) -> dict[str, Any]:
    """Where the run is: status, last step, its loss, and the phase of each layer."""
    info, latest = run.info, run.latest()
    loss = latest[latest.gauge == "loss"].value
    phases: list[str | None] = []
    rows = latest[latest.gauge == "phase"]
    for _, row in rows.sort_values("layer").iterrows() if len(rows) else ():
        phases += [None] * (int(row.layer) - len(phases))
        phases.append(None if math.isnan(row.value) else info["phases"][int(row.value)])
    return {
        "run": str(run.path),
        "status": info["status"],
        "step": int(latest.step.max()) if len(latest) else 0,
        "loss": float(loss.iloc[-1]) if len(loss) else math.nan,
        "phases": phases,
    }


def _line(alert: dict[str, Any]) -> str:
    layer = "" if alert["layer"] is None else f", layer {alert['layer']}"
    head = "" if alert["head"] is None else f", head {alert['head']}"
    value = f"{alert['gauge']} {alert['value']:.4g} (threshold {alert['threshold']:.4g})"
    return f"{alert['level']}: step {alert['step']:,}{layer}{head}: {alert['kind']}: {value}. {alert['what_to_do']}"


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("status")(_status)
