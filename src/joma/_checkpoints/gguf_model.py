"""What a GGUF file says of its model: a config as transformers knows it, and its tokenizer.

Families are those whose tensors and keys are all known here. Of others, and where a key or a tensor says something that
would go unheeded (scaled rotary frequencies, windows of attention, experts), no model is built: it would run and be
another one.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any

from joma._checkpoints.gguf_header import Header
from joma._checkpoints.reading import BadCheckpoint, Reader
from joma._data.pretrained import quiet, transformers_library

_FAMILIES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_WHOLE = {  # llama.cpp's keys -> those of config.json
    "block_count": "num_hidden_layers", "embedding_length": "hidden_size", "feed_forward_length": "intermediate_size",
    "context_length": "max_position_embeddings", "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
}  # fmt: skip
_EPSILON, _THETA, _ROTATED = (
    "attention.layer_norm_rms_epsilon",
    "rope.freq_base",
    "rope.dimension_count",
)
_KEY, _VALUE, _WORDS, _SCALING = (
    "attention.key_length",
    "attention.value_length",
    "vocab_size",
    "rope.scaling.type",
)
_HEEDED = {*_WHOLE, _EPSILON, _THETA, _ROTATED, _KEY, _VALUE, _WORDS, _SCALING}
_TENSORS = {
    "token_embd", "output", "output_norm", "attn_norm", "ffn_norm", "attn_q", "attn_k", "attn_v", "attn_output",
    "attn_q_norm", "attn_k_norm", "ffn_gate", "ffn_up", "ffn_down",
}  # fmt: skip
_BIASES = {"qwen2": {"attn_q", "attn_k", "attn_v"}}
_TOKENIZER = {  # keys of the header -> what transformers calls them
    "model": "tokenizer_type", "pre": "pre_tokenizer_type", "tokens": "tokens", "scores": "scores",
    "token_type": "token_type", "merges": "merges", "bos_token_id": "bos_token_id", "eos_token_id": "eos_token_id",
    "unknown_token_id": "unk_token_id", "padding_token_id": "pad_token_id", "add_space_prefix": "add_prefix_space",
}  # fmt: skip
_OTHER = "name another with --tokenizer FOLDER or ID (tokenizer= in Python)"
_GPT2 = (
    "gpt-2",
    "mpt",
    "olmo",
)  # ways to split a text before its bytes are merged, by llama.cpp's names
_DIGITS = ("smollm", "starcoder", "refact", "command-r")  # as GPT-2, and each digit by itself


def heads_of(keys: Mapping[str, Any]) -> dict[str, Any]:
    """How many heads there are, where all layers have equally many."""
    found = {
        "num_attention_heads": [v for k, v in keys.items() if k.endswith(".attention.head_count")],
        "num_key_value_heads": [
            v for k, v in keys.items() if k.endswith(".attention.head_count_kv")
        ],
    }
    return {
        name: values[0]
        for name, values in found.items()
        if len(values) == 1 and isinstance(values[0], int)
    }


def model_config(
    keys: Mapping[str, Any], tensors: Mapping[str, tuple[int, ...]]
) -> tuple[dict[str, Any], str]:
    """The config of the model, and why none can be built (then it tells of heads alone)."""
    family = keys.get("general.architecture")
    if family not in _FAMILIES:
        return heads_of(
            keys
        ), f"of the architecture {family!r}, and those that are known are {', '.join(_FAMILIES)}"
    said = {
        key.removeprefix(f"{family}."): value
        for key, value in keys.items()
        if key.startswith(f"{family}.")
    }
    config: dict[str, Any] = {theirs: said.get(ours) for ours, theirs in _WHOLE.items()}
    missing = [key for key, theirs in _WHOLE.items() if not _positive(config[theirs])]
    missing += [_EPSILON] * (not isinstance(said.get(_EPSILON), float))
    if missing:
        return heads_of(
            keys
        ), f"and its header does not tell {family}.{missing[0]}, or not for all layers"
    width = config["hidden_size"] // config["num_attention_heads"]
    size = said.get(_KEY) or (said.get(_ROTATED) if family == "llama" else None) or width
    if why := _unheeded(str(family), said, size, tensors):
        return heads_of(keys), why
    config |= {
        "model_type": family, "architectures": [_FAMILIES[family]], "head_dim": size,
        "rms_norm_eps": said[_EPSILON], "vocab_size": tensors["token_embd.weight"][0],
        "rope_parameters": {"rope_type": "default", "rope_theta": float(said.get(_THETA) or 10_000.0)},
        "tie_word_embeddings": "output.weight" not in tensors,
    }  # fmt: skip
    return config, ""


def _positive(value: Any) -> bool:
    return isinstance(value, int) and value > 0


def _unheeded(family: str, said: Mapping[str, Any], size: Any, tensors: Iterable[str]) -> str:
    """What the model would be built without."""
    tensors = set(tensors)
    if other := sorted(said.keys() - _HEEDED):
        return (
            f"and its header has {family}.{other[0]} = {said[other[0]]}, which no model here heeds"
        )
    if said.get(_SCALING) not in (None, "none"):
        return f"and its rotary frequencies are scaled ({said[_SCALING]})"
    if any(said.get(key) not in (None, size) for key in (_ROTATED, _KEY, _VALUE)):
        return "and the parts of its heads have different sizes"
    for name in sorted(tensors):
        part, _, kind = (
            name.split(".", 2)[-1].rpartition(".")
            if name.startswith("blk.")
            else name.rpartition(".")
        )
        if part not in (
            _TENSORS if kind == "weight" else _BIASES.get(family, ()) if kind == "bias" else ()
        ):
            return f"and it has the tensor {name}, which no model here heeds"
    return "" if "token_embd.weight" in tensors else "and it has no tensor token_embd.weight"


class OwnTokenizer:
    """The tokenizer inside a GGUF file, made from its words by transformers."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader

    @cached_property
    def _content(self) -> tuple[str, dict[str, Any]]:
        """The architecture, and what the header says of words."""
        front = "tokenizer.ggml."
        keys = Header(self._reader, {front + key for key in _TOKENIZER}).keys
        content = {
            name: keys[front + key]
            for key, name in _TOKENIZER.items()
            if keys.get(front + key) is not None
        }
        if not isinstance(words := content.get("tokens"), list) or not all(
            isinstance(w, str) for w in words
        ):
            raise BadCheckpoint(f"there is no tokenizer in {self._reader.name}: {_OTHER}")
        return str(keys.get("general.architecture")), content

    @property
    def digest(self) -> str:
        """SHA-256 of what it is made from."""
        return hashlib.sha256(json.dumps(self._content).encode()).hexdigest()

    def load(self) -> Any:
        """The tokenizer."""
        transformers = transformers_library()
        architecture, content = self._content
        try:
            from transformers.integrations.gguf import gguf_tokenizer_mapping as theirs

            with quiet():
                made, _ = theirs.convert_gguf_tokenizer(architecture, content)
                splits: Mapping[str, Any] = theirs.GGUF_PRE_TOKENIZER_SPLITS
        except (
            Exception
        ) as error:  # whatever words and merges that do not belong together make it do
            said = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise BadCheckpoint(
                f"the tokenizer in {self._reader.name} cannot be made: {said}. {_OTHER}"
            ) from error
        pre = content.get("pre_tokenizer_type")
        if pre in _DIGITS:
            from tokenizers import pre_tokenizers

            made.pre_tokenizer = pre_tokenizers.Sequence(
                [
                    pre_tokenizers.Digits(individual_digits=True),
                    pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
                ]
            )
        elif content.get("tokenizer_type") == "gpt2" and pre not in (*_GPT2, *splits):
            raise BadCheckpoint(
                f"{self._reader.name} splits texts as {pre!r} does, which is not known here: {_OTHER}"
            )
        return transformers.PreTrainedTokenizerFast(tokenizer_object=made)
