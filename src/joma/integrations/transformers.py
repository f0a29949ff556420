"""`watch` for the Trainer of Hugging Face Transformers.

>>> from joma.integrations.transformers import watch  # doctest: +SKIP
>>> watch(trainer, run="runs/mine", every=100)  # doctest: +SKIP
>>> trainer.train()  # doctest: +SKIP
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import torch

from joma._measure.watch.schedule import Chosen, Every
from joma.integrations._deferred_watch import DeferredWatch, WatchKeywords

try:
    from transformers import PrinterCallback, ProgressCallback, TrainerCallback
    from transformers.trainer_utils import get_last_checkpoint
except ImportError as error:
    raise ImportError(
        f"joma.integrations.transformers needs Transformers and Accelerate ({error}): "
        "pip install 'joma[hf]'"
    ) from error

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import Trainer

__all__ = ["TrainerWatch", "watch"]

# The file in a checkpoint's folder that holds the state of the watch.
_STATE_FILE = "joma_watch.pt"

# The methods with which the Trainer prints, with and without disable_tqdm.
_PRINTERS = (PrinterCallback.on_log, ProgressCallback.on_log)


def watch(
    trainer: Trainer,
    run: str | os.PathLike[str] | None = None,
    every: Every | None = None,
    gauges: Chosen | None = None,
    **options: Unpack[WatchKeywords],
) -> TrainerWatch:
    """Watch the model of a Hugging Face ``trainer`` during ``trainer.train()``.

    Measurements go to the run folder and, through ``trainer.log``, to whatever ``report_to`` names:
    next to ``train/loss`` as ``train/joma/entropy/layer_00``. The Trainer does not print them.
    Steps are optimiser steps, as the Trainer counts them, and the loss is the one that it logs.
    Learning rates and τ come from its optimiser. The run is finished when training ends, with the
    reason if it fails or is interrupted.

    Arguments:
        trainer: the Trainer, before ``train()``.
        run, every, gauges, options: as for `joma.watch`; ``live`` is False by default. At critical
            alerts, ``on_alert="stop"`` ends the training after the step, and "lower" halves the
            learning rates. With ``resume="auto"`` a job that is restarted continues its run.
    """
    return TrainerWatch(trainer, run, every, gauges, **options)


class TrainerWatch(DeferredWatch, TrainerCallback):
    """A watch on a Trainer; made by `joma.integrations.transformers.watch`.

    Attributes:
        watch: the `Watch`, once training has begun.
        path: the run folder, if there is one.
    """

    def __init__(
        self,
        trainer: Trainer,
        run: str | os.PathLike[str] | None,
        every: Every | None,
        gauges: Chosen | None,
        **options: Unpack[WatchKeywords],
    ) -> None:
        if not hasattr(trainer, "callback_handler"):
            raise TypeError(f"a transformers.Trainer is watched, not {type(trainer).__name__}")
        for callback in trainer.callback_handler.callbacks:
            if isinstance(callback, TrainerWatch):
                raise ValueError(
                    f"this trainer is watched already ({callback!r}); close() that watch first"
                )
        super().__init__(run, every, gauges, options)
        self._trainer: Any = trainer
        self._loss: Tensor | None = None  # of this step so far
        self._control: Any = None  # of the Trainer, in this step
        self._resume_from: Any = None  # the argument resume_from_checkpoint of train()
        self._train = trainer.train
        trainer.train = self._watched_train
        trainer.add_callback(self)

    def close(self) -> None:
        """Take the watch off the trainer, and finish the run if training is under way."""
        self._end()
        if self in self._trainer.callback_handler.callbacks:
            self._trainer.remove_callback(self)
            _put_back(self._trainer, "train", self._train)

    def _watched_train(self, *args: Any, **kwargs: Any) -> Any:
        """Run ``trainer.train`` and follow its losses and its exceptions.

        Callbacks get no exception, and the loss only when it is logged.
        """
        trainer = self._trainer
        self._resume_from = kwargs.get("resume_from_checkpoint")
        if args:
            self._resume_from = args[0]
        training_step = trainer.training_step

        @functools.wraps(training_step)
        def followed_step(*args: Any, **kwargs: Any) -> Any:
            # However the model scales it for accumulation, this is what the Trainer sums and logs.
            loss = training_step(*args, **kwargs)
            if self._loss is None:
                self._loss = loss
            else:
                self._loss = self._loss + loss
            return loss

        trainer.training_step = followed_step
        try:
            result = self._train(*args, **kwargs)
        except BaseException as error:
            self._end(error)
            raise
        finally:
            _put_back(trainer, "training_step", training_step)
        self._end()
        return result

    def _stop(self) -> None:
        self._control.should_training_stop = True

    def _schedulers(self) -> list[Any]:
        if self._trainer.lr_scheduler is None:
            return []
        return [self._trainer.lr_scheduler]

    # What the Trainer calls

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin the watch: the model is on its device, and wrapped."""
        self._loss = None
        checkpoint = self._checkpoint(args)
        if checkpoint is not None:
            state_file = Path(checkpoint, _STATE_FILE)
            if state_file.exists():
                self._state = torch.load(state_file, weights_only=True)
        self._begin(self._trainer.model_wrapped, self._trainer.optimizer)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write phases, the clock and the last measurement into the new checkpoint."""
        folder = Path(args.output_dir, f"checkpoint-{state.global_step}")
        if state.is_world_process_zero and self._is_open and folder.is_dir():
            torch.save(self.watch.state_dict(), folder / _STATE_FILE)

    def _checkpoint(self, args: Any) -> str | None:
        """Return the folder that training resumes from; None if it does not."""
        if self._resume_from is True:
            return get_last_checkpoint(args.output_dir)
        if self._resume_from:
            return str(self._resume_from)
        return None

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Measure after an optimiser step."""
        loss = self._loss
        self._loss = None
        self._control = control
        metrics = self.watch.step(loss, step=state.global_step)
        if not metrics:
            return
        should_log = control.should_log
        with _printers_silent(self._trainer.callback_handler.callbacks):
            self._trainer.log(metrics)
        # Logging resets it, and the Trainer has yet to log its own numbers.
        control.should_log = should_log

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Finish the run."""
        self._end()


@contextmanager
def _printers_silent(callbacks: Sequence[TrainerCallback]) -> Iterator[None]:
    """Keep the Trainer's printers silent within this block: it logs a number per layer and gauge.

    Reporters and callbacks of the user receive the numbers.
    """
    silenced = []
    for callback in callbacks:
        if type(callback).on_log in _PRINTERS:
            callback.on_log = _print_nothing  # hides the method of the class
            silenced.append(callback)
    try:
        yield
    finally:
        for callback in silenced:
            del callback.on_log


def _print_nothing(*args: Any, **kwargs: Any) -> None:
    return None


def _put_back(trainer: Any, name: str, method: Any) -> None:
    """Undo ``trainer.name = …``, which hides a method of the class or another library's."""
    if getattr(method, "__self__", None) is trainer:
        delattr(trainer, name)
    else:
        setattr(trainer, name, method)
