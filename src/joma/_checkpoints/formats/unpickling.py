"""Unpickle without running code: nothing that a pickle names is imported or called.

Two readers share this module. `load_inert` turns every object into an inert record; it reads the
tables of `torch.distributed.checkpoint`, and it rehearses what `torch.load` is about to load.
`torch_load` is `torch.load` with ``weights_only``. That runs no code either, but a pickle can make
it work for ever or fill the memory (see `_rehearse`), and it refuses the metadata that trainers
save with the weights unless it is given classes for it.
"""

from __future__ import annotations

import io
import pickle
import re
import warnings
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import torch

from joma._checkpoints.reading import BadCheckpoint

# Lists, dicts and tuples in one pickle. Each takes 64 bytes or so: 128 MB in all. A table of
# 200,000 chunks has about as many.
_MAX_OBJECTS = 2_000_000
# Opcodes that make a new object. Each takes one byte in the file, and the object 50 and more.
_MAKING_OPCODES = frozenset(
    code[0]
    for code in (
        pickle.EMPTY_LIST,
        pickle.EMPTY_DICT,
        pickle.EMPTY_SET,
        pickle.MARK,
        pickle.TUPLE1,
        pickle.TUPLE2,
        pickle.TUPLE3,
        pickle.NEWOBJ,
        pickle.NEWOBJ_EX,
        pickle.REDUCE,
    )
)
# References for later use, of 100 bytes or so each. A pickle has some more of them than objects.
_MAX_MEMOS = 3_000_000
_MEMO_OPCODES = frozenset(
    code[0] for code in (pickle.PUT, pickle.BINPUT, pickle.LONG_BINPUT, pickle.MEMOIZE)
)
# Names of classes and functions. Each becomes a class when `torch.load` gets its stand-ins, of
# 2,300 bytes or so. Checkpoints of trainers have fewer than 100.
_MAX_GLOBALS = 1_000
_LEGACY_PICKLES = 5  # at the head of a file that PyTorch before 1.6 wrote

# Modules that no metadata needs and that attacks use. Nothing of them would run; a file that names
# them is refused all the same, because its user should know.
_PROGRAM_MODULES = frozenset(
    [
        "_io",
        "_operator",
        "_pickle",
        "_thread",
        "asyncio",
        "bdb",
        "builtins",
        "cProfile",
        "cloudpickle",
        "code",
        "codeop",
        "commands",
        "concurrent",
        "ctypes",
        "dill",
        "imaplib",
        "importlib",
        "inspect",
        "io",
        "joblib",
        "linecache",
        "marshal",
        "multiprocessing",
        "nt",
        "ntpath",
        "operator",
        "os",
        "pdb",
        "pickle",
        "pip",
        "platform",
        "posix",
        "posixpath",
        "profile",
        "pty",
        "pydoc",
        "runpy",
        "setuptools",
        "shelve",
        "shutil",
        "signal",
        "site",
        "smtplib",
        "socket",
        "ssl",
        "subprocess",
        "sys",
        "tempfile",
        "test",
        "threading",
        "timeit",
        "trace",
        "urllib",
        "venv",
        "webbrowser",
        "zipimport",
    ]
)
# Names in such modules that metadata does use.
_HARMLESS_NAMES = frozenset(
    [
        "io.BytesIO",
        "_io.BytesIO",
        "builtins.object",
        "builtins.type",
        "builtins.frozenset",
        "builtins.slice",
    ]
)
_GLOBAL = re.compile(r"GLOBAL ([\w.]+)")


class PickleRefused(pickle.UnpicklingError):
    """A pickle that would take too long, or too much memory."""


class InertObject:
    """An object of a class that a pickle names: nothing but its state."""

    state: Any = None

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def get(self, name: str, position: int = -1) -> Any:
        """Return a field by name, or by position where the state is a tuple; None without it."""
        if isinstance(self.state, tuple) and 0 <= position < len(self.state):
            return self.state[position]
        if isinstance(self.state, dict):
            return self.state.get(name)
        return None

    def _ignore(self, *args: Any) -> None: ...

    __setitem__ = append = extend = add = update = _ignore


class _InertSize:
    """Stands for `torch.Size`."""

    def __new__(cls, sizes: Any = ()) -> Any:
        if isinstance(sizes, (tuple, list)):
            return tuple(sizes)
        return ()


def load_inert(file: IO[bytes]) -> Any:
    """Return the content of the next pickle in a file, with inert objects."""
    return _InertUnpickler(file).load()


class _CountingOpcodes(dict[int, Any]):
    """The unpickler's table of opcodes, which counts those that take memory."""

    object_count = 0
    memo_count = 0

    def __getitem__(self, opcode: int) -> Any:
        if opcode in _MAKING_OPCODES:
            self.object_count += 1
            if self.object_count > _MAX_OBJECTS:
                raise PickleRefused(f"it has more than {_MAX_OBJECTS:,} lists and objects")
        elif opcode in _MEMO_OPCODES:
            self.memo_count += 1
            if self.memo_count > _MAX_MEMOS:
                raise PickleRefused(f"it has more than {_MAX_MEMOS:,} references")
        return super().__getitem__(opcode)


