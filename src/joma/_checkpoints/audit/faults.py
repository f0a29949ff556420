"""Faults of a series of checkpoints: rules over the facts of each, and of each against the others."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from joma._checkpoints.audit.facts import Facts, Samples, TensorFact
from joma._checkpoints.audit.fit import misfits
from joma._checkpoints.audit.order import arranged, judge_order, put_back
from joma._checkpoints.audit.sketch import MAX_CHECKPOINTS, Distances
from joma._checkpoints.steps import step_of

# Tensors with fewer numbers may be equal by chance.
MIN_NUMBERS_OF_COPY = 64
# A file counts as of another size beyond this: headers of the same tensors differ by a few bytes
# (padding, metadata), at most a few kilobytes.
SIZE_TOLERANCE = 0.01
SIZE_TOLERANCE_BYTES = 4096

Group = tuple[str, ...]  # names that have the same content

_GET_AGAIN = "get it again from its source, or leave it out (--revisions)"
# By kind of fault.
WHAT_TO_DO = {
    "unreadable": f"Nothing can be measured on it: {_GET_AGAIN}.",
    "size": "Compare the file with its source; --level slices reads what is inside.",
    "tensors": f"Check that it is a checkpoint of this model; if it is, {_GET_AGAIN}.",
    "type": "Check that it is of this model and in the same precision; convert it, or leave it out.",
    "not finite": "Do not train on from it: take the last checkpoint without such numbers.",
    "state": "Rename it to the step that trainer_state.json has, or leave it out (--revisions).",
    "identical": f"One is not the step of its name, unless training had not begun yet: {_GET_AGAIN}.",
    "copied": f"One of them has weights of another step: {_GET_AGAIN}.",
    "repeated": f"The same numbers are there twice, and others are lost: {_GET_AGAIN}.",
    "exchanged": "Exchange their names, or get both again from their source.",
    "late": "An initialisation comes first: was the series numbered backwards? Then rename it.",
    "misfit": f"It does not lie between its neighbours: {_GET_AGAIN}.",
}


@dataclass(frozen=True)
class Fault:
    """Something that is wrong with a checkpoint, or with several together.

    Attributes:
        kind: one of the keys of `WHAT_TO_DO`.
        checkpoints: the checkpoints that it is about; for copies, all that are alike.
        text: a sentence.
        tensors: their names, if it is not about all of them.
    """

    kind: str
    checkpoints: tuple[str, ...]
    text: str
    tensors: tuple[str, ...] = ()

    @property
    def what_to_do(self) -> str:
        """Advice, by the kind of the fault."""
        return WHAT_TO_DO[self.kind]

    def as_json(self) -> dict[str, Any]:
        """Return the fault as plain data."""
        return asdict(self)

    @classmethod
    def from_json(cls, fault: Mapping[str, Any]) -> Fault:
        """Return the fault that `as_json` gave."""
        return cls(
            fault["kind"], tuple(fault["checkpoints"]), fault["text"], tuple(fault["tensors"])
        )


def find_faults(
    series: Sequence[Facts], sketches: Sequence[Samples] = ()
) -> tuple[list[Fault], tuple[str, ...]]:
    """Return all faults of a series, and sentences about its order that cannot be decided.

    Arguments:
        series: in the order of steps.
        sketches: of the checkpoints that could be read.
    """
    readable = [facts for facts in series if not facts.problem]
    faults = [
        Fault("unreadable", (facts.name,), facts.problem) for facts in series if facts.problem
    ]
    for rule in (_sizes, _names, _types, _not_finite, _states):
        faults += rule(readable)
    identical = _identical(readable)
    for group in identical:
        faults.append(Fault("identical", group, f"{_some(group)} have the same weights"))
    copied_files = list(_copied_files(readable, identical))
    faults += copied_files
    faults += _copied_tensors(readable, identical, copied_files)
    faults += _repeated(readable)
    distances = None
    if sketches and len(readable) <= MAX_CHECKPOINTS:
        distances = Distances(readable, sketches)
    order_faults, unknown, right_order = _order(readable, identical, distances)
    return faults + order_faults + _misfits(readable, right_order, distances), unknown


def _order(
    series: Sequence[Facts], identical: Sequence[Group], distances: Distances | None
) -> tuple[list[Fault], tuple[str, ...], list[int]]:
    """Return faults of the order, what cannot be decided, and the places in their right order."""
    copies = []
    for place, facts in enumerate(series):
        if any(facts.name in group for group in identical):
            copies.append(place)
    order = judge_order(series, distances, copies)
    faults = []
    for kind, pairs in (("exchanged", order.exchanged), ("late", order.late)):
        for pair, text in pairs:
            faults.append(Fault(kind, tuple(series[place].name for place in pair), text))
    right_order = put_back(len(series), [pair for pair, _ in order.exchanged])
    return faults, order.unknown, right_order


def _misfits(
    series: Sequence[Facts], right_order: list[int], distances: Distances | None
) -> list[Fault]:
    """Return checkpoints that do not fit between their neighbours, in the right order."""
    if distances is None:
        result = misfits(series)
    else:

        def without(names: Container[str]) -> list[Facts]:
            rest = [place for place in right_order if series[place].name not in names]
            return arranged(series, rest, distances)

        result = misfits(without(()), without)
    faults = []
    for misfit in result:
        faults.append(Fault("misfit", (misfit.checkpoint,), misfit.text, misfit.tensors))
    return faults


def _sizes(series: Sequence[Facts]) -> Iterator[Fault]:
    """Yield files of another size than those of the same name; where tensors were read, they show more."""
    for file in {name for facts in series for name in facts.files}:
        having = [facts for facts in series if file in facts.files]
        usual = median(facts.files[file].size for facts in having)
        for facts in having:
            if _has_types(facts):
                continue
            size = facts.files[file].size
            if abs(size - usual) > SIZE_TOLERANCE * usual + SIZE_TOLERANCE_BYTES:
                text = f"{file} has {size:,} bytes, where {usual:,.0f} are usual"
                yield Fault("size", (facts.name,), text)


def _has_types(facts: Facts) -> bool:
    """True if the table of tensors was read."""
    return any(tensor.dtype for tensor in facts.tensors.values())


def _names(series: Sequence[Facts]) -> Iterator[Fault]:
    """Yield checkpoints that lack tensors of most others, or have more."""
    having = [facts for facts in series if facts.tensors]
    counts = Counter(name for facts in having for name in facts.tensors)
    usual = {name for name, count in counts.items() if 2 * count > len(having)}
    for facts in having:
        missing = sorted(usual - facts.tensors.keys())
        extra = sorted(facts.tensors.keys() - usual)
        words = []
        if missing:
            words.append(f"lacks {_some(missing)}")
        if extra:
            words.append(f"has besides {_some(extra)}")
        if words:
            text = f"{facts.name} {' and '.join(words)}"
            yield Fault("tensors", (facts.name,), text, (*missing, *extra))


def _types(series: Sequence[Facts]) -> Iterator[Fault]:
    """Yield checkpoints whose shapes or types differ from those of most others."""
    having = [facts for facts in series if _has_types(facts)]
    counts: dict[str, Counter[tuple[str, tuple[int, ...]]]] = {}
    for facts in having:
        for name, tensor in facts.tensors.items():
            counts.setdefault(name, Counter())[tensor.dtype, tensor.shape] += 1
    usual = {name: counter.most_common(1)[0][0] for name, counter in counts.items()}
    for facts in having:
        odd = []
        for name, tensor in facts.tensors.items():
            if (tensor.dtype, tensor.shape) != usual[name]:
                odd.append(name)
        if not odd:
            continue
        dtype, shape = usual[odd[0]]
        tensor = facts.tensors[odd[0]]
        text = f"{odd[0]} is {tensor.dtype} {tensor.shape}, and {dtype} {shape} in most checkpoints"
        yield Fault("type", (facts.name,), text + _more(odd), tuple(odd))


def _not_finite(series: Sequence[Facts]) -> Iterator[Fault]:
    for facts in series:
        bad = [name for name, tensor in facts.tensors.items() if tensor.not_finite]
        if not bad:
            continue
        count = facts.tensors[bad[0]].not_finite
        if count == 1:
            words = "1 number that is"
        else:
            words = f"{count:,} numbers that are"
        text = f"{bad[0]} has {words} NaN or infinite"
        yield Fault("not finite", (facts.name,), text + _more(bad), tuple(bad))


def _states(series: Sequence[Facts]) -> Iterator[Fault]:
    """Yield checkpoints whose name has another step than the trainer's state."""
    for facts in series:
        named = step_of(facts.name)
        if facts.trained is not None and named is not None and named != facts.trained:
            text = f"its name says step {named:,}, trainer_state.json {facts.trained:,}"
            yield Fault("state", (facts.name,), text)


