"""Formats of checkpoints: what weights are called, and what is recognised, but not read, with the way out."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from joma._checkpoints.reading import BadCheckpoint

# what a checkpoint's weights are called, in the order of preference
SINGLE = ("model.safetensors", "pytorch_model.bin")
INDEX = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
ADAPTER, SETTINGS = (
    ("adapter_model.safetensors", "adapter_model.bin"),
    "adapter_config.json",
)  # what peft writes
METADATA, CHUNK = ".metadata", ".distcp"  # what torch.distributed.checkpoint writes
NAMES = (SINGLE[0], INDEX[0], SINGLE[1], INDEX[1], *ADAPTER)
SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf")

_BESIDES = re.compile(  # what trainers write beside the weights
    r"(optim|scheduler|scaler|rng_state|random_states|training_args|trainer_state).*|.*_optim_states|common"
)
_SHARD = re.compile(r".*\d+-of-\d+|consolidated\.\d+")
_MEGATRON = ("model_optim_rng.pt", "model_rng.pt")
_ZERO = re.compile(r".*(mp_rank_\d+_model_states|_optim_states)\.pt")


def weight_names(names: Iterable[str]) -> list[str]:
    """The files that may each be the weights of a checkpoint: no shards, no states of optimisers."""
    files = [PurePosixPath(name) for name in names if "/" not in name and not name.startswith(".")]
    alone = [
        file for file in files if file.suffix in SUFFIXES and not _BESIDES.fullmatch(file.stem)
    ]
    return sorted(file.name for file in alone if not _SHARD.fullmatch(file.stem))


def weight_files(folder: Path) -> list[Path]:
    """Those of a folder."""
    try:
        names = [
            file.name for file in folder.iterdir() if file.suffix in SUFFIXES and file.is_file()
        ]
    except OSError:
        return []
    return [folder / name for name in weight_names(names)]


def has_weights(folder: Path) -> bool:
    """Whether a folder is a checkpoint by the names of its files."""
    return any((folder / name).is_file() for name in (*NAMES, METADATA))


def lone_file(folder: Path) -> Path | None:
    """The one file of weights in a folder, whatever it is called; also Meta's and Megatron's where it is one part."""
    parts = sorted(folder.glob("consolidated.*.pth"))
    ranks = [rank for rank in folder.glob("mp_rank_*") if rank.is_dir()]
    megatron = [
        file for name in _MEGATRON if len(ranks) == 1 and (file := ranks[0] / name).is_file()
    ]
    files = weight_files(folder) + (parts if len(parts) == 1 else []) + megatron
    return files[0] if len(files) == 1 else None


def refusal(folder: Path) -> str | None:
    """Why the weights in a folder are not read, and what to do; None if none were recognised."""
    names = sorted(entry.name for entry in folder.iterdir()) if folder.is_dir() else []
    inside = [
        child.name
        for name in names
        if name.startswith("global_step")
        for child in (folder / name).glob("*.pt")
    ]
    if "zero_to_fp32.py" in names or any(map(_ZERO.fullmatch, [*names, *inside])):
        root = folder if "zero_to_fp32.py" in names or inside else folder.parent
        return (
            f"{folder.name} is a DeepSpeed (ZeRO) checkpoint, in which each process has a part of the weights: make "
            f"one of them by `python {root / 'zero_to_fp32.py'} {root} {root}`, which DeepSpeed put there, then scan "
            "again"
        )
    tp = [name for name in names if re.fullmatch(r"mp_rank_\d+(_\d+)*", name)]
    if tp:
        return (
            f"{folder.name} is a Megatron checkpoint in {len(tp)} parts (tensor or pipeline parallel): convert it to "
            "one, with Megatron's tools/checkpoint/convert.py or by saving it as --ckpt-format torch_dist"
        )
    if (
        ".zmetadata" in names
        or any(name.endswith(".zarr") for name in names)
        or "common.pt" in names
    ):
        return f"{folder.name} is a Megatron checkpoint in zarr: save it again as --ckpt-format torch_dist"
    if any(name.startswith("consolidated.") and name.endswith(".pth") for name in names):
        return (
            f"{folder.name} has Meta's format, a part of each matrix per file: convert it with transformers' "
            "convert_llama_weights_to_hf.py, or take the version in the hub's format"
        )
    if any(_SHARD.fullmatch(Path(name).stem) and name.endswith(".gguf") for name in names):
        return f"{folder.name} has GGUF in several parts: join them with `llama-gguf-split --merge FIRST OUT.gguf`"
    if any(
        _SHARD.fullmatch(Path(name).stem) and name.endswith((".safetensors", ".bin"))
        for name in names
    ):
        return f"{folder.name} has shards of weights, but not their index ({' or '.join(INDEX)}): download it too"
    others = {
        "tf_model.h5": "TensorFlow", "flax_model.msgpack": "Flax", "model.onnx": "ONNX", "checkpoint": "TensorFlow",
        "_CHECKPOINT_METADATA": "Orbax (JAX)", "rust_model.ot": "Rust",
    }  # fmt: skip
    if kind := next((kind for name, kind in others.items() if name in names), None):
        return f"{folder.name} has weights of {kind} only: save them as safetensors first"
    return None


def check_inside(shard: object, index: str, suffixes: tuple[str, ...] = SUFFIXES) -> None:
    """A shard is a file below the index, never one elsewhere."""
    text = str(shard)
    outside = any(
        path.is_absolute() or path.drive or path.root or ".." in path.parts
        for path in (PurePosixPath(text), PureWindowsPath(text))
    )
    if not isinstance(shard, str) or not text or outside:
        raise BadCheckpoint(
            f"{index} names the shard {shard!r}, which is outside of the checkpoint: refused"
        )
    if not text.endswith(suffixes):
        raise BadCheckpoint(f"{index} names the shard {shard!r}, which is no file of weights")


_METHODS = {
    "gptq": "GPTQ", "awq": "AWQ", "bitsandbytes": "bitsandbytes", "mxfp4": "MXFP4", "fp8": "FP8 with scales",
    "compressed-tensors": "compressed-tensors", "hqq": "HQQ", "quanto": "Quanto", "torchao": "torchao",
}  # fmt: skip
_BY_NAME = {  # ends of tensors' names -> method
    "GPTQ": (".g_idx",),
    "GPTQ or AWQ": (".qweight", ".qzeros"),
    "bitsandbytes": (".absmax", ".SCB", ".weight_format", "bitsandbytes__nf4", "bitsandbytes__fp4"),
    "MXFP4": ("_blocks",),
    "compressed-tensors": (".weight_packed",),
    "torchao": ("._weight_qdata",),
    "FP8 with scales": (".weight_scale_inv", ".weight_scale"),
}
_TO_FULL = {"bitsandbytes", "MXFP4", "FP8 with scales"}  # those that transformers gives back


def quantised(config: Mapping[str, Any] | None, names: Iterable[str]) -> str | None:
    """How weights are quantised, and the way out; by the config or the names of tensors, None if they are not."""
    settings = (config or {}).get("quantization_config")
    method = (
        _METHODS.get(str(settings.get("quant_method")).lower())
        if isinstance(settings, Mapping)
        else None
    )
    if method is None:
        names = list(names)
        method = next(
            (m for m, ends in _BY_NAME.items() if any(name.endswith(ends) for name in names)), None
        )
    if method is None:
        return None
    way = (
        "AutoModel.from_pretrained(…).dequantize().save_pretrained(FOLDER, save_original_format=False) and scan that, "
        "or scan the original"
        if method in _TO_FULL
        else "scan the original model, from which it was made"
    )
    return f"the weights are quantised ({method}), and only the numbers that they stand for can be measured: {way}"
