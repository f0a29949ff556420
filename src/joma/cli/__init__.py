"""The command line: parse, call, print. Everything heavy is imported by the command that needs it.

This module imports next to nothing: the commands are imported by `main`, which is at work by then,
so that Ctrl-C ends it quietly.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:  # `typing` takes longer to import than all of this
    from collections.abc import Callable
    from typing import Any

    from joma.cli.commands import app as app

INTERRUPTED = 130  # exit status after Ctrl-C, as shells have it: 128 + SIGINT


def main() -> None:
    """Entry point: import the commands, and run the one that was typed."""
    try:
        run = _import_commands()
        run()
    except KeyboardInterrupt:
        _end()
    except Exception as error:
        # Python, and extensions in C, may make another error of it: "Error calling __set_name__"
        if isinstance(error.__cause__, KeyboardInterrupt):
            _end()
        raise
    finally:
        # If Ctrl-C came while Python executed a string, as dataclasses do, Python ends itself by
        # SIGINT and not with our exit status. It forgets that when it executes another string.
        exec("")


def _end() -> None:
    print("joma: interrupted", file=sys.stderr)
    raise SystemExit(INTERRUPTED) from None


def _import_commands() -> Callable[[], None]:
    """Import all commands, and return the function that runs the one that was typed."""
    import os
    import signal

    def end_at_once(number: int, frame: object) -> None:
        os.write(2, b"joma: interrupted\n")
        os._exit(INTERRUPTED)

    # A KeyboardInterrupt would do almost always. But Python prints and ignores one that comes in
    # the callback of a weak reference, and each import has such a callback. Nothing is at work yet
    # that would have to be tidied up.
    is_replaced = False
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        try:
            signal.signal(signal.SIGINT, end_at_once)
            is_replaced = True
        except ValueError:  # not the main thread, to which signals go
            pass
    try:
        from joma.cli.commands import run
    finally:
        if is_replaced:
            signal.signal(signal.SIGINT, signal.default_int_handler)
    return run


def __getattr__(name: str) -> Any:
    if name == "app":
        from joma.cli.commands import app

        return app
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
