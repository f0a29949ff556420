"""The files of a checkpoint's folder by name: its weights, or why they cannot be read."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path, PurePosixPath, PureWindowsPath

from joma._checkpoints.reading import BadCheckpoint

SINGLE = ("model.safetensors", "pytorch_model.bin")
INDEX = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
# Written by peft.
ADAPTER = ("adapter_model.safetensors", "adapter_model.bin")
ADAPTER_SETTINGS = "adapter_config.json"
# Written by torch.distributed.checkpoint.
DCP_TABLE = ".metadata"
DCP_CHUNK = ".distcp"
# All names that weights usually have, in the order of preference.
NAMES = (SINGLE[0], INDEX[0], SINGLE[1], INDEX[1], *ADAPTER)
SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf")

# What trainers write next to the weights: optimisers, schedulers, random states, arguments.
_TRAINING_STATE = re.compile(
    r"(optim|scheduler|scaler|rng_state|random_states|training_args|trainer_state).*"
    r"|.*_optim_states|common"
)
# One of several files that make up the weights: model-00001-of-00002, Meta's consolidated.00.
_SHARD = re.compile(r".*\d+-of-\d+|consolidated\.\d+")
# Megatron and DeepSpeed write a folder or a file per process (mp_rank_00, …).
_MEGATRON_FILES = ("model_optim_rng.pt", "model_rng.pt")
_MEGATRON_RANK = re.compile(r"mp_rank_\d+(_\d+)*")
_DEEPSPEED_FILE = re.compile(r".*(mp_rank_\d+_model_states|_optim_states)\.pt")
_DEEPSPEED_SCRIPT = "zero_to_fp32.py"
# Files by which the weights of other frameworks are recognised.
_OTHER_FRAMEWORKS = {
    "tf_model.h5": "TensorFlow",
    "flax_model.msgpack": "Flax",
    "model.onnx": "ONNX",
    "checkpoint": "TensorFlow",
    "_CHECKPOINT_METADATA": "Orbax (JAX)",
    "rust_model.ot": "Rust",
}


def weight_names(names: Iterable[str]) -> list[str]:
    """Return the files that may each be all weights of a checkpoint: no shards, no other state."""
    weights = []
    for name in names:
        if "/" in name or name.startswith("."):
            continue
        file = PurePosixPath(name)
        is_other = _TRAINING_STATE.fullmatch(file.stem) or _SHARD.fullmatch(file.stem)
        if file.suffix in SUFFIXES and not is_other:
            weights.append(file.name)
    return sorted(weights)


def weight_files(folder: Path) -> list[Path]:
    """Return the files of a folder that may each be all weights of a checkpoint."""
    try:
        files = [file for file in folder.iterdir() if file.suffix in SUFFIXES and file.is_file()]
    except OSError:
        return []
    return [folder / name for name in weight_names(file.name for file in files)]


def has_weights(folder: Path) -> bool:
    """True if a folder is a checkpoint by the names of its files."""
    return any((folder / name).is_file() for name in (*NAMES, DCP_TABLE))


def lone_file(folder: Path) -> Path | None:
    """Return the one file of weights in a folder, whatever its name; None if there are several.

    The formats of Meta and Megatron have one file per process. It is the one if there is one only.
    """
    files = weight_files(folder)
    meta_parts = sorted(folder.glob("consolidated.*.pth"))
    if len(meta_parts) == 1:
        files += meta_parts
    ranks = [rank for rank in folder.glob("mp_rank_*") if rank.is_dir()]
    if len(ranks) == 1:
        for name in _MEGATRON_FILES:
            file = ranks[0] / name
            if file.is_file():
                files.append(file)
    if len(files) == 1:
        return files[0]
    return None


def refusal(folder: Path) -> str | None:
    """Return why the weights in a folder cannot be read, and what to do; None if there are none."""
    names: list[str] = []
    if folder.is_dir():
        names = sorted(entry.name for entry in folder.iterdir())
    # The first that recognises the folder decides.
    for recognize in (_deepspeed, _megatron, _meta, _shards, _other_framework):
        reason = recognize(folder, names)
        if reason is not None:
            return reason
    return None


def _deepspeed(folder: Path, names: Sequence[str]) -> str | None:
    in_steps = []
    for name in names:
        if name.startswith("global_step"):
            in_steps += [file.name for file in (folder / name).glob("*.pt")]
    has_script = _DEEPSPEED_SCRIPT in names
    if not has_script and not any(map(_DEEPSPEED_FILE.fullmatch, [*names, *in_steps])):
        return None
    root = folder.parent
    if has_script or in_steps:
        root = folder
    return (
        f"{folder.name} is a DeepSpeed (ZeRO) checkpoint, in which each process has a part of the "
        f"weights: make one of them by `python {root / _DEEPSPEED_SCRIPT} {root} {root}`, which "
        "DeepSpeed put there, then scan again"
    )


def _megatron(folder: Path, names: Sequence[str]) -> str | None:
    ranks = [name for name in names if _MEGATRON_RANK.fullmatch(name)]
    if ranks:
        return (
            f"{folder.name} is a Megatron checkpoint in {len(ranks)} parts (tensor or pipeline "
            "parallel): convert it to one, with Megatron's tools/checkpoint/convert.py or by "
            "saving it as --ckpt-format torch_dist"
        )
    has_zarr = any(name.endswith(".zarr") for name in names)
    if has_zarr or ".zmetadata" in names or "common.pt" in names:
        return (
            f"{folder.name} is a Megatron checkpoint in zarr: save it again as "
            "--ckpt-format torch_dist"
        )
    return None


def _meta(folder: Path, names: Sequence[str]) -> str | None:
    if any(name.startswith("consolidated.") and name.endswith(".pth") for name in names):
        return (
            f"{folder.name} has Meta's format, a part of each matrix per file: convert it with "
            "transformers' convert_llama_weights_to_hf.py, or take the version in the hub's format"
        )
    return None


def _shards(folder: Path, names: Sequence[str]) -> str | None:
    shards = [name for name in names if _SHARD.fullmatch(Path(name).stem)]
    if any(name.endswith(".gguf") for name in shards):
        return (
            f"{folder.name} has GGUF in several parts: join them with "
            "`llama-gguf-split --merge FIRST OUT.gguf`"
        )
    if any(name.endswith((".safetensors", ".bin")) for name in shards):
        return (
            f"{folder.name} has shards of weights, but not their index ({' or '.join(INDEX)}): "
            "download it too"
        )
    return None


def _other_framework(folder: Path, names: Sequence[str]) -> str | None:
    for name, framework in _OTHER_FRAMEWORKS.items():
        if name in names:
            return f"{folder.name} has weights of {framework} only: save them as safetensors first"
    return None


def check_inside(shard: object, index: str, suffixes: tuple[str, ...] = SUFFIXES) -> None:
    """Check that a file that an index names lies below the index, and is a file of weights."""
    text = str(shard)
    is_inside = isinstance(shard, str) and bool(text)
    # An index may come from another system: what is a path elsewhere on Windows is refused, too.
    for path in (PurePosixPath(text), PureWindowsPath(text)):
        if path.is_absolute() or path.drive or path.root or ".." in path.parts:
            is_inside = False
    if not is_inside:
        raise BadCheckpoint(
            f"{index} names the shard {shard!r}, which is outside of the checkpoint: refused"
        )
    if not text.endswith(suffixes):
        raise BadCheckpoint(f"{index} names the shard {shard!r}, which is no file of weights")
