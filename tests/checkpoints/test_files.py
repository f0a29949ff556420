"""Reading tensors by their offsets: exact bytes, every format, and what must be refused."""

from __future__ import annotations

import json
import os
import pickle
import zipfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from joma._checkpoints.formats import open_file
from joma._checkpoints.reading import BadCheckpoint, LocalFile, ReaderStream
from joma._checkpoints.tensors import Tensors


@pytest.fixture
def read_bytes(monkeypatch):
    """How many bytes positioned reads gave, at the system call."""
    seen = []
    real = os.preadv

    def counting(*args):
        seen.append(real(*args))
        return seen[-1]

    monkeypatch.setattr(os, "preadv", counting)
    return seen


def matrices(dtype=torch.float16):
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(300, 200, generator=generator).to(dtype)
        for name in ("a.weight", "b.weight", "c.weight")
    }


@pytest.mark.parametrize("suffix", [".safetensors", ".bin"])
@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn]
)
def test_one_tensor_costs_its_own_bytes(suffix, dtype, tmp_path, read_bytes):
    tensors = matrices(dtype)
    path = tmp_path / f"model{suffix}"
    save_file(tensors, path) if suffix == ".safetensors" else torch.save(tensors, path)
    opened = Tensors.open(path)
    got = opened.read("b.weight")
    assert got.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert torch.equal(got, tensors["b.weight"].to(got.dtype))
    needed = tensors["b.weight"].nbytes
    assert opened.bytes_read == needed
    assert sum(read_bytes) <= 1.05 * needed  # the table of a safetensors file is in it


def test_bytes_counted_by_the_kernel(tmp_path):
    if not Path("/proc/self/io").exists():
        pytest.skip("Linux only")
    tensors = {f"{n}.weight": torch.randn(1000, 500) for n in range(4)}
    for suffix, write in ((".safetensors", save_file), (".bin", torch.save)):
        path = tmp_path / f"model{suffix}"
        write(tensors, path)
        Tensors.open(path).read("0.weight")  # imports and caches of the libraries
        before = int(Path("/proc/self/io").read_text().split()[1])
        Tensors.open(path).read("2.weight")
        read = int(Path("/proc/self/io").read_text().split()[1]) - before
        assert read <= 1.05 * tensors["2.weight"].nbytes


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_view_is_what_torch_shows(tmp_path_factory, data):
    path = tmp_path_factory.getbasetemp() / "views.safetensors"
    w = torch.arange(4 * 6 * 5, dtype=torch.float32).reshape(4, 6, 5)
    if not path.exists():
        save_file({"w": w}, path)
    view = w.permute(*data.draw(st.permutations(range(3))))
    for dim in range(3):
        size = view.shape[dim]
        start = data.draw(st.integers(0, size - 1))
        view = view.narrow(dim, start, data.draw(st.integers(1, size - start)))
        if data.draw(st.booleans()):
            view = view[(slice(None),) * dim + (slice(None, None, 2),)]
    file = open_file(LocalFile(path))
    part = file.view("w").part(tuple(view.shape), view.stride(), view.storage_offset())
    assert torch.equal(file.read(part), view)
    assert file.bytes_read == view.numel() * 4


def test_tensors_saved_as_views(tmp_path):
    w = torch.randn(30, 20)
    torch.save({"t": w.T, "part": w[4:9, 3:7]}, tmp_path / "a.pt")
    file = open_file(LocalFile(tmp_path / "a.pt"))
    assert torch.equal(file.read(file.view("t")), w.T)
    assert torch.equal(file.read(file.view("part")), w[4:9, 3:7])
    rows = file.view("t").part((5, 30), (30, 1), 60)  # rows 2 to 6 of the tensor as it is
    assert torch.equal(file.read(rows), w.T[2:7])


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("zipped", [True, False])
def test_views_in_every_precision_and_packing(dtype, zipped, tmp_path, monkeypatch):
    monkeypatch.setattr("joma._checkpoints.tensors._BLOCK_BYTES", 300)  # many blocks
    w = torch.randn(30, 20).to(dtype)
    torch.save({"w": w, "t": w.T}, tmp_path / "a.pt", _use_new_zipfile_serialization=zipped)
    opened = Tensors.open(tmp_path / "a.pt")
    assert torch.equal(opened.read("w"), w.float())
    assert torch.equal(opened.read("t"), w.T.float())
    for name, whole in (("w", w), ("t", w.T.contiguous())):
        view = whole.T[3:17, 2:9]
        part = opened.view(name).part(tuple(view.shape), view.stride(), view.storage_offset())
        assert torch.equal(opened.read(part), view.float())


def test_training_checkpoints_and_parameters(tmp_path):
    w = torch.nn.Parameter(torch.randn(4, 3))
    torch.save({"model": {"layer.weight": w}, "step": 7}, tmp_path / "a.pt")
    assert torch.equal(Tensors.open(tmp_path / "a.pt").read("layer.weight"), w.detach())


@pytest.mark.parametrize("packing", ["legacy", "deflated"])
def test_what_has_no_offsets_is_read_whole_and_says_so(packing, tmp_path):
    tensors = matrices()
    path = tmp_path / "pytorch_model.bin"
    torch.save(tensors, path, _use_new_zipfile_serialization=packing != "legacy")
    if packing == "deflated":
        with zipfile.ZipFile(path) as archive:
            items = [(item.filename, archive.read(item)) for item in archive.infolist()]
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, content in items:
                archive.writestr(name, content)
    opened = Tensors.open(tmp_path)
    if packing == "legacy":
        assert torch.equal(opened.read("c.weight"), tensors["c.weight"].float())
        assert opened.bytes_read == path.stat().st_size
        assert "read whole" in opened.notes[0]
    else:  # PyTorch itself may refuse such a zip; it must never give wrong numbers
        assert torch.equal(opened.read("c.weight"), tensors["c.weight"].float())


