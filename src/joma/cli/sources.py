"""Signatures and docstrings of functions, read from the source of their modules.

Importing the modules would import torch, which takes seconds: too long for `joma scan --help` and for
the completion of a name.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import joma

_PACKAGE = Path(joma.__file__).parent


class NotLiteral:
    """Stands for a default that is a name in its module; it is not known without importing that."""


class Required:
    """Stands for the default of a parameter that has none."""


@dataclass(frozen=True)
class SourceParameter:
    """A parameter as the source has it.

    Attributes:
        name: as callers write it.
        annotation: its text.
        default: the value, `Required` or `NotLiteral`.
        help: what the docstring says about it, on one line.
    """

    name: str
    annotation: str
    default: Any
    help: str


@dataclass(frozen=True)
class SourceFunction:
    """A function as the source has it.

    Attributes:
        text: the docstring up to its sections.
        parameters: by name.
    """

    text: str
    parameters: dict[str, SourceParameter]


@cache
def read_function(module: str, name: str) -> SourceFunction:
    """Return signature and docstring of a function at the top of a module.

    >>> read_function("joma._checkpoints.scan", "scan").parameters["workers"]
    SourceParameter(name='workers', annotation='int', default=1, help='checkpoints at a time.')
    """
    # The function up to its docstring is enough, and is parsed in a tenth of the time of the module.
    pattern = rf'^def {name}\(.*?""".*?"""'
    match = re.search(pattern, _source(module), flags=re.MULTILINE | re.DOTALL)
    if match is None:
        raise LookupError(f"{module} has no function {name} with a docstring")
    (definition,) = ast.parse(match[0]).body
    assert isinstance(definition, ast.FunctionDef)
    docstring = inspect.cleandoc(ast.get_docstring(definition) or "")
    helps = _argument_helps(docstring)
    arguments = definition.args
    positional = arguments.args
    missing = [None] * (len(positional) - len(arguments.defaults))
    defaults = [*missing, *arguments.defaults, *arguments.kw_defaults]
    parameters = {}
    for argument, default in zip([*positional, *arguments.kwonlyargs], defaults, strict=True):
        parameters[argument.arg] = SourceParameter(
            argument.arg,
            ast.unparse(argument.annotation) if argument.annotation else "",
            _value(default),
            helps.get(argument.arg, ""),
        )
    return SourceFunction(_text_before_sections(docstring), parameters)


def decorated(module: str, decorator: str) -> Iterator[tuple[tuple[Any, ...], dict[str, Any], str]]:
    """Yield the literal arguments of a decorator, by position and by name, and the docstring below it."""
    for node in ast.parse(_source(module)).body:
        if not isinstance(node, ast.FunctionDef):
            continue
        for call in node.decorator_list:
            if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Name)):
                continue
            if call.func.id == decorator:
                named = {word.arg: _value(word.value) for word in call.keywords if word.arg}
                yield tuple(map(_value, call.args)), named, ast.get_docstring(node) or ""


def _source(module: str) -> str:
    path = _PACKAGE.joinpath(*module.split(".")[1:])
    if path.is_dir():
        path = path / "__init__"
    return path.with_suffix(".py").read_text(encoding="utf-8")


def _value(node: ast.expr | None) -> Any:
    if node is None:
        return Required
    try:
        return ast.literal_eval(node)
    except ValueError:
        return NotLiteral


def _text_before_sections(docstring: str) -> str:
    return re.split(r"^(?:\w+:$|>>> )", docstring, maxsplit=1, flags=re.MULTILINE)[0].strip()


def _argument_helps(docstring: str) -> dict[str, str]:
    """Return parameter -> its text in the section "Arguments:", on one line."""
    section = re.search(r"^Arguments:\n((?:[ ]{4}.*\n?|\n)*)", docstring, flags=re.MULTILINE)
    if section is None:
        return {}
    entries = re.split(r"^ {4}(\w+(?:, \w+)*): ", section[1], flags=re.MULTILINE)[1:]
    helps = {}
    for names, text in zip(entries[::2], entries[1::2], strict=True):
        for name in names.split(", "):
            helps[name] = " ".join(text.split())
    return helps
