"""`F.scaled_dot_product_attention`."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from joma._measure.events.backends.backend import DotProductCall
from joma._measure.events.backends.function_mode import TorchFunctionBackend
from joma._measure.events.events import DotProduct
from joma._measure.events.guard import AttentionCandidate
from joma._measure.events.tensors import shape_of

if TYPE_CHECKING:
    from joma._measure.events.source import EventSource


class SdpaBackend(TorchFunctionBackend):
    """The fused attention of PyTorch.

    It gives queries, keys, values, mask, causal flag and scale. Its axes are open: it attends over
    the last axis but one and takes whatever stands before it as a batch, so (B, H, T, d),
    (B·H, T, d) and, by mistake, (B, T, H, d) all run.
    """

    name = "sdpa"
    functions: ClassVar = (F.scaled_dot_product_attention,)
    has_fixed_axes = False

    def on_call(
        self,
        source: EventSource,
        function: Any,
        output: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        """Report the call as a candidate."""
        call = source.running[-1]
        attention, dropout = _read(output, *args, **kwargs)
        if not self.can_measure(source, DotProduct, call, attention.query, attention.key):
            return
        attention = _with_leading_axis(attention)
        shapes = (
            attention.query.shape,
            attention.key.shape,
            shape_of(attention.mask),
            attention.causal,
            attention.output.dtype,
            # The same queries with other states around them may have other axes.
            shape_of(call.states),
        )
        candidate = self.candidate(source, call, attention, shapes)
        if dropout:
            candidate.output_without_dropout = lambda sample: _without_dropout(
                candidate, attention, sample
            )
        source.guard.on_attention(candidate)


def _read(
    output: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> tuple[DotProductCall, float]:
    """Return the call, by the signature of the function, and its dropout."""
    attention = DotProductCall(
        query,
        key,
        value,
        output,
        mask=attn_mask,
        causal=is_causal,
        scale=scale,
        is_grouped=enable_gqa,
    )
    return attention, dropout_p


def _with_leading_axis(attention: DotProductCall) -> DotProductCall:
    """Bring a call to at least three axes, and its mask to a plain tensor."""
    mask: Any = attention.mask
    if mask is not None and hasattr(mask, "_materialize"):
        # A `torch.nn.attention.bias.CausalBias` is a tensor subclass without values.
        mask = mask._materialize(attention.query.device)
        attention = replace(attention, mask=mask)
    if attention.query.dim() > 2:
        return attention
    return replace(
        attention,
        query=attention.query[None],  # (1, Tq, d)
        key=attention.key[None],
        value=attention.value[None],
        output=attention.output[None],
    )


def _without_dropout(
    candidate: AttentionCandidate, attention: DotProductCall, sample: int
) -> Tensor:
    """Return the output (H, Tq, dv) of one sample, computed as the module did but for dropout."""
    fields = candidate.event_fields()
    # Autocast rounds to the type of the output.
    dtype = fields["output"].dtype
    here = slice(sample, sample + 1)
    query = fields["query"][here].to(dtype)  # (1, H, Tq, d)
    key = fields["key"][here].to(dtype)
    value = fields["value"][here].to(dtype)
    mask = fields["mask"]
    if mask is not None and mask.dim() == 4 and mask.shape[0] > 1:
        mask = mask[here]
    if mask is not None and mask.dtype != torch.bool:
        mask = mask.to(dtype)
    output = F.scaled_dot_product_attention(
        query,
        key,
        value,
        mask,
        is_causal=attention.causal,
        scale=attention.scale,
        enable_gqa=bool(attention.is_grouped) or key.shape[1] != query.shape[1],
    )
    return output[0]
