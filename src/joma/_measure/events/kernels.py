"""Attention that a model calls by itself and that no mode is told of: FlexAttention, flash_attn, packed sequences.

FlexAttention compiles itself, and the functions of flash_attn go to kernels of their own. So in a measured pass the
names that stand for such a function (in modules of Python that imported it, on modules of the model and on their
classes), as it is, compiled or as a `functools.partial`, stand for one that calls it and looks at its arguments and its
output. Meanwhile the mode that looks at all other functions is left, or a compiled call would be compiled once more.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.overrides import (
    TorchFunctionMode,
    _get_current_function_mode_stack,
    _pop_mode_temporarily,
)

from joma._measure.events.events import BlockInput, DotProduct
from joma._measure.events.flash import first_of, flash_fields, packed_fields, torch_packed_fields
from joma._measure.events.flex import flex_fields
from joma._measure.events.functions import plain_layout
from joma._measure.events.guard import Seen

if TYPE_CHECKING:
    from joma._measure.events.source import EventSource

Fields = Callable[
    [dict[str, Any], Tensor], dict[str, Any]
]  # arguments by name, and the output -> fields of the event


@dataclass(frozen=True)
class _Place:
    """A name that stands for one of these functions: in a namespace, or on a class."""

    space: dict[str, Any] | type
    name: str

    def get(self) -> Any:
        return (vars(self.space) if isinstance(self.space, type) else self.space).get(self.name)

    def set(self, value: Any) -> None:
        if isinstance(self.space, type):
            setattr(self.space, self.name, value)
        else:
            self.space[self.name] = value


_KERNELS: dict[tuple[str, str], Fields] = {
    ("torch.nn.attention.flex_attention", "flex_attention"): flex_fields,
    ("torch.nn.attention.varlen", "varlen_attn"): torch_packed_fields,
    **{
        (module, name): fields
        for module in ("flash_attn", "flash_attn_interface")  # versions 2 and 3
        for name, fields in (
            ("flash_attn_func", flash_fields),
            ("flash_attn_varlen_func", packed_fields),
        )
    },
}


_BACKENDS: dict[Fields, str] = {
    flex_fields: "flex",
    flash_fields: "flash",
    packed_fields: "flash, packed",
    torch_packed_fields: "packed",
}


@contextmanager
def kernels_watched(source: EventSource, looking: TorchFunctionMode) -> Iterator[None]:
    """Look at calls of these functions within this block, without the mode ``looking``."""
    known: dict[Any, Fields] = {}
    for (module, name), fields in _KERNELS.items():
        if (function := getattr(sys.modules.get(module), name, None)) is not None:
            known[function] = fields
    replaced: list[tuple[_Place, Any, Any]] = []
    for place, value, fields in _places(known, source.model) if known else ():
        replacement = _replaced(source, value, fields, looking)
        place.set(replacement)
        replaced.append((place, value, replacement))
    try:
        yield
    finally:
        for place, value, replacement in replaced:
            if place.get() is replacement:
                place.set(value)


def _places(known: dict[Any, Fields], model: nn.Module) -> list[tuple[_Place, Any, Fields]]:
    """Return the places from which one of these functions, or a compiled version of it, can be called."""
    modules = [module for module in list(sys.modules.values()) if module is not None]
    # A name that is added to a module that was imported before (a function that imports late, a module that is
    # reloaded) changes no identity, but the number of its names. Counting takes 0.6 ms for 3,000 modules, looking at
    # all of their names 15 ms.
    identities = hash(tuple(map(id, modules)))
    sizes = hash(tuple(len(vars(module)) for module in modules))
    spaces = list(_python_modules(tuple(known), identities, sizes))
    # Cells of a notebook run in __main__, which is searched in every pass: a name there may also be assigned anew.
    main = vars(sys.modules["__main__"]) if "__main__" in sys.modules else {}
    if all(space is not main for space in spaces):
        spaces.append(main)
    spaces += map(vars, model.modules())
    places = []
    for space in spaces:
        for name, value in list(space.items()):
            if (fields := _fields_of(value, known)) is not None:
                places.append((_Place(space, name), value, fields))
    for kind in _own_classes(frozenset(type(module) for module in model.modules())):
        for name, value in list(vars(kind).items()):
            if (fields := _fields_of(value, known)) is not None:
                places.append((_Place(kind, name), value, fields))
    return places


@functools.lru_cache(maxsize=8)
def _own_classes(kinds: frozenset[type]) -> tuple[type, ...]:
    """Return these classes and their bases, but for PyTorch's own."""
    classes = dict.fromkeys(base for kind in kinds for base in kind.__mro__)
    return tuple(kind for kind in classes if not kind.__module__.startswith(("torch.", "builtins")))


