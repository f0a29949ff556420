"""Which words attention turns to in training: the paper's language model, one layer, on text.

At a query (a place i of a window) the words before it, at j < i, are its context. Attention on the
query itself is left out and the rest scaled to 1. The *lift* of a word is the attention that it gets
in the mean over a sample, over what it would get if each query attended to its context evenly.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import stats
from torch import Tensor

from joma._data.corpora import corpus
from joma._train.model import LanguageModel
from joma._train.step import Stepper
from joma._train.windows import epoch, streams, window
from joma.theory.setting import Array

Index = NDArray[np.int64]
LEAST_PAIRS = 20  # context words of a query, for a correlation over them


@dataclass(frozen=True)
class EnteringSettings:
    """What is trained, and what is measured."""

    text: str
    vocabulary: int
    width: int
    length: int
    batch: int
    steps: int
    # Steps between measurements.
    every: int
    # Windows of validation text per stream.
    probe: int
    # Words that are followed as queries: the most frequent ones.
    queries: int
    # Places in the sample at which a word, or a word in the context of a query, must occur.
    least: int


@dataclass(frozen=True, eq=False)
class _Pairs:
    """All (query, context word) pairs of windows (n, T), one entry per pair of places."""

    row: Index
    i: Index
    j: Index
    query: Index
    word: Index

    @classmethod
    def of(cls, tokens: Index) -> _Pairs:
        """Return the pairs of these windows."""
        n, T = tokens.shape
        i, j = np.tril_indices(T, -1)
        row = np.repeat(np.arange(n), len(i))
        i = np.tile(i, n)
        j = np.tile(j, n)
        return cls(row, i, j, tokens[row, i], tokens[row, j])


class EnteringText:
    """A corpus with what is known of its words before training."""

    def __init__(self, settings: EnteringSettings) -> None:
        self.settings = settings
        text = corpus(settings.text, vocabulary=settings.vocabulary)
        self.size = text.size
        self.train = streams(text.train, settings.batch)
        windows = epoch(self.train, settings.length)
        train = np.concatenate([window(self.train, n, settings.length)[0] for n in range(windows)])
        self.counts = np.bincount(train.ravel(), minlength=self.size)
        unknown = text.tokeniser.encode("<unk>")[0]
        by_count = np.argsort(-self.counts, kind="stable")
        self.queries: Index = by_count[by_count != unknown][: settings.queries]
        self.number = np.full(self.size, -1)  # of each query, −1 for other words
        self.number[self.queries] = np.arange(len(self.queries))
        self.together = self._together(train)  # (Q, V)
        valid = streams(text.valid, settings.batch)
        count = min(settings.probe, epoch(valid, settings.length))
        self.probe = np.concatenate([window(valid, n, settings.length)[0] for n in range(count)])
        self.pairs = _Pairs.of(self.probe)
        # What each pair gets if every query attends to its context evenly.
        self.even = 1.0 / self.pairs.i
        occurrences = np.bincount(self.pairs.word, minlength=self.size)
        self.words = np.flatnonzero(occurrences >= settings.least)
        self.words = self.words[self.words != unknown]
        self.even_by_word = np.bincount(self.pairs.word, self.even, self.size)
        self.is_followed = self.number[self.pairs.query] >= 0
        self.cell = self._cells(self.pairs.query, self.pairs.word)[self.is_followed]
        cells = len(self.queries) * self.size
        self.even_by_cell = np.bincount(self.cell, self.even[self.is_followed], cells)
        counts = np.bincount(self.cell, minlength=cells).reshape(-1, self.size)
        counts[:, unknown] = 0
        self.is_measured = counts >= settings.least  # (Q, V)

    def _cells(self, query: Index, word: Index) -> Index:
        return self.number[query] * self.size + word

    def _together(self, tokens: Index) -> Array:
        """P(l | m): how often each word is in the context of each query, (Q, V)."""
        total = np.zeros(len(self.queries) * self.size)
        for distance in range(1, tokens.shape[1]):
            query = tokens[:, distance:].ravel()
            word = tokens[:, :-distance].ravel()
            is_followed = self.number[query] >= 0
            cells = self._cells(query[is_followed], word[is_followed])
            total += np.bincount(cells, minlength=len(total))
        by_query = total.reshape(len(self.queries), self.size)
        return by_query / by_query.sum(axis=1, keepdims=True)

    def measure(self, scores: Array) -> dict[str, float]:
        """Return entropy and rank correlations of attention with these scores (n, T, T) on the sample."""
        pairs = self.pairs
        share = _softmax(scores, diagonal=False)[pairs.row, pairs.i, pairs.j]
        lift = np.bincount(pairs.word, share, self.size)[self.words] / self.even_by_word[self.words]
        by_cell = np.bincount(self.cell, share[self.is_followed], len(self.even_by_cell))
        of_queries = []
        for m, is_measured in enumerate(self.is_measured):
            words = np.flatnonzero(is_measured)
            if len(words) >= LEAST_PAIRS:
                cells = m * self.size + words
                lift_of_query = by_cell[cells] / self.even_by_cell[cells]
                of_queries.append(_rank_correlation(lift_of_query, self.together[m, words]))
        if not of_queries:
            raise ValueError(
                f"no query has {LEAST_PAIRS} context words that occur {self.settings.least} times in "
                "the sample: take more windows (probe), or fewer words (vocabulary)"
            )
        return {
            "entropy": float(_entropy(_softmax(scores, diagonal=True)).mean()),
            "word_rank": _rank_correlation(lift, self.counts[self.words].astype(np.float64)),
            "pair_rank": float(np.mean(of_queries)),
        }


def _softmax(scores: Array, *, diagonal: bool) -> Array:
    """Return attention (n, T, T) on the places before each query, or with ``diagonal`` up to it.

    A query without a place to attend to has a row of zeros.
    """
    T = scores.shape[1]
    is_visible = np.tri(T, k=0 if diagonal else -1, dtype=bool)
    largest = np.where(is_visible, scores, -np.inf).max(axis=2, keepdims=True)
    shifted = np.where(is_visible, scores - np.where(np.isfinite(largest), largest, 0.0), -np.inf)
    weights = np.exp(shifted)
    total = weights.sum(axis=2, keepdims=True)
    return weights / np.where(total > 0, total, 1.0)


def _entropy(attention: Array) -> Array:
    """Return the entropy of each row (n, T)."""
    safe = np.where(attention > 0, attention, 1.0)
    return -(attention * np.log(safe)).sum(axis=2)


def _rank_correlation(lift: Array, frequency: Array) -> float:
    if np.ptp(lift) == 0:
        return math.nan  # no word gets more than another
    return float(stats.spearmanr(lift, frequency).statistic)


@torch.no_grad()
def scores_of(model: LanguageModel, tokens: Tensor) -> Array:
    """Return q·k/√d (n, T, T) of a model with one layer and one head, without dropout and mask."""
    (layer,) = model.encoder.layers
    inner = layer.self_attn
    d = inner.embed_dim
    if inner.num_heads != 1 or layer.norm_first:
        raise ValueError("scores are computed for one head, with layer norm after attention")
    positions: Any = model.positions
    rows = model.embed(tokens) * math.sqrt(d) + positions[: tokens.shape[1]]  # (n, T, d)
    weight = inner.in_proj_weight[: 2 * d]
    bias = inner.in_proj_bias[: 2 * d]
    query, key = torch.nn.functional.linear(rows, weight, bias).split(d, dim=2)
    scores: Array = (query @ key.transpose(1, 2) / math.sqrt(d)).double().numpy()
    return scores


@dataclass
class EnteringRun:
    """One training."""

    text: EnteringText
    optimiser: str
    lr: float
    seed: int
    losses: list[float] = field(default_factory=list)

    def measurements(self) -> Iterator[tuple[int, dict[str, float]]]:
        """Train, and yield (step, numbers) at the start and after every so many steps."""
        settings = self.text.settings
        torch.manual_seed(self.seed)
        model = LanguageModel(
            self.text.size, d=settings.width, hidden=settings.width, length=settings.length
        )
        momentum: float | None = None
        if self.optimiser == "sgd":
            momentum = 0.0
        stepper = Stepper(model, self.lr, clip=0.5, momentum=momentum)
        probe = torch.from_numpy(self.text.probe)
        yield 0, self._measure(model, probe)
        model.train()
        for step in range(settings.steps):
            inputs, targets = window(self.text.train, step, settings.length)
            self.losses.append(stepper.step(torch.from_numpy(inputs), torch.from_numpy(targets)))
            if (step + 1) % settings.every == 0:
                yield step + 1, self._measure(model, probe)

    def _measure(self, model: LanguageModel, probe: Tensor) -> dict[str, float]:
        numbers = self.text.measure(scores_of(model, probe))
        if self.losses:
            numbers["loss"] = float(np.mean(self.losses[-self.text.settings.every :]))
        return numbers
