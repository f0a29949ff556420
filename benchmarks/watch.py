"""The costs of `joma.watch`: steps, run folders, `stable_rank`.

Times of steps are processor time: sides take turns in blocks of steps, and ratios are those of one
round, so that other programs on the machine disturb both alike.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import joma
from benchmarks import folders
from benchmarks._timing import row
from benchmarks.nanogpt import SHAKESPEARE, TOY, Shape, Training
from joma._measure.gauges.rank import top_singular

# Gauges that a nanoGPT does not have: those of routers, and those of two checkpoints.
NOT_OF_NANOGPT = ("router", "change")
MIB = 1 << 20


def run(rounds: int = 7) -> list[dict[str, Any]]:
    """Return all rows."""
    model = "training step of nanoGPT, {parameters}, batch 4 × 128"
    toy = "training step of a toy of two layers, {parameters}, batch 4 × 64"
    return [
        *_steps(model, SHAKESPEARE, rounds, steps=2, gauges=None, goal="at most 1.2 ×"),
        *_steps(model, SHAKESPEARE, rounds, steps=2, gauges=all_gauges(), goal="at most 3 ×"),
        *_steps(toy, TOY, 3 * rounds, steps=20, gauges=None, goal="at most 1.5 ×"),
        *folders.run(),
        *_stable_rank(rounds),
    ]


def all_gauges() -> list[str]:
    """Return the names of all gauges that a nanoGPT in training has."""
    names = []
    for name, gauge in joma.gauges().items():
        if gauge.kind.name not in NOT_OF_NANOGPT:
            names.append(name)
    return names


@dataclass(frozen=True)
class StepTimes:
    """Processor time of blocks of steps, in seconds per step; one entry per round.

    Attributes:
        plain: without a watch that listens.
        unmeasured: with a watch, in steps that it does not measure.
        call: `Watch.step` alone, in those.
        measured: in steps that it measures.
    """

    plain: list[float]
    unmeasured: list[float]
    call: list[float]
    measured: list[float]

    @property
    def ratio(self) -> float:
        """The median over rounds of measured over plain."""
        return _median_ratio(self.measured, self.plain)

    @property
    def idle_ratio(self) -> float:
        """The median over rounds of unmeasured over plain."""
        return _median_ratio(self.unmeasured, self.plain)


def time_steps(
    shape: Shape, gauges: list[str] | None, rounds: int, steps: int, folder: Path
) -> StepTimes:
    """Train with a watch; plain, unmeasured and measured steps take turns in blocks."""
    training = Training(shape)
    is_due = False
    call_seconds = 0.0
    options: dict[str, Any] = {}
    if gauges is not None:  # some of them need the optimiser
        options = {"gauges": gauges, "optimizer": training.optimizer}
    watch = joma.watch(training.model, folder, every=lambda step: is_due, live=False, **options)

    def watched_step() -> None:
        nonlocal call_seconds
        loss = training.step()
        start = time.process_time()
        watch.step(loss=loss)
        call_seconds += time.process_time() - start

    def measured_block() -> None:
        nonlocal is_due
        is_due = True
        watch._loop.arm()  # for the step to come
        for number in range(steps):
            is_due = number < steps - 1  # the watch asks for the step after this one
            watched_step()

    def unmeasured_block() -> None:
        for _ in range(steps):
            watched_step()

    def plain_block() -> None:
        for _ in range(steps):
            training.step()

    times = StepTimes([], [], [], [])
    with watch:
        for number in range(rounds + 1):
            plain = _seconds(plain_block) / steps
            measured = _seconds(measured_block) / steps
            call_seconds = 0.0
            unmeasured = _seconds(unmeasured_block) / steps
            if number > 0:  # the first round warms up
                times.plain.append(plain)
                times.measured.append(measured)
                times.unmeasured.append(unmeasured)
                times.call.append(call_seconds / steps)
    return times


def _steps(
    what: str, shape: Shape, rounds: int, steps: int, gauges: list[str] | None, goal: str
) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        times = time_steps(shape, gauges, rounds, steps, Path(folder) / "run")
    parameters = Training(shape).parameters
    title = what.format(parameters=_in_words(parameters))
    name = "default gauges"
    if gauges is not None:
        name = f"all {len(gauges)} gauges"
    plain = statistics.median(times.plain)
    rows = [
        row(
            f"{title}, every=1, {name}",
            "`joma.watch`",
            "the plain step",
            statistics.median(times.measured),
            plain,
            f"**{times.ratio:.2f} × the plain step** ({_spread(times)}; goal: {goal})",
            times=times.ratio,
        )
    ]
    if gauges is None:
        call = statistics.median(times.call)
        rows.append(
            row(
                f"{title}, a step that is not measured",
                "`joma.watch`",
                "the plain step",
                statistics.median(times.unmeasured),
                plain,
                f"{times.idle_ratio:.3f} × the plain step; {1e3 * call:.2f} ms in `Watch.step`",
                times=times.idle_ratio,
                call_seconds=call,
            )
        )
    return rows


def _spread(times: StepTimes) -> str:
    """Return how far apart rounds are, in words."""
    ratios = sorted(a / b for a, b in zip(times.measured, times.plain, strict=True))
    return (
        f"processor time; {len(ratios)} rounds, the middle half {_quantile(ratios, 0.25):.2f} to "
        f"{_quantile(ratios, 0.75):.2f} ×"
    )


def _quantile(ordered: list[float], share: float) -> float:
    return ordered[round(share * (len(ordered) - 1))]


def _in_words(parameters: int) -> str:
    if parameters >= 1_000_000:
        return f"{parameters / 1e6:.1f}M parameters"
    return f"{parameters:,} parameters"


def _stable_rank(rounds: int) -> list[dict[str, Any]]:
    """Time one Gaussian 8192 × 2048 against LAPACK, with one thread and with two."""
    generator = torch.Generator().manual_seed(0)
    w = torch.randn(8192, 2048, generator=generator)
    exact = torch.linalg.svdvals(w.double())
    truth = float(exact.square().sum() / exact[0].square())
    rows = []
    for threads in (1, 2):
        with _threads(threads):
            rows += _stable_rank_row(w, truth, threads, max(3, rounds // 2))
    return rows


def _stable_rank_row(w: Tensor, truth: float, threads: int, rounds: int) -> list[dict[str, Any]]:
    def svdvals() -> None:
        torch.linalg.svdvals(w)

    def lanczos() -> None:
        # Several calls, so that both sides take about as long as the other.
        for _ in range(calls):
            top_singular(w)

    calls = 8
    top = top_singular(w)
    lanczos()
    svdvals()
    clock: list[float] = []
    processor: list[float] = []
    mine: list[float] = []
    for _ in range(rounds):
        other = _both_seconds(svdvals)
        own = _both_seconds(lanczos)
        clock.append(other.clock * calls / own.clock)
        processor.append(other.processor * calls / own.processor)
        mine.append(own.clock / calls)
    seconds = statistics.median(mine)
    ratio = statistics.median(clock)
    error = abs(top.stable_rank / truth - 1)
    word = "thread" if threads == 1 else "threads"
    return [
        row(
            f"stable rank of 8192 × 2048, Gaussian, {threads} {word}",
            "`joma.stable_rank`",
            "`torch.linalg.svdvals`",
            seconds,
            seconds * ratio,
            f"by the clock (median of {rounds} ratios; by processor time "
            f"{statistics.median(processor):.1f} ×; goal: at least 8 ×); relative error "
            f"{error:.0e} of the SVD in float64; {top.passes:.0f} passes over the matrix",
            error=error,
            passes=top.passes,
            processor_ratio=statistics.median(processor),
        )
    ]


@contextmanager
def _threads(count: int):
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@dataclass(frozen=True)
class _Seconds:
    clock: float
    processor: float


def _both_seconds(function: Callable[[], Any]) -> _Seconds:
    clock = time.perf_counter()
    processor = time.process_time()
    function()
    return _Seconds(time.perf_counter() - clock, time.process_time() - processor)


def _seconds(function: Callable[[], Any]) -> float:
    """Return the processor time of a call."""
    start = time.process_time()
    function()
    return time.process_time() - start


def _median_ratio(first: list[float], second: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(first, second, strict=True))
