"""Where the tensors of one checkpoint file lie, and reading exactly their bytes.

A safetensors file begins with a JSON table of offsets. A zip that `torch.save` wrote stores each tensor's bytes as they
are: `torch.load` onto the meta device, which unpickles weights and nothing else, tells where without reading them.
Files of before PyTorch 1.6 are no zips: they are read whole.
"""

from __future__ import annotations

import math
import os
import re
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from joma._scan.guard import BadCheckpoint, check_zip, parsed

_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
_FEW = 4096  # reads of a tensor
_WEIGHTS = ("model", "state_dict", "model_state_dict")  # what the weights are called in a training checkpoint
_MOST, _LONGEST = 1_000_000, 2000  # tensors and dicts of a file; characters of a name
_GLOBAL = re.compile(r"GLOBAL ([\w.]+)|function <[\w ]+ ([\w.]+)")
_SAFE = "Where its weights were made, save them alone, as safetensors (safetensors.torch.save_file(model.state_dict(), FILE))"
_MAX_HEADER = 16 << 20  # bytes: 100,000 tensors and more


@dataclass(frozen=True)
class Entry:
    """One tensor in a file: element ``i`` of dimension ``n`` lies ``stride[n]·i`` elements after ``offset`` (bytes)."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    stored: str = ""  # the type in the file, if it is none of PyTorch's: then this is its bytes

    def view(self, shape: tuple[int, ...], stride: tuple[int, ...], start: int) -> Entry:
        """Of a contiguous tensor, the part that a view with this shape, stride and storage offset shows."""
        return Entry(self.dtype, shape, stride, self.offset + start * self.dtype.itemsize)

    def blocks(self, size: int) -> Iterator[tuple[int, int, Entry]]:
        """Parts of about ``size`` bytes along the dimension that is outermost in the file: (dimension, start, part)."""
        if not self.shape:
            raise BadCheckpoint("a single number is no matrix")
        dim = max(range(len(self.shape)), key=lambda n: self.stride[n])
        rest = math.prod(self.shape[:dim] + self.shape[dim + 1 :]) * self.dtype.itemsize
        step = max(1, size // max(1, rest))
        for start in range(0, self.shape[dim], step):
            shape = (*self.shape[:dim], min(step, self.shape[dim] - start), *self.shape[dim + 1 :])
            yield dim, start, self.view(shape, self.stride, start * self.stride[dim])

    @property
    def end(self) -> int:
        """The byte after the last one."""
        if 0 in self.shape:
            return self.offset
        last = sum((n - 1) * s for n, s in zip(self.shape, self.stride, strict=True))
        return self.offset + (last + 1) * self.dtype.itemsize


class TensorFile:
    """One file of a checkpoint: its tensors by name, read on request.

    Attributes:
        entries: name -> where it is.
        bytes_read: of tensors, so far.
        note: what is special about the file, for the row of the checkpoint.
    """

    def __init__(self, path: Path, display: str | None = None) -> None:
        self.path, self.name = path, display or path.name
        self.bytes_read, self.note = 0, ""
        self._tensors: dict[str, Tensor] = {}
        try:
            self.size = path.stat().st_size
            with path.open("rb") as stream:
                magic = stream.read(4)
        except OSError as error:
            raise BadCheckpoint(f"{self.name} cannot be read: {error.strerror or error}") from error
        if path.suffix == ".safetensors":
            self.entries = self._safetensors()
        elif magic == b"PK\x03\x04":
            self.entries = self._zip()
        else:
            self.entries = self._legacy(magic)
        for key, entry in self.entries.items():
            if key not in self._tensors and not 0 <= entry.offset <= entry.end <= self.size:
                raise BadCheckpoint(
                    f"{self.name} is cut off: the tensor {key} ends at byte {entry.end:,}, the file at {self.size:,}; "
                    "download it again"
                )

    def _safetensors(self) -> dict[str, Entry]:
        head = _pread(self.path, 0, min(8, self.size))
        length = int.from_bytes(head, "little")
        if len(head) < 8 or length > min(_MAX_HEADER, self.size - 8):
            raise BadCheckpoint(f"{self.name} is cut off or no safetensors file ({self.size:,} bytes)")
        try:
            entries = dict(_entries(parsed(_pread(self.path, 8, length)), 8 + length))
            _check_apart(entries)
            return entries
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise BadCheckpoint(f"{self.name} is no safetensors file: its header is damaged ({error})") from error

    def _zip(self) -> dict[str, Entry]:
        try:
            with zipfile.ZipFile(self.path) as archive:
                packed = check_zip(archive, self.size)
        except BadCheckpoint as error:
            raise BadCheckpoint(f"{self.name}: {error}") from None
        except (zipfile.BadZipFile, ValueError, NotImplementedError, EOFError, OSError) as error:
            raise BadCheckpoint(f"{self.name} is cut off or no zip: {error}; download it again") from error
        tensors = self._load("cpu" if packed else "meta")
        entries = {}
        for key, tensor in tensors.items():
            at = getattr(tensor.untyped_storage(), "_checkpoint_offset", None)
            if packed or at is None:  # compressed, or of an older PyTorch: there are no offsets
                return self._keep(tensors if packed else self._load("cpu"))
            start = at + tensor.storage_offset() * tensor.dtype.itemsize
            entries[key] = Entry(tensor.dtype, tuple(tensor.shape), tensor.stride(), start)
        return entries

    def _legacy(self, magic: bytes) -> dict[str, Entry]:
        if self.path.suffix not in (".bin", ".pt", ".pth", ".ckpt"):
            raise BadCheckpoint(f"{self.name} is neither safetensors nor a PyTorch file (it begins with {magic!r})")
        return self._keep(self._load("cpu"))

    def _keep(self, tensors: Mapping[str, Tensor]) -> dict[str, Entry]:
        self._tensors = {key: tensor.contiguous() for key, tensor in tensors.items()}
        self.note = f"{self.name} is of an old format and was read whole"
        self.bytes_read += self.size
        return {k: Entry(t.dtype, tuple(t.shape), t.stride(), 0) for k, t in self._tensors.items()}

    def _load(self, device: str) -> dict[str, Tensor]:
        """The tensors, with weights_only: a pickle that holds anything else is refused before it is executed."""
        import pickle

        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # on protocols of pickle that may not work: then they raise
                loaded = torch.load(self.path, map_location=device, weights_only=True)
        except pickle.UnpicklingError as error:
            raise BadCheckpoint(f"{self.name} is refused, nothing of it was executed: {_refused(error)}") from None
        except Exception as error:  # a damaged pickle can fail in any way
            raise BadCheckpoint(f"{self.name} is damaged or no PyTorch file ({_first(error)})") from None
        try:
            return dict(_flat(loaded))
        except BadCheckpoint as error:
            raise BadCheckpoint(f"{self.name} is refused: {error}") from None

    def read(self, name: str, entry: Entry | None = None) -> Tensor:
        """The tensor, or that part of it which ``entry`` (a view of it) describes; as stored."""
        place = self.entries[name]
        entry = place if entry is None else entry
        gaps = place.stride != contiguous(place.shape)  # saved as a view of something: views of it are not in the file
        if name in self._tensors or (gaps and entry != place):
            tensor = self._tensors[name] if name in self._tensors else self._whole(name).contiguous()
            return tensor.as_strided(entry.shape, entry.stride, (entry.offset - place.offset) // entry.dtype.itemsize)
        self._check_size(name, entry)
        return self._read(entry)

    def _whole(self, name: str) -> Tensor:
        self._check_size(name, self.entries[name])
        return self._read(self.entries[name])

    def _check_size(self, name: str, entry: Entry) -> None:
        """Also of a tensor that shows the same numbers again and again (stride 0)."""
        if entry.end > self.size or math.prod(entry.shape) * entry.dtype.itemsize > self.size:
            raise BadCheckpoint(f"{self.name}: the tensor {name} does not hold what is asked of it")

    def _read(self, entry: Entry) -> Tensor:
        order = sorted(range(len(entry.shape)), key=lambda n: -entry.stride[n])  # outermost in the file first
        shape, stride = [entry.shape[n] for n in order], [entry.stride[n] for n in order]
        size = entry.dtype.itemsize
        flat = torch.empty(math.prod(shape) * size, dtype=torch.uint8)
        if flat.numel():
            inner, run = len(shape), 1  # the innermost dimensions that lie without gaps, and their elements
            while inner and (stride[inner - 1] == run or shape[inner - 1] == 1):
                inner -= 1
                run *= shape[inner]
            span = entry.end - entry.offset
            dense = run * size < 64 and span <= 4 * flat.numel() and flat.numel() > _FEW * run * size
            if dense:  # every second column, say: all between the first and the last, in one go
                flat, inner, run = torch.empty(span, dtype=torch.uint8), 0, span // size
            buffer, at = memoryview(flat.numpy()), 0  # type: ignore[arg-type]
            with self.path.open("rb", buffering=0) as stream:
                if hasattr(os, "posix_fadvise"):  # the kernel reads ahead otherwise, up to twice of what is asked for
                    os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
                for start in _offsets(shape[:inner], stride[:inner]):
                    _fill(stream.fileno(), buffer[at : at + run * size], entry.offset + start * size, self.name)
                    at += run * size
            self.bytes_read += at
            if dense:
                return flat.view(entry.dtype).as_strided(entry.shape, entry.stride)
        back = [order.index(n) for n in range(len(order))]
        return flat.view(entry.dtype).reshape(shape).permute(back)


def _entries(table: Mapping[str, Any], data: int) -> Iterator[tuple[str, Entry]]:
    for name, item in table.items():
        if name == "__metadata__":
            continue
        shape, (begin, end) = tuple(int(n) for n in item["shape"]), item["data_offsets"]
        dtype = _DTYPES.get(item["dtype"])
        if dtype is None:  # packed 4-bit and the like, which no gauge measures
            if end < begin or begin < 0:
                raise ValueError(f"{name} lies between bytes {begin} and {end}")
            yield name, Entry(torch.uint8, (end - begin,), (1,), data + begin, str(item["dtype"]))
            continue
        if end - begin != math.prod(shape) * dtype.itemsize or begin < 0 or min(shape, default=0) < 0:
            raise ValueError(f"{name} has {end - begin} bytes, but shape {shape}")
        yield name, Entry(dtype, shape, contiguous(shape), data + begin)


def _check_apart(entries: Mapping[str, Entry]) -> None:
    """Tensors of a safetensors file share no bytes; torch.save does that on purpose, for tied weights."""
    filled = sorted((entry.offset, entry.end, name) for name, entry in entries.items() if entry.end > entry.offset)
    for (_, end, name), (start, _, other) in pairwise(filled):
        if start < end:
            raise ValueError(f"{name} and {other} overlap")


def contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a tensor without gaps."""
    return tuple(math.prod(shape[n + 1 :]) for n in range(len(shape)))


