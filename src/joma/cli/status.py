"""`joma status`: how a watched run is doing, for people and for programs."""

from __future__ import annotations

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
    from joma._runs import Run
    from joma._runs.alerts import readable, worst_level
    from joma._runs.outcome import outcome
    from joma._runs.state import missing_in_words

    stored = Run(run)
    now, state = outcome(stored), stored.state
    alerts = now.alerts
    missing = stored.info.get("missing", [])
    facts: dict[str, Any] = {
        "run": str(run), "status": state.status, "remark": state.remark, "host": state.host,
        "written": state.written.isoformat(), "step": now.step, "loss": now.loss, "phases": now.phases,
        "missing": missing,
    }  # fmt: skip
    worst = worst_level(alerts)
    if as_json:
        print_json({**facts, "worst": worst, "alerts": alerts})
    else:
        loss = "" if now.loss is None else f", loss {readable(now.loss)}"
        lines = [f"{run}: {state}, step {now.step:,}{loss}"]
        lines += [
            f"  layer {n}: {phase}" for n, phase in enumerate(now.phases) if phase is not None
        ]
        if missing:
            lines.append(f"not written: {missing_in_words(missing)}")
        lines += [_line(alert) for alert in alerts] or ["no alerts"]
        out = console()
        for line in lines:
            say(line, out)
        tell_newest(run)
    raise typer.Exit(0 if worst is None else _EXITS[worst])


def _line(alert: dict[str, Any]) -> str:
    from joma._runs.alerts import tell_alert

    return f"{alert['level']}: {tell_alert(alert)}"


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("status")(_status)
