"""Progress bars, on standard error; that of a run shows its loss, entropy and time left."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, ProgressColumn

    from joma._train.language import StepSummary


def bars_of(*columns: ProgressColumn, console: Console) -> Progress:
    """Bars that go away at the end; none in a pipe, where rich would leave an empty line of them."""
    from rich.progress import Progress

    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


@contextmanager
def progress_bar(console: Console, steps: int) -> Iterator[Callable[[StepSummary], None]]:
    """A function that shows the progress which it is called with."""
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn

    columns = (
        BarColumn(bar_width=30), MofNCompleteColumn(), TextColumn("{task.description}"), TimeRemainingColumn(),
    )  # fmt: skip
    with bars_of(*columns, console=console) as bars:
        task = bars.add_task("", total=steps)

        def show(progress: StepSummary) -> None:
            entropy = "" if math.isnan(progress.entropy) else f"  entropy {progress.entropy:.3f}"
            text = f"loss {progress.loss:.3f}{entropy}  {1000 * progress.seconds:.0f} ms/step"
            bars.update(task, completed=progress.step, description=text)

        yield show
