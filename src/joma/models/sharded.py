"""Matrices that are sharded over processes (FSDP2): what a gauge needs, without gathering them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Shard:
    """The rows of a matrix that this process holds, and sums over the processes that hold the others."""

    local: Tensor  # (rows, n)
    size: int  # entries of the whole matrix
    group: Any = None  # the process group; None if the matrix is whole

    @classmethod
    def of(cls, w: Any) -> Shard:
        """Rows of a `DTensor` that is sharded once; of one sharded by columns, its transpose; anything else whole."""
        if not hasattr(w, "to_local"):
            return cls(w, w.numel())
        sharded = [(n, p) for n, p in enumerate(w.placements) if not p.is_replicate()]
        if not sharded:
            return cls(w.to_local(), w.numel())
        (mesh_dim, placement), *others = sharded
        if others or not placement.is_shard() or type(placement).__name__ != "Shard":
            return cls(whole(w), w.numel())  # strided or partial: gathered
        local = w.to_local()
        return cls(
            local.T if placement.dim == 1 else local, w.numel(), w.device_mesh.get_group(mesh_dim)
        )

    @property
    def whole(self) -> bool:
        """Is all of the matrix here?"""
        return self.group is None

    def sum_(self, x: Tensor) -> Tensor:
        """``x`` summed over the shards, in place."""
        if self.group is not None:
            torch.distributed.all_reduce(x, group=self.group)
        return x

    def sum(self, x: float) -> float:
        """A number summed over the shards."""
        return x if self.whole else float(self.sum_(self._tensor(x)))

    def maximum(self, x: float) -> float:
        """The largest of a number over the shards; NaN if one of them is."""
        if self.whole:
            return x
        both = self._tensor([x, float(x != x)])
        torch.distributed.all_reduce(both, op=torch.distributed.ReduceOp.MAX, group=self.group)
        return float("nan") if both[1] > 0 else float(both[0])

    def _tensor(self, x: object) -> Tensor:
        return torch.tensor(x, dtype=torch.float64, device=self.local.device)


def whole(w: Tensor) -> Tensor:
    """The whole matrix, gathered if it is sharded; every process that holds a shard must call this."""
    return w.full_tensor() if hasattr(w, "full_tensor") else w
