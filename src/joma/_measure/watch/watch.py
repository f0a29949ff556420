"""`joma.watch` and `Watch`: gauges attached to a model in training."""

from __future__ import annotations

import atexit
import os
import sys
import weakref
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Self, get_args

from torch import Tensor, nn
from torch.optim import Optimizer

from joma._measure.events.axes import Heads
from joma._measure.events.padding import Padding
from joma._measure.watch.alarms import Alert
from joma._measure.watch.alarms.reporting import OnAlert
from joma._measure.watch.display import watch_html
from joma._measure.watch.inputs import check_model
from joma._measure.watch.loop import WatchLoop
from joma._measure.watch.measurement import Measurement
from joma._measure.watch.options import WatchOptions
from joma._measure.watch.phases import Phases
from joma._measure.watch.processes import ProcessScope
from joma._measure.watch.run_request import Resume
from joma._measure.watch.schedule import Chosen, Every
from joma._measure.watch.step_arguments import StepArguments
from joma._runs.explanation import Explanation
from joma._runs.state import Ending, ending
from joma._runs.writer import RunWriter

if TYPE_CHECKING:
    from types import TracebackType

    import pandas as pd

_open: weakref.WeakSet[Watch] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """Finish the runs of a script that ends without `Watch.close`."""
    for watch in list(_open):
        watch.close(*ending(getattr(sys, "last_value", None)))  # the exception that ended it


def watch(
    model: nn.Module,
    run: str | os.PathLike[str] | RunWriter | None = None,
    every: Every | None = None,
    gauges: Chosen | None = None,
    *,
    probe: Any = None,
    padding: Padding | None = None,
    heads: Heads | Mapping[str, Heads] | None = None,
    mlp: str | Sequence[str] | None = None,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    queries: int | None = None,
    processes: ProcessScope = "own",
    on_alert: OnAlert | Literal["stop"] | None = None,
    live: bool | None = None,
    patterns: bool | None = None,
    words: Sequence[str] | None = None,
    overwrite: bool = False,
    resume: Resume = False,
) -> Watch:
    """Measure attention and weights of ``model`` while it trains; the training does not change.

    Call `Watch.step` after each optimiser step. Attention is measured in the forward passes since
    the step before (all micro-batches of them, means over real queries), weights after the step.

    Arguments:
        model: any module; also compiled, `DistributedDataParallel` or `fully_shard`.
        run: the run folder to write; without one, rows are kept for `Watch.frame` only. If a watch
            wrote a run there already, this one goes to ``run``-2, …, with a warning: nothing is
            lost. `Watch.path` is where it went.
        every: measure the first step and every n-th, 100 by default; "log" for four measurements
            per doubling; or step -> bool.
        gauges: names of gauges (see `joma.gauges`), "entropy,stable_rank" by default, with commas
            or in a list; or gauge -> its own schedule, {"entropy": 10, "stable_rank": 500}, where
            None is that of ``every``.
        probe: a batch (mapping, sequence of arguments or one tensor) to measure on instead of the
            training batches: one more pass per measurement, in eval mode, comparable over time.
        padding: which tokens are real, if the mask that attention applies does not show it: the
            name of the model's argument that is 1 at real tokens and 0 at padding, a mask (B, T),
            or a function of (args, kwargs) of the model that gives it; or one per side or module,
            {"source": …, "target": …}. One that fits no attention is an error of the first measured
            `Watch.step`.
        heads: how many heads a module has, or the order of its leading axes, "batch heads" or
            "heads batch"; for all modules, or one per module. Found by itself; a layer whose heads
            cannot be told apart is reported as one.
        mlp: the lower MLP matrices: names of modules or parameters, or a regular expression. Found
            by structure.
        optimizer: the one that trains the model, or several in a list: learning rates and the clock
            τ = Σ lr are recorded from the steps that they make. Without it, `Watch.step` can be
            told the rate. Gauges of gradients and updates need it; with a gauge of charges, it has
            every gradient that is about to be used checked against the exact laws of the model (see
            `joma.charges`), in measured steps.
        queries: measure fused attention on a random sample of so many queries per pass: unbiased,
            at a fraction of the cost; the standard error of each gauge is recorded as
            ``entropy_error``, ….
        processes: under torch.distributed, "own" measures the passes of this process and waits for
            no other; "all" sums over all processes, each of which must have such a watch (the
            values are those of one process on all the data, and one process writes). Another
            process than the first writes its own values to ``run``-rank1, ….
        on_alert: is called with each `Alert` (step, kind, layer, heads, value, threshold,
            what_to_do) when it begins. One that raises does not stop the training. Or "stop":
            `Watch.should_stop` becomes True at the first critical alert, for your loop to end.
        live: a line in the terminal with loss, entropy and phases; by itself if there is a
            terminal. While a progress bar is shown (tqdm, Rich, Keras), the line is not.
        patterns: record who attends to whom in the probe's first sequence (64 tokens at most) at
            the start, at the sparsest, and of late, for `joma report`; by itself if there is a
            probe.
        words: of that sequence, one per token, for the axes of the picture.
        overwrite: replace the run in the folder.
        resume: True goes on with the run in the folder, of the same settings. "auto", for training
            that a scheduler may restart, does so if that run was killed, interrupted or failed, and
            starts a new one if it is done, has other settings, or is not there. It looks at the
            newest of ``run``, ``run``-2, …

    Returns:
        The watch: a context manager, or call its `close` at the end.
    """
    options = WatchOptions(
        run=run,
        every=every,
        gauges=gauges,
        probe=probe,
        padding=padding,
        heads=heads,
        mlp=mlp,
        optimizer=optimizer,
        queries=queries,
        processes=processes,
        on_alert=on_alert,
        live=live,
        patterns=patterns,
        words=words,
        overwrite=overwrite,
        resume=resume,
    )
    return Watch(model, options)


