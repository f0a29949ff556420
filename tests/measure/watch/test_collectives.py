"""A pass that one process makes alone never waits for the others; two gloo processes, with a time limit."""

from __future__ import annotations

import json
import os
import socket
import time
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

import joma
from tests.measure.watch.models import LENGTH, VOCABULARY, HandWrittenGPT, sharpen

LIMIT = 120  # seconds; a process that waits for another one waits for ever
STEPS = 3


class Contrastive(nn.Module):
    """Compares its samples with those of all processes, as CLIP does."""

    def __init__(self, gathers: str) -> None:
        super().__init__()
        self.gpt = sharpen(HandWrittenGPT("sdpa", d=32, heads=4), 3)
        for block in self.gpt.blocks:
            block.attn.keep = False
        self.gathers = gathers

    def forward(self, x):
        if self.gathers == "before the embedding":
            dist.all_reduce(x.clone())
        features = self.gpt(x).mean(dim=1)  # (B, d)
        if self.gathers == "objects":
            shapes = [None, None]
            dist.all_gather_object(shapes, tuple(features.shape))
        parts = [torch.zeros_like(features) for _ in range(2)]
        dist.all_gather(parts, features.detach())
        parts[dist.get_rank()] = features
        return features @ torch.cat(parts).T


def train(way: str, watched: bool, processes: str, gathers: str) -> dict[str, object]:
    torch.manual_seed(0)
    model = Contrastive(gathers)
    if way == "compiled":
        for block in model.gpt.blocks:
            block.compile(backend="aot_eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    probe = torch.randint(VOCABULARY, (3, LENGTH), generator=torch.Generator().manual_seed(9))
    options = {"probe": probe} if way == "probe" else {}
    metrics = []
    w = None
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", joma.JomaWarning)
        if watched:
            w = joma.watch(
                model, every=1, gauges="entropy", processes=processes, live=False, **options
            )
        for step in range(STEPS):
            generator = torch.Generator().manual_seed(2 * step + dist.get_rank())
            x = torch.randint(VOCABULARY, (3, LENGTH), generator=generator)
            loss = nn.functional.cross_entropy(model(x), torch.arange(3) + 3 * dist.get_rank())
            loss.backward()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
            optimizer.step()
            optimizer.zero_grad()
            if w is not None:
                metrics.append(w.step(loss=loss))
    problems = []
    if w is not None:
        problems = w.problems
        w.close()
    own = [str(one.message) for one in said if issubclass(one.category, joma.JomaWarning)]
    total = float(sum(parameter.double().sum() for parameter in model.parameters()))
    return {"metrics": metrics, "problems": problems, "warnings": own, "total": total}


def work(rank: int, way: str, which: str, gathers: str, port: int, folder: str) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    try:
        plain = train(way, False, "own", gathers)
        watched = train(way, which == "all" or rank == 0, which, gathers)
        (Path(folder) / f"{rank}.json").write_text(json.dumps([plain, watched]))
        dist.barrier()
    finally:
        dist.destroy_process_group()


def run_two(way: str, which: str, gathers: str, folder: Path) -> list:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    arguments = (way, which, gathers, port, str(folder))
    processes = mp.start_processes(
        work, args=arguments, nprocs=2, start_method="forkserver", join=False
    )
    end = time.monotonic() + LIMIT
    try:
        while not processes.join(timeout=5):
            assert time.monotonic() < end, "the processes wait for each other"
    finally:
        for process in processes.processes:
            process.kill()
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.fixture(autouse=True)
def _forked(fork_server):
    """Two processes per test would import torch's distributed parts for 10 s each."""


@pytest.mark.parametrize(
    ("way", "gathers"),
    [
        ("probe", "features"),
        ("compiled", "features"),
        ("probe", "objects"),
        ("probe", "before the embedding"),
    ],
)
def test_an_extra_pass_of_one_process_stops_before_a_collective(way, gathers, tmp_path):
    results = run_two(way, "own", gathers, tmp_path)
    for plain, watched in results:
        assert watched["total"] == plain["total"]
    first = results[0][1]
    layers = (
        0 if gathers == "before the embedding" else 2
    )  # what came before the collective is measured
    assert [len(metrics) for metrics in first["metrics"]] == [layers] * STEPS
    (reason,) = first["problems"]
    assert "its forward pass calls c10d.all" in reason
    assert "processes='all' in every process" in reason
    assert len(first["warnings"]) == 1


@pytest.mark.parametrize("way", ["probe", "compiled"])
def test_an_extra_pass_that_all_processes_make_is_measured(way, tmp_path):
    results = run_two(way, "all", "features", tmp_path)
    for plain, watched in results:
        assert watched["total"] == plain["total"]
        assert watched["warnings"] == []
        assert [len(metrics) for metrics in watched["metrics"]] == [2] * STEPS
        assert watched["problems"] == []
