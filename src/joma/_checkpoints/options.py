"""Options with one name and one meaning in scans, audits and all tools that open a checkpoint."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from joma._data.token_ids import read_token_ids


@dataclass(frozen=True, kw_only=True)
class CheckpointOptions:
    """Options that `joma.scan`, `joma.audit`, `joma.superpose` and `joma.embedding_geometry` share.

    Each function has the ones that it needs, with defaults of its own.

    Attributes:
        revisions: which checkpoints of a series, see `revision_choice`.
        data: the text or the token ids that a model runs on: a corpus (a path, pydoc, wikitext-2, …),
            an array of ids, or a ``.npy`` or ``.txt`` file of ids.
        tokens: how many tokens of it; None for all.
        length: tokens per window; None for the default of the function.
        tokenizer: a folder or an id on the hub; None for the tokenizer of the model.
        base: the model that LoRA adapters add to.
        keep: keep what is downloaded from the hub.
        budget: bytes that may be transferred from the hub, as "20GB".
        retry: repeat what failed before.
        overwrite: replace the run in the folder instead of continuing it.
        shortest: the shortest window that the function can use.
    """

    revisions: str | Sequence[str] | None = None
    data: Any = "pydoc"
    tokens: int | None = 20_000
    length: int | None = None
    tokenizer: Any = None
    base: str | None = None
    keep: bool = False
    budget: str | int | None = None
    retry: bool = False
    overwrite: bool = False
    shortest: int = 2

    def __post_init__(self) -> None:
        if self.tokens is not None and self.tokens < 1:
            raise ValueError(f"tokens is {self.tokens}: give at least 1")
        if self.length is not None and self.length < self.shortest:
            raise ValueError(f"length is {self.length}: give at least {self.shortest} tokens")
        _ = self.max_bytes  # refuses what is not an amount

    @cached_property
    def max_bytes(self) -> int | None:
        """The budget in bytes; None without one."""
        if self.budget is None:
            return None
        from joma._checkpoints.budget import parse_bytes

        return parse_bytes(self.budget)

    @cached_property
    def token_ids(self) -> NDArray[np.int64] | None:
        """The token ids that `data` holds, (n,) or (B, T); None if it is a corpus of text."""
        return read_token_ids(self.data)

    @property
    def reads_text(self) -> bool:
        """True if a tokenizer is needed."""
        return self.token_ids is None

    def data_name(self) -> str:
        """Return the name or path of a corpus; for token ids, a hash that changes with them."""
        if self.token_ids is None:
            return os.fspath(self.data)
        content = np.ascontiguousarray(self.token_ids).tobytes()
        return f"token ids {hashlib.sha256(content).hexdigest()[:16]}"


def optional_path(place: str | os.PathLike[str] | None) -> str | None:
    """Return a path as text; None stays None."""
    if place is None:
        return None
    return os.fspath(place)
