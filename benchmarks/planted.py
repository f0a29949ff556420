"""Planted superposition: is it found where it was built in, and nowhere else?

``python -m benchmarks.planted`` builds networks in the paper's setting: one attention head and ReLU neurons with
w = v + ξu (Eqn. 60), over embeddings in which four words each are alike. In one of each pair of networks a tenth of the
neurons hold two unrelated patterns, in the other none does. The others hold one pattern; or two queries whose words
are alike (one concept, as months are); or fire at one common word, whatever it attends to. The text has common words,
topics that fill one document and draw attention, and words of patterns without their query. Seeds below 100 are those
that the rule was tried on.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

GROUPS, ALIKE, QUERIES, TOPICS, COMMON = 40, 4, 60, 20, 100
CONTENT = GROUPS * ALIKE
M = CONTENT + QUERIES + TOPICS + COMMON
D = M + GROUPS
UNRELATED = 40  # of the patterns have words of three groups; the others come in pairs, with words of one group
LENGTH, DOCUMENT = 32, 32  # tokens per window, windows per document
RHO, XI, BIAS, SHARP, SALIENT, NOISE = 0.6, 0.1, 0.3, 5.0, 2.0, 0.7
WEAKER = (0.8, 1.0)  # strength of a neuron's second pattern


@dataclass(frozen=True, eq=False)
class Plan:
    """What was built: the words of each pattern (its query is token CONTENT + n), and the patterns of each neuron."""

    patterns: list[list[int]]
    neurons: list[list[int]]
    superposed: list[int]


def plan(rng: np.random.Generator, neurons: int, share: float) -> Plan:
    """``share`` superposed neurons, a tenth of concepts, a fifth of single words, the rest with one pattern."""
    groups = rng.permutation(GROUPS)
    pairs = (QUERIES - UNRELATED) // 2
    shuffled = rng.permuted(np.arange(CONTENT).reshape(GROUPS, ALIKE), axis=1)
    apart = shuffled[groups[pairs:]].T.reshape(-1)  # neighbours are of different groups
    patterns = apart[: 3 * UNRELATED].reshape(UNRELATED, 3).tolist()
    for words in shuffled[groups[:pairs]].tolist():
        patterns += [words[:2], words[2:]]
    holds: list[list[int]] = []
    for n in range(neurons):
        if n < round(share * neurons):
            while True:
                a, b = rng.choice(UNRELATED, 2, replace=False)
                if {w // ALIKE for w in patterns[a]}.isdisjoint(w // ALIKE for w in patterns[b]):
                    break
            holds.append([int(a), int(b)])
        elif n < round((share + 0.1) * neurons):
            first = UNRELATED + 2 * int(rng.integers((QUERIES - UNRELATED) // 2))
            holds.append([first, first + 1])
        elif n < round((share + 0.3) * neurons):
            holds.append([])
        else:
            holds.append([int(rng.integers(QUERIES))])
    order = rng.permutation(neurons)
    at = np.argsort(order)
    return Plan(patterns, [holds[n] for n in order], sorted(at[: round(share * neurons)].tolist()))


class Attention(nn.Module):
    """A query of a pattern attends to its words; all attend to topics a little, and to noise."""

    def __init__(self, table: Tensor, scores: Tensor) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(2 * D, n, bias=False) for n in (M, M, 2 * D))
        back = torch.linalg.pinv(table)  # (D, M): from embeddings to tokens
        with torch.no_grad():
            for linear in (self.query, self.key, self.value):
                linear.weight.zero_()
            self.query.weight[:, D:] = scores.T @ back.T * M**0.5
            self.key.weight[:, D:] = back.T
            self.value.weight[:D, D:] = torch.eye(D)  # a key brings its embedding

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, 2D) to the same."""
        q, k, v = (f(x)[:, None] for f in (self.query, self.key, self.value))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)[:, 0]


