"""nanoGPT: the model and the training step that the costs of a watch are compared with."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

VOCABULARY = 65  # characters of Shakespeare's plays


@dataclass(frozen=True)
class Shape:
    """The size of a nanoGPT, and of its batches."""

    layers: int
    heads: int
    width: int
    samples: int
    length: int


# The model of nanoGPT's `config/train_shakespeare_char.py`, 10.7M parameters, in shorter batches.
SHAKESPEARE = Shape(layers=6, heads=6, width=384, samples=4, length=128)
TOY = Shape(layers=2, heads=4, width=64, samples=4, length=64)


class _Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.c_attn = nn.Linear(shape.width, 3 * shape.width, bias=False)
        self.c_proj = nn.Linear(shape.width, shape.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.shape
        q, k, v = self.c_attn(x).split(C, dim=2)  # (B, T, C) each
        q = q.view(B, T, self.heads, C // self.heads).transpose(1, 2)  # (B, H, T, C / H)
        k = k.view(B, T, self.heads, C // self.heads).transpose(1, 2)
        v = v.view(B, T, self.heads, C // self.heads).transpose(1, 2)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(attended.transpose(1, 2).contiguous().view(B, T, C))


class _MLP(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.c_fc = nn.Linear(width, 4 * width, bias=False)
        self.gelu = nn.GELU()
        self.c_proj = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(self.gelu(self.c_fc(x)))


class _Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(shape.width, bias=False)
        self.attn = _Attention(shape)
        self.ln_2 = nn.LayerNorm(shape.width, bias=False)
        self.mlp = _MLP(shape.width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class NanoGPT(nn.Module):
    """Token and position embeddings, blocks with causal attention, and a head tied to the first."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.wte = nn.Embedding(VOCABULARY, shape.width)
        self.wpe = nn.Embedding(shape.length, shape.width)
        self.h = nn.ModuleList(_Block(shape) for _ in range(shape.layers))
        self.ln_f = nn.LayerNorm(shape.width, bias=False)
        self.lm_head = nn.Linear(shape.width, VOCABULARY, bias=False)
        self.lm_head.weight = self.wte.weight
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits (B, T, V) of tokens (B, T)."""
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1]))
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))


class Training:
    """A nanoGPT in training: `step` makes one step on random characters.

    Attributes:
        model: the model.
        optimizer: AdamW as nanoGPT makes it on a processor.
        parameters: the number of parameters.
    """

    def __init__(self, shape: Shape) -> None:
        torch.manual_seed(0)
        self.model = NanoGPT(shape)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=1e-3, betas=(0.9, 0.99), weight_decay=0.1
        )
        self.parameters = sum(parameter.numel() for parameter in self.model.parameters())
        generator = torch.Generator().manual_seed(1)
        self._tokens = torch.randint(
            VOCABULARY, (shape.samples, shape.length + 1), generator=generator
        )

    def step(self) -> Tensor:
        """Make a step and return its loss."""
        logits = self.model(self._tokens[:, :-1])  # (B, T, V)
        loss = F.cross_entropy(logits.flatten(0, 1), self._tokens[:, 1:].flatten())
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()
