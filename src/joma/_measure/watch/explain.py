"""`joma.explain`: what joma sees of a model and how it knows, without training."""

from __future__ import annotations

import inspect
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from joma._measure.events.axes import Heads
from joma._measure.events.events import AttentionEvent, Event
from joma._measure.events.facts import AttentionFacts
from joma._measure.events.padding import Padding, StatedPadding
from joma._measure.events.reasons import Reason, Refusal, message_of
from joma._measure.events.source import EventSource
from joma._measure.watch.inputs import check_heads, check_model, no_attention_message
from joma._measure.watch.order import CallOrder
from joma._measure.watch.probe import ProbeBatch
from joma._measure.watch.unseen import unseen_modules
from joma._runs.explanation import (
    LAYER_ONLY,
    MEASURED,
    PART_OF_QUERIES,
    REFUSED,
    ExplainedModule,
    Explanation,
)
from joma.models.names import plain_name
from joma.models.structure import find

_PROJECTIONS = ("q", "k", "v", "o")
_CODE = re.compile(r"\s*\[([a-z-]+)\]$")
_EXPERT = re.compile(r"\[\d+\]$")  # of a stack of matrices; "[:64]" is one half of a fused matrix


class _AttentionCalls:
    """An observer that counts how often each module attends in a pass."""

    wants: tuple[type[Event], ...] = (AttentionEvent,)

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def observe(self, event: AttentionEvent) -> None:
        """Count one attention."""
        name, _ = event.place
        self.counts[name] += 1


