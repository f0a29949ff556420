"""`joma.scan`: gauges over a series of checkpoints, or over several models.

A row is appended to the run as soon as a checkpoint is measured, so that a killed scan loses at most
the checkpoints that were being measured.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
import weakref
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from joma._checkpoints.audit.copies import same_weights, settled
from joma._checkpoints.budget import announced
from joma._checkpoints.checkpoints import Checkpoint, Selection, Source, select_checkpoints
from joma._checkpoints.measure import forget, measure_checkpoint
from joma._checkpoints.numbering import place_for
from joma._checkpoints.options import optional_path
from joma._checkpoints.row import Row, ScanRequest
from joma._jobs import Job, JobEnd, Progress, check_engine, open_engine, run_jobs
from joma._jobs.machine import threads
from joma._measure.gauges.kinds import CHANGE, WEIGHT
from joma._measure.gauges.registry import Gauge, get, names_of
from joma._measure.gauges.registry import gauges as known_gauges
from joma._runs import Run, RunWriter
from joma._runs.names import harmless
from joma.models.parts import UPDATE

if TYPE_CHECKING:
    import pandas as pd

    from joma._show.plots import Chart

DEFAULT_GAUGES = ("stable_rank",)
# Called with: checkpoints done, checkpoints in all, what is being done.
ScanProgress = Callable[[int, int, str], None]
# The one number that every checkpoint has, also one that failed.
_SERVICE = "bytes_read"
# The column with the reasons of gauges that could not be measured, as JSON: a column holds one text.
_PROBLEMS = "problems"
# "change.all" stands for the change of every part of a block.
_ALL_PARTS = ".all"


def scan(
    source: Source | Sequence[Source],
    *,
    run: str | os.PathLike[str] | None = None,
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
    """Measure gauges on every checkpoint of a series, or compare several models by name.

    The same call again continues where it stopped. Gauges of weights and charges read the tensors
    that they need and nothing else. Attention gauges and ``coherence`` load the model and run it on a
    fixed sample of tokens. A checkpoint that cannot be read has a row with the reason, and the others
    are measured all the same. So does a gauge that cannot be measured.

    Arguments:
        source: a folder of checkpoints (``step-*/``, ``checkpoint-*/``, or files), one model, a run of
            ``joma train``, the id of a model on the Hugging Face hub, or a packaged model
            ("smollm2"). A list of models, or a folder of models whose names have no step, compares
            them.
        run: the run folder to write; without one, rows are kept for `Scan.frame` only. If it holds a
            scan with another config (other gauges, another model), this one goes to ``run``-2,
            ``run``-3, …, and a line names the folder.
        revisions: which checkpoints: "step0,step1000", "1000..5000", "0..5000:500", "pythia", "all",
            "log", "log:20", or a list of names. By default all of a folder, and "main" of a model on
            the hub. With several sources, one revision, which is taken of each.
        gauges: names as in `joma.watch`: "stable_rank", "stable_rank.qk", "entropy", …, also separated
            by commas. "change" is measured since the checkpoint before; in a comparison, since the
            first model. "change.all" stands for all parts of a block.
        data: the sample for attention gauges: a corpus as for ``joma train``, an array of token ids,
            or a ``.npy`` or ``.txt`` file of token ids.
        tokens: how many tokens of it.
        length: tokens per window; 512 by default, or as many positions as the model has.
        mlp: regular expression of the tensors to take as lower MLP matrices; by default they are
            found by structure.
        tokenizer: for attention gauges on a corpus: a folder or an id on the hub; by default that of
            the model.
        base: the model that LoRA adapters add to: a folder or an id on the hub.
        keep: keep what is downloaded from the hub; by default weights are deleted once measured.
        budget: bytes that may be transferred from the hub, as "20GB": more is refused before it
            begins. Each checkpoint has an equal share of it.
        workers: checkpoints at a time.
        engine: "processes" (of this machine; one worker is this process itself) or "ray".
        address: address of a Ray cluster, "ray://HOST:PORT"; by default a local one is started.
        retry: repeat what failed before.
        overwrite: replace the run in the folder instead of continuing it.
        report: called with the progress: checkpoints done, in all, and what is being done.

    Returns:
        The scan: `frame()` is its table, `checkpoints()` the status of each checkpoint, `draw()` the
        picture.
    """
    names = _expand_parts(names_of(gauges))
    selected_gauges = get(names)
    _check_gauges(names, selected_gauges, mlp)
    if workers < 1:
        raise ValueError(f"at least one worker is needed, got {workers}")
    engine = check_engine(engine, address)
    request = ScanRequest(
        gauges=tuple(names),
        mlp=mlp,
        data=data,
        tokens=tokens,
        length=length,
        tokenizer=optional_path(tokenizer),
        base=optional_path(base),
        keep=keep,
        budget=budget,
    )
    selection = select_checkpoints(source, revisions)
    has_changes = any(gauge.kind is CHANGE for gauge in selected_gauges)
    task = _ScanTask(selection, request, selected_gauges, has_changes)
    config = _config_of(source, request, selected_gauges)
    is_temporary = run is None
    if run is None:
        path = Path(tempfile.mkdtemp(prefix="joma-scan-")) / "run"
    elif overwrite:
        path = Path(run)
    else:
        path = place_for(Path(run), "scan", config)
    result = Scan(path, temporary=is_temporary)
    result.asked = selection.names
    with _open_writer(path, config, selected_gauges, overwrite) as writer:
        if selection.is_comparison:
            writer.note(models=selection.names)
        task.run(writer, result, _Engine(engine, workers, address), retry, report)
        writer.finish("done", _summary(result))
    return result


def _expand_parts(names: list[str]) -> list[str]:
    """Return the names with "change.all" replaced by "change.mlp_in", "change.mlp_out", …"""
    expanded: list[str] = []
    for name in names:
        gauge = name.removesuffix(_ALL_PARTS)
        if gauge == name or gauge not in known_gauges():
            expanded.append(name)
            continue
        parts = [part for part in get([gauge])[0].kind.parts if not part.endswith(UPDATE)]
        if not parts:
            raise ValueError(f"the gauge {gauge!r} has no parts: ask for {gauge!r} itself")
        expanded += [f"{gauge}.{part}" for part in parts]
    return expanded


def _check_gauges(names: list[str], selected: Sequence[Gauge], mlp: str | None) -> None:
    if not names:
        raise ValueError(
            f"no gauges to measure; give some, for example {', '.join(DEFAULT_GAUGES)}"
        )
    in_training = [gauge.name for gauge in selected if gauge.needs_steps]
    if in_training:
        raise ValueError(
            f"{in_training[0]} is measured while a model trains (joma.watch), not on checkpoints"
        )
    if mlp is None:
        return
    try:
        re.compile(mlp)
    except re.error as error:
        raise ValueError(f"mlp={mlp!r} is no regular expression: {error}") from None
    on_matrices = [gauge for gauge in selected if gauge.kind in (WEIGHT, CHANGE)]
    if not any(gauge.part == "mlp_in" for gauge in on_matrices):
        raise ValueError(
            f"mlp={mlp!r} names lower MLP matrices, and no gauge of those is asked for: "
            f"{', '.join(names)}"
        )


def _config_of(
    source: Source | Sequence[Source], request: ScanRequest, selected: Sequence[Gauge]
) -> dict[str, Any]:
    """Return what the numbers of a scan depend on; a run holds the numbers of one config."""
    if isinstance(source, (str, os.PathLike)):
        sources = [os.fspath(source)]
    else:
        sources = [os.fspath(one) for one in source]
    sources = [harmless(one.rstrip("/")) for one in sources]
    config: dict[str, Any] = {
        "model": ", ".join(sources),
        "gauges": list(request.gauges),
        "mlp": request.mlp,
        "base": request.base,
    }
    if any(gauge.runs_model for gauge in selected):
        config["data"] = request.data_name()
        config["tokens"] = request.tokens
        config["length"] = request.length
        config["tokenizer"] = request.tokenizer
    return config


def _open_writer(
    path: Path, config: dict[str, Any], selected: Sequence[Gauge], overwrite: bool
) -> RunWriter:
    if not overwrite and (path / "run.json").exists():
        return RunWriter.resume(path, config)
    return RunWriter.create(
        path,
        kind="scan",
        config=config,
        axes={gauge.name: gauge.axes for gauge in selected},
        packages=("joma", "torch", "transformers", "huggingface_hub"),
        overwrite=overwrite,
    )


def _summary(result: Scan) -> str | None:
    """Return how many checkpoints could not be measured in full; None if all could."""
    names = result.asked or []
    statuses = [status for name, status in result.status().items() if name in names]
    words = []
    for status, text in (("failed", "failed"), ("partly", "measured in part")):
        if status in statuses:
            words.append(f"{statuses.count(status)} {text}")
    if not words:
        return None
    noun = "models" if result.is_comparison else "checkpoints"
    return f"of {len(names)} {noun} {', '.join(words)}"


class _Engine:
    """Where checkpoints are measured: in this process, in processes of this machine, or on Ray."""

    def __init__(self, name: str, workers: int, address: str | None) -> None:
        self.name = name
        self.workers = workers
        self.address = address

    def open(self) -> Any:
        return open_engine(
            self.name,
            self.workers,
            self.address,
            reuse=True,
            threads=threads(self.workers),
            preload=(__name__,),
            inline=True,
        )

    @property
    def is_elsewhere(self) -> bool:
        """True if the workers may be on other machines."""
        return self.name == "ray"


class _ScanTask:
    """The checkpoints of a scan that are not measured yet, and how to measure them."""

    def __init__(
        self,
        selection: Selection,
        request: ScanRequest,
        selected: Sequence[Gauge],
        has_changes: bool,
    ) -> None:
        self._checkpoints = selection.checkpoints
        self._has_changes = has_changes
        self._baselines = selection.baselines() if has_changes else {}
        self._request = request
        if selection.is_comparison:
            self._request = replace(request, is_comparison=True)

    def run(
        self,
        writer: RunWriter,
        result: Scan,
        engine: _Engine,
        retry: bool,
        report: ScanProgress | None,
    ) -> None:
        """Measure what is left, and append each row to the run as soon as it is there."""
        rows_by_name = result._points()
        left = []
        for checkpoint in self._checkpoints:
            if not self._is_done(rows_by_name.get(checkpoint.name), checkpoint.name, retry):
                left.append(checkpoint)
            else:
                # A kill may have come between its row and the deletion of its files.
                forget(checkpoint, self._request)
        done = len(self._checkpoints) - len(left)

        def say(text: str) -> None:
            if report is not None:
                report(done, len(self._checkpoints), text)

        say("")
        self._request = announced(left, self._request, self._request.max_bytes, say)
        with closing(self._rows(left, engine, say)) as rows:
            for row in rows:
                _write(writer, row, self._has_changes, self._request.is_comparison)
                self._forget(row.checkpoint)
                done += 1
                say(f"{row.checkpoint.name} {row.status}")
        if left:
            writer.note(checkpoints=result.asked)

    def _is_done(self, row: dict[str, Any] | None, name: str, retry: bool) -> bool:
        """True if the run has the row that is asked for; its change may be since another one."""
        if row is None or (retry and row["status"] != "ok"):
            return False
        baseline = self._baselines.get(name)
        return row.get("since") == (None if baseline is None else baseline.name)

    def _forget(self, checkpoint: Checkpoint) -> None:
        forget(checkpoint, self._request)
        baseline = self._baselines.get(checkpoint.name)
        if baseline is not None:
            forget(baseline, self._request)

    def _rows(
        self, checkpoints: list[Checkpoint], engine: _Engine, say: Callable[[str], None]
    ) -> Generator[Row]:
        """Yield rows as they are ready; a worker that dies costs its own checkpoint only."""
        if not checkpoints:
            return
        by_name = {checkpoint.name: checkpoint for checkpoint in checkpoints}
        jobs = []
        for name, checkpoint in by_name.items():
            baseline = self._baselines.get(name)
            arguments = (checkpoint, baseline, self._request, engine.is_elsewhere)
            jobs.append(Job(name, partial(_measure_one, *arguments)))
        with engine.open() as opened:
            ends = run_jobs(jobs, opened, started=say, progress=lambda id, share, text: say(text))
            for end in ends:
                if not end.error:
                    yield end.value
                    continue
                baseline = self._baselines.get(end.id)
                since = baseline.name if baseline else ""
                yield Row(by_name[end.id], "failed", _death(end), since=since)


def _measure_one(
    checkpoint: Checkpoint,
    before: Checkpoint | None,
    request: ScanRequest,
    elsewhere: bool,
    progress: Progress,
) -> Row:
    """Measure a checkpoint in a worker; on another machine only the worker can delete downloads."""

    def downloading(file: str, done: int, total: int) -> None:
        megabytes = f"{done / 1e6:,.0f} of {total / 1e6:,.0f} MB"
        progress(done / max(total, 1), f"{checkpoint.name}: {file} {megabytes}")

    row = measure_checkpoint(checkpoint, request, downloading, before)
    if elsewhere:
        forget(checkpoint, request)
        if before is not None:
            forget(before, request)
    return row


def _death(end: JobEnd) -> str:
    if end.died:
        return f"the process that measured it died: {end.error}"
    return end.error


def _write(writer: RunWriter, row: Row, has_changes: bool, is_comparison: bool = False) -> None:
    name = row.checkpoint.name
    if row.measured:
        facts: dict[str, Any] = {}
        if is_comparison:  # each model has layers of its own
            facts["modules"] = {**writer.info.get("modules", {}), name: row.layers}
        else:
            facts["layers"] = {**writer.info.get("layers", {}), **row.layers}
            facts["heads"] = {**writer.info.get("heads", {}), **row.heads}
        if any(writer.info.get(key) != fact for key, fact in facts.items()):
            writer.note(**facts)
    if row.checkpoint.repo is not None:
        # Not in the row, which is the same to the bit whenever it is made.
        writer.note(transferred={**writer.info.get("transferred", {}), name: row.transferred})
    columns: dict[str, Any] = {}
    if has_changes:
        columns["since"] = row.since or None
    if row.problems:
        columns[_PROBLEMS] = json.dumps(row.problems, ensure_ascii=False)
    writer.write(
        row.checkpoint.step,
        {**row.measured, _SERVICE: row.bytes_read},
        checkpoint=name,
        status=row.status,
        note=row.note or None,
        digest=row.digest or None,
        **columns,
    )


def _problems(row: Mapping[str, Any]) -> dict[str, str]:
    """Return gauge -> why it could not be measured, from a row of the run."""
    text = row.get(_PROBLEMS)
    if not text:
        return {}
    problems: dict[str, str] = json.loads(text)
    return problems


def _by_reason(problems: Mapping[str, str], gauges: Sequence[str]) -> list[str]:
    """Return one text per reason with the gauges that it concerns, unless it concerns all.

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
    """A scan, finished or not; made by `joma.scan`, or from a run folder: ``Scan(path)``.

    Attributes:
        path: the run folder.
        asked: the checkpoints that this call asked for; None for a run that was opened.
    """

    asked: list[str] | None = None

    def __init__(self, path: str | os.PathLike[str], *, temporary: bool = False) -> None:
        self.path = Path(path)
        if temporary:
            weakref.finalize(self, shutil.rmtree, self.path.parent, ignore_errors=True)

    @property
    def is_comparison(self) -> bool:
        """True if models are compared by name, False for the steps of one model."""
        return "models" in Run(self.path).info

    def _points(self) -> dict[str, dict[str, Any]]:
        """Return checkpoint -> its last service row, in the order of steps or of models."""
        run = Run(self.path)
        rows = [row for row in run.rows() if row["gauge"] == _SERVICE]
        places = {name: place for place, name in enumerate(run.info.get("models", ()))}
        rows.sort(key=lambda row: (places.get(row["checkpoint"], 0), row["step"]))
        return {row["checkpoint"]: row for row in rows}

    def status(self) -> dict[str, str]:
        """Return checkpoint -> "ok", "partly" or "failed"."""
        return {name: row["status"] for name, row in self._points().items()}

    @property
    def failed(self) -> list[str]:
        """The checkpoints on which not everything could be measured."""
        return [name for name, status in self.status().items() if status != "ok"]

    def checkpoints(self) -> pd.DataFrame:
        """Return one row per checkpoint or model.

        Columns: step (not in a comparison), checkpoint, status, same_as (equal weights), bytes_read,
        transferred, digest, note, and problems: gauge -> why it could not be measured there. The note
        has the problems in words.
        """
        import pandas as pd

        points = self._points()
        info = Run(self.path).info
        transferred = info.get("transferred", {})
        same = same_weights(points)
        rows = []
        for name, row in points.items():
            rows.append(
                {
                    "step": row["step"],
                    "checkpoint": name,
                    "status": row["status"],
                    "same_as": same.get(name, ""),
                    "bytes_read": int(row["value"]),
                    "transferred": transferred.get(name, 0),
                    "digest": row["digest"] or "",
                    "note": "; ".join(_texts(row, info)),
                    "problems": _problems(row),
                }
            )
        table = pd.DataFrame(rows)
        if self.is_comparison:
            table = table.drop(columns="step")
        return table

    def remarks(self) -> dict[str, list[str]]:
        """Return note -> the checkpoints that have it; also the reasons of gauges without values."""
        info = Run(self.path).info
        remarks: dict[str, list[str]] = {}
        for name, row in self._points().items():
            for text in _texts(row, info):
                remarks.setdefault(text, []).append(name)
        return remarks

    def frame(self) -> pd.DataFrame:
        """Return the table of the run: step, checkpoint, layer, head, gauge, value, module, same_as.

        Rows are in the order of steps. A comparison has no steps: its models are in the order in
        which they were given. With gauges of change, the column ``since`` names the checkpoint that
        they are measured from.
        """
        table = Run(self.path).frame()
        points = self._points()
        same = same_weights(points)
        table = settled(table[table.gauge != _SERVICE])
        table = table.assign(same_as=[same.get(name, "") for name in table.checkpoint])
        columns = ["step", "checkpoint", "since", "layer", "head", "gauge", "value", "module"]
        optional = ("since", "layer", "head")
        columns = [name for name in columns if name in table or name not in optional]
        if self.is_comparison:
            columns.remove("step")
            table = table.assign(module=self._modules(table))
            places = {name: place for place, name in enumerate(points)}
            table = table.sort_values(
                "checkpoint", key=lambda names: names.map(places), kind="stable"
            )
        else:
            table = table.sort_values("step", kind="stable")
        return table.reindex(columns=[*columns, "same_as"]).reset_index(drop=True)

    def _modules(self, table: pd.DataFrame) -> list[str]:
        """Return the name of the matrix or module of each row of a comparison."""
        if "layer" not in table:  # nothing was measured
            return [""] * len(table)
        modules = Run(self.path).info.get("modules", {})
        names = []
        for model, gauge, layer in zip(table.checkpoint, table.gauge, table.layer, strict=True):
            names.append(modules[model][gauge][layer])
        return names

    def draw(self) -> Chart:
        """Return the picture: one panel per gauge.

        A series has one line per layer, coloured by depth, over steps on a log axis. A comparison has
        one line and one colour per model, over the depth of the layers.
        """
        if self.is_comparison:
            from joma._show.plots import models

            return models.draw(self.frame(), Run(self.path))
        from joma._show.plots import watch

        return watch.draw(Run(self.path))

    def __repr__(self) -> str:
        statuses = list(self.status().values())
        failed_count = sum(status != "ok" for status in statuses)
        return f"Scan({str(self.path)!r}: {len(statuses)} checkpoints, {failed_count} failed)"

    def _repr_html_(self) -> str:
        return self.checkpoints().drop(columns=["digest", "problems"]).to_html(index=False)


def _texts(row: Mapping[str, Any], info: Mapping[str, Any]) -> list[str]:
    """Return the note of a checkpoint and the reasons of gauges that could not be measured."""
    texts = [row["note"]] if row["note"] else []
    return texts + _by_reason(_problems(row), info["config"].get("gauges", ()))
