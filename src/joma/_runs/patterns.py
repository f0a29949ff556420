"""Attention patterns of a run: who attends to whom, on one sequence, at its start, at its sparsest, and at its end.

`patterns.json` in the run folder holds at most three of them, replaced as a whole. A weight p is stored as the byte
round(255 √p): it is read back to within √p/255 (0.004 where p = 1, 0.0005 where p = 1/64), and small weights keep
their proportions.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from joma._runs.folder import RunError, write_atomic

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

PATTERNS = "patterns.json"


@dataclass(frozen=True, eq=False)
class Pattern:
    """Attention at one step.

    Attributes:
        step: when.
        entropy: of the top layer, in nats: what tells the sparsest.
        weights: per layer the mean over heads, (queries, keys), as bytes round(255 √p).
    """

    step: int
    entropy: float
    weights: Sequence[NDArray[np.uint8]]

    def shares(self, layer: int) -> NDArray[np.float64]:
        """The weights (queries, keys) of the layer at this place."""
        import numpy as np

        return (self.weights[layer].astype(np.float64) / 255) ** 2


@dataclass(frozen=True)
class Patterns:
    """The patterns of a run.

    Attributes:
        layers: number -> module, of the layers that are kept.
        words: of the sequence; None if they were not given.
        kept: in the order of steps.
    """

    layers: dict[int, str]
    words: list[str] | None
    kept: list[Pattern]


def chosen(patterns: Sequence[Pattern]) -> list[Pattern]:
    """Of all so far: the first, the one of lowest entropy, and the last."""
    if not patterns:
        return []
    lowest = min(patterns, key=lambda pattern: pattern.entropy)  # the first of equals
    return list({pattern.step: pattern for pattern in (patterns[0], lowest, patterns[-1])}.values())


def as_bytes(weights: Any) -> NDArray[np.uint8]:
    """Weights, 0 to 1, as they are stored."""
    import numpy as np

    shares = np.nan_to_num(np.asarray(weights, dtype=np.float64))
    return np.rint(255 * np.sqrt(shares.clip(0, 1))).astype(np.uint8)


def write_patterns(folder: Path, patterns: Patterns) -> None:
    """Write the file, whole."""
    rows = [
        {
            "step": one.step,
            "entropy": one.entropy,
            "weights": [_packed(weights) for weights in one.weights],
        }
        for one in patterns.kept
    ]
    shape = (
        [] if not patterns.kept else [list(weights.shape) for weights in patterns.kept[0].weights]
    )
    facts = {
        "layers": patterns.layers,
        "shapes": shape,
        "stored": "zlib of round(255 √p)",
        "words": patterns.words,
    }
    write_atomic(
        folder / PATTERNS, json.dumps({**facts, "patterns": rows}, ensure_ascii=False) + "\n"
    )


def read_patterns(folder: Path) -> Patterns | None:
    """What a run recorded; None if it recorded none."""
    if not (path := folder / PATTERNS).exists():
        return None
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        kept = [
            Pattern(
                int(row["step"]),
                float(row["entropy"]),
                [
                    _unpacked(text, shape)
                    for text, shape in zip(row["weights"], stored["shapes"], strict=True)
                ],
            )
            for row in stored["patterns"]
        ]
        return Patterns(
            {int(n): str(name) for n, name in stored["layers"].items()}, stored["words"], kept
        )
    except (ValueError, KeyError, TypeError, zlib.error) as error:
        raise RunError(
            f"{path} is damaged ({error}): delete it; the other files of the run do not need it"
        ) from None


def _packed(weights: NDArray[np.uint8]) -> str:
    return base64.b64encode(zlib.compress(weights.tobytes(), 6)).decode()


def _unpacked(text: str, shape: Sequence[int]) -> NDArray[np.uint8]:
    import numpy as np

    size = int(np.prod(shape))
    data = zlib.decompressobj().decompress(base64.b64decode(text), size)
    return np.frombuffer(data, np.uint8).reshape(shape)
