"""Announce and limit what a scan of models on the hub transfers, before it begins."""

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
from joma._measure.gauges.kinds import CHANGE, CHARGE, WEIGHT
from joma._measure.gauges.registry import get

TRANSFER = "to be transferred from the hub: "  # the announcement begins with it
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
_AMOUNT = re.compile(r"\s*(\d+(?:\.\d+)?(?:e\d+)?)\s*([a-z]*)\s*", re.IGNORECASE)
# Decimal, as disks and network plans count. `parse_bytes` also takes the binary units.
_SHOWN_UNITS = (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3))
# Checkpoints that are asked for their size until one answers: one may be missing or damaged, but
# to ask all of a hundred would take minutes.
_MAX_ASKED = 3


def parse_bytes(text: str | int) -> int:
    """Return 20_000_000_000 for "20GB", "20 GB" or 20e9; a ValueError if it is no amount."""
    match = _AMOUNT.fullmatch(str(text).replace("_", ""))
    count = 0.0
    if match is not None:
        count = float(match[1]) * _UNITS.get(match[2].upper(), 0)
    if count < 1:
        raise ValueError(f"{text!r} is no amount of bytes: give one as 500MB or 20GB")
    return int(count)


def show_bytes(count: float) -> str:
    """Return an amount of bytes in the unit that suits it."""
    for unit, size in _SHOWN_UNITS:
        if count >= 1000 * size:
            return f"{count / size:,.0f} {unit}"
        if count >= size:
            return f"{count / size:,.3g} {unit}"
    return f"{count:.0f} bytes"


def announced(
    checkpoints: Sequence[Checkpoint],
    request: ScanRequest,
    budget: int | None,
    say: Callable[[str], None],
) -> ScanRequest:
    """Announce what will be transferred, and return the request with each checkpoint's share."""
    limit = allowance(checkpoints, partial(needed, request=request), budget, say)
    return replace(request, limit=limit)


def allowance(
    checkpoints: Sequence[Checkpoint],
    bytes_of: Callable[[Revision], int],
    budget: int | None,
    say: Callable[[str], None],
) -> int | None:
    """Announce what will be transferred, and return each checkpoint's share of the budget.

    It is None without a budget. A budget that is known not to suffice is refused.

    Arguments:
        checkpoints: all that will be read; only those on the hub count.
        bytes_of: returns the bytes that a revision takes, without taking them.
        budget: in bytes, for all checkpoints.
        say: called with the announcement.
    """
    remote = [checkpoint for checkpoint in checkpoints if checkpoint.repo is not None]
    if not remote:
        return None
    count = len(remote)
    each = transfer(remote, bytes_of)
    if each is None:
        say(f"{TRANSFER}not known beforehand, {count} checkpoints")
    else:
        say(f"{TRANSFER}about {show_bytes(count * each)}, {count} × {show_bytes(each)}")
    if budget is None:
        return None
    try:
        return _share(budget, each, count)
    except ValueError:
        # Nothing will be scanned: delete the small files that came with the question.
        for checkpoint in remote[:_MAX_ASKED]:
            revision = checkpoint.revision()
            assert revision is not None
            revision.forget()
        raise


def transfer(checkpoints: Sequence[Checkpoint], bytes_of: Callable[[Revision], int]) -> int | None:
    """Return the bytes that one of the checkpoints takes from the hub, by the first that answers.

    It is None if none of the first few does.
    """
    for checkpoint in checkpoints[:_MAX_ASKED]:
        revision = checkpoint.revision(dry=True)
        assert revision is not None
        try:
            return bytes_of(revision)
        except BadCheckpoint:  # its row will report that
            continue
        finally:
            revision.close()
    return None


def needed(revision: Revision, request: ScanRequest) -> int:
    """Return the bytes that a request takes of a revision and of the one before it.

    They depend on the request and the files only. What is in a cache, or was planned before, counts
    as well, so that the number is the same on every machine.
    """
    gauges = get(request.gauges)
    weight_gauges = [gauge for gauge in gauges if gauge.kind in (WEIGHT, CHANGE)]
    change_gauges = [gauge for gauge in gauges if gauge.kind is CHANGE]
    if not request.ranges:
        total = _whole_bytes(revision, request)
    elif any(gauge.kind is CHARGE for gauge in gauges):  # charges need most of the model
        revision.fetch("config.json")
        total = revision.all_bytes(by_ranges=True)
    else:
        total = _part_bytes(revision, [gauge.part for gauge in weight_gauges], request.mlp)
    # With `keep`, the checkpoint before is here when the next one needs it.
    if change_gauges and not request.keep:
        earlier = revision.another()
        try:
            total += _part_bytes(earlier, [gauge.part for gauge in change_gauges], request.mlp)
        finally:
            earlier.close()
    return total


def _whole_bytes(revision: Revision, request: ScanRequest) -> int:
    """Return the bytes of the files of weights, and of the small files that are read with them."""
    runs_model = any(gauge.runs_model for gauge in get(request.gauges))
    reads_text = request.reads_text and request.tokenizer is None
    revision.fetch("config.json")
    if runs_model and reads_text:
        for name in TOKENIZER:
            revision.fetch(name)
    return revision.all_bytes(by_ranges=False)


def _part_bytes(revision: Revision, parts: Sequence[str], mlp: str | None) -> int:
    """Return the bytes of the matrices of these parts, with the headers that locate them."""
    try:
        tensors = revision.tensors(ranges=True)
        # Planned anew: with the plan of another checkpoint, fewer files would be opened.
        tensors.announce(plan(tensors, parts, mlp).views(tensors))
    except NotWhole:
        return revision.all_bytes(by_ranges=True)
    return revision.meter.expected


def _share(budget: int, each: int | None, count: int) -> int:
    """Return the budget of one checkpoint of ``count``; refuse it if it is too small."""
    if each is None or each * count <= budget:
        return budget // count
    affordable = budget // max(each, 1)
    remedy = "give a larger one"
    if affordable:
        remedy = f"choose {affordable} of them (--revisions log:{affordable}), or {remedy}"
    raise ValueError(
        f"{count} checkpoints of {show_bytes(each)} each are {show_bytes(each * count)}, and the "
        f"budget is {show_bytes(budget)}: {remedy}"
    )