def _signature(facts: Facts) -> tuple[tuple[str, str], ...]:
    """Return what identifies a checkpoint's weights: its tensors if they were read, else its files."""
    tensors = []
    for name, tensor in facts.tensors.items():
        if tensor.digest:
            tensors.append((name, tensor.digest))
    if tensors:
        return tuple(sorted(tensors))
    return tuple(sorted((name, file.digest) for name, file in facts.files.items()))


def _identical(series: Sequence[Facts]) -> list[Group]:
    return _alike((facts.name, _signature(facts)) for facts in series)


def _copied_files(series: Sequence[Facts], identical: Sequence[Group]) -> Iterator[Fault]:
    """Yield shards that several checkpoints share while their others differ.

    A shard that all checkpoints share is frozen, and no fault.
    """
    for file in sorted({name for facts in series for name in facts.files}):
        digests = []
        for facts in series:
            if file in facts.files:
                digests.append((facts.name, facts.files[file].digest))
        if len({digest for _, digest in digests}) == 1:
            continue
        for group in _alike(digests):
            if not _is_inside(group, identical):
                text = f"{file} is the same in {_some(group)}, and other files are not"
                yield Fault("copied", group, text)


def _copied_tensors(
    series: Sequence[Facts], identical: Sequence[Group], copied_files: Sequence[Fault]
) -> Iterator[Fault]:
    """Yield tensors that moved and are then exactly what they were before: no training does that."""
    place_of = {facts.name: place for place, facts in enumerate(series)}
    groups_with_a_reason = [*identical, *(fault.checkpoints for fault in copied_files)]
    copied: dict[Group, list[str]] = {}
    for name in sorted({name for facts in series for name in facts.tensors}):
        digests = []
        for facts in series:
            tensor = facts.tensors.get(name)
            if tensor is not None and _can_be_compared(tensor):
                digests.append((facts.name, tensor.digest))
        for group in _alike(digests):
            first = place_of[group[0]]
            last = place_of[group[-1]]
            has_moved = False
            for checkpoint, _ in digests:
                if checkpoint not in group and first < place_of[checkpoint] < last:
                    has_moved = True
            if has_moved and not _is_inside(group, groups_with_a_reason):
                copied.setdefault(group, []).append(name)
    for group, names in copied.items():
        text = f"{names[0]} is the same in {_some(group)}, not between{_more(names)}"
        yield Fault("copied", group, text, tuple(names))


