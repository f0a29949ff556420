"""`joma simulate`: the joint dynamics of a task of one's own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from joma._extras import require
from joma.cli import help
from joma.cli.terminal import AsJson, console, escape, print_facts, print_json, say


def _simulate(
    task: Annotated[
        str | None,
        typer.Argument(
            help="A .npz or .csv file, or the name of a synthetic task (--list).",
            autocompletion=help.tasks,
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Run folder to write.", show_default="runs/simulate-TASK")
    ] = None,
    attention: Annotated[
        str,
        typer.Option(
            help="linear, exp or softmax.", autocompletion=help.one_of("linear", "exp", "softmax")
        ),
    ] = "softmax",
    activation: Annotated[
        str,
        typer.Option(
            help="linear, relu, leaky_relu, gelu or silu.",
            autocompletion=help.one_of("linear", "relu", "leaky_relu", "gelu", "silu"),
        ),
    ] = "relu",
    t_end: Annotated[float, typer.Option(help="End of the time span.")] = 10.0,
    mlp_lr: Annotated[float, typer.Option(help="Learning rate of the MLP weights.")] = 1.0,
    attention_lr: Annotated[
        float, typer.Option(help="Learning rate of the attention logits; 0 freezes them.")
    ] = 1.0,
    temperature: Annotated[float, typer.Option(help="Divides the attention logits.")] = 1.0,
    folded: Annotated[
        bool, typer.Option("--folded", help="Integrate attention out (Theorem 1).")
    ] = False,
    step: Annotated[
        float | None, typer.Option(help="Gradient descent with this step size instead of the flow.")
    ] = None,
    times: Annotated[int, typer.Option(help="How many output times.")] = 201,
    scale: Annotated[
        float, typer.Option(help="Size of the random start where the file gives none.")
    ] = 0.01,
    signed: Annotated[bool, typer.Option("--signed", help="Admit negative x.")] = False,
    seed: Annotated[int, typer.Option(help="Seed of synthetic tasks and starts.")] = 0,
    force: Annotated[
        bool, typer.Option("--force", help="Replace the run in the output folder.")
    ] = False,
    list_: Annotated[
        bool, typer.Option("--list", help="List the synthetic tasks and exit.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Integrate the joint dynamics of a task of your own: a run folder and a picture."""
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
    from joma._train.simulate import default_run
    from joma._train.simulate import simulate as run

    folder = out or default_run(task)
    with console(stderr=True).status(f"integrating {escape(task)}"):
        path = run(
            task, folder, attention=attention, activation=activation, t_end=t_end, mlp_lr=mlp_lr,
            attention_lr=attention_lr, temperature=temperature, folded=folded, step=step, times=times, scale=scale,
            signed=signed, seed=seed, force=force,
        )  # fmt: skip
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
