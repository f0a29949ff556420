"""Tokenisers: words by the paper's rules, and byte-pair encoding.

The rules are those of torchtext's `basic_english`, which the paper's language model uses: lower-case, double
quotes dropped, apostrophes and `. , ( ) ! ?` split off, `; :` and `<br />` turned into space. Words are
numbered by frequency, equal ones by the alphabet. `<unk>` is number 0; where the text has the word `<unk>`
itself (WikiText has), it is the same word and counted once: 28,782 words on WikiText-2's training text.

>>> split_words('He said: "Don\\'t (ever) go."')
['he', 'said', 'don', "'", 't', '(', 'ever', ')', 'go', '.']
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from joma._data.text import Text

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Tokens = NDArray[np.unsignedinteger[Any]]

UNKNOWN = "<unk>"
BYTES = 256  # the smallest vocabulary of byte-pair encoding
CHUNK = 1 << 16  # tokens renumbered at a time

# in torchtext's order: quotes go before `<br />` is looked for
_RULES = (
    ("'", " ' "),
    ('"', ""),
    (".", " . "),
    ("<br />", " "),
    (",", " , "),
    ("(", " ( "),
    (")", " ) "),
    ("!", " ! "),
    ("?", " ? "),
    (";", " "),
    (":", " "),
)


def split_words(text: str) -> list[str]:
    """Return the words of a text by the paper's rules."""
    text = text.lower()
    for mark, replacement in _RULES:
        text = text.replace(mark, replacement)
    return text.split()


def narrowest(size: int) -> np.dtype[np.unsignedinteger[Any]]:
    """Return the smallest of uint16 and uint32 that holds the numbers below `size`."""
    return np.dtype(np.uint16) if size <= 1 << 16 else np.dtype(np.uint32)


class Words:
    """Word-level tokeniser.

    Arguments:
        words: the vocabulary; the first one stands for all words that are not in it.
    """

    kind = "words"

    def __init__(self, words: Sequence[str]) -> None:
        self.words = list(words)
        self._numbers = {word: i for i, word in enumerate(self.words)}

    def __len__(self) -> int:
        return len(self.words)

    def encode(self, text: str) -> Tokens:
        """Return the numbers of a text's words."""
        words = split_words(text)
        number = self._numbers.get
        return np.fromiter((number(word, 0) for word in words), narrowest(len(self)), len(words))

    def decode(self, tokens: Iterable[int]) -> str:
        """Return the words with spaces between them."""
        return " ".join(self.words[int(token)] for token in tokens)

    def save(self, path: Path) -> None:
        """Write the vocabulary, one word per line."""
        path.write_text("".join(f"{word}\n" for word in self.words), encoding="utf-8", newline="\n")

    @classmethod
    def load(cls, path: Path) -> Words:
        """Read what `save` wrote."""
        return cls(path.read_text(encoding="utf-8").split("\n")[:-1])  # words hold no white space

    @classmethod
    def train(cls, text: Text, cap: int | None, scratch: Path) -> tuple[Words, Iterator[Tokens]]:
        """Take the vocabulary from a text and encode it, in one pass over the text.

        Words are numbered as they appear, the numbers written to the file `scratch`, and renumbered by
        frequency from there: memory holds the distinct words and one block.

        Arguments:
            text: the training text.
            cap: keep so many words, `<unk>` included; None keeps all.
            scratch: a file that does not exist yet; it is removed when all tokens have been taken.

        Returns:
            The tokeniser and the text's tokens in chunks, which must be taken to the end.
        """
        numbers: defaultdict[str, int] = defaultdict()
        numbers.default_factory = numbers.__len__  # a new word takes the next number
        unknown = numbers[UNKNOWN]
        counts = np.zeros(1 << 16, np.int64)
        with scratch.open("xb") as stream:
            for block in text.blocks():
                words = split_words(block)
                first = np.fromiter(map(numbers.__getitem__, words), np.uint32, len(words))
                first.tofile(stream)
                if len(numbers) > len(counts):
                    counts = np.concatenate(
                        [counts, np.zeros(max(len(counts), len(numbers)), np.int64)]
                    )
                occurrences = np.bincount(first)
                counts[: len(occurrences)] += occurrences
        known = list(numbers)
        # torchtext's order: the special word, then by frequency, equal ones by the alphabet
        order = sorted(range(1, len(known)), key=lambda i: (-counts[i], known[i]))
        order = [unknown, *order][:cap]
        tokeniser = cls([known[i] for i in order])
        renumbered = np.zeros(len(known), narrowest(len(tokeniser)))
        renumbered[order] = np.arange(len(order))
        return tokeniser, _renumber(scratch, renumbered)


def _renumber(scratch: Path, renumbered: Tokens) -> Iterator[Tokens]:
    with scratch.open("rb") as stream:
        while len(chunk := np.fromfile(stream, np.uint32, CHUNK)):
            yield renumbered[chunk]
    scratch.unlink()


class BytePairs:
    """Byte-pair encoding by Hugging Face's `tokenizers`: lossless, on bytes, with GPT-2's word boundaries.

    Arguments:
        tokenizer: a trained `tokenizers.Tokenizer`.
    """

    kind = "bpe"

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer

    def __len__(self) -> int:
        return self.tokenizer.get_vocab_size()

    def encode(self, text: str) -> Tokens:
        """Return the tokens of a text; lines are encoded one by one."""
        lines = self.tokenizer.encode_batch_fast(
            text.splitlines(keepends=True), add_special_tokens=False
        )
        return np.fromiter((token for line in lines for token in line.ids), narrowest(len(self)))

    def decode(self, tokens: Iterable[int]) -> str:
        """Return the text."""
        return self.tokenizer.decode([int(token) for token in tokens], skip_special_tokens=False)

    def save(self, path: Path) -> None:
        """Write `tokenizer.json`."""
        path.write_text(self.tokenizer.to_str(), encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> BytePairs:
        """Read what `save` wrote."""
        return cls(tokenizers().Tokenizer.from_str(path.read_text(encoding="utf-8")))

    @classmethod
    def train(cls, text: Text, size: int, scratch: Path) -> tuple[BytePairs, Iterator[Tokens]]:
        """Learn `size` tokens from a text and encode it: the same contract as `Words.train`."""
        hf = tokenizers()
        tokenizer = hf.Tokenizer(hf.models.BPE())
        tokenizer.pre_tokenizer = hf.pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = hf.decoders.ByteLevel()
        trainer = hf.trainers.BpeTrainer(
            vocab_size=size,
            initial_alphabet=hf.pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        tokenizer.train_from_iterator(
            (block.splitlines(keepends=True) for block in text.blocks()), trainer
        )
        tokeniser = cls(tokenizer)
        return tokeniser, map(tokeniser.encode, text.blocks())


Tokeniser = Words | BytePairs
KINDS: dict[str, type[Words] | type[BytePairs]] = {"words": Words, "bpe": BytePairs}


def tokenizers() -> Any:
    """Import the library `tokenizers`, or say how to get it."""
    try:
        import tokenizers
    except ImportError as error:
        raise ValueError(
            "byte-pair encoding needs the library tokenizers: pip install 'joma[hf]'"
        ) from error
    return tokenizers
