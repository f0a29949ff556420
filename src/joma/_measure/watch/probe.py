"""A fixed batch that is measured instead of the training batches, in an extra pass."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parameter import is_lazy

from joma._measure.events.border import UncompiledMode
from joma._measure.events.extra_pass import CollectiveCallError, unnoticed
from joma._measure.events.reasons import Reason, Refusal
from joma._measure.events.source import EventSource

# When the first of these is called, all ids have been looked up in embeddings.
_AFTER_EMBEDDINGS = frozenset(
    {
        functional.linear,
        functional.scaled_dot_product_attention,
        functional.conv1d,
        functional.conv2d,
        torch.addmm,
        torch.bmm,
        torch.einsum,
        torch.matmul,
        torch.mm,
        Tensor.__matmul__,
        Tensor.matmul,
        Tensor.bmm,
        Tensor.mm,
    }
)


class ProbeBatch:
    """A batch as arguments of a model.

    Arguments:
        batch: a mapping, a sequence of arguments or one tensor.
        name: of the argument that the user gave it as, for messages.
    """

    def __init__(self, batch: Any, name: str = "probe") -> None:
        self._name = name
        self._args: tuple[Any, ...] = ()
        self._kwargs: dict[str, Any] = {}
        if isinstance(batch, Tensor):
            self._args = (batch,)
        elif isinstance(batch, Mapping):
            self._kwargs = dict(batch)
        elif isinstance(batch, (tuple, list)):
            self._args = tuple(batch)
        else:
            raise TypeError(
                f"{name} must be a mapping, a sequence of arguments or a tensor, not "
                f"{type(batch).__name__}"
            )

    def check_ids(self, source: EventSource) -> None:
        """Refuse token ids that an embedding of the model does not have, before training begins.

        The model runs up to its first matrix product, in eval mode. Nothing else about the batch is
        checked, since the model may not yet be on the device that it will train on. A model that is
        compiled or sharded, or whose parameters do not exist yet, is not run at all.
        """
        model = source.model
        if not self._has_ids() or source.replays or not _has_local_parameters(model):
            return
        args, kwargs = self._arguments(model)
        inner = _unwrapped(model)
        try:
            # Alone, whatever the other processes do: the check ends before the first product, or at
            # the first call that needs them.
            with (
                _in_eval_mode(model),
                unnoticed(inner, args, kwargs, is_alone=True) as arguments,
                _IdCheck(),
            ):
                inner(*arguments[0], **arguments[1])
        except _IdOutOfRange as error:
            raise ValueError(f"{self._name}: {error}") from None
        except (Exception, CollectiveCallError):
            # The end of the check, or another problem, which the first measurement will report.
            pass

    def _has_ids(self) -> bool:
        for value in (*self._args, *self._kwargs.values()):
            if isinstance(value, Tensor) and not (value.is_floating_point() or value.is_complex()):
                return True
        return False

    def run(self, source: EventSource) -> bool:
        """Make the pass in eval mode, unnoticed by training.

        Returns:
            False if the pass failed; the source then has the reason among its problems.
        """
        model = source.model
        try:
            with _in_eval_mode(model):
                self.run_once(source)
        except Exception as error:  # training goes on
            reason = f"the pass of the probe failed with {type(error).__name__}: {error}"
            source.problems.setdefault(type(model).__name__, Refusal(Reason.PROBE, reason))
            return False
        return True

    def run_once(self, source: EventSource) -> None:
        """Make the pass in the mode that the model is in, unnoticed by training."""
        args, kwargs = self._arguments(source.model)
        with source.listening():
            source.run_aside(_unwrapped(source.model), args, kwargs)

    def _arguments(self, model: nn.Module) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of the model, on the device of its parameters."""
        device = torch.device("cpu")
        for parameter in model.parameters():
            device = parameter.device
            break
        args = tuple(_to(value, device) for value in self._args)
        kwargs = {name: _to(value, device) for name, value in self._kwargs.items()}
        return args, kwargs


class _IdOutOfRange(Exception):
    """An embedding is asked for a row that it does not have."""


class _EmbeddingsDone(Exception):
    """The pass has left the embeddings behind."""


class _IdCheck(UncompiledMode):
    """Checks the ids of every lookup in an embedding, and ends the pass at the first product."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _AFTER_EMBEDDINGS:
            raise _EmbeddingsDone
        if func is functional.embedding:
            _check_lookup(*args, **kwargs)
        return func(*args, **kwargs)


def _check_lookup(input: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> None:
    """Take the arguments of `torch.nn.functional.embedding`, under its own names."""
    vocabulary = len(weight)
    if not input.numel():
        return
    smallest, largest = map(int, input.aminmax())
    if smallest < 0 or largest >= vocabulary:
        raise _IdOutOfRange(
            f"its ids are {smallest} to {largest}, and an embedding of the model has a vocabulary "
            f"of {vocabulary} (ids 0 to {vocabulary - 1}): give ids of this model's own tokenizer, "
            "in sequences no longer than the model allows"
        )


def _has_local_parameters(model: nn.Module) -> bool:
    """Return True if all parameters exist, in this process."""
    for parameter in model.parameters():
        if is_lazy(parameter) or parameter.is_meta or hasattr(parameter, "to_local"):
            return False
    return True


@contextmanager
def _in_eval_mode(model: nn.Module) -> Iterator[None]:
    modes = {module: module.training for module in model.modules()}
    try:
        for module in modes:
            module.training = False
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def _unwrapped(model: nn.Module) -> nn.Module:
    if isinstance(model, nn.parallel.DistributedDataParallel):
        return model.module
    return model


def _to(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device)
    return value
