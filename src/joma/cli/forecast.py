"""`joma forecast`: a run that has not been made, from runs at another learning rate."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from joma.cli.figures import save_figure, say_how_to_get_figures
from joma.cli.terminal import AsJson, console, print_json, print_table, say, show_number

if TYPE_CHECKING:
    import pandas as pd


def _forecast(
    runs: Annotated[
        list[Path], typer.Argument(help="Run folders of one model: several seeds give a band.")
    ],
    lr: Annotated[float, typer.Option(help="The learning rate of the new run.")],
    steps: Annotated[int, typer.Option(help="Its length.")],
    layers: Annotated[
        int | None, typer.Option(help="Its depth; refused if the runs have another.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for the figure and forecast.csv.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Foretell entropy, stable rank and loss of a run at another learning rate, on the common clock τ = Σ lr.

    Tells the values at the end with a band from the seeds, the steps of trough and bounce, and where the clock is
    known not to hold.
    """
    from joma._forecast.forecast import forecast
    from joma._runs import write_atomic

    files = []
    told = forecast(runs, lr=lr, steps=steps, layers=layers)
    table = told.table()
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        files = [*save_figure(told.draw, out), "forecast.csv"]
        write_atomic(out / "forecast.csv", told.frame().to_csv(index=False))
    if as_json:
        rows = table.astype(object).where(table.notna(), None).to_dict("records")
        facts = {"lr": lr, "steps": steps, "tau": told.tau, "runs": list(told.sources)}
        print_json(facts | {"warnings": list(told.warnings), "curves": rows})
        if out is not None:
            say_how_to_get_figures(console(stderr=True))
        return
    screen = console()
    say(
        f"lr {lr:g}, {steps:,} steps, τ = {told.tau:.3g}, from {len(runs)} run{'s' * (len(runs) > 1)}",
        screen,
    )
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
