"""The command line: parse, call, print. Everything heavy is imported by the command that needs it."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from joma.cli import (
    audit,
    claims,
    demo,
    doctor,
    forecast,
    gauges,
    plot,
    report,
    reproduce,
    scan,
    simulate,
    status,
    superpose,
    train,
)
from joma.cli.help import Group, arrange

app = typer.Typer(
    name="joma",
    help="Training dynamics of Transformers: the JoMA theory, checked, and its gauges on your own models.",
    no_args_is_help=True,
    cls=Group,
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


arrange(
    app,
    [
        ("Start", (demo, doctor)),
        ("Measure", (plot, status, report, forecast, scan, audit, superpose, gauges)),
        ("Theory", (simulate, claims)),
        ("Paper", (reproduce, train)),
    ],
)


def main() -> None:
    """Entry point: errors are for the user, without a traceback."""
    from joma._run import RunError
    from joma._run.names import harmless

    try:
        app()
    except (ValueError, TypeError, RunError, OSError) as error:
        print("\n".join(harmless(line) for line in f"joma: {_sentence(error)}".splitlines()), file=sys.stderr)
        raise SystemExit(2) from None
    except SystemExit as end:
        if end.code == 130:  # Ctrl-C, as Typer passes it on
            print("joma: interrupted; what was complete is kept, nothing is half-written", file=sys.stderr)
        raise


def _sentence(error: Exception) -> str:
    """What an error says, of the system's own without its number: "out.csv: Permission denied"."""
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return str(error)


if __name__ == "__main__":
    main()
