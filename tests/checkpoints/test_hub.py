"""Models of the hub: its own cache layout offline, and a server that speaks its protocol."""

from __future__ import annotations

import errno
import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

import joma
from joma._checkpoints import hub
from joma._checkpoints.checkpoints import Checkpoint, find_checkpoints
from tests.checkpoints.hubserver import Hub, commit
from tests.checkpoints.models import lower, save, stable_rank

constants = pytest.importorskip("huggingface_hub.constants")
REPO = "someone/neox"


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub/models--someone--neox"


@pytest.fixture(autouse=True)
def downloads(tmp_path, monkeypatch):
    monkeypatch.setenv("JOMA_CACHE", str(tmp_path / "joma"))
    return tmp_path / "joma/downloads"


@pytest.fixture
def offline(monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


@pytest.fixture
def revisions(tmp_path):
    """Branches as folders: two alike, one sharded."""
    found = {}
    for step, how in (
        (0, "safetensors"),
        (1, "sharded"),
        (2, "sharded bin"),
        (1000, "safetensors"),
    ):
        found[f"step{step}"] = tmp_path / f"remote/step{step}"
        save("neox", found[f"step{step}"], how)
    return found


def put(cache: Path, revision: str, folder: Path) -> None:
    """As huggingface_hub lays it out: refs, blobs by hash, snapshots of links."""
    for name in ("refs", "blobs", f"snapshots/{commit(revision)}"):
        (cache / name).mkdir(parents=True, exist_ok=True)
    (cache / "refs" / revision).write_text(commit(revision))
    for file in folder.iterdir():
        data = file.read_bytes()
        blob = cache / "blobs" / hashlib.sha256(data).hexdigest()
        blob.write_bytes(data)
        os.symlink(blob, cache / "snapshots" / commit(revision) / file.name)


EXPECTED = [stable_rank(w) for w in lower("neox")]


def test_offline_from_the_cache(cache, offline, revisions):
    for revision in ("step0", "step1", "step1000"):
        put(cache, revision, revisions[revision])
    before = sorted(cache.rglob("*"))
    scan = joma.scan(REPO, revisions="step0,step1,step2,step1000")
    table = scan.checkpoints().set_index("checkpoint")
    assert table.status.to_dict() == {
        "step0": "ok",
        "step1": "ok",
        "step2": "failed",
        "step1000": "ok",
    }
    assert "not in the hub's cache" in table.note["step2"]
    assert table.same_as["step0"] == "step1, step1000"
    frame = scan.frame()
    assert frame[frame.step == 1].value.tolist() == pytest.approx(EXPECTED, rel=1e-4)
    assert sorted(cache.rglob("*")) == before  # what was there before stays
    assert [c.name for c in find_checkpoints(REPO, "all")] == ["step0", "step1", "step1000"]
    assert len(find_checkpoints(REPO, "pythia")) == 154
    assert [c.name for c in find_checkpoints(REPO, "0..20:10")] == ["step0", "step10", "step20"]
    assert [c.name for c in find_checkpoints(REPO)] == ["main"]


def test_nothing_there(cache, offline):
    with pytest.raises(ValueError, match="path of a local folder"):
        joma.scan("someone/else")


@pytest.fixture
def server(cache, revisions, monkeypatch):
    hub = Hub(REPO, revisions)
    with hub.serving() as url:
        monkeypatch.setattr(constants, "ENDPOINT", url)
        template = url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        yield hub


def weights(cache):
    return {p.name for p in cache.glob("snapshots/*/*") if p.suffix in (".safetensors", ".bin")}


def test_only_the_shards_that_are_needed_are_downloaded_and_deleted_again(server, cache, revisions):
    scan = joma.scan(REPO, revisions="all")
    assert scan.failed == []
    for step in (0, 1, 2, 1000):
        frame = scan.frame()
        assert frame[frame.step == step].value.tolist() == pytest.approx(EXPECTED, rel=1e-4)
    import json

    index = json.loads((revisions["step1"] / "model.safetensors.index.json").read_text())[
        "weight_map"
    ]
    needed = {shard for name, shard in index.items() if "dense_h_to_4h.weight" in name}
    asked = {name.removeprefix("step1/") for name in server.log if name.startswith("step1/")}
    assert needed < set(index.values())
    assert asked & set(index.values()) == needed
    assert weights(cache) == set()
    assert all(blob.stat().st_size < 20_000 for blob in cache.glob("blobs/*"))


def test_keep(server, cache):
    told = []
    joma.scan(REPO, revisions="step0", keep=True, report=lambda *args: told.append(args))
    assert weights(cache) == {"model.safetensors"}
    assert any("model.safetensors" in what for _, _, what in told)
    count = len(server.log)
    assert joma.scan(REPO, revisions="step0").failed == []
    assert len(server.log) == count  # from the cache
    assert weights(cache) == {"model.safetensors"}  # not this scan's to delete


def test_revisions_that_are_missing_and_models_that_do_not_exist(server):
    table = joma.scan(REPO, revisions="step0,step7").checkpoints()
    assert table.status.tolist() == ["ok", "failed"]
    assert "has no revision step7" in table.note[1]
    with pytest.raises(ValueError, match="no model of this name on the hub"):
        joma.scan("someone/typo")
    assert [c.name for c in find_checkpoints(REPO, "log:2")] == ["step0", "step1000"]


def test_attention_from_the_hub(server):
    scan = joma.scan(
        REPO,
        revisions="step1,step2",
        gauges="entropy",
        data=list(range(60)) * 2,
        length=20,
        tokens=100,
    )
    assert scan.failed == [], scan.checkpoints().note.tolist()
    values = [group.value.tolist() for _, group in scan.frame().groupby("step")]
    assert values[0] == pytest.approx(values[1])


def test_no_network(cache, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(
        ValueError,
        match=r"hub cannot be reached .*No network\? Then give the path of a local folder",
    ):
        joma.scan(REPO)


def test_nothing_in_the_hubs_cache_is_deleted(server, cache, revisions, downloads):
    """Two models share a blob, as with huggingface_hub's store of Xet files; one of them lacks its weights."""
    put(cache, "step0", revisions["step0"])
    (snapshot,) = cache.glob("snapshots/*")
    store = cache.parent / "blobs/ab"
    store.mkdir(parents=True)
    blob = (snapshot / "model.safetensors").resolve()
    blob.rename(store / blob.name)
    blob.symlink_to(store / blob.name)
    (snapshot / "model.safetensors").unlink()  # this model's link: the blob is others' now
    before = {path: path.is_symlink() or path.stat().st_size for path in cache.parent.rglob("*")}
    scan = joma.scan(REPO, revisions="step0,step1")
    assert scan.failed == []
    assert {
        path: path.is_symlink() or path.stat().st_size for path in cache.parent.rglob("*")
    } == before
    assert list(downloads.iterdir()) == []
    assert "step0/config.json" not in server.log  # it was in the cache


def test_the_model_is_put_together_from_the_cache_and_downloads(
    server, cache, revisions, downloads
):
    put(cache, "step1", revisions["step1"])
    (snapshot,) = cache.glob("snapshots/*")
    shard = sorted(snapshot.glob("*.safetensors"))[0]
    shard.unlink()
    scan = joma.scan(
        REPO, revisions="step1", gauges="entropy", data=list(range(60)), length=20, tokens=60
    )
    assert scan.failed == [], scan.checkpoints().note[0]
    assert [name for name in server.log if name.endswith(".safetensors")] == [f"step1/{shard.name}"]
    assert list(downloads.iterdir()) == []


def test_a_scan_that_was_killed_leaves_whole_files_for_the_next(
    server, cache, downloads, tmp_path, monkeypatch
):
    import joma._checkpoints.scan as module

    server.ranges = False  # with ranges there are no files to leave

    def killed(*args, **options):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(module, "_write", killed)
        with pytest.raises(KeyboardInterrupt):
            joma.scan(REPO, run=tmp_path / "run", revisions="step0")
    (left,) = (path for path in downloads.iterdir() if path.is_dir())
    half = left / "models--someone--neox/blobs/abc.1234.incomplete"
    half.write_bytes(b"0")
    count = len(server.log)
    revision = Checkpoint("step0", 0, repo=REPO).revision()
    assert revision is not None
    assert revision.fetch("model.safetensors") is not None
    assert not half.exists()
    assert joma.scan(
        REPO, run=tmp_path / "run", revisions="step0"
    ).frame().value.tolist() == pytest.approx(EXPECTED, rel=1e-4)
    assert len(server.log) == count
    assert left.is_dir()  # another is reading it
    revision.forget()
    assert list(downloads.iterdir()) == []


def test_the_cache_stands_in_for_the_hub_only_without_a_connection(
    server, cache, revisions, monkeypatch
):
    put(cache, "step0", revisions["step0"])
    hf = hub.library()
    assert hub.branches(REPO) == list(revisions)
    server.refuses = 403
    with pytest.raises(ValueError, match=r"the hub answers for someone/neox with an error .*403"):
        hub.branches(REPO)
    monkeypatch.setattr(hf.constants, "ENDPOINT", "http://127.0.0.1:9")
    assert hub.branches(REPO) == ["step0"]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES, errno.EROFS])
