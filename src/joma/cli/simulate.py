"""`joma simulate`: the joint dynamics of a task of one's own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from joma._extras import require
from joma.cli import help
from joma.cli.options import Change, options_of
from joma.cli.terminal import AsJson, console, escape, print_facts, print_json, say


@options_of(
    "simulate",
    argument="task",
    changes={
        "task": Change(
            help="A .npz or .csv file, or the name of a synthetic task (--list).",
            default=None,
            default_text="the list",
            complete=help.tasks,
        ),
        "out": Change(help="Run folder to write.", kind=Path, default_text="runs/simulate-TASK"),
        "attention": Change(complete=help.one_of("linear", "exp", "softmax")),
        "activation": Change(complete=help.one_of("linear", "relu", "leaky_relu", "gelu", "silu")),
    },
)
def _simulate(
    list_: Annotated[
        bool, typer.Option("--list", help="List the synthetic tasks and exit.")
    ] = False,
    as_json: AsJson = False,
    **options: Any,
) -> None:
    task = options["task"]
    if list_ or task is None:
        from joma.theory.tasks import TASKS

        if as_json and list_:
            print_json([{"task": name, "about": what} for name, (what, _) in TASKS.items()])
            return
        print_facts(console(), {name: escape(what) for name, (what, _) in TASKS.items()})
        if not list_:
            raise ValueError("which task? Give a .npz or .csv file, or one of the names above.")
        return
    require("paper", "joma simulate")
    from joma._train.simulate import default_run, simulate

    folder = options["out"] or default_run(task)
    with console(stderr=True).status(f"integrating {escape(task)}"):
        path = simulate(**options)
    invariant, entropy = path.invariant(), path.entropy()
    if as_json:
        print_json({
            "run": str(folder), "status": path.status, "t": path.t[-1], "switches": path.switches,
            "slides": len(path.slides),
            "entropy": {"first": entropy[0], "last": entropy[-1], "lowest": entropy.min()},
            "invariant": {"formula": invariant.formula, "drift": invariant.max_drift, "exact": invariant.exact},
        })  # fmt: skip
        return
    said = console()
    say(f"{path.flow}", said)
    print_facts(said, {
        "status": escape(path.status),
        "entropy": f"{entropy[0]:.4f} → {entropy[-1]:.4f} nats (lowest {entropy.min():.4f})",
        "invariant": escape(f"{invariant.formula}: drift {invariant.max_drift:.1e}")
        + ("" if invariant.exact else " (approximate under softmax)"),
        "gates": f"{path.switches} switches, {len(path.slides)} slides" if path.switches else "",
    })  # fmt: skip
    say(f"run        {folder}/  (run.json, metrics.jsonl, figure.svg, figure.png)", said)


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("simulate")(_simulate)
