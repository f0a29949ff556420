"""Faults of a series of checkpoints: rules over the facts of each, and of each against the others."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from joma._checkpoints.audit.facts import Facts, Samples
from joma._checkpoints.audit.fit import misfits
from joma._checkpoints.audit.order import arranged, judge_order, put_back
from joma._checkpoints.audit.sketch import MOST, Distances
from joma._checkpoints.steps import step_of

_LEAST = 64  # numbers: smaller tensors may be equal by chance
_GET_AGAIN = "get it again from its source, or leave it out (--revisions)"
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
}  # by kind of fault


@dataclass(frozen=True)
class Fault:
    """Something that is wrong with a checkpoint, or with several together.

    Attributes:
        kind: "unreadable", "size", "tensors", "type", "not finite", "state", "identical", "copied", "repeated",
            "exchanged", "late" or "misfit".
        checkpoints: whose fault it is; of copies, all that are alike.
        text: what is wrong, for people.
        tensors: which ones, where not all.
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
        """As plain data."""
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
    """All faults of a series in the order of its steps, and what cannot be told of its order.

    ``sketches`` are those of the checkpoints that could be read.
    """
    readable = [facts for facts in series if not facts.problem]
    faults = [Fault("unreadable", (f.name,), f.problem) for f in series if f.problem]
    for rule in (_sizes, _names, _types, _not_finite, _states):
        faults += rule(readable)
    identical = _identical(readable)
    same_files = list(_copied_files(readable, identical))
    faults += [
        Fault("identical", group, f"{_some(group)} have the same weights") for group in identical
    ]
    faults += same_files
    faults += _copied_tensors(readable, identical, same_files)
    faults += _repeated(readable)
    apart = Distances(readable, sketches) if sketches and len(readable) <= MOST else None
    copies = [
        n for n, facts in enumerate(readable) if any(facts.name in group for group in identical)
    ]
    order = judge_order(readable, apart, copies)
    for kind, pairs in (("exchanged", order.exchanged), ("late", order.late)):
        faults += [Fault(kind, tuple(readable[n].name for n in pair), text) for pair, text in pairs]
    right = put_back(len(readable), [pair for pair, _ in order.exchanged])

    def without(names: Container[str]) -> list[Facts]:
        """The series in its right order, and without these."""
        kept = [n for n in right if readable[n].name not in names]
        return readable if apart is None else arranged(readable, kept, apart)

    found = misfits(without(()), None if apart is None else without)
    faults += [
        Fault("misfit", (misfit.checkpoint,), misfit.text, misfit.tensors) for misfit in found
    ]
    return faults, order.unknown


def _sizes(series: Sequence[Facts]) -> Iterator[Fault]:
    """A file that is smaller or larger than those of the same name; where tensors were read, they tell more."""
    for file in {name for facts in series for name in facts.files}:
        of = [facts for facts in series if file in facts.files]
        usual = median(facts.files[file].size for facts in of)
        for facts in of:
            size, known = (
                facts.files[file].size,
                any(tensor.dtype for tensor in facts.tensors.values()),
            )
            if not known and abs(size - usual) > 0.01 * usual + 4096:
                text = f"{file} has {size:,} bytes, where {usual:,.0f} are usual"
                yield Fault("size", (facts.name,), text)


def _names(series: Sequence[Facts]) -> Iterator[Fault]:
    """Tensors that most checkpoints have and this one has not, and the other way round."""
    known = [facts for facts in series if facts.tensors]
    count = Counter(name for facts in known for name in facts.tensors)
    usual = {name for name, n in count.items() if 2 * n > len(known)}
    for facts in known:
        missing, extra = sorted(usual - facts.tensors.keys()), sorted(facts.tensors.keys() - usual)
        words = [
            f"{what} {_some(names)}"
            for what, names in (("lacks", missing), ("has besides", extra))
            if names
        ]
        if words:
            yield Fault(
                "tensors", (facts.name,), f"{facts.name} {' and '.join(words)}", (*missing, *extra)
            )


def _types(series: Sequence[Facts]) -> Iterator[Fault]:
    """Shapes and types that differ from those of most checkpoints."""
    known = [facts for facts in series if any(tensor.dtype for tensor in facts.tensors.values())]
    kinds: dict[str, Counter[tuple[str, tuple[int, ...]]]] = {}
    for facts in known:
        for name, tensor in facts.tensors.items():
            kinds.setdefault(name, Counter())[tensor.dtype, tensor.shape] += 1
    usual = {name: counts.most_common(1)[0][0] for name, counts in kinds.items()}
    for facts in known:
        odd = [name for name, t in facts.tensors.items() if (t.dtype, t.shape) != usual[name]]
        if odd:
            (dtype, shape), now = usual[odd[0]], facts.tensors[odd[0]]
            was = f"{odd[0]} is {now.dtype} {now.shape}, and {dtype} {shape} in most checkpoints"
            yield Fault("type", (facts.name,), was + _more(odd), tuple(odd))


