"""GGUF files (llama.cpp): the tensors that are needed, dequantised by blocks of rows with the package `gguf`.

Tensors have the names of the hub's models, and their order of rows: llama.cpp's converter puts the two halves that
rotary positions turn into each other side by side, in the queries and keys of Llama.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from joma._checkpoints.entry import Entry, contiguous
from joma._checkpoints.gguf_header import Header
from joma._checkpoints.gguf_model import OwnTokenizer, heads_of, model_config
from joma._checkpoints.reading import BadCheckpoint, LocalFile, Reader, Span, read_bytes
from joma._checkpoints.sources import WorkedOut, virtual

_BLOCK = 1 << 20  # bytes that are dequantised at a time
_NAMES = {  # llama.cpp's names -> those of the hub's models
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "attn_qkv": "self_attn.qkv_proj",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj", "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj", "ffn_gate_inp": "mlp.router", "token_embd": "embed_tokens",
    "output": "lm_head", "output_norm": "norm", "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
}  # fmt: skip
_STACKS = {
    "ffn_gate_exps": "mlp.experts.gate_proj", "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
}  # fmt: skip


def library() -> Any:
    """`gguf`, or how to get it."""
    try:
        import gguf
        import gguf.quants
    except ImportError as error:
        raise BadCheckpoint(
            f"GGUF files need the package gguf ({error}): pip install 'joma[gguf]'"
        ) from error
    return gguf


class GgufFile(WorkedOut):
    """The tensors of a GGUF file, named as in models of the hub.

    Attributes:
        config: what its header says, as a config.json would.
        no_model: why no model can be built with it.
        tokenizer: the one inside.
        note: how its tensors are quantised.
    """

    def __init__(self, reader: Reader) -> None:
        self._reader, self._read, self._gguf = reader, 0, library()
        self.entries: dict[str, Entry] = {}
        self._places: dict[str, tuple[Any, int]] = {}  # type, and where it begins
        head = Header(reader)
        try:
            kinds = self._gguf.GGMLQuantizationType
            placed = [
                (name, kinds(kind), shape, begin) for name, kind, shape, begin in head.tensors
            ]
        except ValueError as error:
            raise BadCheckpoint(f"{reader.name} is damaged or no GGUF file: {error}") from error
        if isinstance(parts := head.keys.get("split.count"), int) and parts > 1:
            raise BadCheckpoint(
                f"{reader.name} is one of several parts: join them with `llama-gguf-split --merge`"
            )
        ends: list[tuple[int, int, str]] = []
        for name, kind, shape, begin in placed:
            block, size = self._gguf.GGML_QUANT_SIZES[kind]
            count = math.prod(shape)
            if count % block or (shape and shape[-1] % block):
                raise BadCheckpoint(
                    f"{reader.name} is damaged: {name} of shape {shape} is no whole number of blocks"
                )
            if begin + count // block * size > reader.size:
                raise BadCheckpoint(
                    f"{reader.name} is cut off: {name} ends after the file; download it again"
                )
            ends.append((begin, begin + count // block * size, name))
            known = _known(name)
            if known in self.entries:
                raise BadCheckpoint(f"{reader.name} has the tensor {name} twice")
            self.entries[known], self._places[known] = virtual(shape), (kind, begin)
        for (_, end, name), (start, _, other) in pairwise(sorted(ends)):
            if start < end:
                raise BadCheckpoint(f"{reader.name} is damaged: {name} and {other} overlap")
        self.config, why = model_config(head.keys, {name: shape for name, _, shape, _ in placed})
        self.no_model = why and (
            f"no model is built from {reader.name}: it is GGUF {why}. Its matrices are measured; for the rest, take "
            "the original, in the hub's format"
        )
        self.tokenizer = OwnTokenizer(reader)
        self._paired = self._rotary(head)
        kinds = sorted({kind.name for _, kind, shape, _ in placed if len(shape) > 1})
        self.note = f"{reader.name} is GGUF ({', '.join(kinds)}): the numbers that its blocks stand for were measured"

    def _rotary(self, head: Header) -> dict[str, int]:
        """Queries and keys whose rows llama.cpp has put in pairs -> rows of a head."""
        if head.keys.get("general.architecture") != "llama":
            return {}
        heads, sizes = heads_of(head.keys), {}
        for name, entry in self.entries.items():
            kind = name.removesuffix(".weight").rpartition(".")[2]
            count = heads.get(
                {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}.get(kind, "")
            )
            if count is not None and len(entry.shape) == 2:
                if count < 1 or entry.shape[0] % (2 * count):
                    raise BadCheckpoint(
                        f"{self._reader.name} is damaged: {name} of {entry.shape} has {count} heads"
                    )
                sizes[name] = entry.shape[0] // count
        return sizes

    @property
    def bytes_read(self) -> int:
        """Of tensors."""
        return self._read

    def expect(self, views: Iterable[tuple[str, Entry]]) -> None:
        """These parts of tensors will be read: of a file elsewhere, neighbours are then fetched together."""
        if not isinstance(self._reader, LocalFile):
            self._reader.expect(self._span(name, view) for name, view in views)

    def _span(self, name: str, view: Entry) -> Span:
        """The bytes that a view is read from."""
        first, count = self._whole_rows(name, view) or (0, math.prod(self.entries[name].shape[:-1]))
        first, count = self._whole_heads(name, first, count)
        row = self._row(name)[1]
        return self._places[name][1] + first * row, self._places[name][1] + (first + count) * row

    def _whole_rows(self, name: str, view: Entry) -> tuple[int, int] | None:
        """The first row of a view and how many there are, if it is of whole rows one after another."""
        width, count, first = self._row(name)[0], math.prod(view.shape), view.offset // 4
        if not width or view.stride != contiguous(view.shape) or first % width or count % width:
            return None
        return first // width, count // width

    def _whole_heads(self, name: str, first: int, count: int) -> tuple[int, int]:
        """The same rows; where they are in pairs, those of all heads that have some of them."""
        head = self._paired.get(name, 1)
        begin = first // head * head
        return begin, -(-(first + count) // head) * head - begin

    def _row(self, name: str) -> tuple[int, int]:
        """Numbers of a row, and its bytes."""
        shape = self.entries[name].shape
        block, size = self._gguf.GGML_QUANT_SIZES[self._places[name][0]]
        width = shape[-1] if shape else 1
        return width, width // block * size

    def read(self, name: str, entry: Entry | None = None) -> Tensor:
        """A tensor; of whole rows one after another, as those of one expert, no others are read."""
        rows = None if entry is None else self._whole_rows(name, entry)
        if entry is None or rows is None:
            return super().read(name, entry)
        return self._rows(name, *rows).reshape(entry.shape)

    def whole(self, name: str) -> Tensor:
        """All rows."""
        shape = self.entries[name].shape
        return self._rows(name, 0, math.prod(shape[:-1])).reshape(shape)

    def _rows(self, name: str, first: int, count: int) -> Tensor:
        """Rows from ``first`` on, (count, width)."""
        begin, more = self._whole_heads(name, first, count)
        rows = self._raw(name, begin, more)
        if (head := self._paired.get(name)) is None:
            return rows
        halves = rows.view(-1, head // 2, 2, rows.shape[1]).transpose(1, 2).reshape(rows.shape)
        return halves[first - begin :][:count].contiguous()

    def _raw(self, name: str, first: int, count: int) -> Tensor:
        """Rows as they lie in the file."""
        (kind, begin), (width, row) = self._places[name], self._row(name)
        out, step = torch.empty(count, width), max(1, _BLOCK // max(1, row))
        for start in range(0, count, step):
            rows = min(step, count - start)
            data = np.frombuffer(
                read_bytes(self._reader, begin + (first + start) * row, rows * row), dtype=np.uint8
            )
            self._read += data.nbytes
            out[start : start + rows] = torch.from_numpy(
                self._dequantised(data.reshape(rows, row), kind, name)
            )
        return out

    def _dequantised(self, data: Any, kind: Any, name: str) -> Any:
        if kind.name == "F64":
            return data.view(np.float64).astype(np.float32)
        try:
            with np.errstate(all="ignore"):
                return np.array(self._gguf.quants.dequantize(data, kind), dtype=np.float32)
        except NotImplementedError:
            raise BadCheckpoint(
                f"{name} is of the type {kind.name}, which the package gguf cannot dequantise"
            ) from None


def _known(name: str) -> str:
    match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name)
    if match is None:
        return name
    front = f"layers.{match[1]}." if match[1] else ""
    if match[2] in _STACKS and match[3] == "weight":
        return front + _STACKS[match[2]]
    return f"{front}{_NAMES.get(match[2], match[2])}.{match[3]}"
