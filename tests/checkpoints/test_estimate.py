"""The estimate of a transfer: a function of the request and the files, and enough as a budget."""

from __future__ import annotations

from functools import partial

import pytest

import joma
from joma._checkpoints import weights
from joma._checkpoints.audit.facts import Level, transfer_of
from joma._checkpoints.budget import needed, show_bytes, transfer
from joma._checkpoints.checkpoints import Checkpoint
from joma._checkpoints.row import ScanRequest
from tests.checkpoints.hubserver import Hub
from tests.checkpoints.models import save

constants = pytest.importorskip("huggingface_hub.constants")
REPO = "someone/model"
FORMATS = ("safetensors", "sharded", "bin", "sharded bin", "legacy")
TOKENS = {"data": list(range(48)), "tokens": 48, "length": 24}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Return the same model in all formats."""
    root = tmp_path_factory.mktemp("remote")
    for how in FORMATS:
        save("neox", root / how, how)
    return {how.replace(" ", "-"): root / how for how in FORMATS}


@pytest.fixture
def server(folders, tmp_path, monkeypatch):
    hub = Hub(REPO, dict(folders))
    monkeypatch.setenv("JOMA_CACHE", str(tmp_path / "joma"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(weights, "_plans", {})  # as in a new process
    with hub.serving() as url:
        monkeypatch.setattr(constants, "ENDPOINT", url)
        monkeypatch.setattr(
            constants,
            "HUGGINGFACE_CO_URL_TEMPLATE",
            url + "/{repo_id}/resolve/{revision}/{filename}",
        )
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        yield hub


def estimate(revision: str, gauges: str = "stable_rank", keep: bool = False) -> int | None:
    request = ScanRequest(gauges=tuple(gauges.split(",")), keep=keep, data=TOKENS["data"])
    return transfer([Checkpoint(revision, 0, repo=REPO)], partial(needed, request=request))


def audit_estimate(revision: str, level: str) -> int | None:
    return transfer([Checkpoint(revision, 0, repo=REPO)], partial(transfer_of, level=Level(level)))


@pytest.mark.parametrize("gauges", ["stable_rank", "change", "entropy"])
@pytest.mark.parametrize("revision", ["sharded", "bin", "legacy"])
def test_caches_and_earlier_calls_do_not_change_it(revision, gauges, server):
    """Not the plans of this process, nor the files of joma's cache, nor those of the hub's."""
    cold = estimate(revision, gauges)
    assert estimate(revision, gauges) == cold
    joma.scan(REPO, revisions=[revision], gauges=gauges, **TOKENS)
    assert estimate(revision, gauges) == cold
    joma.scan(
        REPO, revisions=[revision], gauges="entropy", keep=True, **TOKENS
    )  # all files are in the hub's cache now
    assert estimate(revision, gauges) == cold
    weights._plans.clear()
    assert estimate(revision, gauges) == cold


@pytest.mark.parametrize("level", ["hashes", "slices", "full"])
@pytest.mark.parametrize("revision", ["sharded", "bin"])
def test_caches_do_not_change_that_of_an_audit(revision, level, server):
    cold = audit_estimate(revision, level)
    assert audit_estimate(revision, level) == cold
    joma.scan(REPO, revisions=[revision], gauges="entropy", keep=True, **TOKENS)
    assert audit_estimate(revision, level) == cold


@pytest.mark.parametrize("gauges", ["stable_rank", "change"])
def test_a_slow_network_does_not_change_it(gauges, server):
    fast = estimate("safetensors", gauges)
    server.piece = 1000
    server.pause = 0.002
    assert estimate("safetensors", gauges) == fast


def test_it_is_the_sum_of_what_is_read(server, folders):
    """Config, index and all shards: each of them has layers whose shapes count, and fits into one request."""
    names = [
        "config.json",
        "model.safetensors.index.json",
        *(f"model-{n:05d}-of-00010.safetensors" for n in range(1, 11)),
    ]
    assert estimate("sharded") == sum((folders["sharded"] / name).stat().st_size for name in names)


@pytest.mark.parametrize(
    "gauges", ["stable_rank", "stable_rank,change.o", "entropy", "entropy,stable_rank"]
)
@pytest.mark.parametrize("revision", [how.replace(" ", "-") for how in FORMATS])
def test_a_budget_of_what_is_announced_suffices(revision, gauges, server, folders):
    """Also for the checkpoint after the first, which reads two of them for changes."""
    server.revisions = {"step0": folders[revision], "step1": folders[revision]}
    each = estimate("step0", gauges)
    assert each is not None
    announced: list[str] = []
    options = {"revisions": "step0,step1", "gauges": gauges, **TOKENS}
    scan = joma.scan(
        REPO, **options, budget=2 * each, report=lambda done, total, what: announced.append(what)
    )
    assert scan.failed == [], scan.checkpoints().note.tolist()
    assert (
        f"to be transferred from the hub: about {show_bytes(2 * each)}, 2 × {show_bytes(each)}"
        in announced
    )
    assert max(scan.checkpoints().transferred) <= each
    with pytest.raises(ValueError, match="give a larger one"):
        joma.scan(REPO, **options, budget=2 * each - 1)


@pytest.mark.parametrize("level", ["slices", "full"])
@pytest.mark.parametrize("revision", ["safetensors", "sharded", "sharded-bin", "legacy"])
def test_a_budget_of_what_is_announced_suffices_for_an_audit(revision, level, server, folders):
    server.revisions = {"step0": folders[revision], "step1": folders[revision]}
    each = audit_estimate("step0", level)
    assert each is not None
    audit = joma.audit(REPO, revisions="step0,step1", level=level, budget=2 * each)
    assert "unreadable" not in {fault.kind for fault in audit.faults}
    assert 0 < max(audit.checkpoints().transferred) <= each


def test_nothing_is_announced_without_a_connection(server, monkeypatch):
    joma.scan(REPO, revisions="safetensors", keep=True)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert estimate("safetensors") == 0