# The unpickler in Python, since the one in C makes room for as many memos as a file claims to have.
class _InertUnpickler(pickle._Unpickler):
    def __init__(self, file: IO[bytes]) -> None:
        super().__init__(file, encoding="bytes")
        self._globals: set[tuple[str, str]] = set()
        self.dispatch = _CountingOpcodes(pickle._Unpickler.dispatch)  # type: ignore[misc]
        for code in (pickle.SETITEM, pickle.SETITEMS, pickle.ADDITEMS, pickle.FROZENSET):
            self.dispatch[code[0]] = _checking_keys(code[0])

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch", "Size"):
            return _InertSize
        if module == "torch":
            attribute = getattr(torch, name, None)
            if isinstance(attribute, torch.dtype):
                return attribute
        self._globals.add((module, name))
        if len(self._globals) > _MAX_GLOBALS:
            raise PickleRefused(f"it names more than {_MAX_GLOBALS:,} classes")
        return InertObject

    def persistent_load(self, pid: Any) -> Any:
        return InertObject()  # a storage, whose bytes are not in the pickle


def _checking_keys(opcode: int) -> Any:
    """Return the opcode's action, preceded by a check of the keys that it will hash.

    A tuple that holds one tuple twice, which holds one twice, and so on 100 times, is a short
    pickle; its hash takes 2¹⁰⁰ steps.
    """

    def run(unpickler: Any) -> None:
        keys = unpickler.stack
        if opcode == pickle.SETITEM[0]:
            keys = unpickler.stack[-2:-1]
        elif opcode == pickle.SETITEMS[0]:
            keys = unpickler.stack[::2]
        for key in keys:
            is_nested = isinstance(key, tuple) and any(isinstance(part, tuple) for part in key)
            if is_nested or isinstance(key, frozenset):
                raise PickleRefused("a key is no plain value")
        pickle._Unpickler.dispatch[opcode](unpickler)

    return run


class StandIn:
    """Takes the place of an object of a class that the file names; keeps nothing of it."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        # PyTorch's unpickler fills plain dicts and lists only.
        if cls.__name__.endswith(("dict", "Dict")):
            return {}
        if cls.__name__.endswith(("list", "List")):
            return []
        return super().__new__(cls)

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __setstate__(self, state: Any) -> None: ...


def torch_load(file: Path | io.BytesIO, device: str, name: str) -> tuple[Any, list[str]]:
    """Return what `torch.save` wrote, and the names of the classes that have stand-ins in it."""
    _rehearse(file, name)
    try:
        with warnings.catch_warnings(), _stand_ins(file) as classes:
            # PyTorch warns of pickle protocols that may not work. If one does not, it raises.
            warnings.simplefilter("ignore")
            return torch.load(file, map_location=device, weights_only=True), classes
    except pickle.UnpicklingError as error:
        reason = _refusal(error)
        raise BadCheckpoint(f"{name} is refused, nothing of it was executed: {reason}") from None
    except Exception as error:  # a damaged pickle can fail in any way
        reason = _first_line(error)
        raise BadCheckpoint(f"{name} is damaged or no PyTorch file ({reason})") from None


def _rehearse(file: Path | io.BytesIO, name: str) -> None:
    """Refuse a pickle that would take PyTorch's loader too long, or too much memory."""
    try:
        if zipfile.is_zipfile(file):
            with zipfile.ZipFile(file) as archive:
                for item in archive.infolist():
                    if item.filename.partition("/")[2] == "data.pkl":
                        load_inert(io.BytesIO(archive.read(item)))
        elif isinstance(file, Path):
            with file.open("rb") as stream:
                for _ in range(_LEGACY_PICKLES):
                    load_inert(stream)
    except (PickleRefused, MemoryError, RecursionError) as error:
        raise BadCheckpoint(f"{name} is refused: {error or type(error).__name__}") from None
    except Exception:  # damaged: PyTorch will report that
        pass
    finally:
        if isinstance(file, io.BytesIO):
            file.seek(0)


@contextmanager
def _stand_ins(file: Path | io.BytesIO) -> Iterator[list[str]]:
    """Let `torch.load` accept the metadata of the file; give the names that have stand-ins.

    Lightning and Megatron save arguments (`argparse.Namespace`), paths and configs with weights.
    """
    try:
        names = torch.serialization.get_unsafe_globals_in_checkpoint(file)
    except Exception:  # no zip, or damaged: torch.load will report that
        names = []
    if isinstance(file, io.BytesIO):
        file.seek(0)
    for name in names:
        if name.split(".")[0] in _PROGRAM_MODULES and name not in _HARMLESS_NAMES:
            names = []
            break
    classes: list[Any] = [(type(name, (StandIn,), {}), name) for name in names]
    with torch.serialization.safe_globals(classes):
        yield names


def _first_line(error: BaseException) -> str:
    """Return the first line of a message, without PyTorch's advice to run the file."""
    line = str(error).strip().split("\n")[0]
    if not line or "weights_only" in line:
        return type(error).__name__
    return line[:200]


def _refusal(error: BaseException) -> str:
    """Return what is wrong with a pickle that is more than weights, and what can be done safely."""
    name = _GLOBAL.search(str(error))
    if name:
        content = f"asks for {name[1]}, which is more than weights"
    else:
        content = "is damaged, or holds more than weights"
    return (
        f"it {content}. Where it was made, save the weights alone: "
        "safetensors.torch.save_file(model.state_dict(), FILE)"
    )
