"""`joma status`: how a watched run is doing, for people and for programs."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any

import typer

from joma.cli.terminal import AsJson, console, print_json, say, tell_newest

# exit status by the worst alert; 1 and 2 are errors of the command
_EXITS = {"notice": 3, "warning": 4, "critical": 5}


def _status(
    run: Annotated[Path, typer.Argument(help="A run folder, finished or not.")],
    as_json: AsJson = False,
) -> None:
    """Tell the step, the loss, each layer's phase and all alerts of a run; the exit status is that of the worst alert.

    0: no alert, 3: a notice, 4: a warning, 5: critical.
    """
    from joma._run import Run
    from joma._run.alerts import LEVELS
    from joma._run.outcome import outcome

    now = outcome(Run(run))
    alerts = now.alerts
    facts = {"run": str(run), "status": now.status, "step": now.step, "loss": now.loss, "phases": now.phases}
    worst = max((alert["level"] for alert in alerts), key=LEVELS.index, default=None)
    if as_json:
        print_json({**facts, "worst": worst, "alerts": alerts})
    else:
        loss = "" if math.isnan(now.loss) else f", loss {now.loss:.4g}"
        lines = [f"{run}: {now.status}, step {now.step:,}{loss}"]
        lines += [f"  layer {n}: {phase}" for n, phase in enumerate(now.phases) if phase is not None]
        lines += [_line(alert) for alert in alerts] or ["no alerts"]
        out = console()
        for line in lines:
            say(line, out)
        tell_newest(run)
    raise typer.Exit(0 if worst is None else _EXITS[worst])


def _line(alert: dict[str, Any]) -> str:
    layer = "" if alert["layer"] is None else f", layer {alert['layer']}"
    head = "" if alert["head"] is None else f", head {alert['head']}"
    value = f"{alert['gauge']} {alert['value']:.4g} (threshold {alert['threshold']:.4g})"
    return f"{alert['level']}: step {alert['step']:,}{layer}{head}: {alert['kind']}: {value}. {alert['what_to_do']}"


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("status")(_status)
