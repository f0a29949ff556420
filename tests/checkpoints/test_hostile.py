"""Hostile files of every format, scanned in one process: a sentence each, nothing executed, little memory."""

from __future__ import annotations

import io
import json
import os
import pathlib
import pickle
import shutil
import struct
import subprocess
import sys
import zipfile

import pytest
import torch
from safetensors.torch import save_file

from tests.checkpoints.models import save

pytest.importorskip("transformers")
pytest.importorskip("gguf")
# bytes that a process takes more than one that scanned a healthy checkpoint: what PyTorch alone takes, 230 MB or
# 510 MB, depends on how it was built
MEMORY = 172 << 20

SCAN = """
import json, sys
from pathlib import Path
import gguf, transformers
import joma

def peak():  # of this process: ru_maxrss begins with its parent's
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return 1024 * int(line.split()[1])

hostile, healthy = sys.argv[1:]
assert joma.scan(healthy).checkpoints().status.tolist() == ["ok"]
before = peak()
scan = joma.scan(hostile)
table = scan.checkpoints()
print(json.dumps({"grown": peak() - before, "rows": dict(zip(table.checkpoint, zip(table.status, table.note)))}))
"""


class Program:
    """Pickled as a call that makes a folder."""

    def __init__(self, marker, call=os.mkdir):
        self.marker, self.call = marker, call

    def __reduce__(self):
        return self.call, (str(self.marker),)


def header(table: bytes, data: int = 64) -> bytes:
    return len(table).to_bytes(8, "little") + table + bytes(data)


def entry(name: str, shape: list[int], offsets: list[int]) -> str:
    return json.dumps({name: {"dtype": "F32", "shape": shape, "data_offsets": offsets}})[1:-1]


def with_pickle(path, content: bytes) -> None:
    """A file of torch.save whose pickle is replaced."""
    memory = io.BytesIO()
    torch.save({"w.weight": torch.zeros(2, 2)}, memory)
    with zipfile.ZipFile(memory) as old, zipfile.ZipFile(path, "w") as new:
        for item in old.infolist():
            new.writestr(
                item.filename, content if item.filename.endswith("data.pkl") else old.read(item)
            )


def repacked(path, grow: int) -> None:
    with zipfile.ZipFile(path) as archive:
        items = {item.filename: archive.read(item) for item in archive.infolist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in items.items():
            archive.writestr(name, content + bytes(grow) * ("/data/" in name))


def deep_key() -> bytes:
    """{((…), (…)): None}, whose hash takes 2^100 steps."""
    return (
        b"\x80\x02})"
        + b"".join(b"q" + bytes([n]) + b"h" + bytes([n]) + b"\x86" for n in range(100))
        + b"Ns."
    )


def gguf(kind: int, count: int, shape: tuple[int, ...] = (32, 8), offset: int = 0) -> bytes:
    """A GGUF file with one array and one tensor."""
    key = struct.pack("<Q", 1) + b"a" + struct.pack("<IIQ", 9, kind, count) + bytes(count == 1)
    name = b"blk.0.ffn_up.weight"
    tensor = (
        struct.pack("<Q", len(name))
        + name
        + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, 0, offset)
    )
    return b"GGUF" + struct.pack("<IQQ", 3, 1, 1) + key + tensor + bytes(200)


