"""The row of one checkpoint: its values by gauge, and why some gauges have none.

A gauge that cannot be measured costs the others nothing: the reason is in `Row.problems`.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from joma._checkpoints.checkpoints import Checkpoint
from joma._checkpoints.hub import DownloadProgress
from joma._checkpoints.lora import with_base
from joma._checkpoints.plan import NoMatrices, Plan, Planned, plan
from joma._checkpoints.reading import BadCheckpoint
from joma._checkpoints.revision import Revision
from joma._checkpoints.tensors import Tensors, View
from joma._measure.gauges.kinds import CHANGE, CHARGE, WEIGHT
from joma._measure.gauges.rank import TopSingular, top_singular
from joma._measure.gauges.registry import Gauge, get
from joma._runs.names import harmless


@dataclass(frozen=True)
class Request:
    """What is measured on every checkpoint."""

    gauges: tuple[str, ...]
    mlp: str | None = None
    data: Any = "pydoc"
    tokens: int = 20_000
    length: int | None = None
    keep: bool = False
    tokenizer: str | None = None
    base: str | None = None
    limit: int | None = None  # bytes that may be transferred of one checkpoint

    @property
    def ranges(self) -> bool:
        """Whether parts of files on the hub will do."""
        return not self.keep and not any(gauge.runs_model for gauge in get(self.gauges))


@dataclass
class Row:
    """What was measured on one checkpoint."""

    checkpoint: Checkpoint
    status: str = "ok"  # "partly" if some gauges could not be measured, "failed" if none
    note: str = ""
    problems: dict[str, str] = field(default_factory=dict)  # gauge -> why it could not be measured
    digest: str = ""
    bytes_read: int = 0
    transferred: int = 0  # bytes from the hub
    measured: dict[str, Any] = field(default_factory=dict)  # gauge -> (layers,) or (layers, heads)
    layers: dict[str, list[str]] = field(default_factory=dict)  # gauge -> names of its layers
    heads: dict[str, list[int]] = field(
        default_factory=dict
    )  # gauge -> heads of each layer, where there are heads
    not_numbers: bool = (
        False  # whether something on the sample, or in the checkpoint before, is NaN
    )
    since: str = ""  # the checkpoint that changes are measured from

    def report_problem(self, gauges: Iterable[Gauge], error: Exception | str) -> None:
        """Record why these gauges could not be measured; the first reason of a gauge stays."""
        reason = harmless(error if isinstance(error, str) else _message(error))
        for gauge in gauges:
            self.problems.setdefault(gauge.name, reason)


def measure_checkpoint(
    checkpoint: Checkpoint,
    request: Request,
    report: DownloadProgress | None = None,
    before: Checkpoint | None = None,
) -> Row:
    """All gauges on one checkpoint; errors are in the row. What it downloaded stays until `forget`.

    ``before``: the one that its changes are measured from; None of the first.
    """
    row, notes = (
        Row(checkpoint, since=before.name if before else ""),
        [checkpoint.note] * bool(checkpoint.note),
    )
    revision = checkpoint.revision(report, request.keep, request.limit)
    try:
        gauges = get(request.gauges)
        tensors = with_base(
            checkpoint_tensors(checkpoint, revision, ranges=request.ranges), request.base
        )
        weights = [gauge for gauge in gauges if gauge.kind in (WEIGHT, CHANGE)]
        charges = [gauge for gauge in gauges if gauge.kind is CHARGE]
        in_model = [gauge for gauge in gauges if gauge.runs_model]
        earlier = Earlier(before, request, revision)
        kinds = [
            (weights, partial(_weights, row, tensors, weights, earlier, request.mlp)),
            (charges, partial(_charges, row, tensors, charges)),
            (in_model, partial(_model, row, tensors, revision, in_model, request)),
        ]
        for concerned, measure_kind in kinds:
            if not concerned:
                continue
            try:
                notes += measure_kind()
            except Exception as error:  # the other kinds of gauges may work all the same
                missing = [gauge for gauge in concerned if gauge.name not in row.measured]
                row.report_problem(missing, error)
        if tensors.not_finite:
            notes.append(f"NaN or infinite: {_some(tensors.not_finite)}")
        if row.problems or tensors.not_finite or row.not_numbers:
            row.status = "partly" if row.measured else "failed"
        row.bytes_read += tensors.bytes_read
        notes += tensors.notes
    except Exception as error:
        row.status = "failed"
        notes.append(_message(error))
    finally:
        if revision is not None:
            row.transferred = revision.meter.spent
            revision.close()
    row.note = harmless("; ".join(dict.fromkeys(notes)))
    row.layers = {gauge: [harmless(name) for name in names] for gauge, names in row.layers.items()}
    return row


def forget(checkpoint: Checkpoint, request: Request) -> None:
    """Delete what was downloaded of a checkpoint, if it is not to be kept."""
    if not request.keep and (revision := checkpoint.revision()) is not None:
        revision.forget()


def checkpoint_tensors(
    checkpoint: Checkpoint, revision: Revision | None, *, ranges: bool = False
) -> Tensors:
    """The tensors of a checkpoint, wherever it is; ``ranges``: read parts of files on the hub, download none."""
    if revision is not None:
        return revision.tensors(ranges=ranges)
    if not Path(str(checkpoint.path)).exists():
        raise BadCheckpoint(f"there is no checkpoint {checkpoint.name} at {checkpoint.path}")
    return checkpoint.open()


_plans: dict[tuple[Any, ...], Plan] = {}


def planned(tensors: Tensors, parts: list[str], mlp: str | None) -> Plan:
    """The plan of a checkpoint; the checkpoints of a series share it."""
    key = (json.dumps(tensors.config, sort_keys=True), tuple(tensors.names), tuple(parts), mlp)
    if key not in _plans or not _fits(_plans[key], tensors):  # equal names may have other shapes
        new = plan(tensors, parts, mlp)
        for old in list(_plans)[:-1]:  # two are kept: that of changes may be another
            del _plans[old]
        _plans[key] = new
    return _plans[key]


def _fits(matrices_by_part: Plan, tensors: Tensors) -> bool:
    every = [matrix for matrices in matrices_by_part.values() for matrix in matrices]
    return all(p.tensor in t and t.entry(p.tensor).shape == p.shape for m in every
               for t in [m.source(tensors)] for p in m.pieces)  # fmt: skip


def views(tensors: Tensors, matrices_by_part: Plan) -> list[View]:
    """What will be read of the tensors."""
    every = (matrix for matrices in matrices_by_part.values() for matrix in matrices)
    return list(dict.fromkeys((p.tensor, p.part(tensors)) for matrix in every if not matrix.update
                              for p in matrix.pieces))  # fmt: skip


class Earlier:
    """The checkpoint before, of which changes need the same matrices; it is opened when they are asked for.

    Arguments:
        checkpoint: None if there is none.
        request: as for the checkpoint itself.
        revision: of the checkpoint itself, with which it shares the limit of what may be transferred.
    """

    def __init__(
        self, checkpoint: Checkpoint | None, request: Request, revision: Revision | None
    ) -> None:
        self.checkpoint, self._request, self._with = checkpoint, request, revision
        self._tensors: Tensors | None = None
        self._revision: Revision | None = None
        self._matrices: dict[tuple[str, str], Planned] = {}  # by part and name

    def open(self, parts: list[str]) -> None:
        """Find the matrices of these parts."""
        assert self.checkpoint is not None
        request, self._revision = self._request, self.checkpoint.revision(keep=self._request.keep)
        if self._revision is not None and self._with is not None:
            self._revision.meter = self._with.meter
        with self._named():
            opened = checkpoint_tensors(self.checkpoint, self._revision, ranges=not request.keep)
            self._tensors = with_base(opened, request.base)
            by_part = planned(self._tensors, parts, request.mlp)
            self._tensors.expect(views(self._tensors, by_part))
            self._matrices = {
                (part, m.name): m for part, matrices in by_part.items() for m in matrices
            }

    def read(self, part: str, matrix: Planned) -> list[Tensor]:
        """A matrix as it was then."""
        assert self._tensors is not None
        with self._named():
            if (part, matrix.name) not in self._matrices:
                raise BadCheckpoint(f"it has no {matrix.name}")
            return self._matrices[part, matrix.name].read(self._tensors)

    def close(self, row: Row) -> list[str]:
        """Let go of it, and say in the row of the other what was read."""
        if self._revision is not None:
            self._revision.close()
        if self._tensors is None or self.checkpoint is None:
            return []
        row.bytes_read += self._tensors.bytes_read
        row.not_numbers |= bool(bad := self._tensors.not_finite)
        return [f"NaN or infinite in {self.checkpoint.name}: {_some(bad)}"] if bad else []

    @contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            assert self.checkpoint is not None
            raise _NoEarlier(
                f"the checkpoint before, {self.checkpoint.name}, cannot be read: {_message(error)}"
            ) from error


class _NoEarlier(BadCheckpoint):
    """Changes cannot be measured, though all else can."""


def _weights(
    row: Row, tensors: Tensors, gauges: list[Gauge], earlier: Earlier, mlp: str | None
) -> list[str]:
    """Measure weight gauges, and changes since the checkpoint before, if that can be read."""
    changes = [gauge for gauge in gauges if gauge.kind is CHANGE]
    notes: list[str] = []
    if changes and earlier.checkpoint is None:
        gauges = [gauge for gauge in gauges if gauge.kind is WEIGHT]
        names = ", ".join(gauge.name for gauge in changes)
        notes.append(f"{names}: there is no checkpoint before it")
    elif changes:
        try:
            earlier.open(list(dict.fromkeys(gauge.part for gauge in changes)))
        except _NoEarlier as error:
            row.report_problem(changes, error)
            gauges = [gauge for gauge in gauges if gauge.kind is WEIGHT]
    try:
        notes = _matrices(row, tensors, gauges, earlier, mlp) + notes
    finally:
        last_notes = earlier.close(row)
    return notes + last_notes


def _matrices(
    row: Row, tensors: Tensors, gauges: list[Gauge], earlier: Earlier, mlp: str | None
) -> list[str]:
    """Measure gauges on matrices, part by part; a missing or damaged part costs the others nothing."""
    if not gauges:
        return []
    parts = list(dict.fromkeys(gauge.part for gauge in gauges))
    try:
        by_part = planned(tensors, parts, mlp)
    except NoMatrices as error:
        by_part = Plan()
        by_part.missing = error.missing
    # All parts at once: neighbours in a file become one request. If a file is missing or damaged, the
    # parts that are in it will report that.
    with suppress(BadCheckpoint):
        tensors.expect(views(tensors, by_part))
    notes: list[str] = []
    for part in parts:
        concerned = [gauge for gauge in gauges if gauge.part == part]
        if part in by_part.missing:
            row.report_problem(concerned, by_part.missing[part])
            continue
        try:
            notes += _part(row, tensors, part, by_part[part], concerned, earlier)
        except Exception as error:
            row.report_problem(concerned, error)
    if row.measured:
        row.digest = tensors.digest
    return notes


def _part(
    row: Row, tensors: Tensors, part: str, matrices: list[Planned], gauges: list[Gauge], earlier: Earlier
) -> list[str]:  # fmt: skip
    """Measure a part; without its changes if the matrices of the checkpoint before cannot be read."""
    try:
        return _layers(row, tensors, part, matrices, gauges, earlier)
    except _NoEarlier as error:
        row.report_problem((gauge for gauge in gauges if gauge.kind is CHANGE), error)
    weights = [gauge for gauge in gauges if gauge.kind is WEIGHT]
    return _layers(row, tensors, part, matrices, weights, earlier) if weights else []


def _layers(
    row: Row, tensors: Tensors, part: str, matrices: list[Planned], gauges: list[Gauge], earlier: Earlier
) -> list[str]:  # fmt: skip
    """Measure each matrix: read once and decomposed once, from a fixed start.

    So no row depends on another.
    """
    notes: list[str] = []
    heads = max(matrix.heads for matrix in matrices)
    # (layers, heads) each; None where nothing was measured
    table: dict[str, list[list[float | None]]] = {
        gauge.name: [[None] * heads for _ in matrices] for gauge in gauges
    }
    with torch.no_grad():
        for layer, matrix in enumerate(matrices):
            working = [gauge for gauge in gauges if gauge.name not in row.problems]
            for head, (measured, reasons) in enumerate(
                _one(row, matrix, part, tensors, working, earlier)
            ):
                notes += [f"{matrix.name}: {reason}" for reason in reasons]
                for name, value in measured.items():
                    table[name][layer][head] = value
    for gauge in gauges:
        if gauge.name in row.problems:
            continue
        by_layer = table[gauge.name]
        row.measured[gauge.name] = (
            by_layer if gauge.per_head else [by_head[0] for by_head in by_layer]
        )
        row.layers[gauge.name] = [matrix.name for matrix in matrices]
        if gauge.per_head:
            row.heads[gauge.name] = [matrix.heads for matrix in matrices]
    return notes


Values = tuple[dict[str, float | None], list[str]]  # by gauge, and why some are 0 or missing


def _one(
    row: Row, matrix: Planned, part: str, tensors: Tensors, gauges: list[Gauge], earlier: Earlier
) -> list[Values]:  # fmt: skip
    """Return the values by gauge of one matrix, or of one per head; nothing stays in memory."""
    weights = [gauge for gauge in gauges if gauge.kind is WEIGHT]
    changes = [gauge for gauge in gauges if gauge.kind is CHANGE]
    now = matrix.read(tensors)
    then = earlier.read(part, matrix) if changes else [None] * len(now)
    values: list[Values] = []
    for w, old in zip(now, then, strict=True):
        top = top_singular(w) if any(gauge.given == "top" for gauge in weights) else None
        measured = _by_gauge(row, matrix, weights, w, top)
        reasons = [top.reason] if top is not None and top.reason else []
        if old is not None and earlier.checkpoint is not None:
            changed, reason = _change(row, matrix, w, old, changes, earlier.checkpoint.name)
            measured |= changed
            reasons += [reason] if reason else []
        values.append((measured, reasons))
    return values


def _by_gauge(
    row: Row, matrix: Planned, gauges: list[Gauge], w: Tensor, top: TopSingular | None
) -> dict[str, float | None]:
    """Return the values by gauge on a matrix; one whose function raises, as a user's may, has a problem instead."""
    values: dict[str, float | None] = {}
    for gauge in gauges:
        try:
            values[gauge.name] = gauge.measure(w, top)
        except Exception as error:
            row.report_problem([gauge], f"on {matrix.name}: {_message(error)}")
    return values


