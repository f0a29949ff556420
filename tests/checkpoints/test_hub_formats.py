"""GGUF and torch.distributed checkpoints on the hub: the same numbers as here, from the bytes that are needed."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch

import joma
from joma._checkpoints.checkpoints import Checkpoint
from joma._checkpoints.tensors import Tensors
from tests.checkpoints.gguf_files import llama_gguf
from tests.checkpoints.hubserver import Hub
from tests.checkpoints.models import lower, model, stable_rank

constants = pytest.importorskip("huggingface_hub.constants")
gguf = pytest.importorskip("gguf")
pytest.importorskip("transformers")
REPO = "someone/model"
LAYERS, ROWS, COLUMNS = 3, 512, 1024  # 1 MB per matrix in half precision
PARTS = ("ffn_gate", "ffn_up", "ffn_down")


def matrix(n: int, part: str) -> np.ndarray:
    return (
        np.random.default_rng([n, PARTS.index(part)])
        .normal(size=(ROWS, COLUMNS))
        .astype(np.float16)
    )


def distributed(folder, state) -> None:
    import torch.distributed.checkpoint as dcp

    moments = {"state": {"w.exp_avg": torch.zeros(8)}}
    with warnings.catch_warnings(action="ignore"):  # that there is one process
        dcp.save({"model": state, "optimizer": moments}, checkpoint_id=folder, no_dist=True)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("remote")
    for name in ("large", "lone", "several", "chunks", "neox"):
        (root / name).mkdir()
    writer = gguf.GGUFWriter(root / "large/large.gguf", "llama")
    for n in range(LAYERS):
        for part in PARTS:
            writer.add_tensor(f"blk.{n}.{part}.weight", matrix(n, part))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    llama_gguf(root / "lone/tiny.gguf")
    for kind in ("F32", "Q8_0"):
        llama_gguf(root / f"several/tiny-{kind}.gguf", kind)
    state = {
        f"layers.{n}.{part}.weight": torch.from_numpy(matrix(n, part))
        for n in range(LAYERS)
        for part in PARTS
    }
    distributed(root / "chunks", state)
    distributed(root / "neox", dict(model("neox").state_dict()))
    model("neox").config.save_pretrained(root / "neox")
    return {path.name: path for path in root.iterdir()}


@pytest.fixture
def server(folders, tmp_path, monkeypatch):
    hub = Hub(REPO, folders)
    monkeypatch.setenv("JOMA_CACHE", str(tmp_path / "joma"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    with hub.serving() as url:
        monkeypatch.setattr(constants, "ENDPOINT", url)
        monkeypatch.setattr(
            constants,
            "HUGGINGFACE_CO_URL_TEMPLATE",
            url + "/{repo_id}/resolve/{revision}/{filename}",
        )
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        yield hub


def opened(revision: str) -> Tensors:
    found = Checkpoint(revision, 0, repo=REPO).revision()
    assert found is not None
    return found.tensors(ranges=True)


@pytest.mark.parametrize(("revision", "name"), [("large", "mlp.gate_proj"), ("chunks", "ffn_gate")])
def test_only_the_tensors_that_are_needed_come(revision, name, server):
    remote, names = opened(revision), [f"layers.{n}.{name}.weight" for n in range(LAYERS)]
    remote.announce(remote.view(name) for name in names)
    before = len(server.log)
    for n, tensor in enumerate(names):
        assert torch.equal(
            remote.read(tensor), torch.from_numpy(matrix(n, "ffn_gate").astype(np.float32))
        )
    needed = LAYERS * ROWS * COLUMNS * 2
    assert (
        needed <= server.sent <= needed + 256 * 1024
    )  # the header or table, and chunks have headers of their own
    assert len(server.log) - before == LAYERS  # a matrix in one request


@pytest.mark.parametrize(("revision", "family"), [("lone", "llama"), ("neox", "neox")])
def test_scans_are_those_of_the_same_files_here(revision, family, server, folders):
    """Weights by ranges, and what needs the whole model; nothing stays."""
    sample = {"data": list(range(48)), "tokens": 48, "length": 24}
    remote = joma.scan(REPO, revisions=[revision])
    assert remote.frame().value.tolist() == pytest.approx(
        [stable_rank(w) for w in lower(family)], rel=1e-5
    )
    there = joma.scan(REPO, revisions=[revision], gauges="entropy", **sample)
    here = joma.scan(folders[revision], gauges="entropy", **sample)
    assert there.failed == [], there.checkpoints().note[0]
    assert there.frame().value.tolist() == here.frame().value.tolist()


def test_one_of_several_files_is_named(server):
    note = joma.scan(REPO, revisions=["several"]).checkpoints().note[0]
    assert "several files of weights (tiny-F32.gguf, tiny-Q8_0.gguf)" in note
    assert f"{REPO}/tiny-F32.gguf" in note
    scan = joma.scan(f"{REPO}/tiny-F32.gguf", revisions=["several"], budget="1MB")
    assert scan.frame().value.tolist() == pytest.approx(
        [stable_rank(w) for w in lower("llama")], rel=1e-5
    )
    assert (
        joma.embedding_geometry(
            f"{REPO}/tiny-Q8_0.gguf", torch.arange(40), revision="several"
        ).dimension
        == 32
    )


def test_an_audit_takes_the_hubs_own_hashes_of_them(server):
    found = joma.audit(REPO, revisions=["lone", "chunks", "large"], level="hashes")
    assert not [fault for fault in found.faults if "no weights" in str(fault)]
    assert server.sent == 0
