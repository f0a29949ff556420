r"""An exact shortcut for `joma.paper.labs.hierarchy`: train on the distinct positions of the distinct sequences.

Let a minibatch of B sequences come from C equally likely classes with one sequence each (ρ = 1), through a causal
Transformer without positions or dropout. Then, in exact arithmetic:

1.  *Counts.* The minibatch loss is Σ_c (n_c / B) · CE(logits(x_c), c) with (n_c) multinomial(B; 1/C). So C sequences
    weighted by counts give the same loss and gradient, and with drawn counts the same distribution of steps. Two
    classes may have the same sequence: it is computed once and enters with both labels.
2.  *Padding.* Sequences are padded in front, and a position sees only what is before it. A padding position sees
    copies of one vector, of which every average is that vector: by induction over blocks all padding positions, of all
    sequences, have the same value h_pad. A later query that sees p of them with score s has p·eˢ = e^{s + ln p} in
    its softmax: one key, with bias ln p.
3.  *Prefixes.* Without positions, the value at a position is a function of (p, the tokens up to it). Sequences with
    equal p and equal first tokens share these: the positions to compute are the nodes of a trie, and a node's keys
    are its ancestors, itself and, with bias ln p, the padding. One bias matrix, 0 or ln p or −∞, says it all.
4.  *First block.* Its input depends on the word alone, so queries, keys and values are made for the distinct words;
    the keys of a node are the words on its path (each there once).
5.  *Last block.* Only the last position of each sequence is read, so only these r nodes query. With fewer queries
    than keys, W_Q x · W_K h_j = (W_Kᵀ W_Q x) · h_j and Σ_j a_j W_V h_j = W_V Σ_j a_j h_j: the products with W_K and W_V
    move to the side of the queries, r rows instead of all nodes.

The gradient follows by differentiating the same function; autograd does it. What is left at C = 20, N_ch = 2 is some
140 rows instead of 128 · 30 = 3,840, and they meet only one of three blocks in full.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor

from joma.paper.labs.hierarchy_data import Hierarchy, Ints

if TYPE_CHECKING:
    from collections.abc import Iterable

    from joma.paper.labs.hierarchy import HierarchyTransformer, TreeBlock


@dataclass(frozen=True, eq=False)
class Distinct:
    """The distinct positions ("nodes") of a set of padded sequences; node 0 is the padding.

    Attributes:
        words: (m,) the words that occur, the padding first.
        word: (n,) of each node, as an index into ``words``.
        word_bias: (n, m) 0 for a word on the node's path, ln p for the padding, −∞ otherwise.
        node_bias: (n, n) the same for nodes.
        last: (r,) the nodes at which the distinct sequences end.
        sequence: (N,) which of them each of the given sequences is.
    """

    words: Tensor
    word: Tensor
    word_bias: Tensor
    node_bias: Tensor
    last: Tensor
    sequence: Tensor

    def to(self, device: torch.device, dtype: torch.dtype) -> Distinct:
        """On another device, biases in another type."""
        moved: dict[str, Any] = {}
        for part in fields(self):
            tensor = getattr(self, part.name)
            moved[part.name] = tensor.to(device, dtype if tensor.is_floating_point() else None)
        return Distinct(**moved)


def find_distinct(data: Hierarchy) -> Distinct:
    """The distinct positions of the C sequences of noiseless data."""
    if data.rho != 1:
        raise ValueError(
            f"sequences of noisy data (rho = {data.rho}) are not few: use the plain loop"
        )
    return distinct_positions(data.distinct().x, data.pad)


def distinct_positions(x: Ints, pad: int) -> Distinct:
    """The distinct positions of sequences ``x`` (N, T), each some padding and then words, none of them twice."""
    x = np.asarray(x)
    if x.ndim != 2 or not x.size:
        raise ValueError(f"x must be a non-empty table of sequences (N, T), got shape {x.shape}")
    words = np.unique(np.append(x, pad))
    words = np.append(pad, words[words != pad])
    index = {int(word): i for i, word in enumerate(words)}
    nodes: dict[tuple[int, ...], int] = {(): 0}  # (p, first words...) -> node
    paths, paddings = [[0]], [0]  # of each node: the nodes on its path and p
    ends = []
    for n, row in enumerate(x.tolist()):
        tokens = [word for word in row if word != pad]
        p = len(row) - len(tokens)
        if row[p:] != tokens or len(set(tokens)) < len(tokens):
            raise ValueError(
                f"sequence {n} must be padding first and then words, none of them twice: {row}"
            )
        path: list[int] = []
        for j in range(len(tokens)):
            node = nodes.setdefault((p, *tokens[: j + 1]), len(nodes))
            path = [*path, node]
            if node == len(paths):
                paths.append(path)
                paddings.append(p)
        ends.append(path[-1] if path else 0)
    word = np.zeros(len(paths), dtype=np.int64)
    for (_, *tokens), node in list(nodes.items())[1:]:
        word[node] = index[tokens[-1]]
    node_bias = np.full((len(paths), len(paths)), -math.inf)
    word_bias = np.full((len(paths), len(words)), -math.inf)
    for node, (path, p) in enumerate(zip(paths, paddings, strict=True)):
        node_bias[node, path] = word_bias[node, word[path]] = 0.0
        if p:
            node_bias[node, 0] = word_bias[node, 0] = math.log(p)
    last, sequence = np.unique(ends, return_inverse=True)
    return Distinct(
        *(torch.from_numpy(part) for part in (words, word, word_bias, node_bias, last, sequence))
    )


def distinct_logits(model: HierarchyTransformer, distinct: Distinct) -> Tensor:
    """Logits of the distinct sequences, (r, C)."""
    h = model.embed(distinct.words)  # (m, d)
    final = len(model.blocks) - 1
    for n, block in enumerate(cast("Iterable[TreeBlock]", model.blocks)):
        query = distinct.word if n == 0 else None  # None: every row of h is a query
        bias = distinct.node_bias if n else distinct.word_bias
        if n == final:
            query, bias = (
                distinct.last if query is None else query[distinct.last],
                bias[distinct.last],
            )
        h = block.mlp(_attend(block, h, query, bias))[0]  # (n, d); in the last block (r, d)
    return model.classes(h)


def _attend(block: TreeBlock, h: Tensor, query: Tensor | None, bias: Tensor) -> Tensor:
    """Attention plus residual of the rows ``query`` of ``h`` (n, d), which see the rows of ``h`` under ``bias``."""
    scale = h.shape[1] ** -0.5
    if query is not None and len(query) < len(h):
        rows = h.index_select(0, query)
        scores = (block.query(rows) @ block.key.weight) @ h.T  # (r, n)
        return rows + block.value(torch.softmax(torch.add(bias, scores, alpha=scale), dim=1) @ h)
    scores, rows = block.query(h) @ block.key(h).T, h  # (n, n)
    if query is not None:
        scores, rows = scores.index_select(0, query), h.index_select(0, query)
    return rows + torch.softmax(torch.add(bias, scores, alpha=scale), dim=1) @ block.value(h)
