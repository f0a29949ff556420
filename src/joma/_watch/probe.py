"""A fixed batch that is measured instead of the training batches: one more pass per measurement, in eval mode."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from joma._events.source import Source


class Probe:
    """A batch (mapping, sequence of arguments or one tensor) as arguments of the model."""

    def __init__(self, batch: Any) -> None:
        self._args: tuple[Any, ...] = ()
        self._kwargs: dict[str, Any] = {}
        if isinstance(batch, Tensor):
            self._args = (batch,)
        elif isinstance(batch, Mapping):
            self._kwargs = dict(batch)
        elif isinstance(batch, (tuple, list)):
            self._args = tuple(batch)
        else:
            raise TypeError(f"probe must be a mapping, a sequence of arguments or a tensor, not {type(batch).__name__}")

    def run(self, source: Source) -> None:
        """The pass; training does not notice it."""
        model = source.model
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
        args = tuple(_to(x, device) for x in self._args)
        kwargs = {key: _to(x, device) for key, x in self._kwargs.items()}
        modes = {module: module.training for module in model.modules()}
        target = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
        try:
            for module in modes:
                module.training = False
            with source.listening():
                source.run_aside(target, args, kwargs)
        finally:
            for module, mode in modes.items():
                module.training = mode


def _to(x: Any, device: torch.device) -> Any:
    return x.to(device) if isinstance(x, Tensor) else x
