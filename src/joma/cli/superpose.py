"""`joma superpose`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def _superpose(
    model: Annotated[str, typer.Argument(help="A folder in the hub's format, or an id of the hub.")],
    data: Annotated[str, typer.Option(help="A text file, a folder of them, pydoc, wikitext-2, wikitext-103, hf:NAME.")],
    layer: Annotated[int | None, typer.Option(help="One MLP, counted from 0.  [default: all]")] = None,
    neuron: Annotated[int | None, typer.Option(help="Show this neuron.")] = None,
    top: Annotated[int, typer.Option(help="Show so many neurons, those with the most patterns.")] = 20,
    tokens: Annotated[int | None, typer.Option(help="Read so many tokens.  [default: the whole corpus]")] = None,
    contexts: Annotated[int, typer.Option(help="Contexts kept for each neuron.")] = 32,
    length: Annotated[int, typer.Option(help="Tokens a window.")] = 64,
    batch: Annotated[int, typer.Option(help="Windows at a time.")] = 16,
    tokenizer: Annotated[str | None, typer.Option(help="A folder or id.  [default: the model's]")] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit on the hub, as step1000.")] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, …")] = "cpu",
    out: Annotated[Path | None, typer.Option(help="Run folder to write.  [default: runs/superpose-MODEL]")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the run in the output folder.")] = False,
) -> None:
    """Find the unrelated patterns that fire one neuron: a page with their contexts, and JSON (Figure 10)."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    from joma._inspect.superpose import default_run, superpose
    from joma._run.folder import RunError, existing

    path = out or default_run(model)
    if existing(path) is not None and not force:
        raise RunError(f"{path} holds a run already: choose another --out, or --force to replace it")
    if top < 1:
        raise ValueError(f"--top is {top}: at least one neuron is to be shown")
    columns = (BarColumn(bar_width=30), TextColumn("{task.description}"), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task("loading the model", total=1.0)
        superposition = superpose(
            model, data, layer=layer, neuron=neuron, tokens=tokens, contexts=contexts, length=length, batch=batch,
            tokenizer=tokenizer, revision=revision, device=device,
            progress=lambda share, what: bars.update(task, completed=share, description=what),
        )  # fmt: skip
        bars.update(task, completed=1.0, description="grouping contexts into patterns")
        superposition.save(path, neuron=neuron, top=top, force=force)
    table = superposition.frame()
    console = Console(highlight=False)
    several = int((table.patterns >= 2).sum())
    console.print(
        f"{superposition.info['tokens']:,} tokens, {len(table):,} neurons; {several:,} with two or more patterns"
    )
    for chosen in superposition.top(min(top, 5), neuron):
        groups = superposition.patterns(*chosen)
        console.print(f"layer {chosen[0]}, neuron {chosen[1]}: {len(groups)} patterns", style="bold")
        for group in groups[:3]:
            words = ", ".join(repr(word) for word in group.words[:6])
            console.print(f"  {len(group.contexts)} contexts attend to {words}", markup=False, soft_wrap=True)
    page = f"page: {path}/superpose.html  (also superpose.json, run.json)"
    console.print(page, soft_wrap=True, markup=False)


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("superpose")(_superpose)
