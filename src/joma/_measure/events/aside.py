"""Computing beside a running model, so that neither its precision nor its gradients nor its modes have a part in it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch


@contextmanager
def exactly(device: str) -> Iterator[None]:
    """Compute in the precision that is asked for, whatever the training around uses, without gradients and unseen."""
    autocast = (
        torch.autocast(device, enabled=False)
        if torch.is_autocast_enabled(device)
        else nullcontext()
    )
    with torch.no_grad(), torch._C.DisableTorchFunction(), autocast:
        yield
