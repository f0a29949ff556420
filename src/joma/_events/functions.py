"""Telling attention from the functions that a pass calls.

Attention is `scaled_dot_product_attention`; a softmax over a product of two activations (eager attention), whatever
the module is called; and what `F.multi_head_attention_forward` does inside, where a dispatch mode looks on.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from joma._events.events import BlockInput, Call, DotProduct, Scores

if TYPE_CHECKING:
    from joma._events.source import Source

_SOFTMAX = {F.softmax, torch.softmax, Tensor.softmax, torch.special.softmax}
_PRODUCT = {
    torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, Tensor.bmm, torch.baddbmm, Tensor.baddbmm, torch.einsum,
}  # fmt: skip


class Functions(TorchFunctionMode):
    """Looks at the functions called in a pass; each is called first, and looked at afterwards."""

    def __init__(self, source: Source) -> None:
        super().__init__()
        self.source = source

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.multi_head_attention_forward:
            with _Inside(self.source, args[0] if args else kwargs["query"]):
                return func(*args, **kwargs)
        output = func(*args, **kwargs)
        if func is F.scaled_dot_product_attention:
            with self.source.guarded():
                _on_sdpa(self.source, output, *args, **kwargs)
        elif func in _SOFTMAX:
            with self.source.guarded():
                _on_softmax(self.source, output, *args, **kwargs)
        elif func in _PRODUCT:
            with self.source.guarded():
                _on_product(self.source, output, (*args, *kwargs.values()))
        return output


class _Inside(TorchDispatchMode):
    """Looks into F.multi_head_attention_forward, whose query is (T, B, d) or (T, d)."""

    def __init__(self, source: Source, query: Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.source, self.batch = source, query.shape[1] if query.dim() == 3 else 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        name = func._schema.name.removeprefix("aten::")
        if name.startswith("_scaled_dot_product_"):
            given = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
            mask = given.get("attn_mask", given.get("attn_bias"))
            with self.source.guarded():
                _on_sdpa(
                    self.source, output[0], given["query"], given["key"], given["value"], mask, 0.0,
                    given.get("is_causal", False), given.get("scale"),
                    given["query"].shape[1] != given["key"].shape[1],
                )  # fmt: skip
        elif name in ("_softmax", "_safe_softmax"):
            with self.source.guarded():
                _on_scores(self.source, self.source.running[-1], args[0], output, self.batch)
        return output


def _on_sdpa(
    source: Source, output: Tensor, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
    dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> None:  # fmt: skip
    """F.scaled_dot_product_attention was called with these arguments."""
    if not source.wants(DotProduct, BlockInput):
        return
    call = source.running[-1]
    if not source.measurable(call, query, key):
        return
    if attn_mask is not None and hasattr(attn_mask, "_materialize"):  # torch.nn.attention.bias.CausalBias
        attn_mask = attn_mask._materialize(query.device)
    if query.dim() > 4:
        if attn_mask is not None:
            attn_mask = attn_mask.expand(*query.shape[:-2], -1, -1).flatten(1, -3)
        query, key, value, output = (x.flatten(1, -3) for x in (query, key, value, output))
    elif query.dim() == 3:
        lead = _batch_and_heads(call, query.shape[0], query.shape[1])
        query, key, value, output = (x.unflatten(0, lead) for x in (query, key, value, output))
        if attn_mask is not None and attn_mask.dim() == 3 and attn_mask.shape[0] > 1:
            attn_mask = attn_mask.unflatten(0, lead)
    source.emit_attention(
        DotProduct, call, query=query, key=key, value=value, mask=attn_mask, causal=is_causal, scale=scale,
        gqa=enable_gqa, output=output,
    )  # fmt: skip


def _on_softmax(source: Source, output: Tensor, input: Tensor, dim: int | None = None, *_: Any, **__: Any) -> None:
    """A softmax; attention if it is over a product of two activations."""
    if dim not in (-1, input.dim() - 1) or input.dim() < 3 or not input.is_floating_point() or not input.numel():
        return
    columns = input.shape[-1]
    rows = input.numel() // columns
    for call in reversed(source.running):
        # one column more than keys: a learned sink next to them
        if (rows, columns) in call.products or (rows, columns - 1) in call.products:
            _on_scores(source, call, input, output)
            return


def _on_scores(source: Source, call: Call, scores: Tensor, output: Tensor, batch: int | None = None) -> None:
    """Scores (…, Tq, Tk) of an attention in the module ``call``, and their softmax."""
    if not source.wants(Scores, BlockInput) or not source.measurable(call, scores):
        return
    if scores.dim() == 3:
        N, Tq = scores.shape[:2]
        lead = (batch, N // batch) if batch else _batch_and_heads(source.running[-1], N, Tq)
        scores, output = scores.unflatten(0, lead), output.unflatten(0, lead)
    elif scores.dim() > 4:
        scores, output = scores.flatten(1, -3), output.flatten(1, -3)
    source.emit_attention(Scores, call, scores=scores, probabilities=output)


def _on_product(source: Source, output: Tensor, args: tuple[Any, ...]) -> None:
    """A product; of two activations, it may be the scores of an attention."""
    operands = [a for a in _flat(args) if isinstance(a, Tensor) and a.dim() >= 2]
    if len(operands) < 2 or not isinstance(output, Tensor) or output.dim() < 3 or not output.numel():
        return
    if all(is_plain(a) and not source.is_parameter(a) for a in operands):
        source.running[-1].products.add((output.numel() // output.shape[-1], output.shape[-1]))


def _batch_and_heads(call: Call, N: int, Tq: int) -> tuple[int, int]:
    """(batch, heads) of a merged leading dimension of N, from what the module was given."""
    states = call.states
    if states is not None and states.dim() == 3:
        for axis in (0, 1):
            if states.shape[1 - axis] == Tq and N % states.shape[axis] == 0:
                return states.shape[axis], N // states.shape[axis]
    return N, 1


def is_transformed(tensor: Tensor) -> bool:
    """Is this a stand-in that torch.func (grad, vmap, …) computes with?"""
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(tensor))


def is_sharded(tensor: Tensor) -> bool:
    """Is only a part of this tensor here (DTensor and its like)?"""
    return hasattr(tensor, "to_local") or hasattr(tensor, "elem")


def is_plain(tensor: Any) -> bool:
    """Is this an ordinary tensor, all of it here?"""
    return isinstance(tensor, Tensor) and not is_sharded(tensor) and not is_transformed(tensor)


def _flat(values: Any) -> Iterator[Any]:
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from _flat(value)
        else:
            yield value
