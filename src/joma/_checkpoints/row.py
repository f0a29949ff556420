"""What a scan asks of each checkpoint, and the row that answers it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from joma._checkpoints.checkpoints import Checkpoint
from joma._checkpoints.options import CheckpointOptions
from joma._checkpoints.reading import BadCheckpoint
from joma._measure.gauges.registry import Gauge, get
from joma._runs.names import harmless


@dataclass(frozen=True, kw_only=True)
class ScanRequest(CheckpointOptions):
    """What is measured on every checkpoint.

    Attributes:
        gauges: their names.
        mlp: regular expression of the tensors to take as lower MLP matrices.
        limit: bytes that may be transferred for one checkpoint.
        is_comparison: True if models are compared, False for the steps of one model.
    """

    gauges: tuple[str, ...]
    mlp: str | None = None
    limit: int | None = None
    is_comparison: bool = False

    @property
    def ranges(self) -> bool:
        """True if parts of the files on the hub are enough."""
        if self.keep:
            return False
        return not any(gauge.runs_model for gauge in get(self.gauges))


@dataclass
class Row:
    """The measurements of one checkpoint.

    Attributes:
        status: "ok"; "partly" if something could not be measured, "failed" if nothing could.
        note: remarks, in words.
        problems: gauge -> why it has no value, or not one for every layer.
        digest: SHA-256 of all that was read; equal digests mean equal weights.
        bytes_read: of tensors.
        transferred: bytes from the hub.
        measured: gauge -> values (layers,) or (layers, heads); None where there is none.
        layers: gauge -> names of its layers.
        heads: gauge -> heads per layer, for gauges that have heads.
        has_not_finite: True if a value on the sample, or a weight of the baseline, is not finite.
        since: the checkpoint that changes are measured from.
    """

    checkpoint: Checkpoint
    status: str = "ok"
    note: str = ""
    problems: dict[str, str] = field(default_factory=dict)
    digest: str = ""
    bytes_read: int = 0
    transferred: int = 0
    measured: dict[str, Any] = field(default_factory=dict)
    layers: dict[str, list[str]] = field(default_factory=dict)
    heads: dict[str, list[int]] = field(default_factory=dict)
    has_not_finite: bool = False
    since: str = ""

    def report_problem(self, gauges: Iterable[Gauge], error: Exception | str) -> None:
        """Record why these gauges could not be measured; the first reason of a gauge stays."""
        reason = harmless(error if isinstance(error, str) else error_message(error))
        for gauge in gauges:
            self.problems.setdefault(gauge.name, reason)


def error_message(error: Exception) -> str:
    """Return the message of an error; with its type, unless joma wrote the message."""
    text = str(error).strip() or type(error).__name__
    if isinstance(error, (BadCheckpoint, ValueError)):
        return text
    return f"{type(error).__name__}: {text}"


def list_first(names: list[str], most: int = 3) -> str:
    """Return the first names, and how many more there are."""
    text = ", ".join(names[:most])
    if len(names) > most:
        text += f" and {len(names) - most} more"
    return text
