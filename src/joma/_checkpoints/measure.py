"""The row of one checkpoint: its values by gauge, and why some gauges have none.

A gauge that cannot be measured costs the others nothing: the reason is in `Row.problems`.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from joma._checkpoints.checkpoints import Checkpoint
from joma._checkpoints.hub import DownloadProgress
from joma._checkpoints.lora import with_base
from joma._checkpoints.revision import Revision
from joma._checkpoints.row import Row, ScanRequest, error_message, list_first
from joma._checkpoints.tensors import Tensors
from joma._checkpoints.weights import Baseline, checkpoint_tensors, measure_weights, missing_reason
from joma._measure.gauges.kinds import CHANGE, CHARGE, WEIGHT
from joma._measure.gauges.registry import Gauge, get
from joma._runs.names import harmless

if TYPE_CHECKING:
    from joma._checkpoints.sample import TokenizerPlace


def measure_checkpoint(
    checkpoint: Checkpoint,
    request: ScanRequest,
    report: DownloadProgress | None = None,
    before: Checkpoint | None = None,
) -> Row:
    """Measure all gauges on one checkpoint; errors are in the row.

    Arguments:
        checkpoint: the checkpoint. Files that are downloaded for it stay until `forget`.
        request: what to measure.
        report: called with the progress of downloads.
        before: the checkpoint that changes are measured from; None for the first one.
    """
    row = Row(checkpoint, since=before.name if before else "")
    notes = [checkpoint.note] if checkpoint.note else []
    revision = checkpoint.revision(report, request.keep, request.limit)
    try:
        opened = checkpoint_tensors(checkpoint, revision, ranges=request.ranges)
        tensors = with_base(opened, request.base)
        notes += _measure_kinds(
            row, tensors, revision, Baseline(before, request, revision), request
        )
        if row.problems and _has_vanished(checkpoint):
            notes.append(missing_reason(checkpoint))
        if tensors.not_finite:
            notes.append(f"NaN or infinite: {list_first(tensors.not_finite)}")
        if row.problems or tensors.not_finite or row.has_not_finite:
            row.status = "partly" if row.measured else "failed"
        row.bytes_read += tensors.bytes_read
        notes += tensors.notes
    except Exception as error:
        row.status = "failed"
        if _has_vanished(checkpoint):
            notes.append(missing_reason(checkpoint))
        else:
            notes.append(error_message(error))
    finally:
        if revision is not None:
            row.transferred = revision.meter.spent
            revision.close()
    row.note = harmless("; ".join(dict.fromkeys(notes)))
    for gauge, names in row.layers.items():
        row.layers[gauge] = [harmless(name) for name in names]
    return row


def _measure_kinds(
    row: Row,
    tensors: Tensors,
    revision: Revision | None,
    baseline: Baseline,
    request: ScanRequest,
) -> list[str]:
    """Measure the gauges kind by kind; a kind that fails costs the others nothing. Return notes."""
    gauges = get(request.gauges)
    on_weights = [gauge for gauge in gauges if gauge.kind in (WEIGHT, CHANGE)]
    on_charges = [gauge for gauge in gauges if gauge.kind is CHARGE]
    in_model = [gauge for gauge in gauges if gauge.runs_model]
    kinds = [
        (on_weights, partial(measure_weights, row, tensors, on_weights, baseline, request)),
        (on_charges, partial(_measure_charges, row, tensors, on_charges)),
        (in_model, partial(_measure_model, row, tensors, revision, in_model, request)),
    ]
    notes: list[str] = []
    for concerned, measure_kind in kinds:
        if not concerned:
            continue
        try:
            notes += measure_kind()
        except Exception as error:
            missing = [gauge for gauge in concerned if gauge.name not in row.measured]
            row.report_problem(missing, error)
    return notes


def _has_vanished(checkpoint: Checkpoint) -> bool:
    return checkpoint.path is not None and not checkpoint.exists()


def forget(checkpoint: Checkpoint, request: ScanRequest) -> None:
    """Delete the downloaded files of a checkpoint, unless they are to be kept."""
    if request.keep:
        return
    revision = checkpoint.revision()
    if revision is not None:
        revision.forget()


def _measure_charges(row: Row, tensors: Tensors, gauges: list[Gauge]) -> list[str]:
    # Imported here: most scans are of weights and need none of it.
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


def _measure_model(
    row: Row,
    tensors: Tensors,
    revision: Revision | None,
    gauges: list[Gauge],
    request: ScanRequest,
) -> list[str]:
    """Load the model and measure attention and hidden states on the sample; return notes."""
    # Imported here: it needs all of a watch, and transformers.
    from joma._checkpoints.sample import measure_on_sample

    places = _tokenizer_places(row.checkpoint, tensors, revision, request)
    names = [gauge.name for gauge in gauges]
    folder = None if row.checkpoint.path is None else Path(row.checkpoint.path)
    measured = measure_on_sample(tensors, places, names, request, folder)
    for gauge in gauges:
        if gauge.name in measured.problems:
            row.report_problem([gauge], measured.problems[gauge.name])
    row.measured |= measured.values
    row.layers |= dict.fromkeys(measured.values, measured.layers)
    row.heads |= measured.heads
    row.digest = row.digest or tensors.digest
    row.has_not_finite |= measured.has_not_finite
    return measured.notes


def _tokenizer_places(
    checkpoint: Checkpoint, tensors: Tensors, revision: Revision | None, request: ScanRequest
) -> list[TokenizerPlace]:
    """Return where a tokenizer may be; nothing if none is needed."""
    from joma._checkpoints.language_model import CorpusTokenizer, is_language_model

    if not request.reads_text:
        return []
    if request.tokenizer is not None:
        return [request.tokenizer]
    if tensors.tokenizer is not None:
        return [tensors.tokenizer]
    if revision is not None:
        return [revision.folder()]
    path = Path(str(checkpoint.path))
    if path.is_file():
        return [path.parent]
    if is_language_model(path):
        return [CorpusTokenizer(path)]
    return [path, path.parent]
