"""`joma forecast`: a run that has not been made, from runs at another learning rate."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from joma.cli.figures import save_figure, say_how_to_get_figures
from joma.cli.options import Change, options_of
from joma.cli.terminal import AsJson, console, print_json, print_table, say, show_number

if TYPE_CHECKING:
    import pandas as pd

# As `joma._forecast.clock.GAUGES`, which would import NumPy.
GAUGES = "entropy, stable_rank, valid_loss, loss"


@options_of("forecast", argument="runs", changes={"gauges": Change(default=GAUGES)})
def _forecast(
    out: Annotated[
        Path | None, typer.Option(help="Folder for the figure and forecast.csv.")
    ] = None,
    as_json: AsJson = False,
    **options: Any,
) -> None:
    """Several seeds give a band. The table has the values at the end, the steps of trough and bounce, and where
    the clock is known not to hold.
    """
    from joma._forecast.forecast import forecast
    from joma._runs import write_atomic

    files = []
    told = forecast(**options)
    table = told.table()
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        files = [*save_figure(told.draw, out), "forecast.csv"]
        write_atomic(out / "forecast.csv", told.frame().to_csv(index=False))
    if as_json:
        rows = table.astype(object).where(table.notna(), None).to_dict("records")
        facts: dict[str, Any] = {"lr": options["lr"], "steps": options["steps"]}
        facts |= {"tau": told.tau, "runs": list(told.sources)}
        print_json(facts | {"warnings": list(told.warnings), "curves": rows})
        if out is not None:
            say_how_to_get_figures(console(stderr=True))
        return
    screen = console()
    plural = "" if len(options["runs"]) == 1 else "s"
    sources = f"{len(options['runs'])} run{plural}"
    times = f"lr {options['lr']:g}, {options['steps']:,} steps, τ = {told.tau:.3g}"
    say(f"{times}, from {sources}", screen)
    columns = [
        "gauge",
        ">layer",
        ">start",
        ">trough",
        ">at step",
        ">bounce at",
        ">end",
        "band",
        "~what it does",
    ]
    print_table(screen, columns, _rows(table))
    for warning in told.warnings:
        say(f"note: {warning}", screen)
    if out is not None:
        say(f"{out}/  ({', '.join(files)})", screen)
        say_how_to_get_figures(screen)


def _rows(table: pd.DataFrame) -> list[list[str]]:
    """The cells; what a curve does not have is empty."""
    cells = []
    for row in table.astype(object).where(table.notna(), None).to_dict("records"):
        steps = [
            "" if row[name] is None else f"{row[name]:,.0f}"
            for name in ("trough_step", "bounce_step")
        ]
        band = "" if row["low"] is None else f"{row['low']:.4g} to {row['high']:.4g}"
        layer = "" if row["layer"] is None else str(row["layer"])
        values = [show_number(row[name]) for name in ("start", "trough", "end")]
        cells.append(
            [row["gauge"], layer, *values[:2], *steps, values[2], band, row["pattern"] or ""]
        )
    return cells


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("forecast")(_forecast)
