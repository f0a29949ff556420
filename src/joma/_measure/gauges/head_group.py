"""The statistics of some heads: by one fused call, or by tiles of scores."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from joma._measure.gauges.kernels import fused_attention, has_kernel, part_of
from joma._measure.gauges.masks import Mask
from joma._measure.gauges.scores import AttentionScores, part_of_head
from joma._measure.gauges.tiles import combined, stats_of_scores

# |logsumexp| of centred scores above which float32 may miss the entropy by more than 1e-5 nats.
LARGE_LOGSUMEXP = 60.0
# Queries of each head that show whether its scores are likely to be large.
GUESSING_QUERIES = 16


@dataclass(frozen=True, eq=False)
class ShownKeys:
    """The keys that a mask shows and that are not sinks, for a group of heads.

    Attributes:
        additive: the mask as a bias, without sinks.
        has_some: True for a query that sees any of them.
        sees_sink: True for a query that sees its sink.
    """

    additive: Tensor
    has_some: Tensor
    sees_sink: Tensor

    @staticmethod
    def of(mask: Mask, batch: slice, heads: slice) -> ShownKeys:
        """Return those of a group, from the mask of all heads."""
        has_some = mask.visible > mask.sees_sink.long()
        return ShownKeys(
            additive=part_of(mask.additive_without_sinks, batch, heads),
            has_some=part_of(has_some, batch, heads),
            sees_sink=part_of(mask.sees_sink, batch, heads),
        )


@dataclass(frozen=True, eq=False)
class HeadGroup:
    """Some heads of some samples, as many as one call of the kernel works on.

    Attributes:
        scores: of queries (b, h, Tq, d) and keys (b, h, Tk, d).
        sink: the key that is the sink of each query, (…, Tq or 1, 1); None for key 0.
    """

    scores: AttentionScores
    sink: Tensor | None

    def has_large_scores(self) -> bool:
        """Guess by a few queries whether float32 loses digits of the scores of some head."""
        q = self.scores.q
        keys = self.scores.k
        if self.sink is None and keys.shape[2] > 1:
            keys = keys[:, :, 1:]
        stride = max(1, q.shape[2] // GUESSING_QUERIES)
        scores = q[:, :, ::stride].float() @ keys.float().mT  # (b, h, few, Tk)
        centred = scores - scores.mean(dim=-1, keepdim=True)
        largest = centred.abs().amax() * abs(self.scores.scale)
        return has_kernel(q.device) and bool(largest > LARGE_LOGSUMEXP)

    def fused(self, shown: ShownKeys | None) -> Tensor:
        """Return (4, b, h, Tq) from one fused call; large scores in float64, on a CPU."""
        can_be_wide = self.scores.q.device.type == "cpu"
        if can_be_wide and self.has_large_scores():  # saves the call in float32
            return self.in_tiles(is_wide=True)
        out, largest = self._by_kernel(shown)
        if can_be_wide and float(largest.amax()) > LARGE_LOGSUMEXP:
            for b, h in (largest > LARGE_LOGSUMEXP).nonzero().tolist():
                out[:, b, h] = self._head(b, h, is_wide=True)
        return out

    def _by_kernel(self, shown: ShownKeys | None) -> tuple[Tensor, Tensor]:
        """Return the statistics in float32, and the largest |logsumexp| of each head, (b, h)."""
        scale = self.scores.scale
        is_causal = self.scores.is_causal
        q = self.scores.q.float()
        k = self.scores.k.float()
        # Without a mask the sink is key 0, and the keys after it are seen as all were: causally,
        # by later queries.
        first_query = 0
        keys = k
        if shown is None:
            keys = k[:, :, 1:]
            first_query = int(is_causal)
        averaged = k
        if keys.shape[2]:
            averaged = keys
        centre = averaged.mean(dim=2, keepdim=True)  # (b, h, 1, d)
        if keys.shape[2] and q.shape[2] > first_query:
            queries = q[:, :, first_query:]
            additive = None
            if shown is not None:
                additive = shown.additive.float()
            attended, logsumexp = fused_attention(
                queries, keys - centre, additive, is_causal, scale
            )
            nonsink = logsumexp - attended.mul_(queries).sum(dim=-1).mul_(scale)
            if first_query:
                # The first query sees the sink only: (b, h, Tq − 1) -> (b, h, Tq).
                logsumexp = F.pad(logsumexp, (first_query, 0), value=-math.inf)
                nonsink = F.pad(nonsink, (first_query, 0))
        else:
            logsumexp = q.new_full(q.shape[:3], -math.inf)  # (b, h, Tq)
            nonsink = torch.zeros_like(logsumexp)
        sinks = self._sink_keys(k) - centre
        if sinks.shape[2] == 1:
            # Scores at two keys, the sink and the centre, in one product.
            both = torch.cat([sinks, centre], dim=2)  # (b, h, 2, d)
            at_sink, shift = (q @ both.mT).mul_(scale).unbind(dim=-1)  # (b, h, Tq) each
        else:
            at_sink = (q * sinks).sum(-1) * scale
            shift = (q @ centre.mT)[..., 0] * scale
        if shown is not None:
            at_sink = torch.where(shown.sees_sink, at_sink, -math.inf)
            logsumexp = torch.where(shown.has_some, logsumexp, -math.inf)
            nonsink = torch.where(shown.has_some, nonsink, 0.0)
        out = combined(nonsink, logsumexp, at_sink)
        out[1] += shift
        sizes = logsumexp.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).abs()
        largest = sizes.amax(dim=2)
        return out.float(), largest

    def _sink_keys(self, k: Tensor) -> Tensor:
        """Return the keys of the sinks, (b, h, Tq or 1, d)."""
        if self.sink is None:
            return k[:, :, :1]
        return k.gather(2, self.sink.expand(*k.shape[:2], -1, k.shape[3]))

    def in_tiles(self, is_wide: bool) -> Tensor:
        """Return (4, b, h, Tq) by tiles of scores, in float64 if ``is_wide``."""
        q = self.scores.q
        out = torch.empty((4, *q.shape[:3]), dtype=torch.float32, device=q.device)
        for b, h in self.scores.places():
            out[:, b, h] = self._head(b, h, is_wide)
        return out

    def _head(self, b: int, h: int, is_wide: bool) -> Tensor:
        """Return the statistics (4, Tq) of one head of one sample."""
        sink: Tensor | int = 0
        sink_of_head = part_of_head(self.sink, b, h)  # (Tq or 1, 1)
        if sink_of_head is not None:
            sink = sink_of_head
        head = self.scores.head(b, h)
        k = head.k.float()  # (Tk, d)
        if head.softcap is None:
            centre = k.mean(dim=0)  # (d,)
        else:
            centre = torch.zeros_like(k[0])  # capping sees a common offset
        head.k = k - centre
        head.cast(is_wide)
        out = stats_of_scores(head, sink)
        out[1] += (head.q @ centre.to(head.q.dtype)) * head.scale
        return out
