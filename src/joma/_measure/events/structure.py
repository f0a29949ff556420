"""The modules of a watched model, and what became of them: layers are replaced, added and removed in mid-training."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from joma.models.names import plain_name


class Structure:
    """A snapshot of a model's modules and of the names and shapes of their parameters.

    Attributes:
        names: module -> its name.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.names: dict[nn.Module, str] = {}
        self.take()

    def take(self) -> None:
        """Remember the model as it is now."""
        self.names = {
            module: plain_name(name) or type(self._model).__name__
            for name, module in self._model.named_modules()
        }
        self._parts = [
            (module, _identities(module._modules), _shapes(module._parameters))
            for module in self.names
        ]

    def has_changed(self) -> bool:
        """True if a module or parameter was added, removed or replaced; about 1 µs per module.

        A parameter of the same name and shape is the same: sharding and moving a model make new ones.
        """
        for module, children, shapes in self._parts:
            # most modules have no child or no parameter: to look at these first saves half of the time
            modules = module._modules
            if (modules or children) and _identities(modules) != children:
                return True
            parameters = module._parameters
            if (parameters or shapes) and _shapes(parameters) != shapes:
                return True
        return False

    def renamed(self, before: Mapping[nn.Module, str]) -> dict[str, str | None]:
        """Return earlier name -> name now; None for a module that is gone, and that no new one stands for."""
        now = {name: module for module, name in self.names.items()}
        names: dict[str, str | None] = {}
        for module, name in before.items():
            successor = now.get(name)
            if module in self.names:
                names[name] = self.names[module]
            elif name not in names or names[name] is None:
                is_new = successor is not None and successor not in before
                names[name] = name if is_new else None
        return names


def _identities(modules: Mapping[str, nn.Module | None]) -> tuple[int, ...]:
    return tuple(map(id, modules.values()))


def _shapes(parameters: Mapping[str, Tensor | None]) -> list[tuple[str, object]]:
    return [(name, None if p is None else p.shape) for name, p in parameters.items()]
