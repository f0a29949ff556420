"""What a scan of models on the hub will transfer, said and limited before it begins."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from joma._checkpoints.checkpoints import Checkpoint
from joma._checkpoints.hub import TOKENIZER
from joma._checkpoints.plan import plan
from joma._checkpoints.reading import BadCheckpoint
from joma._checkpoints.revision import NotWhole, Revision
from joma._checkpoints.row import ScanRequest
from joma._checkpoints.weights import views
from joma._measure.gauges.kinds import CHANGE, CHARGE, WEIGHT
from joma._measure.gauges.registry import get

_UNITS = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
}
TRANSFER = "to be transferred from the hub: "  # how the line begins that says it
_TRIES = 3  # checkpoints that are asked until one answers


def parse_bytes(text: str | int) -> int:
    """20_000_000_000 of "20GB", "20 GB" or 20e9; a ValueError if it is no amount."""
    match = re.fullmatch(
        r"\s*(\d+(?:\.\d+)?(?:e\d+)?)\s*([a-z]*)\s*", str(text).replace("_", ""), re.IGNORECASE
    )
    if (
        match is None
        or match[2].upper() not in _UNITS
        or (count := float(match[1]) * _UNITS[match[2].upper()]) < 1
    ):
        raise ValueError(f"{text!r} is no amount of bytes: give one as 500MB or 20GB")
    return int(count)


def show_bytes(count: float) -> str:
    """In the unit that suits it."""
    for unit, size in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= size:
            return (
                f"{count / size:,.3g} {unit}"
                if count < 1000 * size
                else f"{count / size:,.0f} {unit}"
            )
    return f"{count:.0f} bytes"


def announced(
    checkpoints: Sequence[Checkpoint],
    request: ScanRequest,
    budget: int | None,
    say: Callable[[str], None],
) -> ScanRequest:
    """The request with each checkpoint's share of the budget; what will be transferred is said, or refused."""
    return replace(
        request, limit=allowance(checkpoints, partial(needed, request=request), budget, say)
    )


def allowance(
    checkpoints: Sequence[Checkpoint],
    bytes_of: Callable[[Revision], int],
    budget: int | None,
    say: Callable[[str], None],
) -> int | None:
    """Each checkpoint's share of the budget, None without one; what will be transferred is said, or refused.

    ``bytes_of``: the bytes that a revision takes, found out without taking them.
    """
    remote = [checkpoint for checkpoint in checkpoints if checkpoint.repo is not None]
    if not remote:
        return None
    each, count = transfer(remote, bytes_of), len(remote)
    if each is None:
        say(f"{TRANSFER}not known beforehand, {count} checkpoints")
    else:
        say(f"{TRANSFER}about {show_bytes(count * each)}, {count} × {show_bytes(each)}")
    try:
        return None if budget is None else _share(budget, each, count)
    except ValueError:
        for asked in remote[:_TRIES]:
            if (revision := asked.revision()) is not None:
                revision.forget()
        raise


def transfer(checkpoints: Sequence[Checkpoint], bytes_of: Callable[[Revision], int]) -> int | None:
    """Bytes that one of the checkpoints will take from the hub, by the first that tells; None if none of a few does."""
    for checkpoint in checkpoints[:_TRIES]:
        revision = checkpoint.revision(dry=True)
        assert revision is not None
        try:
            return bytes_of(revision)
        except BadCheckpoint:  # its row will say so
            continue
        finally:
            revision.close()
    return None


def needed(revision: Revision, request: ScanRequest) -> int:
    """Return the bytes that a request takes of a revision and of the one before it, on a machine that has no file.

    They depend on the request and the files only: what is in a cache, or was planned before, counts as well.
    """
    gauges = get(request.gauges)
    weight_parts = list(dict.fromkeys(g.part for g in gauges if g.kind in (WEIGHT, CHANGE)))
    change_parts = list(dict.fromkeys(g.part for g in gauges if g.kind is CHANGE))
    if not request.ranges:
        here = _whole(revision, request)
    elif any(gauge.kind is CHARGE for gauge in gauges):  # charges: most of the model
        revision.fetch("config.json")
        here = revision.all_bytes(by_ranges=True)
    else:
        here = _parts(revision, weight_parts, request.mlp)
    if not change_parts or request.keep:  # what is kept is there when the next one needs it
        return here
    earlier = revision.another()
    try:
        return here + _parts(earlier, change_parts, request.mlp)
    finally:
        earlier.close()


def _whole(revision: Revision, request: ScanRequest) -> int:
    """Return the bytes of the files of weights, and of the small files that are read with them."""
    runs_model = any(gauge.runs_model for gauge in get(request.gauges))
    reads_text = request.reads_text and request.tokenizer is None
    for name in ("config.json", *(TOKENIZER if runs_model and reads_text else ())):
        revision.fetch(name)
    return revision.all_bytes(by_ranges=False)


def _parts(revision: Revision, parts: list[str], mlp: str | None) -> int:
    """Return the bytes of the matrices of these parts, with the headers that tell where they are."""
    try:
        tensors = revision.tensors(ranges=True)
        # not `planned`: with the plan of another checkpoint, fewer files would be opened than without
        tensors.expect(views(tensors, plan(tensors, parts, mlp)))
    except NotWhole:
        return revision.all_bytes(by_ranges=True)
    return revision.meter.expected


def _share(budget: int, each: int | None, count: int) -> int:
    """The budget of one checkpoint of ``count``; refused if it is known not to suffice."""
    if each is not None and each * count > budget:
        fits = budget // max(each, 1)
        raise ValueError(
            f"{count} checkpoints of {show_bytes(each)} each are {show_bytes(each * count)}, and the budget is "
            f"{show_bytes(budget)}: "
            + (
                f"choose {fits} of them (--revisions log:{fits}), or give a larger one"
                if fits
                else "give a larger one"
            )
        )
    return budget // count
