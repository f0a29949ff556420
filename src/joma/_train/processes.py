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
    import torch.distributed.nn  # first: imported later, its default arguments would hold the group, whose threads
    # then outlive ``destroy_process_group``: one that meets the end of the interpreter aborts the process

    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
        dist.init_process_group(
            "cpu:gloo,cuda:nccl"
        )  # random states and decisions are exchanged on the CPU
    else:
        dist.init_process_group("gloo")
    try:
        yield dist.get_rank()
    finally:
        dist.destroy_process_group()
