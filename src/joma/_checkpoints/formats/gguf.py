"""GGUF files (llama.cpp), dequantised by blocks of rows with the package `gguf`.

Tensors have the names of the hub's models, and their order of rows: llama.cpp's converter puts the
two halves that rotary positions turn into each other next to each other, in the queries and keys of
Llama.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from joma._checkpoints.formats.gguf_header import (
    GgufHeader,
    GgufTensor,
    GgufTokenizer,
    head_counts,
    model_config,
)
from joma._checkpoints.formats.view import MaterializedFormat, TensorView
from joma._checkpoints.reading import BadCheckpoint, Reader, Span, read_bytes

_BLOCK_BYTES = 1 << 20  # quantised bytes that are turned into float32 at a time

# llama.cpp's names -> those of the hub's models.
_HUB_NAMES = {
    "token_embd": "embed_tokens",
    "output": "lm_head",
    "output_norm": "norm",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.router",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
# Stacks of experts are parameters without ".weight" in the hub's models.
_HUB_STACKS = {
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
}
# Projections whose rows llama.cpp reorders -> the key of their number of heads in a config.
_HEADS_OF_PROJECTION = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
_GGUF_NAME = re.compile(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)")


def gguf_library() -> Any:
    """Return the package `gguf`, or raise an error that says how to get it."""
    try:
        import gguf
        import gguf.quants
    except ImportError as error:
        raise BadCheckpoint(
            f"GGUF files need the package gguf ({error}): pip install 'joma[gguf]'"
        ) from error
    return gguf


@dataclass(frozen=True)
class _QuantizedTensor:
    """A tensor as rows of quantised blocks."""

    quantization: Any  # gguf.GGMLQuantizationType
    start: int  # its first byte in the file
    row_width: int  # numbers
    row_count: int
    row_bytes: int
    # Rows of one head, if llama.cpp has put the halves of each head into pairs; otherwise 1.
    head_rows: int = 1

    @property
    def end(self) -> int:
        return self.start + self.row_count * self.row_bytes

    def rows_of(self, view: TensorView) -> range | None:
        """Return the rows of a view; None if it is not made of whole rows, one after another."""
        count = math.prod(view.shape)
        if not self.row_width or not view.is_contiguous:
            return None
        if view.offset % self.row_width or count % self.row_width:
            return None
        first = view.offset // self.row_width
        return range(first, first + count // self.row_width)

    def rows_read_for(self, rows: range) -> range:
        """Return the rows that must be read for these: all rows of each head they touch."""
        first = rows.start // self.head_rows * self.head_rows
        last = -(-rows.stop // self.head_rows) * self.head_rows
        return range(first, last)

    def span(self, rows: range) -> Span:
        """Return the bytes of rows."""
        begin = self.start + rows.start * self.row_bytes
        return begin, self.start + rows.stop * self.row_bytes


class GgufFile(MaterializedFormat):
    """The tensors of a GGUF file, named as in the hub's models.

    Attributes:
        config: what its header says, as a `config.json` would.
        no_model: why no model can be built with it, or an empty string.
        tokenizer: the one inside.
        note: how its tensors are quantised.
    """

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._gguf = gguf_library()
        header = GgufHeader(reader)
        part_count = header.keys.get("split.count")
        quantizations = self._quantizations(header.tensors)
        if isinstance(part_count, int) and part_count > 1:
            raise BadCheckpoint(
                f"{reader.name} is one of several parts: join them with `llama-gguf-split --merge`"
            )
        self._tensors: dict[str, _QuantizedTensor] = {}
        views = []
        for entry, quantization in zip(header.tensors, quantizations, strict=True):
            hub_name = _hub_name(entry.name)
            if hub_name in self._tensors:
                raise BadCheckpoint(f"{reader.name} has the tensor {entry.name} twice")
            head_rows = self._head_rows(header, hub_name, entry.shape)
            self._tensors[hub_name] = self._quantized(entry, quantization, head_rows)
            views.append(TensorView.full(reader.name, hub_name, torch.float32, entry.shape))
        _check_disjoint(reader.name, list(zip(header.tensors, self._tensors.values(), strict=True)))
        views.sort(key=lambda view: self._tensors[view.name].start)
        super().__init__(views)

        shapes = {entry.name: entry.shape for entry in header.tensors}
        self.config, reason = model_config(header.keys, shapes)
        self.no_model = ""
        if reason:
            self.no_model = (
                f"no model is built from {reader.name}: it is GGUF {reason}. Its matrices are "
                "measured; for the rest, take the original, in the hub's format"
            )
        self.tokenizer = GgufTokenizer(reader)
        type_names = set()
        for entry, quantization in zip(header.tensors, quantizations, strict=True):
            if len(entry.shape) > 1:
                type_names.add(quantization.name)
        self.note = (
            f"{reader.name} is GGUF ({', '.join(sorted(type_names))}): the numbers that its blocks "
            "stand for were measured"
        )

    def _quantizations(self, tensors: Sequence[GgufTensor]) -> list[Any]:
        try:
            return [self._gguf.GGMLQuantizationType(tensor.type_number) for tensor in tensors]
        except ValueError as error:
            raise BadCheckpoint(
                f"{self._reader.name} is damaged or no GGUF file: {error}"
            ) from error

    def _quantized(self, entry: GgufTensor, quantization: Any, head_rows: int) -> _QuantizedTensor:
        # A block of so many numbers takes so many bytes: 32 and 18 for Q4_0.
        block_numbers, block_bytes = self._gguf.GGML_QUANT_SIZES[quantization]
        row_width = 1  # of a single number
        if entry.shape:
            row_width = entry.shape[-1]
        if row_width % block_numbers or math.prod(entry.shape) % block_numbers:
            raise BadCheckpoint(
                f"{self._reader.name} is damaged: {entry.name} of shape {entry.shape} is no whole "
                "number of blocks"
            )
        row_count = math.prod(entry.shape[:-1])
        row_bytes = row_width // block_numbers * block_bytes
        tensor = _QuantizedTensor(
            quantization, entry.start, row_width, row_count, row_bytes, head_rows
        )
        if tensor.end > self._reader.size:
            raise BadCheckpoint(
                f"{self._reader.name} is cut off: {entry.name} ends after the file; "
                "download it again"
            )
        return tensor

    def _head_rows(self, header: GgufHeader, name: str, shape: tuple[int, ...]) -> int:
        """Return the rows of a head if llama.cpp has put them in pairs, otherwise 1."""
        if header.keys.get("general.architecture") != "llama" or len(shape) != 2:
            return 1
        projection = name.removesuffix(".weight").rpartition(".")[2]
        count_key = _HEADS_OF_PROJECTION.get(projection, "")
        count = head_counts(header.keys).get(count_key)
        if count is None:
            return 1
        if count < 1 or shape[0] % (2 * count):
            raise BadCheckpoint(
                f"{self._reader.name} is damaged: {name} of {shape} has {count} heads"
            )
        return int(shape[0] // count)

    def announce(self, views: Iterable[TensorView]) -> None:
        if self._reader.is_local:
            return
        spans = []
        for view in views:
            tensor = self._tensors[view.name]
            rows = tensor.rows_of(view)
            if rows is None:
                rows = range(tensor.row_count)
            spans.append(tensor.span(tensor.rows_read_for(rows)))
        self._reader.expect(spans)

    def read_many(self, views: Iterable[TensorView]) -> Iterator[Tensor]:
        views = list(views)
        self.announce(views)
        for view in views:
            rows = self._tensors[view.name].rows_of(view)
            if rows is None:
                tensor = self.materialize(view.name)
                yield tensor.as_strided(view.shape, view.stride, view.offset)
            else:
                # Of a stack of experts, one expert is read without the others.
                yield self._read_rows(view.name, rows).reshape(view.shape)

    def materialize(self, name: str) -> Tensor:
        rows = range(self._tensors[name].row_count)
        return self._read_rows(name, rows).reshape(self.view(name).shape)

    def _read_rows(self, name: str, rows: range) -> Tensor:
        """Return rows in the order of the hub's models, (rows, width)."""
        tensor = self._tensors[name]
        read_rows = tensor.rows_read_for(rows)
        numbers = self._dequantize_rows(name, read_rows)  # (read rows, width)
        if tensor.head_rows == 1:
            return numbers
        pairs = numbers.view(-1, tensor.head_rows // 2, 2, tensor.row_width)  # (heads, n, 2, width)
        halves = pairs.transpose(1, 2).reshape(numbers.shape)  # (read rows, width)
        first = rows.start - read_rows.start
        return halves[first : first + len(rows)].contiguous()

    def _dequantize_rows(self, name: str, rows: range) -> Tensor:
        """Return rows in the order of the file, (rows, width)."""
        tensor = self._tensors[name]
        result = torch.empty(len(rows), tensor.row_width)
        step = max(1, _BLOCK_BYTES // max(1, tensor.row_bytes))
        for start in range(0, len(rows), step):
            block = rows[start : start + step]
            begin, end = tensor.span(block)
            data = np.frombuffer(read_bytes(self._reader, begin, end - begin), dtype=np.uint8)
            self.bytes_read += data.nbytes
            blocks = data.reshape(len(block), tensor.row_bytes)
            numbers = self._dequantize(blocks, tensor.quantization, name)
            result[start : start + len(block)] = torch.from_numpy(numbers)
        return result

    def _dequantize(self, data: Any, quantization: Any, name: str) -> Any:
        if quantization.name == "F64":  # which the package cannot dequantise
            return data.view(np.float64).astype(np.float32)
        try:
            # Scales of a damaged block overflow; `Tensors` reports numbers that are not finite.
            with np.errstate(all="ignore"):
                numbers = self._gguf.quants.dequantize(data, quantization)
        except NotImplementedError:
            raise BadCheckpoint(
                f"{name} is of the type {quantization.name}, which the package gguf cannot "
                "dequantise"
            ) from None
        return np.array(numbers, dtype=np.float32)


def _check_disjoint(file: str, tensors: list[tuple[GgufTensor, _QuantizedTensor]]) -> None:
    spans = sorted((tensor.start, tensor.end, entry.name) for entry, tensor in tensors)
    for (_, end, name), (start, _, next_name) in pairwise(spans):
        if start < end:
            raise BadCheckpoint(f"{file} is damaged: {name} and {next_name} overlap")


def _hub_name(name: str) -> str:
    match = _GGUF_NAME.fullmatch(name)
    if match is None:
        return name
    layer, part, kind = match.groups()
    prefix = ""
    if layer is not None:
        prefix = f"layers.{layer}."
    if part in _HUB_STACKS and kind == "weight":
        return prefix + _HUB_STACKS[part]
    return f"{prefix}{_HUB_NAMES.get(part, part)}.{kind}"
