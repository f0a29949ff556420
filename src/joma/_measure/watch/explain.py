"""`joma.explain`: what joma sees of a model and how it knows, without training."""

from __future__ import annotations

import inspect
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from joma._measure.events.axes import Heads
from joma._measure.events.events import AttentionEvent, Event
from joma._measure.events.facts import AttentionFacts
from joma._measure.events.finite import FiniteTrace
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
from joma.models.blocks import Blocks
from joma.models.names import plain_name
from joma.models.structure import find

_PROJECTIONS = ("q", "k", "v", "o")

# The code behind a message: "… is refused [no-product]".
_CODE = re.compile(r"\s*\[([a-z-]+)\]$")

# The number of an expert in a stack: "experts.up[3]". But "[:64]" is one half of a fused matrix.
_EXPERT = re.compile(r"\[\d+\]$")


class _AttentionCounter:
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
    """Show what joma sees of a model: one row per attention and per MLP, with the evidence.

    The model makes one pass over the batch, without gradients and in the mode that it is in. Random
    states and buffers are restored afterwards. Look at the table first if a number of a watch
    surprises you, and put it into a bug report.

    Arguments:
        model: any module that `joma.watch` takes.
        batch: a mapping, a sequence of arguments or one tensor, as the model is given in training.
        padding: which tokens are real, as for `joma.watch`.
        heads: the number or the order of heads, as for `joma.watch`.

    Returns:
        The table: ``print`` shows it, and `Explanation.frame` returns it as data.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"joma.explain takes a torch.nn.Module, not {type(model).__name__}")
    check_model(model)
    probe = ProbeBatch(batch, "batch")
    modules = [plain_name(name) for name, _ in model.named_modules()]
    stated_padding = None
    if padding is not None:
        stated_padding = StatedPadding(padding, modules)
    counter = _AttentionCounter()
    order = CallOrder(find(model).unnamed_pairs)
    trace = FiniteTrace(frozenset(Blocks(model).names))
    source = EventSource(
        model,
        [counter, *order.observers],
        stated_padding,
        heads=check_heads(heads, modules),
        trace=trace,
    )
    order.ran = source.ran
    probe.check_ids(source)
    try:
        probe.run_once(source)
    except Exception as error:
        raise ValueError(_failed_pass_message(model, error)) from error
    if stated_padding is not None:
        mistake = stated_padding.mistake()
        if mistake is not None:
            raise ValueError(mistake)
    explained = [module for module, _ in source.guard.facts]
    explained += source.problems
    # Without any attention, everything similar to one helps to find out why.
    unseen = unseen_modules(source, explained, is_complete=not counter.counts)
    builder = ExplanationBuilder(source, unseen, counter.counts, order.around)
    has_attention_rows = bool(explained or unseen)
    return builder.build(_notes(source, trace, has_attention_rows))


def _failed_pass_message(model: nn.Module, error: Exception) -> str:
    message = "no message"
    lines = str(error).strip().splitlines()
    if lines:
        message = lines[0].rstrip(".")
    return (
        f"the pass of the batch failed with {type(error).__name__}: {message}. Give a batch as "
        f"{type(model).__name__}.forward({_parameter_names(model)}) takes it: a mapping of "
        "arguments, a sequence of them or one tensor"
    )


def _parameter_names(model: nn.Module) -> str:
    """Return the parameters of a model's forward, without self, types and defaults."""
    empty = inspect.Parameter.empty
    parameters = list(inspect.signature(type(model).forward).parameters.values())
    names = [str(parameter.replace(annotation=empty, default=empty)) for parameter in parameters]
    return ", ".join(names[1:])


def _notes(source: EventSource, trace: FiniteTrace, has_attention_rows: bool) -> list[str]:
    notes = []
    if not has_attention_rows:
        notes.append(no_attention_message(source.model, len(source.ran)))
    idle = [name for name in _projections(source) if name not in source.ran]
    if idle:
        notes.append(
            f"These modules have projections of an attention and did not run: {', '.join(idle)}."
        )
    if trace.first is not None:
        notes.append(_not_finite_note(trace))
    return notes


