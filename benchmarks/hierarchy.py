"""Samples of a 3-layer tree with 100 tokens: joma's sampler against layer by layer in plain NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks._timing import alternate
from joma.theory import HBLT

SAMPLES = 200_000


def run(rounds: int = 5) -> list[dict[str, Any]]:
    """Time of both sides, and how far each one's co-occurrence is from the exact one."""
    rng = np.random.default_rng(0)
    tree = HBLT(3, [3, [3] * 20 + [4] * 10], 0.9, class_to_latent=rng.random((20, 10)))

    def plain() -> Any:
        classes = rng.integers(20, size=SAMPLES)
        y = rng.random((SAMPLES, 10)) >= tree.q[classes]
        for layer in tree.layers[1:]:
            above = y[:, tree.parent[layer] - (0 if layer.start == 10 else 10)]
            y = above ^ (rng.random(above.shape) < (1 - 0.9) / 2)
        return y

    (fast, sample), (slow, tokens) = alternate(
        lambda: tree.sample(SAMPLES, rng).tokens, plain, rounds=rounds
    )
    exact = tree.joint()
    errors = [
        float(np.abs(t.T.astype(np.float32) @ t / SAMPLES - exact).max()) for t in (sample, tokens)
    ]
    row = {
        "what": f"{SAMPLES:,} samples of an HBLT, 3 layers, 100 tokens ({SAMPLES / fast / 1e6:.1f} million per second)",
        "joma": "`HBLT.sample`",
        "against": "NumPy, layer by layer",
        "joma_seconds": fast,
        "against_seconds": slow,
        "ratio": slow / fast,
        "error": errors[0],
        "accuracy": f"largest error of P[y_l, y_m] {errors[0]:.0e} (NumPy {errors[1]:.0e}: both sampling noise)",
    }
    return [row]