def _flat(loaded: Any) -> Iterator[tuple[str, Tensor]]:
    """Tensors of nested dicts by dotted names; the dict of weights of a training checkpoint loses its own name.

    A pickle may refer to one dict many times over: no more is walked through than a file of weights can have.
    """
    if not isinstance(loaded, Mapping):
        return
    wrapped = [k for k in _WEIGHTS if isinstance(loaded.get(k), Mapping)]
    if wrapped and not any(isinstance(v, Tensor) for v in loaded.values()):
        loaded = loaded[wrapped[0]]
    left, seen = [("", loaded)], 0
    while left:
        prefix, content = left.pop()
        inside = []
        for key, value in content.items():
            seen += 1
            if seen > _MOST or len(prefix) > _LONGEST:
                raise BadCheckpoint("dicts are nested beyond reason")
            if isinstance(value, Tensor):
                yield f"{prefix}{key}", value.detach()
            elif isinstance(value, Mapping) and (prefix or not str(key).startswith("optim")):
                inside.append((f"{prefix}{key}.", value))
        left += reversed(inside)


def _offsets(shape: list[int], stride: list[int]) -> Iterator[int]:
    """Where each run begins, in elements."""
    if not shape:
        yield 0
        return
    for n in range(shape[0]):
        for rest in _offsets(shape[1:], stride[1:]):
            yield n * stride[0] + rest


def _fill(descriptor: int, buffer: memoryview, offset: int, name: str) -> None:
    """Positioned reads until the buffer is full."""
    done = 0
    while done < len(buffer):
        got = os.preadv(descriptor, [buffer[done:]], offset + done)
        if got == 0:
            raise BadCheckpoint(f"{name} is cut off at byte {offset + done:,}; download it again")
        done += got


def _pread(path: Path, offset: int, length: int) -> bytes:
    buffer = bytearray(length)
    with path.open("rb", buffering=0) as stream:
        _fill(stream.fileno(), memoryview(buffer), offset, path.name)
    return bytes(buffer)


def _first(error: BaseException) -> str:
    """The first line of a message, without what PyTorch advises, which would execute the file."""
    text = str(error).strip().split("\n")[0]
    return type(error).__name__ if not text or "weights_only" in text else text[:200]


def _refused(error: BaseException) -> str:
    """What is wrong with a pickle that is more than weights, and what can be done about it safely."""
    if name := _GLOBAL.search(str(error)):
        return f"it holds more than weights ({name[1]}). {_SAFE}"
    return f"it is damaged, or holds more than weights. {_SAFE}"
