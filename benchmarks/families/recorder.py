"""The attention of a model by means of its own, independent of joma: what softmax and the fused kernel are given."""

from __future__ import annotations

import inspect
import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode

_HEADS = ("num_heads", "heads", "n_heads", "n_head", "num_attention_heads", "nhead")
_SOFTMAX = (torch.softmax, functional.softmax, Tensor.softmax)


class Recorder(TorchFunctionMode):
    """Keep the probabilities (…, Tq, Tk) of every attention, in float64, in the order of the calls.

    Arguments:
        lengths: numbers of tokens; a softmax whose last two axes are none of these is not recorded (a router, a
            classifier).

    Attributes:
        probabilities: of the attentions.
        heads: number of heads by the module of each attention; None if the module does not say.
        unknown: number of softmaxes over an axis of heads that were not recorded: they may be local attention.
    """

    def __init__(self, lengths: set[int]) -> None:
        super().__init__()
        self.lengths = lengths
        self.probabilities: list[Tensor] = []
        self.heads: list[int | None] = []
        self.unknown = 0
        self._running: list[nn.Module] = []
        self._handles: list[Any] = []

    def __enter__(self) -> Any:
        """Follow which modules run, too."""
        self._handles = [
            register_module_forward_pre_hook(lambda module, _: self._running.append(module)),
            register_module_forward_hook(lambda *_: self._leave(), always_call=True),
        ]
        return super().__enter__()

    def __exit__(self, *arguments: Any) -> None:
        """Stop following."""
        for handle in self._handles:
            handle.remove()
        super().__exit__(*arguments)

    def _leave(self) -> None:
        self._running.pop()

    def _record(self, probabilities: Tensor) -> None:
        self.probabilities.append(probabilities)
        said = [
            getattr(module, name, None)
            for module in reversed(self._running[-3:])
            for name in _HEADS
        ]
        self.heads.append(next((heads for heads in said if isinstance(heads, int)), None))

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Record a fused attention or a softmax, then call it."""
        kwargs = kwargs or {}
        if function is functional.scaled_dot_product_attention:
            with torch.no_grad():
                self._record(_fused(*args, **kwargs))
            return function(*args, **kwargs)
        if function is functional.multi_head_attention_forward:
            return self._multi_head(args, kwargs)
        result = function(*args, **kwargs)
        if function in _SOFTMAX:
            if self._is_attention(args, kwargs):
                with torch.no_grad():
                    self._record(args[0].detach().double().softmax(dim=-1))
            elif args[0].dim() > 3:
                self.unknown += 1
        return result

    def _multi_head(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record the weights per head that PyTorch's own function returns, then call it as it was called."""
        signature = inspect.signature(functional.multi_head_attention_forward)
        bound = signature.bind(*args, **kwargs)
        bound.arguments |= {"need_weights": True, "average_attn_weights": False}
        with torch.no_grad():
            _, weights = functional.multi_head_attention_forward(*bound.args, **bound.kwargs)
        self.probabilities.append(weights.detach().double())  # (B, H, Tq, Tk)
        self.heads.append(weights.shape[-3])
        return functional.multi_head_attention_forward(*args, **kwargs)

    def _is_attention(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        scores = args[0]
        dim = args[1] if len(args) > 1 else kwargs.get("dim", -1)
        if scores.dim() < 3 or dim not in (-1, scores.dim() - 1):
            return False
        queries, keys = scores.shape[-2:]
        # with an axis of heads, keys may be any: compressed, cached or learned ones
        return queries in self.lengths and (keys in self.lengths or scores.dim() > 3)


def _fused(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """Return the probabilities of `scaled_dot_product_attention`, by its definition."""
    query = query.detach().double()
    key = key.detach().double()
    if enable_gqa:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], dim=-3)
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        visible = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        scores = scores.masked_fill(~visible, -math.inf)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attn_mask, -math.inf)
    elif attn_mask is not None:
        scores = scores + attn_mask.double()
    return scores.softmax(dim=-1)
