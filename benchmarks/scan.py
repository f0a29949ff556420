"""Stable rank of all lower MLP matrices of a checkpoint, against loading the model and full SVDs.

The checkpoint has the shape of Pythia-1.4B: 24 layers, 2048 → 8192, float16, random with spikes, sharded safetensors,
about 2.6 GB in a temporary folder. A full SVD of one of its matrices takes many seconds, so of the other side the
loading is measured whole, and the SVDs on ``svds`` matrices and taken times the number of layers; the row says so.

    python -m benchmarks.scan --layers 2     a small variant, printed only
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

import joma
from benchmarks._timing import peak_memory, row
from joma._checkpoints.tensors import Tensors

D, HIDDEN, HEADS, WORDS = 2048, 8192, 16, 50_304
SHARD = 500 << 20  # bytes


def write(folder: Path, layers: int) -> int:
    """A GPT-NeoX checkpoint in shards; returns the bytes of its lower MLP matrices."""
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, GPTNeoXConfig

    config = GPTNeoXConfig(
        hidden_size=D, intermediate_size=HIDDEN, num_hidden_layers=layers, num_attention_heads=HEADS, vocab_size=WORDS,
        dtype="float16", architectures=["GPTNeoXForCausalLM"], tie_word_embeddings=False,
    )  # fmt: skip
    config.save_pretrained(folder)
    with torch.device("meta"):
        shapes = {
            name: p.shape
            for name, p in AutoModelForCausalLM.from_config(config).state_dict().items()
        }
    generator = torch.Generator().manual_seed(0)
    shard: dict[str, torch.Tensor] = {}
    places: dict[str, str] = {}
    needed = 0

    def flush() -> None:
        file = f"model-{len(set(places.values())) + 1:05d}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        places.update(dict.fromkeys(shard, file))
        shard.clear()

    for name, shape in shapes.items():
        w = torch.randn(shape, generator=generator) * 0.02
        if name.endswith("dense_h_to_4h.weight"):
            for strength in (3.0, 2.0, 1.5):  # spikes over the bulk's edge at √D + √HIDDEN
                left, right = (
                    torch.randn(HIDDEN, generator=generator),
                    torch.randn(D, generator=generator),
                )
                bulk = 0.02 * (D**0.5 + HIDDEN**0.5)
                w += strength * bulk * torch.outer(left / left.norm(), right / right.norm())
            needed += 2 * w.numel()
        shard[name] = w.half()
        if sum(t.nbytes for t in shard.values()) > SHARD:
            flush()
    if shard:
        flush()
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": places})
    )
    return needed


_IMPORTS = """
import numpy as np, pandas, joma._checkpoints.scan, joma
import transformers.models.gpt_neox.modeling_gpt_neox
from transformers import CONFIG_MAPPING, AutoModel, AutoModelForCausalLM
AutoModel.from_config, CONFIG_MAPPING["gpt_neox"]
"""
_LOAD = """
model = AutoModelForCausalLM.from_pretrained({folder!r})
for n, layer in enumerate(model.gpt_neox.layers):
    w = layer.mlp.dense_h_to_4h.weight.detach().float().numpy()
    if n == 0:  # the others need the same once more
        np.linalg.svd(w, compute_uv=False)
"""


def run(layers: int = 24, svds: int = 2) -> list[dict[str, Any]]:
    """Time, peak memory, accuracy and bytes read, of one checkpoint that is written for it and deleted afterwards."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "step-1000"
        needed = write(folder, layers)
        start = time.perf_counter()
        scan = joma.scan(str(folder))
        mine = time.perf_counter() - start
        values = scan.frame().value.to_numpy()
        read = int(scan.checkpoints().bytes_read[0])
        if len(values) != layers:
            raise RuntimeError(
                f"{len(values)} matrices of {layers} were found: {scan.checkpoints().note[0]}"
            )
        loading, by_svd, error = _other_side(folder, values, min(svds, layers))
        theirs = loading + by_svd * layers
        ours = peak_memory(_IMPORTS, f"joma.scan({str(folder)!r})")
        other = peak_memory(_IMPORTS, _LOAD.format(folder=str(folder)))
    memory = (
        ""
        if ours is None or other is None
        else f", {ours:.0f} MiB against {other:.0f} (1/{other / ours:.1f})"
    )
    accuracy = (
        f"relative difference {error:.0e}; {read / needed:.3f} × the needed bytes read{memory}"
    )
    return [
        row(
            f"stable rank of the lower MLP of a checkpoint, {layers} layers, {D} → {HIDDEN}, fp16",
            "`joma scan`",
            f"`from_pretrained` and `numpy.linalg.svd` ({min(svds, layers)} of {layers} SVDs done, the rest "
            "extrapolated)",
            mine, theirs, accuracy, error=error, bytes_ratio=read / needed, joma_mib=ours, against_mib=other,
        )
    ]  # fmt: skip


def _other_side(folder: Path, values: Any, svds: int) -> tuple[float, float, float]:
    """Seconds to load, seconds an SVD, and the largest relative difference of the values."""
    from transformers import AutoModelForCausalLM

    start = time.perf_counter()
    model = AutoModelForCausalLM.from_pretrained(folder)
    loading = time.perf_counter() - start
    matrices = [layer.mlp.dense_h_to_4h.weight.detach() for layer in model.gpt_neox.layers]
    differences, seconds = [], []
    for n in range(svds):
        start = time.perf_counter()
        sigma = np.linalg.svd(matrices[n].float().numpy(), compute_uv=False).astype(np.float64)
        seconds.append(time.perf_counter() - start)
        differences.append(abs(values[n] / float((sigma**2).sum() / sigma[0] ** 2) - 1))
    same = Tensors.open(folder).read("gpt_neox.layers.0.mlp.dense_h_to_4h.weight")
    if not torch.equal(same, matrices[0].float()):
        raise RuntimeError("the two sides did not read the same matrix")
    return loading, float(np.mean(seconds)), max(differences)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scan", description=__doc__)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--svds", type=int, default=2)
    arguments = parser.parse_args()
    print(json.dumps(run(arguments.layers, arguments.svds), indent=2, ensure_ascii=False))
