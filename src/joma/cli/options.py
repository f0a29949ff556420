"""Options of a command, made from the signature and docstring of the public function that it calls."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import typer

import joma
from joma.cli.sources import NotLiteral, Required, SourceParameter, read_function

Complete = Callable[[str], Any]
Command = Callable[..., None]


@dataclass(frozen=True)
class Change:
    """What differs on the command line from the parameter of the function.

    Attributes:
        flags: instead of "--name".
        help: instead of the text in the docstring; whole sentences.
        default: instead of that of the function; needed where the source has a name for it.
        default_text: what the help shows as the default.
        complete: returns the words that a shell offers.
        kind: the type, instead of the one that the annotation suggests.
        metavar: what the help calls the value.
    """

    flags: tuple[str, ...] = ()
    help: str = ""
    default: Any = NotLiteral
    default_text: str = ""
    complete: Complete | None = None
    kind: Any = None
    metavar: str | None = None


def options_of(
    name: str,
    *,
    argument: str,
    without: Iterable[str] = (),
    changes: Mapping[str, Change] | None = None,
) -> Callable[[Command], Command]:
    """Give a command ``function(…, **options)`` the parameters of the public function ``joma.name``.

    Arguments:
        name: of the public function, whose docstring is the first part of the command's help.
        argument: the parameter that is typed without a flag.
        without: parameters that are not for the command line.
        changes: parameter -> what differs from the signature and the docstring.
    """
    left_out = set(without)
    changes = changes or {}

    def decorate(function: Command) -> Command:
        source = read_function(joma._API[name], name)
        made = []
        for parameter in source.parameters.values():
            if parameter.name in left_out:
                continue
            change = changes.get(parameter.name, Change())
            made.append(_parameter(parameter, change, is_argument=parameter.name == argument))
        text = plain(source.text)
        if function.__doc__:
            text = f"{text}\n\n{inspect.cleandoc(function.__doc__)}"
        return with_parameters(function, made, _unwrapped(text))

    return decorate


def with_parameters(
    function: Command, parameters: Iterable[inspect.Parameter], text: str | None = None
) -> Command:
    """Return ``function(…, **options)`` with one parameter per option, as Typer reads it.

    What is typed without a flag comes first.
    """
    own = list(inspect.signature(function, eval_str=True).parameters.values())
    own = [parameter for parameter in own if parameter.kind is not inspect.Parameter.VAR_KEYWORD]
    keyword_only = inspect.Parameter.KEYWORD_ONLY
    everything = [p.replace(kind=keyword_only) for p in (*parameters, *own)]
    everything.sort(key=lambda parameter: not _is_argument(parameter))

    def command(**options: Any) -> None:
        function(**options)

    command.__name__ = function.__name__
    command.__doc__ = text or function.__doc__
    command.__signature__ = inspect.Signature(everything)  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in everything}
    return command


def make_option(
    name: str,
    kind: Any,
    default: Any,
    *,
    flags: Iterable[str] = (),
    help: str,
    default_text: str = "",
    complete: Complete | None = None,
    metavar: str | None = None,
) -> inspect.Parameter:
    """Return the parameter of an option; it is required if the default is `Required`."""
    info = typer.Option(
        *flags,
        help=help,
        show_default=default_text or True,
        autocompletion=complete,
        metavar=metavar,
    )
    return _as_parameter(name, kind, default, info)


def sentence(text: str) -> str:
    """Return a text with a capital letter at its beginning and a full stop at its end.

    >>> sentence("how many tokens of it")
    'How many tokens of it.'
    """
    text = text.strip()
    if text and not text.endswith((".", "?", "!")):
        text += "."
    return text[:1].upper() + text[1:]


def plain(text: str) -> str:
    """Return a docstring's text without its marks; functions are named as commands.

    >>> plain("as for `joma.scan`: ``x``")
    'as for `joma scan`: x'
    """
    text = re.sub(r"``([^`]+)``", r"\1", text)
    return re.sub(r"`joma\.(\w+)`", r"`joma \1`", text)


def _unwrapped(text: str) -> str:
    """Return a text with one line per paragraph: the terminal wraps them at its own width."""
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in text.split("\n\n"))


def _parameter(
    parameter: SourceParameter, change: Change, *, is_argument: bool
) -> inspect.Parameter:
    kind = change.kind or _kind(parameter.annotation, is_argument=is_argument)
    default = parameter.default
    if change.default is not NotLiteral:
        default = change.default
    if default is NotLiteral:
        raise TypeError(f"the default of {parameter.name} is no literal: give it as a change")
    if isinstance(default, tuple):
        default = ", ".join(default)
    text = change.help or sentence(plain(parameter.help))
    if not is_argument:
        flags = change.flags
        if kind is bool and default is False and not flags:
            flags = (f"--{parameter.name.replace('_', '-')}",)  # without --no-name
        return make_option(
            parameter.name,
            kind,
            default,
            flags=flags,
            help=text,
            default_text=change.default_text,
            complete=change.complete,
            metavar=change.metavar,
        )
    info = typer.Argument(
        help=text,
        show_default=change.default_text or True,
        autocompletion=change.complete,
        metavar=change.metavar,
    )
    return _as_parameter(parameter.name, kind, default, info)


def _as_parameter(name: str, kind: Any, default: Any, info: Any) -> inspect.Parameter:
    if default is None:
        kind = kind | None
    if default is Required:
        default = inspect.Parameter.empty
    annotation = Annotated[kind, info]
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
    )


def _kind(annotation: str, *, is_argument: bool) -> Any:
    """Return the type of an option for the annotation of a parameter: a text, unless it can only be a number."""
    words = set(re.findall(r"\w+", annotation))
    kind: Any = str
    if "bool" in words:
        kind = bool
    elif "int" in words and "str" not in words:
        kind = int
    elif "float" in words and "str" not in words:
        kind = float
    if is_argument and words & {"Sequence", "Iterable"}:
        kind = list[kind]
    return kind


def _is_argument(parameter: inspect.Parameter) -> bool:
    from typer.models import ArgumentInfo

    return any(
        isinstance(one, ArgumentInfo) for one in getattr(parameter.annotation, "__metadata__", ())
    )
