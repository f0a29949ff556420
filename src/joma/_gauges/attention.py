"""Exact attention statistics without an attention matrix.

For scores s_ij = scale · q_i·k_j and p = softmax(s), the entropy of row i is logsumexp_i − Σ_j p_ij s_ij, and
Σ_j p_ij s_ij = scale · q_i · (Σ_j p_ij k_j): one fused attention call with the keys in the place of the values. The
mass on one key is exp(s_ij − logsumexp_i). Memory is O(T).

Three things keep it exact. Keys are centred first, since softmax does not see a common offset and float32 does.
Everything is accumulated in float32 whatever the input type, since the kernels round Σ p k to it. Heads whose scores
are so large that the difference of two large numbers loses digits are done again in float64.

What the kernels cannot do (finite biases, soft-capping, other devices) goes through an exact path in chunks of rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

# |logsumexp| of centred scores above which float32 may miss the entropy by more than about 1e-5 nats
_LARGE = 60.0
# how many elements of (heads, T, d) or (rows, Tk) are worked on at once: 16 MiB in float32
_CHUNK = 1 << 22


@dataclass(frozen=True, eq=False)
class AttentionStats:
    """Statistics of each query's attention, (B, H, Tq) each, in nats where that applies.

    Rows that see no key have entropy 0 and are left out of ``mean``.
    """

    entropy: Tensor
    logsumexp: Tensor = field(repr=False)  # −inf for a row that sees no key
    sink_mass: Tensor = field(repr=False)  # attention on the first key that anyone sees
    visible: Tensor = field(repr=False)  # how many keys a query sees, broadcastable to the others

    @property
    def effective_tokens(self) -> Tensor:
        """exp(entropy): over how many keys attention is spread."""
        return self.entropy.exp()

    @property
    def normalised_entropy(self) -> Tensor:
        """Entropy over that of uniform attention to the visible keys; NaN where fewer than two are visible."""
        largest = self.visible.clamp(min=1).log()
        return torch.where(self.visible > 1, self.entropy / largest.clamp(min=1e-30), math.nan)

    @property
    def nonsink_entropy(self) -> Tensor:
        """Entropy of what is not on the sink, (H − h(m)) / (1 − m); 0 where everything is on the sink."""
        m = self.sink_mass.double()
        rest = 1 - m
        binary = -(torch.special.xlogy(m, m) + torch.special.xlogy(rest, rest))
        # below 1e-6 the quotient of two vanishing numbers says nothing any more
        value = torch.where(rest > 1e-6, (self.entropy.double() - binary) / rest.clamp(min=1e-6), 0.0)
        others = (self.visible - 1).clamp(min=1).log().double()
        return torch.minimum(value.clamp(min=0.0), others).float()

    def mean(self, values: Tensor | None = None, rows: Tensor | None = None) -> Tensor:
        """Mean of ``values`` (the entropy by default) over the real queries, (H,); NaN where there are none.

        Real queries see at least one key and, with ``rows`` (broadcastable to (B, H, Tq), True for real), are not
        padding. Where a value is not defined (NaN though the entropy is a number), the query is left out.
        """
        total, count = self.total(self.entropy if values is None else values, rows)
        return torch.where(count > 0, total / count.clamp(min=1), math.nan).float()

    def total(self, values: Tensor, rows: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Sum of ``values`` over the real queries and their number, (H,) each, in the widest type of the device."""
        real = self._real(values, rows)
        return _wide(torch.where(real, values, 0.0)).sum(dim=(0, 2)), _wide(real.sum(dim=(0, 2)))

    def largest(self, values: Tensor, rows: Tensor | None = None) -> Tensor:
        """Largest of ``values`` over the real queries, (H,); −inf where there are none."""
        low = torch.where(self._real(values, rows), values, -math.inf)
        return _wide(low).amax(dim=(0, 2)) if low.numel() else _wide(low.new_full(low.shape[1:2], -math.inf))

    def _real(self, values: Tensor, rows: Tensor | None) -> Tensor:
        real = (self.visible > 0).expand_as(values) & ~(values.isnan() & ~self.entropy.isnan())
        return real if rows is None else real & rows


