"""Scans of models on the hub by ranges, on a local server that counts bytes.

python -m benchmarks.ranges bytes          bytes over the wire for the lower MLPs of a checkpoint of Pythia-1.4B's shape
python -m benchmarks.ranges kills          a scan that is killed 50 times at random, against one that is not
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

REPO = "someone/model"


@contextmanager
def hub(revisions: dict[str, Path], caches: Path) -> Iterator[Any]:
    """The server, and joma and huggingface_hub set up to ask it and nobody else."""
    from huggingface_hub import constants
    from tests.checkpoints.hubserver import Hub

    os.environ["JOMA_CACHE"] = str(caches / "joma")
    server = Hub(REPO, revisions)
    with server.serving() as url:
        _point(constants, url, caches)
        yield server


def _point(constants: Any, url: str, caches: Path) -> None:
    constants.ENDPOINT, constants.HF_HUB_OFFLINE = url, False
    constants.HUGGINGFACE_CO_URL_TEMPLATE = url + "/{repo_id}/resolve/{revision}/{filename}"
    constants.HF_HUB_CACHE = str(caches / "hub")


def measure_bytes(layers: int) -> list[dict[str, Any]]:
    """Bytes and requests of one checkpoint as sharded safetensors and as a zip of `torch.save`."""
    import joma
    from benchmarks.scan import write

    rows = []
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        needed = write(folder / "safetensors", layers)
        _as_zip(folder / "safetensors", folder / "zip")
        with hub(
            {name: folder / name for name in ("safetensors", "zip")}, folder / "caches"
        ) as server:
            for how in ("safetensors", "zip"):
                server.sent, server.heads, server.log = 0, 0, []
                scan = joma.scan(REPO, revisions=how)
                table = scan.checkpoints()
                if table.status[0] != "ok" or len(scan.frame()) != layers:
                    raise RuntimeError(f"{how}: {table.note[0]}")
                files = [
                    file
                    for file in (folder / how).iterdir()
                    if file.suffix in (".safetensors", ".bin")
                ]
                weights = [name for name in server.log if name.endswith((".safetensors", ".bin"))]
                rows.append(
                    {"format": how, "layers": layers, "files": len(files), "needed": needed, "sent": server.sent,
                     "ratio": server.sent / needed, "of_all": server.sent / sum(f.stat().st_size for f in files),
                     "requests": server.heads + len(weights), "values": scan.frame().value.tolist()}
                )  # fmt: skip
    if rows[0]["values"] != rows[1]["values"]:
        raise RuntimeError("the two formats have other values")
    return [{key: value for key, value in row.items() if key != "values"} for row in rows]


def _as_zip(source: Path, folder: Path) -> None:
    """The same weights as `torch.save` writes them, in two shards."""
    from safetensors.torch import load_file

    folder.mkdir()
    (folder / "config.json").write_bytes((source / "config.json").read_bytes())
    files = sorted(source.glob("*.safetensors"))
    places = {}
    for n, half in enumerate((files[: len(files) // 2], files[len(files) // 2 :])):
        state = {name: tensor for file in half for name, tensor in load_file(file).items()}
        torch.save(state, folder / f"pytorch_model-{n}.bin")
        places |= dict.fromkeys(state, f"pytorch_model-{n}.bin")
    (folder / "pytorch_model.bin.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": places})
    )


def measure_kills(kills: int, seed: int = 0) -> dict[str, Any]:
    """A scan of 40 checkpoints on the hub, killed so often at random and gone on with, against one that is not."""
    import joma
    from joma._checkpoints.scan import Scan

    choose, killed = random.Random(seed), 0
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        for step in range(40):
            _small(folder / f"remote/step{step}", step)
        process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.ranges", "serve", str(folder / "remote")],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        try:
            from huggingface_hub import constants

            os.environ["JOMA_CACHE"] = str(folder / "joma")
            _point(constants, url, folder)
            began = time.monotonic()
            whole = joma.scan(REPO, run=folder / "whole", revisions="all")
            each = (time.monotonic() - began) / 40
            run = folder / "run"
            while killed < kills:
                child = os.fork()
                if child == 0:  # dies without any chance to tidy up
                    joma.scan(REPO, run=run, revisions="all")
                    os._exit(0)
                time.sleep(choose.uniform(0.2, 4.0) * each)
                os.kill(child, signal.SIGKILL)
                killed += os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
            done = len(Scan(run).status()) if (run / "run.json").exists() else 0
            resumed = joma.scan(REPO, run=run, revisions="all")
        finally:
            process.terminate()
            process.wait()
        lines = [
            sorted((scan.path / "metrics.jsonl").read_text().splitlines())
            for scan in (whole, resumed)
        ]
        left = [
            str(file.relative_to(folder))
            for top in ("joma", "hub")
            for file in (folder / top).rglob("*")
            if file.is_file()
        ]
        inside = [{file.name for file in scan.path.iterdir()} for scan in (whole, resumed)]
    return {
        "kills": killed, "rows_done_by_then": done, "rows": len(lines[0]), "same_rows": lines[0] == lines[1],
        "files_left": left, "same_files_in_run": inside[0] == inside[1],
    }  # fmt: skip


def _small(folder: Path, seed: int) -> None:
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    generator = torch.Generator().manual_seed(seed)
    shapes = {"up": (256, 128), "down": (128, 256), "q": (128, 128)}
    names = {"up": "mlp.up_proj", "down": "mlp.down_proj", "q": "self_attn.q_proj"}
    state = {
        f"model.layers.{n}.{names[part]}.weight": torch.randn(shape, generator=generator)
        for n in range(8)
        for part, shape in shapes.items()
    }
    save_file(state, folder / "model.safetensors")


def serve(folder: Path) -> None:
    """Serve the revisions in a folder until it is ended."""
    from tests.checkpoints.hubserver import Hub

    with Hub(REPO, {path.name: path for path in sorted(folder.iterdir())}).serving() as url:
        print(url, flush=True)
        signal.pause()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ranges", description=__doc__)
    parser.add_argument("what", choices=("bytes", "kills", "serve"))
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--kills", type=int, default=50)
    arguments = parser.parse_args()
    if arguments.what == "serve":
        serve(arguments.folder)
    else:
        result = (
            measure_bytes(arguments.layers)
            if arguments.what == "bytes"
            else measure_kills(arguments.kills)
        )
        print(json.dumps(result, indent=2))
