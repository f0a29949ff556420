"""Two gloo processes, DistributedDataParallel and fully_shard, against one process on the same data."""

from __future__ import annotations

import json
import math
import os
import socket
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

import joma
from joma._measure.gauges.rank import top_singular
from joma._runs.alerts import read_alerts
from tests.measure.watch.models import LENGTH, VOCABULARY, HandWrittenGPT, sharpen

GAUGES = (
    "entropy",
    "sink_mass",
    "max_logsumexp",
    "stable_rank",
    "spectral_norm",
    "effective_rank",
    "stable_rank.q",
)
STEPS = 3


def build() -> nn.Module:
    torch.manual_seed(0)
    return sharpen(HandWrittenGPT("sdpa", d=32, heads=4, hidden=150))


def batch(step: int) -> torch.Tensor:
    return torch.randint(VOCABULARY, (5, LENGTH), generator=torch.Generator().manual_seed(step))


def train(model: nn.Module, run: Path | None, part: slice, scale: float) -> list[dict[str, float]]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    metrics = []
    with joma.watch(model, run=run, every=2, gauges=GAUGES, processes="all") as w:
        for step in range(1, STEPS + 1):
            x = batch(step)[part]
            loss = nn.functional.cross_entropy(model(x)[:, :-1].flatten(0, 1), x[:, 1:].flatten())
            (loss * scale).backward()
            optimizer.step()
            optimizer.zero_grad()
            metrics.append(w.step(loss=loss))
    return metrics


def work(rank: int, kind: str, port: int, folder: str) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    try:
        if kind == "shards":
            result = shards()
        elif kind == "alone":
            result = alone(rank, Path(folder))
        elif kind == "not finite":
            result = not_finite(rank, Path(folder))
        else:
            model = build()
            if kind == "ddp":
                model = nn.parallel.DistributedDataParallel(model)
            else:
                from torch.distributed.fsdp import fully_shard

                for block in model.blocks:
                    fully_shard(block)
                fully_shard(model)
            # 3 and 2 of the 5 sequences: what is reduced are sums over queries, not means over processes
            part, share = (slice(0, 3), 3 / 5) if rank == 0 else (slice(3, 5), 2 / 5)
            result = train(model, Path(folder) / "run", part, 2 * share)
        (Path(folder) / f"{rank}.json").write_text(json.dumps(result))
    finally:
        dist.destroy_process_group()


def shards() -> dict[str, float]:
    """Stable rank of matrices sharded by rows, by columns, unevenly, replicated; zero and not finite."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(1)
    w = torch.randn(301, 150) @ torch.diag(torch.linspace(2, 0.1, 150))
    result = {}
    for name, placement in (("rows", Shard(0)), ("columns", Shard(1)), ("whole", Replicate())):
        for turned in (False, True):
            matrix = w.T.contiguous() if turned else w
            result[f"{name} {turned}"] = top_singular(
                distribute_tensor(matrix, mesh, [placement])
            ).stable_rank
    result["one row"] = top_singular(distribute_tensor(w[:1], mesh, [Shard(0)])).stable_rank
    result["zero"] = top_singular(distribute_tensor(0 * w, mesh, [Shard(0)])).stable_rank
    w[300, 3] = torch.nan
    result["nan"] = top_singular(distribute_tensor(w, mesh, [Shard(0)])).stable_rank
    return result


def run_two(kind: str, folder: Path) -> list:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.start_processes(work, args=(kind, port, str(folder)), nprocs=2, start_method="forkserver")
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.fixture(autouse=True)
def _forked(fork_server):
    """Two processes per test would import torch's distributed parts for 10 s each."""


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_two_processes_give_what_one_gives(kind, tmp_path):
    first, second = run_two(kind, tmp_path)
    expected = train(build(), None, slice(None), 1.0)
    assert [bool(m) for m in first] == [True, True, False]
    for mine, other, truth in zip(first, second, expected, strict=True):
        assert mine == other  # every process may log
        assert mine.keys() == truth.keys()
        for name, value in truth.items():
            assert mine[name] == pytest.approx(value, rel=1e-5, abs=1e-5), name
    run = joma.Run(tmp_path / "run")
    assert run.done
    assert len([row for row in run.rows() if row["gauge"] == "loss"]) == 2  # one process writes