def attention_stats(
    q: Tensor,
    k: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    softcap: float | None = None,
) -> AttentionStats:
    """Statistics of ``scaled_dot_product_attention(q, k, …)``, whose arguments these are.

    Arguments:
        q: (B, H, Tq, d), or with fewer leading dimensions.
        k: (B, Hk, Tk, d), likewise.
        attn_mask: boolean (True takes part) or an additive float bias, broadcastable to (B, H, Tq, Tk).
        is_causal: query i sees keys 0 … i (aligned top left, also for Tq ≠ Tk).
        scale: of the scores, 1/√d by default.
        enable_gqa: H may be a multiple of Hk.
        softcap: scores become softcap · tanh(score / softcap) before masking (Gemma 2).

    Returns:
        Entropy, logsumexp and sink mass of each query, (B, H, Tq) each; no (Tq, Tk) matrix is made.
    """
    q, k, mask, bias = _inputs(q, k, attn_mask, is_causal, enable_gqa)
    B, H, Tq, d = q.shape
    Tk = k.shape[2]
    scale = 1 / math.sqrt(d) if scale is None and d > 0 else float(scale or 1.0)
    visible = _visible(mask, is_causal, Tq, Tk, q.device)
    shape = (B, H, Tq)
    if q.numel() == 0 or Tk == 0:
        zero = torch.zeros(shape, device=q.device)
        return AttentionStats(zero, torch.full(shape, -math.inf, device=q.device), zero, visible.expand(shape))
    sink = _sink(mask)
    out = torch.empty((3, *shape), dtype=torch.float32, device=q.device)
    fused = bias is None and softcap is None and _has_kernel(q.device)
    for b, heads in _groups(B, H, max(Tq, Tk) * d):
        work = _fused if fused else _chunked
        m, e = _at(mask, b, heads), _at(bias, b, heads)
        keys = k[b, _key_heads(heads, H, k.shape[1])]
        where = _at(sink, b, heads)
        out[:, b, heads] = work(q[b, heads], keys, m, e, is_causal, scale, softcap, 0 if where is None else where)
    return _finish(out, visible, shape)


