"""Gauges on the matrices of a checkpoint, and on their change since another one.

Every matrix is read once and decomposed once, from a fixed start vector, and nothing of it stays in
memory. A row therefore depends on its own checkpoint (and baseline) only, on whichever worker.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from joma._checkpoints.checkpoints import Checkpoint
from joma._checkpoints.lora import with_base
from joma._checkpoints.plan import NoMatrices, Plan, StoredMatrix, plan
from joma._checkpoints.reading import BadCheckpoint
from joma._checkpoints.revision import Revision
from joma._checkpoints.row import Row, ScanRequest, error_message, list_first
from joma._checkpoints.tensors import Tensors
from joma._measure.gauges.kinds import CHANGE, WEIGHT
from joma._measure.gauges.rank import TopSingular, top_singular
from joma._measure.gauges.registry import Gauge

# A change needs two plans at a time: of the checkpoint and of its baseline, which may be another model.
_KEPT_PLANS = 2
_plans: dict[tuple[Any, ...], Plan] = {}


def planned(tensors: Tensors, parts: list[str], mlp: str | None) -> Plan:
    """Return the plan of a checkpoint; checkpoints with equal names and shapes share one."""
    key = (json.dumps(tensors.config, sort_keys=True), tuple(tensors.names()), tuple(parts), mlp)
    if key not in _plans or not _plans[key].fits(tensors):
        new_plan = plan(tensors, parts, mlp)
        for old_key in list(_plans)[: 1 - _KEPT_PLANS]:
            del _plans[old_key]
        _plans[key] = new_plan
    return _plans[key]


class NoBaseline(BadCheckpoint):
    """A change cannot be measured, though the checkpoint itself can."""


class Baseline:
    """The checkpoint that changes are measured from, opened when it is first needed.

    Arguments:
        checkpoint: None if there is none.
        request: as for the checkpoint itself.
        revision: of the checkpoint itself: both share the limit of what may be transferred.
    """

    def __init__(
        self, checkpoint: Checkpoint | None, request: ScanRequest, revision: Revision | None
    ) -> None:
        self.checkpoint = checkpoint
        self._request = request
        self._sharing = revision
        self._tensors: Tensors | None = None
        self._revision: Revision | None = None
        self._matrices: dict[str, dict[str, StoredMatrix]] = {}  # part -> name -> matrix

    @property
    def name(self) -> str:
        """Its name; "" if there is none."""
        if self.checkpoint is None:
            return ""
        return self.checkpoint.name

    def open(self, parts: list[str]) -> None:
        """Find the matrices of these parts."""
        assert self.checkpoint is not None
        request = self._request
        self._revision = self.checkpoint.revision(keep=request.keep)
        if self._revision is not None and self._sharing is not None:
            self._revision.meter = self._sharing.meter
        with self._explained():
            opened = checkpoint_tensors(self.checkpoint, self._revision, ranges=not request.keep)
            self._tensors = with_base(opened, request.base)
            matrices_by_part = planned(self._tensors, parts, request.mlp)
            self._tensors.announce(matrices_by_part.views(self._tensors))
        for part, matrices in matrices_by_part.items():
            self._matrices[part] = {matrix.name: matrix for matrix in matrices}

    def read(self, part: str, matrix: StoredMatrix) -> list[Tensor]:
        """Return a matrix as it was in the baseline, or one matrix per head."""
        assert self._tensors is not None
        counterpart = self._counterpart(part, matrix.name)
        with self._explained():
            if counterpart is None:
                raise BadCheckpoint(f"it has no {matrix.name}")
            return counterpart.read(self._tensors)

    def _counterpart(self, part: str, name: str) -> StoredMatrix | None:
        """Return the matrix of the same name; one name may have a prefix more, as ``bert.`` has."""
        matrices = self._matrices.get(part, {})
        if name in matrices:
            return matrices[name]
        similar = []
        for other, matrix in matrices.items():
            if other.endswith(f".{name}") or name.endswith(f".{other}"):
                similar.append(matrix)
        return similar[0] if len(similar) == 1 else None

    def close(self, row: Row) -> list[str]:
        """Close it and add its bytes to `row`; return the notes about it."""
        if self._revision is not None:
            self._revision.close()
        if self._tensors is None:
            return []
        row.bytes_read += self._tensors.bytes_read
        not_finite = self._tensors.not_finite
        if not not_finite:
            return []
        row.has_not_finite = True
        return [f"NaN or infinite in {self.name}: {list_first(not_finite)}"]

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if self._request.is_comparison:
                text = f"no change since {self.name} can be measured"
            else:
                text = f"the checkpoint before, {self.name}, cannot be read"
            raise NoBaseline(f"{text}: {error_message(error)}") from error


def checkpoint_tensors(
    checkpoint: Checkpoint, revision: Revision | None, *, ranges: bool = False
) -> Tensors:
    """Return the tensors of a checkpoint; with `ranges`, parts of files on the hub are read."""
    if revision is not None:
        return revision.tensors(ranges=ranges)
    if not checkpoint.exists():
        raise BadCheckpoint(missing_reason(checkpoint))
    return checkpoint.open()


def missing_reason(checkpoint: Checkpoint) -> str:
    """Return why a local checkpoint is not there: it never was, or was deleted meanwhile."""
    if checkpoint.is_listed:
        return f"{checkpoint.name} vanished during the scan: {checkpoint.path} is gone"
    return f"there is no checkpoint {checkpoint.name} at {checkpoint.path}"


def measure_weights(
    row: Row, tensors: Tensors, gauges: list[Gauge], baseline: Baseline, request: ScanRequest
) -> list[str]:
    """Measure gauges on matrices and on their changes; return notes."""
    changes = [gauge for gauge in gauges if gauge.kind is CHANGE]
    notes = []
    if changes and baseline.checkpoint is None:
        gauges = [gauge for gauge in gauges if gauge.kind is WEIGHT]
        names = ", ".join(gauge.name for gauge in changes)
        if request.is_comparison:
            notes.append(f"{names}: the other models are compared with this one")
        else:
            notes.append(f"{names}: there is no checkpoint before it")
    elif changes:
        try:
            baseline.open(list(dict.fromkeys(gauge.part for gauge in changes)))
        except NoBaseline as error:
            row.report_problem(changes, error)
            gauges = [gauge for gauge in gauges if gauge.kind is WEIGHT]
    try:
        notes = _measure_parts(row, tensors, gauges, baseline, request.mlp) + notes
    finally:
        last_notes = baseline.close(row)
    return notes + last_notes


def _measure_parts(
    row: Row, tensors: Tensors, gauges: list[Gauge], baseline: Baseline, mlp: str | None
) -> list[str]:
    """Measure part by part; a missing or damaged part costs the others nothing."""
    if not gauges:
        return []
    parts = list(dict.fromkeys(gauge.part for gauge in gauges))
    try:
        matrices_by_part = planned(tensors, parts, mlp)
    except NoMatrices as error:
        matrices_by_part = Plan()
        matrices_by_part.missing = error.missing
    # All parts at once: neighbours in a file become one request. If a file is missing or damaged, the
    # parts that are in it will report that.
    with suppress(BadCheckpoint):
        tensors.announce(matrices_by_part.views(tensors))
    notes = []
    for part in parts:
        concerned = [gauge for gauge in gauges if gauge.part == part]
        if part in matrices_by_part.missing:
            row.report_problem(concerned, matrices_by_part.missing[part])
            continue
        table = PartTable(part, matrices_by_part[part], concerned)
        notes += table.measure(row, tensors, baseline)
        table.write(row)
    if row.measured:
        row.digest = tensors.digest
    return notes


@dataclass
class PartTable:
    """The values of all gauges on one part of a checkpoint, by layer and head."""

    part: str
    matrices: list[StoredMatrix]
    gauges: list[Gauge]
    # gauge -> (layers, heads); None where nothing was measured
    values: dict[str, list[list[float | None]]] = field(init=False)

    def __post_init__(self) -> None:
        head_count = max(matrix.heads for matrix in self.matrices)
        self.values = {}
        for gauge in self.gauges:
            self.values[gauge.name] = [[None] * head_count for _ in self.matrices]

    @torch.no_grad()
    def measure(self, row: Row, tensors: Tensors, baseline: Baseline) -> list[str]:
        """Measure every matrix that can be read; return notes."""
        notes: list[str] = []
        for layer, matrix in enumerate(self.matrices):
            try:
                heads = matrix.read(tensors)
            except Exception as error:
                row.report_problem(self.gauges, error)
                if row.checkpoint.repo is not None:
                    break  # the hub was asked several times already
                continue
            old_heads = self._read_baseline(row, matrix, baseline, len(heads))
            for head, (weight, old_weight) in enumerate(zip(heads, old_heads, strict=True)):
                measured = _Measured(row, matrix)
                measured.add_weights(weight, self.gauges)
                if old_weight is not None:
                    measured.add_changes(weight, old_weight, self.gauges, baseline.name)
                for name, value in measured.values.items():
                    self.values[name][layer][head] = value
                notes += [f"{matrix.name}: {reason}" for reason in measured.reasons]
        return notes

    def _read_baseline(
        self, row: Row, matrix: StoredMatrix, baseline: Baseline, count: int
    ) -> list[Tensor] | list[None]:
        changes = [gauge for gauge in self.gauges if gauge.kind is CHANGE]
        if not changes:
            return [None] * count
        try:
            return baseline.read(self.part, matrix)
        except NoBaseline as error:
            row.report_problem(changes, error)
            return [None] * count

    def write(self, row: Row) -> None:
        """Write to the row what was measured: also a gauge that lacks some layers."""
        for gauge in self.gauges:
            by_layer = self.values[gauge.name]
            has_values = any(value is not None for by_head in by_layer for value in by_head)
            if gauge.name in row.problems and not has_values:
                continue
            if gauge.per_head:
                row.measured[gauge.name] = by_layer
                row.heads[gauge.name] = [matrix.heads for matrix in self.matrices]
            else:
                row.measured[gauge.name] = [by_head[0] for by_head in by_layer]
            row.layers[gauge.name] = [matrix.name for matrix in self.matrices]


@dataclass
class _Measured:
    """The values of one matrix by gauge, and why some of them are zero or missing."""

    row: Row
    matrix: StoredMatrix
    values: dict[str, float | None] = field(default_factory=dict)
    reasons: list[str] = field(default_factory=list)

    def add_weights(self, weight: Tensor, gauges: list[Gauge]) -> None:
        gauges = [gauge for gauge in gauges if gauge.kind is WEIGHT]
        top = _top_singular(weight, gauges)
        self._apply(gauges, weight, top)
        if top is not None and top.reason:
            self.reasons.append(top.reason)

    def add_changes(self, weight: Tensor, old: Tensor, gauges: list[Gauge], since: str) -> None:
        gauges = [gauge for gauge in gauges if gauge.kind is CHANGE]
        if weight.shape != old.shape:
            reason = f"a matrix was {tuple(old.shape)} in {since}, and is {tuple(weight.shape)}"
            self.row.report_problem(gauges, reason)
            return
        size = float(torch.linalg.vector_norm(old, dtype=torch.float64))
        if size == 0:
            self.reasons.append(f"it was zero in {since}: no change is relative to that")
            return
        change = (weight - old) / size
        top = _top_singular(change, gauges)
        self._apply(gauges, change, top)
        if top is not None and top.reason:
            is_unknown = math.isnan(top.sigma)
            self.reasons.append(top.reason if is_unknown else f"unchanged since {since}")

    def _apply(self, gauges: list[Gauge], matrix: Tensor, top: TopSingular | None) -> None:
        for gauge in gauges:
            try:
                self.values[gauge.name] = gauge.measure(matrix, top)
            except Exception as error:  # the function of a user's gauge may raise anything
                reason = f"on {self.matrix.name}: {error_message(error)}"
                self.row.report_problem([gauge], reason)


def _top_singular(matrix: Tensor, gauges: list[Gauge]) -> TopSingular | None:
    """Return the largest singular value, once for all gauges that need it."""
    if any(gauge.given == "top" for gauge in gauges):
        return top_singular(matrix)
    return None
