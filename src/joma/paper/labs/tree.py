"""Transformers trained on latent trees with noise (Section 5, Figure 5): who attends to whom, and which latents show.

A tree `HBLT(ρ)` draws sequences, the paper's small Transformer learns their classes, and on the way it is asked

    attention     of a query token m on a token l that shares its lowest latent β ("siblings"), that shares only the
                  latent α above ("cousins"), or neither; over that of uniform attention, per block
    latents       held-out NCorr: the hidden node that correlates best with a latent on one half of the samples, scored
                  on the other half; β in the first block, α in the second
    competition   the rank correlation over tokens l between what l's siblings give it and what all others give it

The same is measured with the tokens permuted over the tree: what these numbers are without any hierarchy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
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
from joma.theory.hierarchy import HBLT, HBLTSamples

KINSHIP = ("siblings", "cousins", "others")
AXES = {**{f"attention_{kin}": ["block"] for kin in KINSHIP}, "competition": ["block"]}
TEST = 256  # sequences that are measured on


@dataclass(frozen=True)
class TreeSettings:
    """What decides a run. ``latents`` is the number right below the class."""

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
        """These settings; what makes no sense is an error."""
        for name in (
            "depth",
            "latents",
            "children",
            "classes",
            "layers",
            "width",
            "steps",
            "batch",
            "every",
        ):
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
        if self.depth == 3 and self.layers < 2:
            raise ValueError("a tree of depth 3 has two layers of latents: take layers 2 or more")
        if not self.lr > 0:
            raise ValueError(f"the learning rate must be positive, got {self.lr!r}")
        return self


@dataclass(frozen=True, eq=False)
class Kinship:
    """Which tokens are siblings, cousins and others; (M, M) without the diagonal."""

    siblings: NDArray[np.bool_]
    cousins: NDArray[np.bool_]
    others: NDArray[np.bool_]

    @classmethod
    def of(cls, tree: HBLT, order: NDArray[np.intp] | None = None) -> Kinship:
        """Of a tree; with ``order``, token n has the place of token order[n]."""
        tokens = tree.tokens if order is None else tree.tokens[order]
        beta = tree.parent[tokens]
        alpha = tree.parent[beta] if tree.depth[tokens[0]] > 2 else beta
        different = ~np.eye(len(tokens), dtype=bool)
        same_beta, same_alpha = (group[:, None] == group[None, :] for group in (beta, alpha))
        return cls(same_beta & different, same_alpha & ~same_beta, ~same_alpha)


def attention_over_uniform(
    model: HierarchyTransformer, x: Tensor, tokens: int
) -> list[NDArray[np.float64]]:
    """Per block, the mean attention of query token m on token l over 1/(visible keys), (M, M); NaN where never seen."""
    one_hot = functional.one_hot(x, tokens + 1).to(model.embed.weight.dtype)[
        ..., :tokens
    ]  # (B, T, M): no padding
    visible = torch.arange(1, x.shape[1] + 1, dtype=one_hot.dtype)
    earlier = torch.ones(x.shape[1], x.shape[1], dtype=one_hot.dtype).tril()
    pairs = torch.einsum("bim,ij,bjl->ml", one_hot, earlier, one_hot)
    out = []
    with torch.no_grad():
        h = model.embed(x)
        for block in model.blocks:
            assert isinstance(block, TreeBlock)
            scores = block.query(h) @ block.key(h).mT / h.shape[2] ** 0.5
            attention = (
                scores.masked_fill(earlier == 0, -torch.inf).softmax(dim=-1) * visible[:, None]
            )
            out.append(
                (torch.einsum("bim,bij,bjl->ml", one_hot, attention, one_hot) / pairs)
                .double()
                .numpy()
            )
            h = block(h)[0]
    return out


def measures(
    lifts: list[NDArray[np.float64]],
    activations: list[NDArray[np.float64]],
    samples: HBLTSamples,
    kinship: Kinship,
    order: NDArray[np.intp] | None,
) -> dict[str, Any]:
    """All gauges of a model's attention over uniform and maximal activations, per block.

    ``order`` permutes the samples of the latents, as ``kinship`` has the tokens permuted.
    """
    out: dict[str, Any] = {}
    for kin in KINSHIP:
        mask = getattr(kinship, kin)
        if mask.any():
            out[f"attention_{kin}"] = [float(np.nanmean(lift[mask])) for lift in lifts]
    out["competition"] = [_competition(lift, kinship) for lift in lifts]
    names = ("alpha", "beta")[-len(samples.latents) :]
    for name, latents, block in zip(
        reversed(names), reversed(samples.latents), range(2), strict=False
    ):
        y = latents if order is None else latents[order]
        out[f"ncorr_{name}"] = held_out_correlation(y, activations[block])
    return out


def _competition(lift: NDArray[np.float64], kinship: Kinship) -> float:
    """Spearman's correlation over tokens l of the attention from l's siblings with that from all who are not."""
    related, foreign = (
        np.where(mask, lift, np.nan) for mask in (kinship.siblings, ~kinship.siblings)
    )
    np.fill_diagonal(foreign, np.nan)
    known = [
        l
        for l in range(len(lift))
        if not (np.isnan(related[:, l]).all() or np.isnan(foreign[:, l]).all())
    ]
    given = [(np.nanmean(related[:, l]), np.nanmean(foreign[:, l])) for l in known]
    return float(stats.spearmanr(*np.array(given).T).statistic)


def follow(
    settings: TreeSettings, show: Callable[[int], None] = lambda step: None
) -> Iterator[tuple[int, str, dict[str, Any]]]:
    """Train, and give (step, "tree" or "permuted", gauges) at the start and every so many steps."""
    settings = settings.checked()
    chosen = {
        name: getattr(settings, name)
        for name in ("classes", "latents", "depth", "children", "rho", "seed")
    }
    tree = make_tree(chosen)
    M = tree.tokens.size
    test = tree.sample(TEST, settings.seed + 10_000)
    x_test = torch.from_numpy(test.sequences(M, M))
    rng = np.random.default_rng((settings.seed, 3))
    shuffled = Kinship.of(tree, rng.permutation(M)), rng.permutation(TEST)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        model = HierarchyTransformer(
            M + 1, settings.classes, settings.width, layers=settings.layers
        )
    optimiser = torch.optim.Adam(model.parameters(), lr=settings.lr)
    for step in range(settings.steps + 1):
        if step % settings.every == 0 or step == settings.steps:
            with torch.no_grad():
                right = (model(x_test).argmax(dim=1).numpy() == test.classes).mean()
            seen = (
                attention_over_uniform(model, x_test, M),
                maximal_activations(model, x_test.numpy()),
            )
            yield (
                step,
                "tree",
                {**measures(*seen, test, Kinship.of(tree), None), "accuracy": float(right)},
            )
            yield step, "permuted", measures(*seen, test, *shuffled)
        if step == settings.steps:
            return
        batch = tree.sample(settings.batch, int(rng.integers(2**31)))
        loss = functional.cross_entropy(
            model(torch.from_numpy(batch.sequences(M, M))),
            torch.from_numpy(np.asarray(batch.classes)),
        )
        if not torch.isfinite(loss):
            raise FloatingPointError(
                f"the loss is {loss.item()} at step {step}: take a smaller lr than {settings.lr}"
            )
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        show(step + 1)


def train_tree(
    settings: TreeSettings,
    out: Path,
    *,
    force: bool = False,
    show: Callable[[int], None] = lambda step: None,
) -> Run:
    """``joma train hierarchy``: one training into the run folder ``out``."""
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
