"""`WatchCallback` for the Trainer of Lightning, imported as ``lightning`` or as ``pytorch_lightning``.

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
from joma.integrations._deferred import Deferred, Options

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


class WatchCallback(Deferred, Callback):
    """Watches the module that a Lightning Trainer fits, from the first step to the last.

    Measurements go to the run folder and to all loggers of the trainer, under the number of optimiser steps made
    (``trainer.global_step``; Lightning's own metrics of that step are logged under one less). Accumulated batches are
    one step, and its loss is their mean. Learning rates and τ come from the trainer's optimisers. The run is finished
    when fitting ends; if it fails or is interrupted, with the reason.

    Arguments:
        run, every, gauges, options: as of `joma.watch`; ``live`` is False by default. ``on_alert`` may also be "stop"
            (fitting ends after the step) or "lower" (learning rates are halved): at critical alerts. With
            ``resume="auto"`` a job that is restarted goes on with its run.

    Attributes:
        watch: the `Watch`, once training has begun.
        path: the run folder, if there is one.
    """

    def __init__(
        self, run: str | os.PathLike[str] | None = None, every: Every | None = None,
        gauges: Chosen | None = None, **options: Unpack[Options],
    ) -> None:  # fmt: skip
        super().__init__(run, every, gauges, options)
        self._losses: list[Tensor] = []  # of the batches since the last optimiser step
        self._global_step = self._steps = 0
        self._trainer: Trainer | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The module is where it trains, and wrapped."""
        self._trainer = trainer
        wrapped = trainer.strategy.model
        self._losses.clear()
        self._global_step = self._steps = trainer.global_step
        self._begin(wrapped if isinstance(wrapped, nn.Module) else pl_module, trainer.optimizers)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """A batch was trained on; an optimiser step was made unless gradients are accumulated."""
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if isinstance(loss, Tensor) and loss.numel() == 1:
            self._losses.append(loss.detach())
        if trainer.global_step == self._global_step:
            return
        self._global_step = trainer.global_step
        self._steps += 1  # batches with a step: global_step counts each of several optimisers
        metrics = self.watch.step(self._mean_loss(trainer, pl_module), step=self._steps)
        self._losses.clear()
        for logger in trainer.loggers if metrics else []:
            logger.log_metrics(metrics, step=self._steps)

    def _mean_loss(self, trainer: Trainer, pl_module: LightningModule) -> Tensor | None:
        """Over the batches of this step; Lightning has divided them by how many it accumulates."""
        if not self._losses:
            return None
        divided = trainer.accumulate_grad_batches if pl_module.automatic_optimization else 1
        total = self._losses[0]
        for loss in self._losses[1:]:
            total = total + loss
        return total * (divided / len(self._losses))

    def _stop(self) -> None:
        assert self._trainer is not None
        self._trainer.should_stop = True

    def _schedulers(self) -> list[Any]:
        return (
            []
            if self._trainer is None
            else [config.scheduler for config in self._trainer.lr_scheduler_configs]
        )

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint of Lightning keeps: phases, the clock, where measurements left off."""
        return self.watch.state_dict() if self._watch is not None else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Training goes on from a checkpoint."""
        self._state = state_dict or None

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Fitting came to its end."""
        self._end()

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Fitting failed or was interrupted."""
        self._end(exception)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Whatever happened."""
        self._end()