def _change(
    row: Row, matrix: Planned, w: Tensor, old: Tensor, gauges: list[Gauge], since: str
) -> tuple[dict[str, float | None], str]:  # fmt: skip
    """Return, by gauge, what has become of a matrix, and why some values are missing."""
    if w.shape != old.shape:
        raise _NoEarlier(f"a matrix was {tuple(old.shape)} in {since}, and is {tuple(w.shape)}")
    size = float(torch.linalg.vector_norm(old, dtype=torch.float64))
    if size == 0:
        return dict.fromkeys(
            (g.name for g in gauges), None
        ), f"it was zero in {since}: no change is relative to that"
    change = (w - old) / size
    top = top_singular(change) if any(g.given == "top" for g in gauges) else None
    reason = (
        ""
        if top is None or not top.reason
        else top.reason
        if math.isnan(top.sigma)
        else f"unchanged since {since}"
    )
    return _by_gauge(row, matrix, gauges, change, top), reason


def _charges(row: Row, tensors: Tensors, gauges: list[Gauge]) -> list[str]:
    """Charge gauges; what only they need is imported here: most scans are of weights."""
    from joma._checkpoints.charges import measure_charges

    measured = measure_charges(tensors, gauges)
    row.measured |= measured.values
    row.layers |= measured.layers
    row.heads |= measured.heads
    for gauge in gauges:
        if gauge.name in measured.problems:
            row.report_problem([gauge], measured.problems[gauge.name])
    if measured.values:
        row.digest = tensors.digest
    return []


