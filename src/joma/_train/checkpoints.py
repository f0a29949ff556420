"""Checkpoints of a run: `checkpoints/step-00001000/`, whole or not there at all.

model.safetensors   the weights, by the names of the model's own parameters
state.safetensors   optimiser, random states, what gauges compare with
state.json          step, offset in metrics.jsonl, phases, and the hashes of both files
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from joma._runs import staged, write_json
from joma._runs.files import file_hash

_NAME = re.compile(r"step-(\d{8,})")
_FILES = ("model.safetensors", "state.safetensors")


@dataclass(frozen=True, eq=False)
class SavedState:
    """Everything that a run needs to go on."""

    step: int
    offset: int  # of metrics.jsonl
    model: Mapping[str, Tensor]
    state: Mapping[str, Tensor]
    facts: Mapping[str, Any]  # plain JSON


def folder(run: Path, step: int) -> Path:
    """Return the folder of the checkpoint of a step."""
    return run / "checkpoints" / f"step-{step:08d}"


def steps(run: Path) -> list[int]:
    """Return the steps that have a checkpoint, in order."""
    names = (_NAME.fullmatch(entry.name) for entry in (run / "checkpoints").glob("step-*"))
    return sorted(int(match[1]) for match in names if match)


def save(run: Path, checkpoint: SavedState) -> None:
    """Write a checkpoint; it appears under its name when it is whole."""
    from safetensors.torch import save_file

    target = folder(run, checkpoint.step)
    if target.exists():  # of a run that was killed after it, and went on from before
        shutil.rmtree(target)
    with staged(target) as fresh:
        for name, tensors in zip(_FILES, (checkpoint.model, checkpoint.state), strict=True):
            save_file(
                {key: value.detach().contiguous() for key, value in tensors.items()}, fresh / name
            )
        hashes = {name: file_hash(fresh / name) for name in _FILES}
        write_json(
            fresh / "state.json",
            {
                "step": checkpoint.step,
                "offset": checkpoint.offset,
                "sha256": hashes,
                **checkpoint.facts,
            },
        )


def load_latest(run: Path, say: Callable[[str], None]) -> SavedState | None:
    """Return the newest checkpoint that is intact; report damaged ones and pass over them."""
    for step in reversed(steps(run)):
        try:
            return load(run, step)
        except (OSError, ValueError, KeyError) as error:
            say(
                f"checkpoint {folder(run, step)} is damaged ({error}): going back to the one before it"
            )
    return None


def load(run: Path, step: int) -> SavedState:
    """Read the checkpoint of a step; refuse one that is not what was written."""
    from safetensors.torch import load_file

    path = folder(run, step)
    facts = json.loads((path / "state.json").read_text())
    for name in _FILES:
        if file_hash(path / name) != facts["sha256"][name]:
            raise ValueError(f"{name} is not what was written")
    model = load_file(path / _FILES[0])
    state = load_file(path / _FILES[1])
    return SavedState(facts["step"], facts["offset"], model, state, facts)


def prune(run: Path, keep: int, every: int | None) -> None:
    """Remove all but the newest ``keep`` checkpoints and those of multiples of ``every``."""
    for step in _surplus(steps(run), keep, every):
        shutil.rmtree(folder(run, step), ignore_errors=True)


def _surplus(saved: Iterable[int], keep: int, every: int | None) -> list[int]:
    older = sorted(saved)
    if keep > 0:
        older = older[:-keep]
    return [step for step in older if not every or step % every]
