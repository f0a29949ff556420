"""Tiny random models of the usual families, in the precision asked for, and a loss on random data for each."""

from __future__ import annotations

from collections.abc import Callable

import torch
import transformers
from torch import nn
from torch.nn import functional

VOCABULARY, LENGTH, WIDTH = 61, 12, 16
_TEXT = {"vocab_size": VOCABULARY, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
_SIZE = {
    "hidden_size": WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
}


def gpt2() -> nn.Module:
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            n_positions=16, n_embd=WIDTH, n_layer=2, n_head=2, **dropout, **_TEXT
        )
    )


def neox() -> nn.Module:
    rope = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5}
    return transformers.GPTNeoXForCausalLM(
        transformers.GPTNeoXConfig(
            max_position_embeddings=16, rope_parameters=rope, **_SIZE, **_TEXT
        )
    )


def llama() -> nn.Module:
    size = {**_SIZE, "num_attention_heads": 4, "num_key_value_heads": 2}
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(max_position_embeddings=16, **size, **_TEXT)
    )


def opt() -> nn.Module:
    size = {key: value for key, value in _SIZE.items() if key != "intermediate_size"}
    return transformers.OPTForCausalLM(
        transformers.OPTConfig(
            ffn_dim=24, max_position_embeddings=16, word_embed_proj_dim=WIDTH, dropout=0.0, **size,
            **{**_TEXT, "pad_token_id": 1},
        )
    )  # fmt: skip


def bert() -> nn.Module:
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return transformers.BertForMaskedLM(
        transformers.BertConfig(
            max_position_embeddings=16, **dropout, **_SIZE, **{**_TEXT, "pad_token_id": 0}
        )
    )


def vit() -> nn.Module:
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return transformers.ViTForImageClassification(
        transformers.ViTConfig(image_size=8, patch_size=4, num_channels=1, **dropout, **_SIZE)
    )


def encoder(norm_first: bool = True) -> nn.Module:
    layer = nn.TransformerEncoderLayer(
        WIDTH, 2, 24, dropout=0.0, batch_first=True, norm_first=norm_first
    )
    return nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(WIDTH), enable_nested_tensor=False)


FAMILIES: dict[str, Callable[[], nn.Module]] = {
    "GPT-2": gpt2, "GPT-NeoX": neox, "Llama": llama, "OPT": opt, "BERT": bert, "ViT": vit,
    "nn.TransformerEncoder": encoder,
}  # fmt: skip


def make(family: str, dtype: torch.dtype = torch.float64, seed: int = 0) -> nn.Module:
    """A model away from special values: no bias zero, no scale one."""
    torch.manual_seed(seed)
    model = FAMILIES[family]().to(dtype).train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def batch(family: str, generator: torch.Generator, dtype: torch.dtype = torch.float64):
    """Inputs and targets; padding tokens occur."""

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    if family == "ViT":
        return normal(4, 1, 8, 8), torch.randint(0, 2, (4,), generator=generator)
    if family == "nn.TransformerEncoder":
        return normal(4, LENGTH, WIDTH), normal(4, LENGTH, WIDTH)
    tokens = torch.randint(0, VOCABULARY, (4, LENGTH), generator=generator)
    return tokens, torch.randint(0, VOCABULARY, (4 * LENGTH,), generator=generator)


def loss_of(family: str, model: nn.Module, data) -> torch.Tensor:
    inputs, targets = data
    if family == "nn.TransformerEncoder":
        return ((model(inputs) - targets) ** 2).mean()
    logits = model(inputs).logits
    return functional.cross_entropy(logits.flatten(0, -2), targets)