def test_a_zip_that_was_packed_again_is_read_where_its_records_are(tmp_path):
    """Not stored as PyTorch aligns them: PyTorch itself, on the meta device, tells offsets that are wrong then."""
    tensors = matrices(torch.float32)
    torch.save(tensors, tmp_path / "torch.bin")
    with (
        zipfile.ZipFile(tmp_path / "torch.bin") as old,
        zipfile.ZipFile(tmp_path / "pytorch_model.bin", "w") as new,
    ):
        for item in reversed(old.infolist()):
            new.writestr(item.filename, old.read(item))
    opened = Tensors.open(tmp_path)
    for name, tensor in tensors.items():
        assert torch.equal(opened.read(name), tensor)
    assert opened.bytes_read == sum(tensor.nbytes for tensor in tensors.values())


@pytest.mark.parametrize("size", [0, 1, 5, 1000])
def test_a_stream_reads_as_the_file_does(size, tmp_path):
    path = tmp_path / "file"
    path.write_bytes(bytes(range(256)) * 4)
    stream, plain = ReaderStream(LocalFile(path)), path.open("rb")
    with plain:
        for offset, whence in ((0, 0), (-10, 2), (100, 0), (5, 1), (0, 2)):
            assert stream.seek(offset, whence) == plain.seek(offset, whence)
            assert stream.read(size) == plain.read(size)
            assert stream.tell() == plain.tell()
    with pytest.raises(OSError, match="no byte -1"):
        stream.seek(-1)


class Bomb:
    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


@pytest.mark.parametrize("how", ["zip", "legacy", "plain pickle", "hidden in a shard"])
def test_malicious_pickles_are_refused_and_nothing_is_executed(how, tmp_path):
    marker = tmp_path / "executed"
    bad = {"a.weight": torch.randn(4, 4), "x": Bomb(marker)}
    folder = tmp_path / "model"
    folder.mkdir()
    name = "shard.bin" if how == "hidden in a shard" else "pytorch_model.bin"
    if how == "plain pickle":
        (folder / name).write_bytes(pickle.dumps(bad))
    else:
        torch.save(bad, folder / name, _use_new_zipfile_serialization=how != "legacy")
    if how == "hidden in a shard":
        (folder / "pytorch_model.bin.index.json").write_text(
            json.dumps({"weight_map": {"a.weight": name}})
        )
    with pytest.raises(BadCheckpoint, match="refused, nothing of it was executed"):
        Tensors.open(folder).read("a.weight")
    assert not marker.exists()
    with pytest.raises(FileNotFoundError):  # the bomb works, were it lit
        os.rmdir(marker)
    pickle.loads(pickle.dumps(Bomb(marker)))
    assert marker.exists()


@pytest.mark.parametrize("suffix", [".safetensors", ".bin"])
@pytest.mark.parametrize("share", [0.0, 0.00001, 0.3, 0.99])
def test_truncated_files_are_an_error(suffix, share, tmp_path):
    path = tmp_path / f"model{suffix}"
    save_file(matrices(), path) if suffix == ".safetensors" else torch.save(matrices(), path)
    os.truncate(path, int(share * path.stat().st_size))
    with pytest.raises(BadCheckpoint, match=r"cut off|damaged|no zip"):
        Tensors.open(path)


@pytest.mark.parametrize(
    "header",
    [
        b"not json",
        b'{"w": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 15]}}',
        b'{"w": {"dtype": "F32", "shape": [-2, -2], "data_offsets": [0, 16]}}',
        b'{"w": {"dtype": "F32", "shape": [2, 2], "data_offsets": [-16, 0]}}',
        b'{"w": {"dtype": "F32", "shape": [2, 2]}}',
        b'["w"]',
    ],
)
def test_damaged_headers_are_an_error(header, tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(16))
    with pytest.raises(BadCheckpoint, match="header is damaged"):
        Tensors.open(path)


@pytest.mark.parametrize(
    "shard",
    [
        "../secret.safetensors",
        "/etc/secret.safetensors",
        "a/../../b.bin",
        "C:\\x.bin",
        "..\\x.bin",
        "",
        3,
    ],
)
def test_shards_outside_of_the_checkpoint_are_refused(shard, tmp_path):
    save_file({"w": torch.ones(2, 2)}, tmp_path / "secret.safetensors")
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": shard}}))
    with pytest.raises(BadCheckpoint, match="outside of the checkpoint: refused"):
        Tensors.open(folder)


def test_shards_that_are_missing_or_do_not_hold_their_tensor(tmp_path):
    save_file({"w": torch.ones(2, 2)}, tmp_path / "a.safetensors")
    places = {"w": "a.safetensors", "x": "a.safetensors", "y": "b.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    opened = Tensors.open(tmp_path)
    assert opened.read("w").sum() == 4
    with pytest.raises(BadCheckpoint, match=r"x is in a\.safetensors, but it is not"):
        opened.read("x")
    with pytest.raises(BadCheckpoint, match=r"b\.safetensors that the index names is not there"):
        opened.read("y")


def test_no_weights(tmp_path):
    with pytest.raises(BadCheckpoint, match="no weights"):
        Tensors.open(tmp_path)
