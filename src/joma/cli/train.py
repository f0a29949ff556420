"""`joma train` and `joma sweep`: the options are made from the settings."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import typer

from joma._measure.gauges.registry import names_of
from joma._train.settings import Settings
from joma.cli import help
from joma.cli.terminal import AsJson, console, escape, print_json, print_table, say, show_number

_OUT = Annotated[
    Path | None, typer.Option(help="Run folder to write.", show_default="runs/train-…")
]


def with_settings(function: Callable[..., None], *, lists: bool = False) -> Callable[..., None]:
    """``function(**settings)`` with one option per setting; with ``lists`` each takes "1,2,5" or "0..2"."""
    parameters = list(inspect.signature(function, eval_str=True).parameters.values())
    parameters = [p for p in parameters if p.kind is not inspect.Parameter.VAR_KEYWORD]
    hints = typing.get_type_hints(Settings)
    options = []
    for item in fields(Settings):
        default: Any = item.default
        default = ", ".join(default) if item.name == "gauges" else default
        shown = None if lists else default
        kind: Any = str | None if lists else str if item.name == "gauges" else hints[item.name]
        complete = help.gauges if item.name == "gauges" else None
        told: Any = str(default).lower() if lists and default is not None else True  # in the help
        annotation = Annotated[
            kind,
            typer.Option(
                help=item.metadata["help"] + ".", show_default=told, autocompletion=complete
            ),
        ]
        options.append(
            inspect.Parameter(
                item.name, inspect.Parameter.KEYWORD_ONLY, default=shown, annotation=annotation
            )
        )
    keyword = [
        p.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for p in parameters
        if p.default is not inspect.Parameter.empty
    ]
    first = [p for p in parameters if p.default is inspect.Parameter.empty]

    def command(*args: Any, **kwargs: Any) -> None:
        function(*args, **kwargs)

    command.__name__, command.__doc__ = function.__name__, function.__doc__
    command.__signature__ = inspect.Signature([*first, *keyword, *options])  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in (*first, *keyword, *options)}
    return command


def _train(
    ctx: typer.Context,
    out: _OUT = None,
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
    """Train the paper's language model with a watch attached. The same command again goes on where it stopped."""
    if ctx.invoked_subcommand is not None:
        return
    from joma._train.language import train
    from joma._train.processes import joined
    from joma.cli.progress import progress_bar

    settings["gauges"] = tuple(names_of(settings["gauges"]))
    chosen = Settings(**settings).checked()
    folder = out or Path("runs") / f"train-{chosen.corpus_name}-{chosen.label}"
    with joined() as rank:
        told = console(stderr=True)
        told.quiet = rank > 0
        with progress_bar(told, chosen.steps) as show:
            run = train(
                chosen, folder, device=_device(device), checkpoint_every=checkpoint_every, keep=keep,
                keep_every=keep_every, force=force, say=lambda line: say(line, told), show=show,
            )  # fmt: skip
    if rank > 0:
        return
    info, table = run.info, run.latest()
    last = table.groupby("gauge").value.mean()
    say(f"{folder}: {info['status']}" + (f" ({info['reason']})" if info.get("reason") else ""))
    if "valid_loss" in last:
        say(f"loss {last['loss']:.4f}, validation loss {last['valid_loss']:.4f}")
    attention = table[table.gauge.isin(["phase", "entropy"])]
    for n, layer in attention.groupby("layer") if len(attention) else ():
        means = layer.groupby("gauge").value.mean()
        entropy = f", entropy {means['entropy']:.3f}" if "entropy" in means else ""
        say(f"layer {n}: {info['phases'][int(means['phase'])]}{entropy}")
    if "applies" in info:
        say(info["applies"])
    say(f"picture: joma plot {folder}")
    if info["status"] == "diverged":
        raise typer.Exit(1)


