"""Functions of the package flash_attn, and PyTorch's own for packed sequences: their arguments as fields of an event.

Queries, keys and values are (B, T, heads, d), or (tokens, heads, d) where sequences stand one after the other.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from joma._measure.events.reasons import Reason, Refusal


def flash_fields(given: dict[str, Any], output: Tensor) -> dict[str, Any]:
    """Of ``flash_attn_func``."""
    query, key, value, states = (
        x.transpose(1, 2) for x in (given["q"], given["k"], given["v"], output)
    )
    distance = _distance(query.shape[2], key.shape[2], query.device)
    return _fields(
        given, query, key, value, states, distance, torch.ones_like(distance, dtype=torch.bool)
    )


def packed_fields(given: dict[str, Any], output: Tensor) -> dict[str, Any]:
    """Of ``flash_attn_varlen_func``: one sample that holds all sequences, each of which sees itself alone."""
    if given.get("block_table") is not None:
        raise Refusal(Reason.PAGED, "its keys are in pages (block_table), which is not measured")
    query, key, value, states = (
        x.transpose(0, 1)[None] for x in (given["q"], given["k"], given["v"], output)
    )  # fmt: skip
    (q_document, q_left), (k_document, k_left) = (
        _documents(given[name], x.shape[2])
        for name, x in (("cu_seqlens_q", query), ("cu_seqlens_k", key))
    )
    same = q_document[:, None] == k_document
    return _fields(given, query, key, value, states, q_left[:, None] - k_left, same)


def torch_packed_fields(given: dict[str, Any], output: Tensor) -> dict[str, Any]:
    """Of ``torch.nn.attention.varlen.varlen_attn``, whose arguments have other names."""
    if given.get("seqused_k") is not None:
        raise Refusal(
            Reason.PAGED,
            "it uses a part of each sequence's keys (seqused_k), which is not measured",
        )
    keys = given["cu_seq_q"] if given["cu_seq_k"] is None else given["cu_seq_k"]
    names = {
        "q": given["query"], "k": given["key"], "v": given["value"], "cu_seqlens_q": given["cu_seq_q"],
        "cu_seqlens_k": keys, "softmax_scale": given["scale"],
    }  # fmt: skip
    return packed_fields(given | names, output)


def _fields(
    given: dict[str, Any],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    states: Tensor,
    distance: Tensor,
    sees: Tensor,
) -> dict[str, Any]:
    """``distance`` (Tq, Tk): how many tokens a key is before its query; the last query stands with the last key."""
    left, right = given.get("window_size") or (-1, -1)
    right = 0 if given.get("causal") else right
    sees = sees & (distance <= left) if left >= 0 else sees
    sees = sees & (distance >= -right) if right >= 0 else sees
    mask = sees[None, None]
    slopes = given.get("alibi_slopes")  # (H,) or (B, H)
    if slopes is not None:
        bias = -slopes.float()[..., None, None] * distance.abs()
        mask = (bias if bias.dim() == 4 else bias[None]).masked_fill(~mask, -torch.inf)
    return {
        "query": query, "key": key, "value": value, "mask": mask, "causal": False, "output": states,
        "scale": given.get("softmax_scale"), "softcap": given.get("softcap") or None,
    }  # fmt: skip


def first_of(output: Any) -> Tensor:
    """The states, of a function that may give more."""
    states: Tensor = output[0] if isinstance(output, (tuple, list)) else output
    return states


def _distance(queries: int, keys: int, device: torch.device) -> Tensor:
    return (
        torch.arange(queries, device=device)[:, None]
        + (keys - queries)
        - torch.arange(keys, device=device)
    )


def _documents(cumulated: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """Of each token its sequence, and its place in it counted from the end (−1 is the last)."""
    at = torch.arange(tokens, device=cumulated.device)
    document = torch.searchsorted(cumulated[1:].contiguous().long(), at, right=True)
    return document, at - cumulated.long()[(document + 1).clamp(max=len(cumulated) - 1)]
