"""The steps of optimisers: events before and after each, the learning rate per group, and the clock τ = Σ lr.

PyTorch's own step hooks are used, so that a step counts when it is made and only then: accumulated batches are one
step, and one that a gradient scaler skips is none. A hook never raises into training.
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
    """Who wants to see steps. Exceptions are kept as problems and never reach the training."""

    @property
    def wants(self) -> Collection[type[StepBegins]]:
        """The kinds of events that it is given."""
        ...

    def observe(self, event: Any) -> None:
        """A step begins or has ended."""
        ...


class Steps:
    """Listens to the optimisers of a model.

    Arguments:
        model: whose parameters they train.
        optimizers: one, or several in a list. The clock of a run is that of the first group of the first one.
        observers: are told of each step.

    Attributes:
        observers: the same; more may be added at any time.
        problems: who failed (an observer, or the optimiser's own hook) -> its first exception.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Optimizer | Sequence[Optimizer],
        observers: Iterable[StepObserver] = (),
    ) -> None:
        self.observers = list(observers)
        self.problems: dict[str, Exception] = {}
        self._clocks = [_Clock(optimizer) for optimizer in optimisers_of(model, optimizers)]
        self._handles = []
        for clock in self._clocks:
            self._handles += [
                clock.optimizer.register_step_pre_hook(self._hook(clock, self._begins)),
                clock.optimizer.register_step_post_hook(self._hook(clock, self._ends)),
            ]

    @property
    def rates(self) -> list[float]:
        """The learning rate of each group at its last step, over all optimisers; NaN before the first."""
        return [rate for clock in self._clocks for rate in clock.rates]

    @property
    def tau(self) -> list[float]:
        """The sum of each group's learning rates over all steps so far."""
        return [tau for clock in self._clocks for tau in clock.tau]

    def state(self) -> list[list[float]]:
        """What `restore` needs: τ of each optimiser's groups."""
        return [list(clock.tau) for clock in self._clocks]

    def restore(self, state: Sequence[Sequence[float]]) -> None:
        """Go on from a `state`."""
        if len(state) != len(self._clocks):
            raise ValueError(
                f"the state is that of {len(state)} optimisers, and {len(self._clocks)} are watched"
            )
        for clock, tau in zip(self._clocks, state, strict=True):
            clock.tau = [float(x) for x in tau]

    def add(self, tau: Sequence[float]) -> None:
        """Add what passed before; one number per group, over all optimisers."""
        rest = iter(tau)
        for clock in self._clocks:
            clock.tau = [passed + next(rest) for passed in clock.tau]

    def leave(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _hook(
        self, clock: _Clock, tell: Callable[[_Clock], None]
    ) -> Callable[[Optimizer, Any, Any], None]:
        def hook(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            try:
                tell(clock)
            except Exception as error:  # nothing that is measured may stop the training
                self.problems.setdefault(type(optimizer).__name__, error.with_traceback(None))

        return hook

    def _begins(self, clock: _Clock) -> None:
        clock.read()
        self._tell(StepBegins, clock)

    def _ends(self, clock: _Clock) -> None:
        clock.advance()
        self._tell(StepEnds, clock)

    def _tell(self, kind: type[StepBegins], clock: _Clock) -> None:
        for observer in self.observers:
            if kind not in observer.wants:
                continue
            try:
                with torch.no_grad():
                    observer.observe(kind(clock.optimizer, tuple(clock.rates)))
            except Exception as error:
                self.problems.setdefault(type(observer).__name__, error.with_traceback(None))


class _Clock:
    """The rates of one optimiser's groups, and their sums."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.rates = [math.nan] * len(optimizer.param_groups)
        self.tau = [0.0] * len(optimizer.param_groups)

    def read(self) -> None:
        """The rates of the step to come; groups may have been added."""
        self.rates = [_rate(group) for group in self.optimizer.param_groups]
        self.tau += [0.0] * (len(self.rates) - len(self.tau))

    def advance(self) -> None:
        """The step was made."""
        self.tau = [tau + rate for tau, rate in zip(self.tau, self.rates, strict=True)]


def distinct_rates(optimizers: Iterable[Optimizer]) -> int:
    """How many parameter groups there are if their learning rates differ, before any schedule; else 1."""
    rates = [
        group.get("initial_lr", group.get("lr"))
        for optimizer in optimizers
        for group in optimizer.param_groups
    ]
    return len(rates) if len({None if rate is None else float(rate) for rate in rates}) > 1 else 1


def _rate(group: dict[str, Any]) -> float:
    """A group's learning rate; NaN if the optimiser finds its own, as Adafactor may."""
    rate = group.get("lr")
    return math.nan if rate is None else float(rate.detach() if isinstance(rate, Tensor) else rate)


def optimisers_of(model: nn.Module, optimizers: Optimizer | Sequence[Optimizer]) -> list[Optimizer]:
    """The optimisers themselves, without what accelerate and others wrap around them; each must train the model."""
    given = list(optimizers) if isinstance(optimizers, (list, tuple)) else [optimizers]
    if not given:
        raise ValueError("optimizer=[] holds no optimiser; give one, or leave it out")
    plain = [_unwrapped(optimizer) for optimizer in given]
    of_model = {id(parameter) for parameter in model.parameters()}
    for n, optimizer in enumerate(plain):
        if optimizer in plain[:n]:
            raise ValueError(
                f"the same {type(optimizer).__name__} is given twice; name each optimiser once"
            )
        parameters = [
            parameter for group in optimizer.param_groups for parameter in group["params"]
        ]
        if not any(id(parameter) in of_model for parameter in parameters):
            raise ValueError(
                f"the {type(optimizer).__name__} holds {len(parameters)} parameters, and none of them is one of the "
                f"model's {len(of_model)}: it trains another model, or was made before this one was moved or replaced"
            )
    return plain


def _unwrapped(optimizer: Any) -> Optimizer:
    inner = optimizer
    while not (isinstance(inner, Optimizer) and hasattr(inner, "_optimizer_step_pre_hooks")):
        if not hasattr(inner, "optimizer"):
            raise TypeError(
                f"optimizer= takes a torch.optim.Optimizer or a list of them, got {type(optimizer).__name__}"
            )
        inner = inner.optimizer
    return inner
