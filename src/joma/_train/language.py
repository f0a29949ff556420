"""Training the paper's language model, with a watch attached; killed at any moment, it goes on to the same bits."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from joma._data.corpora import Corpus, corpus
from joma._measure.gauges.registry import get
from joma._measure.watch.run_request import axes_of
from joma._measure.watch.watch import Watch, watch
from joma._runs import Run, RunError
from joma._runs.folder import existing
from joma._runs.writer import RunWriter
from joma._train import checkpoints
from joma._train.checkpoints import SavedState
from joma._train.model import LanguageModel
from joma._train.settings import AUTHORS_LENGTH, Probe, Settings, check_whole
from joma._train.step import Stepper
from joma._train.windows import epoch, streams, window


@dataclass(frozen=True)
class StepSummary:
    """Where a run is, for whoever shows it."""

    step: int
    steps: int
    loss: float
    entropy: float  # mean over layers, of the last measurement
    seconds: float  # per step


def train(
    settings: Settings,
    out: str | os.PathLike[str],
    *,
    device: str = "cpu",
    checkpoint_every: int = 500,
    keep: int = 2,
    keep_every: int | None = None,
    force: bool = False,
    say: Callable[[str], None] = print,
    show: Callable[[StepSummary], None] = lambda progress: None,
) -> Run:
    """Train, or go on where a run of the same settings stopped; return a run that is done as it is.

    Arguments:
        settings: what to train.
        out: the run folder.
        device: "cpu", "cuda", … (not part of the settings: but bits are promised on one machine only).
        checkpoint_every: steps between checkpoints.
        keep: how many of the newest checkpoints to keep, at least one; and, with ``keep_every``, those of its
            multiples.
        force: start again even if there is a run.
        say: called with each line that is worth printing.
        show: called with the progress after each step.
    """
    check_whole("checkpoint_every", checkpoint_every)
    check_whole("keep", keep)
    if keep_every is not None:
        check_whole("keep_every", keep_every)
    lab = _Lab(settings.checked(), Path(out), _usable(device), say, force)
    if lab.done:
        say(f"{out} is complete: nothing to do (force starts it again)")
        return Run(out)
    lab.run(checkpoint_every, keep, keep_every, show)
    if lab.processes > 1:
        dist.barrier()  # the first process has finished the run
    return Run(out)


def _usable(name: str) -> torch.device:
    try:
        return torch.empty(0, device=name).device
    except (
        RuntimeError,
        AssertionError,
    ) as error:  # no such device, or a torch that was built without it
        reason = str(error).splitlines()[0]
        raise ValueError(
            f"device {name!r} cannot be used here ({reason}): choose cpu, cuda, … or auto"
        ) from None


class _Lab:
    """One run in one process."""

    def __init__(
        self,
        settings: Settings,
        out: Path,
        device: torch.device,
        say: Callable[[str], None],
        force: bool,
    ) -> None:
        self.settings = settings
        self.out = out
        self.say = say
        self.device = device
        self.rank = 0
        self.processes = 1
        if dist.is_available() and dist.is_initialized():
            self.rank = dist.get_rank()
            self.processes = dist.get_world_size()
        if settings.batch % self.processes:
            raise ValueError(
                f"{settings.batch} streams cannot be shared evenly by {self.processes} processes"
            )
        self.done = False
        self.early = early_steps(settings.every)
        self.first = 0  # the step to begin with
        torch.set_num_threads(settings.threads)
        torch.manual_seed(settings.seed)
        text = corpus(
            settings.data, tokeniser=settings.tokeniser, vocabulary=settings.vocabulary, say=say
        )
        self._check_lengths(text)
        self.model = LanguageModel(
            text.size, layers=settings.layers, d=settings.width, hidden=settings.hidden, heads=settings.heads,
            dropout=settings.dropout, activation=settings.activation, norm_first=settings.norm_first,
            init=settings.init, start=settings.start, length=settings.length,
        ).to(device)  # fmt: skip
        momentum: float | None = None  # Adam
        if settings.optimiser == "sgd":
            momentum = settings.momentum
        self.stepper = Stepper(
            self.model, settings.lr, settings.clip, settings.weight_decay, momentum=momentum
        )
        self.train_streams = streams(text.train, settings.batch)
        self.epoch = epoch(self.train_streams, settings.length, short=settings.short_window)
        valid = streams(text.valid, settings.batch)
        windows = epoch(valid, settings.length, short=settings.short_window)
        count = min(settings.valid_windows or windows, windows)
        self.valid = [
            self._window(valid, n * windows // count) for n in range(count)
        ]  # spread over the whole text
        probe = self._probe(text, valid)
        torch.manual_seed(settings.seed + 1 + self.rank)  # dropout differs between processes
        saved = self._agreed(text, force)
        if self.done:
            return
        self.watch: Watch = watch(
            self.model, run=self.writer, every=self._due, gauges=settings.gauges,
            probe={"tokens": probe, "project": False}, optimizer=self.stepper.optimizer, live=False,
            words=[text.tokeniser.decode([token]) for token in probe[0].tolist()],
        )  # fmt: skip
        self._restore(saved)

    def run(
        self,
        checkpoint_every: int,
        keep: int,
        keep_every: int | None,
        show: Callable[[StepSummary], None],
    ) -> None:
        """Make all steps that are left."""
        status: Any = "failed"
        reason: str | None = None
        try:
            with self.watch:
                status, reason = self._steps(checkpoint_every, keep, keep_every, show)
        except (KeyboardInterrupt, SystemExit):
            if self.writer is not None:
                self.writer.finish("interrupted")  # the same command goes on
            raise
        except BaseException as error:
            reason = f"{type(error).__name__}: {error}"
            raise
        finally:
            if self.writer is not None:
                self.writer.finish(status, reason)

    def _steps(
        self,
        checkpoint_every: int,
        keep: int,
        keep_every: int | None,
        show: Callable[[StepSummary], None],
    ) -> tuple[str, str | None]:
        settings = self.settings
        share = settings.batch // self.processes
        streams_here = slice(self.rank * share, (self.rank + 1) * share)
        entropy = math.nan
        began = time.perf_counter()
        self.model.train()
        for step in range(self.first + 1, settings.steps + 1):
            if settings.fresh_adam and (step - 1) % self.epoch == 0:
                self.stepper.renew()
            inputs, targets = self._window(self.train_streams, step - 1)
            loss = self.stepper.step(
                inputs[streams_here], targets[streams_here], self._trained_layer(step)
            )
            if not math.isfinite(loss):
                return "diverged", f"the loss is {loss} at step {step}"
            extra = {}
            if self._due(step):
                extra = {"seconds": time.perf_counter() - began}
                if self._validates(step):
                    extra["valid_loss"] = self._valid_loss()
            metrics = self.watch.step(loss=loss, step=step, **extra)
            if metrics:
                layers = [
                    value for name, value in metrics.items() if name.startswith("joma/entropy/")
                ]
                entropy = math.nan
                if layers:
                    entropy = sum(layers) / len(layers)
            if step % checkpoint_every == 0 or step == settings.steps:
                self._save(step)
                if self.rank == 0:
                    checkpoints.prune(self.out, keep, keep_every)
            show(
                StepSummary(
                    step,
                    settings.steps,
                    loss,
                    entropy,
                    (time.perf_counter() - began) / (step - self.first),
                )
            )
        return "done", None

    def _trained_layer(self, step: int) -> int | None:
        """Return the one layer that this step trains; None if all are trained together."""
        settings = self.settings
        if not settings.layerwise:
            return None
        return (step - 1) * settings.layers // settings.steps

    def _due(self, step: int) -> bool:
        """True at every so many steps, the last one, those with a validation loss, and many early ones."""
        regular = step % self.settings.every == 0 or step in self.early
        return (
            regular
            or step == self.settings.steps
            or (self.settings.valid_every > 0 and self._validates(step))
        )

    def _validates(self, step: int) -> bool:
        every = self.settings.valid_every
        return every == 0 or step % every == 0 or step == self.settings.steps

    def _valid_loss(self) -> float:
        """Return the mean over tokens: a short window counts for as many as it has."""
        tokens = [targets.numel() for _, targets in self.valid]
        return sum(
            n * self.stepper.loss(*pair) for n, pair in zip(tokens, self.valid, strict=True)
        ) / sum(tokens)

    def _probe(self, text: Corpus, valid: NDArray[np.integer[Any]]) -> Tensor:
        """Return the tokens (B, T) that attention is measured on."""
        if self.settings.probe == Probe.AUTHORS:
            return authors_sequence(text.valid).to(self.device)
        length = self.settings.length
        count = min(self.settings.probe_windows, epoch(valid, length))
        return torch.cat([self._tensors(window(valid, n, length))[0] for n in range(count)])

    # Going on

    def _agreed(self, text: Corpus, force: bool) -> SavedState | None:
        """Open the run in the first process; all of them go on from the checkpoint that it found, or are done."""
        self.writer: RunWriter | None = None
        saved: SavedState | None = None
        error: Exception | None = None
        if self.rank == 0:
            try:
                self.writer = self._open(text, force)
                if not self.done:
                    saved = checkpoints.load_latest(self.out, self.say)
                    self.writer.truncate(saved.offset if saved else 0)
            except (RunError, OSError) as problem:
                if self.processes == 1:
                    raise
                error = problem
        if self.processes > 1:
            news: list[Any] = [
                self.done,
                saved.step if saved else None,
                str(error) if error else None,
            ]
            dist.broadcast_object_list(news, src=0)
            self.done, step, reason = news
            if reason is not None:
                raise error or RunError(reason)
            if self.rank > 0 and step is not None:
                saved = checkpoints.load(self.out, step)
        return saved

    def _open(self, text: Corpus, force: bool) -> RunWriter:
        config = {
            key: list(value) if isinstance(value, tuple) else value
            for key, value in asdict(self.settings).items()
        }
        config |= {"corpus": text.digest, "words": text.size, "processes": self.processes}
        old = existing(self.out)
        if old is not None and not force:
            writer = RunWriter.resume(self.out, config)  # names what differs
            if old["status"] in ("done", "diverged"):
                writer.finish(old["status"], old.get("reason"))
                self.done = True
            return writer
        return RunWriter.create(
            self.out, kind="train", config=config, seed=self.settings.seed, axes=axes_of(get(self.settings.gauges)),
            packages=("joma", "torch"), overwrite=force,
        )  # fmt: skip

    def _restore(self, saved: SavedState | None) -> None:
        if saved is None:
            return
        self.model.load_state_dict(saved.model)
        moments: dict[int, dict[str, Tensor]] = {}
        for key, value in saved.state.items():
            kind, _, rest = key.partition(".")
            if kind == "optimizer":
                n, _, name = rest.partition(".")
                moments.setdefault(int(n), {})[name] = (
                    value.to(self.device) if name != "step" else value
                )
        groups = self.stepper.optimizer.state_dict()["param_groups"]
        self.stepper.optimizer.load_state_dict({"state": moments, "param_groups": groups})
        torch.set_rng_state(saved.state[f"rng.{self.rank}"].cpu())
        if self.device.type == "cuda":
            torch.cuda.set_rng_state(saved.state[f"cuda.{self.rank}"].cpu())
        self.watch.load_state_dict(_with_tensors(saved.facts["watch"], saved.state))
        self.first = saved.step
        self.say(f"going on from step {saved.step}")

    def _save(self, step: int) -> None:
        state: dict[str, Tensor] = {}
        for n, moments in self.stepper.optimizer.state_dict()["state"].items():
            # SGD without momentum keeps None
            state |= {
                f"optimizer.{n}.{name}": value
                for name, value in moments.items()
                if value is not None
            }
        state |= self._random_states()
        if self.rank > 0:
            return
        assert self.writer is not None
        watch_state, watch_tensors = _without_tensors(self.watch.state_dict())
        state |= watch_tensors
        offset = self.writer.offset
        checkpoints.save(
            self.out,
            SavedState(step, offset, self.model.state_dict(), state, {"watch": watch_state}),
        )

    def _random_states(self) -> dict[str, Tensor]:
        """Of every process."""
        of_this_process = {"rng": torch.get_rng_state()}
        if self.device.type == "cuda":
            of_this_process["cuda"] = torch.cuda.get_rng_state()
        if self.processes == 1:
            return {f"{name}.0": value for name, value in of_this_process.items()}
        states: dict[str, Tensor] = {}
        for name, value in of_this_process.items():
            every = [torch.empty_like(value) for _ in range(self.processes)]
            dist.all_gather(every, value)
            states |= {f"{name}.{n}": x for n, x in enumerate(every)}
        return states

    def _check_lengths(self, text: Corpus) -> None:
        for part in (text.train, text.valid):
            epoch(streams(part, self.settings.batch), self.settings.length)

    def _window(self, streams: NDArray[np.integer[Any]], n: int) -> tuple[Tensor, Tensor]:
        return self._tensors(
            window(streams, n, self.settings.length, short=self.settings.short_window)
        )

    def _tensors(self, pair: tuple[Any, Any]) -> tuple[Tensor, Tensor]:
        return torch.from_numpy(pair[0]).to(self.device), torch.from_numpy(pair[1]).to(self.device)


def authors_sequence(valid: NDArray[np.integer[Any]]) -> Tensor:
    """Return the one sequence (1, 35) on which the authors recorded attention: stream 0 of 10, window 100 of validation."""
    ten = streams(valid, 10)
    if epoch(ten, AUTHORS_LENGTH) <= 100:
        raise ValueError(
            f"the authors' sequence is window 100 of 10 streams, and this validation text of {len(valid)} tokens has "
            f"{epoch(ten, AUTHORS_LENGTH)} windows: take wikitext-2, or --probe windows"
        )
    return torch.from_numpy(window(ten, 100, AUTHORS_LENGTH)[0][:1])


def early_steps(every: int) -> frozenset[int]:
    """Return steps that are an eighth of themselves apart, until they are ``every`` apart.

    Training is fastest at first.

    >>> sorted(early_steps(3))
    [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 18, 20, 22]
    """
    steps = []
    step = 1
    while step < 8 * every:
        steps.append(step)
        step += max(1, step // 8)
    return frozenset(steps)


# Tensors of a watch's meters are in the file of tensors, the rest of its state is JSON.
_METER = "watch/"


def _without_tensors(watch_state: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the state of a watch without its tensors, and these as "watch/METER/KEY"."""
    tensors = {}
    meters: dict[str, Any] = {}
    for title, meter_state in watch_state["meters"].items():
        if meter_state is None:
            meters[title] = None
            continue
        meters[title] = {}
        for key, value in meter_state.items():
            if isinstance(value, Tensor):
                tensors[f"{_METER}{title}/{key}"] = value
            else:
                meters[title][key] = value
    return {**watch_state, "meters": meters}, tensors


def _with_tensors(watch_state: dict[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the state that `_without_tensors` has taken apart."""
    meters: dict[str, Any] = {}
    for title, meter_state in watch_state["meters"].items():
        meters[title] = None
        if meter_state is not None:
            meters[title] = dict(meter_state)
    for name, tensor in tensors.items():
        if name.startswith(_METER):
            title, _, key = name.removeprefix(_METER).partition("/")
            meters[title][key] = tensor
    return {**watch_state, "meters": meters}
