"""A snapshot of a model's modules, to notice layers that are replaced, added or removed in training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor, nn

from joma.models.names import plain_name


class _ModuleState(NamedTuple):
    module: nn.Module
    children: tuple[int, ...]  # ids
    shapes: list[tuple[str, object]]  # of its parameters


class ModuleSnapshot:
    """A model's modules, and the names and shapes of their parameters.

    Attributes:
        names: Module -> its name.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.names: dict[nn.Module, str] = {}
        self._states: list[_ModuleState] = []
        self.take()

    def take(self) -> None:
        """Remember the model as it is now."""
        self.names = {}
        self._states = []
        for name, module in self._model.named_modules():
            self.names[module] = plain_name(name) or type(self._model).__name__
            children = _identities(module._modules)
            self._states.append(_ModuleState(module, children, _shapes(module._parameters)))

    def has_changed(self) -> bool:
        """True if a module or parameter was added, removed or replaced; about 1 µs per module.

        A parameter of the same name and shape counts as the same: sharding and moving a model make
        new ones.
        """
        for module, children, shapes in self._states:
            # Most modules have no child or no parameter: this test first saves half of the time.
            modules = module._modules
            if (modules or children) and _identities(modules) != children:
                return True
            parameters = module._parameters
            if (parameters or shapes) and _shapes(parameters) != shapes:
                return True
        return False

    def renamed(self, names_before: Mapping[nn.Module, str]) -> dict[str, str | None]:
        """Return earlier name -> present name; None for a removed module without a successor."""
        modules_now = {name: module for module, name in self.names.items()}
        names: dict[str, str | None] = {}
        for module, name in names_before.items():
            if module in self.names:
                names[name] = self.names[module]
                continue
            # Two modules may have had one name: a wrapper and the module in it.
            if names.get(name) is not None:
                continue
            successor = modules_now.get(name)
            has_successor = successor is not None and successor not in names_before
            names[name] = name if has_successor else None
        return names


def _identities(modules: Mapping[str, nn.Module | None]) -> tuple[int, ...]:
    return tuple(map(id, modules.values()))


def _shapes(parameters: Mapping[str, Tensor | None]) -> list[tuple[str, object]]:
    return [(name, None if p is None else p.shape) for name, p in parameters.items()]
