"""Linear maps of a model, and the matrices that weight gauges are measured on."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from torch import Tensor, nn

from joma.models.lora import base_of, is_lora, is_readable, update_of
from joma.models.names import join
from joma.models.sharded import gather
from joma.models.weights import (
    base_weight,
    block_diagonal,
    effective_weight,
    flat_rows,
    is_conv1d,
    is_pointwise_convolution,
    oriented,
)

# Names in an error message; more do not help.
_NAMES_IN_MESSAGE = 12


def flatten_all(views: list[Tensor]) -> list[Tensor]:
    """Return views (…, rows, n) as matrices (rows, n), the usual `Matrix.finish`."""
    return [flat_rows(view) for view in views]


@dataclass(frozen=True, eq=False)
class Matrix:
    """One matrix of a model, read when it is asked for.

    Attributes:
        name: Name of the module, with the part of it: ``h.0.attn.q``, ``experts.up[3]``.
        views: Returns views (…, rows, n) of the model's parameters. They exist on the meta device
            too, where a scan traces them to bytes of a file.
        finish: Makes of these views one matrix (rows, n), or one per head.
        heads: How many matrices `finish` returns.
        update: Returns what low-rank adapters add to the views; None without adapters.
    """

    name: str
    views: Callable[[], list[Tensor]]
    finish: Callable[[list[Tensor]], list[Tensor]]
    heads: int = 1
    update: Callable[[], list[Tensor]] | None = None

    def read(self) -> list[Tensor]:
        """Return one matrix, or one per head."""
        return self.finish(self.views())


@dataclass(frozen=True, eq=False)
class LinearMap:
    """A linear map y = W x + b of a model, or some rows of one: the keys of a fused projection.

    Attributes:
        name: Name of the module, or of the part of it.
        module: The module that holds the parameters, or the adapter around it.
        inputs: Columns of W.
        outputs: Rows of W.
        groups: Of a grouped convolution, whose W has so many blocks on its diagonal.
        select: Takes the rows of this map out of a tensor (all rows, …); None for all of them.
        weight_name: Attribute of ``module`` with the weight.
        bias_name: Attribute of ``module`` with the bias.
        bias_part: Rows of the bias, if maps with a weight of their own share one bias.
    """

    name: str
    module: nn.Module
    inputs: int
    outputs: int
    groups: int = 1
    select: Callable[[Tensor], Tensor] | None = None
    weight_name: str = "weight"
    bias_name: str = "bias"
    bias_part: slice | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """(outputs, inputs)."""
        return self.outputs, self.inputs

    @property
    def base(self) -> nn.Module:
        """The module that holds the parameters, without adapters around it."""
        return base_of(self.module)

    @property
    def is_adapted(self) -> bool:
        """True if low-rank adapters add to the weight."""
        return is_lora(self.module)

    @property
    def is_convolution(self) -> bool:
        """True for a convolution of kernel 1."""
        return is_pointwise_convolution(self.base)

    @property
    def is_plain(self) -> bool:
        """True if W is a parameter as it is, so that gradients and steps of W are its gradients."""
        if self.weight_name != "weight":
            return True
        return isinstance(self.module, nn.Linear) or is_conv1d(self.module)

    @property
    def weight(self) -> Tensor:
        """The matrix that acts now, (outputs, inputs) or (…, rows, inputs); a view if possible."""
        if self.weight_name == "weight":
            weight = effective_weight(self.module)
        else:
            weight = getattr(self.module, self.weight_name)
        if self.select is None:
            return weight
        return self.select(gather(weight))

    @property
    def bias(self) -> Tensor | None:
        """The bias (outputs,), without what adapters add; None if there is none."""
        bias = self.bias_parameter
        if bias is None:
            return None
        return self.bias_rows(gather(bias))

    @property
    def weight_parameter(self) -> Tensor:
        """The parameter that W is a part of, shaped as the module keeps it."""
        parameter: Tensor = getattr(self.base, self.weight_name)
        return parameter

    @property
    def bias_parameter(self) -> Tensor | None:
        """The parameter that b is a part of."""
        parameter: Tensor | None = getattr(self.base, self.bias_name, None)
        return parameter

    def rows(self, tensor: Tensor) -> Tensor:
        """Return (outputs, inputs) of a tensor shaped as `weight_parameter`: a gradient, a step."""
        if self.weight_name == "weight":
            tensor = oriented(self.base, tensor)
        if self.select is None:
            return tensor
        selected = self.select(tensor)
        return selected.reshape(-1, selected.shape[-1])

    def bias_rows(self, tensor: Tensor) -> Tensor:
        """Return (outputs,) of a tensor shaped as `bias_parameter`."""
        if self.bias_part is not None:
            return tensor[self.bias_part]
        if self.select is None:
            return tensor
        return self.select(tensor[:, None]).reshape(-1)

    def matrix(self, name: str | None = None) -> Matrix:
        """Return the matrix of this map for weight gauges, under another name if one is given."""
        finish: Callable[[list[Tensor]], list[Tensor]] = flatten_all
        if self.groups > 1:
            finish = partial(block_diagonal, self.groups)
        matrix = Matrix(name or self.name, self._views, finish)
        if self.is_adapted:
            matrix = replace(matrix, update=self._update)
        return matrix

    def part(self, name: str, start: int, stop: int) -> LinearMap:
        """Return the rows from start to stop as a map."""

        def select(tensor: Tensor) -> Tensor:
            return tensor[start:stop]

        return replace(self, name=name, outputs=stop - start, select=select)

    def _views(self) -> list[Tensor]:
        return [self.weight]

    def _update(self) -> list[Tensor]:
        update = update_of(self.module)
        if self.select is None:
            return [update]
        return [self.select(gather(update))]


def linear_map(name: str, module: nn.Module) -> LinearMap | None:
    """Return a module as a linear map; None for other modules."""
    base = base_of(module)
    if isinstance(base, nn.Linear):
        return LinearMap(name, module, base.in_features, base.out_features)
    if isinstance(base, nn.modules.conv._ConvNd):
        # What adapters add to a grouped convolution is not block diagonal.
        if not is_pointwise_convolution(base) or (base.groups > 1 and base is not module):
            return None
        return LinearMap(name, module, base.in_channels, base.out_channels, base.groups)
    # The second kind holds both base and update.
    if is_conv1d(base) or is_lora(base):
        outputs, inputs = base_weight(base).shape
        return LinearMap(name, module, inputs, outputs)
    return None


def linear_maps(modules: Mapping[str, nn.Module]) -> dict[str, LinearMap]:
    """Return all linear maps among the modules of a model, in their order."""
    maps: dict[str, LinearMap] = {}
    adapted = ""
    for name, module in modules.items():
        # The base and the factors of an adapted map are not maps of their own.
        if adapted and name.startswith(adapted):
            continue
        if is_lora(module):
            adapted = f"{name}."
            if not is_readable(module):
                continue
        linear = linear_map(name, module)
        if linear is not None:
            maps[name] = linear
    return maps


def matrices_by_name(modules: Mapping[str, nn.Module], names: str | Sequence[str]) -> list[Matrix]:
    """Return the matrices of named modules (their ``weight``) or parameters.

    Arguments:
        modules: The modules of a model.
        names: Names, or one regular expression that complete names must match.
    """
    matrices: dict[str, Callable[[], list[Tensor]]] = {}
    for path, module in modules.items():
        for key, parameter in module.named_parameters(recurse=False):
            if parameter.dim() == 2:
                matrices[join(path, key)] = partial(_parameter_views, module, key)
    full_names = {name.removesuffix(".weight"): name for name in matrices}
    if isinstance(names, str):
        pattern = names
        names = [name for name in full_names if re.fullmatch(pattern, name)]
        if not names:
            raise ValueError(f"no matrix matches {pattern!r}; there are {_some(full_names)}")
    result = []
    for name in names:
        full_name = full_names.get(name, name)
        if full_name not in matrices:
            raise ValueError(f"the model has no matrix {name!r}; there are {_some(full_names)}")
        result.append(Matrix(name, matrices[full_name], flatten_all))
    return result


def _parameter_views(module: nn.Module, key: str) -> list[Tensor]:
    return [getattr(module, key)]


def _some(names: Mapping[str, str]) -> str:
    listed = list(names)
    text = ", ".join(listed[:_NAMES_IN_MESSAGE])
    if len(listed) > _NAMES_IN_MESSAGE:
        text += f", … ({len(listed)} in all)"
    return text
