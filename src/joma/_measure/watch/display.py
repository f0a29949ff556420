"""The displays of a watch: a line in the terminal, a table in a notebook."""

from __future__ import annotations

import math
import sys
from contextlib import suppress
from dataclasses import dataclass
from html import escape
from types import FrameType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from joma._measure.watch.measurement import Measurement
    from joma._measure.watch.phases import Phase, Phases
    from joma._measure.watch.watch import Watch


@dataclass(frozen=True)
class PhaseStyle:
    """The look of a phase: a style of Rich, and a colour that is safe for colour-blind readers."""

    terminal: str
    html_colour: str


# The colours are those of Okabe and Ito.
_TROUBLE = PhaseStyle("bold red", "#d55e00")
PHASE_STYLES = {
    "dense": PhaseStyle("green", "#009e73"),
    "sparsifying": PhaseStyle("yellow", "#e69f00"),
    "bouncing": PhaseStyle("cyan", "#0072b2"),
    "collapsed": _TROUBLE,
    "failing": _TROUBLE,
    "ended": _TROUBLE,
}

# Back to the first column, and clear the line.
_CLEAR_LINE = "\r\x1b[2K"


class LiveLine:
    """One line of the terminal, rewritten in place: step, loss, mean entropy, phases of layers.

    It redirects no stream: other programs write to the terminal as they do without a watch. While a
    progress bar is on the screen, the bar has the line to itself.

    Arguments:
        introduction: printed once, above the line.
    """

    def __init__(self, introduction: str = "") -> None:
        self._introduction = introduction
        self._is_on_screen = False
        self._last_line = ""  # for a stream that cannot be rewritten: it gets the last line only

    def show(self, step: int, loss: float | None, phases: Phases) -> None:
        """Show the state after a measurement."""
        if shows_progress_bar():
            self._is_on_screen = False  # the bar has written over it
            return
        from rich.console import Console

        console = Console(stderr=True, force_jupyter=False)
        with console.capture() as captured:
            console.print(
                status_line(step, loss, phases), end="", soft_wrap=not console.is_terminal
            )
        if not console.is_terminal or console.is_dumb_terminal:
            self._last_line = captured.get()
            return
        if self._introduction:
            self._write(f"{_CLEAR_LINE}{self._introduction}\n")
            self._introduction = ""
        self._write(f"{_CLEAR_LINE}{captured.get()}")
        self._is_on_screen = True

    def close(self) -> None:
        """Leave the last line on the screen; write it if the stream is not a terminal."""
        if self._is_on_screen:
            self._write("\n")
        elif self._last_line:
            self._write(f"{self._last_line}\n")

    def _write(self, text: str) -> None:
        with suppress(OSError, ValueError):  # a terminal that was closed must not stop the training
            sys.stderr.write(text)
            sys.stderr.flush()


def shows_progress_bar() -> bool:
    """Return True if a bar of tqdm, a live display of Rich or Keras uses the terminal now."""
    return _has_tqdm_bar() or _has_rich_display() or _runs_in_keras()


def _has_tqdm_bar() -> bool:
    bar = getattr(sys.modules.get("tqdm.std"), "tqdm", None)
    # The open bars. Bars that are closed or have disable=True are not among them.
    return bool(list(getattr(bar, "_instances", ())))


def _has_rich_display() -> bool:
    proxy = getattr(sys.modules.get("rich.file_proxy"), "FileProxy", None)
    if proxy is not None and isinstance(sys.stderr, proxy):  # of any console, on a terminal
        return True
    # The global console, which displays use by default.
    console = getattr(sys.modules.get("rich"), "_console", None)
    # It is `_live` until Rich 13, and `_live_stack` from 14 on.
    return bool(getattr(console, "_live_stack", None) or getattr(console, "_live", None))


