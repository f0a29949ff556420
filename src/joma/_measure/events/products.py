"""Products of two tensors, as matrices or by `torch.einsum`, and the roles of their axes.

scores = einsum("bthd,bshd->bhts", q, k)    d is summed, t is of q alone, s is of k alone
output = einsum("bhts,bshd->bthd", p, v)    s is summed: keys; t is of p alone: queries
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

# Circled digits stand for the axes behind "...": no equation has them as letters.
_FIRST_HIDDEN_LABEL = 0x2460


@dataclass(frozen=True, eq=False)
class WeightsCandidate:
    """An operand of a product that may be attention weights.

    Attributes:
        weights: the operand, with the axis that is summed over, the keys, last.
        values: the other operand.
        query_axes: axes of the weights that the values do not have.
    """

    weights: Tensor
    values: Tensor
    query_axes: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Product(ABC):
    """A product of two tensors."""

    operands: tuple[Tensor, ...]
    output: Tensor

    @abstractmethod
    def weights_candidates(self) -> list[WeightsCandidate]:
        """Return the operands that may be attention weights; they may stand on either side."""

    @property
    @abstractmethod
    def summed_size(self) -> int | None:
        """Size of the axis that is summed over; None if there are several."""

    @property
    @abstractmethod
    def outer_sizes(self) -> tuple[int, ...]:
        """Sizes of the output's axes that come from one operand alone."""

    @abstractmethod
    def projected(self, parameter: int) -> Tensor:
        """Return the output of a product with a parameter, (…, W), its new axes merged into one."""

    @abstractmethod
    def _operand_without(self, axis: int) -> Tensor | None:
        """Return the operand without this axis, (other axes of output …, d); None if unclear."""

    def queries(self, shape: Sequence[int], dim: int) -> Tensor | None:
        """Return the queries (…, d) of scores that were normalised along ``dim``; None if unclear.

        The scores are the output, perhaps with other axes. The axes of the queries are those of the
        scores without that of the keys, in their order.
        """
        key_axis = dim % len(shape)
        if self._has_axes_of_output(shape, key_axis):
            return self._operand_without(key_axis)
        # (B, H, T, Tk) viewed as (B · H, T, Tk), or the reverse
        if key_axis == len(shape) - 1 and prod(shape[:-1]) == prod(self.output.shape[:-1]):
            queries = self._operand_without(self.output.dim() - 1)
            if queries is not None:
                return queries.reshape(*shape[:-1], queries.shape[-1])
        return None

    def _has_axes_of_output(self, shape: Sequence[int], key_axis: int) -> bool:
        """True if scores have the axes of the output; one more column of keys is a learned sink."""
        if len(shape) != self.output.dim():
            return False
        for axis, size in enumerate(shape):
            if axis != key_axis and size != self.output.shape[axis]:
                return False
        return True

    def keys(self, shape: Sequence[int], dim: int, query_axis: int) -> Tensor | None:
        """Return the keys (…, d) of scores normalised along ``dim``; None if that is not clear.

        ``query_axis`` is the axis of queries among the scores' axes without that of the keys.
        """
        key_axis = dim % len(shape)
        axis = query_axis
        if query_axis >= key_axis:
            axis = query_axis + 1
        if len(shape) == self.output.dim():
            return self._operand_without(axis)
        if key_axis == len(shape) - 1 and axis == len(shape) - 2:
            return self._operand_without(self.output.dim() - 2)
        return None


@dataclass(frozen=True, eq=False)
class MatrixProduct(Product):
    """A product of (batches of) matrices."""

    def weights_candidates(self) -> list[WeightsCandidate]:
        # p (…, Tq, Tk) @ v (…, Tk, d); or with channels first, v (…, d, Tk) @ p.mT (…, Tk, Tq)
        first, second = self.operands
        return [
            WeightsCandidate(first, second, (first.dim() - 2,)),
            WeightsCandidate(second.mT, first.mT, (second.dim() - 2,)),
        ]

    @property
    def summed_size(self) -> int | None:
        return self.operands[0].shape[-1]

    @property
    def outer_sizes(self) -> tuple[int, ...]:
        return tuple(self.output.shape[-2:])

    def projected(self, parameter: int) -> Tensor:
        return self.output

    def _operand_without(self, axis: int) -> Tensor | None:
        # output (lead …, M, N) of (…, M, d) @ (…, d, N): the first operand lacks N, the second
        # lacks M
        first, second = self.operands
        lead = self.output.shape[:-2]
        if axis == self.output.dim() - 1:
            return first.expand(*lead, *first.shape[-2:])
        if axis == self.output.dim() - 2:
            return second.transpose(-1, -2).expand(*lead, second.shape[-1], second.shape[-2])
        return None


