"""Checks of the arguments of a watch, before anything is attached to the model."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence

from torch import nn

from joma._measure.events.axes import ORDERS, Heads
from joma._measure.events.reasons import Reason
from joma._measure.gauges.kinds import GRADIENT, UPDATE_OF_STEP, WEIGHT
from joma._measure.gauges.registry import Gauge
from joma._measure.watch.alarms.notices import warn
from joma._runs.writer import RunWriter
from joma.models.matrices import Matrix
from joma.models.names import ATTENTION
from joma.models.parts import PARTS, UPDATE
from joma.models.structure import find as find_structure

# Classes whose parameters or passes no observer can follow -> what to use instead.
_UNWATCHABLE_CLASSES = {
    "DataParallel": "use torch.nn.parallel.DistributedDataParallel",
    "FullyShardedDataParallel": (
        "its parameters are flattened; use torch.distributed.fsdp.fully_shard"
    ),
}

# Kernels of transformers that are always seen.
_SEEN_KERNELS = ("None", "eager", "sdpa")

# Longest lists in a message.
_MAX_CAUSES = 3
_MAX_CLASSES = 8


class NotWatchable(ValueError):
    """Attention is computed in a way that cannot be measured."""


class ArgumentMistake(ValueError):
    """A mistake in the arguments of `joma.watch` that shows in the first measured step only."""


def looks_like_attention(module_class: type[nn.Module]) -> bool:
    """Return True if the name of the class says so.

    This serves messages, and layers that a pass may skip. It never decides what is measured.
    """
    return bool(ATTENTION.search(module_class.__name__))


def check_model(model: object) -> None:
    """Refuse objects that are not modules, and wrappers that cannot be watched."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"a torch.nn.Module is watched, not {type(model).__name__}")
    for module in model.modules():
        class_name = type(module).__name__
        if class_name in _UNWATCHABLE_CLASSES:
            advice = _UNWATCHABLE_CLASSES[class_name]
            raise NotWatchable(f"{class_name} cannot be watched: {advice} {Reason.WRAPPER}")


def check_run(run: object, overwrite: bool, resume: object) -> None:
    """Refuse a run that is not a folder, and ways to open it that contradict each other."""
    if not (run is None or isinstance(run, (str, os.PathLike, RunWriter))):
        raise TypeError(
            "run must be the path of a folder to write, as run='runs/mine'; got "
            f"{run!r} of type {type(run).__name__}"
        )
    if not (isinstance(resume, bool) or resume == "auto"):
        raise ValueError(f"resume must be True, False or 'auto'; got {resume!r}")
    if overwrite and resume:
        raise ValueError(
            "overwrite=True replaces the run in the folder, and "
            f"resume={resume!r} goes on with it: give one of them"
        )


def check_has_attention(model: nn.Module) -> None:
    """Refuse a model that cannot have attention, whatever its input.

    That is certain only if all its modules are PyTorch's own, without a MultiheadAttention.
    """
    classes = {type(module) for module in model.modules()}
    if nn.MultiheadAttention in classes:
        return
    if all(each.__module__.startswith("torch.nn.modules") for each in classes):
        raise NotWatchable(no_attention_message(model))


def check_heads(
    heads: Heads | Mapping[str, Heads] | None, modules: Sequence[str]
) -> dict[str, Heads]:
    """Return module -> the user's statement on its heads; "" stands for all modules."""
    stated: dict[str, Heads] = {}
    if isinstance(heads, Mapping):
        stated = dict(heads)
    elif heads is not None:
        stated = {"": heads}
    for name, value in stated.items():
        is_number = isinstance(value, int) and not isinstance(value, bool) and value > 0
        if not is_number and value not in ORDERS:
            orders = " or ".join(f'"{order}"' for order in ORDERS)
            raise ValueError(f"heads= must be a number of heads, or {orders}; got {value!r}")
        if name not in modules:
            raise ValueError(f"heads= names {name!r}, and no module of the model has that name")
    return stated


