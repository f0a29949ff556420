"""One model and variant under a watch: right, layer only, refused, or wrong."""

from __future__ import annotations

import re
import signal
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn

import joma
from benchmarks.families.recorder import Recorder

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
SECONDS = 60  # for one model and variant


@dataclass(frozen=True)
class Row:
    """The result of one model and variant.

    Attributes:
        verdict: "right", "layer only", "refused", "in part" (some layers refused, the others right), "wrong", or
            "not built" (which counts as no row).
        truth: "attentions" (the model's own, with output_attentions), or "recorded" (scores or queries and keys).
    """

    library: str
    model: str
    variant: str
    verdict: str
    error: float = 0.0
    code: str = ""
    truth: str = ""
    detail: str = ""


@dataclass(frozen=True)
class Case:
    """A model with inputs.

    Attributes:
        heads: how many heads layers have; None if the model does not say.
        real: number of tokens -> True (B, T) where they are not padding.
        twin: gives the probabilities of the same weights by the model itself, if it can.
        lengths: numbers of tokens of attentions; all of `real` and these.
    """

    model: nn.Module
    call: Callable[[nn.Module], Any]
    heads: int | None
    real: Mapping[int, Tensor] = field(default_factory=dict)
    twin: Callable[[], list[Tensor]] | None = None
    lengths: frozenset[int] = frozenset()
    dtype: torch.dtype = torch.float32


class TimeLimit(BaseException):
    """A model took too long. No `Exception`: a watch keeps those as problems of a module."""


@contextmanager
def time_limit(seconds: int) -> Iterator[None]:
    """Raise `TimeLimit` in the block after some seconds."""

    def stop(*_: Any) -> None:
        raise TimeLimit(f"more than {seconds} s")

    previous = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)


def measure(library: str, name: str, variant: str, build: Callable[[], Case]) -> Row:
    """Build a model, measure it with a watch, and compare."""

    def row(verdict: str, **fields: Any) -> Row:
        return Row(library, name, variant, verdict, **fields)

    try:
        with time_limit(SECONDS), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            case = build()
            case.model.eval()
            expected, truth = _truth(case)
    except (Exception, TimeLimit) as error:
        return row("not built", detail=f"{type(error).__name__}: {str(error)[:200]}")
    if not expected:
        return row("not built", detail="no attention was recorded")
    with warnings.catch_warnings(record=True) as messages:
        warnings.simplefilter("always")
        try:
            with (
                time_limit(SECONDS),
                joma.watch(case.model, every=1, gauges="entropy", live=False) as watch,
            ):
                case.call(case.model)
                watch.step()
                measured = watch.latest.values.get("entropy")  # (layers, heads)
                problems = " ".join(watch.problems)
        except TimeLimit as error:
            return row("not built", detail=str(error))
        except Exception as error:
            return row(
                "wrong", truth=truth, detail=f"raised {type(error).__name__}: {str(error)[:300]}"
            )
    if measured is None:
        return row("refused", code=code_of(problems), truth=truth, detail=problems[:600])
    reason = " ".join(
        str(message.message) for message in messages if "joma" in str(message.message)
    )
    verdict, error = compare(np.asarray(measured), expected, TOLERANCE[case.dtype])
    code = code_of(reason) if verdict != "right" else ""
    return row(verdict, error=error, code=code, truth=truth, detail=reason[:600])


def code_of(reason: str) -> str:
    """Return the short codes in a message."""
    return ", ".join(dict.fromkeys(re.findall(r"\[([a-z-]+)\]", reason))) or "no code"


def _truth(case: Case) -> tuple[list[Tensor], str]:
    """Entropy per layer, (H,), or (1,) where the model does not show its heads; and where it comes from."""
    if case.twin is not None:
        with torch.no_grad():
            attentions = case.twin()
        if attentions:
            return [entropy(p.double(), case, p.shape[1]) for p in attentions], "attentions"
    recorder = Recorder(set(case.real) | case.lengths)
    with torch.no_grad(), recorder:
        case.call(case.model)
    layers = zip(recorder.probabilities, recorder.heads, strict=True)
    return [entropy(p, case, heads or case.heads) for p, heads in layers], "recorded"


def entropy(p: Tensor, case: Case, heads: int | None) -> Tensor:
    """Entropy per head over queries that are not padding, of probabilities (…, Tq, Tk)."""
    rows = -torch.special.xlogy(p, p).sum(dim=-1)  # (…, Tq)
    rest = (1 - p.sum(dim=-1)).clamp(min=0)  # what a learned sink receives, which counts as a key
    rows = rows - torch.where(rest > 1e-4, torch.special.xlogy(rest, rest), 0.0)
    if rows.dim() == 2 and heads is not None and rows.shape[0] % heads == 0:
        rows = rows.unflatten(0, (-1, heads))  # samples outside, heads inside
    if rows.dim() > 3:
        axes = [axis for axis in range(rows.dim() - 1) if rows.shape[axis] == heads]
        if len(axes) == 1:
            rows = rows.movedim(axes[0], -2).flatten(0, -3)
    if rows.dim() != 3 or (heads is not None and rows.shape[1] != heads):
        return rows[rows.isfinite()].mean()[None]
    real = case.real.get(rows.shape[2])
    if real is None or real.shape[0] != rows.shape[0]:
        real = torch.ones(rows.shape[0], rows.shape[2], dtype=torch.bool)
    return torch.stack([rows[:, head][real].mean() for head in range(rows.shape[1])])


def compare(measured: np.ndarray, expected: list[Tensor], tolerance: float) -> tuple[str, float]:
    """Pair layers so that they differ least, and return the verdict with the largest difference."""
    layers = [values[~np.isnan(values)] for values in measured]
    layers = [values for values in layers if len(values)]
    if not layers:
        return "refused", 0.0
    costs = np.array(
        [[_difference(values, truth.numpy()) for truth in expected] for values in layers]
    )
    rows, columns = linear_sum_assignment(np.nan_to_num(costs, nan=1e9, posinf=1e9))
    error = float(costs[rows, columns].max())
    if len(rows) < len(layers) or not error <= tolerance:
        return "wrong", error
    for row, column in zip(rows, columns, strict=True):
        if len(layers[row]) < len(expected[column]):
            return "layer only", error
    return ("right" if len(layers) == len(expected) else "in part"), error


def _difference(values: np.ndarray, truth: np.ndarray) -> float:
    if len(values) == len(truth):
        return float(np.abs(values - truth).max())
    if 1 in (len(values), len(truth)):
        return float(abs(values.mean() - truth.mean()))
    return float("inf")
