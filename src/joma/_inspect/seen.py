"""What a pass shows of each MLP: its hidden neurons, and the attention of its block, a row where one is asked for.

A hidden neuron's activation is what the upper MLP matrix is given: φ(w·x) in a plain MLP, φ(gate)·up in a gated one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from joma._gauges.matrices import find_matrices, plain_name
from joma._watch.calls import install, uninstall
from joma._watch.capture import Call, Capture
from joma._watch.tally import Tally

Rows = Callable[[int, Tensor], Tensor]  # window number, queries (P,) -> attention (P, Tk), the mean over heads
OnNeurons = Callable[[int, Tensor, Rows], None]  # layer, activations (B, T, h), attention of its block


def upper_mlps(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Name and module of the upper matrix of each MLP, in the order of the layers."""
    modules = {plain_name(name): module for name, module in model.named_modules()}
    names = [matrix.name for matrix in find_matrices(model, "mlp_out")]
    if not names:
        raise ValueError(f"no MLP was found in {type(model).__name__}: no block maps d → h and then h → d")
    if stacked := [name for name in names if name not in modules]:
        raise ValueError(
            f"{stacked[0]} is one of a stack of experts, whose neurons see only the tokens routed to them; "
            "superposition is measured on models without experts"
        )
    return [(name, modules[name]) for name in names]


class Seen(Capture):
    """Hears of a model's passes; ``on_neurons`` is called for each MLP as it runs."""

    def __init__(self, model: nn.Module, uppers: Sequence[tuple[str, nn.Module]], on_neurons: OnNeurons) -> None:
        names = {module: plain_name(name) or type(model).__name__ for name, module in model.named_modules()}
        super().__init__(model, names, Tally([], []), None)
        self.on_neurons = on_neurons
        self._layers = {module: n for n, (_, module) in enumerate(uppers)}
        self._attention: dict[str, Rows] = {}  # of this pass: module -> rows
        self._windows: tuple[int, ...] | None = None  # of this pass: (B, T)

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Listen within this block; nothing is left on the model after it."""
        install(self, list(self.names))
        try:
            yield
        finally:
            uninstall(self)

    def _run_pass(
        self, module: nn.Module, call: Callable[[], Any], args: Any, kwargs: dict[str, Any], *more: Any, **other: Any
    ) -> Any:
        self._attention.clear()
        given = next((x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)), None)
        self._windows = tuple(given.shape) if given is not None and given.dim() == 2 else None
        try:
            return super()._run_pass(module, call, args, kwargs, *more, **other)
        finally:
            self._attention.clear()

    def _inside(self, module: nn.Module, call: Callable[[], Any], args: Any, kwargs: dict[str, Any]) -> Any:
        if (layer := self._layers.get(module)) is not None:
            states = next(x for x in (*args, *kwargs.values()) if isinstance(x, Tensor))
            if states.dim() == 2 and self._windows is not None and len(states) == math.prod(self._windows):
                states = states.unflatten(0, self._windows)  # OPT has windows one after the other here
            if states.dim() != 3:
                raise ValueError(f"{self.names[module]} is given states of shape {tuple(states.shape)}, not (B, T, h)")
            with torch._C.DisableTorchFunction():  # what we do ourselves is not looked at
                self.on_neurons(layer, states, self._of_block(self.names[module]))
        return super()._inside(module, call, args, kwargs)

    def _of_block(self, mlp: str) -> Rows:
        """The attention whose name has most in common with the MLP's; of equal ones the latest."""
        parts = mlp.split(".")

        def common(name: str) -> int:
            pairs = zip(parts, name.split("."), strict=False)
            return next((n for n, (a, b) in enumerate(pairs) if a != b), len(parts))

        if not self._attention:
            why = "; ".join(f"{name}: {text}" for name, text in self.problems.items()) or self.refusal
            raise ValueError(f"no attention was seen before {mlp}" + (f" ({why})" if why else ""))
        return self._attention[max(reversed(self._attention), key=common)]

    def add_product(
        self, entry: Call, query: Tensor, key: Tensor, mask: Tensor | None, causal: bool, scale: float | None, gqa: bool
    ) -> None:
        """Queries (B, H, T, d) and keys (B, Hk, T, d): rows are worked out when asked for."""
        Tq, Tk = query.shape[-2], key.shape[-2]
        scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
        full = None if mask is None else mask.expand(*query.shape[:2], Tq, Tk)

        def rows(b: int, at: Tensor) -> Tensor:
            keys = key[b].float()
            keys = keys.repeat_interleave(query.shape[1] // key.shape[1], dim=0)  # (H, Tk, d)
            scores = query[b][:, at].float() @ keys.mT * scale  # (H, P, Tk)
            if causal:
                hidden = torch.arange(Tk, device=at.device) > at[:, None]
                scores = scores.masked_fill(hidden, -math.inf)
            if full is not None:
                given = full[b][:, at]
                hides = given.dtype == torch.bool
                scores = scores.masked_fill(~given, -math.inf) if hides else scores + given.float()
            return scores.softmax(dim=-1).mean(dim=0)

        self._remember(entry, rows)

    def add_scores(self, entry: Call, scores: Tensor) -> None:
        """Scores (B, H, T, Tk) of eager attention; a learned sink may be one more column."""
        self._remember(entry, lambda b, at: scores[b][:, at].float().softmax(dim=-1).mean(dim=0))

    def _remember(self, entry: Call, rows: Rows) -> None:
        self._attention.pop(entry.name, None)  # the latest is last
        self._attention[entry.name] = rows