def no_attention_message(model: nn.Module, ran: int = 0, causes: Sequence[str] = ()) -> str:
    """Return a message on what was looked for and what the model has instead.

    Arguments:
        model: the model.
        ran: number of modules that ran.
        causes: reasons why attention was not measured, if it was there.
    """
    model_class = type(model).__name__
    if causes:
        listed = list(causes[:_MAX_CAUSES])
        if len(causes) > _MAX_CAUSES:
            listed.append(f"and {len(causes) - _MAX_CAUSES} more")
        return f"no attention of {model_class} could be measured: {'; '.join(listed)}"
    sentences = [
        f"no attention was seen in {model_class}. Looked for: scaled_dot_product_attention, a "
        "softmax over a product of two activations that is multiplied with values, "
        "nn.MultiheadAttention, kernels that transformers resolves by name, FlexAttention, "
        f"flash_attn. Found: {_listed_classes(model)}"
    ]
    if ran:
        sentences[0] += f"; {ran} modules ran"
    sentences[0] += "."
    kernel = _unusual_kernel(model)
    if kernel is not None:
        sentences.append(
            f"attn_implementation={kernel!r} is a kernel that was not seen: load the model with "
            "'sdpa'."
        )
    if any(looks_like_attention(type(module)) for module in model.modules()):
        sentences.append(
            "If the whole training step is compiled, give a probe batch: it is measured outside of "
            "it."
        )
    sentences.append(str(Reason.NO_ATTENTION))
    return " ".join(sentences)


def _listed_classes(model: nn.Module) -> str:
    """Return the most frequent classes of modules with their counts."""
    counts = Counter(type(module).__name__ for module in model.modules())
    return ", ".join(f"{count} {name}" for name, count in counts.most_common(_MAX_CLASSES))


def _unusual_kernel(model: nn.Module) -> str | None:
    """Return the kernel that a model of transformers was loaded with, if it may be unseen."""
    kernels = set()
    for module in model.modules():
        config = getattr(module, "config", None)
        kernels.add(str(getattr(config, "_attn_implementation", None)))
    unusual = sorted(kernels.difference(_SEEN_KERNELS))
    if not unusual:
        return None
    return unusual[0]


def find_part_matrices(
    model: nn.Module,
    gauges: Sequence[Gauge],
    mlp: str | Sequence[str] | None,
    lenient: bool,
    refusal: str | None,
) -> dict[str, list[Matrix]]:
    """Return part -> its matrices, for all parts that gauges ask for.

    Arguments:
        model: the model.
        gauges: the gauges.
        mlp: the user's names of lower MLP matrices.
        lenient: True to warn of a part without matrices instead of raising an error.
        refusal: the reason why no matrix can be measured, if there is one.
    """
    kinds = (WEIGHT, GRADIENT, UPDATE_OF_STEP)
    parts = dict.fromkeys(gauge.part for gauge in gauges if gauge.kind in kinds)
    structure = find_structure(model)
    matrices_of = {}
    for part in parts:
        names = None
        if part == "mlp_in":
            names = mlp
        matrices = structure.matrices(part, names)
        if matrices and refusal is None:
            matrices_of[part] = matrices
            continue
        message = _no_matrix_message(part)
        if refusal is not None:
            message = f"{PARTS[part]} cannot be measured: {refusal}"
        if not lenient:
            raise ValueError(message)
        warn(message)
    return matrices_of


def _no_matrix_message(part: str) -> str:
    if part.endswith(UPDATE):
        searched = "modules with base_layer, lora_A and lora_B"
    elif part.startswith("mlp"):
        searched = "two linear maps d → h → d outside attention; name them with mlp=[…]"
    else:
        searched = "the usual names of projections (q_proj, query_key_value, in_proj, …)"
    return f"no matrix found for {part!r} ({PARTS[part]}). Looked for {searched}"