def explain(
    model: nn.Module,
    batch: Any,
    *,
    padding: Padding | None = None,
    heads: Heads | Mapping[str, Heads] | None = None,
) -> Explanation:
    """Show what joma sees of a model: one row per attention and per MLP, with the evidence for each fact.

    The model makes one pass over the batch, without gradients and in the mode that it is in. Random states and buffers
    are put back afterwards. It is the first thing to look at if a number of a watch surprises you, and the first thing
    to put into a bug report.

    Arguments:
        model: any module that `joma.watch` takes.
        batch: a mapping, a sequence of arguments or one tensor, as the model is given in training.
        padding: which tokens are real, as for `joma.watch`.
        heads: the number or the order of heads, as for `joma.watch`.

    Returns:
        The table: ``print`` shows it, and `Explanation.frame` gives it as data.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"joma.explain takes a torch.nn.Module, not {type(model).__name__}")
    check_model(model)
    probe = ProbeBatch(batch, "batch")
    modules = [plain_name(name) for name, _ in model.named_modules()]
    stated = None if padding is None else StatedPadding(padding, modules)
    calls = _AttentionCalls()
    order = CallOrder(find(model).unnamed_pairs)
    source = EventSource(
        model, [calls, *order.observers], stated, heads=check_heads(heads, modules)
    )
    order.ran = source.ran
    probe.check_ids(source)
    try:
        probe.run_once(source)
    except Exception as error:
        raise ValueError(_misfit(model, error)) from error
    mistake = None if stated is None else stated.mistake()
    if mistake is not None:
        raise ValueError(mistake)
    explained = [*(module for module, _ in source.guard.facts), *source.problems]
    is_complete = not calls.counts
    unseen = unseen_modules(source, explained, is_complete)
    notes = _notes(source, bool(calls.counts))
    return build_explanation(source, unseen, calls.counts, order.around, notes)


def build_explanation(
    source: EventSource,
    unseen: Mapping[str, str],
    calls: Mapping[str, int],
    around: Mapping[str, tuple[str, str]],
    notes: Sequence[str] = (),
    mlp: Sequence[str] | None = None,
) -> Explanation:
    """Return the table of what a source has seen so far.

    Arguments:
        source: of the model's passes.
        unseen: module -> why no attention was seen in it.
        calls: attention -> how often it is computed in one pass.
        around: lower map -> (upper map, module), of pairs that have attention between them and are no MLP.
        notes: sentences about the model as a whole.
        mlp: names of the lower MLP matrices, if the user gave them.
    """
    notes = list(notes)
    projections: dict[str, list[str]] = {}
    mlps: list[ExplainedModule] = []
    try:
        projections = _projections(source)
        mlps = list(_mlp_rows(source, around, mlp))
    except Exception as error:  # what was seen of attention is right all the same
        notes.append(f"The matrices could not be found: {message_of(error)}")
    rows = [*_attention_rows(source, unseen, calls, projections), *mlps]
    position = {name: n for n, name in enumerate(source.names.values())}
    rows.sort(key=lambda row: _position(row, position))
    return Explanation(type(source.model).__name__, tuple(rows), tuple(notes))


def _position(row: ExplainedModule, position: Mapping[str, int]) -> int:
    """Return where a row belongs in the order of modules: an MLP where its lower matrix is."""
    name = row.module.partition("/")[0]
    if row.kind == "MLP":
        name = row.matrices.partition(" → ")[0].partition("[")[0]
    while name and name not in position:  # a parameter is not a module
        name = name.rpartition(".")[0]
    return position.get(name, -1)  # a problem of the whole model comes first


def _misfit(model: nn.Module, error: Exception) -> str:
    lines = str(error).strip().splitlines()
    message = lines[0] if lines else "no message"
    parameters = ", ".join(inspect.signature(type(model).forward).parameters)
    return (
        f"the pass of the batch failed with {type(error).__name__}: {message}. Give a batch as "
        f"{type(model).__name__}.forward({parameters}) takes it: a mapping of arguments, a sequence of them or one "
        "tensor"
    )


def _notes(source: EventSource, has_attention: bool) -> list[str]:
    notes = []
    if not has_attention and not source.problems:
        notes.append(no_attention_message(source.model, len(source.ran)))
    idle = [name for name in _projections(source) if name not in source.ran]
    if idle:
        notes.append(
            f"These modules have projections of an attention and did not run: {', '.join(idle)}."
        )
    return notes


# Attention


def _attention_rows(
    source: EventSource,
    unseen: Mapping[str, str],
    calls: Mapping[str, int],
    projections: Mapping[str, Sequence[str]],
) -> Iterator[ExplainedModule]:
    facts = dict(source.guard.facts)
    classes = {name: type(module).__name__ for module, name in source.names.items()}
    refused = {module: one.refusal for (module, _), one in facts.items() if one.refusal is not None}
    done = set()
    for (module, ordinal), one in facts.items():
        # one refused attention refuses all of its module: part of a mixture would be another number
        if module in done:
            continue
        name = module if ordinal == 0 else f"{module}/{ordinal}"
        if module in refused:
            name = module
            done.add(module)
            one = next(
                other
                for (owner, _), other in facts.items()
                if owner == module and other.refusal is not None
            )
        matrices = _matrices_of(module, projections)
        yield _attention_row(
            name, classes.get(module, ""), one, calls.get(name, 1), matrices, source
        )
    attending = {module for module, _ in facts}
    for module, error in source.problems.items():
        if module not in attending:
            yield _refused_row(
                module,
                classes.get(module, ""),
                message_of(error),
                _matrices_of(module, projections),
            )
    if source.refusal is not None:
        name = source.names[source.model]
        yield _refused_row(name, classes[name], source.refusal, "")
    for module, sentence in unseen.items():
        if module not in attending:
            yield _refused_row(
                module, classes.get(module, ""), sentence, _matrices_of(module, projections)
            )


def _attention_row(
    name: str,
    class_name: str,
    facts: AttentionFacts,
    calls: int,
    matrices: str,
    source: EventSource,
) -> ExplainedModule:
    status = MEASURED
    message = ""
    problem = source.problems.get(name.partition("/")[0])
    if facts.refusal is not None:
        status = REFUSED
        message = str(facts.refusal)
    elif problem is not None and not isinstance(problem, Refusal):
        status = REFUSED
        message = message_of(problem)
    elif facts.heads is None:
        status = LAYER_ONLY
        message = f"{Reason.HEAD_AXIS.meaning} {Reason.HEAD_AXIS.advice} {Reason.HEAD_AXIS}"
    elif facts.share < 1:
        status = PART_OF_QUERIES
        message = f"It attends with {facts.share:.1%} of its queries, and only those are measured. "
        message += str(Reason.PART_OF_QUERIES)
    reason, code = _split(message)
    return ExplainedModule(
        module=name,
        kind="attention",
        class_name=class_name,
        status=status,
        calls=calls,
        backend=facts.backend,
        axes=facts.axes,
        heads=facts.heads,
        evidence=facts.heads_evidence,
        mask=facts.mask,
        hides=facts.hides,
        queries=facts.queries,
        padded=facts.padded,
        padding_evidence=facts.padding_evidence,
        check=facts.check,
        error=facts.error,
        matrices=matrices,
        code=code,
        reason=reason,
    )


def _refused_row(name: str, class_name: str, message: str, matrices: str) -> ExplainedModule:
    reason, code = _split(message)
    return ExplainedModule(
        name, "attention", class_name, REFUSED, matrices=matrices, code=code, reason=reason
    )


def _split(message: str) -> tuple[str, str]:
    """Return the sentence and the code that stands in brackets behind it."""
    match = _CODE.search(message)
    if match is None:
        return message, ""
    return message[: match.start()], match[1]


def _projections(source: EventSource) -> dict[str, list[str]]:
    """Return attention module -> those of q, k, v and o that were found."""
    parts: dict[str, list[str]] = {}
    structure = find(source.model)
    for part in _PROJECTIONS:
        for matrix in structure.matrices(part):
            module = matrix.name.removesuffix(part).removesuffix(".") or source.names[source.model]
            parts.setdefault(module, []).append(part)
    return parts


def _matrices_of(module: str, projections: Mapping[str, Sequence[str]]) -> str:
    """Return the projections of a module; of one without any, those of the module around it or inside it."""
    around = [other for other in projections if module.startswith(f"{other}.")]
    inside = [other for other in projections if other.startswith(f"{module}.")]
    if module in projections:
        owner = module
    elif around:
        owner = max(around, key=len)
    elif len(inside) == 1:
        owner = inside[0]
    else:
        return ""
    return " ".join(projections[owner])


# MLPs


def _mlp_rows(
    source: EventSource, around: Mapping[str, tuple[str, str]], stated: Sequence[str] | None
) -> Iterator[ExplainedModule]:
    modules = {name: module for module, name in source.names.items()}
    if stated is not None:
        for name in stated:
            yield _mlp_row(modules, [name], "the user's mlp=", "")
        return
    structure = find(source.model)
    by_shape = {lower for lower, _ in structure.unnamed_pairs}
    stacks: dict[tuple[str, str], list[tuple[str, str]]] = {}  # the experts of a stack have one row
    lowers = structure.matrices("mlp_in")
    uppers = structure.matrices("mlp_out")
    for lower, upper in zip(lowers, uppers, strict=True):
        stack = (_EXPERT.sub("", lower.name), _EXPERT.sub("", upper.name))
        stacks.setdefault(stack, []).append((lower.name, upper.name))
    for (lower_name, upper_name), members in stacks.items():
        plain = lower_name.partition("[")[0]
        evidence = "shapes alone" if plain in by_shape else "names and structure"
        names = [lower_name, upper_name]
        if len(members) > 1 or _EXPERT.search(members[0][0]):
            evidence = f"a stack of {len(members)} experts"
        reason = ""
        if plain in around:
            upper_map, module = around[plain]
            reason = f"In {module}, attention is computed between {plain} and {upper_map}: they are no MLP."
        yield _mlp_row(modules, names, evidence, reason)


def _mlp_row(
    modules: Mapping[str, nn.Module], names: Sequence[str], evidence: str, reason: str
) -> ExplainedModule:
    paths = [name.partition("[")[0].split(".")[:-1] for name in names]
    common = []
    for parts in zip(*paths, strict=False):
        if len(set(parts)) > 1:
            break
        common.append(parts[0])
    root = next(iter(modules))
    name = ".".join(common) or root
    class_name = type(modules[name]).__name__ if name in modules else ""
    status = REFUSED if reason else MEASURED
    return ExplainedModule(
        module=name,
        kind="MLP",
        class_name=class_name,
        status=status,
        evidence=evidence,
        matrices=" → ".join(names),
        reason=reason,
    )
