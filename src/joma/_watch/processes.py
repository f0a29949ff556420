"""Watching with several processes: values are reduced over them, one of them writes."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor, nn


class Processes:
    """The processes that train this model together; only this one if torch.distributed is not in use."""

    def __init__(self, model: nn.Module) -> None:
        self.many = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        self.first = not self.many or dist.get_rank() == 0
        self._sharded = any(hasattr(p, "to_local") for p in model.parameters())
        cuda = self.many and "nccl" in str(dist.get_backend())
        self._device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")

    @property
    def computes_weights(self) -> bool:
        """Does this process measure weights? All do where they are sharded; else the first, for all."""
        return self.first or self._sharded

    def sum_(self, x: Tensor) -> Tensor:
        """Sum over processes, in place."""
        return self._reduce(x, dist.ReduceOp.SUM) if self.many else x

    def max_(self, x: Tensor) -> Tensor:
        """Largest over processes, in place."""
        return self._reduce(x, dist.ReduceOp.MAX) if self.many else x

    def sum_whole_(self, x: Tensor) -> Tensor:
        """The counterpart of the zeros that processes send which do not measure weights."""
        return x if self._sharded else self.sum_(x)

    def mean(self, x: float) -> float:
        """Mean over the processes that have a number."""
        if not self.many:
            return x
        known = not math.isnan(x)
        both = self.sum_(torch.tensor([x if known else 0.0, float(known)], dtype=torch.float64))
        return float(both[0] / both[1]) if both[1] > 0 else math.nan

    def any(self, x: bool) -> bool:
        """Is it true in one of them?"""
        return bool(self.max_(torch.tensor([float(x)], dtype=torch.float64))[0] > 0)

    def _reduce(self, x: Tensor, op: dist.ReduceOp.RedOpType) -> Tensor:
        there = x.to(self._device)
        dist.all_reduce(there, op=op)
        if there is not x:
            x.copy_(there)
        return x
