"""What a watch shows: a line in the terminal, a table in a notebook."""

from __future__ import annotations

import math
import sys
from contextlib import suppress
from html import escape
from types import FrameType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from joma._measure.watch.watch import Watch

STYLES = {
    "dense": "green",
    "sparsifying": "yellow",
    "bouncing": "cyan",
    "collapsed": "bold red",
    "failing": "bold red",
    "ended": "bold red",
}
_COLOURS = {
    "dense": "#009e73",
    "sparsifying": "#e69f00",
    "bouncing": "#0072b2",
    "collapsed": "#d55e00",
    "failing": "#d55e00",
    "ended": "#d55e00",
}


class LiveLine:
    """One line of the terminal that is written over: step, loss, mean entropy, and the phase of each layer.

    Streams stay the user's: nothing is redirected, so that whatever else writes to the terminal does so as without a
    watch. While a progress bar is on the screen, that bar has the line to itself. The ``introduction`` is printed once,
    above the line.
    """

    def __init__(self, introduction: str = "") -> None:
        self._introduction = introduction
        self._is_on_screen = False
        self._last = ""  # for a stream that cannot be written over: shown once, at the end

    def show(self, watch: Watch) -> None:
        """Show the state after a measurement."""
        if shows_progress_bar():
            self._is_on_screen = False  # the bar has written over it
            return
        from rich.console import Console

        console = Console(stderr=True, force_jupyter=False)
        with console.capture() as captured:
            console.print(line(watch), end="", soft_wrap=not console.is_terminal)
        if console.is_terminal and not console.is_dumb_terminal:
            if self._introduction:
                self._write(f"\r\x1b[2K{self._introduction}\n")
                self._introduction = ""
            self._write(
                f"\r\x1b[2K{captured.get()}"
            )  # back to the first column, and clear the line
            self._is_on_screen = True
        else:
            self._last = captured.get()

    def close(self) -> None:
        """Leave the last line where it is; write it if the stream is no terminal."""
        if self._is_on_screen:
            self._write("\n")
        elif self._last:
            self._write(f"{self._last}\n")

    def _write(self, text: str) -> None:
        with suppress(OSError, ValueError):  # a terminal that was closed must not stop the training
            sys.stderr.write(text)
            sys.stderr.flush()


def shows_progress_bar() -> bool:
    """True if a bar of tqdm, a live display of Rich or the loop of Keras is using the terminal now."""
    return _has_tqdm_bar() or _has_rich_display() or _runs_in_keras()


def _has_tqdm_bar() -> bool:
    bar = getattr(sys.modules.get("tqdm.std"), "tqdm", None)
    # bars that are open; those with disable=True and those that are closed are not among them
    return bool(list(getattr(bar, "_instances", ())))


def _has_rich_display() -> bool:
    proxy = getattr(sys.modules.get("rich.file_proxy"), "FileProxy", None)
    if proxy is not None and isinstance(sys.stderr, proxy):  # by any console, on a terminal
        return True
    console = getattr(
        sys.modules.get("rich"), "_console", None
    )  # the one that displays use unless told otherwise
    # `_live` until Rich 13, `_live_stack` from 14 on
    return bool(getattr(console, "_live_stack", None) or getattr(console, "_live", None))


def _runs_in_keras() -> bool:
    """True within `Model.fit` of Keras, which draws its bar without an object that could be asked."""
    if "keras" not in sys.modules:
        return False
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if str(frame.f_globals.get("__name__")).startswith("keras."):
            return True
        frame = frame.f_back
    return False


def line(watch: Watch) -> Any:
    """The line as Rich text."""
    from rich.text import Text

    text = Text(no_wrap=True, overflow="ellipsis")
    text.append("joma ", style="bold")
    text.append(f"step {watch.last_step:,}")
    if watch.latest is not None and watch.latest.loss is not None:
        text.append(f"  loss {watch.latest.loss:.4g}")
    present = [n for n, phase in enumerate(watch.phases) if not math.isnan(phase.entropy)]
    entropies = [phase.entropy for phase in watch.phases if not math.isnan(phase.entropy)]
    if entropies:
        text.append(f"  entropy {sum(entropies) / len(entropies):.3f}")
    start = 0
    names = [watch.phases[n].name for n in present]
    for n in range(1, len(names) + 1):  # runs of layers in the same phase
        if n == len(names) or names[n] != names[start]:
            span = f"{present[start]}" if n - start == 1 else f"{present[start]}–{present[n - 1]}"
            text.append(f"  {span} ")
            text.append(names[start], style=STYLES[names[start]])
            start = n
    return text


def html(watch: Watch) -> str:
    """A table of layers with entropy, phase, depth of the trough, height of the bounce, and weights."""
    head = [f"<b>{escape(type(watch.model).__name__)}</b>, step {watch.last_step:,}"]
    latest = watch.latest
    if latest is not None and latest.loss is not None:
        head.append(f"loss {latest.loss:.4g}")
    head.append(
        f"run <code>{escape(str(watch.path))}</code>" if watch.path is not None else "no run folder"
    )
    if latest is None or not latest.values:
        return f"<p>{', '.join(head)}; no measurement yet</p>"
    layers = max(map(len, latest.values.values()))
    columns = [
        "layer",
        "module",
        *latest.values,
        *(["phase", "trough", "bounce"] if watch.phases else []),
    ]
    rows = []
    for n in range(layers):
        module = watch.layers[n] if n < len(watch.layers) else ""
        cells = [str(n), f"<code>{escape(module)}</code>"]
        cells += [
            _number(latest.reduced(gauge, n)) if n < len(v) else ""
            for gauge, v in latest.values.items()
        ]
        if n < len(watch.phases):
            phase = watch.phases[n]
            cells.append(f'<span style="color:{_COLOURS[phase.name]}">{phase.name}</span>')
            cells += [
                f"−{phase.depth:.2f}" if phase.depth else "",
                f"+{phase.bounce:.2f}" if phase.bounce else "",
            ]
        rows.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    header = "".join(f"<th>{escape(column)}</th>" for column in columns)
    return f"<p>{', '.join(head)}</p><table><tr>{header}</tr>{''.join(rows)}</table>"


def _number(x: float | None) -> str:
    if x is None:
        return ""
    return "NaN" if math.isnan(x) else f"{x:.4g}"
