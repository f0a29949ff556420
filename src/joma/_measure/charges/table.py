"""``joma.charges``: the charges of a model as one object, with a table and the checks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, overload

import torch
from torch import Tensor, nn

from joma._measure.charges.by_layer import LayerCharges
from joma._measure.charges.charge import Charge, Status
from joma._measure.charges.epsilon import EpsilonTerm
from joma._measure.charges.find import find
from joma._measure.charges.identity import Deviation, GradientVerdict, judge_gradients
from joma._measure.charges.law import StepLaw
from joma._runs.warning import warn
from joma.models.norms import Placement

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, eq=False)
class Charges(Sequence[Charge]):
    """The charges of one model; iterate over them, print them, or ask for a frame."""

    all: tuple[Charge, ...]

    def __len__(self) -> int:
        return len(self.all)

    @overload
    def __getitem__(self, index: int) -> Charge: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Charge, ...]: ...
    def __getitem__(self, index: int | slice) -> Charge | tuple[Charge, ...]:
        return self.all[index]

    def __iter__(self) -> Iterator[Charge]:
        return iter(self.all)

    @property
    def conserved(self) -> tuple[Charge, ...]:
        """The charges that gradient flow conserves, exactly or up to ε."""
        return tuple(charge for charge in self.all if charge.conserved)

    @torch.no_grad()
    def to_frame(self) -> pd.DataFrame:
        """Return one row per charge: kind, layer, name, status, reason, numbers, and the balance.

        ``numbers`` counts the conserved numbers that it holds. ``balance`` is ‖X − Y‖/(‖X‖ + ‖Y‖)
        of its two sides: 0 where they are equal and 1 where one is missing. It is NaN on the meta
        device, and for charges with one side.
        """
        import pandas as pd

        frame = pd.DataFrame([_row(charge) for charge in self.all])
        frame["layer"] = frame["layer"].astype("Int64")
        return frame

    def check_gradients(
        self,
        tolerance: float | None = None,
        *,
        computed_in: torch.dtype | None = None,
        epsilon: EpsilonTerm | None = None,
    ) -> list[Deviation]:
        """Return the charges whose gradient identity is broken now; empty if all is well.

        Call it after ``loss.backward()``, before the optimiser's step. Gradients may be scaled, all
        by the same factor.

        Arguments:
            tolerance: relative; by default the root of the machine precision of the passes.
            computed_in: the type that the passes were computed in: ``torch.bfloat16`` under such an
                autocast, ``torch.float32`` if nothing was cast. By default the gradients show it.
                Where they do not, and a lower precision than that of the parameters would explain
                a deviation, it is not returned. If nothing else is off, a warning says so.
            epsilon: the record that `epsilon` made of the passes. Without it, charges up to ε are
                not judged.

        Returns:
            The deviations, with the number of the head.
        """
        verdict = judge_gradients(self.all, tolerance, computed_in, epsilon)
        if verdict.undecided and not verdict.deviations:
            warn(_inconclusive(verdict))
        return verdict.deviations

    def epsilon(self) -> EpsilonTerm:
        """Return a context for a forward and backward pass that lets charges up to ε be judged."""
        return EpsilonTerm(self.all)

    def law(self, optimizer: torch.optim.Optimizer) -> StepLaw:
        """Return the law per step of ``torch.optim.SGD``, to check updates; see ``StepLaw``."""
        return StepLaw(self.all, optimizer)

    def __str__(self) -> str:
        counts: dict[tuple[str, str, str], int] = {}
        for charge in self.all:
            reason = charge.reason
            if charge.kind == "norm" and charge.conserved:
                reason = reason.partition(":")[0]  # the rest names the matrices of one block
            key = (charge.kind, str(charge.status), reason)
            counts[key] = counts.get(key, 0) + 1
        lines = []
        for (kind, status, reason), count in counts.items():
            lines.append(f"{kind:9s} {status:8s} {count:4d} ×  {reason}")
        return "\n".join(lines)


def _row(charge: Charge) -> dict[str, Any]:
    balance = math.nan
    numbers = 0
    is_meta = any(side.parameter.is_meta for side in charge.sides)
    if charge.sides and not is_meta:
        if charge.conserved:
            numbers = _count_numbers(charge, charge.value())
        if charge.two_sided:
            plus, minus = charge.sums()
            # All heads as one: (1, heads × numbers).
            sums = (plus.reshape(1, -1), minus.reshape(1, -1))
            balance = float(LayerCharges(charge.name, (charge,)).balance(sums))
    return {
        "kind": charge.kind,
        "layer": charge.layer,
        "name": charge.name,
        "status": str(charge.status),
        "reason": charge.reason,
        "numbers": numbers,
        "balance": balance,
    }


def _count_numbers(charge: Charge, value: Tensor) -> int:
    """Return the number of independent conserved numbers."""
    if charge.form == "matrix":
        # (…, h, h): a symmetric matrix has h(h + 1)/2 of them.
        width = value.shape[-1]
        return int(value[..., 0, 0].numel()) * width * (width + 1) // 2
    return int(value.numel())


def _inconclusive(verdict: GradientVerdict) -> str:
    """Return a message on what was not judged, and what to do about it."""
    worst = max(verdict.undecided, key=lambda deviation: deviation.value)
    others = len(verdict.undecided) - 1
    more = ""
    if others:
        more = f", and {others} more are off"
    return (
        f"joma.charges: the gradients are inconclusive. {worst} in the precision of the parameters"
        f"{more}. Passes that were computed in a lower precision would explain it, but the "
        "gradients do not show one. Give the type that the passes were computed in: "
        "check_gradients(computed_in=torch.float32), torch.bfloat16, …"
    )


def charges(model: nn.Module, norm: Placement | None = None) -> Charges:
    """Find the conserved quantities of a model's weights, by its structure.

    Each one is *exact*, *up to ε* (of a normalisation) or *none*, with the reason.

    Arguments:
        model: any Transformer with attention projections under usual names: models of transformers,
            PyTorch's own layers, hand-written ones.
        norm: "pre" or "post", the placement of normalisations. PyTorch's layers and the usual
            families do not need it.

    Returns:
        The charges. A model without attention raises a ValueError.

    >>> layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, norm_first=True)
    >>> found = charges(
    ...     nn.TransformerEncoder(layer, 1, norm=nn.LayerNorm(8), enable_nested_tensor=False)
    ... )
    >>> [charge.name for charge in found if charge.kind == "qk"], str(found[0].status)
    (['layers.0.self_attn.qk'], 'exact')
    """
    return Charges(tuple(find(model, norm)))


__all__ = ["Charge", "Charges", "Deviation", "EpsilonTerm", "Status", "StepLaw", "charges"]
