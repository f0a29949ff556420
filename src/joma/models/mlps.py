"""MLPs of a model: the map into the hidden neurons, the map out of them, and what lies between.

The lower matrix of a block is found by structure: among the linear maps of a block that may belong
to an MLP (see `joma.models.roles`), it is the first A (d → h) that is followed by some B (h → d) in
the same module, with h as large as possible. A gated MLP has two such A. The first one defined is
taken, which is the one under the activation in the usual families (`gate_proj`, `wi_0`), and of a
fused pair the first half. Experts, as modules or as one stack of matrices per layer, and shared
experts next to them are MLPs of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

from torch import Tensor, nn

from joma.models.matrices import LinearMap
from joma.models.names import (
    ACTIVATION_ATTRIBUTES,
    ACTIVATION_CLASS,
    GATE,
    family_of,
    last_part,
    leads_out_of_neurons,
    parent_of,
)
from joma.models.roles import Roles

# Families in whose stacks of experts the rows of gate and factor alternate.
_ALTERNATING = ("gpt_oss", "openai_privacy_filter")


@dataclass(frozen=True, eq=False)
class MLPStructure:
    """One MLP, or one expert.

    Attributes:
        name: The module that holds the lower map.
        lower: The map into the hidden neurons; of a gated MLP, the first defined of two.
        upper: The map out of the hidden neurons.
        readers: All maps that read the MLP's input: one, or gate and factor.
        is_gated: True if an activation of one map multiplies another map.
        gate: Of a gated MLP, the map under the activation; None if the names do not show it.
        factor: Of a gated MLP, the map that the gate multiplies; None if the names do not show it.
        activation: The activation, a function or module; None if it was not found.
        position: The module in whose place the MLP stands in the order of the model.
    """

    name: str
    lower: LinearMap
    upper: LinearMap
    readers: tuple[LinearMap, ...]
    is_gated: bool = False
    gate: LinearMap | None = None
    factor: LinearMap | None = None
    activation: Callable[[Tensor], Tensor] | None = None
    position: str = ""

    @property
    def neurons(self) -> int:
        """How many hidden neurons the MLP has."""
        return self.upper.inputs


def find_mlps(
    modules: Mapping[str, nn.Module], maps: Mapping[str, LinearMap], roles: Roles
) -> list[MLPStructure]:
    """Return the MLPs of a model, in its order."""
    candidates = [linear for linear in maps.values() if roles.may_be_mlp(linear.name)]
    mlps = _stacked_experts(modules, roles)
    for lower, upper in _pairs(candidates, roles, is_model_a_scope=not mlps):
        mlps.append(_from_pair(lower, upper, maps, modules))
    positions = {name: position for position, name in enumerate(modules)}
    return sorted(mlps, key=lambda mlp: positions[mlp.position])


# -- pairs of linear maps -------------------------------------------------------------------------


def _pairs(
    candidates: list[LinearMap], roles: Roles, is_model_a_scope: bool
) -> list[tuple[LinearMap, LinearMap]]:
    """Return (lower, upper) of each innermost scope that has an MLP.

    Scopes are widened where there is none. Next to the experts of a layer, which are scopes inside
    it, a module may hold a shared expert. In a model without lists, the model is the scope.
    """
    pair_of: dict[str, tuple[LinearMap, LinearMap]] = {}
    scopes_of = {linear.name: roles.scopes(linear.name) for linear in candidates}
    members: dict[str, list[LinearMap]] = {}
    for linear in candidates:
        for scope in scopes_of[linear.name]:
            members.setdefault(scope, []).append(linear)
    has_pair_inside: set[str] = set()
    for scope in sorted(members, key=lambda scope: -scope.count(".")):
        rest = []
        for linear in members[scope]:
            if not any(inner in pair_of for inner in scopes_of[linear.name]):
                rest.append(linear)
        groups = [rest]
        if scope in has_pair_inside:
            groups = [*_by_parent(rest), rest]
        for group in groups:
            pair = _widest_pair(group, roles)
            if pair is not None:
                pair_of[scope] = pair
                break
        if scope in has_pair_inside or scope in pair_of:
            parts = scope.split(".")
            has_pair_inside.update(".".join(parts[:n]) for n in range(1, len(parts)))
    if is_model_a_scope and not pair_of:
        pair = _widest_pair(candidates, roles)
        if pair is not None:
            pair_of[""] = pair
    return list(pair_of.values())


def _by_parent(maps: Iterable[LinearMap]) -> list[list[LinearMap]]:
    groups: dict[str, list[LinearMap]] = {}
    for linear in maps:
        groups.setdefault(parent_of(linear.name), []).append(linear)
    return list(groups.values())


def _widest_pair(maps: list[LinearMap], roles: Roles) -> tuple[LinearMap, LinearMap] | None:
    """Return A (d → h, or → 2h for a fused gate) and a later B (h → d): the first of the widest.

    Of several B, as in a gated MLP with as many neurons as inputs, the one whose name leads out of
    the neurons is taken.
    """
    fitting = []
    for lower, upper in combinations(maps, 2):
        if _fits(lower, upper) and _is_certain(lower, upper, roles):
            fitting.append((lower, upper))
    if not fitting:
        return None
    lower, widest = max(fitting, key=lambda pair: pair[1].inputs)  # max takes the first of equals
    for other_lower, upper in fitting:
        is_alternative = other_lower is lower and upper.inputs == widest.inputs
        if is_alternative and leads_out_of_neurons(upper.name):
            return lower, upper
    return lower, widest


def _fits(lower: LinearMap, upper: LinearMap) -> bool:
    """True if the upper map takes back what the lower map gives, or half of it."""
    if lower.inputs != upper.outputs or lower.is_convolution != upper.is_convolution:
        return False
    if lower.outputs == upper.inputs:
        return True
    return lower.outputs == 2 * upper.inputs and lower.groups == 1


def _is_certain(lower: LinearMap, upper: LinearMap, roles: Roles) -> bool:
    """True if two fitting maps are an MLP: wider inside, or shown by a name or an activation.

    Convolutions need both, since nets of convolutions have many of kernel 1.
    """
    is_wider = upper.inputs > lower.inputs
    is_evident = roles.is_evident(lower.name)
    if lower.is_convolution:
        is_mlp = is_wider and is_evident
    else:
        is_mlp = is_wider or is_evident
    return is_mlp and roles.can_pair(lower.name, upper.name)


def _from_pair(
    lower: LinearMap,
    upper: LinearMap,
    maps: Mapping[str, LinearMap],
    modules: Mapping[str, nn.Module],
) -> MLPStructure:
    neurons = upper.inputs
    parent = parent_of(lower.name)
    mlp = MLPStructure(
        name=parent,
        lower=lower,
        upper=upper,
        readers=(lower,),
        activation=_activation(modules.get(parent)),
        position=lower.name,
    )
    if lower.outputs == 2 * neurons:
        # Gate and factor in one matrix, the gate first.
        first_half = lower.part(f"{lower.name}[:{neurons}]", 0, neurons)
        second_half = lower.part(f"{lower.name}[{neurons}:]", neurons, 2 * neurons)
        return replace(mlp, lower=first_half, is_gated=True, gate=first_half, factor=second_half)
    readers = []
    for linear in maps.values():
        is_sibling = parent_of(linear.name) == parent and linear.shape == lower.shape
        if is_sibling and linear is not upper:
            readers.append(linear)
    if len(readers) != 2:
        return replace(mlp, readers=tuple(readers))
    gate, factor = _gate_and_factor(readers)
    return replace(mlp, readers=tuple(readers), is_gated=True, gate=gate, factor=factor)


def _gate_and_factor(
    readers: list[LinearMap],
) -> tuple[LinearMap, LinearMap] | tuple[None, None]:
    first, second = readers
    is_first_gate = bool(GATE.search(last_part(first.name)))
    is_second_gate = bool(GATE.search(last_part(second.name)))
    if is_first_gate == is_second_gate:
        return None, None
    if is_first_gate:
        return first, second
    return second, first


def _activation(module: nn.Module | None) -> Callable[[Tensor], Tensor] | None:
    """Return the activation that a module holds, under a usual name or as a child."""
    if module is None:
        return None
    for key in ACTIVATION_ATTRIBUTES:
        attribute: Any = getattr(module, key, None)
        if callable(attribute):
            return attribute
    for child in module.children():
        if ACTIVATION_CLASS.search(type(child).__name__):
            return child
    return None


# -- stacks of experts ----------------------------------------------------------------------------


def _stacked_experts(modules: Mapping[str, nn.Module], roles: Roles) -> list[MLPStructure]:
    """Return each expert of the layers whose experts are stacks of matrices, (experts, …, …)."""
    experts = []
    for name, module in modules.items():
        stacks = _ExpertStacks.of(name, module)
        if stacks is not None and stacks.is_mlp(roles):
            experts += stacks.experts()
    return experts


@dataclass(frozen=True, eq=False)
class _ExpertStacks:
    """The two stacks of a layer's experts.

    Of several stacks (gate, up, down) the first that fits a later one is the lower, and the last
    that it fits is the upper.
    """

    path: str
    module: nn.Module
    lower_name: str
    upper_name: str
    axis: int  # of the hidden neurons in a matrix of the lower stack

    @classmethod
    def of(cls, path: str, module: nn.Module) -> _ExpertStacks | None:
        stacks = []
        for key, parameter in module.named_parameters(recurse=False):
            if parameter.dim() == 3:
                stacks.append((key, parameter))
        pairs: list[tuple[str, str, int]] = []
        for (lower_name, lower), (upper_name, upper) in combinations(stacks, 2):
            axis = _neuron_axis(lower, upper)
            if axis is not None:
                pairs.append((lower_name, upper_name, axis))
        if not pairs:
            return None
        first_lower = pairs[0][0]
        lower_name, upper_name, axis = [pair for pair in pairs if pair[0] == first_lower][-1]
        return cls(path, module, lower_name, upper_name, axis)

    def is_mlp(self, roles: Roles) -> bool:
        name = f"{self.path}.{self.lower_name}"
        if not roles.may_be_mlp(name):
            return False
        _, rows, columns = self._stack(self.lower_name).shape
        # Square stacks fit each other whatever they are.
        return rows != columns or roles.is_evident(name)

    def experts(self) -> list[MLPStructure]:
        count, *lower_shape = self._stack(self.lower_name).shape
        upper_shape = self._stack(self.upper_name).shape[1:]
        neurons = upper_shape[1 - self.axis]
        width = lower_shape[1 - self.axis]
        is_fused = lower_shape[self.axis] == 2 * neurons
        step = 1
        if is_fused and self._alternates():
            step = 2
        experts = []
        for expert in range(count):
            lower = LinearMap(
                f"{self.path}.{self.lower_name}[{expert}]",
                self.module,
                inputs=width,
                outputs=neurons,
                select=_neurons_of(expert, self.axis, neurons, step),
                weight_name=self.lower_name,
                bias_name="",
            )
            upper = LinearMap(
                f"{self.path}.{self.upper_name}[{expert}]",
                self.module,
                inputs=neurons,
                outputs=width,
                select=_one_matrix(expert),
                weight_name=self.upper_name,
                bias_name="",
            )
            mlp = MLPStructure(
                self.path, lower, upper, (lower,), is_gated=is_fused, position=self.path
            )
            experts.append(mlp)
        return experts

    def _stack(self, key: str) -> Tensor:
        stack: Tensor = getattr(self.module, key)
        return stack

    def _alternates(self) -> bool:
        """True if gate and factor take turns, as in gpt-oss, which alone has biases in stacks."""
        has_bias = hasattr(self.module, f"{self.lower_name}_bias")
        return has_bias or family_of(self.module) in _ALTERNATING


def _one_matrix(expert: int) -> Callable[[Tensor], Tensor]:
    def select(stack: Tensor) -> Tensor:
        return stack[expert]

    return select


def _neurons_of(expert: int, axis: int, neurons: int, step: int) -> Callable[[Tensor], Tensor]:
    """Return a function from a stack (experts, …, …) to the gate of one expert, (h, d) or (d, h).

    With step 2, gate and factor take turns.
    """

    def select(stack: Tensor) -> Tensor:
        matrix = stack[expert].narrow(axis, 0, step * neurons)
        if axis == 0:
            return matrix[::step]
        return matrix[:, ::step]

    return select


def _neuron_axis(lower: Tensor, upper: Tensor) -> int | None:
    """Return the axis of the lower matrices with the hidden neurons, h or 2h; None if none fits."""
    count, rows, columns = lower.shape
    upper_count, upper_rows, upper_columns = upper.shape
    if count != upper_count or 1 in (rows, columns, upper_rows, upper_columns):
        return None
    # (h or 2h, d) and (d, h)
    if columns == upper_rows and rows in (upper_columns, 2 * upper_columns):
        return 0
    # (d, h or 2h) and (h, d)
    if rows == upper_columns and columns in (upper_rows, 2 * upper_rows):
        return 1
    return None