def _fields_of(value: Any, known: dict[Any, Fields]) -> Fields | None:
    """Return how to read the arguments of a function; None if it is none of these functions.

    It may be compiled, a static method or a `functools.partial`.
    """
    # `isinstance` would ask objects that warn when they are asked
    function = _inner(value)
    if type(function) is FunctionType:
        return known.get(_plain(function))
    return None


def _inner(value: Any) -> Any:
    """Return the function in a static method or a partial; anything else as it is."""
    if type(value) is staticmethod:
        return _inner(value.__func__)
    if type(value) is functools.partial:
        return _inner(value.func)
    return value


def _replaced(source: EventSource, value: Any, fields: Fields, looking: TorchFunctionMode) -> Any:
    """Return a value of the same kind that calls the function and looks at the call."""
    if type(value) is staticmethod:
        return staticmethod(_replaced(source, value.__func__, fields, looking))
    if type(value) is functools.partial:
        inner = _replaced(source, value.func, fields, looking)
        return functools.partial(inner, *value.args, **value.keywords)
    return _looked_at(source, value, fields, looking)


@functools.lru_cache(maxsize=1)
def _python_modules(
    functions: tuple[Any, ...], identities: int, sizes: int
) -> list[dict[str, Any]]:
    """Return the namespaces of modules that hold one of these functions, but for PyTorch's own.

    ``identities`` and ``sizes`` stand for the modules that are imported: the search is repeated when they change.
    """
    spaces = [
        vars(m)
        for name, m in list(sys.modules.items())
        if m is not None and not name.startswith("torch._")
    ]
    return [
        space for space in spaces if any(_holds(value, functions) for value in list(space.values()))
    ]


def _holds(value: Any, functions: tuple[Any, ...]) -> bool:
    function = _inner(value)
    return type(function) is FunctionType and _plain(function) in functions


def _plain(function: FunctionType) -> Any:
    """The function itself, of a compiled one."""
    return vars(function).get("_torchdynamo_orig_callable", function)


def _looked_at(
    source: EventSource, function: Callable[..., Any], fields: Fields, looking: TorchFunctionMode
) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        modes = _get_current_function_mode_stack()
        before = source.running[-1].attentions if source.running else 0
        with _pop_mode_temporarily() if modes and modes[-1] is looking else nullcontext():
            output = function(*args, **kwargs)
            seen_inside = source.running and source.running[-1].attentions > before
            if source.running and not seen_inside and not torch.compiler.is_compiling():
                with source.guarded(), torch._C.DisableTorchFunction():
                    _on_call(source, function, fields, output, args, kwargs)
        return output

    return call


def _on_call(
    source: EventSource,
    function: Callable[..., Any],
    fields: Fields,
    output: Any,
    args: Any,
    kwargs: dict[str, Any],
) -> None:
    """The function was called in the innermost running module."""
    call = source.running[-1]
    bound = inspect.signature(function).bind(*args, **kwargs)
    bound.apply_defaults()
    given: dict[str, Any] = dict(bound.arguments)
    tensors = [x for x in given.values() if isinstance(x, Tensor)]
    if not source.wants(DotProduct, BlockInput) or not source.measurable(call, *tensors):
        return
    settings = fields(given, first_of(output))
    query, key = settings["query"], settings["key"]

    def without_dropout(b: int) -> Tensor:
        states: Tensor = fields(given, first_of(function(**given | {"dropout_p": 0.0})))["output"]
        return states[b]

    source.guard.sees(Seen(
        DotProduct, call, source.calls_to(call), keys=key, values=settings["value"],
        key=(query.shape, key.shape, query.dtype, *(name for name, x in given.items() if x is None)),
        fields={**settings, "gqa": query.shape[1] != key.shape[1]},
        replay=without_dropout if given.get("dropout_p") else None,
        query_axis=2, layout=plain_layout(query), backend=_BACKENDS[fields],
    ))  # fmt: skip
