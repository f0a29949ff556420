"""Files on the hub by ranges: the right bytes or none, few requests, and what servers do in practice."""

from __future__ import annotations

import random
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import joma
from joma._checkpoints import ranges, weights
from joma._checkpoints.budget import needed, parse_bytes, show_bytes, transfer
from joma._checkpoints.checkpoints import Checkpoint
from joma._checkpoints.reading import BadCheckpoint, read_bytes
from joma._checkpoints.row import ScanRequest
from joma._checkpoints.tensors import Tensors
from tests.checkpoints.hubserver import Hub, commit
from tests.checkpoints.models import lower, save, stable_rank

constants = pytest.importorskip("huggingface_hub.constants")
REPO = "someone/model"
LAYERS, ROWS, COLUMNS = 4, 512, 1024  # 2 MB per matrix
EXPECTED = [stable_rank(w) for w in lower("neox")]


def tensors():
    generator = torch.Generator().manual_seed(0)
    parts = ("a.up", "b.down", "c.other")
    return {
        f"layers.{n}.{part}.weight": torch.randn(ROWS, COLUMNS, generator=generator)
        for n in range(LAYERS)
        for part in parts
    }


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("remote")
    for how in ("safetensors", "bin", "legacy"):
        (folder / how).mkdir()
    save_file(tensors(), folder / "safetensors/model.safetensors")
    torch.save(tensors(), folder / "bin/pytorch_model.bin")
    torch.save(tensors(), folder / "legacy/pytorch_model.bin", _use_new_zipfile_serialization=False)
    save("neox", folder / "neox", "sharded")
    return {path.name: path for path in folder.iterdir()}


