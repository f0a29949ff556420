"""What the user states about a step: its loss, its number, its learning rate, more numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class StepArguments:
    """The arguments of `Watch.step`. A mistake in them is an error when they are made.

    Attributes:
        loss: of the step; None if the user gives none.
        number: of the step; None if the watch counts.
        rate: the learning rate of the step; None if the user gives none.
        numbers: more to record.
    """

    loss: Any = None
    number: int | None = None
    rate: float | Tensor | None = None
    numbers: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.loss is not None:
            _check_number("loss", self.loss)
        if self.rate is not None:
            _check_number("lr", self.rate)
        for name, value in self.numbers.items():
            _check_number(name, value)


def _check_number(name: str, value: Any) -> None:
    """Refuse what is not a single number, without waiting for a device."""
    if isinstance(value, (int, float)):
        return
    if isinstance(value, Tensor):
        if value.numel() != 1:
            advice = "give one number, for example loss.mean()"
            raise ValueError(f"the {name} has shape {tuple(value.shape)}: {advice}")
        return
    try:
        float(value)
    except (TypeError, ValueError):
        raise TypeError(
            f"{name} must be a number or a tensor with one entry; got {value!r}"
        ) from None


def to_float(value: Any) -> float:
    """Return a number as a float. This waits for the device that a tensor is on."""
    if isinstance(value, Tensor):
        return float(value.detach())
    return float(value)
