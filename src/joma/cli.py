"""The command line: parse, call, print. Everything heavy is imported by the command that needs it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from joma._exhibits.cli import register as register_exhibits
from joma._report.cli import register as register_report
from joma._scan.cli import register as register_scan
from joma._superpose.cli import register as register_superpose
from joma._terminal import VERDICT_STYLE, escape, plain_table, styled
from joma._train.cli import register as register_training

app = typer.Typer(
    name="joma",
    help="Training dynamics of Transformers: the JoMA theory, checked, and its gauges on your own models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(value: bool) -> None:
    if value:
        from joma import __version__

        typer.echo(f"joma {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


@app.command()
def claims(
    ids: Annotated[
        list[str] | None, typer.Argument(help="Claims or groups of them: T2.invariant, T4. All by default.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list instead of a table.")] = False,
) -> None:
    """Check the paper's statements: verdict, deciding number, and a control that must be rejected."""
    from rich.console import Console

    from joma.theory import claims as registry

    chosen = registry.get(ids) if ids else registry.claims()
    console = Console(stderr=True)
    results = []
    with console.status("") as status:
        for n, claim in enumerate(chosen, 1):
            status.update(f"checking {claim.id} ({n} of {len(chosen)})")
            results.append(registry.check(claim))
    if as_json:
        typer.echo(json.dumps([result.as_dict() for result in results], indent=2, ensure_ascii=False))
    elif len(results) == 1:
        _explain(chosen[0], results[0])
    else:
        _claims_table(results)
    if not all(result.ok for result in results):
        raise typer.Exit(1)


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.2g}"


def _claims_table(results: list[Any]) -> None:
    from rich.console import Console

    table = plain_table("claim", "verdict", ">value", ">tolerance", "control")
    notes = plain_table("claim", "*note")
    notes.show_header = False
    for r in results:
        control = "rejected" if r.control_rejected else "[red]NOT REJECTED[/red]"
        table.add_row(r.id, styled(r.verdict), _number(r.value), _number(r.tolerance), control)
        if r.note:
            notes.add_row(r.id, escape(r.note))
    console = Console()
    console.print(table)
    if notes.row_count:
        console.print("\n[bold]Corrections and conditions[/bold]")
        console.print(notes)
    counts = {name: sum(r.verdict == name for r in results) for name in VERDICT_STYLE}
    console.print(f"\n{len(results)} claims: " + ", ".join(f"{n} {name}" for name, n in counts.items() if n))
    console.print(f"{sum(r.seconds for r in results):.1f} s. One in full: joma claims {results[0].id}", highlight=False)


def _explain(claim: Any, result: Any) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    console.print(f"[bold]{claim.id}[/bold]  {styled(result.verdict)}   ({claim.source})\n")
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(ratio=1)
    rows = {
        "statement": claim.statement, "correction": claim.correction, "condition": claim.condition,
        "derivation": claim.derivation,
        "measured": claim.measures, "value": f"{_number(result.value)}  (tolerance {_number(result.tolerance)})",
        "as printed": _number(result.printed_value),
        "control": f"{claim.control}: {_number(result.control_value)}, "
        + ("rejected" if result.control_rejected else "NOT REJECTED"),
        "error": result.error,
    }  # fmt: skip
    for name, text in rows.items():
        if text:
            table.add_row(name, escape(text))
    console.print(table)


