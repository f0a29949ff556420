"""The one table of backends: those of joma, and those that users register."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, TypeVar

from joma._measure.events.backends.backend import Backend
from joma._measure.events.backends.eager import EagerBackend
from joma._measure.events.backends.flash import FlashBackend, PackedFlashBackend, VarlenBackend
from joma._measure.events.backends.flex import FlexBackend
from joma._measure.events.backends.interface import InterfaceBackend
from joma._measure.events.backends.kernel import KernelBackend
from joma._measure.events.backends.multi_head import MultiHeadBackend
from joma._measure.events.backends.sdpa import SdpaBackend

if TYPE_CHECKING:
    from joma._measure.events.source import EventSource

BackendClass = TypeVar("BackendClass", bound=type[KernelBackend])

# Backends that the function mode recognises come first: the others leave it while they run.
BUILTIN: tuple[Backend, ...] = (
    SdpaBackend(),
    EagerBackend(),
    MultiHeadBackend(),
    InterfaceBackend(),
    FlexBackend(),
    FlashBackend(),
    PackedFlashBackend(),
    VarlenBackend(),
)
_TABLE: dict[str, Backend] = {builtin.name: builtin for builtin in BUILTIN}


def backend(kind: BackendClass) -> BackendClass:
    """Register a subclass of `joma.KernelBackend`; measured passes recognise it from then on.

    Arguments:
        kind: the class. It can be created without arguments, and has a name of its own.

    Returns:
        The class, so that this serves as a decorator.

    >>> @backend
    ... class TiledBackend(KernelBackend):
    ...     "Attention by tiles, (B, T, heads, d)."
    ...
    ...     name = "tiled"
    ...     functions = ("my_package.kernels.tiled_attention",)
    ...
    ...     def read(self, arguments, output):
    ...         query = arguments["q"].transpose(1, 2)
    ...         key = arguments["k"].transpose(1, 2)
    ...         value = arguments["v"].transpose(1, 2)
    ...         return self.dot_product(query, key, value, output.transpose(1, 2), causal=True)
    >>> find_backend("tiled").functions
    ('my_package.kernels.tiled_attention',)
    >>> remove_backend("tiled")
    """
    if not (isinstance(kind, type) and issubclass(kind, KernelBackend)):
        raise TypeError(f"a backend must be a subclass of joma.KernelBackend; got {kind!r}")
    if not isinstance(getattr(kind, "name", None), str):
        raise ValueError(f"{kind.__name__} needs a text name, for example name = 'tiled'")
    functions: object = getattr(kind, "functions", None)
    if isinstance(functions, str):
        raise ValueError(f"functions of {kind.__name__} must be a tuple: ({functions!r},)")
    for path in kind.functions:
        if not isinstance(path, str) or "." not in path:
            raise ValueError(
                f"functions of {kind.__name__} must be texts like 'package.module.function'; "
                f"got {path!r}"
            )
    try:
        instance = kind()
    except TypeError as error:
        raise TypeError(f"{kind.__name__} cannot be created without arguments: {error}") from None
    namesake = _TABLE.get(kind.name)
    if namesake is not None and not _is_redefined(namesake, kind):
        raise ValueError(f"there is a backend {kind.name!r} already; choose another name")
    _TABLE[kind.name] = instance
    return kind


def _is_redefined(old: Backend, new: type[Backend]) -> bool:
    """Return True if both are one class of a user's, defined again in a notebook."""
    if old in BUILTIN:
        return False
    old_kind = type(old)
    return (old_kind.__module__, old_kind.__qualname__) == (new.__module__, new.__qualname__)


def remove_backend(name: str) -> None:
    """Remove a backend that was registered."""
    del _TABLE[name]


def all_backends() -> list[Backend]:
    """Return all backends, those of users last."""
    return list(_TABLE.values())


def find_backend(name: str) -> Backend:
    """Return the backend of this name."""
    return _TABLE[name]


def watch_backends(source: EventSource) -> list[AbstractContextManager[object]]:
    """Return contexts within which calls of all backends are recognised, to enter in this order.

    Backends that are recognised in the same way share one: there is one function mode, and one
    search for the names of all kernels.
    """
    groups: dict[Callable[..., AbstractContextManager[object]], list[Backend]] = {}
    for entry in _TABLE.values():
        groups.setdefault(entry.watching, []).append(entry)
    return [watching(source, members) for watching, members in groups.items()]
