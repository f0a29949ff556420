"""Telling attention from the functions that a pass calls.

Attention is `scaled_dot_product_attention`; a softmax over a product of two activations (eager attention), whatever
the module is called; and what `F.multi_head_attention_forward` does inside, where a dispatch mode looks on.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from joma._events.events import BlockInput, Call, DotProduct, Scores
from joma._events.guard import Seen
from joma._events.layout import Layout, Product, Unclear, batch_and_heads, check_queries

if TYPE_CHECKING:
    from joma._events.source import Source

_SOFTMAX = {F.softmax, torch.softmax, Tensor.softmax, torch.special.softmax}
_LOG_SOFTMAX = {F.log_softmax, torch.log_softmax, Tensor.log_softmax, torch.special.log_softmax}
_PRODUCT = {
    torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, Tensor.bmm, torch.baddbmm, Tensor.baddbmm, torch.einsum,
    torch.linalg.matmul,
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
        elif func in _SOFTMAX or func in _LOG_SOFTMAX:
            with self.source.guarded():
                _on_softmax(self.source, output, func in _LOG_SOFTMAX, *args, **kwargs)
        elif func in _PRODUCT:
            with self.source.guarded():
                _on_product(self.source, func, output, (*args, *kwargs.values()))
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
                _on_own_scores(self.source, args[0], output, self.batch)
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
    settings: dict[str, Any] = {"is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
    given = (query, key, value, attn_mask)
    fields: dict[str, Any] = _in_four_dimensions(call, query, key, value, attn_mask, output)
    if fields["mask"] is not None:
        fields["mask_facts"] = source.facts(fields["mask"], fields["query"], fields["key"])
    shape = fields["query"].shape
    seen = Seen(
        DotProduct, call, source.calls_to(call),
        key=(shape, fields["key"].shape, _shape(attn_mask), is_causal, output.dtype, _shape(call.states)),
        keys=key,
        fields=fields | {"causal": is_causal, "scale": scale, "gqa": enable_gqa},
        values=value,
        replay=(lambda: F.scaled_dot_product_attention(*given, **settings).reshape(output_shape))
        if dropout_p else None,
    )  # fmt: skip
    output_shape = fields["output"].shape
    try:
        sizes = tuple(query.shape[:-1])
        check_queries(call, sizes, shape[1], key.shape[-2], pieces=query.dim() > 4)
    except Unclear as error:
        seen.reason = str(error)
    source.guard.sees(seen)


def _in_four_dimensions(
    call: Call, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, output: Tensor
) -> dict[str, Tensor | None]:
    """Queries (B, H, Tq, d), keys, values (B, Hk, Tk, …), mask and output, whatever the dimensions they came in."""
    dim = query.dim()
    if dim == 3:
        lead = batch_and_heads(call, query.shape[0], query.shape[1])
        if mask is not None and mask.dim() == 3 and mask.shape[0] > 1:
            mask = mask.unflatten(0, lead)
        query, output = query.unflatten(0, lead), output.unflatten(0, lead)
        key, value = (x[None] if len(x) == 1 else x.unflatten(0, lead) for x in (key, value))
    elif dim == 2:
        query, key, value, output = (x[None, None] for x in (query, key, value, output))
    elif dim > 4:
        if mask is not None:
            mask = mask.expand(*query.shape[:-2], -1, -1).flatten(1, -3)
        query, key, value, output = (
            x.expand(*query.shape[:-2], -1, -1).flatten(1, -3) for x in (query, key, value, output)
        )
    key, value = (x.expand(query.shape[0], -1, -1, -1) for x in (key, value))
    return {"query": query, "key": key, "value": value, "mask": mask, "output": output}


def _shape(tensor: Tensor | None) -> tuple[int, ...] | None:
    return None if tensor is None else tuple(tensor.shape)


def _on_softmax(
    source: Source, output: Tensor, logarithm: bool, input: Tensor, dim: int | None = None, *_: Any, **__: Any
) -> None:
    """A softmax, or its logarithm; attention if it is over a product of two activations, along any dimension."""
    if dim is None or input.dim() < 2 or not input.is_floating_point() or not input.numel():
        return
    columns = input.shape[dim]
    for call in reversed(source.running):
        for size in (
            input.numel(),
            input.numel() // columns * (columns - 1),
        ):  # or with a learned sink next to the keys
            if size in call.products:
                probabilities = output.detach().exp() if logarithm else output
                scores, probabilities = input.movedim(dim, -1), probabilities.movedim(dim, -1)
                _on_scores(source, call, scores, probabilities, call.products[size])
                return


def _on_scores(source: Source, call: Call, scores: Tensor, probabilities: Tensor, keys: Tensor) -> None:
    """Scores (…, Tk) in the module ``call``, and their softmax: attention, once it is multiplied with values."""
    if source.wants(Scores, BlockInput) and source.measurable(call, scores):
        key = (_shape(scores), scores.dtype, _shape(call.states))
        fields = {"scores": scores, "probabilities": probabilities}
        source.guard.sees(Seen(Scores, call, source.calls_to(call), key, keys, fields))


def _on_own_scores(source: Source, scores: Tensor, probabilities: Tensor, batch: int) -> None:
    """Scores (…, Tq, Tk) inside of F.multi_head_attention_forward, which is known to multiply them with values."""
    call = source.running[-1]
    if not source.wants(Scores, BlockInput) or not source.measurable(call, scores):
        return
    *lead, Tq, Tk = scores.shape
    N = math.prod(lead)
    scores, probabilities = (x.reshape(batch, N // batch, Tq, Tk) for x in (scores, probabilities))
    fields = {"scores": scores, "probabilities": probabilities}
    key = (_shape(scores), scores.dtype, _shape(call.states))
    source.guard.sees(Seen(
        Scores, call, source.calls_to(call), key, None, fields, layout=Layout((0, 1, 2, 3), (batch, N // batch))
    ))  # fmt: skip


def _on_product(source: Source, function: Any, output: Tensor, args: tuple[Any, ...]) -> None:
    """A product; of two activations, it may be the scores of an attention, or its weights with values."""
    product = Product.of(function, output, args)
    if product is None or not output.numel():
        return
    if all(is_plain(a) and not source.is_parameter(a) for a in product.operands):
        source.guard.multiplied(product)
        source.running[-1].products[output.numel()] = product.operands[1]


def is_transformed(tensor: Tensor) -> bool:
    """Is this a stand-in that torch.func (grad, vmap, …) computes with?"""
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(tensor))


def is_sharded(tensor: Tensor) -> bool:
    """Is only a part of this tensor here (DTensor and its like)?"""
    return hasattr(tensor, "to_local") or hasattr(tensor, "elem")


def is_plain(tensor: Any) -> bool:
    """Is this an ordinary tensor, all of it here?"""
    return isinstance(tensor, Tensor) and not is_sharded(tensor) and not is_transformed(tensor)
