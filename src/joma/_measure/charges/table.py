"""``joma.charges``: the charges of a model as one object, with a table, their balance, and the checks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, overload

import torch
from torch import nn

from joma._measure.charges.anatomy import Placement
from joma._measure.charges.charge import Charge, Status
from joma._measure.charges.epsilon import EpsilonTerm
from joma._measure.charges.find import find
from joma._measure.charges.identity import Deviation, Verdict, judge_gradients
from joma._measure.charges.law import StepLaw
from joma._measure.charges.state import Layered
from joma._runs.warning import warn

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
        """Those that gradient flow conserves, exactly or up to ε."""
        return tuple(charge for charge in self.all if charge.conserved)

    @torch.no_grad()
    def to_frame(self) -> pd.DataFrame:
        """One row per charge: kind, layer, name, status, reason, numbers, and the balance.

        ``numbers`` is how many conserved numbers it holds. ``balance`` is ‖X − Y‖/(‖X‖ + ‖Y‖) of its two sides, 0 where
        they are equal and 1 where one is missing; NaN on the meta device, and for charges of one side.
        """
        import pandas as pd

        rows = []
        for charge in self.all:
            meta = any(side.parameter.is_meta for side in charge.sides)
            balance, numbers = float("nan"), 0
            if charge.sides and not meta:
                q = charge.value()
                numbers = _numbers(charge, q)
                if charge.two_sided:
                    plus, minus = charge.sums()
                    balance = float(
                        Layered(charge.name, (charge,)).balance(
                            (plus.reshape(1, -1), minus.reshape(1, -1))
                        )
                    )
            rows.append(
                {
                    "kind": charge.kind,
                    "layer": charge.layer,
                    "name": charge.name,
                    "status": str(charge.status),
                    "reason": charge.reason,
                    "numbers": numbers if charge.conserved else 0,
                    "balance": balance,
                }
            )
        frame = pd.DataFrame(rows)
        frame["layer"] = frame["layer"].astype("Int64")
        return frame

    def check_gradients(
        self,
        tolerance: float | None = None,
        *,
        computed_in: torch.dtype | None = None,
        epsilon: EpsilonTerm | None = None,
    ) -> list[Deviation]:
        """Charges whose gradient identity the gradients of now break; empty if all is well.

        Call it after ``loss.backward()``, before the optimiser's step. Gradients may be scaled, all by the same factor.

        Arguments:
            tolerance: relative; by default the root of the machine precision of the passes.
            computed_in: the type that the passes were computed in: ``torch.bfloat16`` under such an autocast,
                ``torch.float32`` if nothing was cast. By default the gradients show it. Where they do not, and a lower
                precision than that of the parameters would explain what is off, it is not returned; if nothing else is
                off, a warning says so.
            epsilon: what was recorded of the passes by `epsilon`; without it, charges up to ε are not judged.

        Returns:
            What is off, the head named.
        """
        verdict = judge_gradients(self.all, tolerance, computed_in, epsilon)
        if verdict.undecided and not verdict.deviations:
            warn(_undecided(verdict))
        return verdict.deviations

    def epsilon(self) -> EpsilonTerm:
        """A context in which to run the model forward and backward, so that charges up to ε can be judged too."""
        return EpsilonTerm(self.all)

    def law(self, optimizer: torch.optim.Optimizer) -> StepLaw:
        """The law per step of ``torch.optim.SGD``, to check updates with; see ``StepLaw``."""
        return StepLaw(self.all, optimizer)

    def __str__(self) -> str:
        groups: dict[tuple[str, str, str], int] = {}
        for charge in self.all:
            reason = (
                charge.reason.split(":")[0]
                if charge.kind == "norm" and charge.conserved
                else charge.reason
            )
            key = charge.kind, str(charge.status), reason
            groups[key] = groups.get(key, 0) + 1
        return "\n".join(
            f"{kind:9s} {status:8s} {n:4d} ×  {reason}"
            for (kind, status, reason), n in groups.items()
        )


def _undecided(verdict: Verdict) -> str:
    """Explain what was not judged, and what to do about it."""
    worst = max(verdict.undecided, key=lambda deviation: deviation.value)
    others = len(verdict.undecided) - 1
    more = f", and {others} more are off" if others else ""
    return (
        f"joma.charges: the gradients are inconclusive. {worst} in the precision of the parameters"
        f"{more}. Passes that were computed in a lower precision would explain it, but the "
        "gradients do not show one. Give the type that the passes were computed in: "
        "check_gradients(computed_in=torch.float32), torch.bfloat16, …"
    )


def _numbers(charge: Charge, q: torch.Tensor) -> int:
    """How many conserved numbers a charge holds: a symmetric matrix has h(h + 1)/2."""
    if charge.form == "matrix":
        h = q.shape[-1]
        return int(q[..., 0, 0].numel()) * h * (h + 1) // 2
    return int(q.numel())


def charges(model: nn.Module, norm: Placement | None = None) -> Charges:
    """The conserved quantities of a model's weights, found by structure.

    Each is called *exact*, *up to ε* (of a normalisation) or *none*, with the reason.

    Arguments:
        model: any Transformer with attention projections under usual names: transformers' models, PyTorch's own layers,
            hand-written ones.
        norm: "pre" or "post", where normalisation stands; known of PyTorch's layers and the usual families.

    Returns:
        The charges; a ValueError if no attention is found.

    >>> layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, norm_first=True)
    >>> found = charges(
    ...     nn.TransformerEncoder(layer, 1, norm=nn.LayerNorm(8), enable_nested_tensor=False)
    ... )
    >>> [charge.name for charge in found if charge.kind == "qk"], str(found[0].status)
    (['layers.0.self_attn.qk'], 'exact')
    """
    return Charges(tuple(find(model, norm)))


__all__ = ["Charge", "Charges", "Deviation", "EpsilonTerm", "Status", "StepLaw", "charges"]
