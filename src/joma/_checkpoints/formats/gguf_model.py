"""The model in a GGUF file: a config as transformers knows it, and its tokenizer.

The families are those whose tensors and keys are all understood here. For others, and where a key
or a tensor would be ignored (scaled rotary frequencies, windows of attention, experts), no model is
built: it would run, and be another model. transformers builds configs from GGUF files, too; it
ignores the keys that it does not know. Its conversion of tokenizers is used.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any

from joma._checkpoints.formats.gguf_header import GgufHeader
from joma._checkpoints.reading import BadCheckpoint, Reader
from joma._data.pretrained import quiet, transformers_library

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
        in_layer = name.split(".", 2)[-1] if name.startswith("blk.") else name
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
        """The architecture, and what the header says about words."""
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
