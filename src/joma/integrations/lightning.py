"""`WatchCallback` for the Trainer of Lightning (``lightning`` or ``pytorch_lightning``).

>>> from joma.integrations.lightning import WatchCallback  # doctest: +SKIP
>>> Trainer(callbacks=[WatchCallback(run="runs/mine", every=100)])  # doctest: +SKIP
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Unpack

from torch import Tensor, nn

from joma._measure.watch.schedule import Chosen, Every
from joma.integrations._deferred_watch import DeferredWatch, WatchKeywords

if TYPE_CHECKING:
    from lightning.pytorch import Callback, LightningModule, Trainer
else:
    try:
        if "pytorch_lightning" in sys.modules and "lightning" not in sys.modules:
            from pytorch_lightning import Callback
        else:
            try:
                from lightning.pytorch import Callback
            except ModuleNotFoundError:
                from pytorch_lightning import Callback
    except ImportError as error:
        raise ImportError(
            f"joma.integrations.lightning needs Lightning ({error}): pip install 'joma[lightning]'"
        ) from error

__all__ = ["WatchCallback"]


class WatchCallback(DeferredWatch, Callback):
    """Watches the module that a Lightning Trainer fits, from the first step to the last.

    Measurements go to the run folder and to all loggers of the trainer, under the number of
    optimiser steps made (``trainer.global_step``; Lightning's own metrics of that step are logged
    under one less). Accumulated batches are one step, and its loss is their mean. Learning rates
    and τ come from the trainer's optimisers. The run is finished when fitting ends, with the reason
    if it fails or is interrupted.

    Arguments:
        run, every, gauges, options: as for `joma.watch`; ``live`` is False by default. At critical
            alerts, ``on_alert="stop"`` ends the fitting after the step, and "lower" halves the
            learning rates. With ``resume="auto"`` a job that is restarted continues its run.

    Attributes:
        watch: the `Watch`, once training has begun.
        path: the run folder, if there is one.
    """

    def __init__(
        self,
        run: str | os.PathLike[str] | None = None,
        every: Every | None = None,
        gauges: Chosen | None = None,
        **options: Unpack[WatchKeywords],
    ) -> None:
        super().__init__(run, every, gauges, options)
        self._losses: list[Tensor] = []  # of the batches since the last optimiser step
        self._global_step = 0  # of Lightning, at the last step
        self._steps = 0  # batches with an optimiser step
        self._trainer: Trainer | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin the watch: the module is on its device, and wrapped."""
        self._trainer = trainer
        self._losses.clear()
        self._global_step = trainer.global_step
        self._steps = trainer.global_step
        model: nn.Module = pl_module
        if isinstance(trainer.strategy.model, nn.Module):
            model = trainer.strategy.model
        self._begin(model, trainer.optimizers)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Take the loss of a batch, and measure if it ended with an optimiser step."""
        loss = outputs
        if isinstance(outputs, Mapping):
            loss = outputs.get("loss")
        if isinstance(loss, Tensor) and loss.numel() == 1:
            self._losses.append(loss.detach())
        if trainer.global_step == self._global_step:  # gradients are accumulated
            return
        self._global_step = trainer.global_step
        self._steps += 1  # global_step would count each of several optimisers
        metrics = self.watch.step(self._mean_loss(trainer, pl_module), step=self._steps)
        self._losses.clear()
        if not metrics:
            return
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=self._steps)

    def _mean_loss(self, trainer: Trainer, pl_module: LightningModule) -> Tensor | None:
        """Return the mean loss over the batches of this step."""
        if not self._losses:
            return None
        # Lightning has divided the losses by the number of batches that it accumulates.
        divisor = 1
        if pl_module.automatic_optimization:
            divisor = trainer.accumulate_grad_batches
        total = self._losses[0]
        for loss in self._losses[1:]:
            total = total + loss
        return total * (divisor / len(self._losses))

    def _stop(self) -> None:
        assert self._trainer is not None
        self._trainer.should_stop = True

    def _schedulers(self) -> list[Any]:
        if self._trainer is None:
            return []
        return [config.scheduler for config in self._trainer.lr_scheduler_configs]

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint of Lightning keeps: phases, the clock, the last measurement."""
        if self._watch is None:
            return {}
        return self._watch.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the state of a checkpoint that training resumes from."""
        self._state = state_dict or None

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Finish the run."""
        self._end()

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Finish the run with the reason why fitting failed or was interrupted."""
        self._end(exception)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Finish the run, if nothing else did."""
        self._end()
