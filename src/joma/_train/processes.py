"""Being one of several processes that torchrun started."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist


@contextmanager
def joined() -> Iterator[int]:
    """Join the process group if torchrun made this process; yields the rank, 0 if it is alone."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or dist.is_initialized():
        yield dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
        return
    import torch

    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    try:
        yield dist.get_rank()
    finally:
        dist.destroy_process_group()