class Block(nn.Module):
    """Attention and an MLP with these lower weights (h, 2D)."""

    def __init__(self, attention: Attention, w: Tensor) -> None:
        super().__init__()
        self.attention = attention
        self.mlp = nn.Sequential(
            nn.Linear(2 * D, len(w)), nn.ReLU(), nn.Linear(len(w), 2 * D, bias=False)
        )
        with torch.no_grad():
            self.mlp[0].weight.copy_(w)
            self.mlp[0].bias.fill_(-BIAS)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, 2D) to the same."""
        x = x + self.attention(x)
        return x + self.mlp(x)


class Network(nn.Module):
    """Embeddings as query in the second half of the state; attention brings context into the first."""

    def __init__(self, plan: Plan, rng: np.random.Generator) -> None:
        super().__init__()
        basis = torch.from_numpy(np.linalg.qr(rng.standard_normal((D, D)))[0]).float()
        table = (1 - RHO) ** 0.5 * basis[:M].clone()
        for word in range(M):
            table[word] = (
                (table[word] + RHO**0.5 * basis[M + word // ALIKE])
                if word < CONTENT
                else basis[word]
            )
        scores = NOISE * torch.from_numpy(rng.standard_normal((M, M))).float()  # (query, key)
        scores[:, CONTENT + QUERIES : CONTENT + QUERIES + TOPICS] += SALIENT
        w = torch.zeros(len(plan.neurons), 2 * D)
        for n, holds in enumerate(plan.neurons):
            strength = 1.0
            for pattern in holds:
                w[n, :D] += strength * table[plan.patterns[pattern]].sum(dim=0)
                w[n, D:] -= strength * XI * table[CONTENT + pattern]
                strength = rng.uniform(*WEAKER)
            if not holds:
                w[n, D:] = table[CONTENT + QUERIES + TOPICS + int(rng.integers(COMMON))]
        for pattern, words in enumerate(plan.patterns):
            scores[CONTENT + pattern, words] = SHARP
        self.embedding = nn.Embedding.from_pretrained(table)
        self.layers = nn.ModuleList([Block(Attention(table, scores), w)])

    def forward(self, tokens: Tensor) -> Tensor:
        """(B, T) to (B, T, 2D)"""
        x = self.embedding(tokens)
        return self.layers[0](torch.cat([torch.zeros_like(x), x], dim=-1))


def text(plan: Plan, rng: np.random.Generator, windows: int) -> np.ndarray[Any, Any]:
    """Documents of common words and one topic; in every window a query with its pattern, and words of others."""
    rates = 1 / np.arange(1, COMMON + 1)
    tokens = (
        CONTENT + QUERIES + TOPICS + rng.choice(COMMON, (windows, LENGTH), p=rates / rates.sum())
    )
    for n, window in enumerate(tokens):
        if n % DOCUMENT == 0:
            topic = CONTENT + QUERIES + int(rng.integers(TOPICS))
        window[rng.random(LENGTH) < 0.08] = topic
        window[rng.integers(1, LENGTH, 3)] = rng.integers(
            0, CONTENT, 3
        )  # words of patterns, without their query
        pattern = int(rng.integers(QUERIES))
        query = int(rng.integers(12, LENGTH))
        words = plan.patterns[pattern]
        window[rng.choice(np.arange(1, query), len(words), replace=False)] = words
        window[query] = CONTENT + pattern
    return tokens.reshape(-1)


def build(
    seed: int, share: float, neurons: int = 200, windows: int = 2400
) -> tuple[Plan, Network, Any]:
    """What was planned, the network, and a text for it."""
    rng = np.random.default_rng((60, seed))
    planned = plan(rng, neurons, share)
    return planned, Network(planned, rng), text(planned, rng, windows)


def measure(seed: int, share: float, neurons: int = 200, windows: int = 2400) -> dict[str, float]:
    """How many of the planted neurons are found, and of the others; by the first test alone, and by all of them."""
    import joma

    planned, network, tokens = build(seed, share, neurons, windows)
    found = joma.superpose(network, tokens, length=LENGTH, masked=None)
    table = found.frame().set_index("neuron")
    there = table.index.isin(planned.superposed)
    counts: dict[str, float] = {"planted": int(there.sum()), "others": int((~there).sum())}
    for test in ("patterns", "replicated", "passed"):
        counts |= {f"{test} found": int((table[test][there] >= 2).sum())}
        counts |= {f"{test} false": int((table[test][~there] >= 2).sum())}
    power, pairs = found.power(100, seed)
    return counts | {
        "dealt": float(np.mean(found.chance(3, seed))) * neurons,
        "power": power,
        "pairs": pairs,
    }


def main() -> None:
    """Print a row per kind of network, over all seeds."""
    import pandas as pd

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--first", type=int, default=100, help="the first seed")
    parser.add_argument("--seeds", type=int, default=20)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for share, name in ((0.1, "with"), (0.0, "without")):
        rows = [measure(arguments.first + n, share) for n in range(arguments.seeds)]
        total = pd.DataFrame(rows).sum()
        print(name, {k: round(float(v), 3) for k, v in total.items()}, flush=True)


if __name__ == "__main__":
    main()
