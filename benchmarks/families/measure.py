"""One model and variant under a watch and in `joma.explain`: right, layer only, refused, or wrong."""

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
from benchmarks.families.explained import Expected, codes_in, disagreements, first_call
from benchmarks.families.recorder import Recorder

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
SECONDS = 60  # of processor time, for one model and variant


@dataclass(frozen=True)
class Row:
    """The result of one model and variant.

    Attributes:
        verdict: "right", "layer only", "refused", "in part" (some layers refused, the others right), "wrong",
            "explained otherwise" (the table of `joma.explain` has other heads, padded queries or refusals than the
            watch or the truth), "not compared" (the harness knows the truth of a part of the layers, and these are
            right), or "not built". The last two count as no row.
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
    """Raise `TimeLimit` in the block after some seconds of processor time.

    With the time of a clock, a machine that does other work would change the rows of the page.
    """

    def stop(*_: Any) -> None:
        raise TimeLimit(f"more than {seconds} s of processor time")

    previous = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, previous)


def measure(library: str, name: str, variant: str, build: Callable[[], Case]) -> Row:
    """Build a model, measure it with a watch, and compare."""

    def row(verdict: str, **fields: Any) -> Row:
        return Row(library, name, variant, verdict, **fields)

    try:
        with time_limit(SECONDS), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            case = build()
            case.model.eval()
            truth = _truth(case)
    except (Exception, TimeLimit) as error:
        return row("not built", detail=f"{type(error).__name__}: {str(error)[:200]}")
    if not truth.layers:
        return row("not built", detail="no attention was recorded")
    with warnings.catch_warnings(record=True) as messages, first_call(case.model) as call:
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
                watched = watch.explain()
        except TimeLimit as error:
            return row("not built", detail=str(error))
        except Exception as error:
            detail = f"raised {type(error).__name__}: {str(error)[:300]}"
            return row("wrong", truth=truth.source, detail=detail)
    texts = [str(message.message) for message in messages]
    reason = " ".join(text for text in texts if "joma" in text)
    if measured is None:
        fields = {"code": code_of(problems), "detail": problems[:600]}
        verdict = "refused"
    else:
        verdict, error = compare(np.asarray(measured), truth, TOLERANCE[case.dtype])
        fields = {"error": error, "detail": reason[:600]}
        if verdict == "not compared":
            fields["detail"] = (
                f"all {len(truth.layers)} attentions that the harness records are right; joma "
                f"measures more, among {truth.unknown} softmaxes of which the harness cannot tell "
                "whether they are attention (blocks, landmarks)"
            )
        elif verdict != "right":
            fields["code"] = code_of(reason)
    fields["truth"] = truth.source
    if verdict != "wrong":
        heads = None
        if verdict == "right" and truth.shows_heads:
            heads = [len(layer) for layer in truth.layers]
        expected = Expected(codes_in(f"{problems} {reason}"), watched, heads, case.real)
        try:
            with time_limit(SECONDS), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                others = disagreements(call, expected)
        except (Exception, TimeLimit) as error:
            others = [f"joma.explain raised {type(error).__name__}: {str(error)[:200]}"]
        if others:
            verdict = "explained otherwise"
            fields["detail"] = "; ".join(others)[:600]
    return row(verdict, **fields)


def code_of(reason: str) -> str:
    """Return the short codes in a message."""
    return ", ".join(dict.fromkeys(re.findall(r"\[([a-z-]+)\]", reason))) or "no code"


@dataclass(frozen=True)
class Truth:
    """Entropies that the harness computes by itself.

    Attributes:
        layers: per layer (H,), or (1,) if its heads are unknown.
        source: "attentions" (the model's own, with output_attentions) or "recorded".
        shows_heads: True if all layers have one value per head.
        unknown: number of softmaxes that may be attention and are not in `layers`.
    """

    layers: list[Tensor]
    source: str
    shows_heads: bool
    unknown: int


def _truth(case: Case) -> Truth:
    recorder = Recorder(set(case.real) | case.lengths)
    # With gradients, as under the watch: without them PyTorch may choose another kernel, and in
    # bfloat16 the second layer of T5 then has other queries and keys.
    with recorder:
        case.call(case.model)
    if case.twin is not None:
        with torch.no_grad():
            attentions = case.twin()
        # Some models return scores as their attentions, and some only a part of their attentions.
        are_complete = len(attentions) >= len(recorder.probabilities)
        if attentions and are_complete and all(map(_are_probabilities, attentions)):
            layers = [entropy(p.double(), case, p.shape[1]) for p in attentions]
            return Truth(layers, "attentions", shows_heads=True, unknown=recorder.unknown)
    layers = []
    shows_heads = True
    for probabilities, own_heads in zip(recorder.probabilities, recorder.heads, strict=True):
        heads = own_heads or case.heads
        layers.append(entropy(probabilities, case, heads))
        shows_heads = shows_heads and heads is not None and len(layers[-1]) == heads
    return Truth(layers, "recorded", shows_heads, recorder.unknown)


def _are_probabilities(weights: Tensor) -> bool:
    """Return True if no weight is negative and no row has more than 1; a learned sink takes the rest."""
    rows = weights.double().sum(dim=-1)
    return bool((weights >= 0).all() and (rows <= 1 + 1e-3).all())


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


def compare(measured: np.ndarray, truth: Truth, tolerance: float) -> tuple[str, float]:
    """Pair layers so that they differ least, and return the verdict with the largest difference."""
    expected = truth.layers
    layers = [values[~np.isnan(values)] for values in measured]
    layers = [values for values in layers if len(values)]
    if not layers:
        return "refused", 0.0
    costs = np.array(
        [[_difference(values, layer.numpy()) for layer in expected] for values in layers]
    )
    rows, columns = linear_sum_assignment(np.nan_to_num(costs, nan=1e9, posinf=1e9))
    error = float(costs[rows, columns].max())
    # Layers without a partner may be softmaxes that the harness could not classify.
    others = len(layers) - len(rows)
    if others > truth.unknown or not error <= tolerance:
        return "wrong", error
    if others:
        return "not compared", error
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
