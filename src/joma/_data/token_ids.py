"""Token ids that are given as such: an array, or a file of whole numbers."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

# A text file counts as token ids if its beginning consists of whole numbers. So many characters are
# enough to decide, and a corpus of many gigabytes is not read for it.
_HEAD = 1 << 16


def read_token_ids(data: Any) -> NDArray[np.int64] | None:
    """Return the token ids that `data` holds; None if it names a corpus of text.

    Arguments:
        data: an array of whole numbers, (n,) or (B, T); the path of a ``.npy`` file of them; the path
            of a ``.txt`` file of whole numbers with white space between them; or a corpus.

    >>> read_token_ids([3, 1, 2])
    array([3, 1, 2])
    >>> read_token_ids("pydoc") is None
    True
    """
    if not isinstance(data, (str, os.PathLike)):
        return _checked(_as_array(data), "data")
    path = Path(data).expanduser()
    if path.suffix == ".npy":
        return _checked(_load_npy(path), path.name)
    if path.suffix == ".txt" and path.is_file():
        with path.open(encoding="utf-8", errors="replace") as stream:
            head = stream.read(_HEAD)
        words = head.split()
        if words and all(word.isdecimal() for word in words):
            return _checked(_load_text(path), path.name)
    return None


def _as_array(data: Any) -> NDArray[Any]:
    if hasattr(data, "detach"):  # a tensor, on whichever device
        data = data.detach().cpu()
    return np.asarray(data)


def _load_npy(path: Path) -> NDArray[Any]:
    try:
        # An array of objects is a pickle, which could execute anything.
        array: NDArray[Any] = np.load(path, allow_pickle=False)
    except FileNotFoundError:
        raise ValueError(f"there is no file {path} with token ids") from None
    except (OSError, ValueError) as error:
        raise ValueError(f"{path.name} cannot be read as an array of token ids: {error}") from None
    return array


def _load_text(path: Path) -> NDArray[Any]:
    words = path.read_text(encoding="utf-8").split()
    try:
        return np.array([int(word) for word in words], dtype=np.int64)
    except (ValueError, OverflowError):
        raise ValueError(
            f"{path.name} has other words among its token ids: give numbers only"
        ) from None


def _checked(ids: NDArray[Any], name: str) -> NDArray[np.int64]:
    if ids.ndim not in (1, 2) or (ids.size and ids.dtype.kind not in "iu"):
        raise ValueError(
            f"{name}: tokens must be whole numbers (n,) or (B, T); got {ids.dtype} of shape "
            f"{tuple(ids.shape)}"
        )
    return ids.astype(np.int64)
