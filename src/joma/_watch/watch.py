"""`joma.watch`: gauges attached to a model in training."""

from __future__ import annotations

import atexit
import math
import os
import shutil
import sys
import tempfile
import warnings
import weakref
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn

from joma._gauges.attention import AttentionStats
from joma._gauges.matrices import plain_name
from joma._gauges.registry import Gauge, get
from joma._run import Run
from joma._run.writer import RunWriter
from joma._watch import calls
from joma._watch.capture import Capture, NotWatchable, Padding, looks_like_attention
from joma._watch.display import LiveLine, html
from joma._watch.inputs import (
    Every,
    batch,
    check_has_attention,
    check_model,
    find,
    no_attention,
    schedule,
    to_device,
    unwrapped,
)  # fmt: skip
from joma._watch.phases import PHASES, Phase, nonsink_of_layer
from joma._watch.processes import Processes
from joma._watch.tally import Layer, Tally
from joma._watch.weights import Weights

if TYPE_CHECKING:
    from types import TracebackType

    import pandas as pd

DEFAULT_GAUGES = ("entropy", "stable_rank")
_watched: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()

_open: weakref.WeakSet[Watch] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """A script that ends without `close` leaves a finished run all the same."""
    error = getattr(sys, "last_value", None)  # of the exception that ended it
    for watch in list(_open):
        watch.close(*(("done",) if error is None else ("failed", f"{type(error).__name__}: {error}")))


# what the phases are told from, measured whatever gauges are asked for: they are almost free
_FOR_PHASES = (
    Gauge("_entropy", "attention", lambda stats: stats.entropy, ""),
    Gauge("_nonsink", "attention", lambda stats: stats.nonsink_entropy, ""),
    Gauge("_sink", "attention", lambda stats: stats.sink_mass, ""),
    Gauge("_possible", "attention", lambda stats: _possible(stats), ""),
)


def _possible(stats: AttentionStats) -> Tensor:
    """The largest non-sink entropy there could be."""
    return (stats.visible - 1).clamp(min=1).log().expand_as(stats.entropy)


def watch(
    model: nn.Module,
    run: str | os.PathLike[str] | RunWriter | None = None,
    every: Every = 100,
    gauges: str | Sequence[str] | None = None,
    *,
    probe: Any = None,
    padding: Padding | None = None,
    mlp: str | Sequence[str] | None = None,
    live: bool | None = None,
    overwrite: bool = False,
    resume: bool = False,
) -> Watch:
    """Measure attention and weights of ``model`` while it trains; nothing about the training changes.

    Call `Watch.step` after each optimiser step. Attention is measured in the forward passes since the step before (all
    micro-batches of them, means over real queries), weights after the step.

    Arguments:
        model: any module; also compiled, `DistributedDataParallel` or `fully_shard`.
        run: the run folder to write; without one, rows are kept for `Watch.frame` only.
        every: measure the first step and every n-th; "log" for four measurements a doubling; or step -> bool.
        gauges: names of gauges (see `joma.gauges`), "entropy" and "stable_rank" by default.
        probe: a batch (mapping, sequence of arguments or one tensor) to measure on instead of the training batches:
            one more pass a measurement, in eval mode, comparable over time.
        padding: the model's argument that is 1 at real tokens and 0 at padding, or a function of (args, kwargs) of the
            model that gives it. Found by itself if it is called ``attention_mask`` or ``…key_padding_mask``.
        mlp: the lower MLP matrices: names of modules or parameters, or a regular expression. Found by structure.
        live: a line in the terminal with loss, entropy and phases; by itself if there is a terminal.
        overwrite: replace the run in the folder.
        resume: go on with the run in the folder, of the same settings.

    Returns:
        The watch: a context manager, or call its `close` at the end.
    """
    return Watch(model, run, every, gauges, probe, padding, mlp, live, overwrite, resume)


