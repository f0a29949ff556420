"""Models from checkpoints: the one way in for scans, superposition and geometry of embeddings.

transformers knows the families, and which tensors of a file make up which parameters. It is given a
config and tensors that were read and checked here: it opens no file, asks no other repository, and
unpickles nothing.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from joma._checkpoints import hub
from joma._checkpoints.folder import lone_file
from joma._checkpoints.reading import BadCheckpoint
from joma._checkpoints.revision import Revision
from joma._checkpoints.tensors import Tensors
from joma._data.packaged import MODELS, packaged
from joma._data.pretrained import quiet, source_of, transformers_library

# Keys of a config that name code: of the repository, of kernels on the hub, of a quantisation.
_CODE_KEYS = (
    "auto_map",
    "attn_implementation",
    "experts_implementation",
    "use_kernels",
    "kernel",
    "quantization_config",
)

# Families whose checkpoints may be older than the key ``model_type``.
_OLD_FAMILIES = ("bert", "roberta", "distilbert", "albert")
_BARE_BERT = (
    "embeddings.word_embeddings.weight",
    "encoder.layer.0.attention.self.query.weight",
)

# transformers makes lists of as many items as a config has layers, before it builds a layer.
_LAYER_KEYS = re.compile("(layers?|blocks|depth|stages|experts)$")
_MAX_LAYERS = 100_000
# A model has fewer modules than this per tensor of its file, plus some for small models. With
# `num_hidden_layers: 10**6`, it would be built for hours.
_MODULES_PER_TENSOR = 10
_MODULES_MORE = 2_000

# Names of quantisations in a config -> as their authors write them.
_METHODS = {
    "gptq": "GPTQ",
    "awq": "AWQ",
    "bitsandbytes": "bitsandbytes",
    "mxfp4": "MXFP4",
    "fp8": "FP8 with scales",
    "compressed-tensors": "compressed-tensors",
    "hqq": "HQQ",
    "quanto": "Quanto",
    "torchao": "torchao",
}
# Endings of tensors' names that only quantised weights have, for files without a config.
_METHODS_BY_NAME_ENDINGS = {
    "GPTQ": (".g_idx",),
    "GPTQ or AWQ": (".qweight", ".qzeros"),
    "bitsandbytes": (".absmax", ".SCB", ".weight_format", "bitsandbytes__nf4", "bitsandbytes__fp4"),
    "MXFP4": ("_blocks",),
    "compressed-tensors": (".weight_packed",),
    "torchao": ("._weight_qdata",),
    "FP8 with scales": (".weight_scale_inv", ".weight_scale"),
}
_DEQUANTIZED_BY_TRANSFORMERS = {"bitsandbytes", "MXFP4", "FP8 with scales"}


def open_tensors(name: str | os.PathLike[str], revision: str | None = None) -> Tensors:
    """Open a model: a folder with a config.json, a GGUF file, a model in a package, or a hub id.

    Downloads go into the hub's cache.
    """
    path = packaged(name) or Path(name).expanduser()
    check_one_model(name)
    file: Path | None = path
    if path.is_dir() and not (path / "config.json").is_file():
        file = lone_file(path)
    if file is not None and file.suffix == ".gguf" and file.is_file():
        return Tensors.open(file)
    repo, repo_file = hub.with_file(os.fspath(name))
    if path.is_dir():
        name = path  # also of a packaged model
    if repo_file is not None:
        name = repo
    source = source_of(name, "config.json")
    if Path(source).is_dir():
        return with_family(Tensors.open(Path(source)))
    hub.check(source)
    return Revision(source, revision or "main", keep=True, file=repo_file).tensors()


def check_one_model(name: str | os.PathLike[str]) -> None:
    """Refuse the name of a package that holds several models."""
    model = MODELS.get(os.fspath(name))
    if model is not None and model.names and packaged(name) is not None:
        raise ValueError(
            f"{name} holds {len(model.names)} models: give one of them, as {name}/{model.names[0]}"
        )


def with_family(tensors: Tensors) -> Tensors:
    """Complete a config.json without ``model_type``, as transformers wrote it until 2019.

    The names of the tensors begin with the family: ``bert.encoder.layer.0…``. A BERT that was saved
    without its head has no such prefix.
    """
    config = tensors.config
    if config is None or "model_type" in config or "num_hidden_layers" not in config:
        return tensors
    names = tensors.names()
    prefixes = {name.partition(".")[0] for name in names}
    families = [family for family in _OLD_FAMILIES if family in prefixes]
    # RoBERTa has the same names, and one type of tokens instead of two.
    if all(name in names for name in _BARE_BERT) and config.get("type_vocab_size") == 2:
        families = ["bert"]
    if len(families) == 1:
        tensors.config = {**config, "model_type": families[0]}
    return tensors


def quantization_problem(config: Mapping[str, Any] | None, names: Iterable[str]) -> str | None:
    """Return how weights are quantised and the way out; None if they are not quantised."""
    method = None
    settings = (config or {}).get("quantization_config")
    if isinstance(settings, Mapping):
        method = _METHODS.get(str(settings.get("quant_method")).lower())
    if method is None:
        method = _method_by_names(list(names))
    if method is None:
        return None
    remedy = "scan the original model, from which it was made"
    if method in _DEQUANTIZED_BY_TRANSFORMERS:
        remedy = (
            "AutoModel.from_pretrained(…).dequantize().save_pretrained(FOLDER, "
            "save_original_format=False) and scan that, or scan the original"
        )
    return (
        f"the weights are quantised ({method}), and only the numbers that they stand for can be "
        f"measured: {remedy}"
    )


def _method_by_names(names: list[str]) -> str | None:
    for method, endings in _METHODS_BY_NAME_ENDINGS.items():
        if any(name.endswith(endings) for name in names):
            return method
    return None


def known_config(config: dict[str, Any] | None) -> Any:
    """Return the config as transformers knows it; None for a family that it does not know."""
    if config is None or not isinstance(config.get("model_type"), str):
        return None
    try:
        from transformers import CONFIG_MAPPING
    except ImportError:
        return None
    family = config["model_type"]
    if family not in CONFIG_MAPPING:
        return None
    _check_layers(config)
    try:
        with quiet():
            return CONFIG_MAPPING[family].from_dict(_without_code(config))
    except Exception:  # it does not fit this version of transformers: names and shapes will do
        return None


def _check_layers(config: Any) -> None:
    """Refuse a config of more layers than any model has."""
    if not isinstance(config, dict):
        return
    for key, value in config.items():
        if isinstance(value, int) and value > _MAX_LAYERS and _LAYER_KEYS.search(str(key)):
            raise BadCheckpoint(f"config.json says {key} = {value:,}: refused")
        _check_layers(value)


def _without_code(config: dict[str, Any]) -> dict[str, Any]:
    plain = {}
    for key, value in config.items():
        if key.lstrip("_").startswith(_CODE_KEYS):
            continue
        plain[key] = value
        if isinstance(value, dict):
            plain[key] = _without_code(value)
    return plain


@contextmanager
def _limited_modules(tensor_count: int) -> Iterator[None]:
    """Refuse a model with far more modules than its file has tensors, while it is being built."""
    from torch.nn.modules.module import register_module_module_registration_hook

    limit = _MODULES_PER_TENSOR * tensor_count + _MODULES_MORE
    count = 0

    def count_module(parent: Any, name: str, child: Any) -> None:
        nonlocal count
        count += 1
        if count > limit:
            raise BadCheckpoint(
                f"config.json describes a model of more than {limit:,} modules, with "
                f"{tensor_count:,} tensors: refused"
            )

    handle = register_module_module_registration_hook(count_module)
    try:
        yield
    finally:
        handle.remove()


def model_of(
    config: dict[str, Any] | None, tensor_count: int, *, head: bool = False
) -> nn.Module | None:
    """Return the model on the meta device; None if transformers does not know its family.

    Arguments:
        config: the content of config.json.
        tensor_count: how many tensors the file has. A model of far more modules is refused.
        head: build the model as it was trained, with the head that ``architectures`` names.
    """
    hub_config = known_config(config)
    if hub_config is None:
        return None
    import transformers

    model_class: Any = None
    if head and hub_config.architectures:
        model_class = getattr(transformers, str(hub_config.architectures[0]), None)
    try:
        with torch.device("meta"), _limited_modules(tensor_count):
            # A config may name anything that transformers has.
            is_class = isinstance(model_class, type)
            if is_class and issubclass(model_class, transformers.PreTrainedModel):
                return model_class(hub_config)
            model: nn.Module = transformers.AutoModel.from_config(hub_config)
            return model
    except BadCheckpoint:
        raise
    except Exception:  # the config does not fit this version of transformers
        return None


def load_model(tensors: Tensors) -> Any:
    """Return the model of a checkpoint without its head, in evaluation mode and float32."""
    transformers_library()
    if tensors.adapter is not None or any(".lora_" in name for name in tensors.names()):
        raise BadCheckpoint(
            "it has the matrices of a LoRA adapter: save model.merge_and_unload(), and give that"
        )
    problem = tensors.incomplete or tensors.no_model
    problem = problem or quantization_problem(tensors.config, tensors.names()) or ""
    if problem:
        raise BadCheckpoint(problem)
    empty_model = model_of(tensors.config, len(tensors.names()))
    if empty_model is None:
        raise BadCheckpoint(_unknown_family(tensors.config))
    state = {}
    for name in sorted(tensors.names()):
        if tensors.view(name).dtype.is_floating_point:
            state[name] = tensors.read(name)
    try:
        with quiet(), _limited_modules(len(tensors.names())):
            model, loading = type(empty_model).from_pretrained(  # type: ignore[attr-defined]
                None,
                config=known_config(tensors.config),
                state_dict=state,
                dtype="float32",
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # named below, in one sentence
            )
    except BadCheckpoint:
        raise
    except Exception as error:  # a config can make transformers fail in any way
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise BadCheckpoint(f"the model cannot be built: {reason}") from error
    for name, shape, expected_shape in loading["mismatched_keys"]:
        raise BadCheckpoint(
            f"{name} has shape {tuple(shape)}, where the config asks for {tuple(expected_shape)}"
        )
    # Poolers are made for classification, and often not saved. No gauge needs them.
    missing = sorted(key for key in loading["missing_keys"] if "pooler" not in key)
    if missing:
        raise BadCheckpoint(
            f"weights of the model are missing: {', '.join(missing[:3])} ({len(missing)} in all)"
        )
    # No text is generated: keys and values of the past would only take memory.
    model.config.use_cache = False
    return model.eval()


def _unknown_family(config: Mapping[str, Any] | None) -> str:
    family = (config or {}).get("model_type")
    if not family:
        return "the model itself is needed: a folder with a config.json that transformers knows"
    return (
        f"the model cannot be built: transformers does not know the family {family!r} of its "
        "config.json, or its settings"
    )
