"""What the tools are given: a model with its tokenizer, and a corpus as batches of windows of tokens.

A corpus is read in blocks: memory holds one block and one batch.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from joma._checkpoints.language_model import (
    CorpusTokenizer,
    find_language_model,
    load_language_model,
)
from joma._checkpoints.model import load_model, open_tensors
from joma._checkpoints.options import CheckpointOptions
from joma._checkpoints.tensors import Tensors
from joma._data.packaged import packaged
from joma._data.pretrained import load_tokenizer
from joma._inspect.collect import LEAST


def corpus_text(data: str | os.PathLike[str]) -> tuple[str, Any]:
    """Name and `Text` of a corpus: training and validation text together."""
    from joma._data.corpora import texts
    from joma._data.text import Text

    name, train, valid = texts(data)
    return name, Text((*train.spans, *valid.spans))


def open_model(
    model: str | os.PathLike[str] | nn.Module, options: CheckpointOptions, revision: str | None
) -> tuple[nn.Module, Any]:
    """Return a model without its head, and its tokenizer; refuse either before weights are read.

    Arguments:
        model: the model itself, or a folder in the hub's format, a GGUF file, a checkpoint or run of
            `joma train`, a packaged model, or an id on the hub.
        options: whether text is read, which takes a tokenizer, and which one.
        revision: of a model on the hub.
    """
    tokenizer = options.tokenizer
    if isinstance(tokenizer, (str, os.PathLike)):
        tokenizer = load_tokenizer(tokenizer)
    if isinstance(model, nn.Module):
        if options.reads_text and tokenizer is None:
            raise ValueError(
                "a model object comes without a tokenizer: pass tokenizer=, or tokens instead of text"
            )
        return getattr(model, "base_model", model), tokenizer
    folder = find_language_model(Path(model).expanduser())
    if folder is not None:
        if options.reads_text and tokenizer is None:
            tokenizer = CorpusTokenizer(folder).load()
        return load_language_model(folder, Tensors.open(folder)), tokenizer
    tensors = open_tensors(model, revision)
    if options.reads_text and tokenizer is None:
        embedded = tensors.tokenizer
        if embedded is None:
            tokenizer = load_tokenizer(packaged(model) or model, revision)
        else:
            tokenizer = embedded.load()
    net = load_model(tensors)
    return getattr(net, "base_model", net), tokenizer


def batches(
    blocks: Iterable[np.ndarray[Any, Any]], length: int, batch: int, limit: int | None = None
) -> Iterator[Tensor]:
    """Windows (B, length) of the tokens that come in blocks; what is left at the end is a shorter one.

    Arguments:
        blocks: arrays of tokens, one after the other.
        length: tokens per window.
        batch: windows at a time.
        limit: stop after so many tokens.
    """
    rest, taken = np.empty(0, np.int64), 0
    for block in blocks:
        block = np.asarray(block, dtype=np.int64)[: None if limit is None else limit - taken]
        taken += len(block)
        rest = np.concatenate([rest, block])
        complete = len(rest) // (length * batch) * length * batch
        for part in rest[:complete].reshape(-1, batch, length):
            yield torch.from_numpy(part.copy())
        rest = rest[complete:]
        if limit is not None and taken >= limit:
            break
    complete = len(rest) // length * length
    if complete:
        yield torch.from_numpy(rest[:complete].reshape(-1, length).copy())
    if len(rest) - complete >= LEAST:
        yield torch.from_numpy(rest[None, complete:].copy())


def encoded(
    text: Any, encode: Callable[[str], list[int]], expect: Callable[[int], None]
) -> Iterator[Any]:
    """The tokens of a `Text`, a block at a time; ``expect`` is told how many there will be, by the blocks so far."""
    total, taken, count = max(1, text.size()), 0, 0
    for block in text.blocks():
        tokens = np.array(encode(block), dtype=np.int64)
        taken, count = taken + len(block.encode()), count + len(tokens)
        expect(max(count, round(count * total / max(1, taken))))
        yield tokens


def not_empty(stream: Iterator[Tensor], where: str) -> Iterator[Tensor]:
    """The same batches, once it is known that there are some."""
    first = next(stream, None)
    if first is None:
        raise ValueError(f"{where} has too little text: at least {LEAST} tokens are needed")
    return itertools.chain([first], stream)


def short_name(name: object) -> str:
    """The last part of a path or of an id, for the name of a folder."""
    return Path(str(name).rstrip("/")).name or "model"
