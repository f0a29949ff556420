"""The header of a GGUF file (llama.cpp): keys, where the tensors are, the config and the tokenizer.

It is parsed here, within bounds. The reader of the package `gguf` maps the file into memory, so it
cannot read a file on the hub; it makes an array per word of the vocabulary; and it goes on for ever
where an array claims to be longer than the file. (Numbers: `joma docs architecture`.)

A config is made for families whose tensors and keys are all understood here. For others, and where
a key or a tensor would be ignored (scaled rotary frequencies, windows of attention, experts), no
model is built: it would run, and be another model. transformers builds configs from GGUF files,
too; it ignores the keys that it does not know. Its conversion of tokenizers is used.
"""

from __future__ import annotations

import hashlib
import io
import json
import struct
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from joma._checkpoints.reading import BadCheckpoint, Reader, ReaderStream
from joma._data.pretrained import quiet, transformers_library

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
# Types of values, by llama.cpp's numbers.
_NUMBERS = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: struct.Struct("<I"),
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    7: struct.Struct("<?"),
    10: struct.Struct("<Q"),
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}
_STRING = 8
_ARRAY = 9
_UINT32 = _NUMBERS[4]
_UINT64 = _NUMBERS[10]

# Bounds on what a file may claim, far above what real files have.
_MAX_TEXT = 1 << 16  # characters of a name, or of a value that is kept
_MAX_ITEMS = 1 << 20  # keys, tensors, and words of an array that is kept
_MAX_ARRAY_DEPTH = 4
_MAX_DIMENSIONS = 4
_DEFAULT_ALIGNMENT = 32
_MAX_ALIGNMENT = 1 << 20
_BUFFER_BYTES = 1 << 16

_CLASSES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}

# llama.cpp's keys (after the name of the family) -> those of config.json. All are needed.
_CONFIG_KEYS = {
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "context_length": "max_position_embeddings",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
}
_EPSILON = "attention.layer_norm_rms_epsilon"
_ROTARY_BASE = "rope.freq_base"
_ROTARY_SIZE = "rope.dimension_count"
_ROTARY_SCALING = "rope.scaling.type"
_KEY_SIZE = "attention.key_length"
_VALUE_SIZE = "attention.value_length"
_VOCABULARY = "vocab_size"
_UNDERSTOOD_KEYS = {
    *_CONFIG_KEYS,
    _EPSILON,
    _ROTARY_BASE,
    _ROTARY_SIZE,
    _ROTARY_SCALING,
    _KEY_SIZE,
    _VALUE_SIZE,
    _VOCABULARY,
}
_UNDERSTOOD_WEIGHTS = frozenset(
    [
        "token_embd",
        "output",
        "output_norm",
        "attn_norm",
        "ffn_norm",
        "attn_q",
        "attn_k",
        "attn_v",
        "attn_output",
        "attn_q_norm",
        "attn_k_norm",
        "ffn_gate",
        "ffn_up",
        "ffn_down",
    ]
)
_UNDERSTOOD_BIASES = {"qwen2": frozenset({"attn_q", "attn_k", "attn_v"})}

# Keys of the header -> what transformers' conversion calls them.
_TOKENIZER_PREFIX = "tokenizer.ggml."
_TOKENIZER_KEYS = {
    "model": "tokenizer_type",
    "pre": "pre_tokenizer_type",
    "tokens": "tokens",
    "scores": "scores",
    "token_type": "token_type",
    "merges": "merges",
    "bos_token_id": "bos_token_id",
    "eos_token_id": "eos_token_id",
    "unknown_token_id": "unk_token_id",
    "padding_token_id": "pad_token_id",
    "add_space_prefix": "add_prefix_space",
}
# Ways to split a text before its bytes are merged, by llama.cpp's names: as GPT-2 does, which is
# what transformers assumes; and as GPT-2 does after each digit was split off, which it overlooks.
_SPLIT_AS_GPT2 = ("gpt-2", "mpt", "olmo")
_SPLIT_DIGITS = ("smollm", "starcoder", "refact", "command-r")
_OTHER_TOKENIZER = "name another with --tokenizer FOLDER or ID (tokenizer= in Python)"


@dataclass(frozen=True)
class GgufTensor:
    """A tensor in the table of a GGUF file."""

    name: str
    type_number: int
    shape: tuple[int, ...]
    start: int  # its first byte in the file


