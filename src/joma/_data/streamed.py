"""Text from the Hugging Face hub: streamed once into the cache, read from there ever after."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

from joma._data.cache import entry

Rows = Iterable[Mapping[str, Any]]

_VALID = ("validation", "valid", "val", "dev")


def fetch(name: str, cache: Path, say: Callable[[str], None]) -> Path:
    """Return a folder with `train.txt` and, if the data set has one, `valid.txt`.

    Arguments:
        name: NAME or NAME:CONFIG, as `datasets.load_dataset` takes them; a local folder of Parquet or JSON files too.
        cache: the cache's folder.
        say: called when a download starts.
    """
    dataset, _, config = name.partition(":")
    if not dataset:
        raise ValueError(
            "hf: names no data set: give hf:NAME or hf:NAME:CONFIG, such as hf:roneneldan/TinyStories"
        )

    def fill(folder: Path) -> None:
        say(f"streaming {name} from the Hugging Face hub, once")
        load_dataset, info = _loader()
        try:
            if not Path(dataset).exists():
                info(
                    dataset, timeout=10
                )  # fails at once where streaming would try again for half a minute
            _write_parts(folder, load_dataset(dataset, config or None, streaming=True))
        except (
            Exception
        ) as error:  # many kinds: no network, no such data set, gated, a config is needed
            raise ValueError(
                f"cannot load {name} from the hub ({type(error).__name__}: {error})"
            ) from error

    return entry(cache / "hub" / (quote(name, safe="") + _state(Path(dataset))), _read, fill)


def _state(path: Path) -> str:
    """Return a hash that changes with a local folder; a data set of the hub is fetched once."""
    if not path.is_dir():
        return ""
    files = [(str(file), file.stat()) for file in sorted(path.rglob("*"))]
    states = [(file, stat.st_size, stat.st_mtime_ns) for file, stat in files]
    return "-" + hashlib.blake2b(repr(states).encode(), digest_size=8).hexdigest()


def _read(folder: Path) -> Path | None:
    return folder if (folder / "train.txt").is_file() else None


def _loader() -> tuple[Callable[..., Mapping[str, Rows]], Callable[..., Any]]:
    try:
        from datasets import load_dataset
        from huggingface_hub import dataset_info
    except ImportError as error:
        raise ValueError("the hub needs the library datasets: pip install 'joma[hf]'") from error
    return load_dataset, dataset_info


def _write_parts(folder: Path, parts: Mapping[str, Rows]) -> None:
    if "train" not in parts:
        raise ValueError(f"there is no part called train, but {', '.join(parts)}")
    _write(folder / "train.txt", parts["train"])
    if valid := [part for part in _VALID if part in parts]:
        _write(folder / "valid.txt", parts[valid[0]])


def _write(path: Path, rows: Rows) -> None:
    """Write a part's texts, each from the start of a line."""
    column = None
    with path.open("x", encoding="utf-8", newline="\n") as stream:
        for row in rows:
            column = column or _column(row)
            text = row[column] or ""
            stream.write(text if text.endswith("\n") else text + "\n")


def _column(row: Mapping[str, Any]) -> str:
    texts = [key for key, value in row.items() if isinstance(value, str)]
    if "text" in texts:
        return "text"
    if len(texts) != 1:
        raise ValueError(
            f"there is no column called text: the columns of text are {', '.join(texts) or 'none'}"
        )
    return texts[0]
