"""A fixed batch that is measured instead of the training batches: one more pass per measurement, in eval mode."""

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

# Where the first of these is called, all ids have been looked up in embeddings.
_BEHIND_EMBEDDINGS = frozenset({
    functional.linear, functional.scaled_dot_product_attention, functional.conv1d, functional.conv2d, torch.addmm,
    torch.bmm, torch.einsum, torch.matmul, torch.mm, Tensor.__matmul__, Tensor.matmul, Tensor.bmm, Tensor.mm,
})  # fmt: skip


class Probe:
    """A batch (mapping, sequence of arguments or one tensor) as arguments of the model."""

    def __init__(self, batch: Any, name: str = "probe") -> None:
        self._name = name  # of the argument, for messages
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
                f"{name} must be a mapping, a sequence of arguments or a tensor, not {type(batch).__name__}"
            )

    def check_ids(self, source: EventSource) -> None:
        """Refuse token ids that an embedding of the model does not have, before training begins.

        The model is run up to its first matrix product, in eval mode. What else may be wrong with the batch is not
        looked for: the model may not be where it will train yet. Nor is a model run that is compiled or sharded, or
        whose parameters do not exist yet.
        """
        model = source.model
        tensors = [x for x in (*self._args, *self._kwargs.values()) if isinstance(x, Tensor)]
        has_ids = any(not (x.is_floating_point() or x.is_complex()) for x in tensors)
        can_run = not source.replays and not any(
            is_lazy(p) or p.is_meta or hasattr(p, "to_local") for p in model.parameters()
        )
        if not (has_ids and can_run):
            return
        args, kwargs = self._arguments(model)
        inner = _unwrapped(model)
        try:
            # alone, whatever the other processes do: the check ends before the first product, or where they are needed
            with (
                _in_eval_mode(model),
                unnoticed(inner, args, kwargs, is_alone=True) as given,
                _Lookups(),
            ):
                inner(*given[0], **given[1])
        except _OutOfRange as error:
            raise ValueError(f"{self._name}: {error}") from None
        except (
            Exception,
            CollectiveCallError,
        ):  # the end of the check; or a problem that the first measurement reports
            pass

    def run(self, source: EventSource) -> bool:
        """Make the pass, which training does not notice; False if it failed, and the source knows why."""
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
        """Make the pass in the mode that the model is in; training does not notice it."""
        args, kwargs = self._arguments(source.model)
        with source.listening():
            source.run_aside(_unwrapped(source.model), args, kwargs)

    def _arguments(self, model: nn.Module) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of the model, where its parameters are."""
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
        args = tuple(_to(x, device) for x in self._args)
        return args, {key: _to(x, device) for key, x in self._kwargs.items()}


class _OutOfRange(Exception):
    """An embedding is asked for a row that it does not have."""


class _LookupsDone(Exception):
    """The model is behind its embeddings."""


class _Lookups(UncompiledMode):
    """Checks the ids of every lookup in an embedding, and ends the pass where the first matrix product begins."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _BEHIND_EMBEDDINGS:
            raise _LookupsDone
        if func is functional.embedding:
            ids = args[0] if args else kwargs["input"]
            weight = args[1] if len(args) > 1 else kwargs["weight"]
            _check(ids, len(weight))
        return func(*args, **kwargs)


def _check(ids: Tensor, vocabulary: int) -> None:
    if not ids.numel():
        return
    smallest, largest = (int(bound) for bound in ids.aminmax())
    if smallest < 0 or largest >= vocabulary:
        raise _OutOfRange(
            f"its ids are {smallest} to {largest}, and an embedding of the model has a vocabulary of "
            f"{vocabulary} (ids 0 to {vocabulary - 1}): give ids of this model's own tokenizer, in sequences no longer "
            "than the model allows"
        )


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
    return model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model


def _to(x: Any, device: torch.device) -> Any:
    return x.to(device) if isinstance(x, Tensor) else x
