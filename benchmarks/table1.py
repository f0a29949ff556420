"""Table 1's training step at d = 1,024: distinct positions with counts against the loop that one would write."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch

from benchmarks._timing import alternate, row
from joma.paper.labs.distinct import find_distinct
from joma.paper.labs.hierarchy import HierarchyTransformer, distinct_loss, plain_loss
from joma.paper.labs.hierarchy_data import make_hierarchy

CASES = {(20, 2): 15.0, (50, 3): 3.3}  # C, N_ch -> the ratio aimed at
D, BATCH, N0, N1 = 1024, 128, 20, 30  # the larger hierarchy, with more distinct positions


def run(rounds: int = 3) -> list[dict[str, Any]]:
    """One step of both sides with the same minibatches, and the difference of their gradients."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    rows = [_case(C, N_ch, rounds) for C, N_ch in CASES]
    torch.set_num_threads(threads)
    return rows


def _case(C: int, N_ch: int, rounds: int) -> dict[str, Any]:
    data = make_hierarchy(N0, N1, N_ch, C)
    sequences = torch.from_numpy(data.distinct().x)
    labels = torch.from_numpy(data.draw_labels(BATCH, np.random.default_rng(0)))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = HierarchyTransformer(data.M, C, D)
    distinct = find_distinct(data)

    def gradients(dtype: torch.dtype, plain: bool) -> list[torch.Tensor]:
        network = copy.deepcopy(model).to(dtype)
        where = distinct.to(torch.device("cpu"), dtype)
        (
            plain_loss(network, sequences[labels], labels)
            if plain
            else distinct_loss(network, where, labels)
        ).backward()
        return [p.grad.double() for p in network.parameters() if p.grad is not None]

    def gap(a: list[torch.Tensor], b: list[torch.Tensor]) -> float:
        return max(float((p - q).norm() / q.norm()) for p, q in zip(a, b, strict=True))

    short, long, exact = (
        gradients(torch.float32, False), gradients(torch.float32, True), gradients(torch.float64, False),
    )  # fmt: skip

    def side(plain: bool) -> Any:
        network, where = copy.deepcopy(model), distinct.to(torch.device("cpu"), torch.float32)
        optimiser = torch.optim.Adam(
            network.parameters(), lr=1e-4, weight_decay=1e-4, fused=None if plain else True
        )

        def step() -> float:
            loss = (
                plain_loss(network, sequences[labels], labels)
                if plain
                else distinct_loss(network, where, labels)
            )
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            return loss.item()

        return step

    (fast, _), (slow, _) = alternate(side(False), side(True), rounds=rounds)
    return row(
        f"Table 1, one step at d = {D:,}, C = {C}, N_ch = {N_ch}, (N₀, N₁) = ({N0}, {N1}), one thread",
        f"{len(distinct.word)} distinct positions, fused Adam",
        f"a minibatch of {BATCH} × {sequences.shape[1]} in PyTorch, default Adam",
        fast,
        slow,
        f"gradients equal to {gap(short, long):.0e}; off float64 by {gap(short, exact):.0e} and {gap(long, exact):.0e}",
        aim=CASES[C, N_ch],
        gradient_gap=gap(short, long),
    )
