"""All commands, in their panels, and how their errors are shown."""

from __future__ import annotations

import sys
import warnings
from typing import Annotated, Any

import typer

from joma.cli import (
    INTERRUPTED,
    audit,
    claims,
    demo,
    docs,
    doctor,
    forecast,
    gauges,
    hierarchy,
    report,
    reproduce,
    runs,
    scan,
    simulate,
    status,
    superpose,
    train,
    watch,
)
from joma.cli.help import CommandGroup, arrange

app = typer.Typer(
    name="joma",
    help="Training dynamics of Transformers: the JoMA theory, checked, and its gauges on your own models.",
    no_args_is_help=True,
    cls=CommandGroup,
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
        bool,
        typer.Option(
            "--version", callback=_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    pass


arrange(
    app,
    [
        ("Start", (demo, doctor, docs)),
        ("Watch", (watch, runs, status, report, gauges)),
        ("Measure", (scan, audit, forecast, superpose)),
        ("Theory", (simulate, claims, hierarchy)),
        ("Paper", (reproduce, train)),
    ],
)


def run() -> None:
    """Run the command that was typed: errors are for the user, without a traceback."""
    from joma._extras import MissingExtra
    from joma._runs import RunError
    from joma._runs.names import harmless

    warnings.formatwarning = _one_line
    try:
        app()
    except (ValueError, TypeError, RunError, OSError, MissingExtra) as error:
        print(
            "\n".join(harmless(line) for line in f"joma: {_sentence(error)}".splitlines()),
            file=sys.stderr,
        )
        raise SystemExit(2) from None
    except SystemExit as end:
        if end.code == INTERRUPTED:  # Ctrl-C, as Typer passes it on
            print(
                "joma: interrupted; what was complete is kept, nothing is half-written",
                file=sys.stderr,
            )
        raise
    finally:
        warnings.formatwarning = _FORMAT


_FORMAT = warnings.formatwarning


def _one_line(message: Warning | str, category: type[Warning], *place: Any, **more: Any) -> str:
    """Format a warning of joma as a sentence: the place in the code is no help to the user of a command."""
    from joma._runs.names import harmless
    from joma._runs.warning import JomaWarning

    if issubclass(category, JomaWarning):
        return f"{harmless(str(message))}\n"
    return _FORMAT(message, category, *place, **more)


def _sentence(error: Exception) -> str:
    """What an error says, of the system's own without its number: "out.csv: Permission denied"."""
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return str(error)
