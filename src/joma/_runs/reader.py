"""Reading run folders: lines, and the long table."""

from __future__ import annotations

import os
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from joma._runs.encoding import parsed, unspell
from joma._runs.folder import RUN, RunError, RunNotFound, describe, read_info
from joma._runs.metric_lines import METRICS, MetricLines, check_lines, read_lines
from joma._runs.patterns import Patterns, read_patterns
from joma._runs.state import State, state_of
from joma._runs.table import long_table

if TYPE_CHECKING:
    import pandas as pd


class Run:
    """A run folder, for reading; a run that is still being written can be read too.

    Attributes:
        path: the folder.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        read_info(self.path)
        self._frames: dict[
            str | None, pd.DataFrame
        ] = {}  # gauge -> table, of the files with this signature
        self._signature: list[tuple[str, int, int]] = []

    @property
    def info(self) -> dict[str, Any]:
        """The content of `run.json`, as it is now."""
        return read_info(self.path)

    @property
    def status(self) -> str:
        """State of the run now: "running", "done", "failed", "interrupted", "diverged" or "killed".

        In `info` a run that was killed is "running": nobody was left to record the end. It was killed if no process
        holds its folder any more. Of a run on another machine that may be impossible to see: then it is "running",
        and ``state.written`` is when it was last written.
        """
        return self.state.status

    @property
    def state(self) -> State:
        """The `status` now, with ``host``, ``written`` and ``remark``; ``str(state)`` is a phrase."""
        return state_of(self.path, self.info)

    @property
    def done(self) -> bool:
        """Whether the run came to its end; False while it runs, after a failure and after a kill."""
        return bool(self.info["status"] == "done")

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield each line of the complete measurements, in order: step, extra columns, gauge, value."""
        for blocks, _ in self._sources():
            for lines in blocks:
                for row in lines.rows():
                    try:
                        value = parsed(row.pop("value"))
                    except ValueError:
                        self._name_damage()
                        raise
                    gauge = row.pop("gauge")  # a name, even if it is "nan"
                    yield {**unspell(row), "gauge": gauge, "value": unspell(value)}

    def frame(self, gauge: str | None = None) -> pd.DataFrame:
        """Return the long table: one row per number, in the order of writing; of no head that a layer does not have.

        Arguments:
            gauge: only this gauge; all by default.

        Returns:
            The columns step, extra columns (t, seed, ...), axes (layer, head, ...), gauge, value, and, where the run
            names its layers, module: the module or matrix that a layer is. Axes are counted from 0, and are `Int64`
            with `<NA>` where some gauge does not have them.
        """
        signature = self._sign_files()
        if signature != self._signature:
            self._signature = signature
            self._frames.clear()
        if gauge not in self._frames:
            self._frames[gauge] = self._read_frame(gauge)
        return self._frames[gauge].copy(deep=not _has_copy_on_write())

    def _sign_files(self) -> list[tuple[str, int, int]]:
        """Return path, size and time of each file that the table is read from: it is parsed once until one changes."""
        signature = []
        for folder in [self.path, *self.members]:
            for name in (RUN, METRICS):
                path = folder / name
                if path.exists():
                    state = path.stat()
                    signature.append((str(path), state.st_size, state.st_mtime_ns))
        return signature

    def _read_frame(self, gauge: str | None) -> pd.DataFrame:
        try:
            table = long_table(self._sources(gauge), gauge)
        except ValueError:
            self._name_damage()
            raise
        if (
            gauge is not None
            and table.empty
            and not any(gauge in info["axes"] for _, info in self._sources())
        ):
            declared = {name for _, info in self._sources() for name in info["axes"]}
            known = ", ".join(sorted(declared | {row["gauge"] for row in self.rows()}))
            raise RunError(f"{self.path} has no gauge {gauge!r}; it has {known or 'none yet'}")
        return table

    def latest(self) -> pd.DataFrame:
        """The rows of `frame` at the last step of each gauge."""
        table = self.frame()
        return table[table.step == table.groupby("gauge").step.transform("max")].reset_index(
            drop=True
        )

    def patterns(self) -> Patterns | None:
        """Who attends to whom at a few steps, if the run recorded it: ``patterns().kept[0].shares(layer)``."""
        return read_patterns(self.path)

    @property
    def members(self) -> list[Path]:
        """The folders of the runs whose measurements this one refers to (`RunWriter.refer`); they may be missing."""
        return [
            Path(os.path.normpath(self.path / member["path"]))
            for member in self.info.get("runs", [])
        ]

    def _sources(
        self, gauge: str | None = None
    ) -> Iterator[tuple[Iterator[MetricLines], dict[str, Any]]]:
        """Yield the lines of this run, then of each run it refers to, with the `run.json` that describes them."""
        info = self.info
        yield read_lines(self.path / METRICS, gauge), info
        for path, member in zip(self.members, info.get("runs", []), strict=True):
            try:
                run = Run(path)
            except RunNotFound as error:
                raise RunNotFound(
                    f"{self.path} refers to the measurements in {path}, which is not there ({error}): bring that "
                    f"folder back, or make {self.path} again"
                ) from None
            yield run._as_member(member, gauge), run.info

    def _as_member(self, member: dict[str, Any], gauge: str | None) -> Iterator[MetricLines]:
        """Yield the lines of the gauges that another run refers to, with the columns that it adds."""
        for lines in read_lines(self.path / METRICS, gauge):
            yield lines.select(member["gauges"]).with_columns(member["columns"])

    def _name_damage(self) -> None:
        """Raise a `RunError` that names the first damaged line, in this run or one that it refers to."""
        for folder in [self.path, *self.members]:
            check_lines(folder / METRICS)

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r}: {describe(self.info, self.status)})"

    def _repr_html_(self) -> str:
        info = {"folder": self.path, **self.info}
        cells = (
            f"<tr><th>{escape(key)}</th><td>{escape(str(item))}</td></tr>"
            for key, item in info.items()
        )
        return f"{self._story()}<table>{''.join(cells)}</table>"

    def _story(self) -> str:
        """The sentence of its page, for a notebook; "" for kinds without steps, and for damaged runs."""
        from joma._runs.outcome import outcome
        from joma._runs.story import story

        if self.info["kind"] not in ("watch", "train"):
            return ""
        try:
            return f"<p>{escape(story(outcome(self), self.info['kind']))}</p>"
        except RunError:
            return ""


def _has_copy_on_write() -> bool:
    """True if pandas copies a column when it is changed, so that a shallow copy of a table costs nothing."""
    import pandas as pd

    return int(pd.__version__.partition(".")[0]) >= 3
