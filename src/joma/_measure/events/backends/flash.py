"""The functions of the package flash_attn, and PyTorch's own for packed sequences.

Queries, keys and values are (B, T, heads, d), or (tokens, heads, d) where sequences stand one
after the other. The packages themselves need a GPU and have not been run with joma: the tests run
functions with their signatures on the CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from joma._measure.events.backends.backend import DotProductCall
from joma._measure.events.backends.kernel import KernelBackend
from joma._measure.events.reasons import Reason, Refusal


class FlashBackend(KernelBackend):
    """``flash_attn_func`` of versions 2 and 3.

    It gives queries, keys, values, causal flag, window, ALiBi slopes, scale and soft cap; its axes
    are fixed.
    """

    name = "flash"
    functions = ("flash_attn.flash_attn_func", "flash_attn_interface.flash_attn_func")

    def read(self, arguments: dict[str, Any], output: Tensor) -> DotProductCall:
        """Return the attention, with a mask for window and causal flag."""
        query = arguments["q"].transpose(1, 2)  # (B, H, Tq, d)
        key = arguments["k"].transpose(1, 2)  # (B, Hk, Tk, d)
        # The last query stands with the last key, whatever their numbers. Worked example: 2 queries
        # and 4 keys stand 2 apart; the first query has distances 2, 1, 0, −1 to the keys.
        offset = key.shape[2] - query.shape[2]
        query_positions = torch.arange(query.shape[2], device=query.device)
        key_positions = torch.arange(key.shape[2], device=query.device)
        distance = query_positions[:, None] + offset - key_positions  # (Tq, Tk)
        return self.dot_product(
            query,
            key,
            arguments["v"].transpose(1, 2),
            output.transpose(1, 2),
            mask=_mask(arguments, distance, torch.ones_like(distance, dtype=torch.bool)),
            scale=arguments.get("softmax_scale"),
            softcap=arguments.get("softcap") or None,  # 0.0 stands for none
        )


class PackedFlashBackend(KernelBackend):
    """``flash_attn_varlen_func``: sequences one after the other, each of which sees itself alone.

    It gives the same as `FlashBackend`, and where each sequence begins. The event is one sample
    that holds all sequences, with a block-diagonal mask.
    """

    name = "flash, packed"
    functions: ClassVar[Sequence[str]] = (
        "flash_attn.flash_attn_varlen_func",
        "flash_attn_interface.flash_attn_varlen_func",
    )

    def read(self, arguments: dict[str, Any], output: Tensor) -> DotProductCall:
        """Return the attention of all sequences as one sample."""
        if arguments.get("block_table") is not None:
            raise Refusal(
                Reason.PAGED, "its keys are in pages (block_table), which is not measured"
            )
        query = arguments["q"].transpose(0, 1)[None]  # (1, H, tokens, d)
        key = arguments["k"].transpose(0, 1)[None]
        query_places = _SequencePlaces.of(arguments["cu_seqlens_q"], query.shape[2])
        key_places = _SequencePlaces.of(arguments["cu_seqlens_k"], key.shape[2])
        is_same_sequence = query_places.sequence[:, None] == key_places.sequence  # (Tq, Tk)
        distance = query_places.from_end[:, None] - key_places.from_end
        return self.dot_product(
            query,
            key,
            arguments["v"].transpose(0, 1)[None],
            output.transpose(0, 1)[None],
            mask=_mask(arguments, distance, is_same_sequence),
            scale=arguments.get("softmax_scale"),
            softcap=arguments.get("softcap") or None,
        )


class VarlenBackend(PackedFlashBackend):
    """``torch.nn.attention.varlen.varlen_attn``: the same under other names."""

    name = "packed"
    functions = ("torch.nn.attention.varlen.varlen_attn",)

    def read(self, arguments: dict[str, Any], output: Tensor) -> DotProductCall:
        """Return the attention of all sequences as one sample."""
        if arguments.get("seqused_k") is not None:
            raise Refusal(
                Reason.PAGED,
                "it uses a part of each sequence's keys (seqused_k), which is not measured",
            )
        key_starts = arguments["cu_seq_k"]
        if key_starts is None:
            key_starts = arguments["cu_seq_q"]
        names_of_flash = {
            "q": arguments["query"],
            "k": arguments["key"],
            "v": arguments["value"],
            "cu_seqlens_q": arguments["cu_seq_q"],
            "cu_seqlens_k": key_starts,
            "softmax_scale": arguments["scale"],
        }
        return super().read(arguments | names_of_flash, output)


@dataclass(frozen=True, eq=False)
class _SequencePlaces:
    """The places of tokens in packed sequences.

    Worked example: two sequences of 2 and 3 tokens begin and end at (0, 2, 5).

        sequence    0  0  1  1  1
        from_end   −2 −1 −3 −2 −1

    Counted from the end, since the last query of a sequence stands with its last key.
    """

    sequence: Tensor  # (tokens,)
    from_end: Tensor  # (tokens,), −1 is the last

    @classmethod
    def of(cls, bounds: Tensor, tokens: int) -> _SequencePlaces:
        """Return the places of all tokens, for sequences that begin and end at these bounds."""
        position = torch.arange(tokens, device=bounds.device)
        sequence = torch.searchsorted(bounds[1:].contiguous().long(), position, right=True)
        # Tokens behind the last bound belong to no sequence.
        end = bounds.long()[(sequence + 1).clamp(max=len(bounds) - 1)]
        return cls(sequence, position - end)


def _mask(arguments: dict[str, Any], distance: Tensor, sees: Tensor) -> Tensor:
    """Return the mask (1 or B, 1 or H, Tq, Tk): boolean, or additive with ALiBi slopes.

    Arguments:
        arguments: of the function.
        distance: how many tokens a key stands before its query, (Tq, Tk).
        sees: which keys a query may see apart from window and causal flag, (Tq, Tk).
    """
    left, right = arguments.get("window_size") or (-1, -1)
    if arguments.get("causal"):
        right = 0
    # A negative width means no limit on that side.
    if left >= 0:
        sees = sees & (distance <= left)
    if right >= 0:
        sees = sees & (distance >= -right)
    mask = sees[None, None]  # (1, 1, Tq, Tk)
    slopes = arguments.get("alibi_slopes")  # (H,) or (B, H)
    if slopes is None:
        return mask
    bias = -slopes.float()[..., None, None] * distance.abs()  # (H, Tq, Tk) or (B, H, Tq, Tk)
    if bias.dim() == 3:
        bias = bias[None]
    return bias.masked_fill(~mask, -torch.inf)
