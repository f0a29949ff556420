"""Computing next to a running model, independent of its precision, gradients and modes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch


@contextmanager
def exactly(device: str) -> Iterator[None]:
    """Compute without autocast and gradients, and unseen by function modes."""
    autocast: AbstractContextManager[object] = nullcontext()
    # Entering autocast takes some 10 µs, even to switch it off, and every event comes through here.
    if torch.is_autocast_enabled(device):
        autocast = torch.autocast(device, enabled=False)
    with torch.no_grad(), torch._C.DisableTorchFunction(), autocast:
        yield
