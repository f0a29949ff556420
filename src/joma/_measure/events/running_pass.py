"""The state of the pass that is running: its modules, parameters and masks."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn

from joma._measure.events.tensors import is_plain
from joma._measure.gauges.attention_inputs import mask_of
from joma._measure.gauges.masks import Mask


class RunningPass:
    """The memory of one pass, from one module call to the next.

    Attributes:
        thread: the thread that the pass runs in.
    """

    def __init__(self) -> None:
        self.thread = threading.get_ident()
        self._invocations: Counter[nn.Module] = Counter()
        self._parameter_storages: set[int] = set()  # addresses of their memory
        self._mask_key: tuple[Any, ...] | None = None
        self._mask: Mask | None = None
        self._mask_content = torch.empty(0)  # what the mask held when it was read

    def count(self, module: nn.Module) -> int:
        """Return how often a module was called before in this pass, and count the call."""
        invocation = self._invocations[module]
        self._invocations[module] = invocation + 1
        return invocation

    def add_parameter(self, parameter: nn.Parameter) -> None:
        """Remember where a parameter lies in memory."""
        if is_plain(parameter):
            self._parameter_storages.add(parameter.untyped_storage().data_ptr())

    def is_parameter(self, tensor: Tensor) -> bool:
        """True if a tensor shares its memory with a parameter.

        A product with a parameter is a projection; one without is a product of two activations.
        Views count: W.T and the three parts of a fused projection lie in the memory of W.
        """
        return tensor.untyped_storage().data_ptr() in self._parameter_storages

    def read_mask(self, mask: Tensor, query: Tensor, key: Tensor) -> Mask:
        """Return what a mask says; read once for all layers of a pass that share it."""
        # The same memory, viewed in another shape, is another mask.
        mask_key = (
            mask.data_ptr(),
            mask.dtype,
            mask.shape,
            mask.stride(),
            query.shape[2],
            key.shape[2],
        )
        content = _stored_part(mask)
        # Writing through `.data` does not change the version of a tensor, so its numbers are
        # compared. To read the mask again would take several passes over them.
        is_same = self._mask_key == mask_key and torch.equal(content, self._mask_content)
        if self._mask is None or not is_same:
            # What was read holds the mask, so that its address stays its own.
            self._mask = mask_of(mask, query, key)
            self._mask_key = mask_key
            self._mask_content = content.clone()
        return self._mask


def _stored_part(mask: Tensor) -> Tensor:
    """Return a mask without its repetitions along axes that were expanded."""
    part = mask.detach()
    for axis, stride in enumerate(part.stride()):
        if stride == 0 and part.shape[axis] > 1:
            part = part.narrow(axis, 0, 1)
    return part
