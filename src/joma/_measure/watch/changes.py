"""Gauges of gradients and updates, around the steps of the optimisers.

A gradient is looked at just before the step, as the optimiser will use it; an update is what the step did to the
weights, for which they are copied before it and the copy dropped after it: nothing is kept between steps.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from joma._measure.events.optimiser import StepBegins, StepEnds
from joma._measure.gauges.kinds import GRADIENT, UPDATE_OF_STEP, GaugeKind
from joma._measure.gauges.rank import top_singular
from joma._measure.gauges.registry import Gauge
from joma._measure.watch.processes import Processes
from joma._measure.watch.values import Values
from joma.models.blocks import Blocks
from joma.models.matrices import Matrix


class Changes:
    """An observer of steps, which measures the gauges that are due.

    Attributes:
        due: names of the gauges that are measured in the step to come.
        reasons: (gauge, matrix) -> why a value of the last measurement is 0 or missing.
    """

    wants = (StepBegins, StepEnds)

    def __init__(
        self, gauges: Sequence[Gauge], matrices: Mapping[str, Sequence[Matrix]], processes: Processes, blocks: Blocks,
        optimizers: Sequence[Optimizer],
    ) -> None:  # fmt: skip
        self.gauges = [gauge for gauge in gauges if gauge.kind in (GRADIENT, UPDATE_OF_STEP)]
        parameters = [
            p
            for optimizer in optimizers
            for group in optimizer.param_groups
            for p in group["params"]
        ]
        for gauge in self.gauges:
            if not optimizers:
                raise ValueError(
                    f"{gauge.name} is measured around an optimiser's step: give optimizer=…"
                )
            chosen = matrices[gauge.part]
            rows = blocks.rows(
                chosen, [matrix.name for matrix in chosen], experts=gauge.part.startswith("mlp")
            )
            if any(len(row) != 1 for row in rows):
                raise ValueError(
                    f"{gauge.name} needs one matrix per block; this model has blocks without, or experts"
                )
            if any(hasattr(p, "to_local") for p in parameters):
                raise ValueError(
                    f"{gauge.name} is not measured on parameters that are sharded over processes"
                )
        self.due: Collection[str] = ()
        self.reasons: dict[tuple[str, str], str] = {}
        self._matrices: Mapping[str, Sequence[Matrix]] = matrices
        self._processes, self._blocks = processes, blocks
        self._values: dict[tuple[str, int], float | None] = {}
        self._before: dict[tuple[str, int], list[Tensor]] = {}

    widths: Mapping[str, list[int]] = {}  # nothing is per head

    def renew(self, matrices: Mapping[str, Sequence[Matrix]]) -> None:
        """Measure these from now on; a layer keeps its number, and ValueError is raised if that cannot be."""
        for part in dict.fromkeys(gauge.part for gauge in self.gauges):
            chosen = matrices.get(part, ())
            rows = self._blocks.rows(chosen, [matrix.name for matrix in chosen])
            if any(len(row) != 1 for row in rows):
                raise ValueError(
                    "gauges of gradients and updates need one matrix per block, and the model has not"
                )
        self._matrices = matrices
        self.clear()

    @property
    def _due_now(self) -> list[Gauge]:
        return [gauge for gauge in self.gauges if gauge.name in self.due]

    @property
    def names(self) -> dict[str, list[str]]:
        """Gauge -> names of the matrices that it is measured on, by layer."""
        return {
            gauge.name: [matrix.name for matrix in self._matrices[gauge.part]]
            for gauge in self.gauges
        }

    def observe(self, event: StepBegins) -> None:
        """A step begins or has ended."""
        if not self._due_now or not self._processes.computes_weights:
            return
        if isinstance(event, StepEnds):
            self._ends()
            return
        self._before.clear()
        stepped = [p for group in event.optimizer.param_groups for p in group["params"]]
        unscale = (
            1.0 / float(scale)
            if (scale := getattr(event.optimizer, "grad_scale", None)) is not None
            else 1.0
        )
        for part in dict.fromkeys(gauge.part for gauge in self._due_now):
            for n, matrix in enumerate(self._matrices[part]):
                views = matrix.views()
                owners = [_owner(view, stepped) for view in views]
                if any(owner is None for owner in owners):
                    continue
                self._measure(part, n, matrix, GRADIENT, _gradients(views, owners, unscale))
                if any(
                    gauge.part == part and gauge.kind is UPDATE_OF_STEP for gauge in self._due_now
                ):
                    self._before[part, n] = [view.detach().clone() for view in views]

    def _ends(self) -> None:
        for (part, n), before in self._before.items():
            matrix = self._matrices[part][n]
            (old,) = matrix.finish(before)
            (new,) = matrix.finish([view.detach() for view in matrix.views()])
            size = torch.linalg.vector_norm(old.double())
            change = (new.double() - old.double()) / size if size > 0 else "the weights are zero"
            self._measure(part, n, matrix, UPDATE_OF_STEP, change)
        self._before.clear()

    def _measure(
        self,
        part: str,
        layer: int,
        matrix: Matrix,
        kind: GaugeKind,
        change: list[Tensor] | Tensor | str,
    ) -> None:
        chosen = [gauge for gauge in self._due_now if gauge.part == part and gauge.kind is kind]
        if not chosen:
            return
        if isinstance(change, str):
            self._values |= {(gauge.name, layer): None for gauge in chosen}
            self.reasons |= {(gauge.name, matrix.name): change for gauge in chosen}
            return
        w = matrix.finish(change)[0] if isinstance(change, list) else change
        top = top_singular(w.float()) if any(gauge.given == "top" for gauge in chosen) else None
        for gauge in chosen:
            self._values[gauge.name, layer] = gauge.measure(w, top)
            if (
                top is not None
                and top.reason
                and gauge.given == "top"
                and not math.isnan(top.sigma)
            ):
                self.reasons[gauge.name, matrix.name] = top.reason

    def measure(self) -> dict[str, Values]:
        """Return, by gauge, its table (layers,) of the step since the last call."""
        values = {}
        for gauge in self._due_now:
            layers = range(len(self._matrices[gauge.part]))
            here = self._processes.computes_weights
            per_layer = Values.per_layer([self._values.get((gauge.name, n)) for n in layers])
            values[gauge.name] = self._processes.sum_whole_values(per_layer)
            for n, matrix in enumerate(self._matrices[gauge.part]):
                if here and (gauge.name, n) not in self._values:
                    self.reasons[gauge.name, matrix.name] = (
                        "no optimiser that is watched has stepped it"
                    )
        return values

    def clear(self) -> None:
        """Forget the step."""
        self._values.clear()
        self._before.clear()
        self.reasons.clear()


def _owner(view: Tensor, parameters: Sequence[Tensor]) -> Tensor | None:
    """The one of the parameters that a view looks at; None if it looks at another."""
    for parameter in parameters:
        if parameter.untyped_storage().data_ptr() == view.untyped_storage().data_ptr():
            start = parameter.storage_offset()
            if start <= view.storage_offset() < start + max(parameter.numel(), 1):
                return parameter
    return None


def _gradients(
    views: list[Tensor], owners: Sequence[Tensor | None], factor: float
) -> list[Tensor] | str:
    """The gradients of the parameters ``owners``, seen as the views see them; or why there is none."""
    gradients = []
    for view, owner in zip(views, owners, strict=True):
        gradient: Any = None if owner is None else owner.grad
        if owner is None or gradient is None:
            return "it has no gradient"
        if gradient.is_sparse:
            gradient = gradient.to_dense()
        if gradient.stride() != owner.stride():
            gradient = torch.empty_strided(owner.shape, owner.stride(), device=owner.device).copy_(
                gradient
            )
        at = view.storage_offset() - owner.storage_offset() + gradient.storage_offset()
        gradients.append(gradient.detach().as_strided(view.shape, view.stride(), at) * factor)
    return gradients
