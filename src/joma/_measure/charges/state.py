"""The charges of a model as gauges see them: per kind and layer the balance, the drift, the gradient identity."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from joma._measure.charges.charge import Charge, Read, itself
from joma.models.blocks import Blocks
from joma.models.parts import CHARGES


@dataclass(frozen=True, eq=False)
class State:
    """What gauges are given: (heads,) each, heads = 1 for charges that are not per head.

    Attributes:
        balance, drift: numbers; 0/0 = NaN where both sides are zero.
        residual: None where no gradient was checked.
        finite: True if weights and gradients are finite, so that NaN means 0/0.
    """

    balance: Tensor
    drift: Tensor
    residual: Tensor | None
    finite: bool = True


@dataclass(frozen=True, eq=False)
class Layered:
    """The charges of one kind in one layer, taken together: a rotary embedding leaves two, of its planes and the rest.

    None in a block that has no such charge.

    >>> from torch import nn
    >>> from joma._measure.charges.find import find
    >>> from joma.models.blocks import Blocks
    >>> layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, norm_first=True)
    >>> model = nn.TransformerEncoder(layer, 1, norm=nn.LayerNorm(8), enable_nested_tensor=False)
    >>> [(part, len(layers)) for part, layers in by_part(find(model), Blocks(model)).items()]
    [('qk', 1), ('vo', 1), ('mlp', 1), ('norm', 2), ('stream', 1)]
    """

    name: str
    charges: tuple[Charge, ...]
    mean: bool = field(
        default=False
    )  # one side only: Q over the number of weights, and not a balance

    @property
    def heads(self) -> int:
        """How many numbers it has: 1 for charges that are not per head, 0 where there is no charge."""
        return len(self.sums()[0]) if self.charges else 0

    def sums(self, read: Read = itself) -> tuple[Tensor, Tensor]:
        """The two sides of all of them, (heads, numbers) each."""
        pairs = [charge.sums(read) for charge in self.charges]
        return torch.cat([plus for plus, _ in pairs], dim=1), torch.cat(
            [minus for _, minus in pairs], dim=1
        )

    def balance(self, sums: tuple[Tensor, Tensor]) -> Tensor:
        """‖P − N‖/(‖P‖ + ‖N‖) per head: 0 where both sides are equal, 1 where one is missing; NaN where both are zero.

        Of the stream, which has one side, its mean square.
        """
        plus, minus = sums
        if self.mean:
            weights = sum(
                side.parameter.numel() for charge in self.charges for side in charge.sides
            )
            return (plus - minus).sum(dim=1) / weights
        return _norm(plus - minus) / (_norm(plus) + _norm(minus))

    def residual(self, read: Read) -> Tensor:
        """What the gradient identities are off by, the worst of them, (heads,)."""
        return torch.stack(
            [charge.residual(read).reshape(-1).double().cpu() for charge in self.charges]
        ).amax(dim=0)


def _norm(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x, dim=1)


def by_part(charges: Iterable[Charge], blocks: Blocks) -> dict[str, list[Layered]]:
    """Kind -> the charges of each layer, of those that have two sides, and the stream; conserved or not.

    Those of attention and MLPs are numbered as the model's blocks are; a block may have two normalisations.
    """
    together: dict[str, dict[object, list[Charge]]] = {}
    for charge in charges:
        if (
            charge.kind in CHARGES
            and charge.sides
            and (charge.two_sided or charge.kind == "stream")
        ):
            key = charge.layer if charge.kind in ("qk", "vo") else charge.name
            together.setdefault(charge.kind, {}).setdefault(key, []).append(charge)
    layers = {
        part: [
            Layered(same[0].name, tuple(same), part == "stream") for same in together[part].values()
        ]
        for part in CHARGES
        if part in together
    }
    for part in layers.keys() & {"qk", "vo", "mlp"}:
        rows = blocks.rows(layers[part], [layer.name for layer in layers[part]])
        layers[part] = [
            row[0] if row else Layered(blocks.names[n], ()) for n, row in enumerate(rows)
        ]
    return layers


def missing(charges: Iterable[Charge], part: str) -> str:
    """Why there is no charge of a kind."""
    reasons = list(dict.fromkeys(charge.reason for charge in charges if charge.kind == part))
    return f"there is no charge {part!r} in this model" + (
        f": {'; '.join(reasons)}" if reasons else ""
    )


class States:
    """The charges of a model over time: balance now, drift since the first look, the identity of the last gradient.

    Attributes:
        starts: Q at the first look, "part:name" -> its parts (heads, numbers) and the size that drift is relative to.
    """

    def __init__(self, layers: Mapping[str, list[Layered]]) -> None:
        self.layers = layers
        self.starts: dict[str, tuple[Tensor, Tensor]] = {}
        self._residuals: dict[str, Tensor] = {}

    def keep_residuals(self, read: Read, which: Callable[[Layered], bool]) -> None:
        """Note what the gradient identities of those layers are off by, before the optimiser's step."""
        for part, layers in self.layers.items():
            for layer in (layer for layer in layers if layer.charges and which(layer)):
                self._residuals[f"{part}:{layer.name}"] = layer.residual(read)

    def forget_residuals(self) -> None:
        """The gradient that they were of is gone."""
        self._residuals.clear()

    def of(self, part: str, layer: Layered) -> State:
        """The state of one layer's charge."""
        key = f"{part}:{layer.name}"
        sums = layer.sums()
        charge = (sums[0] - sums[1]).cpu()
        if key not in self.starts:
            self.starts[key] = charge, (_norm(sums[0]) + _norm(sums[1])).cpu()
        start, size = self.starts[key]
        drift = _norm(charge - start) / size
        residual = self._residuals.get(key)
        numbers = [*sums, *([] if residual is None else [residual])]
        finite = all(bool(tensor.isfinite().all()) for tensor in numbers)
        return State(layer.balance(sums).cpu(), drift, residual, finite)