class GgufHeader:
    """Keys and values, and where the tensors are.

    Arguments:
        reader: of the file.
        kept_arrays: keys whose arrays are kept. The value of the others, and of very long texts, is
            None.

    Attributes:
        keys: values by key.
        tensors: all tensors.
    """

    def __init__(self, reader: Reader, kept_arrays: Container[str] = ()) -> None:
        self._name = reader.name
        self._size = reader.size
        self._stream = io.BufferedReader(ReaderStream(reader), _BUFFER_BYTES)
        self.keys: dict[str, Any] = {}
        self.tensors: list[GgufTensor] = []
        try:
            self._parse(kept_arrays)
        except BadCheckpoint:
            raise
        except (ValueError, struct.error, MemoryError, OverflowError) as error:
            raise BadCheckpoint(f"{reader.name} is damaged or no GGUF file: {error}") from error

    def _parse(self, kept_arrays: Container[str]) -> None:
        if self._read(len(_MAGIC)) != _MAGIC:
            raise BadCheckpoint(f"{self._name} is no GGUF file")
        version = self._number(_UINT32)
        if version not in _VERSIONS:
            raise BadCheckpoint(
                f"{self._name} is GGUF of version {version}: 2 and 3 can be read, little-endian"
            )
        tensor_count = self._count()
        key_count = self._count()
        for _ in range(key_count):
            key = self._short_text()
            type_number = self._number(_UINT32)
            self.keys[key] = self._value(type_number, key in kept_arrays)
        table = [self._table_row() for _ in range(tensor_count)]
        alignment = self.keys.get("general.alignment", _DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or not 0 < alignment <= _MAX_ALIGNMENT:
            raise ValueError(f"its alignment is {alignment}")
        # Offsets in the table count from the first aligned byte after it.
        data_start = -(-self._stream.tell() // alignment) * alignment  # rounded up
        for name, type_number, shape, offset in table:
            self.tensors.append(GgufTensor(name, type_number, shape, data_start + offset))

    def _table_row(self) -> tuple[str, int, tuple[int, ...], int]:
        name = self._short_text()
        dimensions = self._number(_UINT32)
        if dimensions > _MAX_DIMENSIONS:
            raise ValueError(f"{name} has {dimensions} dimensions")
        sizes = [self._number(_UINT64) for _ in range(dimensions)]
        type_number = self._number(_UINT32)
        offset = self._number(_UINT64)
        # llama.cpp names the fastest dimension first, PyTorch last.
        return name, type_number, tuple(reversed(sizes)), offset

    def _check_left(self, count: int) -> None:
        if count > self._size - self._stream.tell():
            raise BadCheckpoint(
                f"{self._name} is cut off at byte {self._size:,}; download it again"
            )

    def _read(self, count: int) -> bytes:
        self._check_left(count)
        return self._stream.read(count)

    def _skip(self, count: int) -> None:
        self._check_left(count)
        self._stream.seek(count, io.SEEK_CUR)

    def _number(self, number: struct.Struct) -> Any:
        return number.unpack(self._read(number.size))[0]

    def _count(self) -> int:
        count = int(self._number(_UINT64))
        if count > _MAX_ITEMS:
            raise ValueError(f"it claims to have {count:,} tensors or keys")
        return count

    def _short_text(self) -> str:
        length = self._number(_UINT64)
        if length > _MAX_TEXT:
            raise ValueError(f"a name of {length:,} characters")
        return self._read(length).decode(errors="replace")

    def _value(self, type_number: int, is_kept: bool, depth: int = 0) -> Any:
        """Return a number, a text, a list for an array that is kept, or None for another."""
        if type_number in _NUMBERS:
            return self._number(_NUMBERS[type_number])
        if type_number == _STRING:
            return self._text(is_kept=is_kept or depth == 0)
        if type_number != _ARRAY or depth >= _MAX_ARRAY_DEPTH:
            raise ValueError(f"a value of the type {type_number}")
        item_type = self._number(_UINT32)
        count = self._number(_UINT64)
        # An item of a text or an array has bytes of its own: there are no more than bytes.
        is_endless = item_type not in _NUMBERS and count > self._size
        if is_endless or (is_kept and count > _MAX_ITEMS):
            raise ValueError(f"an array of {count:,}")
        if is_kept:
            return [self._value(item_type, is_kept, depth + 1) for _ in range(count)]
        if item_type in _NUMBERS:
            self._skip(count * _NUMBERS[item_type].size)
        else:
            for _ in range(count):
                self._value(item_type, is_kept, depth + 1)
        return None

    def _text(self, *, is_kept: bool) -> str | None:
        length = self._number(_UINT64)
        if is_kept and length <= _MAX_TEXT:
            return self._read(length).decode(errors="replace")
        self._skip(length)
        return None


def head_counts(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Return the number of heads as config.json names it, where all layers have equally many."""
    counts = {}
    for key, config_key in _CONFIG_KEYS.items():
        if not key.startswith("attention.head_count"):
            continue
        values = [value for name, value in keys.items() if name.endswith(f".{key}")]
        if len(values) == 1 and isinstance(values[0], int):
            counts[config_key] = values[0]
    return counts


def model_config(
    keys: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]
) -> tuple[dict[str, Any], str]:
    """Return the config of the model, and an empty string or why no model can be built.

    Without a model, the config says how many heads there are, and no more.
    """
    family = keys.get("general.architecture")
    if family not in _CLASSES:
        families = ", ".join(_CLASSES)
        reason = f"of the architecture {family!r}, and those that are known are {families}"
        return head_counts(keys), reason
    settings = {}
    for key, value in keys.items():
        if key.startswith(f"{family}."):
            settings[key.removeprefix(f"{family}.")] = value
    missing_key = _missing_key(settings)
    if missing_key:
        reason = f"and its header does not tell {family}.{missing_key}, or not for all layers"
        return head_counts(keys), reason
    config: dict[str, Any] = {}
    for key, config_key in _CONFIG_KEYS.items():
        config[config_key] = settings[key]
    # Llama turns all dimensions of a head, so that older files name their number only there.
    head_size = settings.get(_KEY_SIZE)
    if not head_size and family == "llama":
        head_size = settings.get(_ROTARY_SIZE)
    if not head_size:
        head_size = config["hidden_size"] // config["num_attention_heads"]
    reason = _ignored_content(str(family), settings, head_size, shapes)
    if reason:
        return head_counts(keys), reason
    rotary_base = float(settings.get(_ROTARY_BASE) or 10_000.0)
    config |= {
        "model_type": family,
        "architectures": [_CLASSES[family]],
        "head_dim": head_size,
        "rms_norm_eps": settings[_EPSILON],
        "vocab_size": shapes["token_embd.weight"][0],
        "rope_parameters": {"rope_type": "default", "rope_theta": rotary_base},
        # llama.cpp writes the head only if it is not the embedding.
        "tie_word_embeddings": "output.weight" not in shapes,
    }
    return config, ""


def _missing_key(settings: Mapping[str, Any]) -> str:
    for key in _CONFIG_KEYS:
        value = settings.get(key)
        if not isinstance(value, int) or value <= 0:
            return key
    if not isinstance(settings.get(_EPSILON), float):
        return _EPSILON
    return ""


def _ignored_content(
    family: str, settings: Mapping[str, Any], head_size: Any, tensors: Iterable[str]
) -> str:
    """Return what the model would be built without, or an empty string."""
    ignored_keys = sorted(settings.keys() - _UNDERSTOOD_KEYS)
    if ignored_keys:
        key = ignored_keys[0]
        return f"and its header has {family}.{key} = {settings[key]}, which no model here heeds"
    scaling = settings.get(_ROTARY_SCALING)
    if scaling not in (None, "none"):
        return f"and its rotary frequencies are scaled ({scaling})"
    for key in (_ROTARY_SIZE, _KEY_SIZE, _VALUE_SIZE):
        if settings.get(key) not in (None, head_size):
            return "and the parts of its heads have different sizes"
    understood = {
        "weight": _UNDERSTOOD_WEIGHTS,
        "bias": _UNDERSTOOD_BIASES.get(family, frozenset()),
    }
    names = sorted(tensors)
    for name in names:
        in_layer = name
        if name.startswith("blk."):  # blk.3.attn_q.weight
            in_layer = name.split(".", 2)[-1]
        part, _, kind = in_layer.rpartition(".")
        if part not in understood.get(kind, frozenset()):
            return f"and it has the tensor {name}, which no model here heeds"
    if "token_embd.weight" not in names:
        return "and it has no tensor token_embd.weight"
    return ""


class GgufTokenizer:
    """The tokenizer inside a GGUF file, made from its words by transformers."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader

    @cached_property
    def _content(self) -> tuple[str, dict[str, Any]]:
        """The architecture, and the keys that describe the words."""
        arrays = {_TOKENIZER_PREFIX + key for key in _TOKENIZER_KEYS}
        keys = GgufHeader(self._reader, arrays).keys
        content = {}
        for key, name in _TOKENIZER_KEYS.items():
            value = keys.get(_TOKENIZER_PREFIX + key)
            if value is not None:
                content[name] = value
        words = content.get("tokens")
        if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
            raise BadCheckpoint(f"there is no tokenizer in {self._reader.name}: {_OTHER_TOKENIZER}")
        return str(keys.get("general.architecture")), content

    @property
    def digest(self) -> str:
        """SHA-256 of what it is made from."""
        return hashlib.sha256(json.dumps(self._content).encode()).hexdigest()

    def load(self) -> Any:
        """Return the tokenizer."""
        transformers = transformers_library()
        architecture, content = self._content
        try:
            from transformers.integrations.gguf import gguf_tokenizer_mapping as conversion

            with quiet():
                tokenizer, _ = conversion.convert_gguf_tokenizer(architecture, content)
                splits: Mapping[str, Any] = conversion.GGUF_PRE_TOKENIZER_SPLITS
        except Exception as error:  # words and merges of a file can make it fail in any way
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise BadCheckpoint(
                f"the tokenizer in {self._reader.name} cannot be made: {reason}. {_OTHER_TOKENIZER}"
            ) from error
        split = content.get("pre_tokenizer_type")
        if split in _SPLIT_DIGITS:
            from tokenizers import pre_tokenizers

            tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
                [
                    pre_tokenizers.Digits(individual_digits=True),
                    pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
                ]
            )
        elif content.get("tokenizer_type") == "gpt2" and split not in (*_SPLIT_AS_GPT2, *splits):
            raise BadCheckpoint(
                f"{self._reader.name} splits texts as {split!r} does, which is not known here: "
                f"{_OTHER_TOKENIZER}"
            )
        return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer)
