"""Replace functions under all names that a model may call them by, for the time of a block.

A model calls `flex_attention` by a name in the Python module that imported it, on a module of the
model, or on its class; as it is, compiled, as a static method or inside a `functools.partial`.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FunctionType
from typing import Any

from torch import nn

# function as the name has it (perhaps compiled), function itself -> what the name shall stand for
Replace = Callable[[Callable[..., Any], Any], Callable[..., Any]]
Namespace = dict[str, Any] | type


@dataclass(frozen=True)
class _NamedFunction:
    """A name that stands for one of the functions, in a namespace or on a class."""

    space: Namespace
    name: str
    value: Any

    def current(self) -> Any:
        return _entries(self.space).get(self.name)

    def assign(self, value: Any) -> None:
        if isinstance(self.space, type):
            setattr(self.space, self.name, value)
        else:
            self.space[self.name] = value


@contextmanager
def names_replaced(
    functions: tuple[Any, ...], model: nn.Module, replace: Replace
) -> Iterator[None]:
    """Let the names of these functions stand for what ``replace`` makes of them."""
    replaced: list[tuple[_NamedFunction, Any]] = []
    if functions:
        for named in _find_names(functions, model):
            replacement = _rewrap(named.value, replace)
            named.assign(replacement)
            replaced.append((named, replacement))
    try:
        yield
    finally:
        for named, replacement in replaced:
            # The model may have assigned something else meanwhile, which stays.
            if named.current() is replacement:
                named.assign(named.value)


def _find_names(functions: tuple[Any, ...], model: nn.Module) -> list[_NamedFunction]:
    """Return the names from which one of these functions can be called."""
    modules = [module for module in list(sys.modules.values()) if module is not None]
    # A name that is added to a module that was imported before (a function that imports late, a
    # module that is reloaded) changes no identity, but the number of its names. Counting takes
    # 0.6 ms for 3,000 modules, looking at all of their names 15 ms.
    identities = hash(tuple(map(id, modules)))
    sizes = hash(tuple(len(vars(module)) for module in modules))
    spaces: list[Namespace] = list(_python_namespaces(functions, identities, sizes))
    # Cells of a notebook run in __main__, which is searched in every pass: a name there may also
    # be assigned anew.
    main: dict[str, Any] = {}
    if "__main__" in sys.modules:
        main = vars(sys.modules["__main__"])
    if all(space is not main for space in spaces):
        spaces.append(main)
    spaces += map(vars, model.modules())
    spaces += _own_classes(frozenset(map(type, model.modules())))
    names = []
    for space in spaces:
        for name, value in list(_entries(space).items()):
            if _function_of(value) in functions:
                names.append(_NamedFunction(space, name, value))
    return names


@functools.lru_cache(maxsize=1)
def _python_namespaces(
    functions: tuple[Any, ...], identities: int, sizes: int
) -> list[dict[str, Any]]:
    """Return the namespaces of imported modules that hold one of these functions.

    ``identities`` and ``sizes`` stand for the imported modules: the search is repeated when they
    change. PyTorch's own modules are left out, since it calls the functions from within itself.
    """
    spaces = []
    for name, module in list(sys.modules.items()):
        if module is None or name.startswith("torch._"):
            continue
        space = vars(module)
        if any(_function_of(value) in functions for value in list(space.values())):
            spaces.append(space)
    return spaces


@functools.lru_cache(maxsize=8)
def _own_classes(kinds: frozenset[type]) -> tuple[type, ...]:
    """Return these classes and their bases, without those of PyTorch."""
    classes: dict[type, None] = {}
    for kind in kinds:
        classes.update(dict.fromkeys(kind.__mro__))
    return tuple(kind for kind in classes if not kind.__module__.startswith(("torch.", "builtins")))


def _entries(space: Namespace) -> Any:
    if isinstance(space, type):
        return vars(space)
    return space


def _function_of(value: Any) -> Any:
    """Return the plain function that a value stands for; None if it stands for none."""
    # By type: `isinstance` asks the objects themselves, and some of them warn when asked.
    while type(value) in (staticmethod, functools.partial):
        value = _inner_of(value)
    if type(value) is not FunctionType:
        return None
    return _uncompiled(value)


def _rewrap(value: Any, replace: Replace) -> Any:
    """Return a value of the same kind around the replaced function."""
    if type(value) is staticmethod:
        return staticmethod(_rewrap(value.__func__, replace))
    if type(value) is functools.partial:
        inner = _rewrap(value.func, replace)
        return functools.partial(inner, *value.args, **value.keywords)
    return replace(value, _uncompiled(value))


def _inner_of(value: Any) -> Any:
    if type(value) is staticmethod:
        return value.__func__
    return value.func


def _uncompiled(function: Any) -> Any:
    """Return the function that ``torch.compile`` was given, of a compiled one."""
    return vars(function).get("_torchdynamo_orig_callable", function)
