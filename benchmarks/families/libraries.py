"""The libraries of `make families`, and which part of each was measured."""

from __future__ import annotations

from dataclasses import dataclass

# Library -> the module of this folder that builds its models.
LIBRARIES = {
    "transformers": "hub",
    "timm": "images",
    "vit-pytorch": "vits",
    "x-transformers": "layers",
    "litgpt": "gpts",
    "torchtune": "tunes",
    "torchtitan": "titans",
    "hand-written": "styles",
    "neutral": "neutral",
}


@dataclass(frozen=True)
class Coverage:
    """Which models of a library were measured, and with which code; the last line of its results.

    Attributes:
        coverage: name of the library. The name of this field marks the line.
        measured: number of models in the rows.
        available: number of models that the harness has for this library.
        code: fingerprint of joma's source and of the packages that it rests on.
    """

    coverage: str
    measured: int
    available: int
    code: str
