"""A block built by hand in the paper's setting: orthonormal embeddings, one attention head, ReLU neurons.

Tokens are one-hot. Of a token l, dimension l is its embedding as context (what values carry), dimension M + l its
embedding as query (what the residual carries). A query m attends to its own pattern and nothing else; the neurons are
w = v₁ − ξ₁u₁ + v₂ − ξ₂u₂ (both patterns), and each pattern alone.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

M = 60
FIRST, SECOND = (1, 2, 3), (4, 5, 6)  # the tokens of the two patterns
QUERIES = (7, 8)
FILLER = range(10, M)
XI = 0.3


class Attention(nn.Module):
    def __init__(self, sharpness: float) -> None:
        super().__init__()
        self.query, self.key, self.value = (
            nn.Linear(2 * M, n, bias=False) for n in (2 * M, 2 * M, 2 * M)
        )
        wanted = torch.zeros(M, M)  # (query token, key token)
        for query, tokens in zip(QUERIES, (FIRST, SECOND), strict=True):
            wanted[query, list(tokens)] = sharpness * (2 * M) ** 0.5
        with torch.no_grad():
            for linear in (self.query, self.key, self.value):
                linear.weight.zero_()
            self.query.weight[:M, M:] = wanted.T
            self.key.weight[:M, M:] = torch.eye(M)
            self.value.weight[:M, M:] = torch.eye(M)  # a key brings its context embedding

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x)[:, None] for f in (self.query, self.key, self.value))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)[:, 0]


class Block(nn.Module):
    def __init__(self, sharpness: float) -> None:
        super().__init__()
        self.attention = Attention(sharpness)
        self.mlp = nn.Sequential(
            nn.Linear(2 * M, 4 * M, bias=False), nn.ReLU(), nn.Linear(4 * M, 2 * M, bias=False)
        )
        w = torch.zeros(4 * M, 2 * M)
        for neuron, patterns in ((0, (0, 1)), (1, (0,)), (2, (1,))):
            for n in patterns:
                w[neuron, list((FIRST, SECOND)[n])] = 1.0  # v
                w[neuron, M + QUERIES[n]] = -XI  # the negative bias of its query
        with torch.no_grad():
            self.mlp[0].weight.copy_(w)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x)
        return x + self.mlp(x)


class Planted(nn.Module):
    def __init__(self, sharpness: float = 8.0) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(sharpness)])

    def forward(self, tokens: Tensor) -> Tensor:
        x = F.one_hot(tokens, M).float()
        x = torch.cat([torch.zeros_like(x), x], dim=-1)  # as query; attention brings the context
        return self.layers[0](x)


def corpus(windows: int, length: int, seed: int) -> np.ndarray:
    """Windows of filler; in two thirds of them a pattern, two of its three tokens, and its query at the end."""
    rng = np.random.default_rng(seed)
    text = rng.choice(np.array(FILLER), (windows, length))
    for n, window in enumerate(text):
        if n % 3 < 2:
            places = rng.choice(np.arange(2, length - 4), 2, replace=False)
            window[places] = rng.choice((FIRST, SECOND)[n % 3], 2, replace=False)
            window[length - 3] = QUERIES[n % 3]
    return text.reshape(-1)