def _can_be_compared(tensor: TensorFact) -> bool:
    return bool(tensor.digest) and math.prod(tensor.shape) >= MIN_NUMBERS_OF_COPY


def _is_inside(group: Group, others: Iterable[Group]) -> bool:
    return any(set(group) <= set(other) for other in others)


def _repeated(series: Sequence[Facts]) -> Iterator[Fault]:
    """Yield files that are twice in one checkpoint, and tensors that are tied in a few checkpoints only."""
    for facts in series:
        for group in _alike((name, file.digest) for name, file in facts.files.items()):
            yield Fault("repeated", (facts.name,), f"{_some(group)} are the same file")
    groups = {facts.name: set(_alike(_tensor_digests(facts))) for facts in series}
    counts = Counter(group for of_checkpoint in groups.values() for group in of_checkpoint)
    for facts in series:
        for group in sorted(groups[facts.name]):
            is_tied_in_most = 2 * counts[group] > len(series)
            if not is_tied_in_most:
                yield Fault("repeated", (facts.name,), f"{_some(group)} are the same", group)


def _tensor_digests(facts: Facts) -> Iterator[tuple[str, str]]:
    for name, tensor in facts.tensors.items():
        if _can_be_compared(tensor) and not tensor.constant:
            yield name, f"{tensor.shape} {tensor.digest}"


def _alike(items: Iterable[tuple[str, Any]]) -> list[Group]:
    """Return names that have the same value, in groups of two and more."""
    groups: dict[Any, list[str]] = {}
    for name, value in items:
        groups.setdefault(value, []).append(name)
    return [tuple(names) for names in groups.values() if len(names) > 1]


def _some(names: Sequence[str], most: int = 4) -> str:
    text = ", ".join(names[:most])
    if len(names) > most:
        text += f" and {len(names) - most} more"
    return text


def _more(names: Sequence[str]) -> str:
    if len(names) == 1:
        return ""
    return f", and so are {len(names) - 1} more"
