"""`joma train` and `joma sweep`: the options are made from the settings."""

from __future__ import annotations

import inspect
import typing
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import typer

from joma._train.settings import Settings
from joma.cli import help
from joma.cli.options import Command, make_option, sentence, with_parameters
from joma.cli.runs import print_standings
from joma.cli.terminal import AsJson, console, print_json, say


def with_settings(function: Command, *, lists: bool = False) -> Command:
    """Return ``function(**settings)`` with one option per setting; with ``lists`` each takes "1,2,5" or "0..2"."""
    options = [_option(name, lists=lists) for name in _kinds()]
    return with_parameters(function, options)


@cache
def _kinds() -> dict[str, Any]:
    """Return setting -> the type of its value."""
    return typing.get_type_hints(Settings)


def _option(name: str, *, lists: bool) -> inspect.Parameter:
    (setting,) = (one for one in fields(Settings) if one.name == name)
    kind = _kinds()[name]
    default: Any = setting.default
    default_text = ""
    complete = None
    if name == "gauges":
        kind = str
        default = ", ".join(default)
        complete = help.gauges
    if lists:
        kind = str
        if default is not None:
            default_text = str(default).lower()
        default = None
    text = sentence(setting.metadata["help"])
    return make_option(name, kind, default, help=text, default_text=default_text, complete=complete)


def _train(
    out: Annotated[
        Path | None, typer.Option(help="Run folder to write.", show_default="runs/train-…")
    ] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, … or auto.")] = "auto",
    checkpoint_every: Annotated[int, typer.Option(help="Steps between checkpoints.")] = 500,
    keep: Annotated[int, typer.Option(help="Newest checkpoints to keep.")] = 2,
    keep_every: Annotated[
        int | None, typer.Option(help="Keep the checkpoints of multiples of this, too.")
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Start again even if there is a run.")
    ] = False,
    **settings: Any,
) -> None:
    """Train the paper's language model with a watch attached.

    The same command again continues where it stopped.
    """
    from joma._measure.gauges.registry import names_of
    from joma._train.language import train
    from joma._train.processes import joined
    from joma.cli.progress import progress_bar

    settings["gauges"] = tuple(names_of(settings["gauges"]))
    checked = Settings(**settings).checked()
    folder = out or Path("runs") / f"train-{checked.corpus_name}-{checked.label}"
    with joined() as rank:
        messages = console(stderr=True)
        messages.quiet = rank > 0

        def tell(line: str) -> None:
            say(line, messages)

        with progress_bar(messages, checked.steps) as show:
            run = train(
                checked,
                folder,
                device=_device(device),
                checkpoint_every=checkpoint_every,
                keep=keep,
                keep_every=keep_every,
                force=force,
                say=tell,
                show=show,
            )
    if rank == 0:
        _tell_outcome(run, folder)
        if run.info["status"] == "diverged":
            raise typer.Exit(1)


def _tell_outcome(run: Any, folder: Path) -> None:
    """Print the status, the losses and the phase of each layer."""
    info = run.info
    table = run.latest()
    status = info["status"]
    if info.get("reason"):
        status += f" ({info['reason']})"
    say(f"{folder}: {status}")
    means = table.groupby("gauge").value.mean()
    if "valid_loss" in means:
        say(f"loss {means['loss']:.4f}, validation loss {means['valid_loss']:.4f}")
    attention = table[table.gauge.isin(["phase", "entropy"])]
    if len(attention):
        for number, layer in attention.groupby("layer"):
            of_layer = layer.groupby("gauge").value.mean()
            line = f"layer {number}: {info['phases'][int(of_layer['phase'])]}"
            if "entropy" in of_layer:
                line += f", entropy {of_layer['entropy']:.3f}"
            say(line)
    if "applies" in info:
        say(info["applies"])
    say(f"page: joma report {folder} --open")


def _sweep(
    out: Annotated[Path, typer.Option(help="Folder of the run folders.")] = Path("runs/sweep"),
    workers: Annotated[int, typer.Option(help="Runs at a time.")] = 1,
    engine: Annotated[
        str, typer.Option(help="processes (this machine) or ray.", autocompletion=help.ENGINES)
    ] = "processes",
    address: Annotated[str | None, typer.Option(help="Of a Ray cluster: ray://HOST:PORT.")] = None,
    retry: Annotated[bool, typer.Option("--retry", help="Do failed runs again.")] = False,
    checkpoint_every: Annotated[int, typer.Option(help="Steps between checkpoints.")] = 500,
    as_json: AsJson = False,
    **choices: Any,
) -> None:
    """Train a grid of settings: options take several values, as --layers 1,2,5 --seed 0..2.

    Complete runs are not done again. `joma status FOLDER` shows how a sweep stands, at any time.
    """
    from joma._measure.gauges.registry import names_of
    from joma._runs.listing import standings
    from joma._train.sweep import grid, sweep

    base: dict[str, Any] = {}
    lists: dict[str, list[Any]] = {}
    for name, text in choices.items():
        if text is None:
            continue
        if name == "gauges":
            base[name] = tuple(names_of(text))
        else:
            lists[name] = _values(name, text, _kinds()[name])
    runs = grid(Settings(**base), lists)
    messages = console(stderr=True)

    def report(end: Any, number: int, total: int) -> None:
        reason = f": {end.reason}" if end.reason else ""
        say(f"{number}/{total}  {end.path.name}  {end.status}{reason}", messages)

    ends = sweep(
        runs,
        out,
        workers=workers,
        engine=engine,
        address=address,
        retry=retry,
        checkpoint_every=checkpoint_every,
        report=report,
    )
    rows = standings(out)
    if as_json:
        print_json(rows)
    else:
        print_standings(rows, in_full=True)
    if any(end.status == "failed" for end in ends):
        raise typer.Exit(1)


def _values(name: str, text: str, kind: Any) -> list[Any]:
    """Return "1,2,5" or, of whole numbers, "0..2" as values of a setting."""
    types = [one for one in (typing.get_args(kind) or (kind,)) if one is not type(None)]
    (type_,) = types
    values: list[Any] = []
    for part in _parts(text):
        try:
            values += _part_values(part, type_)
        except (ValueError, KeyError):
            option = f"--{name.replace('_', '-')}"
            raise ValueError(f"{option}: {part!r} is not {_article(type_)}") from None
    return values


def _part_values(part: str, type_: type) -> list[Any]:
    first, dots, last = part.partition("..")
    if dots and type_ is int:
        numbers = list(range(int(first), int(last) + 1))
        if not numbers:
            raise ValueError(f"the range {part} is empty")
        return numbers
    if type_ is bool:
        return [{"true": True, "false": False}[part.lower()]]
    return [type_(part)]


def _parts(text: str) -> list[str]:
    """Split at commas, but for those between the options of a corpus, as in "pydoc,hblt:rho=0.9,depth=4"."""
    parts: list[str] = []
    for part in text.split(","):
        if parts and parts[-1].startswith("hblt:") and "=" in part:
            parts[-1] += f",{part}"
        else:
            parts.append(part)
    return parts


def _article(kind: type) -> str:
    articles = {
        int: "a whole number, or a range as 0..2",
        float: "a number",
        bool: "true or false",
    }
    return articles.get(kind, "a word")


def _device(name: str) -> str:
    import torch

    if name != "auto":
        return name
    return "cuda" if torch.cuda.is_available() else "cpu"


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command("train")(with_settings(_train))
    app.command("sweep")(with_settings(_sweep, lists=True))
