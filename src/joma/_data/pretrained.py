"""Tokenizers of the hub's format, from a folder or the hub; never code that a repository brings."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

_VOCABULARY = (
    "tokenizer.json",
    "vocab.*",
    "*.model",
)  # one of them is what a tokenizer is read from
_BYTES = ("ByT5", "Canine", "Perceiver")  # tokenizers that need none
_ELSEWHERE = "name another place for it, --tokenizer FOLDER or ID (tokenizer= in Python)"


def load_tokenizer(name: str | os.PathLike[str], revision: str | None = None) -> Any:
    """The tokenizer that belongs to a model."""
    source = source_of(name)
    if Path(source).is_dir() and not has_tokenizer(Path(source)):
        raise ValueError(
            f"there is no tokenizer in {source}: {_ELSEWHERE}"
        )  # transformers would make an empty one
    try:
        with quiet():
            tokenizer = transformers_library().AutoTokenizer.from_pretrained(
                source, trust_remote_code=False, **_where(source, revision)
            )
    except (OSError, ValueError, KeyError, TypeError, ImportError) as error:
        raise ValueError(f"{_explained(source, 'tokenizer', error)}. Or {_ELSEWHERE}") from error
    return tokenizer


def has_tokenizer(folder: Path) -> bool:
    """Whether there is a vocabulary in a folder; settings alone (tokenizer_config.json) are no tokenizer."""
    if any(path.is_file() for glob in _VOCABULARY for path in folder.glob(glob)):
        return True
    settings = folder / "tokenizer_config.json"
    return settings.is_file() and any(
        name in settings.read_text(encoding="utf-8") for name in _BYTES
    )


def check_tokens(model: Any, tokens: Any) -> None:
    """Refuse tokens that a model has no embedding for; it would end in an index error, or on a GPU in worse."""
    get = getattr(model, "get_input_embeddings", None)
    size = getattr(get() if get is not None else None, "num_embeddings", None)
    if size is None or not tokens.numel():
        return
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or high >= size:
        raise ValueError(
            f"the sample has token {low if low < 0 else high}, the model {size} tokens (0 to {size - 1}): is the "
            "tokenizer another model's?"
        )


def encode(tokenizer: Any, text: str) -> list[int]:
    """The tokens of a text, without special ones and without a warning on length."""
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def first_tokens(tokenizer: Any, blocks: Iterable[str], count: int) -> list[int]:
    """The first ``count`` tokens of a text in blocks; of a block, which may be long, no more is encoded than needed."""
    tokens: list[int] = []
    for block in blocks:
        enough = (
            16 * (count - len(tokens)) + 64
        )  # characters, unless they are unusually long tokens
        part = encode(tokenizer, block[:enough])
        tokens += (
            encode(tokenizer, block)
            if len(tokens) + len(part) < count and enough < len(block)
            else part
        )
        if len(tokens) >= count:
            break
    return tokens[:count]


def _where(source: str, revision: str | None) -> dict[str, Any]:
    """Arguments of ``from_pretrained``: the revision, and the cache alone where the hub cannot be reached."""
    if Path(source).is_dir() or any(
        os.environ.get(name) for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY")
    ):
        return {"revision": revision or "main"}
    host = urlsplit(os.environ.get("HF_ENDPOINT") or "https://huggingface.co").hostname
    try:
        socket.getaddrinfo(host, None)
    except OSError:
        return {"revision": revision or "main", "local_files_only": True}
    return {"revision": revision or "main"}


def source_of(name: str | os.PathLike[str], needed: str = "") -> str:
    """A folder, which must have the file ``needed``, or an id of the hub."""
    path = Path(name).expanduser()
    if path.is_dir():
        if needed and not (path / needed).is_file():
            inside = sorted(child.name for child in path.iterdir() if (child / needed).is_file())
            hint = (
                f"; its folders {', '.join(inside[:3])} … are: give one of them" if inside else ""
            )
            raise ValueError(f"{path} is not a model: it has no {needed}{hint}")
        return str(path)
    text = os.fspath(name)
    if path.exists() or text.count("/") > 1 or text.startswith((".", "/", "~")) or not text.strip():
        raise ValueError(
            f"there is no folder {text!r} with a model: give a folder with config.json, or an id of the hub"
        )
    return text


def _explained(source: str, what: str, error: Exception) -> str:
    first = str(error).strip().split("\n")[0]
    if Path(source).is_dir():
        return f"the {what} in {source} cannot be read: {first}"
    return (
        f"the {what} of {source!r} cannot be had from the hub: {first} Check the name and the network; without one, "
        "download the repository elsewhere and give its folder"
    )


def transformers_library() -> Any:
    """`transformers`, or how to get it."""
    try:
        import transformers
    except ImportError as error:
        raise ValueError(
            f"models of the hub's format need transformers ({error}): pip install 'joma[hf]'"
        ) from error
    return transformers


@contextmanager
def quiet() -> Iterator[None]:
    """Without the progress bars and reports that transformers prints."""
    from transformers.utils import logging

    shown, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if shown:
            logging.enable_progress_bar()
