"""Bounds on what a checkpoint's own files may ask for, before anything is built from them."""

from __future__ import annotations

import json
import re
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from joma._checkpoints.reading import BadCheckpoint

MAX_JSON = 32 << 20  # bytes; the largest index that was seen has 15 MB
_NESTED = 1_000_000  # lists and dicts: each takes 56 bytes and more, also an empty one
_REPEATED, _LAYERS = re.compile("(layers?|blocks|depth|stages|experts)$"), 100_000
_MODULES, _SOME = (
    10,
    2_000,
)  # modules that a model may have per tensor in the file, and so many more
_RATIO, _ROOM = (
    20,
    16 << 20,
)  # an honest compressed file has at most so many times its bytes, and so many more


def parsed(text: bytes) -> dict[str, Any]:
    """A JSON object; ValueError if it is none, or would take much more memory than it has bytes, or has a key twice."""
    if len(text) > MAX_JSON:
        raise ValueError(f"it has {len(text):,} bytes, more than {MAX_JSON:,}")
    if text.count(b"[") + text.count(b"{") > _NESTED:
        raise ValueError(f"it has more than {_NESTED:,} lists and objects")
    try:
        content = json.loads(text, object_pairs_hook=_once)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(content, dict):
        raise ValueError("it is no JSON object")
    return content


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        raise ValueError("it has a key twice")
    return content


def check_config(config: Any) -> None:
    """Refuse a config of more layers than any model has: transformers makes lists of that length from it."""
    for key, value in config.items() if isinstance(config, dict) else ():
        if isinstance(value, int) and value > _LAYERS and _REPEATED.search(str(key)):
            raise BadCheckpoint(f"config.json says {key} = {value:,}: refused")
        check_config(value)


@contextmanager
def bounded(tensors: int) -> Iterator[None]:
    """Refuse a model with far more modules than there are tensors: `num_hidden_layers: 10**6` would build for ever."""
    from torch.nn.modules.module import register_module_module_registration_hook

    most, count = _MODULES * tensors + _SOME, 0

    def counted(parent: Any, name: str, child: Any) -> None:
        nonlocal count
        count += 1
        if count > most:
            raise BadCheckpoint(
                f"config.json describes a model of more than {most:,} modules, with {tensors:,} tensors: refused"
            )

    handle = register_module_module_registration_hook(counted)
    try:
        yield
    finally:
        handle.remove()


def check_zip(items: list[zipfile.ZipInfo], size: int, name: str) -> None:
    """Refuse a zip of ``size`` bytes that would grow beyond reason."""
    stored = max(
        (item.file_size for item in items if item.compress_type == zipfile.ZIP_STORED), default=0
    )
    grown = sum(item.file_size for item in items if item.compress_type != zipfile.ZIP_STORED)
    if grown > _RATIO * size + _ROOM or stored > size:
        raise BadCheckpoint(
            f"{name} is a zip of {size:,} bytes that claims to hold {max(grown, stored):,}: refused, download it again"
        )
