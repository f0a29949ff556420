"""Files that are written whole, and values that JSON can hold."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def file_hash(path: Path) -> str:
    """Return the SHA-256 of a file's content, read in parts."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def write_atomic(path: str | os.PathLike[str], data: bytes | str) -> None:
    """Write a file so that at each moment the old or the new content is there, whole."""
    path = Path(path)
    if isinstance(data, str):
        data = data.encode()
    temporary = path.with_name(f".{path.name}.{os.urandom(4).hex()}.tmp")
    try:
        with temporary.open("xb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_json(path: str | os.PathLike[str], obj: object) -> None:
    """Write ``obj`` as indented JSON, atomically; arrays become lists, NaN and ±inf strings."""
    write_atomic(path, json.dumps(plain(obj), indent=2, ensure_ascii=False) + "\n")


def plain(obj: Any, place: str = "") -> Any:
    """Return ``obj`` made of JSON's own types; ``place`` names it in errors."""
    if hasattr(obj, "tolist"):  # NumPy and torch, scalars and arrays
        obj = obj.tolist()
    if isinstance(obj, float) and not math.isfinite(obj):
        return str(float(obj))
    if obj is None or isinstance(obj, (str, int, float)):
        return obj
    if isinstance(obj, Mapping):
        items = {}
        for key, item in obj.items():
            item_place = f"{place}.{key}" if place else str(key)
            items[str(key)] = plain(item, item_place)
        return items
    if isinstance(obj, (list, tuple)):
        return [plain(item, f"{place}[{index}]") for index, item in enumerate(obj)]
    if isinstance(obj, os.PathLike):
        return os.fspath(obj)
    raise TypeError(
        f"{place or 'the value'} is {obj!r} of type {type(obj).__name__}, which JSON cannot hold: "
        "give numbers, strings, booleans, None, lists, dicts, paths or arrays"
    )
