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
from joma.integrations._deferred import Deferred, Options

try:
    from transformers import PrinterCallback, ProgressCallback, TrainerCallback
    from transformers.trainer_utils import get_last_checkpoint
except ImportError as error:
    raise ImportError(
        f"joma.integrations.transformers needs Transformers and Accelerate ({error}): pip install 'joma[hf]'"
    ) from error

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import Trainer

__all__ = ["TrainerWatch", "watch"]
_STATE = "joma_watch.pt"  # in a checkpoint's folder
_PRINTERS = (PrinterCallback.on_log, ProgressCallback.on_log)  # with and without disable_tqdm


def watch(
    trainer: Trainer,
    run: str | os.PathLike[str] | None = None,
    every: Every | None = None,
    gauges: Chosen | None = None,
    **options: Unpack[Options],
) -> TrainerWatch:
    """Watch the model of a Hugging Face ``trainer`` from the beginning of ``trainer.train()`` to its end.

    Measurements go to the run folder and, through ``trainer.log``, to whatever ``report_to`` names: next to
    ``train/loss`` as ``train/joma/entropy/layer_00``. The Trainer does not print them. Steps are optimiser steps, as
    the Trainer counts them, and the loss is the one that it logs. Learning rates and τ come from its optimiser. The run
    is finished when training ends; if it fails or is interrupted, with the reason.

    Arguments:
        trainer: the Trainer, before ``train()``.
        run, every, gauges, options: as of `joma.watch`; ``live`` is False by default. ``on_alert`` may also be "stop"
            (training ends after the step) or "lower" (learning rates are halved): at critical alerts. With
            ``resume="auto"`` a job that is restarted goes on with its run.
    """
    return TrainerWatch(trainer, run, every, gauges, **options)


class TrainerWatch(Deferred, TrainerCallback):
    """A watch on a Trainer; made by `joma.integrations.transformers.watch`.

    Attributes:
        watch: the `Watch`, once training has begun.
        path: the run folder, if there is one.
    """

    def __init__(
        self, trainer: Trainer, run: str | os.PathLike[str] | None, every: Every | None, gauges: Chosen | None,
        **options: Unpack[Options],
    ) -> None:  # fmt: skip
        if not hasattr(trainer, "callback_handler"):
            raise TypeError(f"a transformers.Trainer is watched, not {type(trainer).__name__}")
        if other := next(
            (cb for cb in trainer.callback_handler.callbacks if isinstance(cb, TrainerWatch)), None
        ):
            raise ValueError(
                f"this trainer is watched already ({other!r}); close() that watch first"
            )
        super().__init__(run, every, gauges, options)
        self._trainer: Any = trainer
        self._loss: Tensor | None = None  # of this step so far
        self._control: Any = None  # of the Trainer, in this step
        self._resumed: Any = None  # what train() was told to go on from
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
        """``trainer.train``; callbacks do not hear of an exception, and of the loss only when it is logged."""
        trainer = self._trainer
        self._resumed = kwargs.get("resume_from_checkpoint", args[0] if args else None)
        training_step = trainer.training_step

        @functools.wraps(training_step)
        def heard(*args: Any, **kwargs: Any) -> Any:
            # scaled for accumulation whichever way the model does that: what the Trainer sums up and logs
            loss = training_step(*args, **kwargs)
            self._loss = loss if self._loss is None else self._loss + loss
            return loss

        trainer.training_step = heard
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
        return [] if self._trainer.lr_scheduler is None else [self._trainer.lr_scheduler]

    # What the Trainer calls

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The model is where it trains, and wrapped."""
        self._loss = None
        if (checkpoint := self._checkpoint(args)) is not None and (
            saved := Path(checkpoint, _STATE)
        ).exists():
            self._state = torch.load(saved, weights_only=True)
        self._begin(self._trainer.model_wrapped, self._trainer.optimizer)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """A checkpoint was written: phases, the clock and where measurements left off go into it."""
        folder = Path(args.output_dir, f"checkpoint-{state.global_step}")
        if state.is_world_process_zero and self._open and folder.is_dir():
            torch.save(self.watch.state_dict(), folder / _STATE)

    def _checkpoint(self, args: Any) -> str | None:
        """The folder that training goes on from, if it does."""
        if self._resumed is True:
            return get_last_checkpoint(args.output_dir)
        return str(self._resumed) if self._resumed else None

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """An optimiser step was made."""
        loss, self._loss, self._control = self._loss, None, control
        metrics = self.watch.step(loss, step=state.global_step)
        if metrics:
            should_log = control.should_log
            with _printers_silent(self._trainer.callback_handler.callbacks):
                self._trainer.log(metrics)
            control.should_log = (
                should_log  # logging resets it, and the Trainer's own numbers are still to come
            )

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Training came to its end."""
        self._end()


@contextmanager
def _printers_silent(callbacks: Sequence[TrainerCallback]) -> Iterator[None]:
    """Keep the Trainer's own printers from printing what is logged within this block: one number per layer and gauge.

    Reporters, and callbacks of the user, are told.
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
    """Undo ``trainer.name = …``, which hides the method of the class or what another library put there before."""
    if getattr(method, "__self__", None) is trainer:
        delattr(trainer, name)
    else:
        setattr(trainer, name, method)
