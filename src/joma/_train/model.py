"""The paper's language model: an encoder of `nn.TransformerEncoderLayer`s under a causal mask.

It starts as the authors' does: PyTorch's own initialisation (linear layers uniform within ± 1/√fan_in, attention's
input projection by Xavier's rule), one layer drawn and then copied, as `nn.TransformerEncoder` does it. Parameters are
drawn in the order of PyTorch's language-model tutorial, on which their code is built: after
``torch.manual_seed(s + 2)`` the model is the one of their seed ``s``, to the bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from joma._train.settings import LayerStart


class LanguageModel(nn.Module):
    """Word embedding · √d + sinusoidal positions, Transformer layers, linear decoder.

    Arguments:
        words: size of the vocabulary.
        activation: "relu", "gelu", or "linear" for an MLP without one.
        init: embedding and decoder start uniform within ± this.
        start: of the layers, see `LayerStart`.
        length: the longest window.
    """

    def __init__(
        self, words: int, *, layers: int = 1, d: int = 200, hidden: int = 200, heads: int = 1, dropout: float = 0.2,
        activation: str = "relu", norm_first: bool = False, init: float = 0.1, start: str = "copied", length: int = 35,
    ) -> None:  # fmt: skip
        super().__init__()
        if d % heads:
            raise ValueError(f"the width d = {d} is not a multiple of {heads} heads")

        phi: str | Callable[[Tensor], Tensor] = activation
        if activation == "linear":
            phi = _as_it_is

        def layer() -> nn.TransformerEncoderLayer:
            return nn.TransformerEncoderLayer(
                d, heads, hidden, dropout, phi, norm_first=norm_first, batch_first=True
            )

        self.encoder = nn.TransformerEncoder(layer(), layers, enable_nested_tensor=False)
        if LayerStart(start) is not LayerStart.COPIED:
            self.encoder.layers = nn.ModuleList(
                [self.encoder.layers[0], *(layer() for _ in range(layers - 1))]
            )
        if LayerStart(start) is LayerStart.XAVIER:
            for parameter in self.encoder.parameters():
                if parameter.dim() > 1:
                    nn.init.xavier_uniform_(parameter)
        self.embed = nn.Embedding(words, d)
        self.decoder = nn.Linear(d, words)
        nn.init.uniform_(self.embed.weight, -init, init)
        nn.init.zeros_(self.decoder.bias)
        nn.init.uniform_(self.decoder.weight, -init, init)
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("positions", sinusoids(length, d), persistent=False)
        self.register_buffer(
            "mask", torch.ones(length, length, dtype=torch.bool).triu(1), persistent=False
        )  # True is hidden

    def encode(self, rows: Tensor) -> Tensor:
        """Return states (B, T, d) of embedded tokens (B, T, d)."""
        T = rows.shape[1]
        x = self.dropout(rows * math.sqrt(rows.shape[2]) + self.positions[:T])  # type: ignore[index]
        states: Tensor = self.encoder(x, mask=self.mask[:T, :T], is_causal=True)  # type: ignore[index]
        return states

    def forward(self, tokens: Tensor, project: bool = True) -> Tensor:
        """Return logits (B, T, words) of the next tokens; without ``project`` the states (B, T, d)."""
        states = self.encode(self.embed(tokens))
        if not project:
            return states
        logits: Tensor = self.decoder(states)
        return logits


def _as_it_is(rows: Tensor) -> Tensor:
    return rows


def sinusoids(length: int, d: int) -> Tensor:
    """Return sin and cos of positions at geometric frequencies, (length, d)."""
    position = torch.arange(length)[:, None]
    frequency = torch.exp(torch.arange(0, d, 2) * (-math.log(10000.0) / d))
    table = torch.zeros(length, d)
    table[:, 0::2] = torch.sin(position * frequency)
    table[:, 1::2] = torch.cos(position * frequency)[:, : d // 2]
    return table