def _not_finite(series: Sequence[Facts]) -> Iterator[Fault]:
    for facts in series:
        if bad := [name for name, tensor in facts.tensors.items() if tensor.not_finite]:
            count = facts.tensors[bad[0]].not_finite
            text = f"{bad[0]} has {count:,} number{'s' * (count > 1)} that {'are' if count > 1 else 'is'} NaN or infinite"
            yield Fault("not finite", (facts.name,), text + _more(bad), tuple(bad))


def _states(series: Sequence[Facts]) -> Iterator[Fault]:
    """A name that says another step than the trainer's state."""
    for facts in series:
        named = step_of(facts.name)
        if facts.trained is not None and named is not None and named != facts.trained:
            yield Fault(
                "state",
                (facts.name,),
                f"its name says step {named:,}, trainer_state.json {facts.trained:,}",
            )


def _signature(facts: Facts) -> tuple[tuple[str, str], ...]:
    """What a checkpoint's weights are known by: their tensors where these were read, else their files."""
    tensors = sorted(
        (name, tensor.digest) for name, tensor in facts.tensors.items() if tensor.digest
    )
    return tuple(tensors or sorted((name, file.digest) for name, file in facts.files.items()))


def _identical(series: Sequence[Facts]) -> list[tuple[str, ...]]:
    return _alike((facts.name, _signature(facts)) for facts in series)


def _copied_files(series: Sequence[Facts], identical: Sequence[tuple[str, ...]]) -> Iterator[Fault]:
    """A shard that several checkpoints share, while their others differ; one that all share is frozen."""
    for file in sorted({name for facts in series for name in facts.files}):
        of = [(facts.name, facts.files[file].digest) for facts in series if file in facts.files]
        for group in _alike(of) if len({digest for _, digest in of}) > 1 else []:
            if not any(set(group) <= set(same) for same in identical):
                yield Fault(
                    "copied",
                    group,
                    f"{file} is the same in {_some(group)}, and other files are not",
                )


def _copied_tensors(
    series: Sequence[Facts], identical: Sequence[tuple[str, ...]], files: Sequence[Fault]
) -> Iterator[Fault]:
    """Tensors that have moved and are then again what they were, as no training makes them."""
    order = {facts.name: n for n, facts in enumerate(series)}
    copied: dict[tuple[str, ...], list[str]] = {}
    for name in sorted({name for facts in series for name in facts.tensors}):
        of = [(facts.name, facts.tensors[name]) for facts in series if name in facts.tensors]
        of = [
            (checkpoint, tensor)
            for checkpoint, tensor in of
            if tensor.digest and math.prod(tensor.shape) >= _LEAST
        ]
        for group in _alike((checkpoint, tensor.digest) for checkpoint, tensor in of):
            places = [order[checkpoint] for checkpoint in group]
            moved = any(
                places[0] < order[checkpoint] < places[-1] and checkpoint not in group
                for checkpoint, _ in of
            )
            known = any(set(group) <= set(same) for same in identical)
            if (
                moved
                and not known
                and not any(set(group) <= set(fault.checkpoints) for fault in files)
            ):
                copied.setdefault(group, []).append(name)
    for group, names in copied.items():
        yield Fault(
            "copied",
            group,
            f"{names[0]} is the same in {_some(group)}, not between{_more(names)}",
            tuple(names),
        )


def _repeated(series: Sequence[Facts]) -> Iterator[Fault]:
    """Files, or tensors that are not tied in most checkpoints, that are there twice in one checkpoint."""
    for facts in series:
        for group in _alike((name, file.digest) for name, file in facts.files.items()):
            yield Fault("repeated", (facts.name,), f"{_some(group)} are the same file")
    pairs = {facts.name: set(_alike(_tensor_digests(facts))) for facts in series}
    count = Counter(pair for groups in pairs.values() for pair in groups)
    for facts in series:
        for pair in sorted(pairs[facts.name]):
            if 2 * count[pair] <= len(series):
                yield Fault("repeated", (facts.name,), f"{_some(pair)} are the same", pair)


def _tensor_digests(facts: Facts) -> Iterator[tuple[str, str]]:
    for name, tensor in facts.tensors.items():
        if tensor.digest and not tensor.constant and math.prod(tensor.shape) >= _LEAST:
            yield name, f"{tensor.shape} {tensor.digest}"


def _alike(items: Iterable[tuple[str, Any]]) -> list[tuple[str, ...]]:
    """Names that have the same value, in groups of two and more."""
    groups: dict[Any, list[str]] = {}
    for name, value in items:
        groups.setdefault(value, []).append(name)
    return [tuple(names) for names in groups.values() if len(names) > 1]


def _some(names: Sequence[str], most: int = 4) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _more(names: Sequence[str]) -> str:
    return f", and so are {len(names) - 1} more" if len(names) > 1 else ""
