"""The row of one checkpoint: its values by gauge, or why there are none."""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from joma._gauges.rank import top_singular
from joma._gauges.registry import Gauge, get
from joma._run.names import harmless
from joma._scan.charges import measure_charges
from joma._scan.checkpoints import Checkpoint
from joma._scan.hub import DownloadProgress
from joma._scan.lora import with_base
from joma._scan.plan import Plan, Planned, plan
from joma._scan.reading import BadCheckpoint
from joma._scan.revision import Revision
from joma._scan.sample import measure_on_sample
from joma._scan.tensors import Tensors, View


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
    digest: str = ""
    bytes_read: int = 0
    transferred: int = 0  # bytes from the hub
    measured: dict[str, Any] = field(default_factory=dict)  # gauge -> (layers,) or (layers, heads)
    layers: dict[str, list[str]] = field(default_factory=dict)  # gauge -> names of its layers
    heads: dict[str, list[int]] = field(default_factory=dict)  # gauge -> heads of each layer, where there are heads
    not_numbers: bool = False  # whether something that was measured on the sample is NaN


def measure_checkpoint(checkpoint: Checkpoint, request: Request, report: DownloadProgress | None = None) -> Row:
    """All gauges on one checkpoint; errors are in the row. What it downloaded stays until `forget`."""
    row, notes = Row(checkpoint), [checkpoint.note] * bool(checkpoint.note)
    revision = checkpoint.revision(report, request.keep, request.limit)
    try:
        gauges = get(request.gauges)
        tensors = with_base(checkpoint_tensors(checkpoint, revision, ranges=request.ranges), request.base)
        kinds = {
            "weights": partial(_weights, row, tensors, [g for g in gauges if g.on == "weight"], request.mlp),
            "charges": partial(_charges, row, tensors, [g for g in gauges if g.on == "charge"]),
            "model": partial(_model, row, tensors, revision, [g for g in gauges if g.runs_model], request),
        }
        done = 0
        for measured_kind in kinds.values():
            try:
                notes += measured_kind()
                done += 1
            except Exception as error:  # the other kinds of gauges may work all the same
                notes.append(_message(error))
        if tensors.not_finite:
            notes.append(f"NaN or infinite: {_some(tensors.not_finite)}")
        right = done == len(kinds) and not tensors.not_finite and not row.not_numbers
        row.status = "ok" if right else "partly" if row.measured else "failed"
        row.bytes_read = tensors.bytes_read
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


def checkpoint_tensors(checkpoint: Checkpoint, revision: Revision | None, *, ranges: bool = False) -> Tensors:
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
        _plans.clear()
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


def _weights(row: Row, tensors: Tensors, gauges: list[Gauge], mlp: str | None) -> list[str]:
    """Weight gauges: each matrix read once and decomposed once, from a fixed start: no row depends on another."""
    if not gauges:
        return []
    parts = list(dict.fromkeys(g.part for g in gauges))
    notes, values, by_part = [], {}, planned(tensors, parts, mlp)
    tensors.expect(views(tensors, by_part))
    with torch.no_grad():
        for part in parts:
            chosen, matrices = [g for g in gauges if g.part == part], by_part[part]
            heads = max(matrix.heads for matrix in matrices)
            table = {g.name: [[math.nan] * heads for _ in matrices] for g in chosen}
            for layer, matrix in enumerate(matrices):
                for head, (measured, reason) in enumerate(_one(matrix, tensors, chosen)):
                    notes += [f"{matrix.name}: {reason}"] if reason else []
                    for name, value in measured.items():
                        table[name][layer][head] = value
            for g in chosen:
                values[g.name] = table[g.name] if g.per_head else [by_head[0] for by_head in table[g.name]]
                row.layers[g.name] = [matrix.name for matrix in matrices]
                row.heads |= {g.name: [matrix.heads for matrix in matrices]} if g.per_head else {}
    row.measured |= values
    row.digest = tensors.digest
    return notes


def _one(matrix: Planned, tensors: Tensors, gauges: list[Gauge]) -> list[tuple[dict[str, float], str | None]]:
    """Values by gauge of one matrix, or of one per head, and why they are 0 or NaN; nothing of it stays in memory."""
    values = []
    for w in matrix.read(tensors):
        top = top_singular(w) if any(g.given == "top" for g in gauges) else None
        values.append(({g.name: g.measure(w, top) for g in gauges}, None if top is None else top.reason))
    return values


def _charges(row: Row, tensors: Tensors, gauges: list[Gauge]) -> list[str]:
    """Charge gauges."""
    if gauges:
        measured = measure_charges(tensors, gauges)
        row.measured |= measured.values
        row.layers |= measured.layers
        row.heads |= measured.heads
        row.digest = tensors.digest
    return []


def _model(row: Row, tensors: Tensors, revision: Revision | None, gauges: list[Gauge], request: Request) -> list[str]:
    """Attention and hidden-state gauges: the model is loaded and run on the sample."""
    if not gauges:
        return []
    names = [g.name for g in gauges]
    try:
        places = _tokenizers(row.checkpoint, revision, request)
        measured = measure_on_sample(tensors, places, names, request.data, request.tokens, request.length)
    except Exception as error:
        raise BadCheckpoint(f"{', '.join(names)}: {_message(error)}") from error
    row.measured |= measured.values
    row.layers |= dict.fromkeys(names, measured.layers)
    row.heads |= measured.heads
    row.digest = row.digest or tensors.digest
    row.not_numbers |= measured.not_numbers
    return measured.notes


def _tokenizers(checkpoint: Checkpoint, revision: Revision | None, request: Request) -> list[str | Path]:
    """Where a tokenizer may be; nowhere if none is needed."""
    if not isinstance(request.data, (str, os.PathLike)):
        return []
    if request.tokenizer is not None:
        return [request.tokenizer]
    if revision is not None:
        return [revision.folder()]
    path = Path(str(checkpoint.path))
    return [path.parent] if path.is_file() else [path, path.parent]


def _some(names: list[str], most: int = 3) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _message(error: Exception) -> str:
    text = str(error).strip() or type(error).__name__
    return text if isinstance(error, (BadCheckpoint, ValueError)) else f"{type(error).__name__}: {text}"
