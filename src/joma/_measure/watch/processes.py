"""Watching with several processes: each measures its own passes, or all reduce and one writes.

A collective call waits for all processes. A watch makes none unless ``processes="all"`` promises
that every process has a watch. So a watch in the first process alone can never hang the others.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn

from joma._measure.events.reasons import Reason
from joma._runs.long_table import LongTable

ProcessScope = Literal["own", "all"]


class Processes:
    """The processes that are measured: this one, or all that train the model together.

    Attributes:
        rank: of this process; 0 without torch.distributed.
        count: of all processes; 1 without torch.distributed.
        is_joint: True if values are reduced over several processes.
        is_first: True if this process reports and writes for those that are measured.
        is_alone: True if there are other processes, which take no part in this watch.
    """

    def __init__(self, model: nn.Module, scope: ProcessScope = "own") -> None:
        if scope not in get_args(ProcessScope):
            raise ValueError(f"processes must be 'own' or 'all', got {scope!r}")
        self.rank = 0
        self.count = 1
        if dist.is_available() and dist.is_initialized():
            self.rank = dist.get_rank()
            self.count = dist.get_world_size()
        has_others = self.count > 1
        self.is_joint = has_others and scope == "all"
        self.is_first = not self.is_joint or self.rank == 0
        self.is_alone = has_others and scope == "own"
        self._is_sharded = any(hasattr(parameter, "to_local") for parameter in model.parameters())
        # NCCL reduces tensors on GPUs only.
        self._device = torch.device("cpu")
        if self.is_joint and "nccl" in str(dist.get_backend()):
            self._device = torch.device("cuda", torch.cuda.current_device())

    @property
    def cannot_gather(self) -> str | None:
        """The reason why parameters cannot be gathered for an extra pass; None if they can be."""
        if not (self.is_alone and self._is_sharded):
            return None
        return (
            "parameters are sharded over processes, and this watch measures its own process only; "
            f"give processes='all' in every process {Reason.SHARDED}"
        )

    def folder(self, run: str | os.PathLike[str]) -> str | os.PathLike[str]:
        """Return the folder of this process: ``run``, or ``run-rank1``, … if each writes its own."""
        if not self.is_alone or self.rank == 0:
            return run
        path = Path(run)
        return path.with_name(f"{path.name}-rank{self.rank}")

    @property
    def computes_weights(self) -> bool:
        """True if this process measures weights: all do if they are sharded, else the first."""
        return self.is_first or self._is_sharded

    def sum_(self, tensor: Tensor) -> Tensor:
        """Sum over processes, in place."""
        if self.is_joint:
            self._reduce(tensor, dist.ReduceOp.SUM)
        return tensor

    def max_(self, tensor: Tensor) -> Tensor:
        """Take the largest over processes, in place."""
        if self.is_joint:
            self._reduce(tensor, dist.ReduceOp.MAX)
        return tensor

    def mean(self, number: float | None) -> float | None:
        """Return the mean over the processes that have a number; None if no process has one.

        It is NaN if the number of one process is NaN.
        """
        if not self.is_joint:
            return number
        total_and_count = torch.zeros(2, dtype=torch.float64)
        if number is not None:
            total_and_count = torch.tensor([number, 1.0], dtype=torch.float64)
        total, count = self.sum_(total_and_count)
        if count == 0:
            return None
        return float(total / count)

    def sum_whole_values(self, table: LongTable) -> LongTable:
        """Return the rows of the process that measures weights; the others have none.

        All processes have the same section, so that they exchange arrays of one shape.
        """
        if self._is_sharded or not self.is_joint:
            return table
        (section,) = table.sections
        measured = torch.from_numpy(table.measured(section.gauge))
        numbers = torch.from_numpy(table.array(section.gauge))
        numbers = self.sum_(torch.where(measured, numbers, 0.0))
        measured = self.max_(measured.double()) > 0
        return LongTable.of_array(
            section.gauge, numbers.numpy(), measured.numpy(), section.precision
        )

    def largest(self, number: int) -> int:
        """Return the largest of a number over the processes."""
        if not self.is_joint:
            return number
        return int(self.max_(torch.tensor([float(number)], dtype=torch.float64)))

    def any(self, is_true: bool) -> bool:
        """Return True if it is true in one of the processes."""
        if not self.is_joint:
            return is_true
        flag = torch.tensor([float(is_true)], dtype=torch.float64)
        return bool(self.max_(flag)[0] > 0)

    def _reduce(self, tensor: Tensor, operation: dist.ReduceOp.RedOpType) -> None:
        reduced = tensor.to(self._device)
        dist.all_reduce(reduced, op=operation)
        if reduced is not tensor:
            tensor.copy_(reduced)
