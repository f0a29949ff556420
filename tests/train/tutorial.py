"""The language model and the loop of PyTorch's tutorial, written plainly: what `joma train` is compared with.

Sequence first, an additive mask, full logits, one optimiser per epoch if asked for, and the short window at the end.
Nothing of joma's is used.
"""

import math
from dataclasses import dataclass, field

import torch
from torch import nn


class TutorialModel(nn.Module):
    """Parameters are made in the tutorial's order."""

    def __init__(self, words, d, heads, hidden, layers, dropout):
        super().__init__()
        layer = nn.TransformerEncoderLayer(d, heads, hidden, dropout)
        self.transformer_encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.encoder = nn.Embedding(words, d)
        self.decoder = nn.Linear(d, words)
        self.drop = nn.Dropout(dropout)
        self.encoder.weight.data.uniform_(-0.1, 0.1)
        self.decoder.bias.data.zero_()
        self.decoder.weight.data.uniform_(-0.1, 0.1)

    def embedded(self, x):  # (T, B) -> (T, B, d)
        T, d = len(x), self.encoder.embedding_dim
        position = torch.arange(T).unsqueeze(1)
        rate = torch.exp(torch.arange(0, d, 2) * (-math.log(10000.0) / d))
        table = torch.zeros(T, 1, d)
        table[:, 0, 0::2] = torch.sin(position * rate)
        table[:, 0, 1::2] = torch.cos(position * rate)
        return self.drop(self.encoder(x) * math.sqrt(d) + table)

    def forward(self, x):
        return self.decoder(self.transformer_encoder(self.embedded(x), mask(len(x))))

    @torch.no_grad()
    def entropies(self, x):
        """Of every layer's attention, the mean over queries, sequences and heads."""
        self.eval()
        h, found = self.embedded(x), []
        for layer in self.transformer_encoder.layers:
            _, weights = layer.self_attn(
                h, h, h, attn_mask=mask(len(x)), average_attn_weights=False
            )
            found.append(float(-(weights * weights.clamp_min(1e-30).log()).sum(-1).mean()))
            h = layer(h, src_mask=mask(len(x)))
        return found

    def stable_ranks(self):
        """‖W‖_F² / ‖W‖₂² of every layer's lower MLP matrix, by its singular values."""
        squares = [
            torch.linalg.svdvals(layer.linear1.weight.detach().double()) ** 2
            for layer in self.transformer_encoder.layers
        ]
        return [float(s.sum() / s[0]) for s in squares]


def mask(T):
    return torch.triu(torch.full((T, T), -math.inf), diagonal=1)


def batchify(tokens, streams):
    """(n,) -> (n // streams, streams)."""
    rows = len(tokens) // streams
    return (
        torch.as_tensor(tokens[: rows * streams].astype("int64"))
        .view(streams, rows)
        .t()
        .contiguous()
    )


@dataclass
class Trained:
    losses: list = field(default_factory=list)
    entropies: dict = field(default_factory=dict)  # by step
    stable_ranks: dict = field(default_factory=dict)


def train_tutorial(
    model,
    data,
    probe,
    *,
    steps,
    length,
    lr,
    clip=0.5,
    fresh_adam=False,
    short_window=False,
    every=1,
):
    """Train on data (rows, streams); measure attention on probe (T, B)."""
    done = Trained()
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    while len(done.losses) < steps:
        if fresh_adam:
            optimizer = torch.optim.Adam(model.parameters(), lr=lr)
        for i in range(0, len(data) - 1, length):
            T = min(length, len(data) - 1 - i)
            if len(done.losses) == steps or (length > T and not short_window):
                break
            model.train()
            logits = model(data[i : i + T])
            loss = nn.functional.cross_entropy(
                logits.flatten(0, 1), data[i + 1 : i + 1 + T].reshape(-1)
            )
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            done.losses.append(float(loss.detach()))
            if len(done.losses) % every == 0:
                done.entropies[len(done.losses)] = model.entropies(probe)
                done.stable_ranks[len(done.losses)] = model.stable_ranks()
    return done
