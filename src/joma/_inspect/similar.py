"""Which words are alike: "June" and "August" are one concept, not two patterns.

A word is the input embedding of the token that most often stands for it. Embeddings are standardised, each dimension
by its mean and spread over the words that are attended to, so that neither what all words have in common nor a few
large dimensions decide. Two words are alike if their cosine is above the ``SIMILAR`` quantile of all pairs of words.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from joma._inspect.collect import Strongest
from joma._inspect.group import Word, contexts, normalised

SIMILAR, WORDS = 0.99, 2000  # the quantile, and the words it is taken over at most
_ROUNDING = 1e-5


class Similarity:
    """Cosines between words, and the bound above which two of them are alike.

    Attributes:
        bound: the `SIMILAR` quantile of the cosines of different words.
    """

    def __init__(self, vectors: dict[str, np.ndarray[Any, Any]]) -> None:
        self._row = {name: n for n, name in enumerate(vectors)}
        self._unit, self.bound = np.zeros((0, 0)), 1.0
        if not vectors:
            return
        table = np.array(list(vectors.values()), dtype=np.float64)
        spread = table.std(axis=0)
        table = (table - table.mean(axis=0)) / np.where(spread > 0, spread, 1.0)
        norm = np.linalg.norm(table, axis=1, keepdims=True)
        self._unit = table / np.where(norm > 0, norm, 1.0)
        some = self._unit[:: -(-len(table) // WORDS)]
        pairs = (some @ some.T)[np.triu_indices(len(some), 1)]
        self.bound = float(np.quantile(pairs, SIMILAR)) if len(pairs) else 1.0

    def cosine(self, a: str, b: str) -> float:
        """Between two words."""
        return float(self._unit[self._row[a]] @ self._unit[self._row[b]])

    def __call__(self, a: str, b: str) -> bool:
        """Are they alike? A word without an embedding is like every other: nothing is known of it."""
        return (
            a not in self._row or b not in self._row or self.cosine(a, b) > self.bound + _ROUNDING
        )


def similarity(
    embedding: Tensor | None, layers: Iterable[Strongest], word: Word
) -> Similarity | None:
    """Of the words that the neurons of these layers attend to; None without an embedding (tokens, d)."""
    if embedding is None:
        return None
    tokens: Counter[int] = Counter()
    for kept in layers:
        for neuron in range(len(kept.value)):
            for context in contexts(kept, neuron):
                tokens.update(context.tokens[context.attended].tolist())
    chosen: dict[str, int] = {}
    for token, _ in tokens.most_common():
        chosen.setdefault(normalised(word(token)), token)
    rows = embedding.detach()[list(chosen.values())].float().cpu().numpy()
    return Similarity(dict(zip(chosen, rows, strict=True)))


def input_embedding(model: nn.Module, tokens: Tensor) -> Tensor | None:
    """The embedding (tokens, d) that a model looks its tokens up in; None if it has none.

    Where the model does not say which it is, it is the one that is given these tokens (B, T) themselves.
    """
    get = getattr(model, "get_input_embeddings", None)
    if get is not None and isinstance(module := get(), nn.Embedding):
        return module.weight
    found: list[nn.Embedding] = []

    def look(module: nn.Module, args: tuple[Any, ...]) -> None:
        if isinstance(module, nn.Embedding) and args and torch.equal(args[0].cpu(), tokens.cpu()):
            found.append(module)

    handles = [
        m.register_forward_pre_hook(look) for m in model.modules() if isinstance(m, nn.Embedding)
    ]
    training = model.training
    model.eval()
    try:
        if handles:
            with torch.inference_mode():
                model(tokens.to(next(model.parameters()).device))
    finally:
        model.train(training)
        for handle in handles:
            handle.remove()
    return found[0].weight if found else None
