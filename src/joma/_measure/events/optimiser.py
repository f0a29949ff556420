"""The steps of optimisers: events before and after each, learning rates, and the clock τ = Σ lr.

PyTorch's own step hooks are used, so that a step counts when it is made and only then: accumulated
batches are one step, and a step that a gradient scaler skips is none. A hook never raises into
training.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


@dataclass(frozen=True, eq=False)
class StepBegins:
    """An optimiser is about to make a step: gradients are those that it will use.

    Attributes:
        optimizer: the one that steps.
        rates: the learning rate of each of its groups, for this step.
    """

    optimizer: Optimizer = field(repr=False)
    rates: tuple[float, ...]


@dataclass(frozen=True, eq=False)
class StepEnds(StepBegins):
    """An optimiser has made a step: parameters are the new ones."""


class StepObserver(Protocol):
    """Receives steps. Its exceptions are kept as problems and never reach the training."""

    @property
    def wants(self) -> Collection[type[StepBegins]]:
        """The kinds of events that it receives."""
        ...

    def observe(self, event: Any) -> None:
        """Look at a step that begins or has ended."""
        ...


class Steps:
    """Listens to the optimisers of a model.

    Arguments:
        model: whose parameters they train.
        optimizers: one, or several in a list. The clock of a run is that of the first group of the
            first one.
        observers: receive each step.

    Attributes:
        observers: the same; more may be added at any time.
        problems: class of an observer that failed, or of an optimiser whose hook did -> its first
            exception.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Optimizer | Sequence[Optimizer],
        observers: Iterable[StepObserver] = (),
    ) -> None:
        self.observers = list(observers)
        self.problems: dict[str, Exception] = {}
        self._clocks = [_OptimizerClock(one) for one in optimisers_of(model, optimizers)]
        self._handles = []
        for clock in self._clocks:
            optimizer = clock.optimizer
            before = optimizer.register_step_pre_hook(self._hook(clock, self._on_begin))
            after = optimizer.register_step_post_hook(self._hook(clock, self._on_end))
            self._handles += [before, after]

    @property
    def rates(self) -> list[float]:
        """The learning rate of each group at its last step, over all optimisers; NaN before."""
        rates = []
        for clock in self._clocks:
            rates += clock.rates
        return rates

    @property
    def tau(self) -> list[float]:
        """The sum of each group's learning rates over all steps so far."""
        tau = []
        for clock in self._clocks:
            tau += clock.tau
        return tau

    def state(self) -> list[list[float]]:
        """Return τ of each optimiser's groups, for `restore`."""
        return [list(clock.tau) for clock in self._clocks]

    def restore(self, state: Sequence[Sequence[float]]) -> None:
        """Go on from a `state`."""
        if len(state) != len(self._clocks):
            raise ValueError(
                f"the state is that of {len(state)} optimisers, and {len(self._clocks)} are watched"
            )
        for clock, tau in zip(self._clocks, state, strict=True):
            clock.tau = [float(passed) for passed in tau]

    def add(self, tau: Sequence[float]) -> None:
        """Add the time that passed before; one number per group, over all optimisers."""
        earlier = iter(tau)
        for clock in self._clocks:
            clock.tau = [passed + next(earlier) for passed in clock.tau]

    def leave(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _hook(
        self, clock: _OptimizerClock, react: Callable[[_OptimizerClock], None]
    ) -> Callable[[Optimizer, Any, Any], None]:
        def hook(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            try:
                react(clock)
            except Exception as error:
                # No measurement may stop the training.
                self.problems.setdefault(type(optimizer).__name__, error.with_traceback(None))

        return hook

    def _on_begin(self, clock: _OptimizerClock) -> None:
        # Schedulers change the rates between two steps, some of them right after a step.
        clock.read()
        self._emit(StepBegins, clock)

    def _on_end(self, clock: _OptimizerClock) -> None:
        clock.advance()
        self._emit(StepEnds, clock)

    def _emit(self, kind: type[StepBegins], clock: _OptimizerClock) -> None:
        for observer in self.observers:
            if kind not in observer.wants:
                continue
            try:
                with torch.no_grad():
                    observer.observe(kind(clock.optimizer, tuple(clock.rates)))
            except Exception as error:
                self.problems.setdefault(type(observer).__name__, error.with_traceback(None))


class _OptimizerClock:
    """The learning rates of one optimiser's groups, and their sums."""

    def __init__(self, optimizer: Optimizer) -> None:
        groups = len(optimizer.param_groups)
        self.optimizer = optimizer
        # NaN, not 0: there has been no step at any rate.
        self.rates = [math.nan] * groups
        self.tau = [0.0] * groups

    def read(self) -> None:
        """Read the rates of the step to come; groups may have been added."""
        self.rates = [_rate(group) for group in self.optimizer.param_groups]
        while len(self.tau) < len(self.rates):
            self.tau.append(0.0)

    def advance(self) -> None:
        """Add the rates of the step that was made."""
        self.tau = [tau + rate for tau, rate in zip(self.tau, self.rates, strict=True)]


def distinct_rates(optimizers: Iterable[Optimizer]) -> int:
    """Return the number of parameter groups if their learning rates differ, else 1.

    Schedules do not count: the rates before any schedule are compared.
    """
    rates: list[float | None] = []
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            rate = group.get("initial_lr", group.get("lr"))
            if rate is not None:
                rate = float(rate)
            rates.append(rate)
    if len(set(rates)) > 1:
        return len(rates)
    return 1


def _rate(group: dict[str, Any]) -> float:
    """Return a group's learning rate; NaN if the optimiser computes its own, as Adafactor may."""
    rate = group.get("lr")
    if rate is None:
        return math.nan
    if isinstance(rate, Tensor):
        rate = rate.detach()
    return float(rate)


def optimisers_of(model: nn.Module, optimizers: Optimizer | Sequence[Optimizer]) -> list[Optimizer]:
    """Return the optimisers without the wrappers of accelerate and others.

    Raises:
        ValueError: if there is none, if one is there twice, or if one trains another model.
    """
    wrapped: list[Any] = [optimizers]
    if isinstance(optimizers, (list, tuple)):
        wrapped = list(optimizers)
    if not wrapped:
        raise ValueError("optimizer=[] holds no optimiser; give one, or leave it out")
    parameters_of_model = {id(parameter) for parameter in model.parameters()}
    plain: list[Optimizer] = []
    for optimizer in [_unwrapped(one) for one in wrapped]:
        if optimizer in plain:
            raise ValueError(
                f"the same {type(optimizer).__name__} is given twice; name each optimiser once"
            )
        _check_trains(optimizer, parameters_of_model)
        plain.append(optimizer)
    return plain


def _check_trains(optimizer: Optimizer, parameters_of_model: set[int]) -> None:
    """Raise if no parameter of an optimiser is one of the model."""
    parameters: list[Any] = []
    for group in optimizer.param_groups:
        parameters += group["params"]
    if any(id(parameter) in parameters_of_model for parameter in parameters):
        return
    raise ValueError(
        f"the {type(optimizer).__name__} holds {len(parameters)} parameters, and none of them is "
        f"one of the model's {len(parameters_of_model)}: it trains another model, or was made "
        "before this one was moved or replaced"
    )


def _unwrapped(optimizer: Any) -> Optimizer:
    inner = optimizer
    while not (isinstance(inner, Optimizer) and hasattr(inner, "_optimizer_step_pre_hooks")):
        if not hasattr(inner, "optimizer"):
            raise TypeError(
                "optimizer= takes a torch.optim.Optimizer or a list of them, got "
                f"{type(optimizer).__name__}"
            )
        inner = inner.optimizer
    return inner
