"""An extra pass of a model that training does not notice.

The pass computes without gradients, outside of compiled code. The random states of PyTorch, Python
and NumPy are put back, and so is the state that a forward pass leaves on modules: buffers,
attributes, and the contents of lists, dicts and sets that are attributes. Tensors and arrays on
modules are replaced by copies for the time of the pass, so that not even their version changes: the
pass before it may have saved them for its gradients.

Not put back: parameters that ``forward`` writes to, the inside of other objects on a module, files,
and variables outside of the model.
"""

from __future__ import annotations

import copy
import random
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

# Namespaces of the operators that wait for other processes.
_COLLECTIVES = ("c10d", "c10d_functional", "_c10d_functional", "_c10d_functional_autograd")
# Dicts of a module whose set of entries is put back. The entries are not copied: they are
# parameters, and modules with a state of their own.
_SHALLOW = ("_parameters", "_modules")

Undo = Callable[[], None]


class CollectiveCallError(BaseException):
    """A pass that one process makes alone is about to wait for the others.

    A `BaseException`, so that no ``except Exception`` of the model swallows it.
    """

    def __init__(self, operator: str) -> None:
        super().__init__(
            f"its forward pass calls {operator}, which waits for the other processes, and an extra "
            "pass is made by this process alone: it ends there. Give processes='all' in every "
            "process"
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
    """Make whatever runs in this block leave no trace; yield the arguments to call the module with.

    Arguments:
        module: the model, or the part of it that is called.
        args: of the call; tensors among them are copied.
        kwargs: likewise.
        is_alone: other processes train the same model and do not make this pass, so that a
            collective raises `CollectiveCallError`.
    """
    devices = set()
    for tensor in (*module.parameters(), *module.buffers()):
        if tensor.device.type == "cuda":
            devices.add(tensor.device)
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=list(devices)))
        stack.enter_context(torch.no_grad())
        # Without Dynamo nothing is compiled, and importing it takes seconds.
        if "torch._dynamo" in sys.modules:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        for undo in _save_random_states():
            stack.callback(undo)
        state = _SavedState()
        stack.callback(state.restore)
        for part in module.modules():
            state.save(vars(part))
        copied_args = tuple(state.copy_argument(value) for value in args)
        copied_kwargs = {name: state.copy_argument(value) for name, value in kwargs.items()}
        if is_alone:
            stack.enter_context(_NoCollectives())  # type: ignore[no-untyped-call]
        yield copied_args, copied_kwargs


def _save_random_states() -> Iterator[Undo]:
    """Yield how to put back the random states of Python and, if it is imported, of NumPy."""
    python_state = random.getstate()
    yield lambda: random.setstate(python_state)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy_state = numpy.random.get_state()
        yield lambda: numpy.random.set_state(numpy_state)


class _SavedState:
    """The attributes of modules, with the contents of containers among them."""

    def __init__(self) -> None:
        self._undo: list[Undo] = []
        self._copies: dict[int, Any] = {}  # id of a tensor or array -> its copy
        # Containers and generators, held so that their ids stay their own.
        self._visited: dict[int, Any] = {}

    def restore(self) -> None:
        for undo in self._undo:
            undo()

    def save(self, container: Any) -> None:
        """Save the contents of a container, and put copies in the place of its tensors."""
        if id(container) in self._visited:
            return
        self._visited[id(container)] = container
        if isinstance(container, dict):
            self._save_dict(container)
        elif isinstance(container, (list, deque)):
            self._save_sequence(container)
        else:
            members = set(container)
            self._undo.append(lambda: _restore_members(container, members))

    def _save_dict(self, container: dict[Any, Any]) -> None:
        entries = dict(container)
        self._undo.append(lambda: _restore_entries(container, entries))
        for key, value in entries.items():
            if key in _SHALLOW and isinstance(value, dict):
                self._save_shallow(value)
                continue
            substitute = self._substitute(value)
            if substitute is not value:
                container[key] = substitute

    def _save_shallow(self, container: dict[Any, Any]) -> None:
        entries = dict(container)
        self._undo.append(lambda: _restore_entries(container, entries))

    def _save_sequence(self, container: Any) -> None:
        items = list(container)
        self._undo.append(lambda: _restore_items(container, items))
        for index, value in enumerate(items):
            substitute = self._substitute(value)
            if substitute is not value:
                container[index] = substitute

    def copy_argument(self, value: Any) -> Any:
        """Return a copy: the model may write to an argument, a cache of keys for example."""
        substitute = self._substitute(value)
        if substitute is not value:
            return substitute
        is_object = hasattr(value, "__dict__") and not callable(value)
        if not is_object or isinstance(value, type):
            return value
        try:
            return copy.deepcopy(value)
        except Exception:
            # It holds something that has no copy, tensors with gradients for example.
            return value

    def _substitute(self, value: Any) -> Any:
        """Return what stands for a value during the pass."""
        if isinstance(value, nn.Parameter):
            return value
        if isinstance(value, Tensor):
            return self._copy(value, Tensor.clone)
        if isinstance(value, (list, dict, set, deque)):
            self.save(value)
            return value
        if type(value) is tuple:
            items = tuple(self._substitute(item) for item in value)
            if _are_identical(items, value):
                return value
            return items
        if isinstance(value, random.Random):
            self._save_python_generator(value)
        elif isinstance(value, torch.Generator):
            self._save_torch_generator(value)
        elif type(value).__module__.startswith("numpy"):
            return self._substitute_numpy(value)
        return value

    def _save_python_generator(self, generator: random.Random) -> None:
        state = generator.getstate()
        self._undo.append(lambda: generator.setstate(state))

    def _save_torch_generator(self, generator: torch.Generator) -> None:
        state = generator.get_state()

        def undo() -> None:
            generator.set_state(state)

        self._undo.append(undo)

    def _substitute_numpy(self, value: Any) -> Any:
        # By name: NumPy need not be imported.
        name = type(value).__name__
        if name == "ndarray":
            return self._copy(value, copy.copy)
        if name == "RandomState":
            legacy_state = value.get_state()
            self._undo.append(lambda: value.set_state(legacy_state))
        elif name == "Generator":
            bit_generator = value.bit_generator
            state = bit_generator.state
            self._undo.append(lambda: setattr(bit_generator, "state", state))
        return value

    def _copy(self, value: Any, make_copy: Callable[[Any], Any]) -> Any:
        """Return the one copy of a tensor or array, which may have several names."""
        if id(value) not in self._copies:
            self._visited[id(value)] = value
            try:
                self._copies[id(value)] = make_copy(value)
            except Exception:  # a kind of tensor that has no copies
                self._copies[id(value)] = value
        return self._copies[id(value)]


def _are_identical(items: Any, others: Any) -> bool:
    if len(items) != len(others):
        return False
    return all(item is other for item, other in zip(items, others, strict=True))


def _restore_entries(container: dict[Any, Any], entries: dict[Any, Any]) -> None:
    # One entry after the other: a module must not be without attributes while another thread
    # uses it.
    for key in list(container):
        if key not in entries:
            del container[key]
    for key, value in entries.items():
        if key not in container or container[key] is not value:
            container[key] = value


def _restore_items(container: Any, items: list[Any]) -> None:
    if not _are_identical(container, items):
        container.clear()
        container.extend(items)


def _restore_members(container: set[Any], members: set[Any]) -> None:
    if container != members:
        container.clear()
        container.update(members)
