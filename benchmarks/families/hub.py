"""Models of transformers: every class for text, sequence to sequence and images, with a tiny configuration."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.models.auto import modeling_auto

from benchmarks.families.measure import Case, Row, measure

VOCABULARY = 96
B = 3
LENGTH = 14
TARGET = 11  # tokens of a decoder; another number than those of its encoder
LARGEST = 20_000_000  # parameters

# What is set if a configuration has it. Other sizes stay as they are.
SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 40, "max_position_embeddings": 80, "head_dim": 8,
    "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 80, "n_inner": 40, "n_ctx": 80, "rotary_dim": 4,
    "d_model": 32, "d_ff": 40, "d_kv": 8, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4,
    "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 40, "decoder_ffn_dim": 40, "ffn_dim": 40, "word_embed_proj_dim": 32,
    "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 40, "emb_dim": 32, "embedding_size": 32,
    "num_local_experts": 3, "num_experts": 3, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "n_group": 1, "topk_group": 1,
    "n_shared_experts": 1, "first_k_dense_replace": 1,
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8,
    "sliding_window": 6, "image_size": 32, "patch_size": 8, "num_channels": 3,
    "type_vocab_size": 2, "relative_attention_num_buckets": 8, "ffn_hidden_size": 40, "multi_query_group_num": 2,
    "kv_channels": 8, "num_query_heads": 4, "rotary_pct": 1.0, "partial_rotary_factor": 0.5, "d_inner": 40,
    "hidden_dropout": 0.0, "attention_dropout": 0.0, "dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": 0, "decoder_start_token_id": 1, "use_cache": False, "classifier_dropout": 0.0,
    "num_kv_heads": 2, "mlp_hidden_size": 40, "decoder_hidden_size": 32, "decoder_num_hidden_layers": 2,
    "decoder_num_attention_heads": 4, "decoder_intermediate_size": 40, "mtp_num_layers": 0,
}  # fmt: skip
# Other settings, for classes that do not run with those above: latent attention has as many key heads as heads, and
# some derive the size of a head.
ALTERNATIVES: tuple[dict[str, Any], ...] = (
    {},
    {"num_key_value_heads": 4},
    {"head_dim": None},
    {"num_key_value_heads": 4, "head_dim": None},
    {"num_key_value_heads": 4, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "head_dim": 8},
    {"layer_types": None},
)
# Classes whose attentions are a part of those that they compute: prompts of 32 tokens are cut off. Their softmax is
# recorded instead.
CUT = {"CpmAntForCausalLM": 32}
HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads")
PADDINGS: tuple[str, ...] = ("none", "left", "right")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
KERNELS = ("sdpa", "eager")


def models() -> list[str]:
    """Return the names of all classes."""
    return list(_kinds())


def rows(name: str) -> Iterator[Row]:
    """Measure a class in all variants."""
    kind = _kinds()[name]
    paddings = PADDINGS
    if kind == "image":
        paddings = ("none",)
    for dtype in DTYPES:
        for kernel in KERNELS:
            for padding in paddings:
                variant = f"{kernel}, {dtype}, {padding}"
                arguments = (kind, name, kernel, dtype, padding)
                yield measure("transformers", name, variant, lambda v=arguments: _case(*v))


@cache
def _kinds() -> dict[str, str]:
    """Return class -> its kind of input; a class counts once."""
    tables = {
        "causal": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        "masked": modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
        "pair": modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
        "image": modeling_auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
    }
    kinds: dict[str, str] = {}
    for kind, table in tables.items():
        for value in table.values():
            names = value
            if isinstance(value, str):
                names = (value,)
            for name in names:
                if name not in kinds and _is_importable(name):
                    kinds[name] = kind
    return kinds


def _is_importable(name: str) -> bool:
    """False for classes that need a library which is not there."""
    try:
        return hasattr(transformers, name)
    except ImportError:
        return False


def _config(kind: type[Any], changes: dict[str, Any]) -> Any:
    """A tiny configuration: what of `SMALL` the class has, in itself and in the configurations inside it."""
    config_class = kind.config_class
    default = config_class()
    small = {key: value for key, value in (SMALL | changes).items() if value is not None}
    settings = {key: value for key, value in small.items() if hasattr(default, key)}
    names = inspect.signature(config_class.__init__).parameters
    if hasattr(default, "layer_types") and "layer_types" in names and "layer_types" not in changes:
        settings["layer_types"] = list(dict.fromkeys(default.layer_types or []))[:2] or None
        if settings["layer_types"] is not None and len(settings["layer_types"]) == 1:
            settings["layer_types"] *= 2
    for name in ("encoder", "decoder", "text_config", "vision_config"):
        inner = getattr(default, name, None)
        if isinstance(inner, transformers.PretrainedConfig):
            settings[name] = {key: value for key, value in small.items() if hasattr(inner, key)}
    return config_class(**settings)


@cache
def _changes(name: str, task: str) -> dict[str, Any]:
    """Return the first of the alternatives with which a class runs."""
    problems = []
    for changes in ALTERNATIVES:
        try:
            model = _build(name, "eager", torch.float32, changes)
            with torch.no_grad():
                model(**_inputs(task, "none", torch.float32)[0])
        except Exception as error:
            problems.append(f"{type(error).__name__}: {str(error)[:120]}")
        else:
            return changes
    raise ValueError("; ".join(dict.fromkeys(problems)))


def _build(name: str, kernel: str, dtype: torch.dtype, changes: dict[str, Any]) -> nn.Module:
    kind = getattr(transformers, name)
    config = _config(kind, changes)
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in kind._from_config(config).parameters())
    if size > LARGEST:
        raise ValueError(f"{size:,} parameters: the tiny settings do not reach this model")
    config = _config(kind, changes)
    torch.manual_seed(0)
    model = kind._from_config(config, attn_implementation=kernel)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            is_attention = any(word in key.lower() for word in ("attn", "attention"))
            if is_attention and parameter.dim() == 2:
                parameter.mul_(6)
    return model.to(dtype).eval()


def _real(length: int, padding: str) -> Tensor:
    """True (B, T) at real tokens."""
    lengths = torch.tensor([[length], [length - 4], [length - 7]])
    positions = torch.arange(length)
    if padding == "left":
        return positions >= length - lengths
    if padding == "right":
        return positions < lengths
    return torch.ones(B, length, dtype=torch.bool)


def _inputs(
    task: str, padding: str, dtype: torch.dtype
) -> tuple[dict[str, Tensor], dict[int, Tensor]]:
    """Return the arguments of a model, and by number of tokens which are real."""
    real: dict[int, Tensor] = {}
    generator = torch.Generator().manual_seed(1)
    if task == "image":
        return {"pixel_values": torch.randn(B, 3, 32, 32, generator=generator).to(dtype)}, real
    inputs = {"input_ids": torch.randint(3, VOCABULARY, (B, LENGTH), generator=generator)}
    real[LENGTH] = _real(LENGTH, padding)
    if padding != "none":
        inputs["attention_mask"] = real[LENGTH].long()
    if task == "pair":
        inputs["decoder_input_ids"] = torch.randint(3, VOCABULARY, (B, TARGET), generator=generator)
        real[TARGET] = _real(TARGET, padding)
        if padding != "none":
            inputs["decoder_attention_mask"] = real[TARGET].long()
    return inputs, real


def _case(task: str, name: str, kernel: str, dtype: str, padding: str) -> Case:
    changes = _changes(name, task)
    model = _build(name, kernel, DTYPES[dtype], changes)
    if task != "image" and model.config.is_encoder_decoder:
        # Without decoder arguments such a model shifts its input itself, and its decoder has no padding.
        task = "pair"
    config = model.config if task == "image" else model.config.get_text_config()
    heads = next(
        (getattr(config, key) for key in HEADS if isinstance(getattr(config, key, None), int)), None
    )
    inputs, real = _inputs(task, padding, DTYPES[dtype])
    more = {LENGTH + CUT.get(name, 0), LENGTH + 1}  # with prompts, or with a learned sink
    lengths = frozenset(range(2, 80) if task == "image" else more)

    def attentions() -> list[Tensor]:
        output = _build(name, "eager", torch.float32, changes)(**inputs, output_attentions=True)
        keys = ("attentions", "encoder_attentions", "decoder_attentions", "cross_attentions")
        tensors = [p for key in keys for p in (output.get(key) or ())]
        return [p for p in tensors if isinstance(p, Tensor) and p.dim() == 4]

    has_attentions = dtype == "float32" and name not in CUT
    return Case(
        model,
        lambda m: m(**inputs),
        heads,
        real,
        attentions if has_attentions else None,
        lengths,
        DTYPES[dtype],
    )