def _not_finite_note(trace: FiniteTrace) -> str:
    assert trace.first is not None
    module = trace.first.module
    number = f"{trace.first.value:g}"
    if trace.first.cause == "weight":
        cause = f"the weight {module}.{trace.first.detail} holds {number}"
    elif trace.first.cause == "input":
        cause = f"the input of the model holds {number}"
    else:
        cause = f"the output of {module} is the first that holds {number}"
    return (
        f"The pass is not finite: {cause}. From there on nothing can be verified, and gauges will "
        "not be finite."
    )


@dataclass(frozen=True)
class ExplanationBuilder:
    """Builds the table of what a source has seen so far.

    Attributes:
        source: of the model's passes.
        unseen: module -> the reason why no attention was seen in it.
        calls: attention -> how often it is computed in one pass.
        around: lower map -> (upper map, module), for pairs with attention between them, which are
            not MLPs.
        mlp: names of the lower MLP matrices, if the user gave them.
    """

    source: EventSource
    unseen: Mapping[str, str]
    calls: Mapping[str, int]
    around: Mapping[str, tuple[str, str]]
    mlp: Sequence[str] | None = None

    def build(self, notes: Sequence[str] = ()) -> Explanation:
        """Return the table with these notes about the model as a whole."""
        notes = list(notes)
        projections: dict[str, list[str]] = {}
        mlps: list[ExplainedModule] = []
        try:
            projections = _projections(self.source)
            mlps = list(self._mlp_rows())
        except Exception as error:  # the rows of attention are right all the same
            notes.append(f"The matrices could not be found: {message_of(error)}")
        rows = [*self._attention_rows(projections), *mlps]
        positions = {name: place for place, name in enumerate(self.source.names.values())}
        rows.sort(key=lambda row: _position(row, positions))
        return Explanation(type(self.source.model).__name__, tuple(rows), tuple(notes))

    @property
    def _modules(self) -> dict[str, nn.Module]:
        return {name: module for module, name in self.source.names.items()}

    def _class_name(self, module: str) -> str:
        modules = self._modules
        if module not in modules:
            return ""
        return type(modules[module]).__name__

    # Attention

    def _attention_rows(
        self, projections: Mapping[str, Sequence[str]]
    ) -> Iterator[ExplainedModule]:
        facts_of: dict[str, dict[int, AttentionFacts]] = {}  # module -> its attentions by ordinal
        for (module, ordinal), facts in self.source.guard.facts.items():
            facts_of.setdefault(module, {})[ordinal] = facts
        for module, attentions in facts_of.items():
            matrices = _matrices_of(module, projections)
            refused = [facts for facts in attentions.values() if facts.refusal is not None]
            if refused:
                # One refused attention refuses all of its module: a part of a mixture would be
                # another number.
                yield self._attention_row(module, module, refused[0], matrices)
                continue
            for ordinal, facts in attentions.items():
                name = module
                if ordinal > 0:
                    name = f"{module}/{ordinal}"
                yield self._attention_row(name, module, facts, matrices)
        messages = {module: message_of(error) for module, error in self.source.problems.items()}
        for module, sentence in self.unseen.items():
            title = f"{module} ({self._class_name(module)}) ran, but "
            messages.setdefault(module, sentence.removeprefix(title))
        for module, message in messages.items():
            if module not in facts_of:
                yield self._refused_row(module, message, _matrices_of(module, projections))
        if self.source.refusal is not None:
            yield self._refused_row(self.source.names[self.source.model], self.source.refusal, "")

    def _attention_row(
        self, name: str, module: str, facts: AttentionFacts, matrices: str
    ) -> ExplainedModule:
        status, message = self._status(module, facts)
        reason, code = _split_message(message)
        return ExplainedModule(
            module=name,
            kind="attention",
            class_name=self._class_name(module),
            status=status,
            calls=self.calls.get(name, 1),
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

    def _status(self, module: str, facts: AttentionFacts) -> tuple[str, str]:
        """Return the status of an attention, and the message that explains it."""
        problem = self.source.problems.get(module)
        if facts.refusal is not None:
            return REFUSED, str(facts.refusal)
        if problem is not None and not isinstance(problem, Refusal):
            return REFUSED, message_of(problem)
        if facts.heads is None:
            reason = Reason.HEAD_AXIS
            return LAYER_ONLY, f"{reason.meaning} {reason.advice} {reason}"
        if facts.share < 1:
            sentence = (
                f"It attends with {facts.share:.1%} of its queries, and only those are measured."
            )
            return PART_OF_QUERIES, f"{sentence} {Reason.PART_OF_QUERIES}"
        return MEASURED, ""

    def _refused_row(self, module: str, message: str, matrices: str) -> ExplainedModule:
        reason, code = _split_message(message)
        return ExplainedModule(
            module=module,
            kind="attention",
            class_name=self._class_name(module),
            status=REFUSED,
            matrices=matrices,
            code=code,
            reason=reason,
        )

    # MLPs

    def _mlp_rows(self) -> Iterator[ExplainedModule]:
        if self.mlp is not None:
            for name in self.mlp:
                yield self._mlp_row([name], "the user's mlp=", "")
            return
        structure = find(self.source.model)
        lowers_by_shape = {lower for lower, _ in structure.unnamed_pairs}
        experts: Counter[tuple[str, str]] = Counter()  # the experts of a stack share a row
        stacks: set[tuple[str, str]] = set()
        lowers = structure.matrices("mlp_in")
        uppers = structure.matrices("mlp_out")
        for lower, upper in zip(lowers, uppers, strict=True):
            pair = (_EXPERT.sub("", lower.name), _EXPERT.sub("", upper.name))
            experts[pair] += 1
            if _EXPERT.search(lower.name):
                stacks.add(pair)
        for pair, count in experts.items():
            lower_name = pair[0].partition("[")[0]
            evidence = "names and structure"
            if pair in stacks or count > 1:
                evidence = f"a stack of {count} experts"
            elif lower_name in lowers_by_shape:
                evidence = "shapes alone"
            reason = ""
            if lower_name in self.around:
                upper_name, module = self.around[lower_name]
                reason = (
                    f"In {module}, attention is computed between {lower_name} and {upper_name}: "
                    "they are not an MLP."
                )
            yield self._mlp_row(pair, evidence, reason)

    def _mlp_row(self, matrices: Sequence[str], evidence: str, reason: str) -> ExplainedModule:
        name = _common_module(matrices) or self.source.names[self.source.model]
        status = MEASURED
        if reason:
            status = REFUSED
        return ExplainedModule(
            module=name,
            kind="MLP",
            class_name=self._class_name(name),
            status=status,
            evidence=evidence,
            matrices=" → ".join(matrices),
            reason=reason,
        )


def _position(row: ExplainedModule, positions: Mapping[str, int]) -> int:
    """Return the place of a row in the order of modules; an MLP stands at its lower matrix."""
    name = row.module.partition("/")[0]
    if not row.is_attention:
        name = row.matrices.partition(" → ")[0].partition("[")[0]
    while name and name not in positions:  # a parameter is not a module
        name = name.rpartition(".")[0]
    return positions.get(name, -1)  # a problem of the whole model comes first


def _split_message(message: str) -> tuple[str, str]:
    """Return the sentence, and the code in the brackets behind it."""
    match = _CODE.search(message)
    if match is None:
        return message, ""
    return message[: match.start()], match[1]


def _projections(source: EventSource) -> dict[str, list[str]]:
    """Return attention module -> those of q, k, v and o that it has."""
    parts: dict[str, list[str]] = {}
    structure = find(source.model)
    for part in _PROJECTIONS:
        for matrix in structure.matrices(part):
            module = matrix.name.removesuffix(part).removesuffix(".") or source.names[source.model]
            parts.setdefault(module, []).append(part)
    return parts


def _matrices_of(module: str, projections: Mapping[str, Sequence[str]]) -> str:
    """Return the projections of a module, or else of the module around it or inside it."""
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


def _common_module(matrices: Sequence[str]) -> str:
    """Return the name of the innermost module that holds all matrices; "" for the model."""
    paths = [name.partition("[")[0].split(".")[:-1] for name in matrices]
    common = []
    for parts in zip(*paths, strict=False):  # up to the end of the shorter one
        if len(set(parts)) > 1:
            break
        common.append(parts[0])
    return ".".join(common)