def test_a_disk_that_cannot_be_written_is_not_called_a_network(server, number, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(number, os.strerror(number), "/somewhere")

    monkeypatch.setattr(hub.library(), "hf_hub_download", full)
    note = joma.scan(REPO, revisions="step0").checkpoints().note[0]
    assert f"cannot be written to the disk ([Errno {number}]" in note
    assert "network" not in note


def test_main_comes_after_the_steps(server):
    found = find_checkpoints(REPO, "step0,main,step1000")
    assert [(c.name, c.step) for c in found] == [("step0", 0), ("main", 1001), ("step1000", 1000)]
    assert "has no step" in found[1].note


_LIGHT = """
import sys
import joma

for source in sys.argv[1:]:
    assert joma.scan(source).failed == [], joma.scan(source).checkpoints().note[0]
print(*sorted({name.partition(".")[0] for name in sys.modules} | {name for name in sys.modules if "joma" in name}))
"""


def test_a_scan_of_weights_imports_no_library_that_it_does_not_need(tmp_path):
    """Sharded models on the hub included: their shapes come from the shards that are read anyway."""
    for how in ("safetensors", "sharded"):
        save("neox", tmp_path / how, how)
    with Hub(REPO, {"main": tmp_path / "sharded"}).serving() as url:
        environment = {
            **os.environ,
            "HF_ENDPOINT": url,
            "HF_HOME": str(tmp_path / "hf"),
            "HF_HUB_OFFLINE": "0",
        }
        command = [sys.executable, "-c", _LIGHT, str(tmp_path / "safetensors"), REPO]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    heavy = {
        "transformers",
        "pandas",
        "altair",
        "scipy",
        "rich",
        "typer",
        "joma._measure.watch.watch",
        "joma._measure.events.source",
    }
    assert not heavy & set(done.stdout.split())