def _model(
    row: Row, tensors: Tensors, revision: Revision | None, gauges: list[Gauge], request: Request
) -> list[str]:
    """Attention and hidden-state gauges: the model is loaded and run on the sample."""
    from joma._checkpoints.sample import measure_on_sample  # with the whole of a watch

    names = [g.name for g in gauges]
    places = _tokenizers(row.checkpoint, tensors, revision, request)
    measured = measure_on_sample(
        tensors, places, names, request.data, request.tokens, request.length
    )
    for gauge in gauges:
        if gauge.name in measured.problems:
            row.report_problem([gauge], measured.problems[gauge.name])
    row.measured |= measured.values
    row.layers |= dict.fromkeys(measured.values, measured.layers)
    row.heads |= measured.heads
    row.digest = row.digest or tensors.digest
    row.not_numbers |= measured.not_numbers
    return measured.notes


def _tokenizers(
    checkpoint: Checkpoint, tensors: Tensors, revision: Revision | None, request: Request
) -> list[Any]:
    """Where a tokenizer may be; nowhere if none is needed."""
    if not isinstance(request.data, (str, os.PathLike)):
        return []
    if request.tokenizer is not None:
        return [request.tokenizer]
    if tensors.tokenizer is not None:
        return [tensors.tokenizer]
    if revision is not None:
        return [revision.folder()]
    path = Path(str(checkpoint.path))
    return [path.parent] if path.is_file() else [path, path.parent]


def _some(names: list[str], most: int = 3) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _message(error: Exception) -> str:
    text = str(error).strip() or type(error).__name__
    return (
        text
        if isinstance(error, (BadCheckpoint, ValueError))
        else f"{type(error).__name__}: {text}"
    )
