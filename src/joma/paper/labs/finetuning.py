"""What a fine-tuning changed in a model of reactions, next to random changes of the same norm.

Three checkpoints of one BERT, in full precision: pretrained, and fine-tuned twice (the package rxnfp).
A random change has independent normal entries, and in every matrix the norm that the fine-tuning's has.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from joma import models
from joma._data.packaged import MODELS, packaged, verified_models
from joma._measure.gauges.embedding import embedding_coherence
from joma._measure.gauges.rank import stable_rank
from joma._measure.watch.watch import watch
from joma.paper.labs.reactions import used_tokens
from joma.theory.setting import Array

PARTS = ("mlp_in", "mlp_out", "q", "k", "v", "o")
# A small model for spot checks: nothing that is downloaded.
SMALL = "a small BERT"
_SMALL_CHANGES = {"fine-tuned": 0.1, "fine-tuned again": 0.3}


@dataclass(frozen=True, eq=False)
class FineTunings:
    """A model before fine-tuning, the fine-tuned ones by name, and the tokens that they read."""

    base: nn.Module
    tuned: Mapping[str, nn.Module]
    vocabulary: list[str]

    @classmethod
    def load(cls, name: str, seed: int) -> FineTunings:
        """Read a packaged series of models, verified by their hashes, or make the small one."""
        if name == SMALL:
            return _small(seed)
        verified_models(name)
        folder = packaged(name)
        if folder is None:
            raise ValueError(f"{name} is no packaged model: give rxnfp")
        base, *tuned = (_opened(folder / inner) for inner in MODELS[name].names)
        vocabulary = (folder / MODELS[name].names[0] / "vocab.txt").read_text().split()
        names = MODELS[name].names[1:]
        return cls(base, dict(zip(names, tuned, strict=True)), vocabulary)

    def words(self) -> NDArray[np.int64]:
        """Return the numbers of the tokens that are written in reactions."""
        is_word = [
            not token.startswith(("[unused", "[PAD", "[UNK", "[CLS", "[SEP", "[MASK"))
            for token in self.vocabulary
        ]
        return np.flatnonzero(is_word)


def _opened(folder: Path) -> nn.Module:
    from joma._checkpoints.options import CheckpointOptions
    from joma._inspect.windows import open_model

    net, _ = open_model(folder, CheckpointOptions(data=np.zeros((1, 2), dtype=np.int64)), None)
    return net.eval()


def _small(seed: int) -> FineTunings:
    """Return a seeded BERT of two layers, and two seeded changes of low rank."""
    from transformers import BertConfig, BertModel

    vocabulary = used_tokens()
    config = BertConfig(
        vocab_size=len(vocabulary),
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=64,
        initializer_range=0.3,  # attention of a usual start is even, and would show no change
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        base = BertModel(config, add_pooling_layer=False).eval()
        tuned = {}
        for name, size in _SMALL_CHANGES.items():
            model = copy.deepcopy(base)
            with torch.no_grad():
                for weight in model.parameters():
                    if weight.dim() == 2:
                        rows = torch.randn(len(weight), 2)
                        weight += size * 0.1 * rows @ torch.randn(2, weight.shape[1])
            tuned[name] = model
    return FineTunings(base, tuned, vocabulary)


@dataclass(frozen=True, eq=False)
class PartChange:
    """What became of one part of every layer: change, ranks, and the same for random changes.

    Attributes:
        part: a name of `joma.models.PARTS`.
        values: gauge -> (layers,), or (layers, draws) for random changes.
    """

    part: str
    values: dict[str, Array]


def part_changes(
    base: nn.Module, tuned: nn.Module, draws: int, rng: np.random.Generator
) -> Iterator[PartChange]:
    """Yield the changes of all parts."""
    before = models.find(base)
    after = models.find(tuned)
    for part in PARTS:
        rows: dict[str, list[Any]] = {}
        for old_matrix, new_matrix in zip(before.matrices(part), after.matrices(part), strict=True):
            (old,) = old_matrix.read()
            (new,) = new_matrix.read()
            for name, value in _of_matrix(old, new, draws, rng).items():
                rows.setdefault(name, []).append(value)
        yield PartChange(part, {name: np.array(values) for name, values in rows.items()})


@torch.no_grad()
def _of_matrix(old: Tensor, new: Tensor, draws: int, rng: np.random.Generator) -> dict[str, Any]:
    change = (new - old).double()
    numbers: dict[str, Any] = {
        "change": float(change.norm() / old.double().norm()),
        "change_rank": float(stable_rank(change)),
        "rank_before": float(stable_rank(old.double())),
        "rank": float(stable_rank(new.double())),
        "random_change_rank": [],
        "random_rank": [],
    }
    for _ in range(draws):
        random = _random_change(change, rng)
        numbers["random_change_rank"].append(float(stable_rank(random)))
        numbers["random_rank"].append(float(stable_rank(old.double() + random)))
    return numbers


def _random_change(change: Tensor, rng: np.random.Generator) -> Tensor:
    """Return independent normal entries with the norm of this change."""
    random = torch.from_numpy(rng.standard_normal(tuple(change.shape)))
    scaled: Tensor = random * (change.norm() / random.norm())
    return scaled


@torch.no_grad()
def embedding_cosines(
    tunings: FineTunings, tuned: nn.Module, draws: int, rng: np.random.Generator
) -> dict[str, Any]:
    """Return the mean |cos| of the embeddings of different tokens: before, after, and after random changes."""
    words = torch.from_numpy(tunings.words())
    old = _embedding(tunings.base)[words].double()
    new = _embedding(tuned)[words].double()
    change = new - old
    return {
        "change": float(change.norm() / old.norm()),
        "cosine_before": embedding_coherence(old).mean,
        "cosine": embedding_coherence(new).mean,
        "random_cosine": [
            embedding_coherence(old + _random_change(change, rng)).mean for _ in range(draws)
        ],
    }


def _embedding(model: nn.Module) -> Tensor:
    weight: Tensor = model.get_input_embeddings().weight.detach()  # type: ignore[operator]
    return weight


@torch.no_grad()
def randomly_changed(base: nn.Module, tuned: nn.Module, rng: np.random.Generator) -> nn.Module:
    """Return the model before fine-tuning with a random change of every parameter, as large as the fine-tuning's."""
    changed = copy.deepcopy(base)
    targets = dict(tuned.named_parameters())
    for name, weight in changed.named_parameters():
        if name in targets:
            change = (targets[name] - weight).double()
            if change.norm() > 0:
                weight.add_(_random_change(change, rng).to(weight.dtype))
    return changed


def attention_entropies(model: nn.Module, ids: NDArray[np.int64]) -> Array:
    """Return the attention entropy of each layer, mean over heads, queries and reactions."""
    probe = {"input_ids": torch.from_numpy(ids)}
    with watch(model, gauges=("entropy",), every=1, probe=probe, live=False) as watched:
        watched.step()
        frame = watched.frame()
    by_layer = frame[frame.gauge == "entropy"].groupby("layer").value.mean()
    return by_layer.sort_index().to_numpy()
