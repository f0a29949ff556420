"""`joma superpose`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from joma._extras import require
from joma.cli.options import Change, options_of
from joma.cli.terminal import AsJson, console, print_json, say

if TYPE_CHECKING:
    from joma._inspect.superposition import Superposition


@options_of(
    "superpose",
    argument="model",
    without=["progress"],
    changes={
        "model": Change(
            help="A folder in the hub's format, a GGUF file, a run of joma train, an id, smollm2."
        ),
        "data": Change(
            help="A text file, a folder of them, pydoc, wikitext-2, wikitext-103, hf:NAME; or token "
            "ids: a .npy or .txt file of whole numbers."
        ),
        "layer": Change(help="One MLP, counted from 0.", default_text="all"),
        "neuron": Change(help="Show this neuron."),
        "masked": Change(help="Mask the patterns of so many neurons, the surest first.", kind=int),
        "seed": Change(help="Seed of what is drawn at random in masking and dealing."),
    },
)
def _superpose(
    top: Annotated[
        int, typer.Option(help="Show so many neurons, those that pass most tests.")
    ] = 20,
    shuffles: Annotated[int, typer.Option(help="Deal contexts out at random so often.")] = 1,
    out: Annotated[
        Path | None, typer.Option(help="Run folder to write.", show_default="runs/superpose-MODEL")
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Replace the run in the output folder.")
    ] = False,
    as_json: AsJson = False,
    **options: Any,
) -> None:
    """The run folder has a page with their contexts, and JSON (Figure 10)."""
    require("paper", "joma superpose")

    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    from joma._inspect.superpose import default_run, superpose
    from joma._runs.folder import RunError, existing
    from joma.cli.progress import bars_of

    neuron = options["neuron"]
    path = out or default_run(options["model"])
    if existing(path) is not None and not force:
        raise RunError(
            f"{path} holds a run already: choose another --out, or --force to replace it"
        )
    if top < 1:
        raise ValueError(f"--top is {top}: at least one neuron is to be shown")
    columns = (
        BarColumn(bar_width=30),
        TextColumn("{task.description}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with bars_of(*columns, console=console(stderr=True)) as bars:
        task = bars.add_task("loading the model", total=1.0)

        def show(share: float, what: str) -> None:
            bars.update(task, completed=share, description=what)

        superposition = superpose(**options, progress=show)
        bars.update(task, completed=1.0, description="the controls, and the page")
        superposition.info["controls"] = list(_controls(superposition, shuffles, options["seed"]))
        superposition.save(path, neuron=neuron, top=top, force=force)
    if as_json:
        import json

        print_json(json.loads((path / "superpose.json").read_text(encoding="utf-8")))
    else:
        _show(superposition, top, neuron, path)


def _show(superposition: Superposition, top: int, neuron: int | None, path: Path) -> None:
    """How many neurons have several patterns, what the controls say, a few neurons, and where the page is."""
    counts, out = superposition.counts(), console()
    several = {
        name: int(counts[name].sum()) for name in ("patterns", "replicated", "passed", "untried")
    }
    many = f"{superposition.info['tokens']:,} tokens, {len(superposition.frame()):,} neurons"
    two = f"{several['patterns']:,} with two or more patterns, {several['replicated']:,} on held-out text too"
    say(f"{many}; {two}", out)
    if superposition.alike is None:
        say(
            "whether they are unrelated was not tested: the model has no input embedding to compare words by",
            out,
        )
    else:
        untried = (
            f"; {several['untried']:,} were not masked, see --masked" if several["untried"] else ""
        )
        say(f"{several['passed']:,} pass all tests{untried}", out)
    for line in superposition.info["controls"]:
        say(line, out)
    for chosen in superposition.top(min(top, 5), neuron):
        groups = superposition.patterns(*chosen)
        passed = sum(group.passes for group in groups)
        unrelated = (
            f", {passed} unrelated that pass all tests" if superposition.superposed(*chosen) else ""
        )
        say(
            f"layer {chosen[0]}, neuron {chosen[1]}: {len(groups)} patterns{unrelated}", out, "bold"
        )
        for group in groups[:3]:
            words = ", ".join(repr(word) for word in group.words[:6])
            say(f"  {len(group.contexts)} contexts attend to {words}", out)
    say(f"page: {path}/superpose.html  (also superpose.json, run.json)", out)


def _controls(superposition: Superposition, shuffles: int, seed: int) -> Iterator[str]:
    """What the controls say, a sentence each."""
    if shuffles:
        shares = superposition.chance(shuffles, seed)
        yield f"contexts dealt out at random: {sum(shares) / shuffles:.2%} of the neurons have two patterns or more"
    found, pairs = superposition.power(seed=seed)
    if pairs:
        yield f"{pairs} pairs of neurons made one: {found:.0%} are found, by two patterns on held-out text too"
    else:
        yield "no layer has two neurons with one pattern each, which could be made one to be found"


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("superpose")(_superpose)
