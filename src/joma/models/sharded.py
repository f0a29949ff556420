"""Matrices that are sharded over processes (FSDP2), measured without gathering them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Shard:
    """The rows of a matrix that this process holds, and sums over the processes with the others."""

    local: Tensor  # (rows, n)
    size: int  # entries of the complete matrix
    group: Any = None  # the process group; None if this process holds all rows

    @classmethod
    def of(cls, matrix: Any) -> Shard:
        """Return the local rows of a `DTensor`, or of its transpose if it is sharded by columns.

        Every other tensor is complete.
        """
        if not hasattr(matrix, "to_local"):
            return cls(matrix, matrix.numel())
        sharded = []
        for mesh_dimension, placement in enumerate(matrix.placements):
            if not placement.is_replicate():
                sharded.append((mesh_dimension, placement))
        if not sharded:
            return cls(matrix.to_local(), matrix.numel())
        mesh_dimension, placement = sharded[0]
        is_plain = placement.is_shard() and type(placement).__name__ == "Shard"
        # Strided, partial, or sharded twice: rows of these are not rows of the matrix.
        if len(sharded) > 1 or not is_plain:
            return cls(gather(matrix), matrix.numel())
        local = matrix.to_local()
        if placement.dim == 1:
            local = local.T  # singular values do not change
        return cls(local, matrix.numel(), matrix.device_mesh.get_group(mesh_dimension))

    @property
    def is_complete(self) -> bool:
        """True if this process holds all rows."""
        return self.group is None

    def sum_(self, values: Tensor) -> Tensor:
        """Sum a tensor over the shards, in place."""
        if self.group is not None:
            torch.distributed.all_reduce(values, group=self.group)
        return values

    def sum(self, value: float) -> float:
        """Return the sum of a number over the shards."""
        if self.is_complete:
            return value
        return float(self.sum_(self._tensor(value)))

    def maximum(self, value: float) -> float:
        """Return the largest of a number over the shards; NaN if it is NaN on one of them."""
        if self.is_complete:
            return value
        # MAX of a NaN is undefined among processes, so that a flag travels with the number.
        both = self._tensor([value, float(value != value)])
        torch.distributed.all_reduce(both, op=torch.distributed.ReduceOp.MAX, group=self.group)
        if both[1] > 0:
            return float("nan")
        return float(both[0])

    def _tensor(self, values: object) -> Tensor:
        return torch.tensor(values, dtype=torch.float64, device=self.local.device)


def gather(tensor: Tensor) -> Tensor:
    """Return the complete tensor. If it is sharded, all processes with a shard must call this."""
    if hasattr(tensor, "full_tensor"):
        return tensor.full_tensor()
    return tensor
