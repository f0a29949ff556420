"""Pickles read without their code: every class that one names becomes an inert record; nothing is imported or called.

PyTorch's own loader (``weights_only``) executes nothing either, but a pickle can make it work for ever or fill the
memory; so what it is to load goes through here first.
"""

from __future__ import annotations

import pickle
from typing import IO, Any

import torch

_MOST = 2_000_000  # lists, dicts and tuples, of 64 bytes or so each; a table of 200,000 chunks has as many
_MAKERS = frozenset(
    code[0] for code in (pickle.EMPTY_LIST, pickle.EMPTY_DICT, pickle.EMPTY_SET, pickle.MARK, pickle.TUPLE1,
                         pickle.TUPLE2, pickle.TUPLE3, pickle.NEWOBJ, pickle.REDUCE)
)  # fmt: skip


class Refused(pickle.UnpicklingError):
    """A pickle that would take too long, or too much memory."""


class Record:
    """Stands for an object of a class that a pickle names: its state."""

    state: Any = None

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __setstate__(self, state: Any) -> None:
        """Kept as it is."""
        self.state = state

    def get(self, name: str, place: int = -1) -> Any:
        """A field by its name, or by its place where the state is a tuple; None without."""
        if isinstance(self.state, tuple):
            return self.state[place] if 0 <= place < len(self.state) else None
        return self.state.get(name) if isinstance(self.state, dict) else None

    def _ignored(self, *args: Any) -> None: ...

    __setitem__ = append = extend = add = update = _ignored


class _Size:
    """Stands for `torch.Size`."""

    def __new__(cls, sizes: Any = ()) -> Any:
        return tuple(sizes) if isinstance(sizes, (tuple, list)) else ()


def inert(file: IO[bytes]) -> Any:
    """What the next pickle in a file holds."""
    return _Unpickler(file).load()


class _Instructions(dict[int, Any]):
    """The unpickler's table, which counts the instructions that make something."""

    made = 0

    def __getitem__(self, key: int) -> Any:
        if key in _MAKERS:
            self.made += 1
            if self.made > _MOST:
                raise Refused(f"it has more than {_MOST:,} lists and objects")
        return super().__getitem__(key)


class _Unpickler(
    pickle._Unpickler
):  # in Python: that in C makes room for any number that a file names
    def __init__(self, file: IO[bytes]) -> None:
        super().__init__(file, encoding="bytes")
        self.dispatch = _Instructions(pickle._Unpickler.dispatch)  # type: ignore[misc]
        for code in (pickle.SETITEM, pickle.SETITEMS, pickle.ADDITEMS, pickle.FROZENSET):
            self.dispatch[code[0]] = _keys_checked(code[0])

    def find_class(self, module: str, name: str) -> Any:
        """A type of numbers, a size, or a class of records."""
        if (module, name) == ("torch", "Size"):
            return _Size
        if module == "torch" and isinstance(kind := getattr(torch, name, None), torch.dtype):
            return kind
        return type(str(name).rpartition(".")[2], (Record,), {})

    def persistent_load(self, pid: Any) -> Any:
        """Storages, of which nothing is known here."""
        return Record()


def _keys_checked(code: int) -> Any:
    """The instruction, once keys are plain: to hash tuples of tuples of tuples may take for ever."""

    def run(unpickler: Any) -> None:
        keys = unpickler.stack[-2:-1] if code == pickle.SETITEM[0] else unpickler.stack
        for key in keys[::2] if code == pickle.SETITEMS[0] else keys:
            if isinstance(key, frozenset) or (
                isinstance(key, tuple) and any(isinstance(k, tuple) for k in key)
            ):
                raise Refused("a key is no plain value")
        pickle._Unpickler.dispatch[code](unpickler)

    return run
