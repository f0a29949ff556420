"""Telling attention from the functions that a pass calls.

Attention is `scaled_dot_product_attention`; a softmax over a product of two activations (eager attention), whatever
the module is called; and what `F.multi_head_attention_forward` does inside, where a dispatch mode looks on.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from joma._measure.events.axes import Axis, Layout, RecordedProjection
from joma._measure.events.border import UncompiledMode
from joma._measure.events.events import BlockInput, Call, DotProduct, Scores
from joma._measure.events.guard import FUNCTION_CHECK, Seen
from joma._measure.events.products import Product, read_product

if TYPE_CHECKING:
    from joma._measure.events.source import EventSource

_SOFTMAX = {F.softmax, torch.softmax, Tensor.softmax, torch.special.softmax}
_LOG_SOFTMAX = {F.log_softmax, torch.log_softmax, Tensor.log_softmax, torch.special.log_softmax}
_PRODUCT = {
    torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, Tensor.bmm, torch.baddbmm, Tensor.baddbmm, torch.einsum,
    torch.linalg.matmul,
}  # fmt: skip
_COMBINATION = {
    torch.sub, Tensor.sub, Tensor.__sub__, Tensor.__rsub__, torch.rsub, torch.subtract, Tensor.subtract,
    Tensor.subtract_, torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__, Tensor.__iadd__, Tensor.__isub__,
    Tensor.sub_, Tensor.add_, torch.lerp, Tensor.lerp, Tensor.lerp_, torch.addcmul, Tensor.addcmul, Tensor.addcmul_,
}  # fmt: skip
# of one tensor that holds both maps, stacked or as halves of the heads
_REDUCTION = {torch.sum, Tensor.sum, torch.diff, Tensor.diff}
_CARRIES_ON = {
    torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__, Tensor.mul_, Tensor.__imul__, torch.multiply,
    Tensor.multiply, torch.div, Tensor.div, Tensor.__truediv__, Tensor.contiguous, Tensor.clone, torch.clone,
    Tensor.reshape, torch.reshape, Tensor.flatten, torch.flatten, torch.cat, torch.stack, Tensor.to, Tensor.float,
    Tensor.type_as, Tensor.neg, torch.neg, Tensor.__neg__, F.dropout,
}  # fmt: skip


class Functions(UncompiledMode):
    """Looks at the functions called in a pass; each is called first, and looked at afterwards."""

    def __init__(self, source: EventSource) -> None:
        super().__init__()
        self.source = source

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.multi_head_attention_forward:
            inside: _Inside | None = None
            with self.source.guarded():
                given = dict(zip(("query", "key"), args, strict=False)) | kwargs
                inside = _Inside(self.source, given["query"], given["key"])
            with inside or nullcontext():
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
        elif func in _COMBINATION or func in _CARRIES_ON or func in _REDUCTION:
            with self.source.guarded():
                _follow(self.source, func, output, (*args, *kwargs.values()))
        return output


class _Inside(TorchDispatchMode):
    """Looks into F.multi_head_attention_forward, whose query is (T, B, d) or (T, d)."""

    def __init__(self, source: EventSource, query: Tensor, key: Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.source = source
        self.batch = query.shape[1] if query.dim() == 3 else 1
        self.is_self = query.shape == key.shape and (
            query.data_ptr() == key.data_ptr() or torch.equal(query, key)
        )

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
                    given["query"].shape[1] != given["key"].shape[1], plain_layout(given["query"]),
                    self.is_self, "multi-head forward, fused",
                )  # fmt: skip
        elif name in ("_softmax", "_safe_softmax"):
            with self.source.guarded():
                _on_own_scores(self.source, args[0], output, self.batch, self.is_self)
        return output


def _on_sdpa(
    source: EventSource, output: Tensor, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
    dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
    layout: Layout | None = None, is_self: bool | None = None, backend: str = "sdpa",
) -> None:  # fmt: skip
    """F.scaled_dot_product_attention was called with these arguments; ``layout`` and ``is_self`` if they are known."""
    if not source.wants(DotProduct, BlockInput):
        return
    call = source.running[-1]
    if not source.measurable(call, query, key):
        return
    if attn_mask is not None and hasattr(
        attn_mask, "_materialize"
    ):  # torch.nn.attention.bias.CausalBias
        attn_mask = attn_mask._materialize(query.device)
    settings: dict[str, Any] = {"is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
    if query.dim() == 2:  # one sample of one head
        query, key, value, output = (x[None] for x in (query, key, value, output))
    seen = Seen(
        DotProduct, call, source.calls_to(call),
        key=(query.shape, key.shape, _shape(attn_mask), is_causal, output.dtype, _shape(call.states)),
        keys=key,
        fields={
            "query": query, "key": key, "value": value, "mask": attn_mask, "output": output,
            "causal": is_causal, "scale": scale, "gqa": enable_gqa,
        },
        values=value,
        queries=lambda: query,
        key_rows=lambda _: key,
        query_axis=query.dim() - 2,
        layout=layout,
        is_self=is_self,
        backend=backend,
    )  # fmt: skip
    if dropout_p:
        seen.replay = lambda b: _without_dropout(seen, b, settings)
    source.guard.sees(seen)


def _without_dropout(seen: Seen, b: int, settings: dict[str, Any]) -> Tensor:
    """The output (H, Tq, dv) of one sample, computed as the module did, but for dropout."""
    fields = seen.event_fields()
    kind = fields["output"].dtype  # autocast may have rounded what the module gave
    query, key, value = (fields[name][b : b + 1].to(kind) for name in ("query", "key", "value"))
    mask = fields["mask"]
    if mask is not None:
        if mask.dim() == 4 and mask.shape[0] > 1:
            mask = mask[b : b + 1]
        if mask.dtype != torch.bool:
            mask = mask.to(kind)
    if key.shape[1] != query.shape[1]:
        settings = settings | {"enable_gqa": True}
    return F.scaled_dot_product_attention(query, key, value, mask, **settings)[0]


def _shape(tensor: Tensor | None) -> tuple[int, ...] | None:
    return None if tensor is None else tuple(tensor.shape)


def _on_softmax(
    source: EventSource,
    output: Tensor,
    logarithm: bool,
    input: Tensor,
    dim: int | None = None,
    *_: Any,
    **__: Any,
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
                product = call.products[size]
                _on_scores(source, call, scores, probabilities, product, tuple(input.shape), dim)
                return
    if source.running and is_plain(input):
        source.guard.normalised(input.movedim(dim, -1))


def _on_scores(
    source: EventSource, call: Call, scores: Tensor, probabilities: Tensor, product: Product, shape: tuple[int, ...],
    dim: int,
) -> None:  # fmt: skip
    """Scores (…, Tk) in the module ``call``, and their softmax: attention, once it is multiplied with values.

    They came as ``shape``, with the keys along ``dim``, from a product of queries and keys.
    """
    if not source.wants(Scores, BlockInput) or not source.measurable(call, scores):
        return
    source.guard.sees(Seen(
        Scores, call, source.calls_to(call),
        key=(_shape(scores), scores.dtype, _shape(call.states)),
        keys=product.operands[1],
        fields={"scores": scores, "probabilities": probabilities},
        queries=lambda: product.queries(shape, dim),
        key_rows=lambda query_axis: product.keys(shape, dim, query_axis),
        backend="eager softmax",
    ))  # fmt: skip


def _on_own_scores(
    source: EventSource, scores: Tensor, probabilities: Tensor, batch: int, is_self: bool
) -> None:
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
        Scores, call, source.calls_to(call), key, None, fields, query_axis=2, layout=plain_layout(scores),
        is_self=is_self, backend="multi-head forward, softmax", check=FUNCTION_CHECK,
    ))  # fmt: skip


def plain_layout(tensor: Tensor) -> Layout:
    """The layout of a tensor that is known to be (B, H, Tq, …)."""
    B, H = tensor.shape[:2]
    return Layout((Axis(B, 1), Axis(H, H)), 2)


def _on_product(source: EventSource, function: Any, output: Tensor, args: tuple[Any, ...]) -> None:
    """A product; of two activations, it may be the scores of an attention, or its weights with values."""
    product = read_product(function, output, args)
    if product is None:
        tensors = [a for a in args if is_plain(a)]
        if len(tensors) > 2 and not any(map(source.is_parameter, tensors)):
            source.guard.contracted(tensors)
        return
    if not output.numel():
        return
    if all(is_plain(a) and not source.is_parameter(a) for a in product.operands):
        source.guard.multiplied(product)
        source.running[-1].products[output.numel()] = product
    elif source.guard.collects and all(
        map(is_plain, product.operands)
    ):  # a projection without a module
        parameter = 0 if source.is_parameter(product.operands[0]) else 1
        projection = RecordedProjection(
            product.operands[1 - parameter], product.projected(parameter)
        )
        source.running[-1].projections.append(projection)


def _follow(source: EventSource, function: Any, output: Any, args: tuple[Any, ...]) -> None:
    """Follow the outputs of an attention that is being looked at: are two of them added or subtracted?"""
    call = source.running[-1] if source.running else None
    if call is None or not call.followed or not isinstance(output, Tensor):
        return
    flat = args[0] if args and isinstance(args[0], (list, tuple)) else args
    followed = sum(_is_followed(call, a) for a in flat if isinstance(a, Tensor))
    if function in _COMBINATION:
        call.combined |= followed >= 2
    elif function in _REDUCTION:
        call.combined |= followed >= 1
    elif followed:
        call.followed.append(output)


def _is_followed(call: Call, tensor: Tensor) -> bool:
    if not is_plain(tensor):
        return False
    storage = tensor.untyped_storage().data_ptr()
    return any(storage == x.untyped_storage().data_ptr() for x in call.followed)


def is_transformed(tensor: Tensor) -> bool:
    """Is this a stand-in that torch.func (grad, vmap, …) computes with?"""
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(tensor))


def is_sharded(tensor: Tensor) -> bool:
    """Is only a part of this tensor here (DTensor and its like)?"""
    return hasattr(tensor, "to_local") or hasattr(tensor, "elem")


def is_plain(tensor: Any) -> bool:
    """Is this an ordinary tensor, all of it here?"""
    return isinstance(tensor, Tensor) and not is_sharded(tensor) and not is_transformed(tensor)