def axes_of(gauges: Sequence[Gauge]) -> dict[str, list[str]]:
    """The axes of what a watch with these gauges writes."""
    axes = {g.name: ["layer", "head"] for g in gauges if g.on == "attention" or g.part == "qk"}
    axes |= {g.name: ["layer"] for g in gauges if g.name not in axes}
    return axes | ({} if all(g.on == "weight" for g in gauges) else {"phase": ["layer"]})


class Watch:
    """Gauges attached to a model; made by `joma.watch`.

    Attributes:
        model: the model.
        path: the run folder, if there is one.
        phases: one `Phase` a layer, after the first measurement.
        layers: names of the attention layers, by number, after the first measurement.
        matrices: part -> names of the matrices that weight gauges are measured on.
    """

    def __init__(
        self, model: nn.Module, run: str | os.PathLike[str] | RunWriter | None, every: Every,
        gauges: str | Sequence[str] | None, probe: Any, padding: Padding | None, mlp: str | Sequence[str] | None,
        live: bool | None, overwrite: bool, resume: bool,
    ) -> None:  # fmt: skip
        self._closed = True  # until everything is there
        check_model(model)
        self._due = schedule(every)
        chosen = get(DEFAULT_GAUGES if gauges is None else gauges)
        if not chosen:
            raise ValueError(f"no gauges to measure; give some, for example {DEFAULT_GAUGES}")
        self.model = model
        self.path = run.path if isinstance(run, RunWriter) else run
        self._owns_run = not isinstance(run, RunWriter)
        self._matrices = find(model, chosen, mlp, lenient=gauges is None)
        self._gauges = [g for g in chosen if g.on != "weight" or g.part in self._matrices]
        self._attends = any(g.on != "weight" for g in self._gauges)
        if self._attends:
            check_has_attention(model)
        self._processes = Processes(model)
        self._weights = Weights(self._gauges, self._matrices, self._processes)
        attention = [g for g in self._gauges if g.on == "attention"]
        self._tally = Tally([*attention, *_FOR_PHASES], [g for g in self._gauges if g.on == "hidden"])
        names = {module: plain_name(name) or type(model).__name__ for name, module in model.named_modules()}
        if clash := next((module for module in names if module in _watched), None):
            raise ValueError(
                f"{names[clash]} of this model is watched already ({_watched[clash]}); close that watch first, or give "
                "it more gauges"
            )
        self._capture = Capture(model, names, self._tally, padding)
        self._probe = None if probe is None else batch(probe)
        self._reported: set[object] = set()
        self._step = 0
        self._resumed = False
        self._armed = False
        self._latest: dict[str, Tensor] = {}
        self._loss = math.nan
        self.phases: list[Phase] = []
        self._writer = run if isinstance(run, RunWriter) else self._open(every, overwrite, resume)
        self._note_layers(self._writer)
        for module in names:
            _watched[module] = f"run {self.path}" if self.path is not None else "without a run folder"
        show = sys.stderr.isatty() if live is None else live
        self._line = LiveLine() if show and self._processes.first else None
        self._closed = False
        _open.add(self)
        self._arm()

    # The user's side

    @property
    def layers(self) -> list[str]:
        """Names of the attention layers, by number; empty before the first measurement."""
        return [layer.name for layer in self._tally.layers]

    @property
    def matrices(self) -> dict[str, list[str]]:
        """Part -> names of the matrices that weight gauges are measured on."""
        return {part: [m.name for m in matrices] for part, matrices in self._matrices.items()}

    @property
    def heads(self) -> dict[str, list[int]]:
        """Gauge -> how many heads each of its layers has, for gauges that are measured per head."""
        return dict(self._writer.info.get("heads", {}))

    def step(self, loss: Any = None, *, step: int | None = None, **numbers: Any) -> dict[str, float]:
        """Tell that an optimiser step was made; measures if this step is due.

        Arguments:
            loss: of this step, a number or a tensor; a model's own ``output.loss`` is taken if none is given.
            step: its number, if the caller counts; else one more than the last.
            numbers: more to record, as the learning rate.

        Returns:
            {} between measurements, else means over heads by name: {"joma/entropy/layer_03": …}, for any logger.
        """
        if self._closed:
            raise RuntimeError("this watch is closed")
        self._step = self._step + 1 if step is None else int(step)
        if self._resumed:  # from a checkpoint that is older than the last row
            self._writer.drop_from(self._step)
            self._resumed = False
        try:
            return self._measure(loss, numbers) if self._armed else {}
        finally:
            self._tally.clear()
            self._capture.losses.clear()
            self._capture.ran.clear()
            self._arm()

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps, so that a resumed run measures bit for bit what an unbroken one would."""
        return {
            "step": self._step,
            "phases": [phase.state() for phase in self.phases],
            "layers": [[layer.name, layer.keys] for layer in self._tally.layers],
            "reported": [key for key in self._reported if isinstance(key, (str, tuple))],
            "starts": self._weights.state(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state_dict`."""
        self._step = int(state["step"])
        self.phases = [Phase.restored(phase) for phase in state["phases"]]
        self._tally.layers = [Layer(name, tuple((m, int(n)) for m, n in keys)) for name, keys in state["layers"]]
        self._reported = {tuple(key) if isinstance(key, list) else key for key in state["reported"]}
        self._weights.restore(state["starts"])
        self._arm()

    def frame(self) -> pd.DataFrame:
        """The table of the run, `Run.frame`: step, layer, head, gauge, value, and the module or matrix of the layer."""
        return Run(self._writer.path).frame()

    def close(self, status: str = "done", reason: str | None = None) -> None:
        """Take the gauges off the model and finish the run; a second call does nothing."""
        if self._closed:
            return
        self._closed = True
        _open.discard(self)
        self._detach()
        if self._line is not None:
            self._line.close()
        try:
            if self._owns_run:
                self._writer.finish("done" if status == "done" else "failed", reason)
        except OSError as error:
            self._once("disk", f"the run {self._writer.path} could not be finished: {error}")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self.close("failed", f"{type(error).__name__}: {error}")

    def __del__(self) -> None:
        if not getattr(self, "_closed", True) and not sys.is_finalizing():
            self._detach()

    def _detach(self) -> None:
        """Leave the model alone."""
        calls.uninstall(self._capture)
        for module in self._capture.names:
            _watched.pop(module, None)

    def __repr__(self) -> str:
        where = f"run {self.path}" if self.path is not None else "no run folder"
        phases = ", ".join(f"{n}: {phase.name}" for n, phase in enumerate(self.phases))
        state = "closed" if self._closed else f"step {self._step}"
        return f"Watch({type(self.model).__name__}, {where}, {state}{f'; {phases}' if phases else ''})"

    def _repr_html_(self) -> str:
        return html(self)

    # A measurement

    def _arm(self) -> None:
        """Listen to the model if the step to come is due."""
        self._armed = bool(self._due(self._step + 1))
        listen = self._armed and self._attends and self._probe is None
        calls.uninstall(self._capture)
        if listen:
            calls.install(self._capture, list(self._capture.names))

    def _measure(self, loss: Any, numbers: Mapping[str, Any]) -> dict[str, float]:
        calls.uninstall(self._capture)
        values: dict[str, Tensor] = {}
        if self._attends:
            if self._probe is not None:
                self._run_probe()
            values = self._attention()
        values |= self._weights.measure()
        for (part, name), reason in self._weights.reasons.items():
            self._once(("weight", part, name), f"step {self._step}: {name} ({part}): {reason}")
        mean_loss = self._mean_loss(loss)
        if "_entropy" in values:
            self._judge(values, mean_loss)
        shown = {name: value for name, value in values.items() if not name.startswith("_")}
        self._latest, self._loss = shown, mean_loss
        self._report_nan(shown)
        scalars = {name: _scalar(value) for name, value in numbers.items()}
        if not math.isnan(mean_loss) or loss is not None:
            scalars["loss"] = mean_loss
        self._write(shown, scalars)
        if self._line is not None:
            self._line.show(self)
        metrics: dict[str, float] = {}
        for name, value in shown.items():
            width = max(2, len(str(len(value) - 1)))
            means = (float(self._heads(name, n, row).mean()) for n, row in enumerate(value))
            metrics |= {f"joma/{name}/layer_{n:0{width}d}": mean for n, mean in enumerate(means)}
        return metrics

    def _heads(self, gauge: str, layer: int, row: Tensor) -> Tensor:
        """The values of a layer's own heads, without what pads it to the width of others; NaN among them is meant."""
        if row.dim() == 0:
            return row
        own = self._tally.heads(layer, gauge) if layer < len(self._tally.layers) else 0
        return row[:own] if own else row[~row.isnan()] if not row.isnan().all() else row

    def _attention(self) -> dict[str, Tensor]:
        capture = self._capture
        if capture.refusal:
            raise NotWatchable(capture.refusal)
        for name, problem in capture.problems.items():
            self._once(("problem", name), f"attention of {name} could not be measured: {problem}")
        for name, problem in self._tally.problems.items():
            self._once(("gauge", name), f"gauge {name!r} failed: {problem}")
        if not self._processes.any(bool(self._tally.seen)):
            if not capture.ran:
                self._once("idle", "the model did not run since the last step(): there is no attention to measure")
            elif not self._tally.layers:
                raise NotWatchable(no_attention(self.model, capture.ran))
            return {}
        kinds = {type(m) for m, name in capture.names.items() if (name, 0) in self._tally.seen}
        closure = [
            name for m, name in capture.names.items() if type(m) in kinds and looks_like_attention(type(m))
        ]  # layers that this pass happened to skip
        self._tally.settle_layers(list(capture.names.values()), closure)
        self._name_unseen()
        return self._tally.values(self._processes.sum_, self._processes.max_)

    def _mean_loss(self, loss: Any) -> float:
        if loss is None and self._capture.losses:
            loss = torch.stack([x.double().cpu() for x in self._capture.losses]).mean()
        return self._processes.mean(math.nan if loss is None else _scalar(loss))

    def _judge(self, values: dict[str, Tensor], loss: float) -> None:
        """Each layer's phase, and an alarm where attention has collapsed."""
        layers = len(values["_entropy"])
        self.phases += [Phase() for _ in range(layers - len(self.phases))]
        for n, phase in enumerate(self.phases):
            entropy, nonsink, sink, possible = (values[k][n] for k in ("_entropy", "_nonsink", "_sink", "_possible"))
            judged = float(possible.nanmean()) >= 1.0  # with a handful of keys, low entropy means nothing
            low = nonsink_of_layer(nonsink.tolist(), sink.tolist()) if judged else math.nan
            phase.update(self._step, float(entropy.nanmean()), low, loss)
            if phase.name == "collapsed":
                self._once(
                    ("collapsed", n),
                    f"attention of layer {n} ({self.layers[n]}) has collapsed by step {self._step}: its non-sink "
                    f"entropy is {low:.3f} nats and the loss ({loss:.4g}) does not fall. The usual cause is a learning "
                    "rate that is too high: lower it, warm up longer, or normalise queries and keys",
                )
            else:
                self._reported.discard(("collapsed", n))

    def _report_nan(self, values: dict[str, Tensor]) -> None:
        for name, value in values.items():
            names = self._names_of(name)
            for n, row in enumerate(value):
                if self._was_seen(name, n) and bool(self._heads(name, n, row).isnan().any()):
                    self._once((name, n), f"step {self._step}: {name} of layer {n} ({names[n]}) is NaN")

    def _was_seen(self, name: str, layer: int) -> bool:
        return name in self._weights.names or self._tally.heads(layer, name) > 0

    def _names_of(self, gauge: str) -> list[str]:
        return self._weights.names.get(gauge, self.layers)

    def _name_unseen(self) -> None:
        """Attention modules that ran without any attention being seen in or around them."""
        seen = [name for name, _ in self._tally.seen]
        for name, kind in self._capture.ran.items():
            related = any(s == name or s.startswith(f"{name}.") or name.startswith(f"{s}.") for s in seen)
            if not related and looks_like_attention(kind):
                self._once(
                    ("unseen", name),
                    f"{name} ({kind.__name__}) ran, but no attention was seen in it: a kernel that is not PyTorch's?",
                )

    def _run_probe(self) -> None:
        assert self._probe is not None
        args, kwargs = to_device(self._probe, self.model)
        modes = {module: module.training for module in self.model.modules()}
        target = self.model.module if isinstance(self.model, nn.parallel.DistributedDataParallel) else self.model
        calls.install(self._capture, list(self._capture.names))
        try:
            for module in modes:
                module.training = False
            self._capture.run_aside(target, args, kwargs)
        finally:
            for module, mode in modes.items():
                module.training = mode
            calls.uninstall(self._capture)

    # The run folder

    def _open(self, every: Every, overwrite: bool, resume: bool) -> RunWriter:
        config = {
            "model": type(unwrapped(self.model)).__name__,
            "parameters": sum(p.numel() for p in self.model.parameters()),
            "every": every if isinstance(every, (int, str)) else getattr(every, "__qualname__", repr(every)),
            "gauges": [g.name for g in self._gauges],
            "measured on": "training batches" if self._probe is None else "probe",
        }
        path: str | os.PathLike[str] | None = self.path if self._processes.first else None
        if path is None:
            temporary = tempfile.mkdtemp(prefix="joma-watch-")
            weakref.finalize(self, shutil.rmtree, temporary, ignore_errors=True)
            path = os.path.join(temporary, "run")
        elif resume and os.path.exists(os.path.join(path, "run.json")):
            writer = RunWriter.resume(path, config)
            self._step = max((row["step"] for row in Run(path).rows()), default=0)
            self._resumed = True
            return writer
        return RunWriter.create(
            path,
            kind="watch",
            config=config,
            axes=axes_of(self._gauges),
            packages=("joma", "torch", "transformers"),
            overwrite=overwrite,
        )

    def _note_layers(self, writer: RunWriter) -> None:
        layers = {g.name: self._names_of(g.name) for g in self._gauges if g.on == "weight" or self.layers}
        if self.layers:
            layers["phase"] = self.layers
        if writer.info.get("layers") != layers:
            seen = [self._tally.heads(n, "_entropy") for n in range(len(self.layers))]
            seen = [n or max(seen) for n in seen]  # a layer that this pass skipped
            heads = {g.name: seen for g in self._gauges if g.on == "attention"}
            heads |= {g.name: [m.heads for m in self._matrices["qk"]] for g in self._gauges if g.part == "qk"}
            writer.note(layers=layers, heads=heads, phases=list(PHASES))

    def _write(self, values: dict[str, Tensor], scalars: dict[str, float]) -> None:
        rows: dict[str, Any] = dict(scalars)
        rows |= values
        if self.phases:
            rows["phase"] = [PHASES.index(phase.name) for phase in self.phases]
        try:
            self._note_layers(self._writer)
            self._writer.write(self._step, rows)
        except OSError as error:
            self._once("disk", f"{self._writer.path}: {error}; training goes on, measurements are lost meanwhile")

    def _once(self, key: object, message: str) -> None:
        if key not in self._reported:
            self._reported.add(key)
            if self._processes.first:
                warnings.warn(f"joma.watch: {message}", stacklevel=2)


def _scalar(value: Any) -> float:
    return float(value.detach()) if isinstance(value, Tensor) else float(value)