@app.command()
def simulate(
    task: Annotated[
        str | None, typer.Argument(help="A .npz or .csv file, or the name of a synthetic task (--list).")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Run folder to write.  [default: runs/simulate-TASK]")] = None,
    attention: Annotated[str, typer.Option(help="linear, exp or softmax.")] = "softmax",
    activation: Annotated[str, typer.Option(help="linear, relu, leaky_relu, gelu or silu.")] = "relu",
    t_end: Annotated[float, typer.Option(help="End of the time span.")] = 10.0,
    mlp_lr: Annotated[float, typer.Option(help="Learning rate of the MLP weights.")] = 1.0,
    attention_lr: Annotated[float, typer.Option(help="Learning rate of the attention logits; 0 freezes them.")] = 1.0,
    temperature: Annotated[float, typer.Option(help="Divides the attention logits.")] = 1.0,
    folded: Annotated[bool, typer.Option("--folded", help="Integrate attention out (Theorem 1).")] = False,
    step: Annotated[
        float | None, typer.Option(help="Gradient descent with this step size instead of the flow.")
    ] = None,
    times: Annotated[int, typer.Option(help="How many output times.")] = 201,
    scale: Annotated[float, typer.Option(help="Size of the random start where the file gives none.")] = 0.01,
    signed: Annotated[bool, typer.Option("--signed", help="Admit negative x.")] = False,
    seed: Annotated[int, typer.Option(help="Seed of synthetic tasks and starts.")] = 0,
    force: Annotated[bool, typer.Option("--force", help="Replace the run in the output folder.")] = False,
    list_: Annotated[bool, typer.Option("--list", help="List the synthetic tasks and exit.")] = False,
) -> None:
    """Integrate the joint dynamics of a task of your own: a run folder and a picture."""
    from rich.console import Console

    console = Console(highlight=False)
    if list_ or task is None:
        from joma.theory.tasks import TASKS

        for name, (what, _) in TASKS.items():
            console.print(f"[bold]{name:18}[/bold] {what}")
        if not list_:
            raise ValueError("which task? Give a .npz or .csv file, or one of the names above.")
        return
    from joma._simulate import simulate as run

    folder = out or Path("runs") / f"simulate-{Path(task).stem}"
    with Console(stderr=True).status(f"integrating {escape(task)}"):
        path = run(
            task, folder, attention=attention, activation=activation, t_end=t_end, mlp_lr=mlp_lr,
            attention_lr=attention_lr, temperature=temperature, folded=folded, step=step, times=times, scale=scale,
            signed=signed, seed=seed, force=force,
        )  # fmt: skip
    invariant, entropy = path.invariant(), path.entropy()
    console.print(f"{path.flow}", markup=False)
    console.print(f"status     {path.status}", markup=False)
    console.print(f"entropy    {entropy[0]:.4f} → {entropy[-1]:.4f} nats (lowest {entropy.min():.4f})")
    console.print(
        f"invariant  {invariant.formula}: drift {invariant.max_drift:.1e}"
        + ("" if invariant.exact else " (approximate under softmax)"),
        markup=False,
    )
    if path.switches:
        console.print(f"gates      {path.switches} switches, {len(path.slides)} slides")
    where = f"run        {folder}/  (run.json, metrics.jsonl, figure.svg, figure.png)"
    console.print(where, soft_wrap=True, markup=False)


@app.command()
def plot(
    run: Annotated[Path, typer.Argument(help="A run folder, finished or not.")],
    out: Annotated[Path | None, typer.Option(help="Folder for the figure.  [default: RUN]")] = None,
) -> None:
    """Draw a run: of a watched training, each gauge over the steps, a line a layer, with phases and the loss."""
    from rich.console import Console

    from joma._plot import plot as draw

    folder = draw(run, out)
    Console(highlight=False).print(f"{folder}/figure.svg, figure.png, figure.json", soft_wrap=True, markup=False)


@app.command()
def gauges() -> None:
    """List the gauges by name, and the parts of a model that weight gauges can be measured on."""
    from rich.console import Console

    from joma._gauges.registry import PARTS
    from joma._gauges.registry import gauges as registered

    console = Console(highlight=False)
    table = plain_table("gauge", "measured on", "*what it is")
    for gauge in registered().values():
        table.add_row(gauge.name, gauge.on, escape(gauge.help))
    console.print(table)
    console.print("\n[bold]Parts[/bold] for gauges measured on weights, as stable_rank.qk; mlp_in if none is named\n")
    table = plain_table("part", "*matrix")
    for part, what in PARTS.items():
        table.add_row(part, escape(what))
    console.print(table)


register_exhibits(app)
register_training(app)
register_superpose(app)
register_scan(app)
register_report(app)


def main() -> None:
    """Entry point: errors are for the user, without a traceback."""
    from joma._run import RunError

    try:
        app()
    except (ValueError, TypeError, RunError, OSError) as error:
        print(f"joma: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    except SystemExit as end:
        if end.code == 130:  # Ctrl-C, as Typer passes it on
            print("joma: interrupted; what was complete is kept, nothing is half-written", file=sys.stderr)
        raise


if __name__ == "__main__":
    main()