def write_all(root, marker) -> None:
    """One folder per hostile checkpoint, each named step-N-what."""

    def put(name, content, file="model.safetensors"):
        folder = root / f"step-{len(list(root.iterdir()))}-{name}"
        folder.mkdir()
        path = folder / file
        if isinstance(content, bytes):
            path.write_bytes(content)
        elif content is not None:
            torch.save(content, path)
        return path

    put("header-longer-than-the-file", (1 << 62).to_bytes(8, "little") + bytes(100))
    put("header-of-lists", header(b'{"a":[' + b"[]," * 3_000_000 + b"1]}"))
    put("header-nested", header(b'{"a":' * 300_000 + b"1" + b"}" * 300_000))
    put("overlap", header(f"{{{entry('a', [4], [0, 16])},{entry('b', [4], [8, 24])}}}".encode()))
    put(
        "shape-of-billions",
        header(f"{{{entry('layers.0.fc1.weight', [1 << 40, 1 << 40], [0, 16])}}}".encode()),
    )
    put(
        "names",
        header(f"{{{entry('a', [2, 2], [0, 16])},{entry('a.b', [2, 2], [16, 32])}}}".encode()),
    )
    put("index", b'{"weight_map": {"a": "../../../etc/passwd"}}', "model.safetensors.index.json")
    put("index-of-no-names", b'{"weight_map": {"a": []}}', "model.safetensors.index.json")
    endless = entry("layers.0.fc1.weight", [1, 4], [0, 16]).replace("[1, 4]", "[1e999, 4]")
    put("shape-of-infinity", header(f"{{{endless}}}".encode()))
    fractions = entry("layers.0.fc1.weight", [1, 4], [0, 16]).replace("[0, 16]", "[0.0, 16.0]")
    put("offsets-that-are-no-integers", header(f"{{{fractions}}}".encode()))
    put(
        "index-of-lists",
        b'{"weight_map": [' + b"[]," * 3_000_000 + b"1]}",
        "model.safetensors.index.json",
    )
    weights = {"layers.0.fc1.weight": torch.zeros(1, 1).expand(1 << 18, 1 << 18)}
    put("zip-repeats", weights, "pytorch_model.bin")
    put("zip-program", {"a": Program(marker)}, "pytorch_model.bin")
    put("zip-eval", {"a": Program("1", eval)}, "model.ckpt")
    repacked(put("zip-bomb", {"a": torch.zeros(10)}, "pytorch_model.bin"), 100 << 20)
    with_pickle(
        put("pickle-room", None, "model.pt"),
        b"\x80\x02cbuiltins\nbytearray\n\x8a\x06\x00\x00\x00\x00\x00\x10\x85R.",
    )
    with_pickle(put("pickle-key", None, "model.pt"), deep_key())
    with_pickle(put("pickle-lists", None, "model.pt"), b"\x80\x02" + b"]" * 2_500_000 + b".")
    many_classes = b"".join(b"cmodule\nname%d\n0" % number for number in range(300_000))
    with_pickle(put("pickle-classes", None, "model.pt"), b"\x80\x02" + many_classes + b"N.")
    with_pickle(put("pickle-memo", None, "model.pt"), b"\x80\x02Nr\xff\xff\xff\xff.")
    lattice = {"a.weight": torch.zeros(2)}
    for _ in range(60):
        lattice = {"x": lattice, "y": lattice}
    put("pickle-lattice", lattice, "model.pt")
    put("legacy-program", pickle.dumps({"a": Program(marker)}), "pytorch_model.bin")
    legacy = put("legacy-storage", None, "pytorch_model.bin")
    torch.save({"a": torch.zeros(4)}, legacy, _use_new_zipfile_serialization=False)
    data = legacy.read_bytes()
    assert data.count(b"K\x04") >= 1
    legacy.write_bytes(data.replace(b"K\x04", b"\x8a\x05\x00\x00\x00\x00\x20"))  # 2^37 numbers
    put("gguf-endless", gguf(0, 1 << 62), "model.gguf")
    put("gguf-endless-texts", gguf(8, 1 << 62), "model.gguf")
    put("gguf-huge", gguf(0, 1, (1 << 30, 1 << 30)), "model.gguf")
    put("gguf-outside", gguf(0, 1, offset=1 << 62), "model.gguf")
    put("dcp-program", pickle.dumps(Program(marker)), ".metadata")
    put("dcp-key", deep_key(), ".metadata")
    put("dcp-memo", b"\x80\x04Nr\xff\xff\xff\xff.", ".metadata")
    adapter = put(
        "adapter-settings", b'{"peft_type": "LORA", "lora_alpha": 1e999}', "adapter_config.json"
    ).parent
    save_file({"base_model.model.layers.0.fc1.lora_A.weight": torch.ones(2, 4),
               "base_model.model.layers.0.fc1.lora_B.weight": torch.ones(8, 2)},
              adapter / "adapter_model.safetensors")  # fmt: skip
    empty = put(
        "adapter-rank", b'{"peft_type": "LORA", "lora_alpha": 1}', "adapter_config.json"
    ).parent
    save_file({"base_model.model.layers.0.fc1.lora_A.weight": torch.ones(0, 4),
               "base_model.model.layers.0.fc1.lora_B.weight": torch.ones(8, 0)},
              empty / "adapter_model.safetensors")  # fmt: skip
    for layers in (10**6, 10**12):
        model = put(f"config-{layers}", b"", "nothing").parent
        shutil.rmtree(model)
        save("neox", model)
        config = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps(config | {"num_hidden_layers": layers}))


@pytest.mark.skipif(
    not pathlib.Path("/proc/self/status").exists(), reason="the peak of memory is Linux's"
)
def test_each_has_a_sentence_nothing_runs_and_memory_stays_small(tmp_path):
    root, marker = tmp_path / "hostile", tmp_path / "executed"
    root.mkdir()
    write_all(root, marker)
    save("neox", tmp_path / "healthy")
    command = [sys.executable, "-c", SCAN, str(root), str(tmp_path / "healthy")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert len(told["rows"]) == len(list(root.iterdir())) >= 34
    for name, (status, note) in told["rows"].items():
        assert status == "failed", name
        assert " " in note, name
        for word in ("weights_only", "Error:", "Traceback", "\n"):
            assert word not in note, (name, note)
    assert not marker.exists()
    assert told["grown"] < MEMORY, f"{told['grown'] / 2**20:.0f} MiB"
