"""Transformers trained on latent trees with noise (Section 5, Figure 5): who attends to whom, and which latents show.

A tree `HBLT(ρ)` draws samples. The paper's small Transformer learns one of two things from their tokens:

    class    the label is at the root: the class that drew the sample
    token    the label is a leaf: whether a token occurs, given all other tokens

On the way these are measured:

    attention     lift over uniform attention that a token m gives to a token l which shares its lowest latent β
                  ("siblings"), shares only the latent α above ("cousins"), or neither ("others"), per block.
                  Under the objective "token", m is the token that is asked for, and the last position asks.
    latents       held-out NCorr: the hidden node that correlates best with a latent on one half of the samples,
                  scored on the other half; β in the first block, α in the second
    competition   rank correlation over tokens l between what l's siblings give it and what all others give it

The same is measured with the tokens permuted over the tree: what these numbers are without any hierarchy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import stats
from torch import Tensor
from torch.nn import functional

from joma._data.trees import tree as make_tree
from joma._runs import Run, RunWriter, staged
from joma._train.settings import check_whole
from joma.paper.labs.hierarchy import HierarchyTransformer, TreeBlock
from joma.paper.labs.ncorr import held_out_correlation, maximal_activations
from joma.theory.hierarchy import HBLT, HBLTSamples, sequences

KINSHIP = ("siblings", "cousins", "others")
AXES = {**{f"attention_{kin}": ["block"] for kin in KINSHIP}, "competition": ["block"]}
# Sequences that gauges are measured on.
TEST_SIZE = 256
# Samples for the Bayes accuracy: its standard error is below 0.006.
BAYES_SIZE = 4096
# The test samples of a seed are not among its training samples.
TEST_SEED_OFFSET = 10_000

Floats = NDArray[np.float64]
Ids = NDArray[np.int64]


class Objective(StrEnum):
    """What a network is trained to predict."""

    CLASS = "class"
    TOKEN = "token"


@dataclass(frozen=True)
class TreeSettings:
    """What decides a run. ``latents`` is the number right below the class."""

    objective: str = "class"
    rho: float = 0.9
    depth: int = 3  # edges from the class to a token: 3 has latents α and β, 2 has β only
    latents: int = 4
    children: int = 3
    classes: int = 10
    layers: int = 2
    width: int = 64
    steps: int = 400
    batch: int = 64
    lr: float = 1e-3
    every: int = 20
    seed: int = 0

    def checked(self) -> TreeSettings:
        """Return these settings; raise ValueError for those that make no sense."""
        if self.objective not in tuple(Objective):
            choices = " or ".join(Objective)
            raise ValueError(f"objective must be {choices}, got {self.objective!r}")
        counts = ("depth", "latents", "children", "classes", "layers", "width", "steps", "batch", "every")  # fmt: skip
        for name in counts:
            check_whole(name, getattr(self, name))
        check_whole("seed", self.seed, least=0)
        if not 0 < self.rho < 1:
            raise ValueError(
                f"rho must be between 0 and 1, got {self.rho!r}; data without noise are those of table1"
            )
        if self.depth not in (2, 3):
            raise ValueError(
                f"depth must be 2 (class, β, tokens) or 3 (class, α, β, tokens), got {self.depth}"
            )
        if not self.lr > 0 or not math.isfinite(self.lr):
            raise ValueError(f"the learning rate must be positive, got {self.lr!r}")
        return self

    def make_tree(self) -> HBLT:
        """Return the tree of these settings."""
        names = ("classes", "latents", "depth", "children", "rho", "seed")
        return make_tree({name: getattr(self, name) for name in names})


@dataclass(frozen=True, eq=False)
class Kinship:
    """Which tokens are siblings, cousins and others; (M, M) without the diagonal."""

    siblings: NDArray[np.bool_]
    cousins: NDArray[np.bool_]
    others: NDArray[np.bool_]

    @classmethod
    def of(cls, tree: HBLT, order: NDArray[np.intp] | None = None) -> Kinship:
        """Return the kinship in a tree; with ``order``, token n has the place of token order[n]."""
        tokens = tree.tokens
        if order is not None:
            tokens = tokens[order]
        beta = tree.parent[tokens]
        alpha = beta
        if tree.depth[tokens[0]] > 2:
            alpha = tree.parent[beta]
        is_other_token = ~np.eye(len(tokens), dtype=bool)
        has_same_beta = beta[:, None] == beta[None, :]
        has_same_alpha = alpha[:, None] == alpha[None, :]
        return cls(
            siblings=has_same_beta & is_other_token,
            cousins=has_same_alpha & ~has_same_beta,
            others=~has_same_alpha,
        )


@dataclass(frozen=True, eq=False)
class Examples:
    """Sequences with their labels.

    Attributes:
        x: ids (n, T). 0 … M − 1 are tokens, M is the padding, M + 1 + m asks for token m.
        labels: (n,), a class, or 1 where the token that is asked for occurs.
        samples: the samples of the tree that they were made from.
    """

    x: Tensor
    labels: Tensor
    samples: HBLTSamples


@dataclass(frozen=True)
class Lesson:
    """An objective on one tree: how samples become sequences and labels."""

    tree: HBLT
    objective: Objective

    @property
    def tokens(self) -> int:
        """M, the number of tokens."""
        return self.tree.tokens.size

    @property
    def vocabulary(self) -> int:
        """Number of ids: tokens, the padding, and one per token that can be asked for."""
        if self.objective is Objective.CLASS:
            return self.tokens + 1
        return 2 * self.tokens + 1

    @property
    def outputs(self) -> int:
        """Number of labels."""
        if self.objective is Objective.CLASS:
            return len(self.tree.prior)
        return 2

    @property
    def first_reader(self) -> int:
        """Id of the first token that attends: itself, or the id that asks for it."""
        if self.objective is Objective.CLASS:
            return 0
        return self.tokens + 1

    def examples(self, n: int, seed: int) -> Examples:
        """Draw ``n`` samples and write them as sequences."""
        samples = self.tree.sample(n, seed)
        M = self.tokens
        if self.objective is Objective.CLASS:
            x = samples.sequences(M, M)
            return Examples(torch.from_numpy(x), _as_tensor(samples.classes), samples)
        rng = np.random.default_rng((seed, 1))
        asked = rng.integers(M, size=n)
        present = samples.tokens.copy()  # (n, M)
        labels = present[np.arange(n), asked]
        present[np.arange(n), asked] = 0
        context = sequences(present, M - 1, M)  # (n, M − 1)
        x = np.concatenate([context, M + 1 + asked[:, None]], axis=1)  # (n, M)
        return Examples(torch.from_numpy(x), _as_tensor(labels), samples)

    def bayes_accuracy(self, seed: int) -> float:
        """Return the accuracy of the best possible prediction, the mean over `BAYES_SIZE` samples."""
        samples = self.tree.sample(BAYES_SIZE, seed)
        of_class, of_variable = self.tree.posterior(samples.tokens)
        if self.objective is Objective.CLASS:
            return float(of_class.max(axis=1).mean())
        asked = np.random.default_rng((seed, 1)).integers(self.tokens, size=BAYES_SIZE)
        rows = np.arange(BAYES_SIZE)
        observed = samples.tokens[rows, asked]
        leaf = self.tree.tokens[asked]
        likely = occurrence_given_others(
            of_variable[rows, self.tree.parent[leaf]], observed, self.tree.rho[leaf]
        )
        return float(np.maximum(likely, 1 - likely).mean())


def occurrence_given_others(parent: Floats, observed: NDArray[Any], rho: Floats) -> Floats:
    """Return P[y = 1 | all other tokens] of a token.

    Arguments:
        parent: P[parent = 1 | all tokens], the token itself included.
        observed: value of the token, 0 or 1.
        rho: of the edge between the token and its parent.
    """
    equal = (1 + rho) / 2
    # What the token itself said about its parent is divided out.
    if_one = np.where(observed == 1, equal, 1 - equal)
    one = parent / if_one
    zero = (1 - parent) / (1 - if_one)
    without = one / (one + zero)
    return np.asarray(without * equal + (1 - without) * (1 - equal))


def _as_tensor(labels: NDArray[Any]) -> Tensor:
    return torch.from_numpy(np.asarray(labels, dtype=np.int64))


def attention_over_uniform(
    model: HierarchyTransformer, x: Tensor, tokens: int, first_reader: int = 0
) -> list[Floats]:
    """Return, per block, the mean attention from m to l over 1/(visible keys), (M, M); NaN for pairs never seen.

    Arguments:
        model: the network.
        x: ids (B, T).
        tokens: M; the ids 0 … M − 1 are read.
        first_reader: the ids from here on, M of them, attend.
    """
    dtype = model.embed.weight.dtype
    one_hot = functional.one_hot(x, model.embed.num_embeddings).to(dtype)  # (B, T, V)
    keys = one_hot[..., :tokens]  # (B, T, M)
    readers = one_hot[..., first_reader : first_reader + tokens]  # (B, T, M)
    T = x.shape[1]
    visible = torch.arange(1, T + 1, dtype=dtype)
    is_earlier = torch.ones(T, T, dtype=dtype).tril()
    pairs = torch.einsum("bim,ij,bjl->ml", readers, is_earlier, keys)
    lifts = []
    with torch.no_grad():
        h = model.embed(x)
        for block in model.blocks:
            assert isinstance(block, TreeBlock)
            scores = block.query(h) @ block.key(h).mT / h.shape[2] ** 0.5
            scores = scores.masked_fill(is_earlier == 0, -torch.inf)
            attention = scores.softmax(dim=-1) * visible[:, None]  # (B, T, T)
            total = torch.einsum("bim,bij,bjl->ml", readers, attention, keys)
            lifts.append((total / pairs).double().numpy())
            h = block(h)[0]
    return lifts


def measures(
    lifts: list[Floats],
    activations: list[Floats],
    samples: HBLTSamples,
    kinship: Kinship,
    order: NDArray[np.intp] | None,
) -> dict[str, Any]:
    """Return all gauges of a model from its attention lifts and maximal activations, per block.

    ``order`` permutes the samples of the latents, as ``kinship`` has the tokens permuted.
    """
    gauges: dict[str, Any] = {}
    for kin in KINSHIP:
        mask = getattr(kinship, kin)
        if mask.any():
            gauges[f"attention_{kin}"] = [float(np.nanmean(lift[mask])) for lift in lifts]
    gauges["competition"] = [_competition(lift, kinship) for lift in lifts]
    names = ("alpha", "beta")[-len(samples.latents) :]
    # The lowest latents are looked for in the first block.
    lowest_first = zip(reversed(names), reversed(samples.latents), strict=True)
    for (name, latents), block_activations in zip(lowest_first, activations, strict=False):
        y = latents
        if order is not None:
            y = latents[order]
        gauges[f"ncorr_{name}"] = held_out_correlation(y, block_activations)
    return gauges


def _competition(lift: Floats, kinship: Kinship) -> float:
    """Return Spearman's correlation over tokens l of the attention from l's siblings with that from all others."""
    from_siblings = np.where(kinship.siblings, lift, np.nan)
    from_others = np.where(kinship.siblings, np.nan, lift)
    np.fill_diagonal(from_others, np.nan)
    pairs = []
    for column in range(len(lift)):
        has_both = np.isfinite(from_siblings[:, column]).any() and np.isfinite(from_others[:, column]).any()  # fmt: skip
        if has_both:
            pairs.append((np.nanmean(from_siblings[:, column]), np.nanmean(from_others[:, column])))
    return float(stats.spearmanr(*np.array(pairs).T).statistic)


def follow(
    settings: TreeSettings,
    show: Callable[[int], None] = lambda step: None,
    is_measured: Callable[[int], bool] | None = None,
) -> Iterator[tuple[int, str, dict[str, Any]]]:
    """Train, and yield (step, "tree" or "permuted", gauges) at measured steps and at the end.

    A step is measured every ``settings.every`` steps, or where ``is_measured`` returns True.
    """
    settings = settings.checked()
    tree = settings.make_tree()
    lesson = Lesson(tree, Objective(settings.objective))
    M = lesson.tokens
    test = lesson.examples(TEST_SIZE, settings.seed + TEST_SEED_OFFSET)
    rng = np.random.default_rng((settings.seed, 3))
    kinship = Kinship.of(tree)
    permuted_kinship = Kinship.of(tree, rng.permutation(M))
    permuted_samples = rng.permutation(TEST_SIZE)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        model = HierarchyTransformer(
            lesson.vocabulary,
            lesson.outputs,
            settings.width,
            hidden=4 * (M + 1),
            layers=settings.layers,
        )
    optimiser = torch.optim.Adam(model.parameters(), lr=settings.lr)
    for step in range(settings.steps + 1):
        is_due = step % settings.every == 0
        if is_measured is not None:
            is_due = is_measured(step)
        if is_due or step == settings.steps:
            lifts = attention_over_uniform(model, test.x, M, lesson.first_reader)
            activations = maximal_activations(model, test.x.numpy())
            row = measures(lifts, activations, test.samples, kinship, None)
            row["accuracy"] = _accuracy(model, test)
            yield step, "tree", row
            permuted = measures(lifts, activations, test.samples, permuted_kinship, permuted_samples)  # fmt: skip
            yield step, "permuted", permuted
        if step == settings.steps:
            return
        batch = lesson.examples(settings.batch, int(rng.integers(2**31)))
        loss = functional.cross_entropy(model(batch.x), batch.labels)
        if not torch.isfinite(loss):
            raise FloatingPointError(
                f"the loss is {loss.item()} at step {step}: take a smaller lr than {settings.lr}"
            )
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        show(step + 1)


def _accuracy(model: HierarchyTransformer, test: Examples) -> float:
    with torch.no_grad():
        guesses = model(test.x).argmax(dim=1)
    return float((guesses == test.labels).double().mean())


def train_tree(
    settings: TreeSettings,
    out: Path,
    *,
    force: bool = False,
    show: Callable[[int], None] = lambda step: None,
) -> Run:
    """Train one network into the run folder ``out`` (``joma hierarchy``)."""
    config = {name: getattr(settings, name) for name in TreeSettings.__dataclass_fields__}
    with staged(out, overwrite=force) as folder:
        packages = ("joma", "torch", "numpy")
        with RunWriter.create(
            folder,
            kind="hierarchy",
            config=config,
            seed=settings.seed,
            axes=AXES,
            name=out.name,
            packages=packages,
        ) as writer:
            for step, state, row in follow(settings, show):
                writer.write(step, row, tree=state)
    return Run(out)