def attention_stats_from_scores(scores: Tensor, *, is_probability: bool = False) -> AttentionStats:
    """The same statistics from the scores (B, H, Tq, Tk) or the probabilities that eager attention computes.

    Entries of −inf, or at most half the type's lowest finite number, count as masked; so do probabilities of 0 (a key
    with exactly no attention cannot be told from a masked one).

    Arguments:
        scores: (B, H, Tq, Tk), or with fewer leading dimensions.
        is_probability: they are probabilities, after the softmax.

    Returns:
        Entropy, logsumexp and sink mass of each query, (B, H, Tq) each.
    """
    if scores.dim() < 2:
        raise ValueError(f"scores must be (…, Tq, Tk), got shape {tuple(scores.shape)}")
    scores = scores.detach()[(None,) * max(0, 4 - scores.dim())].flatten(0, -4)
    B, H, Tq, Tk = scores.shape
    if scores.numel() == 0:
        zero = torch.zeros(B, H, Tq, device=scores.device)
        return AttentionStats(zero, torch.full_like(zero, -math.inf), zero, zero.long())
    flat = scores.flatten(0, 1)  # (B·H, Tq, Tk)
    out = torch.empty((3, B * H, Tq), dtype=torch.float32, device=scores.device)
    visible = torch.empty((B * H, Tq), dtype=torch.int64, device=scores.device)
    lowest = 0 if is_probability else torch.finfo(scores.dtype).min / 2
    rows = max(1, min(Tq, _CHUNK // Tk))
    together = max(1, _CHUNK // (Tk * Tq))  # heads at a time
    for start in range(0, B * H, together):
        heads = slice(start, start + together)
        first = _first_seen(flat[heads], lowest, rows)  # (heads,)
        for top in range(0, Tq, rows):
            part = slice(top, top + rows)
            s = flat[heads, part]
            seen = s > lowest
            s = _wide(s).log() if is_probability else _wide(s)
            # what is not a number is not masked either: it must show
            s = s.masked_fill(~(seen | s.isnan()), -math.inf)
            at = first[:, None, None].expand(-1, s.shape[1], 1)
            out[:, heads, part] = _row_stats(s, at).float()
            visible[heads, part] = seen.sum(-1)
    return _finish(out.unflatten(1, (B, H)), visible.unflatten(0, (B, H)), (B, H, Tq))


def _first_seen(scores: Tensor, lowest: float, rows: int) -> Tensor:
    """The first key that any query sees, a head, (heads,)."""
    anyone = torch.zeros(scores.shape[0], scores.shape[2], dtype=torch.bool, device=scores.device)
    for top in range(0, scores.shape[1], rows):
        anyone |= (scores[:, top : top + rows] > lowest).any(dim=1)
    return anyone.int().argmax(dim=-1)


def _finish(out: Tensor, visible: Tensor, shape: tuple[int, ...]) -> AttentionStats:
    """Clamp to what is possible, and settle rows that see nothing by the mask and not by the kernel's answer."""
    seen = visible > 0
    entropy = torch.minimum(out[0].clamp(min=0.0), visible.clamp(min=1).log())
    return AttentionStats(
        torch.where(seen, entropy, 0.0),
        torch.where(seen, out[1], -math.inf),
        torch.where(seen, out[2].clamp(0.0, 1.0), 0.0),
        visible.expand(shape),
    )


def _inputs(
    q: Tensor, k: Tensor, attn_mask: Tensor | None, is_causal: bool, enable_gqa: bool
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """q and k with four dimensions, and the mask as a boolean mask and a finite bias (each None if absent)."""
    if q.dim() < 2 or k.dim() != q.dim() or q.shape[-1] != k.shape[-1]:
        raise ValueError(
            f"q must be (…, Tq, d) and k (…, Tk, d) with the same d; got {tuple(q.shape)} and {tuple(k.shape)}"
        )
    if is_causal and attn_mask is not None:
        raise ValueError("give attn_mask or is_causal, not both (as in scaled_dot_product_attention)")
    lead = (None,) * max(0, 4 - q.dim())
    q, k = q.detach()[lead].flatten(0, -4), k.detach()[lead].flatten(0, -4)
    H, Hk = q.shape[1], k.shape[1]
    if q.shape[0] != k.shape[0] or (Hk != H and not (enable_gqa and Hk and H % Hk == 0)):
        hint = "" if enable_gqa else "; grouped-query heads need enable_gqa=True"
        raise ValueError(f"batch and heads do not fit: q {tuple(q.shape)}, k {tuple(k.shape)}{hint}")
    if attn_mask is None:
        return q, k, None, None
    mask = attn_mask.detach()[(None,) * max(0, 4 - attn_mask.dim())]
    if mask.dim() > 4:
        mask = mask.flatten(0, -4)
    target = (*q.shape[:3], k.shape[2])
    try:
        torch.broadcast_shapes(mask.shape, target)
    except RuntimeError:
        raise ValueError(f"attn_mask {tuple(attn_mask.shape)} does not broadcast to {target}") from None
    if mask.dtype == torch.bool:
        return q, k, mask, None
    keep = mask > torch.finfo(mask.dtype).min / 2  # −inf and "as low as can be" both mean masked
    if not (keep & (mask != 0)).any():
        return q, k, keep, None
    return q, k, keep, mask.masked_fill(~keep, 0.0)


def _visible(mask: Tensor | None, is_causal: bool, Tq: int, Tk: int, device: torch.device) -> Tensor:
    """How many keys each query sees, broadcastable to (B, H, Tq)."""
    if mask is not None:
        return mask.sum(-1) if mask.shape[-1] == Tk else mask[..., 0].long() * Tk
    if is_causal:
        return torch.arange(1, Tq + 1, device=device).clamp(max=Tk)[None, None]
    return torch.full((1, 1, 1), Tk, device=device)


def _sink(mask: Tensor | None) -> Tensor | None:
    """The first key that any query sees, (B or 1, H or 1, 1, 1); None for key 0 everywhere."""
    if mask is None:
        return None
    return mask.any(dim=2, keepdim=True).int().argmax(dim=-1, keepdim=True)


def _groups(B: int, H: int, size: int) -> Iterator[tuple[slice, slice]]:
    """(batch, heads) slices that hold at most about _CHUNK elements of ``size`` a head."""
    heads = max(1, min(H, _CHUNK // max(1, size)))
    batch = max(1, min(B, _CHUNK // max(1, size * H))) if heads == H else 1
    for b in range(0, B, batch):
        for h in range(0, H, heads):
            yield slice(b, min(B, b + batch)), slice(h, min(H, h + heads))


def _key_heads(heads: slice, H: int, Hk: int) -> slice | list[int]:
    """The key heads that belong to these query heads, repeated as scaled_dot_product_attention repeats them."""
    if Hk == H:
        return heads
    return [h // (H // Hk) for h in range(heads.start, heads.stop)]


def _at(tensor: Tensor | None, batch: slice, heads: slice) -> Tensor | None:
    """The part of a broadcastable (B or 1, H or 1, …) tensor that belongs to a group."""
    if tensor is None:
        return None
    tensor = tensor[batch] if tensor.shape[0] > 1 else tensor
    return tensor[:, heads] if tensor.shape[1] > 1 else tensor


def _wide(x: Tensor) -> Tensor:
    """float64 where the device has it, else float32."""
    return x.double() if x.device.type in ("cpu", "cuda") else x.float()


def _has_kernel(device: torch.device) -> bool:
    return device.type in ("cpu", "cuda")


def _kernel(q: Tensor, k: Tensor, mask: Tensor | None, is_causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Σ p k (B, H, Tq, d) and logsumexp (B, H, Tq) from the fused kernel of the device."""
    additive = (
        None if mask is None else torch.zeros(mask.shape, dtype=q.dtype, device=q.device).masked_fill_(~mask, -math.inf)
    )
    if q.device.type == "cpu":
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out, lse = flash(q, k, k, 0.0, is_causal, attn_mask=additive, scale=scale)
        return out, lse
    if additive is not None:
        additive = additive.expand(*q.shape[:3], k.shape[2])
    efficient = torch.ops.aten._scaled_dot_product_efficient_attention
    out, lse, *_ = efficient(q, k, k, additive, True, 0.0, is_causal, scale=scale)
    return out, lse[..., : q.shape[2]]  # the CUDA kernel pads the rows


def _fused(
    q: Tensor, k: Tensor, mask: Tensor | None, bias: Tensor | None, is_causal: bool, scale: float,
    softcap: float | None, sink: Tensor | int,
) -> Tensor:  # fmt: skip
    """(3, b, h, Tq): entropy, logsumexp and sink mass through one fused call."""
    q, k = q.float(), k.float()
    out, largest = _fused_as(q, k, mask, is_causal, scale, sink)
    again = largest > _LARGE  # (b, h)
    if q.device.type == "cpu" and again.any():
        for b, h in again.nonzero().tolist():
            one_b, one_h = slice(b, b + 1), slice(h, h + 1)
            m = _at(mask, one_b, one_h)
            s = sink if isinstance(sink, int) else _at(sink, one_b, one_h)
            assert s is not None
            wide = _fused_as(q[one_b, one_h].double(), k[one_b, one_h].double(), m, is_causal, scale, s)[0]
            out[:, one_b, one_h] = wide.float()
    return out


def _fused_as(
    q: Tensor, k: Tensor, mask: Tensor | None, is_causal: bool, scale: float, sink: Tensor | int
) -> tuple[Tensor, Tensor]:
    """The statistics in the type of q, and the largest |logsumexp| of each head, (b, h)."""
    centre = k.mean(dim=2, keepdim=True)
    k = k - centre
    attended, lse = _kernel(q, k, mask, is_causal, scale)
    lse = lse.to(q.dtype)
    expected = attended.mul_(q).sum(dim=-1).mul_(scale)
    # scores at two keys, the sink and the centre, in one product
    at_sink, shift = (q @ torch.cat([_key_at(k, sink), centre], dim=2).mT).mul_(scale).unbind(dim=-1)
    sink_mass = (at_sink - lse).exp()
    if is_causal is False and mask is not None:
        sees = mask.gather(-1, sink.expand(*mask.shape[:3], 1))[..., 0] if isinstance(sink, Tensor) else mask[..., 0]
        sink_mass = sink_mass * sees
    seen = lse.masked_fill(lse.isinf() | lse.isnan(), 0.0)
    return torch.stack([lse - expected, lse + shift, sink_mass]), seen.abs().amax(dim=2)


def _key_at(k: Tensor, sink: Tensor | int) -> Tensor:
    """The sink's key, (b, h, 1, d)."""
    if isinstance(sink, int):
        return k[:, :, sink : sink + 1]
    index = sink[..., 0].expand(k.shape[0], k.shape[1], 1)[..., None].expand(-1, -1, 1, k.shape[3])
    return k.gather(2, index)


def _row_stats(s: Tensor, sink: int | Tensor) -> Tensor:
    """(3, …, rows): entropy, logsumexp and sink mass of rows of scores with −inf where masked."""
    lse = torch.logsumexp(s, dim=-1)
    log_p = s - torch.where(lse.isinf(), 0.0, lse)[..., None]
    p = log_p.exp()
    entropy = -torch.where(p > 0, p * log_p, 0.0).sum(-1)
    on_sink = p[..., sink] if isinstance(sink, int) else p.gather(-1, sink)[..., 0]
    return torch.stack([entropy, lse, on_sink])


def _chunked(
    q: Tensor, k: Tensor, mask: Tensor | None, bias: Tensor | None, is_causal: bool, scale: float,
    softcap: float | None, sink: Tensor | int,
) -> Tensor:  # fmt: skip
    """(3, b, h, Tq) by rows of scores, a bounded number at a time, in the widest type of the device."""
    B, H, Tq, _ = q.shape
    Tk = k.shape[2]
    out = torch.empty((3, B, H, Tq), dtype=torch.float32, device=q.device)
    rows = max(1, _CHUNK // Tk)
    column = torch.arange(Tk, device=q.device)
    for b in range(B):
        for h in range(H):
            one_b, one_h = slice(b, b + 1), slice(h, h + 1)
            keys = _wide(k[b, h]).T
            m, e = _at(mask, one_b, one_h), _at(bias, one_b, one_h)
            where = sink if isinstance(sink, int) else int(_at(sink, one_b, one_h).flatten()[0])  # type: ignore[union-attr]
            for start in range(0, Tq, rows):
                part = slice(start, min(Tq, start + rows))
                s = _wide(q[b, h, part]) @ keys * scale
                if softcap is not None:
                    s = softcap * torch.tanh(s / softcap)
                if e is not None:
                    s = s + (e[0, 0, part] if e.shape[2] > 1 else e[0, 0])
                if m is not None:
                    s = s.masked_fill(~(m[0, 0, part] if m.shape[2] > 1 else m[0, 0]), -math.inf)
                if is_causal:
                    s = s.masked_fill(column > torch.arange(part.start, part.stop, device=q.device)[:, None], -math.inf)
                out[:, b, h, part] = _row_stats(s, where).float()
    return out
