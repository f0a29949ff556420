"""`joma watch`: what to write in Python. Training is a program of the user's own, so there is no command for it."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Annotated

import typer

from joma._suggest import unknown_name
from joma.cli.help import one_of
from joma.cli.terminal import AsJson, console, print_json, say

# Kind of program -> its title, and the lines that watch a model in it. Tests run them.
PROGRAMS = {
    "loop": (
        "In a training loop of your own",
        """
import joma

with joma.watch(model, run={run}) as w:
    for batch in data:
        loss = train_step(batch)  # as before
        w.step(loss=loss)
""",
    ),
    "transformers": (
        "With the Trainer of Hugging Face Transformers",
        """
from joma.integrations.transformers import watch

watch(trainer, run={run})
trainer.train()
""",
    ),
    "lightning": (
        "With the Trainer of Lightning",
        """
from joma.integrations.lightning import WatchCallback

callback = WatchCallback(run={run})
trainer = Trainer(callbacks=[callback])
trainer.fit(module, data)
""",
    ),
}


def _watch(
    run: Annotated[
        Path, typer.Argument(help="The run folder that the lines name, and that is followed.")
    ] = Path("runs/mine"),
    program: Annotated[
        str | None,
        typer.Option(
            "--in",
            help="loop, transformers or lightning.",
            show_default="all",
            autocompletion=one_of(*PROGRAMS),
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show what to write in Python to watch a model of yours, and how to follow its run."""
    if program is not None and program not in PROGRAMS:
        raise ValueError(unknown_name(program, PROGRAMS, "program"))
    names = list(PROGRAMS) if program is None else [program]
    codes = {
        name: PROGRAMS[name][1].strip().format(run=json.dumps(str(run), ensure_ascii=False))
        for name in names
    }
    follow = _follow(run)
    if as_json:
        print_json({"programs": codes, "follow": follow})
        return
    out = console()
    say("joma watches a model inside the program that trains it.", out)
    for name, code in codes.items():
        say(f"\n{PROGRAMS[name][0]}", out, "bold")
        for line in code.splitlines():
            say(f"    {line}".rstrip(), out)
    say("\nThen, while it trains and afterwards", out, "bold")
    for command in follow:
        say(f"    {command}", out)
    say("\nAll options: joma docs watch", out)
    say("What can be measured: joma gauges", out)


def _follow(run: Path) -> list[str]:
    """Return the commands that show a run."""
    folder = shlex.quote(str(run))
    return [f"joma status {folder}", f"joma report {folder} --live --open"]


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("watch")(_watch)