class Watch:
    """Gauges attached to a model; made by `joma.watch`.

    Attributes:
        model: the model.
        path: the run folder, if there is one.
        phases: one `Phase` per layer, after the first measurement.
        alerts: what went wrong so far.
        should_stop: True after a critical alert, if ``on_alert`` is "stop".
        latest: the last `Measurement`, if there is one.
        last_step: the number of the last step that was made.
        layers: names of the attention layers, by number, after the first measurement.
        problems: what could not be measured so far, and why, in sentences; each was a warning once.
        matrices: part -> names of the matrices that weight gauges are measured on.
        rates: the learning rates of the last step, one per parameter group; empty if not known.
        tau: the sums of the learning rates over all steps so far, likewise.
    """

    def __init__(self, model: nn.Module, options: WatchOptions) -> None:
        self._closed = True  # until everything is in place
        check_model(model)
        self.model = model
        self._loop = WatchLoop(model, options)
        self._closed = False
        _open.add(self)
        self._loop.arm()

    # What it knows

    @property
    def path(self) -> str | os.PathLike[str] | None:
        """The run folder, if there is one."""
        return self._loop.path

    @property
    def layers(self) -> list[str]:
        """Names of the attention layers, by number; empty before the first measurement."""
        return self._loop.layers

    @property
    def matrices(self) -> dict[str, list[str]]:
        """Part -> names of the matrices that weight gauges are measured on."""
        return self._loop.matrices

    @property
    def phases(self) -> Phases:
        """One `Phase` per layer, after the first measurement; ``print(w.phases)`` shows them."""
        return self._loop.supervisor.phases

    @property
    def alerts(self) -> list[Alert]:
        """What went wrong so far, since this watch was made."""
        return self._loop.supervisor.alerts

    @property
    def problems(self) -> list[str]:
        """What could not be measured so far, and why, in sentences; each was a warning once."""
        return list(self._loop.notices.problems)

    @property
    def should_stop(self) -> bool:
        """True after a critical alert, if ``on_alert`` is "stop"."""
        return self._loop.supervisor.should_stop

    @property
    def latest(self) -> Measurement | None:
        """The last `Measurement`, if there is one."""
        return self._loop.latest

    @property
    def last_step(self) -> int:
        """The number of the last step that was made."""
        return self._loop.last_step

    @property
    def heads(self) -> dict[str, list[int]]:
        """Gauge -> how many heads each of its layers has, for gauges that are measured per head."""
        return dict(self._loop.record.writer.info.get("heads", {}))

    @property
    def rates(self) -> list[float]:
        """The learning rates of the last step, one per parameter group; empty if not known."""
        return list(self._loop.clock.rates)

    @property
    def tau(self) -> list[float]:
        """The sums of the learning rates so far, one per parameter group; empty if not known."""
        return list(self._loop.clock.tau)

    @property
    def applies(self) -> str:
        """How far JoMA's premises hold so far, in a sentence; "" without block gauges."""
        return self._loop.describe_premises()

    def frame(self) -> pd.DataFrame:
        """Return the table of the run, as `Run.frame` does.

        Its columns are step, layer, head, gauge, value, and the module or matrix of the layer.
        """
        return self._loop.read_run().frame()

    def explain(self) -> Explanation:
        """Return what was seen so far: one row per attention and per MLP, with the evidence.

        Facts are those of the last pass in which an attention was examined: its first one, and one
        of new shapes.
        """
        return self._loop.explanation.build()

    # A step

    def step(
        self,
        loss: Any = None,
        *,
        step: int | None = None,
        lr: float | Tensor | None = None,
        **numbers: Any,
    ) -> dict[str, float]:
        """Report that an optimiser step was made; measure if this step is due.

        Arguments:
            loss: of this step, a number or a tensor; a model's own ``output.loss`` is taken if none
                is given.
            step: its number, if the caller counts; else one more than the last. Numbers must
                increase: a step that does not is not recorded, with a warning.
            lr: the learning rate of this step, given with every step; not needed if the optimiser
                is watched.
            numbers: more to record.

        Returns:
            {} between measurements, else one number per gauge and layer,
            {"joma/entropy/layer_03": …}: the mean over heads, or the largest where the gauge is a
            maximum; and the clock, {"joma/tau": …}, if it is known. For any logger.
        """
        if self._closed:
            raise RuntimeError("this watch is closed")
        if step is not None:
            step = int(step)
        return self._loop.step(StepArguments(loss, step, lr, numbers))

    # A checkpoint

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps, so that a resumed run measures the same to the bit."""
        return self._loop.state()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`; one of another version of joma is refused."""
        self._loop.restore(state)

    # Its end

    def close(self, status: Ending = "done", reason: str | None = None) -> None:
        """Take the gauges off the model and finish the run; a second call does nothing.

        Arguments:
            status: how training ended: "done", "failed" or "interrupted".
            reason: why, in a few words.
        """
        if status not in get_args(Ending):
            raise ValueError(f"status must be one of {', '.join(get_args(Ending))}; got {status!r}")
        if self._closed:
            return
        self._closed = True
        _open.discard(self)
        self._loop.finish(status, reason)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close(*ending(error))

    def __del__(self) -> None:
        if not getattr(self, "_closed", True) and not sys.is_finalizing():
            self._loop.detach()

    # Its display

    def __repr__(self) -> str:
        parts = [type(self.model).__name__, self._loop.place]
        state = f"step {self.last_step}"
        if self._closed:
            state = "closed"
        phases = ", ".join(f"{number}: {phase.name}" for number, phase in enumerate(self.phases))
        if phases:
            state = f"{state}; {phases}"
        return f"Watch({', '.join([*parts, state])})"

    def _repr_html_(self) -> str:
        return watch_html(self)
