"""The origin of the first number that is not finite, in the passes of a model.

Reading every output of every module would cost a few per cent of a step. So only the outputs of
blocks and of the model itself are read. The outputs of the modules inside are held until their
block ends, and are searched only if the block's own output is not finite.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from joma._measure.events.events import Call
from joma._measure.events.tensors import is_plain


@dataclass(frozen=True)
class FirstNotFinite:
    """The first module whose output is not finite.

    Attributes:
        module: its name.
        cause: "weight" if one of its own weights is not finite, "input" if the input of the model
            is not, else "output".
        detail: the name of the weight, or "".
        value: the first number that is not finite.
        order: how many modules had ended before it in its pass.
    """

    module: str
    cause: str
    detail: str
    value: float
    order: int


@dataclass(frozen=True, eq=False)
class _EndedModule:
    """A module that has returned, and what it returned."""

    call: Call
    output: Any


@dataclass
class FiniteTrace:
    """Follows the outputs of modules; an `EventSource` calls it for each.

    Attributes:
        blocks: names of the blocks.
        first: the first module whose output is not finite, if there is one.
        later: names of the blocks after it whose outputs are not finite either.
    """

    blocks: Collection[str] = ()
    first: FirstNotFinite | None = None
    later: list[str] = field(default_factory=list)
    _ended: list[_EndedModule] = field(default_factory=list)  # of the blocks that still run
    _ended_count: int = 0  # in this pass

    def clear(self) -> None:
        """Forget the passes that were seen."""
        self.first = None
        self.later.clear()
        self.end_pass()

    def end_pass(self) -> None:
        """Release all outputs."""
        self._ended.clear()
        self._ended_count = 0

    def mark(self) -> int:
        """Return the place of the first module that will end inside a module that begins now."""
        return len(self._ended)

    def keep(self, call: Call, output: Any) -> None:
        """Hold the output of a module until its block ends."""
        self._ended_count += 1
        self._ended.append(_EndedModule(call, output))

    def end_block(self, call: Call, output: Any, mark: int, is_outermost: bool) -> None:
        """Read the output of a block or of the model, and release those of the modules inside."""
        tensor = first_tensor(output)
        if tensor is not None and not is_finite(tensor):
            if self.first is None:
                self.first = self._find_first(mark)
            elif not is_outermost:
                self.later.append(call.name)
        del self._ended[mark:]

    def _find_first(self, mark: int) -> FirstNotFinite:
        """Return the first module since ``mark`` whose output is not finite, and the cause."""
        inside = self._ended[mark:]
        order = self._ended_count - len(inside)
        for ended in inside:
            order += 1
            tensor = first_tensor(ended.output)
            if tensor is not None and not is_finite(tensor):
                return _diagnose(ended.call, tensor, order)
        raise AssertionError("the last one is the block, whose output is not finite")


def _diagnose(call: Call, output: Tensor, order: int) -> FirstNotFinite:
    for name, parameter in call.module.named_parameters(recurse=False):
        if is_plain(parameter) and not is_finite(parameter):
            return FirstNotFinite(call.name, "weight", name, first_bad(parameter), order)
    states = call.states
    cause = "output"
    # The input of a later module is the output of an earlier one, which is finite.
    if order == 1 and states is not None and is_plain(states) and not is_finite(states):
        cause = "input"
    return FirstNotFinite(call.name, cause, "", first_bad(output), order)


def first_tensor(output: Any) -> Tensor | None:
    """Return the first floating tensor in the output of a module that can be read, or None."""
    if isinstance(output, Tensor):
        if output.is_floating_point() and not output.is_nested and is_plain(output):
            return output
        return None
    parts: Collection[Any] = ()
    if isinstance(output, dict):
        parts = output.values()
    elif isinstance(output, (list, tuple)):
        parts = output
    for part in parts:
        tensor = first_tensor(part)
        if tensor is not None:
            return tensor
    return None


def is_finite(tensor: Tensor) -> bool:
    """True if all entries are finite.

    A sum is not finite if one entry is not, and takes half the time of looking at each entry. It
    may also overflow; then the entries decide.
    """
    plain = tensor.detach()
    sum_dtype = None
    if plain.dtype in (torch.float16, torch.bfloat16):
        sum_dtype = torch.float32
    if bool(plain.sum(dtype=sum_dtype).isfinite()):
        return True
    return bool(plain.isfinite().all())


def first_bad(tensor: Tensor) -> float:
    """Return the first entry that is not finite."""
    flat = tensor.detach().reshape(-1)
    return float(flat[~flat.isfinite()][0])
