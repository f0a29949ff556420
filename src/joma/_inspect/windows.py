"""A corpus as batches of windows of tokens, read in blocks: memory holds one block and one batch."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from joma._inspect.collect import LEAST


def corpus_text(data: str | os.PathLike[str]) -> tuple[str, Any]:
    """Name and `Text` of a corpus: training and validation text together."""
    from joma._data.corpora import texts
    from joma._data.text import Text

    name, train, valid = texts(data)
    return name, Text((*train.spans, *valid.spans))


def batches(
    blocks: Iterable[np.ndarray[Any, Any]], length: int, batch: int, limit: int | None = None
) -> Iterator[Tensor]:
    """Windows (B, length) of the tokens that come in blocks; what is left at the end is a shorter one.

    Arguments:
        blocks: arrays of tokens, one after the other.
        length: tokens a window.
        batch: windows at a time.
        limit: stop after so many tokens.
    """
    rest, taken = np.empty(0, np.int64), 0
    for block in blocks:
        block = np.asarray(block, dtype=np.int64)[: None if limit is None else limit - taken]
        taken += len(block)
        rest = np.concatenate([rest, block])
        whole = len(rest) // (length * batch) * length * batch
        for part in rest[:whole].reshape(-1, batch, length):
            yield torch.from_numpy(part.copy())
        rest = rest[whole:]
        if limit is not None and taken >= limit:
            break
    whole = len(rest) // length * length
    if whole:
        yield torch.from_numpy(rest[:whole].reshape(-1, length).copy())
    if len(rest) - whole >= LEAST:
        yield torch.from_numpy(rest[None, whole:].copy())


def encoded(text: Any, encode: Callable[[str], list[int]], read: Callable[[float], None]) -> Iterator[Any]:
    """The tokens of a `Text`, a block at a time; ``read`` is told the share of the bytes taken."""
    total, taken = max(1, text.size()), 0
    for block in text.blocks():
        taken += len(block.encode())
        yield np.array(encode(block), dtype=np.int64)
        read(min(1.0, taken / total))


def not_empty(stream: Iterator[Tensor], where: str) -> Iterator[Tensor]:
    """The same batches, once it is known that there are some."""
    first = next(stream, None)
    if first is None:
        raise ValueError(f"{where} has too little text: at least {LEAST} tokens are needed")
    return itertools.chain([first], stream)


def short_name(name: object) -> str:
    """The last part of a path or of an id, for the name of a folder."""
    return Path(str(name).rstrip("/")).name or "model"
