"""``python -m benchmarks.partial_reads``: bytes from the disk when parts of a safetensors file are read, cold cache.

The up-projections and the fused queries (64 rows of every 192) of 12 layers, by joma's positioned reads and by
`safe_open`, which maps the file into memory. Counts are the kernel's (``/proc/self/io``): this needs Linux.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from joma._checkpoints.formats import open_file
from joma._checkpoints.reading import LocalFile

LAYERS, WIDTH, HEADS = 12, 1024, 16
HEAD = WIDTH // HEADS


def positioned(path: Path) -> None:
    """With joma."""
    file = open_file(LocalFile(path))
    for n in range(LAYERS):
        file.read(file.view(f"{n}.up"))
        stride = (3 * HEAD * WIDTH, WIDTH, 1)
        file.read(file.view(f"{n}.qkv").part((HEADS, HEAD, WIDTH), stride, 0))


def mapped(path: Path) -> None:
    """With safetensors."""
    with safe_open(path, "pt") as file:
        for n in range(LAYERS):
            file.get_tensor(f"{n}.up").sum()
            fused = file.get_slice(f"{n}.qkv")
            torch.stack([fused[3 * HEAD * h : 3 * HEAD * h + HEAD] for h in range(HEADS)])


def from_disk(read: Callable[[Path], None], path: Path) -> float:
    """Megabytes that the kernel read for us, the file not being in its cache at the start."""

    def count() -> int:
        return int(
            next(line for line in open("/proc/self/io") if line.startswith("read_bytes")).split()[1]
        )

    os.sync()
    with path.open("rb") as stream:
        os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    before = count()
    read(path)
    return (count() - before) / 1e6


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        shapes = {"qkv": (3 * WIDTH, WIDTH), "up": (4 * WIDTH, WIDTH), "down": (WIDTH, 4 * WIDTH)}
        save_file(
            {
                f"{n}.{name}": torch.randn(shape)
                for n in range(LAYERS)
                for name, shape in shapes.items()
            },
            path,
        )
        print(
            f"of {path.stat().st_size / 1e6:.0f} MB, {LAYERS * 5 * WIDTH * WIDTH * 4 / 1e6:.0f} MB are asked for"
        )
        print(f"positioned reads: {from_disk(positioned, path):.0f} MB from the disk")
        print(f"safe_open:        {from_disk(mapped, path):.0f} MB from the disk")
