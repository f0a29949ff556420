"""Attention patterns of a run on one sequence: at its start, at its sparsest, and at its end.

`patterns.json` in the run folder holds at most three patterns, and is always replaced as a whole. A
weight p is stored as the byte round(255 √p): it is read back to within √p/255 (0.004 where p = 1,
0.0005 where p = 1/64), and small weights keep their proportions.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from joma._runs.files import write_atomic
from joma._runs.folder import RunError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

PATTERNS = "patterns.json"


@dataclass(frozen=True, eq=False)
class Pattern:
    """Attention at one step.

    Attributes:
        step: the training step.
        entropy: the entropy of the top layer in nats; the sparsest pattern has the lowest.
        weights: per layer the mean over heads, (queries, keys), as bytes round(255 √p).
    """

    step: int
    entropy: float
    weights: Sequence[NDArray[np.uint8]]

    def shares(self, layer: int) -> NDArray[np.float64]:
        """Return the weights (queries, keys) of the layer at this position."""
        import numpy as np

        return (self.weights[layer].astype(np.float64) / 255) ** 2


@dataclass(frozen=True)
class Patterns:
    """The patterns of a run.

    Attributes:
        layers: number -> module, of the recorded layers.
        words: the tokens of the sequence; None if they were not recorded.
        kept: the patterns in the order of steps.
    """

    layers: dict[int, str]
    words: list[str] | None
    kept: list[Pattern]


def chosen(patterns: Sequence[Pattern]) -> list[Pattern]:
    """Return the first pattern, the one of lowest entropy, and the last."""
    if not patterns:
        return []
    lowest = min(patterns, key=lambda pattern: pattern.entropy)  # the first of equals
    by_step = {}
    for pattern in (patterns[0], lowest, patterns[-1]):
        by_step[pattern.step] = pattern
    return list(by_step.values())


def as_bytes(weights: Any) -> NDArray[np.uint8]:
    """Return weights between 0 and 1 as they are stored."""
    import numpy as np

    shares = np.nan_to_num(np.asarray(weights, dtype=np.float64))
    return np.rint(255 * np.sqrt(shares.clip(0, 1))).astype(np.uint8)


def write_patterns(folder: Path, patterns: Patterns) -> None:
    """Replace the file of a run folder."""
    rows = []
    shapes: list[list[int]] = []
    for pattern in patterns.kept:
        packed = [_packed(weights) for weights in pattern.weights]
        rows.append({"step": pattern.step, "entropy": pattern.entropy, "weights": packed})
        # All patterns of a run are of the same sequence, so they have the same shapes.
        shapes = shapes or [list(weights.shape) for weights in pattern.weights]
    stored = {
        "layers": patterns.layers,
        "shapes": shapes,
        "stored": "zlib of round(255 √p)",
        "words": patterns.words,
        "patterns": rows,
    }
    write_atomic(folder / PATTERNS, json.dumps(stored, ensure_ascii=False) + "\n")


def read_patterns(folder: Path) -> Patterns | None:
    """Return the patterns that a run recorded; None if it recorded none."""
    path = folder / PATTERNS
    if not path.exists():
        return None
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        patterns = []
        for row in stored["patterns"]:
            weights = []
            for text, shape in zip(row["weights"], stored["shapes"], strict=True):
                weights.append(_unpacked(text, shape))
            patterns.append(Pattern(int(row["step"]), float(row["entropy"]), weights))
        layers = {int(layer): str(module) for layer, module in stored["layers"].items()}
        return Patterns(layers, stored["words"], patterns)
    except (ValueError, KeyError, TypeError, zlib.error) as error:
        raise RunError(
            f"{path} is damaged ({error}): delete it; the other files of the run do not need it"
        ) from None


def _packed(weights: NDArray[np.uint8]) -> str:
    return base64.b64encode(zlib.compress(weights.tobytes(), 6)).decode()


def _unpacked(text: str, shape: Sequence[int]) -> NDArray[np.uint8]:
    import numpy as np

    # The size is a limit, so that a damaged file cannot fill the memory.
    size = int(np.prod(shape))
    data = zlib.decompressobj().decompress(base64.b64decode(text), size)
    return np.frombuffer(data, np.uint8).reshape(shape)
