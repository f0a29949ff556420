"""Corpora by name or path: found, split into training and validation text, encoded and cached.

| name | text |
|---|---|
| `wikitext-2`, `wikitext-103` | from a folder in `$JOMA_DATA`, else from the hub |
| `pydoc` | the standard library's own reference, about 80,000 words: on every machine, no download |
| `zipf` | a seeded text with Zipf frequencies, 60,000 words: the same on every machine (`zipf.py`) |
| `hblt`, `hblt:rho=0.9,…` | samples of a hierarchical binary latent tree, one line each (`trees.py`) |
| a path | a text file, or a folder of text files |
| `hf:NAME`, `hf:NAME:CONFIG` | a data set of the Hugging Face hub, or a folder that `datasets` can load |
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from joma._data.cache import entry, read_entry, write_entry, write_tokens
from joma._data.folders import cache_folder
from joma._data.streamed import fetch
from joma._data.text import Span, Text
from joma._data.tokens import (
    BYTES,
    KINDS,
    BytePairs,
    Tokeniser,
    Tokens,
    Words,
    narrowest,
    tokenizers,
)

VERSION = 1  # of the rules and the format: part of the hash
VALID = 0.1  # of a text without a validation part: its end
BPE_SIZE = 8_000
WIKITEXT = ("wikitext-2", "wikitext-103")
_WIKI_FILES = ("tokens", "raw")
_BIG = 100 << 20  # bytes: WikiText-103's training text is 540 MB, WikiText-2's 11 MB


@dataclass(frozen=True)
class Corpus:
    """An encoded corpus.

    Arguments:
        name: what was asked for, or the name of the file or folder.
        digest: hash of the text, the tokeniser's settings and the version of both: equal digests, equal tokens.
        train: training tokens, memory-mapped, uint16 or uint32.
        valid: validation tokens.
        tokeniser: encodes and decodes.
    """

    name: str
    digest: str
    train: Tokens
    valid: Tokens
    tokeniser: Tokeniser

    @property
    def vocabulary(self) -> object:
        """The list of words, or the `tokenizers.Tokenizer` of byte pairs."""
        return (
            self.tokeniser.words if isinstance(self.tokeniser, Words) else self.tokeniser.tokenizer
        )

    @property
    def size(self) -> int:
        """How many different tokens there are."""
        return len(self.tokeniser)


def corpus(
    source: str | os.PathLike[str],
    *,
    tokeniser: str = "words",
    vocabulary: int | None = None,
    cache: str | os.PathLike[str] | None = None,
    say: Callable[[str], None] = lambda message: None,
) -> Corpus:
    """Return a corpus, encoded; the second time from the cache.

    Arguments:
        source: a name of the table above, or a path.
        tokeniser: "words" (the paper's) or "bpe".
        vocabulary: keep so many words, `<unk>` included; None keeps all. For "bpe" the number of tokens (8,000).
        cache: the cache's folder, instead of `$JOMA_CACHE` or `~/.cache/joma`.
        say: called with one line about what is done, where that takes time.
    """
    cap = _checked(tokeniser, vocabulary)
    folder = Path(cache) if cache is not None else cache_folder()
    name, train, valid = _find(source, folder, say)
    settings = {"version": VERSION, "tokeniser": tokeniser, "vocabulary": cap}
    if tokeniser == "bpe":
        settings["tokenizers"] = tokenizers().__version__
    digest = _digest(settings, train, valid)

    def fill(where: Path) -> None:
        say(f"encoding {name} ({(train.size() + valid.size()) / 1e6:,.1f} MB), once")
        coder, chunks = (
            BytePairs.train(train, cap or BPE_SIZE, where / "scratch")
            if tokeniser == "bpe"
            else Words.train(train, cap, where / "scratch")
        )
        dtype = narrowest(len(coder))
        lengths = {"train": write_tokens(where / "train.npy", chunks, dtype)}
        lengths["valid"] = write_tokens(
            where / "valid.npy", map(coder.encode, valid.blocks()), dtype
        )
        for part, text in (("train", train), ("valid", valid)):
            if not lengths[part]:
                what = "training" if part == "train" else "validation"
                raise ValueError(
                    f"the {what} text of {name} is empty: no words in {text.sources or 'what is left for it'}"
                )
        write_entry(where, coder, lengths, {"name": name, **settings})

    coder, parts = entry(folder / "corpora" / digest, read_entry, fill)
    return Corpus(name, digest, parts["train"], parts["valid"], coder)


def texts(
    source: str | os.PathLike[str],
    *,
    cache: str | os.PathLike[str] | None = None,
    say: Callable[[str], None] = lambda message: None,
) -> tuple[str, Text, Text]:
    """Name, training and validation text of a corpus, for tokenisers that are not joma's."""
    return _find(source, Path(cache) if cache is not None else cache_folder(), say)


def _checked(tokeniser: str, vocabulary: int | None) -> int | None:
    if tokeniser not in KINDS:
        raise ValueError(f"unknown tokeniser {tokeniser!r}: choose one of {', '.join(KINDS)}")
    if tokeniser == "bpe":
        vocabulary = BPE_SIZE if vocabulary is None else vocabulary
        if vocabulary < BYTES:
            raise ValueError(
                f"the vocabulary is {vocabulary}: byte pairs need at least {BYTES}, one for each byte"
            )
    elif vocabulary is not None and vocabulary < 1:
        raise ValueError(
            f"the vocabulary is capped at {vocabulary} words: give at least 1 (<unk> counts), or None for no cap"
        )
    return vocabulary


def _digest(settings: dict[str, object], train: Text, valid: Text) -> str:
    digest = hashlib.blake2b(json.dumps(settings, sort_keys=True).encode(), digest_size=16)
    train.hash_into(digest)
    valid.hash_into(digest)
    return digest.hexdigest()


def _find(
    source: str | os.PathLike[str], cache: Path, say: Callable[[str], None]
) -> tuple[str, Text, Text]:
    """Return name, training and validation text."""
    if source in WIKITEXT:
        return str(source), *_wikitext(str(source), cache, say)
    if source == "pydoc":
        return "pydoc", *_pydoc()
    if source == "zipf":
        return "zipf", *_zipf()
    if isinstance(source, str) and source.partition(":")[0] == "hblt":
        return source, *_hblt(source.partition(":")[2])
    if isinstance(source, str) and source.startswith("hf:"):
        return source, *_folder(fetch(source.removeprefix("hf:"), cache, say))
    check_source(source)
    path = Path(source).expanduser()
    if path.is_file():
        return path.name, *Text((Span(path),)).split(1 - VALID)
    return _folder_name(path), *_folder(path)


def check_source(source: str | os.PathLike[str]) -> None:
    """Refuse what names no corpus, before anything is read; names on the hub are not looked up."""
    if not os.fspath(source):
        raise ValueError(f"no corpus was named: give one of {_choices()}")
    if source in (*WIKITEXT, "pydoc", "zipf"):
        return
    if isinstance(source, str) and (source.partition(":")[0] == "hblt" or source.startswith("hf:")):
        return
    path = Path(source).expanduser()
    if not (path.is_file() or path.is_dir()):
        raise ValueError(
            f"unknown corpus {str(source)!r}: there is no file or folder {path.absolute()}. Give {_choices()}"
        )


def _choices() -> str:
    return f"{', '.join(WIKITEXT)}, pydoc, zipf, hblt, hf:NAME, or the path of a text file or a folder of them"


def _pydoc() -> tuple[Text, Text]:
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise ValueError(
            "this Python comes without pydoc_data.topics: give the path of a text instead"
        ) from error
    text = "\n".join(topics[name] for name in sorted(topics))
    return Text((Span("pydoc_data.topics", text.encode()),)).split(1 - VALID)


def _zipf() -> tuple[Text, Text]:
    from joma._data.zipf import text

    return Text((Span("zipf", text()),)).split(1 - VALID)


def _hblt(spec: str) -> tuple[Text, Text]:
    from joma._data.trees import text

    return Text((Span("hblt", text(spec)),)).split(1 - VALID)


def local_wikitext(name: str, data: str | None) -> tuple[Text, Text] | None:
    """Return the two parts of WikiText in the folder ``data``, or in the folder of its name there."""
    for folder in _wiki_places(name, data):
        parts = _wiki_parts(folder)
        if parts is not None and _is_named(folder, name, parts[0]):
            return parts
    return None


def _wiki_places(name: str, data: str | None) -> list[Path]:
    if not data:
        return []
    folder = Path(data).expanduser()
    return [folder / name, folder]


def _wikitext(name: str, cache: Path, say: Callable[[str], None]) -> tuple[Text, Text]:
    """Look in `$JOMA_DATA`, then on the hub."""
    data = os.environ.get("JOMA_DATA")
    parts = local_wikitext(name, data)
    if parts is not None:
        return parts
    looked = _wiki_places(name, data)
    try:
        return _folder(fetch(f"Salesforce/wikitext:{name}-v1", cache, say))
    except ValueError as error:
        places = (
            " or ".join(str(folder) for folder in looked)
            if looked
            else "a local folder (JOMA_DATA is not set)"
        )
        raise ValueError(
            f"{name} was not found: no wiki.train.tokens and wiki.valid.tokens in {places}, and from the hub: "
            f"{error}. Unpack {name} into a folder and set JOMA_DATA to it or its parent, or give its path; or "
            "install joma[hf] and connect to the hub once. The corpus pydoc needs neither"
        ) from error


def _wiki_parts(folder: Path) -> tuple[Text, Text] | None:
    """Return WikiText's two parts if the folder holds them; tokens, with <unk>, before raw text."""
    for suffix in _WIKI_FILES:
        train, valid = (folder / f"wiki.{part}.{suffix}" for part in ("train", "valid"))
        if train.is_file() and valid.is_file():
            return Text((Span(train),)), Text((Span(valid),))
    return None


def _is_named(folder: Path, name: str, train: Text) -> bool:
    """Tell whether a WikiText folder is the one of that name: by the folder's name, else by its size."""
    named = [other for other in WIKITEXT if other in folder.resolve().name]
    return name in named if named else (train.size() > _BIG) == (name == "wikitext-103")


def _wiki_folder(path: Path) -> Path:
    """Return the folder of WikiText that `path` is or has; `path` itself if it has none."""
    inside = [path / name for name in WIKITEXT if _wiki_parts(path / name)]
    if _wiki_parts(path) or not inside:
        return path
    if len(inside) > 1:
        raise ValueError(
            f"{path} holds {' and '.join(WIKITEXT)}: give one of {inside[0]} and {inside[1]}"
        )
    return inside[0]


def _folder_name(path: Path) -> str:
    return _wiki_folder(path).resolve().name


def _folder(path: Path) -> tuple[Text, Text]:
    """Return the parts of a folder of text: by the names of files and folders in it, else its last tenth."""
    path = _wiki_folder(path)
    if wiki := _wiki_parts(path):
        return wiki
    parts: dict[str, list[Span]] = {"train": [], "valid": [], "test": [], "": []}
    for file in sorted(path.rglob("*")):
        inner = file.relative_to(path)
        if (
            file.is_file()
            and not any(part.startswith(".") for part in inner.parts)
            and _is_text(file)
        ):
            parts[_part(inner)].append(Span(file))
    train = Text(tuple(parts["train"] or parts[""]))
    if not train.spans:
        raise ValueError(
            f"no training text in {path.absolute()}: it has no text files, or only such for validation"
        )
    valid = Text(tuple(parts["valid"]))
    return (train, valid) if valid.spans else train.split(1 - VALID)


def _part(inner: Path) -> str:
    """Return which part a file belongs to by the words in its path, the last one first; "" if it does not say."""
    for word in reversed(re.findall(r"[a-z]+", str(inner).lower())):
        for part, names in (
            ("train", ("train", "training")),
            ("valid", ("valid", "validation", "val", "dev")),
            ("test", ("test",)),
        ):
            if word in names:
                return part
    return ""


def _is_text(file: Path) -> bool:
    with file.open("rb") as stream:
        return b"\0" not in stream.read(8192)