@pytest.fixture
def server(files, tmp_path, monkeypatch):
    hub = Hub(REPO, dict(files))
    monkeypatch.setenv("JOMA_CACHE", str(tmp_path / "joma"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    with hub.serving() as url:
        monkeypatch.setattr(constants, "ENDPOINT", url)
        monkeypatch.setattr(
            constants,
            "HUGGINGFACE_CO_URL_TEMPLATE",
            url + "/{repo_id}/resolve/{revision}/{filename}",
        )
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        yield hub


def opened(revision: str, limit: int | None = None) -> tuple[Tensors, ranges.TransferMeter]:
    found = Checkpoint(revision, 0, repo=REPO).revision(limit=limit)
    assert found is not None
    return found.tensors(ranges=True), found.meter


@pytest.mark.parametrize("how", ["safetensors", "bin"])
def test_only_what_is_needed_comes_in_one_request_per_run(how, server):
    names = [f"layers.{n}.a.up.weight" for n in range(LAYERS)]
    remote, meter = opened(how)
    views = [remote.view(name) for name in names]
    remote.announce(views)
    assert sum(view.nbytes for view in views) == LAYERS * ROWS * COLUMNS * 4
    for name in names:
        assert torch.equal(remote.read(name), tensors()[name])
    needed = LAYERS * ROWS * COLUMNS * 4
    assert needed <= server.sent <= needed + 3 * 64 * 1024 + LAYERS * 1024
    assert meter.spent == server.sent
    assert server.heads + len(server.log) <= 4 + LAYERS


@pytest.mark.parametrize("how", ["safetensors", "bin"])
def test_neighbours_come_together(how, server):
    names = [f"layers.1.{part}.weight" for part in ("a.up", "b.down", "c.other")]
    remote, _ = opened(how)
    remote.announce(remote.view(name) for name in names)
    before = len(server.log)
    for name in reversed(names):  # in any order
        assert torch.equal(remote.read(name), tensors()[name])
    assert len(server.log) - before == 1


def test_parts_of_a_tensor_in_any_precision(server, files):
    whole = torch.randn(300, 500, generator=torch.Generator().manual_seed(1)).half()
    (files["safetensors"].parent / "half").mkdir(exist_ok=True)
    save_file({"w": whole}, files["safetensors"].parent / "half/model.safetensors")
    server.revisions["half"] = files["safetensors"].parent / "half"
    remote, _ = opened("half")
    for view in (whole[10:200], whole[:, 3:50], whole.T[5:9], whole[::7, ::3]):
        part = remote.view("w").part(tuple(view.shape), view.stride(), int(view.storage_offset()))
        assert torch.equal(remote.read(part), view.float())


@pytest.mark.parametrize("seed", range(5))
def test_any_reads_in_any_order_are_the_files_bytes(seed, server, files, monkeypatch):
    """With limits so small that stretches are merged, dropped, given up and asked for again."""
    for name, value in {
        "GAP_BYTES": 50,
        "_MAX_JOINED_BYTES": 700,
        "_MIN_WINDOW": 64,
        "_MAX_WINDOW": 256,
        "_MAX_STRETCHES": 2,
        "_BLOCK_BYTES": 100,
    }.items():
        monkeypatch.setattr(ranges, name, value)
    content, draw = (
        (files["safetensors"] / "model.safetensors").read_bytes()[:20_000],
        random.Random(seed),
    )
    folder = files["safetensors"].parent / f"any{seed}"
    folder.mkdir(exist_ok=True)
    (folder / "x.bin").write_bytes(content)
    server.revisions["any"] = folder
    server.breaks = 3
    revision = Checkpoint("any", 0, repo=REPO).revision()
    assert revision is not None
    reader = revision.reader("x.bin")
    assert reader is not None
    spans = [
        (begin, begin + draw.choice((0, 3, 90, 2000)))
        for begin in (draw.randrange(18_000) for _ in range(30))
    ]
    reader.expect(spans[:20])
    draw.shuffle(spans)
    for begin, end in spans:
        assert read_bytes(reader, begin, end - begin) == content[begin:end]
    with pytest.raises(BadCheckpoint, match="cut off"):
        read_bytes(reader, len(content) - 3, 4)


def test_a_server_without_ranges(server, tmp_path):
    server.ranges = False
    scan = joma.scan(REPO, revisions="neox")
    assert scan.frame().value.tolist() == pytest.approx(EXPECTED, rel=1e-4)
    assert list((tmp_path / "joma/downloads").iterdir()) == []


def test_another_place_than_asked_for_is_refused(server):
    server.lies = 8
    note = joma.scan(REPO, revisions="neox").checkpoints().note[0]
    assert "were asked for, and the hub sent bytes 8-" in note


def test_addresses_that_expire_are_resolved_again(server):
    server.stored = True
    remote, _ = opened("safetensors")
    name = "layers.2.b.down.weight"
    server.fresh = 1
    assert torch.equal(remote.read(name), tensors()[name])
    assert server.heads == 2


def test_a_file_that_changes_meanwhile_is_refused(server, files):
    server.stored = True
    remote, _ = opened("safetensors")
    server.fresh = 1
    server.revisions["safetensors"] = files["bin"].parent / "moved"
    server.revisions["safetensors"].mkdir()
    save_file({"w": torch.zeros(5)}, server.revisions["safetensors"] / "model.safetensors")
    with pytest.raises(BadCheckpoint, match="changed on the hub while it was read"):
        remote.read("layers.2.b.down.weight")


def test_a_branch_that_moves_meanwhile_is_read_at_its_commit(server):
    revision = Checkpoint("bin", 0, repo=REPO).revision()
    assert revision is not None
    assert revision.reader("pytorch_model.bin") is not None
    seen = []
    server.name = lambda asked: (
        seen.append(asked) or {commit(key): key for key in server.revisions}.get(asked, asked)
    )
    assert revision.reader("pytorch_model.bin") is not None
    assert revision.fetch("config.json") is None
    assert set(seen) == {commit("bin")}


def test_a_busy_server_is_asked_again_later(server):
    server.busy = [429, 503, 429]
    scan = joma.scan(REPO, revisions="neox")
    assert scan.failed == []
    assert server.busy == []


def test_connections_that_break_go_on_where_they_were(server):
    remote, _ = opened("safetensors")
    server.sent, server.breaks = 0, 3
    name = "layers.3.b.down.weight"
    assert torch.equal(remote.read(name), tensors()[name])
    assert server.breaks == 0
    assert server.sent == ROWS * COLUMNS * 4
    server.refuses = 500
    with pytest.raises(BadCheckpoint, match=r"cannot be read from the hub: .*500"):
        remote.read("layers.1.b.down.weight")


def test_a_limit_is_kept_before_it_is_passed(server, files):
    size = (files["legacy"] / "pytorch_model.bin").stat().st_size
    remote, meter = opened("safetensors", limit=3_000_000)
    remote.read("layers.0.a.up.weight")
    with pytest.raises(BadCheckpoint, match=r"4\.3 MB would be transferred .* is 3\.0 MB"):
        remote.read("layers.1.a.up.weight")
    assert meter.spent == server.sent < 3_000_000
    server.sent = 0
    with pytest.raises(BadCheckpoint, match="its share of the budget"):
        opened("legacy", limit=size // 2)
    assert server.sent < 1_000_000
    whole, _ = opened("legacy", limit=2 * size)
    assert "read whole" in whole.notes[0]


def test_a_budget_is_announced_and_refused_beforehand(server, files, monkeypatch):
    monkeypatch.setattr(
        weights, "_plans", {}
    )  # a plan of an earlier test would spare this one some headers
    said = []
    scan = joma.scan(REPO, revisions="neox", report=lambda done, total, what: said.append(what))
    transferred = int(scan.checkpoints().transferred[0])
    each = transfer(
        [Checkpoint("neox", 0, repo=REPO)],
        partial(needed, request=ScanRequest(gauges=("stable_rank",))),
    )
    assert each is not None
    small = sum(
        (files["neox"] / name).stat().st_size
        for name in ("config.json", "model.safetensors.index.json")
    )
    assert transferred == each - small  # these two came when it was asked
    assert (
        f"to be transferred from the hub: about {show_bytes(each)}, 1 × {show_bytes(each)}" in said
    )
    with pytest.raises(
        ValueError,
        match=r"2 checkpoints of .* the budget is 200 kB: choose 1 of them \(--revisions",
    ):
        joma.scan(REPO, revisions="neox,neox2", budget="200kB")
    assert joma.scan(REPO, revisions="neox", budget=each).failed == []
    missing = joma.scan(
        REPO, revisions="neox2", budget="1MB", report=lambda done, total, what: said.append(what)
    )
    assert "has no revision neox2" in missing.checkpoints().note[0]
    assert "to be transferred from the hub: not known beforehand, 1 checkpoints" in said
    assert [parse_bytes(text) for text in ("20GB", "1.5 MiB", 3e9, 7)] == [
        20 * 10**9,
        3 << 19,
        3 * 10**9,
        7,
    ]
    for wrong in ("20 apples", "", "-3GB", "0"):
        with pytest.raises(ValueError, match="is no amount of bytes"):
            parse_bytes(wrong)


def test_a_token_is_for_the_hub_only(server, monkeypatch):
    monkeypatch.setattr("huggingface_hub.utils._headers.get_token_to_send", lambda token: "secret")
    server.stored = True
    place, _ = ranges.locate(f"{constants.ENDPOINT}/{REPO}/resolve/bin/pytorch_model.bin", None)
    assert "localhost" in place.url
    assert "authorization" not in place.headers
    server.stored = False
    place, _ = ranges.locate(f"{constants.ENDPOINT}/{REPO}/resolve/bin/pytorch_model.bin", None)
    assert place.headers["authorization"] == "Bearer secret"


def test_nothing_is_left_behind(server, tmp_path):
    joma.scan(REPO, revisions="neox", gauges="stable_rank,stable_rank.qk")
    assert [path for path in (tmp_path / "joma").rglob("*") if path.is_file()] == []
    assert not Path(constants.HF_HUB_CACHE).exists()


def test_interrupted_anywhere_and_started_again(server, files, tmp_path, monkeypatch):
    """As a kill would: in the middle of a transfer, with nothing tidied up."""
    server.revisions = {f"step{n}": files["neox"] for n in range(10)}
    whole = joma.scan(REPO, run=tmp_path / "whole", revisions="all")
    count, draw = ranges.TransferMeter.count, random.Random(1)

    def killed(meter, name, more):
        if draw.random() < 0.2:
            raise KeyboardInterrupt
        count(meter, name, more)

    interrupted = 0
    with monkeypatch.context() as patch:
        patch.setattr(ranges.TransferMeter, "count", killed)
        for _ in range(8):
            try:
                joma.scan(REPO, run=tmp_path / "run", revisions="all")
            except KeyboardInterrupt:
                interrupted += 1
    assert interrupted >= 4
    resumed = joma.scan(REPO, run=tmp_path / "run", revisions="all")
    assert sorted((resumed.path / "metrics.jsonl").read_text().splitlines()) == sorted(
        (whole.path / "metrics.jsonl").read_text().splitlines()
    )
    assert [path for path in (tmp_path / "joma").rglob("*") if path.is_file()] == []
