"""Hierarchical data as text: samples of a binary latent tree (Section 5), one line each.

A line is the class, the tokens that occur in the order of their numbers, and a full stop: `c3 t004 t017 t021 .`
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from joma.theory.hierarchy import HBLT

DEFAULTS: dict[str, int | float] = {
    "classes": 10,
    "latents": 4,  # right below the class
    "depth": 3,
    "children": 3,
    "rho": 0.8,
    "samples": 20_000,
    "seed": 0,
}


def options(spec: str) -> dict[str, Any]:
    """The options of `hblt:rho=0.9,depth=4`, with the defaults for the others.

    >>> options("rho=0.9")["rho"], options("")["depth"]
    (0.9, 3)
    """
    chosen = dict(DEFAULTS)
    for item in filter(None, spec.split(",")):
        name, _, value = (part.strip() for part in item.partition("="))
        if name not in DEFAULTS:
            raise ValueError(
                f"hblt has no option {name!r}: choose from {', '.join(DEFAULTS)} (hblt:rho=0.9,depth=4)"
            )
        kind = type(DEFAULTS[name])
        try:
            chosen[name] = kind(value)
        except ValueError:
            what = "a whole number" if kind is int else "a number"
            raise ValueError(f"hblt: {name} must be {what}, got {value!r}") from None
        if kind is int and chosen[name] < (0 if name == "seed" else 1):
            raise ValueError(
                f"hblt: {name} must be at least {0 if name == 'seed' else 1}, got {value}"
            )
    if not 0 <= chosen["rho"] <= 1:
        raise ValueError(f"hblt: rho must be in [0, 1], got {chosen['rho']}")
    return chosen


def tree(chosen: dict[str, Any]) -> HBLT:
    """The tree: each class sets each top latent to one value with probability 0.9."""
    rng = np.random.default_rng(chosen["seed"])
    q = rng.choice([0.1, 0.9], size=(chosen["classes"], chosen["latents"]))
    return HBLT(chosen["depth"], chosen["children"], chosen["rho"], class_to_latent=q)


def text(spec: str = "") -> bytes:
    """All samples."""
    chosen = options(spec)
    samples = tree(chosen).sample(chosen["samples"], chosen["seed"] + 1)
    digits = math.ceil(math.log10(max(10, samples.tokens.shape[1])))
    words = np.array([f"t{m:0{digits}d} " for m in range(samples.tokens.shape[1])], dtype=object)
    lines = (
        f"c{k} {''.join(words[row])}.\n"
        for k, row in zip(samples.classes, samples.tokens.astype(bool), strict=True)
    )
    return "".join(lines).encode()
