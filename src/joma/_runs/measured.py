"""What attention of a run was measured on, and in which mode: two runs that differ in it have different numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_UNKNOWN_MODE = "training batches"  # of runs that did not record it


def describe_passes(is_probe: bool, is_training: bool, is_replay: bool) -> str:
    """Return what the passes of a measurement are, in a few words."""
    batches = "a probe" if is_probe else "training batches"
    mode = "train" if is_training else "eval"
    replay = ", replayed outside the compiled model" if is_replay else ""
    return f"{batches} in {mode} mode{replay}"


def measured_on(info: Mapping[str, Any]) -> tuple[str, ...]:
    """Return what a run was measured on, by its `run.json`: several if that changed; empty if nothing says it."""
    recorded: Sequence[str] = info.get("measured", ())
    if recorded:
        return tuple(sorted(recorded))
    batches = (info.get("config") or {}).get("measured on")
    if batches == "probe":
        return (describe_passes(True, False, False),)
    return (_UNKNOWN_MODE,) if batches == _UNKNOWN_MODE else ()


def not_alike(infos: Mapping[str, Mapping[str, Any]]) -> str:
    """Return a sentence about runs (label -> `run.json`) that were measured in different ways; "" if they were not."""
    ways = {label: on for label, info in infos.items() if (on := measured_on(info))}
    known = {on for on in ways.values() if on != (_UNKNOWN_MODE,)}
    is_unclear = any(on == (_UNKNOWN_MODE,) for on in ways.values())
    has_probe = any(part.startswith("a probe") for on in known for part in on)
    if len(known) < 2 and not (is_unclear and has_probe):
        return ""
    words = "; ".join(f"{label}: {' and '.join(on)}" for label, on in ways.items())
    return (
        f"These runs were not measured alike ({words}): dropout and other batches change the level of a gauge, so "
        "compare the shapes of their curves, not their levels."
    )
