"""`joma status`: how a watched run is doing, for people and for programs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from joma.cli.runs import RUNS, print_standings
from joma.cli.terminal import AsJson, console, print_json, say, tell_newest

# exit status by the worst alert; 1 and 2 are errors of the command
_EXITS = {"notice": 3, "warning": 4, "critical": 5}


def _status(
    run: Annotated[
        Path, typer.Argument(help="A run folder, finished or not; or a folder of runs.")
    ] = RUNS,
    as_json: AsJson = False,
) -> None:
    """Show the step, the loss, each layer's phase and all alerts of a run; of a folder of runs, a table.

    The exit status is that of the worst alert: 0 for none, 3 for a notice, 4 for a warning, 5 for a critical one.
    """
    from joma._runs.alerts import LEVELS
    from joma._runs.folder import RUN

    if run.is_dir() and not (run / RUN).exists():
        from joma._runs.listing import standings

        rows = standings(run)
        if as_json:
            print_json(rows)
        else:
            print_standings(rows, in_full=True)
        levels = [row["alert"] for row in rows if row["alert"] is not None]
        worst = max(levels, key=LEVELS.index, default=None)
    else:
        worst = _show_run(run, as_json=as_json)
    raise typer.Exit(0 if worst is None else _EXITS[worst])


def _show_run(run: Path, *, as_json: bool) -> str | None:
    """Print how one run is doing; return the level of its worst alert."""
    from joma._runs import Run
    from joma._runs.alerts import readable, worst_level
    from joma._runs.outcome import outcome
    from joma._runs.state import missing_in_words

    stored = Run(run)
    now = outcome(stored)
    state = stored.state
    missing = stored.info.get("missing", [])
    worst = worst_level(now.alerts)
    if as_json:
        facts: dict[str, Any] = {
            "run": str(run),
            "status": state.status,
            "remark": state.remark,
            "host": state.host,
            "written": state.written.isoformat(),
            "step": now.step,
            "loss": now.loss,
            "phases": now.phases,
            "missing": missing,
            "worst": worst,
            "alerts": now.alerts,
        }
        print_json(facts)
        return worst
    loss = "" if now.loss is None else f", loss {readable(now.loss)}"
    lines = [f"{run}: {state}, step {now.step:,}{loss}"]
    for number, phase in enumerate(now.phases):
        if phase is not None:
            lines.append(f"  layer {number}: {phase}")
    if missing:
        lines.append(f"not written: {missing_in_words(missing)}")
    lines += [_line(alert) for alert in now.alerts] or ["no alerts"]
    out = console()
    for line in lines:
        say(line, out)
    tell_newest(run)
    return worst


def _line(alert: dict[str, Any]) -> str:
    from joma._runs.alerts import tell_alert

    return f"{alert['level']}: {tell_alert(alert)}"


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("status")(_status)
