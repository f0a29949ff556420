"""The charges of a model per kind and layer: balance, drift and gradient identity, for gauges."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from joma._measure.charges.charge import Charge, Read, itself
from joma.models.blocks import Blocks
from joma.models.parts import CHARGES


@dataclass(frozen=True, eq=False)
class ChargeNumbers:
    """The numbers of one layer that charge gauges receive.

    Each tensor is (heads,), with one head for charges that are not per head.

    Attributes:
        balance: distance of the two sides; 0/0 = NaN where both are zero.
        drift: change since the first measurement; NaN likewise.
        residual: of the gradient identity; None if no gradient was checked.
        finite: True if weights and gradients are finite, so that NaN means 0/0.
    """

    balance: Tensor
    drift: Tensor
    residual: Tensor | None
    finite: bool = True


@dataclass(frozen=True, eq=False)
class LayerCharges:
    """The charges of one kind in one layer.

    There may be several: a rotary embedding leaves one for its planes and one for the rest.

    Attributes:
        name: of the first charge, or of a block without such a charge.
        charges: () in a block without such a charge.
        is_mean: True for a charge with one side, which has no balance: its mean square is measured.

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
    is_mean: bool = False

    @property
    def heads(self) -> int:
        """Number of values: 1 for charges that are not per head, 0 without a charge."""
        if not self.charges:
            return 0
        plus, _ = self.sums()
        return len(plus)

    def sums(self, read: Read = itself) -> tuple[Tensor, Tensor]:
        """Return the two sides of all charges, (heads, numbers) each."""
        positive = []
        negative = []
        for charge in self.charges:
            plus, minus = charge.sums(read)
            positive.append(plus)
            negative.append(minus)
        return torch.cat(positive, dim=1), torch.cat(negative, dim=1)

    def balance(self, sums: tuple[Tensor, Tensor]) -> Tensor:
        """Return ‖P − N‖/(‖P‖ + ‖N‖) per head.

        It is 0 where both sides are equal, 1 where one is missing, and NaN where both are zero. For
        the stream, which has one side, it is the mean square of the weights.
        """
        plus, minus = sums
        if not self.is_mean:
            return _norm(plus - minus) / (_norm(plus) + _norm(minus))
        weights = 0
        for charge in self.charges:
            for side in charge.sides:
                weights += side.parameter.numel()
        return (plus - minus).sum(dim=1) / weights

    def residual(self, read: Read) -> Tensor:
        """Return the worst residual of the gradient identities, (heads,)."""
        residuals = []
        for charge in self.charges:
            residuals.append(charge.residual(read).reshape(-1).double().cpu())
        return torch.stack(residuals).amax(dim=0)  # (charges, heads) -> (heads,)


def _norm(numbers: Tensor) -> Tensor:
    return torch.linalg.vector_norm(numbers, dim=1)  # (heads, numbers) -> (heads,)


def by_part(charges: Iterable[Charge], blocks: Blocks) -> dict[str, list[LayerCharges]]:
    """Return kind -> the charges of each layer, conserved or not.

    Only charges with two sides count, and the stream. Those of attention and MLPs are numbered like
    the model's blocks. Normalisations are not: a block may have two.
    """
    groups: dict[str, dict[object, list[Charge]]] = {part: {} for part in CHARGES}
    for charge in charges:
        has_value = charge.two_sided or (charge.kind == "stream" and charge.sides)
        if charge.kind not in groups or not has_value:
            continue
        key: object = charge.name
        if charge.kind in ("qk", "vo"):
            key = charge.layer
        groups[charge.kind].setdefault(key, []).append(charge)
    layers: dict[str, list[LayerCharges]] = {}
    for part, charges_of in groups.items():
        if not charges_of:
            continue
        layers[part] = []
        for same in charges_of.values():
            layers[part].append(LayerCharges(same[0].name, tuple(same), part == "stream"))
        if part in ("qk", "vo", "mlp"):
            layers[part] = _one_per_block(layers[part], blocks)
    return layers


def _one_per_block(layers: list[LayerCharges], blocks: Blocks) -> list[LayerCharges]:
    numbered = []
    for number, row in enumerate(blocks.rows(layers, [layer.name for layer in layers])):
        if row:
            numbered.append(row[0])
        else:
            numbered.append(LayerCharges(blocks.names[number], ()))
    return numbered


def explain_missing(charges: Iterable[Charge], part: str) -> str:
    """Return a sentence on why a model has no charge of a kind."""
    reasons = dict.fromkeys(charge.reason for charge in charges if charge.kind == part)
    message = f"there is no charge {part!r} in this model"
    if reasons:
        message += f": {'; '.join(reasons)}"
    return message


class ChargeHistory:
    """The charges of a model over time: balance now, drift since the first measurement.

    Attributes:
        layers: kind -> the charges of each layer.
        starts: "kind:name" -> Q at the first measurement (heads, numbers), and the size (heads,)
            that drift is relative to.
    """

    def __init__(self, layers: Mapping[str, list[LayerCharges]]) -> None:
        self.layers = layers
        self.starts: dict[str, tuple[Tensor, Tensor]] = {}
        self._residuals: dict[str, Tensor] = {}

    def keep_residuals(self, read: Read, is_due: Callable[[LayerCharges], bool]) -> None:
        """Keep the residuals of the layers that are due, before the optimiser's step."""
        for part, layers in self.layers.items():
            for layer in layers:
                if layer.charges and is_due(layer):
                    self._residuals[f"{part}:{layer.name}"] = layer.residual(read)

    def forget_residuals(self) -> None:
        """Forget the residuals: their gradient is gone."""
        self._residuals.clear()

    def state_of(self, part: str, layer: LayerCharges) -> ChargeNumbers:
        """Return the numbers of one layer now."""
        key = f"{part}:{layer.name}"
        plus, minus = layer.sums()
        charge = (plus - minus).cpu()
        if key not in self.starts:
            self.starts[key] = charge, (_norm(plus) + _norm(minus)).cpu()
        start, size = self.starts[key]
        drift = _norm(charge - start) / size
        residual = self._residuals.get(key)
        tensors = [plus, minus]
        if residual is not None:
            tensors.append(residual)
        is_finite = all(bool(tensor.isfinite().all()) for tensor in tensors)
        return ChargeNumbers(layer.balance((plus, minus)).cpu(), drift, residual, is_finite)
