"""Where the first number that is not finite comes from, in the passes of a model.

Reading every output of every module would cost a few per cent of a step. So only the outputs of blocks and of the whole
model are read. The outputs of the modules inside are kept until their block ends,
and are looked through only if the block's own output is not finite.
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
        cause: "weight" if a weight of its own is not finite, "input" if the model itself was given such an input,
            else "output".
        detail: the name of the weight, or "".
        value: the first number that is not finite.
        order: how many modules had ended before it in its pass.
    """

    module: str
    cause: str
    detail: str
    value: float
    order: int


@dataclass
class FiniteTrace:
    """Follows the outputs of modules; `EventSource` calls it for each.

    Attributes:
        blocks: names of the blocks.
        first: the first module whose output is not finite, if there is one.
        later: names of the blocks after it whose outputs are not finite either.
    """

    blocks: Collection[str] = ()
    first: FirstNotFinite | None = None
    later: list[str] = field(default_factory=list)
    _ended: list[tuple[Call, Any]] = field(
        default_factory=list
    )  # modules of this pass, with their outputs
    _count: int = 0  # of modules that have ended in this pass

    def clear(self) -> None:
        """Forget the passes that were seen."""
        self.first = None
        self.later.clear()
        self.end_pass()

    def end_pass(self) -> None:
        """Let go of all outputs."""
        self._ended.clear()
        self._count = 0

    def mark(self) -> int:
        """Return the place of the first module that will end inside a module that begins now."""
        return len(self._ended)

    def keep(self, call: Call, output: Any) -> None:
        """Keep the output of a module until its block ends."""
        self._count += 1
        self._ended.append((call, output))

    def end_block(self, call: Call, output: Any, mark: int, is_outermost: bool) -> None:
        """Look at the output of a block or of the model, and let go of those inside."""
        tensor = first_tensor(output)
        if tensor is not None and not is_finite(tensor):
            if self.first is None:
                self.first = self._search(mark, is_outermost)
            elif not is_outermost:
                self.later.append(call.name)
        del self._ended[mark:]

    def _search(self, mark: int, is_outermost: bool) -> FirstNotFinite:
        call, tensor, order = self._first_bad_output(mark)
        for name, parameter in call.module.named_parameters(recurse=False):
            if is_plain(parameter) and not is_finite(parameter):
                return FirstNotFinite(call.name, "weight", name, first_bad(parameter), order)
        states = call.states
        has_bad_input = states is not None and is_plain(states) and not is_finite(states)
        cause = "input" if has_bad_input and order == 1 else "output"
        return FirstNotFinite(call.name, cause, "", first_bad(tensor), order)

    def _first_bad_output(self, mark: int) -> tuple[Call, Tensor, int]:
        """Return the first module since ``mark`` whose output is not finite, the output, and its place in the pass."""
        inside = self._ended[mark:]
        order = self._count - len(inside)
        for call, output in inside:
            order += 1
            tensor = first_tensor(output)
            if tensor is not None and not is_finite(tensor):
                return call, tensor, order
        raise AssertionError("the last one is the block, whose output is not finite")


def first_tensor(output: Any) -> Tensor | None:
    """Return the first floating tensor of what a module returned, if there is one that can be read."""
    if isinstance(output, Tensor):
        can_be_read = output.is_floating_point() and not output.is_nested and is_plain(output)
        return output if can_be_read else None
    if isinstance(output, dict):
        parts = list(output.values())
    elif isinstance(output, (list, tuple)):
        parts = list(output)
    else:
        return None
    for part in parts:
        tensor = first_tensor(part)
        if tensor is not None:
            return tensor
    return None


def is_finite(tensor: Tensor) -> bool:
    """True if all entries are finite.

    A sum is not finite if one entry is not, and takes half the time of looking at each entry. It may also overflow;
    then the entries decide.
    """
    plain = tensor.detach()
    kind = torch.float32 if plain.dtype in (torch.float16, torch.bfloat16) else None
    if bool(plain.sum(dtype=kind).isfinite()):
        return True
    return bool(plain.isfinite().all())


def first_bad(tensor: Tensor) -> float:
    """Return the first entry that is not finite."""
    flat = tensor.detach().reshape(-1)
    return float(flat[~flat.isfinite()][0])
