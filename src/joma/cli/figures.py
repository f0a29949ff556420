"""Figures of commands whose table is of use without one: without the extra `report` there is none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from joma._extras import has, pip_command
from joma.cli.terminal import say

if TYPE_CHECKING:
    from rich.console import Console

    from joma._show.plots import Chart


def save_figure(draw: Callable[[], Chart], folder: Path) -> list[str]:
    """Draw and save a figure; return the names of its main files, none without the extra `report`."""
    if not has("report"):
        return []
    from joma._show import plots

    plots.save(draw(), folder)
    return ["figure.svg", "figure.png"]


def say_how_to_get_figures(out: Console) -> None:
    """Print one line with the command that installs what figures need; nothing if it is installed."""
    if not has("report"):
        say(f"no figure was drawn; figures need: {pip_command('report')}", out)
