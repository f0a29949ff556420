"""What a watch is given, checked before anything is attached."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence

from torch import nn

from joma._measure.events.axes import ORDERS, Heads
from joma._measure.events.reasons import Reason
from joma._measure.gauges.kinds import GRADIENT, UPDATE_OF_STEP, WEIGHT
from joma._measure.gauges.registry import Gauge
from joma._measure.watch.alarms.notices import warn
from joma._runs.writer import RunWriter
from joma.models.matrices import Matrix, find_matrices
from joma.models.parts import PARTS, UPDATE

_ATTENTION = re.compile(r"(?<!fl)atten|attn", re.IGNORECASE)  # not nn.Flatten


class NotWatchable(ValueError):
    """Attention is computed in a way that cannot be measured."""


class ArgumentMistake(ValueError):
    """A mistake in the arguments of `joma.watch` that only a pass can show; the first measured step raises it."""


def looks_like_attention(kind: type[nn.Module]) -> bool:
    """By the name of the class; used for messages and for layers that a pass may skip, never to decide what is seen."""
    return bool(_ATTENTION.search(kind.__name__))


def check_model(model: object) -> None:
    """Refuse what cannot be watched, by name."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"a torch.nn.Module is watched, not {type(model).__name__}")
    refused = {
        "DataParallel": "use torch.nn.parallel.DistributedDataParallel",
        "FullyShardedDataParallel": "its parameters are flattened; use torch.distributed.fsdp.fully_shard",
    }
    for module in model.modules():
        if (kind := type(module).__name__) in refused:
            raise NotWatchable(f"{kind} cannot be watched: {refused[kind]} {Reason.WRAPPER}")


def check_run(run: object, overwrite: bool, resume: object) -> None:
    """Refuse what names no run folder, and ways to open it that contradict each other."""
    if not (run is None or isinstance(run, (str, os.PathLike, RunWriter))):
        raise TypeError(
            f"run must be the path of a folder to write, as run='runs/mine'; got {run!r} of type {type(run).__name__}"
        )
    if not (isinstance(resume, bool) or resume == "auto"):
        raise ValueError(f"resume must be True, False or 'auto'; got {resume!r}")
    if overwrite and resume:
        raise ValueError(
            f"overwrite=True replaces the run in the folder, and resume={resume!r} goes on with it: give one of them"
        )


def check_has_attention(model: nn.Module) -> None:
    """A model of torch.nn modules only, without a MultiheadAttention, has no attention whatever it is given."""
    kinds = {type(module) for module in model.modules()}
    if (
        all(kind.__module__.startswith("torch.nn.modules") for kind in kinds)
        and nn.MultiheadAttention not in kinds
    ):
        raise NotWatchable(no_attention(model))


def check_heads(
    heads: Heads | Mapping[str, Heads] | None, modules: Sequence[str]
) -> dict[str, Heads]:
    """Module -> what the user says about its heads; "" is the module that stands for all."""
    stated = dict(heads) if isinstance(heads, Mapping) else {} if heads is None else {"": heads}
    for name, value in stated.items():
        is_number = isinstance(value, int) and not isinstance(value, bool) and value > 0
        if not is_number and value not in ORDERS:
            orders = " or ".join(f'"{order}"' for order in ORDERS)
            raise ValueError(f"heads= must be a number of heads, or {orders}; got {value!r}")
        if name not in modules:
            raise ValueError(f"heads= names {name!r}, and no module of the model has that name")
    return stated


def no_attention(model: nn.Module, ran: int = 0, causes: Sequence[str] = ()) -> str:
    """The message: what was looked for, what there is; ``ran`` modules ran; what kept attention from being measured."""
    if causes:
        more = f"; and {len(causes) - 3} more" if len(causes) > 3 else ""
        return f"no attention of {type(model).__name__} could be measured: {'; '.join(causes[:3])}{more}"
    kinds: dict[str, int] = {}
    for module in model.modules():
        kinds[type(module).__name__] = kinds.get(type(module).__name__, 0) + 1
    there = ", ".join(
        f"{n} {kind}" for kind, n in sorted(kinds.items(), key=lambda item: -item[1])[:8]
    )
    kernels = {
        getattr(getattr(m, "config", None), "_attn_implementation", None) for m in model.modules()
    }
    kernel = next(
        (name for name in sorted(map(str, kernels)) if name not in ("None", "eager", "sdpa")), None
    )
    named = (
        f" attn_implementation={kernel!r} is a kernel that was not seen: load the model with 'sdpa'."
        if kernel
        else ""
    )
    compiled = (
        " If the whole training step is compiled, give a probe batch: it is measured outside of it."
        if any(looks_like_attention(type(m)) for m in model.modules())
        else ""
    )
    return (
        f"no attention was seen in {type(model).__name__}. Looked for: scaled_dot_product_attention, a softmax over a "
        "product of two activations that is multiplied with values, nn.MultiheadAttention, kernels that transformers "
        f"resolves by name, FlexAttention, flash_attn. Found: {there}"
        + (f"; {ran} modules ran." if ran else ".")
        + named
        + compiled
        + f" {Reason.NO_ATTENTION}"
    )


def find(
    model: nn.Module,
    gauges: Sequence[Gauge],
    mlp: str | Sequence[str] | None,
    lenient: bool,
    refusal: str | None,
) -> dict[str, list[Matrix]]:
    """The matrices of every part that gauges ask for; a part without any is an error, unless ``lenient``.

    ``refusal`` is why none can be measured, if so.
    """
    matrices_of = {}
    for part in dict.fromkeys(
        g.part for g in gauges if g.kind in (WEIGHT, GRADIENT, UPDATE_OF_STEP)
    ):
        matrices = find_matrices(model, part, mlp if part == "mlp_in" else None)
        if matrices and refusal is None:
            matrices_of[part] = matrices
            continue
        message = f"{PARTS[part]} cannot be measured: {refusal}" if refusal else (
            f"no matrix found for {part!r} ({PARTS[part]}). "
            + ("Looked for modules with base_layer, lora_A and lora_B" if part.endswith(UPDATE) else
               "Looked for two linear maps d → h → d outside attention; name them with mlp=[…]" if part[0] == "m" else
               "Looked for the usual names of projections (q_proj, query_key_value, in_proj, …)")
        )  # fmt: skip
        if not lenient:
            raise ValueError(message)
        warn(message)
    return matrices_of
