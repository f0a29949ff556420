"""Roles of linear maps: which of them may belong to an MLP, by the names and classes around them.

A map is read from its block (an element of a list) down to its own name. Attention, poolers,
routers, position biases, state-space mixers, adapters and heads of a model are not MLPs, whatever
their shapes. A role without evidence is not guessed: square maps, and maps into fewer neurons, need
a name or an activation that shows it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from functools import cached_property

from torch import nn

from joma.models import names


class Roles:
    """Roles of the linear maps of a model."""

    def __init__(self, modules: Mapping[str, nn.Module], maps: Iterable[str]) -> None:
        """Take the modules of a model and the names of its linear maps."""
        self._modules = modules
        self._maps = frozenset(maps)
        self._count_inside: Counter[str] = Counter()
        for name in self._maps:
            self._count_inside.update(names.ancestors(name))
        self._has_projections: dict[str, bool] = {}

    @cached_property
    def _positions(self) -> dict[str, int]:
        return {name: position for position, name in enumerate(self._modules)}

    def scopes(self, name: str) -> list[str]:
        """Return the elements of lists that a map shares with another map, innermost first."""
        scopes = []
        for path in names.ancestors(name):
            if names.last_part(path).isdigit() and self._count_inside[path] > 1:
                scopes.append(path)
        return scopes

    def may_be_mlp(self, name: str) -> bool:
        """True if nothing shows that a map, or a stack of matrices, is something else."""
        block = self._block(name)
        around = self._modules_between(block, name)
        list_name = names.list_name(block)
        if names.is_other_name(list_name) or names.is_other_name(names.last_part(name)):
            return False
        if any(self._is_other(path) for path in around):
            return False
        is_called_mlp = self._is_called_mlp(block, around)
        if self._is_list_of_attention(list_name, block) and not is_called_mlp:
            return False
        if self._is_inside_attention(around):
            return False
        parent = (block, *around)[-1]
        is_in_mlp = self._says_mlp(parent)
        if names.is_projection_name(names.last_part(name)) and not (is_in_mlp and around):
            return False
        if not any(self._holds_projections(path) for path in (block, *around)):
            return True
        # Next to projections of attention, evidence is needed. Attention may be gated as well.
        is_gate_of_attention = "gate" in names.words(names.last_part(name)) and not is_in_mlp
        return self.is_evident(name) and not is_gate_of_attention

    def is_evident(self, name: str) -> bool:
        """True if a name, or an activation after the map, shows that it belongs to an MLP."""
        block = self._block(name)
        if self._is_called_mlp(block, self._modules_between(block, name)):
            return True
        parent = names.last_part(names.parent_of(name))
        if names.is_mlp_member(names.last_part(name), parent):
            return True
        return self._is_before_activation(name)

    def can_pair(self, lower: str, upper: str) -> bool:
        """True if two maps can follow one another: in one module that is not a list of several."""
        home = self._mlp_around(lower)
        if home is not None and not upper.startswith(f"{home}."):
            return False
        common = names.common_parent(lower, upper)
        module = self._modules.get(common)
        if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
            # A list of maps is an MLP if it is called one and holds nothing else.
            are_children = names.parent_of(lower) == names.parent_of(upper)
            if home is None or not are_children:
                return False
        if self._is_in_inner_list(lower, common) or self._is_in_inner_list(upper, common):
            return False
        if not self._are_neighbours(common, lower, upper):
            return False
        return not self._has_convolution_between(lower, upper, common)

    # -- where a map lies -------------------------------------------------------------------------

    def _block(self, name: str) -> str:
        """Return the outermost scope of a map; "" if it has none."""
        scopes = self.scopes(name)
        if not scopes:
            return ""
        return scopes[-1]

    def _modules_between(self, top: str, name: str) -> list[str]:
        """Return the modules around a map that lie inside another one, outermost first."""
        return [path for path in reversed(names.ancestors(name)) if names.is_below(path, top)]

    def _mlp_around(self, name: str) -> str | None:
        """Return the outermost MLP around a map, inside its innermost scope."""
        innermost = (*self.scopes(name), "")[0]
        for path in self._modules_between(innermost, name):
            if self._says_mlp(path):
                return path
        return None

    # -- what a module is called ------------------------------------------------------------------

    def _class_name(self, path: str) -> str:
        module = self._modules.get(path)
        if module is None:
            return ""
        return type(module).__name__

    def _says_mlp(self, path: str) -> bool:
        if names.is_mlp_name(names.last_part(path)):
            return True
        class_name = self._class_name(path)
        return names.is_mlp_class(class_name) and not names.is_layer_class(class_name)

    def _is_called_mlp(self, block: str, around: Iterable[str]) -> bool:
        if any(self._says_mlp(path) for path in around):
            return True
        return names.is_mlp_name(names.list_name(block))

    def _is_other(self, path: str) -> bool:
        if names.is_other_name(names.last_part(path)):
            return True
        module = self._modules.get(path)
        if module is None:
            return False
        if any(key in module._parameters for key in names.STATE_SPACE_PARAMETERS):
            return True
        return names.is_other_class(type(module).__name__)

    def _is_list_of_attention(self, list_name: str, element: str) -> bool:
        if names.is_attention_name(list_name):
            return True
        if not element:
            return False
        class_name = self._class_name(element)
        return names.looks_like_attention(class_name) and not names.is_layer_class(class_name)

    def _is_inside_attention(self, around: list[str]) -> bool:
        for depth, path in enumerate(around):
            # An element of a list of attention modules, as "layers.0.1", has only its class.
            if names.is_attention_name(names.last_part(path)):
                return True
            class_name = self._class_name(path)
            if not names.looks_like_attention(class_name):
                continue
            has_mlp_inside = any(self._says_mlp(inner) for inner in around[depth + 1 :])
            if not (has_mlp_inside and names.is_layer_class(class_name)):
                return True
        return False

    def _holds_projections(self, path: str) -> bool:
        if path not in self._has_projections:
            module = self._modules.get(path)
            self._has_projections[path] = module is not None and names.has_projections(module)
        return self._has_projections[path]

    # -- what follows what ------------------------------------------------------------------------

    def _is_in_inner_list(self, name: str, top: str) -> bool:
        """True if a map lies in an element of a list below a module; sequences are no lists."""
        for path in self._modules_between(top, name):
            holder = self._modules.get(names.parent_of(path))
            if names.last_part(path).isdigit() and not isinstance(holder, nn.Sequential):
                return True
        return False

    def _are_neighbours(self, common: str, lower: str, upper: str) -> bool:
        """True if no other map lies between two maps of a sequence, or in an element with them."""
        module = self._modules.get(common)
        if module is None:
            return True
        children = [name for name, _ in module.named_children()]
        if not children or not all(child.isdigit() for child in children):
            return True
        start = len(names.join(common, ""))
        first = children.index(lower[start:].split(".")[0])
        last = children.index(upper[start:].split(".")[0])
        counts = []
        for child in children[first : last + 1]:
            path = names.join(common, child)
            counts.append(self._count_inside[path] or int(path in self._maps))
        return counts[0] == counts[-1] == 1 and not any(counts[1:-1])

    def _has_convolution_between(self, lower: str, upper: str, common: str) -> bool:
        """True if a convolution over positions lies between two of kernel 1, as in a ResNet."""
        if not isinstance(self._modules[lower], nn.modules.conv._ConvNd):
            return False
        first = self._positions[lower]
        last = self._positions[upper]
        for name, module in self._modules.items():
            if not isinstance(module, nn.modules.conv._ConvNd) or max(module.kernel_size) == 1:
                continue
            if first < self._positions[name] < last and names.is_below(name, common):
                return True
        return False

    def _is_before_activation(self, name: str) -> bool:
        """True if an activation follows a map in a sequence, or the sequence that ends with it."""
        path = name
        while path:
            holder = self._modules.get(names.parent_of(path))
            if not isinstance(holder, nn.Sequential):
                return False
            children = dict(holder.named_children())
            following = list(children)
            if names.last_part(path) in children:
                following = following[following.index(names.last_part(path)) + 1 :]
            for key in following:
                child = children[key]
                if names.ACTIVATION_CLASS.search(type(child).__name__):
                    return True
                if next(child.parameters(), None) is not None:
                    return False
            path = names.parent_of(path)
        return False
