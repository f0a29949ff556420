"""Watching with several processes: each measures its own passes, or values are reduced over all and one writes.

Collective calls wait for all processes. A watch makes none unless ``processes="all"`` promises that every process has
one, so that a watch in the first process only can never hang the others.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn

from joma._measure.events.reasons import Reason
from joma._measure.watch.values import Values

Which = Literal["own", "all"]


class Processes:
    """The processes that are measured: this one, or all that train the model together.

    Attributes:
        many: values are reduced over several processes.
        rank: of this process; 0 if torch.distributed is not in use.
        count: of all processes; 1 if torch.distributed is not in use.
        first: this process speaks and writes for those that are measured.
        is_alone: there are other processes, and they take no part in what this one does.
    """

    def __init__(self, model: nn.Module, which: Which = "own") -> None:
        if which not in get_args(Which):
            raise ValueError(f"processes must be 'own' or 'all', got {which!r}")
        distributed = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        self.rank = dist.get_rank() if distributed else 0
        self.count = dist.get_world_size() if distributed else 1
        self.many = distributed and which == "all"
        self.first = not self.many or self.rank == 0
        self.is_alone = distributed and which == "own"
        self._sharded = any(hasattr(p, "to_local") for p in model.parameters())
        cuda = self.many and "nccl" in str(dist.get_backend())
        self._device = (
            torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
        )

    @property
    def cannot_gather(self) -> str | None:
        """Why parameters cannot be put together, or passes of this process's own be made, if so."""
        if not (self.is_alone and self._sharded):
            return None
        return (
            "parameters are sharded over processes, and this watch measures its own process only; give "
            f"processes='all' in every process {Reason.SHARDED}"
        )

    def folder(self, run: str | os.PathLike[str]) -> str | os.PathLike[str]:
        """The folder for this process: where each measures its own, that of the first has the name given."""
        if not self.is_alone or self.rank == 0:
            return run
        path = Path(run)
        return path.with_name(f"{path.name}-rank{self.rank}")

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

    def mean(self, x: float | None) -> float | None:
        """Return the mean over the processes that have a number, NaN if one of them is NaN, None if none has one."""
        if not self.many:
            return x
        here = [0.0, 0.0] if x is None else [x, 1.0]
        both = self.sum_(torch.tensor(here, dtype=torch.float64))
        return float(both[0] / both[1]) if both[1] > 0 else None

    def sum_whole_values(self, values: Values) -> Values:
        """Return what the processes that measure weights have measured; the others give empty tables."""
        if self._sharded or not self.many:
            return values
        numbers = self.sum_(torch.where(values.measured, values.numbers, 0.0))
        measured = self.max_(values.measured.double()) > 0
        return Values.where(measured, numbers)

    def any(self, x: bool) -> bool:
        """Is it true in one of them?"""
        return bool(self.max_(torch.tensor([float(x)], dtype=torch.float64))[0] > 0)

    def _reduce(self, x: Tensor, op: dist.ReduceOp.RedOpType) -> Tensor:
        there = x.to(self._device)
        dist.all_reduce(there, op=op)
        if there is not x:
            x.copy_(there)
        return x
