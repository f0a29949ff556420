"""`joma.scan`: gauges over a series of checkpoints, a row appended as soon as a checkpoint is measured."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from joma._gauges.registry import get
from joma._run import Run, RunWriter
from joma._scan.measure import Request, Row, forget, measure, measure_there
from joma._scan.series import Checkpoint, series
from joma._watch.record import axes_of

if TYPE_CHECKING:
    import pandas as pd

    from joma._figures import Chart

DEFAULT_GAUGES = ("stable_rank",)
ENGINES = ("loky", "ray")
Report = Callable[[int, int, str], None]  # checkpoints done, in all, what is being done
_SERVICE = "bytes_read"  # the one number that every checkpoint has


def scan(
    source: str | os.PathLike[str],
    run: str | os.PathLike[str] | None = None,
    *,
    revisions: str | Sequence[str] | None = None,
    gauges: str | Sequence[str] = DEFAULT_GAUGES,
    data: Any = "pydoc",
    tokens: int = 20_000,
    length: int | None = None,
    pattern: str | None = None,
    keep: bool = False,
    workers: int = 1,
    engine: str = "loky",
    address: str | None = None,
    retry: bool = False,
    overwrite: bool = False,
    report: Report = lambda done, total, what: None,
) -> Scan:
    """Measure gauges on every checkpoint of a series; the same call again goes on where it stopped.

    Weight gauges read the tensors they need and nothing else. Attention gauges and ``coherence`` load the model and run
    it on a fixed sample of tokens. A checkpoint that cannot be read has a row that says why, and the others go on.

    Arguments:
        source: a folder of checkpoints (``step-*/``, ``checkpoint-*/``, or files), one model, a run of ``joma train``,
            or the id of a model on the Hugging Face hub.
        run: the run folder to write; without one, rows are kept for `Scan.frame` only.
        revisions: which of them: "step0,step1000", "1000..5000", "0..5000:500", "pythia", "all", "log", "log:20", or a
            list of names. All of a folder by default, "main" of a model on the hub.
        gauges: names as in `joma.watch`: "stable_rank", "stable_rank.qk", "entropy", …; also with commas between them.
        data: the sample for attention gauges: a corpus as for ``joma train``, or token ids.
        tokens: how many tokens of it.
        length: of a sequence; 512 by default, or as many positions as the model has.
        pattern: regular expression of the tensors to take as lower MLP matrices; found by structure without.
        keep: keep what is downloaded from the hub; by default weights go once they are measured.
        workers: checkpoints at a time.
        engine: "loky" (processes on this machine) or "ray".
        address: of a Ray cluster; a local one is started without.
        retry: also do again what failed before.
        overwrite: replace the run in the folder instead of going on with it.
        report: told of progress.

    Returns:
        The scan: `frame()` is its table, `checkpoints()` how each one fared, `draw()` the picture.
    """
    names = [n.strip() for n in gauges.split(",") if n.strip()] if isinstance(gauges, str) else list(gauges)
    chosen = get(names)
    _check(names, tokens, length, pattern, workers, engine)
    if pattern is not None and not any(g.part == "mlp_in" for g in chosen if g.on == "weight"):
        raise ValueError(
            f"the pattern {pattern!r} names lower MLP matrices, and no gauge of those is asked for: {', '.join(names)}"
        )
    checkpoints = series(os.fspath(source), revisions)
    request = Request(tuple(names), pattern, data, tokens, length, keep)
    config: dict[str, Any] = {"model": os.fspath(source).rstrip("/"), "gauges": names, "pattern": pattern}
    if any(g.on != "weight" for g in chosen):
        config |= {"data": _named(data), "tokens": tokens, "length": length}
    path = Path(run) if run is not None else Path(tempfile.mkdtemp(prefix="joma-scan-")) / "run"
    result = Scan(path, temporary=run is None)
    result.asked = [c.name for c in checkpoints]
    if not overwrite and (path / "run.json").exists():
        writer = RunWriter.resume(path, config)
    else:
        axes = {g: names for g, names in axes_of(chosen).items() if g != "phase"}
        packages = ("joma", "torch", "transformers", "huggingface_hub")
        writer = RunWriter.create(
            path, kind="scan", config=config, axes=axes, packages=packages, overwrite=overwrite
        )  # fmt: skip
    with writer:
        known = result.status()
        left = [c for c in checkpoints if c.name not in known or (retry and known[c.name] != "ok")]
        done, total = [len(checkpoints) - len(left)], len(checkpoints)

        def say(what: str) -> None:
            report(done[0], total, what)

        say("")
        for row in _rows(left, request, workers, engine, address, say):
            _write(writer, row)
            forget(row.checkpoint, request)
            done[0] += 1
            say(f"{row.checkpoint.name} {row.status}")
        if left:
            writer.note(checkpoints=result.asked)
        bad = sum(status != "ok" for name, status in result.status().items() if name in result.asked)
        writer.finish("done", f"{bad} of {len(checkpoints)} checkpoints failed" if bad else None)
    return result


def _check(
    names: list[str], tokens: int, length: int | None, pattern: str | None, workers: int, engine: str
) -> None:  # fmt: skip
    if not names:
        raise ValueError(f"no gauges to measure; give some, for example {', '.join(DEFAULT_GAUGES)}")
    if tokens < 1:
        raise ValueError(f"tokens is {tokens}: at least 1 is needed")
    if length is not None and length < 2:
        raise ValueError(f"length is {length}: attention needs at least 2 tokens")
    if workers < 1:
        raise ValueError(f"at least one worker is needed, got {workers}")
    if engine not in ENGINES:
        raise ValueError(f"unknown engine {engine!r}: {' or '.join(ENGINES)}")
    if engine == "ray" and importlib.util.find_spec("ray") is None:
        raise ValueError("engine 'ray' needs Ray: pip install 'joma[ray]'")
    if pattern is not None:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"the pattern {pattern!r} is no regular expression: {error}") from None


def _named(data: Any) -> str:
    """A corpus by its name or path, token ids by their hash."""
    if isinstance(data, (str, os.PathLike)):
        return os.fspath(data)
    import numpy as np

    return f"token ids {hashlib.sha256(np.ascontiguousarray(data).tobytes()).hexdigest()[:16]}"


def _rows(
    checkpoints: list[Checkpoint], request: Request, workers: int, engine: str, address: str | None,
    say: Callable[[str], None],
) -> Iterator[Row]:  # fmt: skip
    """Rows as they are ready."""
    if not checkpoints:
        return
    if engine == "loky" and workers == 1:
        for checkpoint in checkpoints:
            say(checkpoint.name)

            def downloading(file: str, done: int, total: int, name: str = checkpoint.name) -> None:
                say(f"{name}: {file} {done / 1e6:,.0f} of {total / 1e6:,.0f} MB")

            yield measure(checkpoint, request, downloading)
        return
    say(f"{workers} at a time")
    if engine == "loky":
        yield from _processes(checkpoints, request, workers)
        return
    from joma._jobs.cluster import ray_backend

    with ray_backend(address):
        yield from _cluster(checkpoints, request, workers)


def _processes(checkpoints: list[Checkpoint], request: Request, workers: int) -> Iterator[Row]:
    """By processes of this machine; one that dies takes no more than its own checkpoint with it."""
    from concurrent.futures.process import BrokenProcessPool

    from joblib import Parallel, delayed

    left = {c.name: c for c in checkpoints}
    while left:
        tasks = [delayed(measure)(checkpoint, request) for checkpoint in left.values()]
        try:
            for row in Parallel(n_jobs=workers, return_as="generator_unordered", pre_dispatch="n_jobs")(tasks):
                del left[row.checkpoint.name]
                yield row
        except BrokenProcessPool:  # of one of those under way, and it is not told which: each alone
            for checkpoint in list(left.values())[:workers]:
                try:
                    (row,) = Parallel(n_jobs=2)([delayed(measure)(checkpoint, request)])
                except BrokenProcessPool as error:
                    row = _died(checkpoint, error)
                del left[checkpoint.name]
                yield row


def _cluster(checkpoints: list[Checkpoint], request: Request, workers: int) -> Iterator[Row]:
    """By Ray, whose backend gives no result before all are there: so many at a time, appended after each."""
    from joblib import Parallel, delayed
    from ray.exceptions import RayError

    start = 0
    while start < len(checkpoints):
        try:
            with Parallel(n_jobs=workers) as parallel:  # the same actors
                while batch := checkpoints[start : start + workers]:
                    yield from parallel([delayed(measure_there)(checkpoint, request) for checkpoint in batch])
                    start += len(batch)
        except RayError:
            for checkpoint in checkpoints[start : start + workers]:  # each alone; one job would run in this process
                try:
                    (row,) = Parallel(n_jobs=2)([delayed(measure_there)(checkpoint, request)])
                except RayError as error:
                    row = _died(checkpoint, error)
                start += 1
                yield row


def _died(checkpoint: Checkpoint, error: Exception) -> Row:
    why = str(error).strip().split("\n")[0][:160]
    return Row(checkpoint, "failed", f"the process that measured it died, for want of memory perhaps ({why})")


def _write(writer: RunWriter, row: Row) -> None:
    if row.found:
        new: dict[str, dict[str, Any]] = {"layers": row.layers, "heads": row.heads}
        facts = {key: {**writer.info.get(key, {}), **by_gauge} for key, by_gauge in new.items()}
        if any(writer.info.get(key) != fact for key, fact in facts.items()):
            writer.note(**facts)
    writer.write(
        row.checkpoint.step,
        {**row.found, _SERVICE: row.bytes_read},
        checkpoint=row.checkpoint.name,
        status=row.status,
        note=row.note or None,
        digest=row.digest or None,
    )


class Scan:
    """A scan, done or as far as it is; made by `joma.scan`, or of a run folder: ``Scan(path)``.

    Attributes:
        path: the run folder.
        asked: the checkpoints that this call asked for; None of a run that was opened.
    """

    asked: list[str] | None = None

    def __init__(self, path: str | os.PathLike[str], *, temporary: bool = False) -> None:
        self.path = Path(path)
        if temporary:
            weakref.finalize(self, shutil.rmtree, self.path.parent, ignore_errors=True)

    def _points(self) -> dict[str, dict[str, Any]]:
        """Checkpoint -> its last row of service, in the order of steps."""
        rows = [row for row in Run(self.path).rows() if row["gauge"] == _SERVICE]
        return {row["checkpoint"]: row for row in sorted(rows, key=lambda row: row["step"])}

    def status(self) -> dict[str, str]:
        """Checkpoint -> "ok", "partly" or "failed"."""
        return {name: row["status"] for name, row in self._points().items()}

    @property
    def failed(self) -> list[str]:
        """The checkpoints of which not everything could be measured."""
        return [name for name, status in self.status().items() if status != "ok"]

    def checkpoints(self) -> pd.DataFrame:
        """A line a checkpoint: step, checkpoint, status, same_as (those with identical weights), bytes_read, note."""
        import pandas as pd

        points = self._points()
        same = _same(points)
        rows = [
            {"step": row["step"], "checkpoint": name, "status": row["status"], "same_as": same.get(name, ""),
             "bytes_read": int(row["value"]), "digest": row["digest"] or "", "note": row["note"] or ""}
            for name, row in points.items()
        ]  # fmt: skip
        return pd.DataFrame(rows)

    def frame(self) -> pd.DataFrame:
        """The table of the run in the order of steps: step, checkpoint, layer, head, gauge, value, module, same_as."""
        table, same = Run(self.path).frame(), _same(self._points())
        table = table[table.gauge != _SERVICE]
        table = table.assign(same_as=[same.get(name, "") for name in table.checkpoint])
        axes = [axis for axis in ("layer", "head") if axis in table]
        table = table.drop_duplicates(["step", "checkpoint", "gauge", *axes], keep="last")  # measured twice, by a retry
        columns = ["step", "checkpoint", *axes, "gauge", "value", "module", "same_as"]
        return table.sort_values("step", kind="stable").reindex(columns=columns).reset_index(drop=True)

    def draw(self) -> Chart:
        """One panel a gauge, one line a layer coloured by depth, steps on a log axis."""
        from joma._figures import watch

        return watch.draw(Run(self.path))

    def __repr__(self) -> str:
        status = list(self.status().values())
        return f"Scan({str(self.path)!r}: {len(status)} checkpoints, {sum(s != 'ok' for s in status)} failed)"

    def _repr_html_(self) -> str:
        return self.checkpoints().drop(columns="digest").to_html(index=False)


def _same(points: dict[str, dict[str, Any]]) -> dict[str, str]:
    """Checkpoint -> the others of which exactly the same was read."""
    groups: dict[str, list[str]] = {}
    for name, row in points.items():
        if row["digest"]:
            groups.setdefault(row["digest"], []).append(name)
    return {
        name: ", ".join(n for n in names if n != name) for names in groups.values() if len(names) > 1 for name in names
    }
