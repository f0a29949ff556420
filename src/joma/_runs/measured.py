"""The batches and the mode that attention was measured in. Runs that differ in them have different numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

# Runs that recorded no mode. Their numbers may be with or without dropout.
_UNKNOWN_MODE = "training batches"


def describe_passes(is_probe: bool, is_training: bool, is_replay: bool) -> str:
    """Describe the passes of a measurement in a few words."""
    batches = "training batches"
    if is_probe:
        batches = "a probe"
    mode = "eval"
    if is_training:
        mode = "train"
    description = f"{batches} in {mode} mode"
    if is_replay:
        description += ", replayed outside the compiled model"
    return description


def measured_on(info: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the ways in which a run was measured, by its `run.json`; empty if it records none."""
    recorded: Sequence[str] = info.get("measured", ())
    if recorded:
        return tuple(sorted(recorded))
    batches = (info.get("config") or {}).get("measured on")
    if batches == "probe":
        return (describe_passes(True, False, False),)
    if batches == _UNKNOWN_MODE:
        return (_UNKNOWN_MODE,)
    return ()


def not_alike(infos: Mapping[str, Mapping[str, Any]]) -> str:
    """Return a warning if runs (label -> `run.json`) were measured in different ways; else ""."""
    descriptions = []
    recorded_ways = set()
    has_unknown_mode = False
    has_probe = False
    for label, info in infos.items():
        ways = measured_on(info)
        if not ways:
            continue
        descriptions.append(f"{label}: {' and '.join(ways)}")
        if ways == (_UNKNOWN_MODE,):
            has_unknown_mode = True
        else:
            recorded_ways.add(ways)
            has_probe |= any(way.startswith("a probe") for way in ways)
    # An unknown mode agrees with any training batches, but never with a probe.
    if len(recorded_ways) < 2 and not (has_unknown_mode and has_probe):
        return ""
    return (
        f"These runs were not measured alike ({'; '.join(descriptions)}): dropout and other batches change the "
        "level of a gauge, so compare the shapes of their curves, not their levels."
    )
