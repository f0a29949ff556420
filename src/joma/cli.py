"""The command line: parse, call, print. Everything heavy is imported by the command that needs it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from joma._report.cli import register as register_report
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


VERDICT_STYLE = {
    "holds": "green",
    "holds as corrected": "yellow",
    "holds under": "yellow",
    "fails": "red",
    "error": "bold red",
}


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


def _table(*columns: str) -> Any:
    """A plain table; a column that begins with ">" is flushed right, one with "*" takes what room there is."""
    from rich.table import Table

    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in columns:
        justify: Any = "right" if column[0] == ">" else "left"
        table.add_column(
            column.lstrip(">*"), justify=justify, no_wrap=column[0] != "*", ratio=1 if column[0] == "*" else None
        )
    return table


def _claims_table(results: list[Any]) -> None:
    from rich.console import Console

    table = _table("claim", "verdict", ">value", ">tolerance", "control")
    notes = _table("claim", "*note")
    notes.show_header = False
    for r in results:
        style = VERDICT_STYLE[r.verdict]
        control = "rejected" if r.control_rejected else "[red]NOT REJECTED[/red]"
        table.add_row(r.id, f"[{style}]{r.verdict}[/{style}]", _number(r.value), _number(r.tolerance), control)
        if r.note:
            notes.add_row(r.id, _escape(r.note))
    console = Console()
    console.print(table)
    if notes.row_count:
        console.print("\n[bold]Corrections and conditions[/bold]")
        console.print(notes)
    counts = {name: sum(r.verdict == name for r in results) for name in VERDICT_STYLE}
    console.print(f"\n{len(results)} claims: " + ", ".join(f"{n} {name}" for name, n in counts.items() if n))
    console.print(f"{sum(r.seconds for r in results):.1f} s. One in full: joma claims {results[0].id}", highlight=False)


def _escape(text: str) -> str:
    from rich.markup import escape

    return escape(text)


def _explain(claim: Any, result: Any) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    style = VERDICT_STYLE[result.verdict]
    console.print(f"[bold]{claim.id}[/bold]  [{style}]{result.verdict}[/{style}]   ({claim.source})\n")
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
            table.add_row(name, _escape(text))
    console.print(table)


@app.command()
def reproduce(
    exhibits: Annotated[
        list[str] | None, typer.Argument(help="fig2, fig3, fig4, folding, … All, and the claims, by default.")
    ] = None,
    preset: Annotated[
        str, typer.Option(help="quick (minutes in all), laptop, or paper (the paper's own scale).")
    ] = "quick",
    out: Annotated[Path, typer.Option(help="Folder for the exhibits, one folder each.")] = Path("runs/reproduce"),
    report: Annotated[Path | None, typer.Option(help="Where to write the page.  [default: OUT/report.html]")] = None,
    seed: Annotated[int, typer.Option(help="Seed of everything random.")] = 0,
    force: Annotated[bool, typer.Option("--force", help="Make exhibits again that are there already.")] = False,
    list_: Annotated[bool, typer.Option("--list", help="List the exhibits and exit.")] = False,
) -> None:
    """Reproduce the paper's figures with a verdict for each, and write one page that shows them all."""
    from rich.console import Console

    from joma._exhibits import EXHIBITS, PRESETS, get
    from joma._exhibits.base import check_output

    console = Console(highlight=False)
    if list_:
        table = _table("exhibit", "*the paper's statement")
        for exhibit in EXHIBITS.values():
            table.add_row(exhibit.id, exhibit.statement)
        console.print(table)
        return
    if preset not in PRESETS:
        from joma.theory.setting import nearest

        raise ValueError(nearest(preset, PRESETS, "preset"))
    chosen = get(exhibits) if exhibits else list(EXHIBITS.values())
    check_output(chosen, preset, out, seed, force=force)
    outcomes = _run_exhibits(chosen, preset, out, seed, force)
    checked = None if exhibits else _check_claims(out)

    from joma._report import write_report

    page = write_report(out, chosen, checked, preset=preset, seed=seed, path=report)
    table = _table("exhibit", "verdict", "*what decided it", ">time")
    for outcome in outcomes:
        verdict = "error" if outcome.verdict is None else outcome.verdict.verdict
        text = outcome.error or (outcome.verdict.summary if outcome.verdict else "")
        style = VERDICT_STYLE[verdict]
        table.add_row(
            outcome.exhibit.id,
            f"[{style}]{verdict}[/{style}]",
            _escape(text),
            f"{outcome.seconds:.1f} s" if outcome.fresh else "there",
        )
    console.print(table)
    if checked is not None:
        console.print(f"\n{len(checked)} claims checked: joma claims")
    console.print(f"report: {page}", soft_wrap=True)
    if any(o.error for o in outcomes) or (checked is not None and not all(r.ok for r in checked)):
        raise typer.Exit(1)


