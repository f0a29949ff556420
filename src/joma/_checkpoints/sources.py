"""Where tensors come from: a file of them (`files.py`), or what is worked out from files."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Protocol

import torch
from torch import Tensor

from joma._checkpoints.entry import Entry, contiguous


class Source(Protocol):
    """Tensors by name, read on request.

    Attributes:
        entries: name -> what it is, and where.
        bytes_read: of tensors, so far.
        note: what is special about it, for the row of the checkpoint.
    """

    entries: dict[str, Entry]
    note: str

    @property
    def bytes_read(self) -> int: ...

    def read(self, name: str, entry: Entry | None = None) -> Tensor:
        """The tensor, or that part of it which ``entry`` (a view of it) describes."""

    def expect(self, views: Iterable[tuple[str, Entry]]) -> None:
        """These parts will be read."""


class WorkedOut(ABC):
    """A source whose tensors are worked out as a whole, in float32; parts are views of that."""

    entries: dict[str, Entry]
    note: str = ""

    @property
    @abstractmethod
    def bytes_read(self) -> int:
        """Of the files that it is worked out from."""

    @abstractmethod
    def whole(self, name: str) -> Tensor:
        """The tensor, without gaps, in float32."""

    def read(self, name: str, entry: Entry | None = None) -> Tensor:
        """The tensor, or that part of it which ``entry`` (a view of it) describes."""
        tensor = self.whole(name)
        return (
            tensor
            if entry is None
            else tensor.as_strided(entry.shape, entry.stride, entry.offset // 4)
        )

    def expect(self, views: Iterable[tuple[str, Entry]]) -> None:  # noqa: B027
        """Nothing can be done ahead."""


def virtual(shape: Iterable[int]) -> Entry:
    """The entry of a tensor that is in no file as it is."""
    sizes = tuple(int(n) for n in shape)
    return Entry(torch.float32, sizes, contiguous(sizes), 0)
