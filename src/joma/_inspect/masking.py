"""What the words of a pattern do to the neuron: they are masked, and its activation and its input are looked at.

masked    the places that a context attends to and that hold a word of the pattern are given another word of the
          corpus. In the control as many other places, which it does not attend to, are given the same words.
lowered   the activation at the query is lower with the pattern masked than in the control, in so many contexts that
          chance has P ≤ ``SIGN`` for it: an exact sign test over the pattern's strongest ``MASKED`` contexts.
held      Eqn. 60, w = … + U_C v + ξ u_m, asks that w points to what the pattern brings. With x what the MLP is given at
          the query, the pattern's direction is the mean of x − x(masked): U_C b, as far as the pattern is concerned;
          the query's is the mean of x(masked) less that over all patterns masked in the layer: u_m. The neuron holds
          the pattern if cos(w, pattern) is positive and among the largest ``LARGEST`` share of the layer's neurons.
          cos(w, query) is told beside it; by the paper it is negative, the implicit bias ξ < 0.

In a gated MLP w is a row of the gate.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from joma._inspect.group import Context, Word, normalised
from joma._inspect.layer import tail
from joma._measure.events.events import Hidden, ModuleBegins
from joma._measure.events.source import EventSource, PassComplete
from joma.models.names import named_modules
from joma.models.structure import find

MASKED, SIGN, LARGEST = 8, 0.05, 0.05
_WINDOWS = 32  # at a time


@dataclass(frozen=True)
class Masking:
    """What masking the words of a pattern does.

    Attributes:
        contexts: that were masked.
        lower: in how many of them the activation is lower than in the control.
        p: of so many by chance.
        left: the mean activation that is left, as a share of that with the words.
        control: the same where other words were masked.
        pattern: cos(w, the pattern's direction); None where the MLP's lower matrix was not found.
        larger: the share of the layer's neurons with a larger one.
        query: cos(w, the query's direction).
    """

    contexts: int
    lower: int
    p: float
    left: float
    control: float
    pattern: float | None = None
    larger: float | None = None
    query: float | None = None

    @property
    def lowers(self) -> bool:
        """Does the activation fall?"""
        return self.p <= SIGN

    @property
    def held(self) -> bool:
        """Does w hold the pattern?"""
        return (
            self.pattern is not None
            and self.larger is not None
            and self.pattern > 0
            and self.larger <= LARGEST
        )


class Question(NamedTuple):
    """A pattern of a neuron that is to be masked."""

    neuron: int
    words: Sequence[str]
    contexts: Sequence[Context]  # the strongest first


def mask(
    model: nn.Module,
    layer: int,
    questions: Sequence[Question],
    word: Word,
    rng: np.random.Generator,
) -> list[Masking | None]:
    """One answer per question; None where a pattern has no context that can be masked.

    Arguments:
        model: called with the tokens as its only argument.
        layer: of the neurons.
        questions: all that are asked of this layer.
        word: a token's text.
        rng: draws the words that are put in place, and the places of the control.
    """
    pool = (
        np.concatenate([c.tokens for q in questions for c in q.contexts])
        if questions
        else np.empty(0, np.int32)
    )
    asked = [  # question, context, its three windows
        (n, context, windows)
        for n, question in enumerate(questions)
        for context in question.contexts[:MASKED]
        if (windows := _windows(context, set(question.words), word, pool, rng)) is not None
    ]
    windows = [window for _, _, three in asked for window in three]
    queries = [context.query for _, context, _ in asked for _ in range(3)]
    neurons = [questions[n].neuron for n, _, _ in asked for _ in range(3)]
    if not asked or (seen := _at_queries(model, layer, windows, queries, neurons)) is None:
        return [None] * len(questions)
    values = seen[0].reshape(-1, 3)
    directions = (
        None
        if seen[1] is None
        else _Directions(seen[1].reshape(len(values), 3, -1), _lower(model, layer))
    )
    rows: list[list[int]] = [[] for _ in questions]
    for row, (n, _, _) in enumerate(asked):
        rows[n].append(row)
    return [
        _answer(values[some], {} if directions is None else directions(some, question.neuron))
        if some
        else None
        for question, some in zip(questions, rows, strict=True)
    ]


def _answer(values: np.ndarray[Any, Any], directions: dict[str, float]) -> Masking:
    """From activations (n, 3): whole, masked, control."""
    whole, masked, control = values.T
    lower, base = int((masked < control).sum()), max(float(whole.mean()), 1e-30)
    p = tail(lower, len(values), 1, 2)
    return Masking(
        len(values),
        lower,
        p,
        float(masked.mean()) / base,
        float(control.mean()) / base,
        **directions,
    )


class _Directions:
    """Projections of w on directions of patterns and queries, from the MLP's inputs (n, 3, d) and all rows w (h, d)."""

    def __init__(self, inputs: Tensor, weights: Tensor) -> None:
        self.inputs, self.centre = inputs, inputs[:, 1].mean(dim=0)
        self.weights = weights / weights.norm(dim=1, keepdim=True).clamp(min=1e-30)

    def __call__(self, rows: list[int], neuron: int) -> dict[str, float]:
        """Those of one pattern, whose contexts these are."""
        whole, masked = self.inputs[rows, 0], self.inputs[rows, 1]
        cosines = self.weights @ _unit((whole - masked).mean(dim=0))
        query = self.weights[neuron] @ _unit(masked.mean(dim=0) - self.centre)
        larger = (cosines > cosines[neuron]).float().mean()
        return {"pattern": float(cosines[neuron]), "larger": float(larger), "query": float(query)}


def _unit(x: Tensor) -> Tensor:
    return x / x.norm().clamp(min=1e-30)


def _windows(
    context: Context,
    words: set[str],
    word: Word,
    pool: np.ndarray[Any, Any],
    rng: np.random.Generator,
) -> list[Any] | None:
    """The window as it is, with the pattern masked, and the control; None if there is nothing to mask with."""
    named = [normalised(word(int(token))) in words for token in context.tokens[: context.query]]
    places = [place for place in context.attended if named[place]]
    others = [n for n in range(1, context.query) if not named[n] and n not in context.attended]
    choice = [
        token for token in rng.choice(pool, 64).tolist() if normalised(word(token)) not in words
    ]
    if not places or len(others) < len(places) or len(choice) < len(places):
        return None
    masked, control = context.tokens.copy(), context.tokens.copy()
    masked[places] = choice[: len(places)]
    control[rng.choice(others, len(places), replace=False)] = choice[: len(places)]
    return [context.tokens, masked, control]


class _AtQueries:
    """An observer that keeps one neuron and the MLP's input, at one place of each window."""

    wants = (Hidden, ModuleBegins)

    def __init__(self, layer: int, lower: nn.Module | None) -> None:
        self.layer, self.lower = layer, lower
        self.shape, self.queries, self.neurons = (0, 0), torch.empty(0), torch.empty(0)
        self.values: list[Tensor] = []
        self.inputs: list[Tensor] = []

    def expect(self, shape: tuple[int, int], queries: Tensor, neurons: Tensor) -> None:
        """The next pass has (B, T) tokens, and these are the queries (B,) and neurons (B,)."""
        self.shape, self.queries, self.neurons = shape, queries, neurons

    def observe(self, event: Hidden | ModuleBegins) -> None:
        """Of the one layer, and of its lower matrix."""
        each = torch.arange(self.shape[0], device=event.device)
        if isinstance(event, Hidden):
            if event.layer == self.layer:
                self.values.append(event.states[each, self.queries, self.neurons].float().cpu())
        elif event.call.module is self.lower and (states := event.call.states) is not None:
            states = states.reshape(*self.shape, -1)  # OPT gives all windows one after the other
            self.inputs.append(states[each, self.queries].float().cpu())


def _at_queries(
    model: nn.Module,
    layer: int,
    windows: Sequence[Any],
    queries: Sequence[int],
    neurons: Sequence[int],
) -> tuple[np.ndarray[Any, Any], Tensor | None] | None:
    """Activations (n,), and the MLP's inputs (n, d) if its lower matrix is found; None if layers share the MLP."""
    device = next(model.parameters()).device
    observer = _AtQueries(layer, _lower_module(model, layer))
    source = EventSource(model, [observer])
    order: list[int] = []
    training = model.training
    model.eval()
    try:
        with torch.inference_mode(), source.listening():
            for chosen in _batches([len(window) for window in windows]):
                tokens = torch.from_numpy(
                    np.stack([windows[n] for n in chosen]).astype(np.int64)
                ).to(device)
                at, which = (
                    torch.tensor([x[n] for n in chosen], device=device) for x in (queries, neurons)
                )
                observer.expect((tokens.shape[0], tokens.shape[1]), at, which)
                with suppress(PassComplete):
                    model(tokens)
                source.raise_problems()
                order += chosen
                if source.until is None and len(observer.values) > 1:  # as in ALBERT
                    return None
                source.until = layer
    finally:
        model.train(training)
    back = torch.empty(len(order), dtype=torch.long)
    back[torch.tensor(order)] = torch.arange(len(order))
    inputs = torch.cat(observer.inputs)[back] if observer.inputs else None
    return torch.cat(observer.values)[back].numpy(), inputs


def _batches(lengths: Sequence[int]) -> Iterator[list[int]]:
    """Numbers of windows of one length, a few at a time."""
    order = sorted(range(len(lengths)), key=lambda n: lengths[n])
    for _, same in groupby(order, key=lambda n: lengths[n]):
        some = list(same)
        yield from (some[n : n + _WINDOWS] for n in range(0, len(some), _WINDOWS))


def _lower_module(model: nn.Module, layer: int) -> nn.Module | None:
    """The module of an MLP's lower matrix."""
    name = find(model).matrices("mlp_in")[layer].name.partition("[")[0]
    return named_modules(model).get(name)


def _lower(model: nn.Module, layer: int) -> Tensor:
    """The rows w (h, d) of an MLP's lower matrix."""
    return find(model).matrices("mlp_in")[layer].read()[0].detach().float().cpu()