@dataclass(frozen=True, eq=False)
class EinsumProduct(Product):
    """A product by `torch.einsum`.

    Attributes:
        labels: one letter per axis, for each of the two operands.
        output_labels: likewise for the output.
    """

    labels: tuple[str, ...]
    output_labels: str

    def _summed_labels(self, number: int = 0) -> list[str]:
        labels = self.labels[number]
        others = self.labels[1 - number]
        return [label for label in labels if label in others and label not in self.output_labels]

    def weights_candidates(self) -> list[WeightsCandidate]:
        # "bhts,bshd->bthd": of p, s is summed and t is missing in v. The keys go last: bhts stays
        # as it is.
        candidates = []
        for number, labels in enumerate(self.labels):
            other_labels = self.labels[1 - number]
            summed = self._summed_labels(number)
            if len(summed) != 1 or len(set(labels)) != len(labels):
                continue
            key_axis = labels.index(summed[0])
            rest = labels[:key_axis] + labels[key_axis + 1 :]
            query_axes = tuple(axis for axis, label in enumerate(rest) if label not in other_labels)
            weights = self.operands[number].movedim(key_axis, -1)
            candidates.append(WeightsCandidate(weights, self.operands[1 - number], query_axes))
        return candidates

    @property
    def summed_size(self) -> int | None:
        summed = self._summed_labels()
        if len(summed) != 1:
            return None
        return self.operands[0].shape[self.labels[0].index(summed[0])]

    @property
    def outer_sizes(self) -> tuple[int, ...]:
        first, second = self.labels
        sizes = []
        for label, size in zip(self.output_labels, self.output.shape, strict=True):
            if (label in first) != (label in second):
                sizes.append(size)
        return tuple(sizes)

    def projected(self, parameter: int) -> Tensor:
        # "tbd,dhk->tbhk" gives (T, B, H, k); the parameter gives h and k: (T, B, H · k)
        input_labels = self.labels[1 - parameter]
        from_input = []
        from_parameter = []
        for axis, label in enumerate(self.output_labels):
            if label in input_labels:
                from_input.append(axis)
            else:
                from_parameter.append(axis)
        if not from_parameter:
            return self.output
        return self.output.permute(*from_input, *from_parameter).flatten(len(from_input))

    def _operand_without(self, axis: int) -> Tensor | None:
        # "bthd,bshd->bhts" without s: q, as (b, h, t, d)
        missing = self.output_labels[axis]
        holders = [number for number, labels in enumerate(self.labels) if missing in labels]
        summed = self._summed_labels()
        if len(holders) != 1 or len(summed) != 1:
            return None
        number = 1 - holders[0]
        labels = self.labels[number]
        order = []
        sizes = []
        shared_places = []  # of axes that this operand does not have
        for place, label in enumerate(self.output_labels.replace(missing, "")):
            sizes.append(self.output.shape[self.output_labels.index(label)])
            if label in labels:
                order.append(labels.index(label))
            else:
                shared_places.append(place)
        if len(set(labels)) != len(labels) or len(order) + 1 != len(labels):
            return None
        order.append(labels.index(summed[0]))
        moved = self.operands[number].permute(*order)
        for place in shared_places:
            moved = moved.unsqueeze(place)
        return moved.expand(*sizes, moved.shape[-1])


def read_product(function: Any, output: Any, args: tuple[Any, ...]) -> Product | None:
    """Return the product of two tensors that a function computed; None if it is another one."""
    tensors = _tensors_among(args)
    if function in (torch.baddbmm, Tensor.baddbmm):
        tensors = tensors[1:]  # the first one is added, not multiplied
    if len(tensors) != 2 or not isinstance(output, Tensor):
        return None
    if min(tensor.dim() for tensor in tensors) < 2:
        return None
    if function is not torch.einsum:
        return MatrixProduct(tensors, output)
    if not isinstance(args[0], str):
        return None
    return _read_einsum(args[0], tensors, output)


def _tensors_among(args: tuple[Any, ...]) -> tuple[Tensor, ...]:
    """Return the tensors of a call; `torch.einsum` takes them one by one or as a list."""
    values: list[Any] = list(args)
    if len(args) == 2 and isinstance(args[1], (list, tuple)):
        values = [args[0], *args[1]]
    return tuple(value for value in values if isinstance(value, Tensor))


def _read_einsum(
    equation: str, operands: tuple[Tensor, ...], output: Tensor
) -> EinsumProduct | None:
    left, arrow, right = equation.replace(" ", "").partition("->")
    operand_texts = left.split(",")
    if len(operand_texts) != len(operands):
        return None
    if not arrow:
        right = _implicit_output(left)
    labels = []
    for text, tensor in zip(operand_texts, operands, strict=True):
        labels.append(_labels_of_axes(text, tensor))
    return EinsumProduct(operands, output, tuple(labels), _labels_of_axes(right, output))


def _implicit_output(left: str) -> str:
    """Return the output of an equation without an arrow: letters that occur once, in order."""
    letters = left.replace(",", "").replace(".", "")
    single = sorted(letter for letter in letters if letters.count(letter) == 1)
    if "..." in left:
        single.insert(0, "...")
    return "".join(single)


def _labels_of_axes(text: str, tensor: Tensor) -> str:
    """Return one letter per axis of a tensor."""
    # "b...d" of a tensor with four axes: "b②①d"; with three: "b①d". The last hidden axes correspond
    # to each other.
    hidden_count = tensor.dim() - len(text.replace("...", ""))
    hidden = [chr(_FIRST_HIDDEN_LABEL + number) for number in reversed(range(hidden_count))]
    return text.replace("...", "".join(hidden))