def test_stable_rank_of_shards(tmp_path):
    first, second = run_two("shards", tmp_path)
    torch.manual_seed(1)
    sigma = torch.linalg.svdvals(
        (torch.randn(301, 150) @ torch.diag(torch.linspace(2, 0.1, 150))).double()
    )
    truth = float((sigma**2).sum() / sigma[0] ** 2)
    for result in (first, second):
        assert result.pop("zero") == 0.0
        assert math.isnan(result.pop("nan"))
        assert result.pop("one row") == pytest.approx(1.0)
        assert list(result.values()) == pytest.approx([truth] * 6, rel=1e-5)


def alone(rank: int, folder: Path) -> dict[str, object]:
    """The first process watches, the other does not; then both do, each its own; and sharded parameters."""
    model, part = (
        nn.parallel.DistributedDataParallel(build()),
        slice(0, 3) if rank == 0 else slice(3, 5),
    )
    gauges = ("entropy", "stable_rank")
    values = []
    for watches in (rank == 0, True):
        w = (
            joma.watch(model, run=folder / f"run{len(values)}", every=1, gauges=gauges)
            if watches
            else None
        )
        model(batch(1)[part]).sum().backward()
        values.append(w.step(loss=float(rank)) if w else {})
        if w:
            w.close()
    from torch.distributed.fsdp import fully_shard

    sharded = fully_shard(build())
    reasons = []
    for options in ({"gauges": "stable_rank"}, {"gauges": "entropy", "probe": batch(1)}):
        with pytest.raises(ValueError, match="processes='all' in every process"):
            joma.watch(sharded, **options)
        reasons.append("refused")
    w = joma.watch(sharded, every=1, gauges="entropy") if rank == 0 else None
    sharded(batch(1)[part])
    values.append(w.step() if w else {})
    if w:
        w.close()
    return {"values": values, "reasons": reasons}


def test_a_watch_in_one_process_waits_for_no_other(tmp_path):
    first, second = (result["values"] for result in run_two("alone", tmp_path))
    expected = []
    for part in (slice(0, 3), slice(3, 5)):
        model = build()
        with joma.watch(model, every=1, gauges=("entropy", "stable_rank")) as w:
            model(batch(1)[part])
            expected.append(w.step())
    entropy = {name: value for name, value in expected[0].items() if "entropy" in name}
    assert first == [pytest.approx(expected[0], rel=1e-6)] * 2 + [pytest.approx(entropy, rel=1e-6)]
    assert second == [{}, pytest.approx(expected[1], rel=1e-6), {}]
    losses = [
        joma.Run(tmp_path / name).frame("loss")["value"].item()
        for name in ("run0", "run1", "run1-rank1")
    ]
    assert losses == [0.0, 0.0, 1.0]


def not_finite(rank: int, folder: Path) -> list[dict[str, object]]:
    """An activation is infinite in step 2, in the second process only; the first one writes the run."""
    model = build()
    if rank == 1:
        calls = []

        def spoil(module, args, output):
            calls.append(output)
            return output * math.inf if len(calls) == 2 else output

        model.blocks[0].mlp[1].register_forward_hook(spoil)
    model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with joma.watch(model, run=folder / "run", every=1, processes="all") as w:
            for step in range(1, 5):
                x = batch(step)
                loss = nn.functional.cross_entropy(
                    model(x)[:, :-1].flatten(0, 1), x[:, 1:].flatten()
                )
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                w.step(loss=loss)
    phases = [phase.name for phase in w.phases]
    return [
        {"alert": alert.to_json(), "phases": phases}
        for alert in w.alerts
        if alert.kind == "not finite"
    ]


def test_what_is_not_finite_in_another_process_is_one_alert_that_names_the_module(tmp_path):
    for results in run_two("not finite", tmp_path):
        (result,) = results
        alert = result["alert"]
        assert (alert["step"], alert["gauge"], alert["module"]) == (
            2,
            "activations",
            "blocks.0.mlp.1",
        )
        assert result["phases"] == ["ended", "ended"]
    (written,) = read_alerts(tmp_path / "run")
    assert written["level"] == "critical"


def test_processes_are_own_or_all():
    with pytest.raises(ValueError, match="processes must be 'own' or 'all', got 'some'"):
        joma.watch(build(), processes="some")