def _runs_in_keras() -> bool:
    """Return True inside `Model.fit` of Keras, which draws its bar without an object to ask."""
    if "keras" not in sys.modules:
        return False
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if str(frame.f_globals.get("__name__")).startswith("keras."):
            return True
        frame = frame.f_back
    return False


def status_line(step: int, loss: float | None, phases: Phases) -> Any:
    """Return step, loss, mean entropy and the phases of layers as Rich text."""
    from rich.text import Text

    text = Text(no_wrap=True, overflow="ellipsis")
    text.append("joma ", style="bold")
    text.append(f"step {step:,}")
    if loss is not None:
        text.append(f"  loss {loss:.4g}")
    entropies = []
    for phase in phases:
        if not math.isnan(phase.entropy):
            entropies.append(phase.entropy)
    if entropies:
        text.append(f"  entropy {sum(entropies) / len(entropies):.3f}")
    for group in _runs_of_phases(phases):
        text.append(f"  {group.layers} ")
        text.append(group.name, style=PHASE_STYLES[group.name].terminal)
    return text


@dataclass
class PhaseGroup:
    """Neighbouring layers in the same phase."""

    name: str
    first: int
    last: int

    @property
    def layers(self) -> str:
        """Their numbers, as "3" or "3–5"."""
        if self.first == self.last:
            return str(self.first)
        return f"{self.first}–{self.last}"


def _runs_of_phases(phases: list[Phase]) -> list[PhaseGroup]:
    """Return the layers that were measured, neighbours in the same phase together."""
    groups: list[PhaseGroup] = []
    for number, phase in enumerate(phases):
        if math.isnan(phase.entropy):
            continue
        if groups and groups[-1].name == phase.name:
            groups[-1].last = number
        else:
            groups.append(PhaseGroup(phase.name, number, number))
    return groups


def watch_html(watch: Watch) -> str:
    """Return a table of layers with their gauges, phase, depth of the trough and bounce."""
    heading = [f"<b>{escape(type(watch.model).__name__)}</b>, step {watch.last_step:,}"]
    latest = watch.latest
    if latest is not None and latest.loss is not None:
        heading.append(f"loss {latest.loss:.4g}")
    if watch.path is None:
        heading.append("no run folder")
    else:
        heading.append(f"run <code>{escape(str(watch.path))}</code>")
    paragraph = ", ".join(heading)
    if latest is None or not latest.values:
        return f"<p>{paragraph}; no measurement yet</p>"
    columns = ["layer", "module", *latest.values]
    if watch.phases:
        columns += ["phase", "trough", "bounce"]
    header = "".join(f"<th>{escape(column)}</th>" for column in columns)
    rows = []
    for number in range(max(map(len, latest.values.values()))):
        cells = "".join(f"<td>{cell}</td>" for cell in _layer_cells(watch, latest, number))
        rows.append(f"<tr>{cells}</tr>")
    return f"<p>{paragraph}</p><table><tr>{header}</tr>{''.join(rows)}</table>"


def _layer_cells(watch: Watch, latest: Measurement, number: int) -> list[str]:
    module = ""
    if number < len(watch.layers):
        module = watch.layers[number]
    cells = [str(number), f"<code>{escape(module)}</code>"]
    for gauge, values in latest.values.items():
        value = None
        if number < len(values):
            value = latest.reduced(gauge, number)
        cells.append(_number(value))
    if number < len(watch.phases):
        cells += _phase_cells(watch.phases[number])
    return cells


def _phase_cells(phase: Phase) -> list[str]:
    colour = PHASE_STYLES[phase.name].html_colour
    trough = ""
    if phase.depth:
        trough = f"−{phase.depth:.2f}"
    bounce = ""
    if phase.bounce:
        bounce = f"+{phase.bounce:.2f}"
    return [f'<span style="color:{colour}">{phase.name}</span>', trough, bounce]


def _number(value: float | None) -> str:
    if value is None:
        return ""
    if math.isnan(value):
        return "NaN"
    return f"{value:.4g}"
