"""The cache: encoded corpora by content hash, and texts from the hub; an entry is a folder that appears complete.

`$JOMA_CACHE`, else the system's folder of caches (`~/.cache/joma` on Linux). An entry is filled under another name and
renamed when it is complete. A lock lets one process do the work while others wait for it; where a file system
has no locks, each does it and the first one wins. Entries may be deleted at any time.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from joma._data.tokens import KINDS, Tokeniser, Tokens
from joma._runs import RunError, staged, write_json
from joma._runs.lock import take

T = TypeVar("T")

INFO = "corpus.json"


def entry(path: Path, load: Callable[[Path], T | None], fill: Callable[[Path], None]) -> T:
    """Return `load(path)`; where it gives None, have the folder filled first, by one process.

    Arguments:
        path: the entry's folder.
        load: reads the entry; None if it is not there or damaged.
        fill: writes the entry into the empty folder that it is given.
    """
    if (content := load(path)) is not None:
        return content
    try:
        with _one_at_a_time(path):
            if (content := load(path)) is not None:  # another process was faster
                return content
            shutil.rmtree(path, ignore_errors=True)  # damaged
            with staged(path) as folder:
                fill(folder)
                _to_disk(folder)
    except (
        RunError,
        OSError,
    ):  # without locks another process may have put its folder there before ours
        if (content := load(path)) is not None:
            return content
        raise
    if (content := load(path)) is None:
        raise RuntimeError(
            f"{path} cannot be read right after it was written: is the disk full or failing?"
        )
    return content


@contextmanager
def _one_at_a_time(path: Path) -> Iterator[None]:
    """Wait for other processes that make the same entry; where there are no locks, nobody waits."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = take(path.with_name(f".{path.name}.lock"), wait=True)
    except OSError as error:
        raise ValueError(
            f"cannot write the cache: {error}. Set JOMA_CACHE to a folder of yours"
        ) from error
    assert descriptor is not None  # it waits
    try:
        yield
    finally:
        os.close(descriptor)


def _to_disk(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb+") as stream:
                os.fsync(stream.fileno())


def write_tokens(path: Path, chunks: Iterable[Tokens], dtype: np.dtype[Any]) -> int:
    """Write chunks as one array to an .npy file as they come; return how many tokens there were."""
    count = 0
    with path.open("xb") as stream:
        _header(stream, dtype, 0)
        start = stream.tell()
        for chunk in chunks:
            chunk.astype(dtype, copy=False).tofile(stream)
            count += len(chunk)
        stream.seek(0)
        _header(stream, dtype, count)
        if stream.tell() != start:  # NumPy leaves room for 21 digits
            raise RuntimeError(
                f"NumPy's header for {count} tokens does not fit where that for 0 was"
            )
    return count


def _header(stream: Any, dtype: np.dtype[Any], count: int) -> None:
    descr = np.lib.format.dtype_to_descr(dtype)
    np.lib.format.write_array_header_1_0(
        stream, {"descr": descr, "fortran_order": False, "shape": (count,)}
    )


def write_entry(
    folder: Path, tokeniser: Tokeniser, lengths: dict[str, int], about: dict[str, Any]
) -> None:
    """Write the description that makes a folder with its arrays an entry."""
    tokeniser.save(folder / "vocabulary")
    write_json(folder / INFO, {**about, "tokens": lengths, "words": len(tokeniser)})


def read_entry(folder: Path) -> tuple[Tokeniser, dict[str, Tokens]] | None:
    """Return the tokeniser and the memory-mapped arrays of an entry, or None if it is not there or damaged."""
    try:
        info = json.loads((folder / INFO).read_text(encoding="utf-8"))
        tokeniser = KINDS[info["tokeniser"]].load(folder / "vocabulary")
        parts = {part: np.load(folder / f"{part}.npy", mmap_mode="r") for part in info["tokens"]}
        complete = len(tokeniser) == info["words"] and all(
            len(parts[part]) == count for part, count in info["tokens"].items()
        )
    except (OSError, ValueError, KeyError, TypeError, EOFError):
        return None
    return (tokeniser, parts) if complete else None
