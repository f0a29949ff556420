"""`joma.scan`: gauges over a series of checkpoints, a row appended as soon as a checkpoint is measured."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tempfile
import weakref
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from joma._checkpoints.audit.copies import same_weights, settled
from joma._checkpoints.budget import announced, parse_bytes
from joma._checkpoints.checkpoints import Checkpoint, find_checkpoints
from joma._checkpoints.measure import Request, Row, forget, measure_checkpoint
from joma._checkpoints.numbering import place_for
from joma._jobs import Job, JobEnd, Progress, check_engine, open_engine, run_jobs
from joma._jobs.machine import threads
from joma._measure.gauges.kinds import CHANGE, WEIGHT
from joma._measure.gauges.registry import get, names_of
from joma._runs import Run, RunWriter
from joma._runs.names import harmless

if TYPE_CHECKING:
    import pandas as pd

    from joma._show.plots import Chart

DEFAULT_GAUGES = ("stable_rank",)
ScanProgress = Callable[[int, int, str], None]  # checkpoints done, in all, what is being done
_SERVICE = "bytes_read"  # the one number that every checkpoint has
_PROBLEMS = "problems"  # the column with the reasons of gauges that could not be measured, as JSON


def scan(
    source: str | os.PathLike[str],
    run: str | os.PathLike[str] | None = None,
    *,
    revisions: str | Sequence[str] | None = None,
    gauges: str | Sequence[str] = DEFAULT_GAUGES,
    data: Any = "pydoc",
    tokens: int = 20_000,
    length: int | None = None,
    mlp: str | None = None,
    tokenizer: str | os.PathLike[str] | None = None,
    base: str | os.PathLike[str] | None = None,
    keep: bool = False,
    budget: str | int | None = None,
    workers: int = 1,
    engine: str = "processes",
    address: str | None = None,
    retry: bool = False,
    overwrite: bool = False,
    report: ScanProgress | None = None,
) -> Scan:
    """Measure gauges on every checkpoint of a series; the same call again goes on where it stopped.

    Gauges of weights and charges read the tensors they need and nothing else. Attention gauges and ``coherence`` load
    the model and run it on a fixed sample of tokens. A checkpoint that cannot be read has a row that says why, and the
    others go on; so has a gauge that cannot be measured on it.

    Arguments:
        source: a folder of checkpoints (``step-*/``, ``checkpoint-*/``, or files), one model, a run of ``joma train``,
            or the id of a model on the Hugging Face hub.
        run: the run folder to write; without one, rows are kept for `Scan.frame` only. If it holds a
            scan with another config (other gauges, another model), this one goes to ``run``-2,
            ``run``-3, …, and a line says so.
        revisions: which of them: "step0,step1000", "1000..5000", "0..5000:500", "pythia", "all", "log", "log:20", or a
            list of names. All of a folder by default, "main" of a model on the hub.
        gauges: names as in `joma.watch`: "stable_rank", "stable_rank.qk", "entropy", …; also with commas between them.
        data: the sample for attention gauges: a corpus as for ``joma train``, or token ids.
        tokens: how many tokens of it.
        length: of a sequence; 512 by default, or as many positions as the model has.
        mlp: regular expression of the tensors to take as lower MLP matrices; found by structure without.
        tokenizer: for attention gauges on a corpus: a folder or an id of the hub; the model's own by default.
        base: the model that LoRA adapters add to: a folder or an id of the hub.
        keep: keep what is downloaded from the hub; by default weights go once they are measured.
        budget: bytes that may be transferred from the hub, as "20GB": more is refused before it begins. Each
            checkpoint has an equal share of it.
        workers: checkpoints at a time.
        engine: "processes" (of this machine; one worker is this process itself) or "ray".
        address: of a Ray cluster; a local one is started without.
        retry: also do again what failed before.
        overwrite: replace the run in the folder instead of going on with it.
        report: called with the progress: checkpoints done, in all, and what is being done.

    Returns:
        The scan: `frame()` is its table, `checkpoints()` how each one fared, `draw()` the picture.
    """
    names = names_of(gauges)
    chosen = get(names)
    _check(names, tokens, length, mlp, workers)
    if in_training := [g.name for g in chosen if g.needs_steps]:
        raise ValueError(
            f"{in_training[0]} is measured while a model trains (joma.watch), not on checkpoints"
        )
    engine = check_engine(engine, address)
    if mlp is not None and not any(
        g.part == "mlp_in" for g in chosen if g.kind in (WEIGHT, CHANGE)
    ):
        raise ValueError(
            f"mlp={mlp!r} names lower MLP matrices, and no gauge of those is asked for: {', '.join(names)}"
        )
    limit = None if budget is None else parse_bytes(budget)
    checkpoints = find_checkpoints(os.fspath(source), revisions)
    request = Request(
        tuple(names), mlp, data, tokens, length, keep, None if tokenizer is None else os.fspath(tokenizer),
        None if base is None else os.fspath(base),
    )  # fmt: skip
    model = harmless(os.fspath(source).rstrip("/"))
    config: dict[str, Any] = {"model": model, "gauges": names, "mlp": mlp, "base": request.base}
    if any(g.runs_model for g in chosen):
        config |= {
            "data": _named(data),
            "tokens": tokens,
            "length": length,
            "tokenizer": request.tokenizer,
        }
    if run is not None:
        path = Path(run) if overwrite else place_for(Path(run), "scan", config)
    else:
        path = Path(tempfile.mkdtemp(prefix="joma-scan-")) / "run"
    result = Scan(path, temporary=run is None)
    result.asked = [c.name for c in checkpoints]
    if not overwrite and (path / "run.json").exists():
        writer = RunWriter.resume(path, config)
    else:
        axes = {g.name: g.axes for g in chosen}
        packages = ("joma", "torch", "transformers", "huggingface_hub")
        writer = RunWriter.create(
            path, kind="scan", config=config, axes=axes, packages=packages, overwrite=overwrite
        )  # fmt: skip
    with writer:
        before = predecessors(checkpoints) if any(g.kind is CHANGE for g in chosen) else {}
        known = result._points()
        left = [
            c for c in checkpoints if not _is_done(known.get(c.name), before.get(c.name), retry)
        ]
        for checkpoint in set(checkpoints) - set(
            left
        ):  # a kill may have come between its row and this
            forget(checkpoint, request)
        done, total = [len(checkpoints) - len(left)], len(checkpoints)

        def say(what: str) -> None:
            if report is not None:
                report(done[0], total, what)

        say("")
        request = announced(left, request, limit, say)
        with closing(_rows(left, before, request, workers, engine, address, say)) as rows:
            for row in rows:
                _write(writer, row, changes=bool(before))
                for checkpoint in filter(None, (row.checkpoint, before.get(row.checkpoint.name))):
                    forget(checkpoint, request)
                done[0] += 1
                say(f"{row.checkpoint.name} {row.status}")
        if left:
            writer.note(checkpoints=result.asked)
        found = [status for name, status in result.status().items() if name in result.asked]
        words = [(found.count("failed"), "failed"), (found.count("partly"), "measured in part")]
        said = ", ".join(f"{count} {what}" for count, what in words if count)
        writer.finish("done", f"of {len(checkpoints)} checkpoints {said}" if said else None)
    return result


def predecessors(checkpoints: Sequence[Checkpoint]) -> dict[str, Checkpoint | None]:
    """Checkpoint -> the one before it by steps, from which its change is measured; None of the first."""
    by_step = sorted(checkpoints, key=lambda c: c.step)
    return {
        c.name: next((b for b in reversed(by_step) if b.step < c.step), None) for c in checkpoints
    }


def _is_done(row: dict[str, Any] | None, before: Checkpoint | None, retry: bool) -> bool:
    """Whether what is known of a checkpoint is what is asked for: its change may be that from another one."""
    if row is None or (retry and row["status"] != "ok"):
        return False
    return row.get("since") == (None if before is None else before.name)


def _check(
    names: list[str], tokens: int, length: int | None, mlp: str | None, workers: int
) -> None:
    if not names:
        raise ValueError(
            f"no gauges to measure; give some, for example {', '.join(DEFAULT_GAUGES)}"
        )
    if tokens < 1:
        raise ValueError(f"tokens is {tokens}: at least 1 is needed")
    if length is not None and length < 2:
        raise ValueError(f"length is {length}: attention needs at least 2 tokens")
    if workers < 1:
        raise ValueError(f"at least one worker is needed, got {workers}")
    if mlp is not None:
        try:
            re.compile(mlp)
        except re.error as error:
            raise ValueError(f"mlp={mlp!r} is no regular expression: {error}") from None


def _named(data: Any) -> str:
    """A corpus by its name or path, token ids by their hash."""
    if isinstance(data, (str, os.PathLike)):
        return os.fspath(data)
    import numpy as np

    return f"token ids {hashlib.sha256(np.ascontiguousarray(data).tobytes()).hexdigest()[:16]}"


def _rows(
    checkpoints: list[Checkpoint], before: Mapping[str, Checkpoint | None], request: Request, workers: int,
    engine: str, address: str | None, say: Callable[[str], None],
) -> Generator[Row]:  # fmt: skip
    """Rows as they are ready. A worker that dies costs its checkpoint an attempt, and the others nothing."""
    if not checkpoints:
        return
    by_name = {checkpoint.name: checkpoint for checkpoint in checkpoints}
    jobs = [
        Job(name, partial(_measure_one, c, before.get(name), request, engine == "ray"))
        for name, c in by_name.items()
    ]
    options: dict[str, Any] = {
        "reuse": True,
        "threads": threads(workers),
        "preload": (__name__,),
        "inline": True,
    }
    with open_engine(engine, workers, address, **options) as opened:
        for end in run_jobs(jobs, opened, started=say, progress=lambda id, share, what: say(what)):
            checkpoint, earlier = by_name[end.id], before.get(end.id)
            since = earlier.name if earlier else ""
            yield Row(checkpoint, "failed", _died(end), since=since) if end.error else end.value


def _measure_one(
    checkpoint: Checkpoint,
    before: Checkpoint | None,
    request: Request,
    elsewhere: bool,
    progress: Progress,
) -> Row:
    """The row of a checkpoint; on another machine nobody else can delete what was downloaded for it."""

    def downloading(file: str, done: int, total: int) -> None:
        progress(
            done / max(total, 1),
            f"{checkpoint.name}: {file} {done / 1e6:,.0f} of {total / 1e6:,.0f} MB",
        )

    row = measure_checkpoint(checkpoint, request, downloading, before)
    for used in filter(None, (checkpoint, before) if elsewhere else ()):
        forget(used, request)
    return row


def _died(end: JobEnd) -> str:
    return f"the process that measured it died: {end.error}" if end.died else end.error


def _write(writer: RunWriter, row: Row, changes: bool) -> None:
    if row.measured:
        new: dict[str, dict[str, Any]] = {"layers": row.layers, "heads": row.heads}
        facts = {key: {**writer.info.get(key, {}), **by_gauge} for key, by_gauge in new.items()}
        if any(writer.info.get(key) != fact for key, fact in facts.items()):
            writer.note(**facts)
    if (
        row.checkpoint.repo is not None
    ):  # not in the row, which is the same to the bit whenever it is made
        writer.note(
            transferred={**writer.info.get("transferred", {}), row.checkpoint.name: row.transferred}
        )
    columns: dict[str, Any] = {}
    if changes:
        columns["since"] = row.since or None
    if row.problems:
        columns[_PROBLEMS] = json.dumps(row.problems, ensure_ascii=False)  # a column holds one text
    writer.write(
        row.checkpoint.step,
        {**row.measured, _SERVICE: row.bytes_read},
        checkpoint=row.checkpoint.name,
        status=row.status,
        note=row.note or None,
        digest=row.digest or None,
        **columns,
    )


def _problems(row: Mapping[str, Any]) -> dict[str, str]:
    """Return gauge -> why it could not be measured, from a row of the run."""
    text = row.get(_PROBLEMS)
    return json.loads(text) if text else {}


def _by_reason(problems: Mapping[str, str], gauges: Sequence[str]) -> list[str]:
    """Return a text per reason with the gauges that it concerns; if it concerns all, they are not named.

    >>> _by_reason({"a": "no heads", "b": "no heads"}, ["a", "b", "c"])
    ['a, b: no heads']
    >>> _by_reason({"a": "cut off", "b": "cut off"}, ["a", "b"])
    ['cut off']
    """
    concerned: dict[str, list[str]] = {}
    for gauge, reason in problems.items():
        concerned.setdefault(reason, []).append(gauge)
    texts = []
    for reason, names in concerned.items():
        is_for_all = set(names) == set(gauges)
        texts.append(reason if is_for_all else f"{', '.join(names)}: {reason}")
    return texts


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
        """One row per checkpoint.

        Columns: step, checkpoint, status, same_as (equal weights), bytes_read, transferred, digest, note,
        and problems: gauge -> why it could not be measured there, which the note has in words.
        """
        import pandas as pd

        points, info = self._points(), Run(self.path).info
        transferred, same = info.get("transferred", {}), same_weights(points)
        rows = [
            {"step": row["step"], "checkpoint": name, "status": row["status"], "same_as": same.get(name, ""),
             "bytes_read": int(row["value"]), "transferred": transferred.get(name, 0),
             "digest": row["digest"] or "", "note": "; ".join(_texts(row, info)), "problems": _problems(row)}
            for name, row in points.items()
        ]  # fmt: skip
        return pd.DataFrame(rows)

    def remarks(self) -> dict[str, list[str]]:
        """Return note -> the checkpoints that have it; so too the reasons of gauges without values."""
        info = Run(self.path).info
        remarks: dict[str, list[str]] = {}
        for name, row in self._points().items():
            for text in _texts(row, info):
                remarks.setdefault(text, []).append(name)
        return remarks

    def frame(self) -> pd.DataFrame:
        """The table of the run in the order of steps: step, checkpoint, layer, head, gauge, value, module, same_as.

        With gauges of change also since: the checkpoint that they are measured from.
        """
        table, same = Run(self.path).frame(), same_weights(self._points())
        table = settled(table[table.gauge != _SERVICE])
        table = table.assign(same_as=[same.get(name, "") for name in table.checkpoint])
        axes = [axis for axis in ("layer", "head") if axis in table]
        since = ["since"] if "since" in table else []
        columns = ["step", "checkpoint", *since, *axes, "gauge", "value", "module", "same_as"]
        return (
            table.sort_values("step", kind="stable").reindex(columns=columns).reset_index(drop=True)
        )

    def draw(self) -> Chart:
        """One panel per gauge, one line per layer coloured by depth, steps on a log axis."""
        from joma._show.plots import watch

        return watch.draw(Run(self.path))

    def __repr__(self) -> str:
        status = list(self.status().values())
        return f"Scan({str(self.path)!r}: {len(status)} checkpoints, {sum(s != 'ok' for s in status)} failed)"

    def _repr_html_(self) -> str:
        return self.checkpoints().drop(columns=["digest", "problems"]).to_html(index=False)


def _texts(row: Mapping[str, Any], info: Mapping[str, Any]) -> list[str]:
    """Return the note of a checkpoint and the reasons of gauges that could not be measured."""
    texts = [row["note"]] if row["note"] else []
    return texts + _by_reason(_problems(row), info["config"].get("gauges", ()))
