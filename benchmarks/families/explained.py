"""The table of `joma.explain` against the truth of a row and against a watch."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

import joma
from joma._runs.explanation import MEASURED, ExplainedModule, Explanation

_CODE = re.compile(r"\[([a-z-]+)\]")


@dataclass
class FirstCall:
    """The arguments of the first call of a model."""

    model: nn.Module
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    has_run: bool = False

    def keep(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Keep the arguments, unless there was a call before."""
        if not self.has_run:
            self.args = args
            self.kwargs = kwargs
            self.has_run = True

    def batch(self) -> Any:
        """Return the arguments as `joma.explain` takes them: all by name, or all by position."""
        if not self.kwargs:
            return self.args
        signature = inspect.signature(type(self.model).forward)
        bound = signature.bind(self.model, *self.args, **self.kwargs)
        arguments = dict(bound.arguments)
        arguments.pop(next(iter(signature.parameters)))  # self
        for name, parameter in signature.parameters.items():
            if parameter.kind is inspect.Parameter.VAR_KEYWORD:
                arguments |= arguments.pop(name, {})
        return arguments


@contextmanager
def first_call(model: nn.Module) -> Iterator[FirstCall]:
    """Record the first call of a model within the block."""
    call = FirstCall(model)
    handle = model.register_forward_pre_hook(call.keep, with_kwargs=True)
    try:
        yield call
    finally:
        handle.remove()


@dataclass(frozen=True)
class Expected:
    """What the table should say of a model.

    Attributes:
        codes: codes in the messages of the watch.
        watched: the table of a watch on the same pass; None to leave that comparison out.
        heads: number of heads of each attention, by the truth; None if it does not show them all.
        real: number of tokens -> True (B, T) where they are not padding.
    """

    codes: set[str]
    watched: Explanation | None = None
    heads: Sequence[int] | None = None
    real: Mapping[int, Tensor] = field(default_factory=dict)


def disagreements(call: FirstCall, expected: Expected) -> list[str]:
    """Explain the model on the arguments of a call, and return what does not agree."""
    if not call.has_run:
        return ["the model was not called as a whole"]
    explanation = joma.explain(call.model, call.batch())
    attentions = [row for row in explanation.rows if row.is_attention]
    problems = []
    if expected.watched is not None:
        problems += _other_rows(attentions, expected.watched)
    codes = _codes(explanation)
    if codes != expected.codes:
        problems.append(f"codes {sorted(codes)}, the watch has {sorted(expected.codes)}")
    if expected.heads is not None:
        heads = sorted(_heads(attentions))
        if heads != sorted(expected.heads):
            problems.append(f"heads {heads}, the truth has {sorted(expected.heads)}")
    problems += _padding_problems(attentions, expected.real)
    return problems


def codes_in(text: str) -> set[str]:
    """Return the codes in a message."""
    return set(_CODE.findall(text))


def _codes(explanation: Explanation) -> set[str]:
    codes = {row.code for row in explanation.rows if row.code}
    for note in explanation.notes:
        codes |= codes_in(note)
    return codes


def _heads(rows: Sequence[ExplainedModule]) -> list[int]:
    """Return the number of heads of each attention of a pass."""
    heads: list[int] = []
    for row in rows:
        if row.status == MEASURED and row.heads is not None:
            heads += [row.heads] * row.calls
    return heads


def _other_rows(rows: Sequence[ExplainedModule], watched: Explanation) -> list[str]:
    """Return the attentions that a watch reads in another way."""

    def reading(row: ExplainedModule) -> tuple[Any, ...]:
        return row.status, row.heads, row.queries, row.padded, row.code

    here = {row.module: reading(row) for row in rows}
    there = {row.module: reading(row) for row in watched.rows if row.is_attention}
    problems = []
    for module in here | there:
        if here.get(module) != there.get(module):
            problems.append(f"{module}: {here.get(module)}, the watch has {there.get(module)}")
    return problems


def _padding_problems(rows: Sequence[ExplainedModule], real: Mapping[int, Tensor]) -> list[str]:
    """Return the attentions whose number of padded queries is not that of the inputs."""
    problems = []
    for row in rows:
        if row.queries is None or row.padded is None:
            continue
        for length, mask in real.items():
            # Attention over a whole sequence; windows and pooled tokens have other numbers.
            if row.queries == mask.numel() and row.padded != int((~mask).sum()):
                padded = int((~mask).sum())
                problems.append(
                    f"{row.module}: {row.padded} padded queries, the inputs of {length} tokens "
                    f"have {padded}"
                )
    return problems
