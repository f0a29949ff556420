"""The paper's language model: an encoder of `nn.TransformerEncoderLayer`s under a causal mask."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn


class LanguageModel(nn.Module):
    """Word embedding · √d + sinusoidal positions, Transformer layers, linear decoder."""

    def __init__(
        self, words: int, *, layers: int = 1, d: int = 200, hidden: int = 200, heads: int = 1, dropout: float = 0.2,
        activation: str = "relu", norm_first: bool = False, init: float = 0.1, length: int = 35,
    ) -> None:  # fmt: skip
        super().__init__()
        if d % heads:
            raise ValueError(f"the width d = {d} is not a multiple of {heads} heads")
        self.embed = nn.Embedding(words, d)
        self.dropout = nn.Dropout(dropout)
        layer = nn.TransformerEncoderLayer(
            d, heads, hidden, dropout, activation, norm_first=norm_first, batch_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        for parameter in self.encoder.parameters():  # TransformerEncoder copies one layer: start them apart
            if parameter.dim() > 1:
                nn.init.xavier_uniform_(parameter)
        self.decoder = nn.Linear(d, words)
        nn.init.uniform_(self.embed.weight, -init, init)
        nn.init.uniform_(self.decoder.weight, -init, init)
        nn.init.zeros_(self.decoder.bias)
        self.register_buffer("positions", sinusoids(length, d), persistent=False)
        self.register_buffer(
            "mask", torch.ones(length, length, dtype=torch.bool).triu(1), persistent=False
        )  # True is hidden

    def encode(self, rows: Tensor) -> Tensor:
        """States (B, T, d) from embedded tokens (B, T, d)."""
        T = rows.shape[1]
        x = self.dropout(rows * math.sqrt(rows.shape[2]) + self.positions[:T])  # type: ignore[index]
        states: Tensor = self.encoder(x, mask=self.mask[:T, :T], is_causal=True)  # type: ignore[index]
        return states

    def forward(self, tokens: Tensor, project: bool = True) -> Tensor:
        """Logits (B, T, words) of the next tokens; without ``project`` the states before the decoder."""
        states = self.encode(self.embed(tokens))
        return self.decoder(states) if project else states


def sinusoids(length: int, d: int) -> Tensor:
    """sin and cos of positions at geometric frequencies, (length, d)."""
    position = torch.arange(length)[:, None]
    frequency = torch.exp(torch.arange(0, d, 2) * (-math.log(10000.0) / d))
    table = torch.zeros(length, d)
    table[:, 0::2] = torch.sin(position * frequency)
    table[:, 1::2] = torch.cos(position * frequency)[:, : d // 2]
    return table