def _hierarchy(
    objective: Annotated[
        str, typer.Option(help="What to predict: class (the root) or token (a leaf).")
    ] = "class",
    rho: Annotated[
        float, typer.Option(help="How far a latent decides those below it, between 0 and 1.")
    ] = 0.9,
    depth: Annotated[
        int, typer.Option(help="Edges from the class to a token: 3 (α, β, tokens) or 2.")
    ] = 3,
    latents: Annotated[int, typer.Option(help="Latents right below the class.")] = 4,
    children: Annotated[int, typer.Option(help="Children of each latent.")] = 3,
    classes: Annotated[int, typer.Option(help="Classes.")] = 10,
    layers: Annotated[int, typer.Option(help="Blocks of the Transformer.")] = 2,
    width: Annotated[int, typer.Option(help="Width of the model.")] = 64,
    steps: Annotated[int, typer.Option(help="Optimiser steps.")] = 400,
    batch: Annotated[int, typer.Option(help="Sequences per step.")] = 64,
    lr: Annotated[float, typer.Option(help="Adam's learning rate.")] = 1e-3,
    every: Annotated[int, typer.Option(help="Steps between measurements.")] = 20,
    seed: Annotated[int, typer.Option(help="Of tree, weights and samples.")] = 0,
    out: Annotated[
        Path | None, typer.Option(help="Run folder.", show_default="runs/hierarchy-…")
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Replace the run in the output folder.")
    ] = False,
) -> None:
    """Train a small Transformer on a noisy latent tree (Section 5): who attends to whom, which latents nodes show."""
    from joma.paper.labs.tree import TreeSettings, train_tree

    settings = TreeSettings(
        objective=objective,
        rho=rho,
        depth=depth,
        latents=latents,
        children=children,
        classes=classes,
        layers=layers,
        width=width,
        steps=steps,
        batch=batch,
        lr=lr,
        every=every,
        seed=seed,
    ).checked()
    name = f"hierarchy-{objective},rho={rho:g},depth={depth},layers={layers},seed={seed}"
    folder = out or Path("runs") / name
    with console(stderr=True).status("training"):
        run = train_tree(settings, folder, force=force)
    table = run.frame()
    for gauge in [name for name in dict.fromkeys(table.gauge) if name != "competition"]:
        curves = table[table.gauge == gauge].groupby(["tree", "step"]).value.mean()
        shown = (
            f"{tree} {curves[tree].iloc[0]:.2f} → {curves[tree].iloc[-1]:.2f}"
            for tree in curves.index.unique(0)[::-1]
        )
        say(f"{gauge:20} {', '.join(shown)}")
    say(f"run: {folder}")


def _sweep_train(
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
    """Train a grid: options take several values, as --layers 1,2,5 --seed 0..2. Complete runs are not done again."""
    from joma._train.sweep import grid, sweep

    hints = typing.get_type_hints(Settings)
    base: dict[str, Any] = {}
    lists: dict[str, list[Any]] = {}
    for name, text in choices.items():
        if text is None:
            continue
        if name == "gauges":
            base[name] = tuple(names_of(text))
        else:
            lists[name] = _values(name, text, hints[name])
    runs = grid(Settings(**base), lists)
    told = console(stderr=True)

    def report(end: Any, n: int, total: int) -> None:
        reason = f": {end.reason}" if end.reason else ""
        say(f"{n}/{total}  {end.path.name}  {end.status}{reason}", told)

    ends = sweep(
        runs, out, workers=workers, engine=engine, address=address, retry=retry, checkpoint_every=checkpoint_every,
        report=report,
    )  # fmt: skip
    _print_status(out, as_json)
    if any(end.status == "failed" for end in ends):
        raise typer.Exit(1)


def _sweep_status(
    folder: Annotated[Path, typer.Argument(help="Folder of the run folders.")],
    as_json: AsJson = False,
) -> None:
    """A table of the runs of a sweep, at any time."""
    _print_status(folder, as_json)


def _print_status(folder: Path, as_json: bool) -> None:
    from joma._train.sweep import standing

    rows = standing(folder)
    if as_json:
        print_json(rows)
        return
    columns = {
        "run": "run",
        "status": "status",
        "step": ">step",
        "steps": ">steps",
        "loss": ">loss",
    }
    columns |= {
        "valid_loss": ">valid_loss",
        "entropy": ">entropy",
        "phases": "*phases",
        "reason": "*reason",
    }

    def cell(value: Any) -> str:
        return (
            show_number(value)
            if isinstance(value, float)
            else ""
            if value is None
            else escape(str(value))
        )

    print_table(
        console(), list(columns.values()), [[cell(row[name]) for name in columns] for row in rows]
    )


def _values(name: str, text: str, kind: Any) -> list[Any]:
    """ "1,2,5" or, of whole numbers, "0..2" as values of a setting."""
    (type_,) = [t for t in (typing.get_args(kind) or (kind,)) if t is not type(None)]
    out: list[Any] = []
    for part in _parts(text):
        first, dots, last = part.partition("..")
        try:
            if dots and type_ is int:
                if not (numbers := range(int(first), int(last) + 1)):
                    raise ValueError
                out += numbers
            elif type_ is bool:
                out.append({"true": True, "false": False}[part.lower()])
            else:
                out.append(type_(part))
        except (ValueError, KeyError):
            raise ValueError(
                f"--{name.replace('_', '-')}: {part!r} is not {_article(type_)}"
            ) from None
    return out


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
    return {
        int: "a whole number, or a range as 0..2",
        float: "a number",
        bool: "true or false",
    }.get(kind, "a word")


def _device(name: str) -> str:
    import torch

    if name != "auto":
        return name
    return "cuda" if torch.cuda.is_available() else "cpu"


def register(app: typer.Typer) -> None:
    """Add the commands."""
    lab = typer.Typer()
    lab.callback(invoke_without_command=True)(with_settings(_train))
    lab.command("hierarchy")(_hierarchy)
    app.add_typer(lab, name="train")
    group = typer.Typer(
        help="Train a grid of settings; see how a sweep stands.", no_args_is_help=True
    )
    group.command("train")(with_settings(_sweep_train, lists=True))
    group.command("status")(_sweep_status)
    app.add_typer(group, name="sweep")
