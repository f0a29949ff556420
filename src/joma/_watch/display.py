"""What a watch shows: a line in the terminal, a table in a notebook."""

from __future__ import annotations

import math
from html import escape
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from joma._watch.watch import Watch

STYLES = {"dense": "green", "sparsifying": "yellow", "bouncing": "cyan", "collapsed": "bold red"}
_COLOURS = {"dense": "#009e73", "sparsifying": "#e69f00", "bouncing": "#0072b2", "collapsed": "#d55e00"}


class LiveLine:
    """One line that is written over: step, loss, mean entropy, and the phase of each layer."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.live import Live

        self._live: Any = Live(console=Console(stderr=True), auto_refresh=False, transient=False)
        self._live.start()

    def show(self, watch: Watch) -> None:
        """The state after a measurement."""
        self._live.update(line(watch), refresh=True)

    def close(self) -> None:
        """Leave the last line where it is."""
        self._live.stop()


def line(watch: Watch) -> Any:
    """The line as Rich text."""
    from rich.text import Text

    text = Text(no_wrap=True, overflow="ellipsis")
    text.append("joma ", style="bold")
    text.append(f"step {watch.last_step:,}")
    if watch.latest is not None and not math.isnan(watch.latest.loss):
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
    if latest is not None and not math.isnan(latest.loss):
        head.append(f"loss {latest.loss:.4g}")
    head.append(f"run <code>{escape(str(watch.path))}</code>" if watch.path is not None else "no run folder")
    if latest is None or not latest.values:
        return f"<p>{', '.join(head)}; no measurement yet</p>"
    layers = max(map(len, latest.values.values()))
    columns = ["layer", "module", *latest.values, *(["phase", "trough", "bounce"] if watch.phases else [])]
    rows = []
    for n in range(layers):
        module = watch.layers[n] if n < len(watch.layers) else ""
        cells = [str(n), f"<code>{escape(module)}</code>"]
        cells += [_number(latest.reduced(gauge, n)) if n < len(v) else "" for gauge, v in latest.values.items()]
        if n < len(watch.phases):
            phase = watch.phases[n]
            cells.append(f'<span style="color:{_COLOURS[phase.name]}">{phase.name}</span>')
            cells += [f"−{phase.depth:.2f}" if phase.depth else "", f"+{phase.bounce:.2f}" if phase.bounce else ""]
        rows.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    header = "".join(f"<th>{escape(column)}</th>" for column in columns)
    return f"<p>{', '.join(head)}</p><table><tr>{header}</tr>{''.join(rows)}</table>"


def _number(x: float) -> str:
    return "NaN" if math.isnan(x) else f"{x:.4g}"