def _run_exhibits(chosen: list[Any], preset: str, out: Path, seed: int, force: bool) -> list[Any]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    from joma._exhibits import Outcome
    from joma._exhibits import reproduce as make

    outcomes = []
    columns = (
        TextColumn("{task.fields[name]:8}"),
        BarColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        for exhibit in chosen:
            task = bars.add_task("", total=1.0, name=exhibit.id)

            def progress(share: float, what: str, task: Any = task) -> None:
                bars.update(task, completed=share, description=what)

            try:
                outcome = make(exhibit, preset, out, seed, force=force, progress=progress)
            except Exception as error:  # one failing exhibit must not stop the others
                outcome = Outcome(exhibit, out / exhibit.id, None, 0.0, error=f"{type(error).__name__}: {error}")
            outcomes.append(outcome)
            bars.update(task, completed=1.0, description=outcome.verdict.verdict if outcome.verdict else "error")
    return outcomes


def _check_claims(out: Path) -> list[Any]:
    from rich.console import Console

    from joma._run import write_json
    from joma.theory import claims as registry

    with Console(stderr=True).status("checking the claims"):
        results = [registry.check(claim) for claim in registry.claims()]
    write_json(out / "claims.json", [result.as_dict() for result in results])
    return results


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
    with Console(stderr=True).status(f"integrating {task}"):
        path = run(
            task, folder, attention=attention, activation=activation, t_end=t_end, mlp_lr=mlp_lr,
            attention_lr=attention_lr, temperature=temperature, folded=folded, step=step, times=times, scale=scale,
            signed=signed, seed=seed, force=force,
        )  # fmt: skip
    invariant, entropy = path.invariant(), path.entropy()
    console.print(f"{path.flow}")
    console.print(f"status     {path.status}")
    console.print(f"entropy    {entropy[0]:.4f} → {entropy[-1]:.4f} nats (lowest {entropy.min():.4f})")
    console.print(
        f"invariant  {invariant.formula}: drift {invariant.max_drift:.1e}"
        + ("" if invariant.exact else " (approximate under softmax)")
    )
    if path.switches:
        console.print(f"gates      {path.switches} switches, {len(path.slides)} slides")
    console.print(f"run        {folder}/  (run.json, metrics.jsonl, figure.svg, figure.png)", soft_wrap=True)


@app.command()
def plot(
    run: Annotated[Path, typer.Argument(help="A run folder, finished or not.")],
    out: Annotated[Path | None, typer.Option(help="Folder for the figure.  [default: RUN]")] = None,
) -> None:
    """Draw a run: of a watched training, each gauge over the steps, a line a layer, with phases and the loss."""
    from rich.console import Console

    from joma._plot import plot as draw

    folder = draw(run, out)
    Console(highlight=False).print(f"{folder}/figure.svg, figure.png, figure.json", soft_wrap=True)


@app.command()
def gauges() -> None:
    """List the gauges by name, and the parts of a model that weight gauges can be measured on."""
    from rich.console import Console

    from joma._gauges.registry import PARTS
    from joma._gauges.registry import gauges as registered

    console = Console(highlight=False)
    table = _table("gauge", "measured on", "*what it is")
    for gauge in registered().values():
        table.add_row(gauge.name, gauge.on, _escape(gauge.help))
    console.print(table)
    console.print("\n[bold]Parts[/bold] for gauges measured on weights, as stable_rank.qk; mlp_in if none is named\n")
    table = _table("part", "*matrix")
    for part, what in PARTS.items():
        table.add_row(part, _escape(what))
    console.print(table)


register_training(app)
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
