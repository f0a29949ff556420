"""An extra pass of a model that training does not notice.

The pass computes without gradients, outside of compiled code. The random states of PyTorch, Python and NumPy are put
back, and so is the state that a forward pass leaves on modules: buffers, attributes, and the contents of lists, dicts
and sets that are attributes. Tensors and arrays on modules are replaced by copies for the time of the pass, so that not
even their version changes: the pass before it may have saved them for its gradients.

Not put back: parameters that ``forward`` writes to, the inside of other objects on a module, files, and variables
outside of the model.
"""

from __future__ import annotations

import copy
import random
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

_COLLECTIVES = (
    "c10d",
    "c10d_functional",
    "_c10d_functional",
    "_c10d_functional_autograd",
)  # namespaces of operators
_KEPT = (
    "_parameters",
    "_modules",
)  # of a module: which entries they have is put back, the entries are not copied

Undo = Callable[[], None]


class CollectiveCallError(BaseException):
    """A pass that one process makes alone is about to wait for the others.

    A `BaseException`, so that no ``except Exception`` of the model goes on behind it.
    """

    def __init__(self, operator: str) -> None:
        super().__init__(
            f"its forward pass calls {operator}, which waits for the other processes, and an extra pass is made by "
            "this process alone: it ends there. Give processes='all' in every process"
        )


class _NoCollectives(TorchDispatchMode):
    """Stops a pass before it waits for other processes."""

    supports_higher_order_operators = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "namespace", None) in _COLLECTIVES:
            raise CollectiveCallError(str(func))
        return func(*args, **(kwargs or {}))


@contextmanager
def unnoticed(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], is_alone: bool
) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Make whatever runs in this block leave no trace; yields the arguments that the module is to be called with.

    Arguments:
        module: the model, or the part of it that is called.
        args: of the call; tensors among them are copied.
        kwargs: likewise.
        is_alone: other processes train the same model and do not make this pass: a collective raises
            `CollectiveCallError`.
    """
    tensors = (*module.parameters(), *module.buffers())
    devices = {tensor.device for tensor in tensors if tensor.device.type == "cuda"}
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=list(devices)))
        stack.enter_context(torch.no_grad())
        # Without Dynamo nothing is compiled, and importing it takes seconds.
        if "torch._dynamo" in sys.modules:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        for undo in _keep_random_states():
            stack.callback(undo)
        state = _State()
        stack.callback(state.put_back)
        for part in module.modules():
            state.keep(vars(part))
        copied = state.copy_arguments(args, kwargs)
        stack.enter_context(_NoCollectives() if is_alone else nullcontext())  # type: ignore[no-untyped-call]
        yield copied


def _keep_random_states() -> Iterator[Undo]:
    """Yield how to put back the random states of Python and of NumPy, if it is in use."""
    python_state = random.getstate()
    yield lambda: random.setstate(python_state)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy_state = numpy.random.get_state()
        yield lambda: numpy.random.set_state(numpy_state)


class _State:
    """The attributes of modules, with the contents of containers among them."""

    def __init__(self) -> None:
        self._undo: list[Undo] = []
        self._copies: dict[int, Any] = {}  # id of a tensor or array -> its copy
        self._visited: dict[
            int, Any
        ] = {}  # containers and generators, held so that their ids stay their own

    def put_back(self) -> None:
        for undo in self._undo:
            undo()

    def keep(self, container: Any) -> None:
        """Keep the contents of a container; copies stand for the tensors in it from now on."""
        if id(container) in self._visited:
            return
        self._visited[id(container)] = container
        if isinstance(container, dict):
            entries = dict(container)
            self._undo.append(lambda: _put_back_entries(container, entries))
            for key, value in entries.items():
                if key in _KEPT and isinstance(value, dict):
                    self._keep_entries_only(value)
                    continue
                substitute = self._substitute(value)
                if substitute is not value:
                    container[key] = substitute
        elif isinstance(container, (list, deque)):
            items = list(container)
            self._undo.append(lambda: _put_back_items(container, items))
            for n, value in enumerate(items):
                substitute = self._substitute(value)
                if substitute is not value:
                    container[n] = substitute
        else:
            members = set(container)
            self._undo.append(lambda: _put_back_members(container, members))

    def copy_arguments(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return copies: the model may write to what it is given, a cache of keys and values for example."""
        return tuple(self._argument(x) for x in args), {
            name: self._argument(x) for name, x in kwargs.items()
        }

    def _argument(self, value: Any) -> Any:
        substitute = self._substitute(value)
        is_object = (
            hasattr(value, "__dict__") and not callable(value) and not isinstance(value, type)
        )
        if substitute is not value or not is_object:
            return substitute
        try:
            return copy.deepcopy(value)
        except Exception:  # it holds what cannot be copied, tensors with gradients for example
            return value

    def _keep_entries_only(self, container: dict[Any, Any]) -> None:
        entries = dict(container)
        self._undo.append(lambda: _put_back_entries(container, entries))

    def _substitute(self, value: Any) -> Any:
        """Return what stands for a value during the pass."""
        if isinstance(value, Tensor):
            return self._copy(value, Tensor.clone) if not isinstance(value, nn.Parameter) else value
        if isinstance(value, (list, dict, set, deque)):
            self.keep(value)
            return value
        if type(value) is tuple:
            items = tuple(self._substitute(item) for item in value)
            return value if all(a is b for a, b in zip(items, value, strict=True)) else items
        if isinstance(value, (random.Random, torch.Generator)) or type(value).__module__.startswith(
            "numpy"
        ):
            return self._keep_numpy_or_generator(value)
        return value

    def _keep_numpy_or_generator(self, value: Any) -> Any:
        if isinstance(value, random.Random):
            python_state = value.getstate()
            self._undo.append(lambda: value.setstate(python_state))
        elif isinstance(value, torch.Generator):
            torch_state = value.get_state()
            self._undo.append(lambda: _set_generator(value, torch_state))
        elif type(value).__name__ == "ndarray":
            return self._copy(value, copy.copy)
        elif type(value).__name__ == "RandomState":
            old_state = value.get_state()
            self._undo.append(lambda: value.set_state(old_state))
        elif type(value).__name__ == "Generator":
            bits = value.bit_generator
            bits_state = bits.state
            self._undo.append(lambda: setattr(bits, "state", bits_state))
        return value

    def _copy(self, value: Any, copied: Callable[[Any], Any]) -> Any:
        if id(value) not in self._copies:
            self._visited[id(value)] = value
            try:
                self._copies[id(value)] = copied(value)
            except Exception:  # a kind of tensor that has no copies
                self._copies[id(value)] = value
        return self._copies[id(value)]


def _set_generator(generator: torch.Generator, state: Tensor) -> None:
    generator.set_state(state)


def _put_back_entries(container: dict[Any, Any], entries: dict[Any, Any]) -> None:
    # One entry after the other: a module must not be without attributes while another thread uses it.
    for key in [key for key in container if key not in entries]:
        del container[key]
    for key, value in entries.items():
        if key not in container or container[key] is not value:
            container[key] = value


def _put_back_items(container: Any, items: list[Any]) -> None:
    if len(container) != len(items) or any(
        a is not b for a, b in zip(container, items, strict=True)
    ):
        container.clear()
        container.extend(items)


def _put_back_members(container: set[Any], members: set[Any]) -> None:
    if container != members:
        container.clear()
        container.update(members)
