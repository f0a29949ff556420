"""`joma hierarchy`: a small Transformer on a latent tree."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from joma._extras import require
from joma.cli.help import one_of
from joma.cli.options import make_option, with_parameters
from joma.cli.terminal import console, say

# Setting -> its default, as in `joma.paper.labs.tree.TreeSettings`, which would import torch, and its help.
SETTINGS: dict[str, tuple[Any, str]] = {
    "objective": ("class", "What to predict: class (the root) or token (a leaf)."),
    "rho": (0.9, "How far a latent decides those below it, between 0 and 1."),
    "depth": (3, "Edges from the class to a token: 3 (α, β, tokens) or 2."),
    "latents": (4, "Latents right below the class."),
    "children": (3, "Children of each latent."),
    "classes": (10, "Classes."),
    "layers": (2, "Blocks of the Transformer."),
    "width": (64, "Width of the model."),
    "steps": (400, "Optimiser steps."),
    "batch": (64, "Sequences per step."),
    "lr": (1e-3, "Adam's learning rate."),
    "every": (20, "Steps between measurements."),
    "seed": (0, "Seed of tree, weights and samples."),
}


def _hierarchy(
    out: Annotated[
        Path | None, typer.Option(help="Run folder.", show_default="runs/hierarchy-…")
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Replace the run in the output folder.")
    ] = False,
    **settings: Any,
) -> None:
    """Train a small Transformer on a noisy latent tree (Section 5).

    Measured are who attends to whom, and which latents the nodes show.
    """
    require("theory", "joma hierarchy")
    from joma.paper.labs.tree import TreeSettings, train_tree

    checked = TreeSettings(**settings).checked()
    name = (
        f"hierarchy-{checked.objective},rho={checked.rho:g},depth={checked.depth},"
        f"layers={checked.layers},seed={checked.seed}"
    )
    folder = out or Path("runs") / name
    with console(stderr=True).status("training"):
        run = train_tree(checked, folder, force=force)
    table = run.frame()
    for gauge in dict.fromkeys(table.gauge):
        if gauge == "competition":
            continue
        curves = table[table.gauge == gauge].groupby(["tree", "step"]).value.mean()
        ends = []
        for tree in curves.index.unique(0)[::-1]:
            ends.append(f"{tree} {curves[tree].iloc[0]:.2f} → {curves[tree].iloc[-1]:.2f}")
        say(f"{gauge:20} {', '.join(ends)}")
    say(f"run: {folder}")


def register(app: typer.Typer) -> None:
    """Add the command."""
    options = []
    for name, (default, text) in SETTINGS.items():
        complete = one_of("class", "token") if name == "objective" else None
        options.append(make_option(name, type(default), default, help=text, complete=complete))
    app.command("hierarchy")(with_parameters(_hierarchy, options))
