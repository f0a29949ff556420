"""Models from checkpoints: the one way in, for scans, `joma.superpose` and `joma.embedding_geometry`.

transformers knows the families, and which tensors of a file make up which parameters. It is given a config and tensors
that were read and checked here: no file is opened by it, no other repository is asked, nothing is unpickled.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

from joma._checkpoints import hub
from joma._checkpoints.formats import lone_file, quantised
from joma._checkpoints.guard import bounded, check_config
from joma._checkpoints.reading import BadCheckpoint
from joma._checkpoints.revision import Revision
from joma._checkpoints.tensors import Tensors
from joma._data.packaged import MODELS, packaged
from joma._data.pretrained import quiet, source_of, transformers_library

# keys of a config that name code: of the repository, of kernels on the hub, of a method of quantisation
_CODE = (
    "auto_map",
    "attn_implementation",
    "experts_implementation",
    "use_kernels",
    "kernel",
    "quantization_config",
)


# families whose checkpoints may be older than the key ``model_type``
_OLD_FAMILIES = ("bert", "roberta", "distilbert", "albert")


def open_tensors(name: str | os.PathLike[str], revision: str | None = None) -> Tensors:
    """The tensors of a model: a folder with a config.json, a GGUF file, a model in a package, or an id of the hub.

    Downloads go into the hub's cache.
    """
    path = packaged(name) or Path(name).expanduser()
    check_one_model(name)
    gguf = lone_file(path) if path.is_dir() and not (path / "config.json").is_file() else path
    if gguf is not None and gguf.suffix == ".gguf" and gguf.is_file():
        return Tensors.open(gguf)
    repo, file = hub.with_file(os.fspath(name))
    if path.is_dir():
        name = path  # also of a packaged model
    source = source_of(name if file is None else repo, "config.json")
    if Path(source).is_dir():
        return with_family(Tensors.open(Path(source)))
    hub.check(source)
    return Revision(source, revision or "main", keep=True, file=file).tensors()


def check_one_model(name: str | os.PathLike[str]) -> None:
    """Refuse the name of a package that holds several models."""
    model = MODELS.get(os.fspath(name))
    if model is not None and model.names and packaged(name) is not None:
        raise ValueError(
            f"{name} holds {len(model.names)} models: give one of them, as {name}/{model.names[0]}"
        )


def with_family(tensors: Tensors) -> Tensors:
    """Complete a config.json without ``model_type``, as transformers wrote it until 2019.

    The names of the tensors begin with the family then: ``bert.encoder.layer.0…``.
    """
    config = tensors.config
    if config is None or "model_type" in config or "num_hidden_layers" not in config:
        return tensors
    prefixes = {name.partition(".")[0] for name in tensors.names}
    families = [family for family in _OLD_FAMILIES if family in prefixes]
    if len(families) == 1:
        tensors.config = {**config, "model_type": families[0]}
    return tensors


def known_config(config: dict[str, Any] | None) -> Any:
    """The config as transformers knows it; None without one, or of a family that it does not know."""
    if config is None or not isinstance(kind := config.get("model_type"), str):
        return None
    try:
        from transformers import CONFIG_MAPPING
    except ImportError:
        return None
    if kind not in CONFIG_MAPPING:
        return None
    check_config(config)
    try:
        with quiet():
            return CONFIG_MAPPING[kind].from_dict(_without_code(config))
    except Exception:  # a config that does not fit this version of transformers: the names will do
        return None


def _without_code(config: dict[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in config.items() if not key.lstrip("_").startswith(_CODE)}
    return {
        key: _without_code(value) if isinstance(value, dict) else value
        for key, value in kept.items()
    }


def model_of(
    config: dict[str, Any] | None, tensors: int, *, head: bool = False
) -> nn.Module | None:
    """The model on the meta device; None without a config, transformers, or a family that it knows by itself.

    ``tensors``: how many there are in the file: a model of far more modules is refused.
    ``head``: as it was trained, with what the config's ``architectures`` has on top.
    """
    known = known_config(config)
    if known is None:
        return None
    import transformers

    trained = (known.architectures or [""])[0] if head else ""
    family = getattr(transformers, str(trained), None)
    try:
        with torch.device("meta"), bounded(tensors):
            if isinstance(family, type) and issubclass(family, transformers.PreTrainedModel):
                return family(known)
            model: nn.Module = transformers.AutoModel.from_config(known)
            return model
    except BadCheckpoint:
        raise
    except Exception:  # as above
        return None


def load_model(tensors: Tensors) -> Any:
    """The model of a checkpoint without its head, in evaluation mode and float32."""
    transformers_library()
    if tensors.adapter is not None or any(".lora_" in name for name in tensors.names):
        raise BadCheckpoint(
            "it has the matrices of a LoRA adapter: save model.merge_and_unload(), and give that"
        )
    if why := tensors.incomplete or tensors.no_model or quantised(tensors.config, tensors.names):
        raise BadCheckpoint(why)
    shape = model_of(tensors.config, len(tensors.names))
    if shape is None:
        family = (tensors.config or {}).get("model_type")
        raise BadCheckpoint(
            f"the model cannot be built: transformers does not know the family {family!r} of its config.json, or its "
            "settings" if family else "the model itself is needed: a folder with a config.json that transformers knows"
        )  # fmt: skip
    state = {
        name: tensors.read(name)
        for name in sorted(tensors.names)
        if tensors.entry(name).dtype.is_floating_point
    }
    try:
        with quiet(), bounded(len(tensors.names)):
            model, loading = type(shape).from_pretrained(  # type: ignore[attr-defined]
                None, config=known_config(tensors.config), state_dict=state, dtype="float32",
                output_loading_info=True, ignore_mismatched_sizes=True,
            )  # fmt: skip
    except BadCheckpoint:
        raise
    except Exception as error:  # whatever a config can make transformers do
        raise BadCheckpoint(
            f"the model cannot be built: {(str(error).strip() or type(error).__name__).splitlines()[0]}"
        ) from error
    if loading["mismatched_keys"]:
        tensor, got, wanted = next(iter(loading["mismatched_keys"]))
        raise BadCheckpoint(
            f"{tensor} has shape {tuple(got)}, where the config asks for {tuple(wanted)}"
        )
    if missing := sorted(
        key for key in loading["missing_keys"] if "pooler" not in key
    ):  # which no gauge needs
        raise BadCheckpoint(
            f"weights of the model are missing: {', '.join(missing[:3])} ({len(missing)} in all)"
        )
    model.config.use_cache = False
    return model.eval()
