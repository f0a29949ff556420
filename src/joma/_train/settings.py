"""What decides a training run. No torch here: the command line reads it to know its options."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

ACTIVATIONS = ("relu", "gelu", "linear")
OPTIMISERS = ("adam", "sgd")
AUTHORS_LENGTH = 35  # tokens of the sequence of `Probe.AUTHORS`


class LayerStart(StrEnum):
    """How the encoder's layers start."""

    COPIED = "copied"  # PyTorch's own initialisation, one layer drawn and copied: the paper's
    APART = "apart"  # PyTorch's own initialisation, every layer drawn on its own
    XAVIER = "xavier"  # every matrix by Xavier's rule, every layer drawn on its own


class Probe(StrEnum):
    """The validation tokens that attention is measured on."""

    WINDOWS = "windows"  # the first `probe_windows` windows of all streams
    AUTHORS = "authors"  # the one sequence that the authors stored: stream 0 of 10, window 100


def _setting(default: Any, help: str) -> Any:
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True)
class Settings:
    """All that decides a run's outcome. The defaults are the paper's."""

    data: str = _setting(
        "pydoc",
        "wikitext-2, wikitext-103, pydoc, zipf, hblt, hf:NAME, a text file or a folder of them",
    )
    tokeniser: str = _setting("words", "words (the paper's) or bpe")
    vocabulary: int | None = _setting(None, "keep so many words")
    layers: int = _setting(1, "Transformer layers")
    width: int = _setting(200, "width of the model")
    hidden: int = _setting(200, "hidden neurons of the MLP")
    heads: int = _setting(1, "attention heads")
    dropout: float = _setting(0.2, "dropout")
    activation: str = _setting("relu", "of the MLP: relu, gelu, or linear (none)")
    norm_first: bool = _setting(False, "layer norm before attention and MLP instead of after")
    init: float = _setting(0.1, "embedding and decoder start uniform between ± this")
    start: str = _setting(
        "copied",
        "the layers' start: copied (PyTorch's own, one layer copied: the paper's), apart or xavier",
    )
    length: int = _setting(35, "tokens per window")
    batch: int = _setting(20, "parallel streams")
    optimiser: str = _setting("adam", "adam (the paper's) or sgd")
    lr: float = _setting(1e-4, "learning rate")
    momentum: float = _setting(
        0.0, "of SGD (heavy ball): a rate then counts for 1/(1 - momentum) times as much"
    )
    clip: float = _setting(0.5, "largest norm of the gradient; 0 for none")
    weight_decay: float = _setting(0.0, "weight decay")
    steps: int = _setting(6000, "optimiser steps")
    every: int = _setting(
        50, "steps between measurements; at first they are an eighth of the step apart"
    )
    gauges: tuple[str, ...] = _setting(
        ("entropy", "stable_rank", "nonsink_entropy"), "gauges, separated by commas"
    )
    probe_windows: int = _setting(4, "validation windows that attention is measured on")
    valid_windows: int = _setting(
        10, "validation windows of the validation loss, spread over the text; 0 for all"
    )
    valid_every: int = _setting(0, "steps between validation losses; 0 for every measurement")
    probe: str = _setting(
        "windows",
        "windows, or authors: the one sequence of the authors (stream 0 of 10, window 100)",
    )
    fresh_adam: bool = _setting(
        False, "a new Adam every epoch, whose moments are lost, as in the authors' loop"
    )
    layerwise: bool = _setting(
        False,
        "train one layer after the other, from the bottom, each for its share of the steps, all else held",
    )
    short_window: bool = _setting(
        False, "the short window at the end of an epoch counts, as in the authors' loop"
    )
    seed: int = _setting(0, "seed; 3 is the start of the authors' seed 1, and so on")
    threads: int = _setting(
        0,
        "0 for OMP_NUM_THREADS, or as many as there are cores; recorded, since it changes the last bits",
    )

    @property
    def corpus_name(self) -> str:
        """The corpus, as part of a folder's name."""
        return Path(self.data).name.replace(":", "-")

    @property
    def label(self) -> str:
        """What runs are usually told apart by, as part of a folder's name."""
        return f"layers={self.layers},lr={self.lr:g},seed={self.seed}"

    def checked(self) -> Settings:
        """These settings, with the number of threads decided; what makes no sense is an error."""
        for name in ("layers", "width", "hidden", "heads", "length", "batch", "steps", "every",
                     "probe_windows"):  # fmt: skip
            check_whole(name, getattr(self, name))
        for name in ("valid_windows", "valid_every", "threads", "seed"):
            check_whole(name, getattr(self, name), least=0)
        if not self.lr > 0 or not math.isfinite(self.lr):
            raise ValueError(f"the learning rate must be positive, got {self.lr!r}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout must be in [0, 1), got {self.dropout!r}")
        for name in ("clip", "weight_decay", "init"):
            value = getattr(self, name)
            if not 0 <= value < math.inf:
                raise ValueError(
                    f"{name.replace('_', ' ')} must be a number of at least 0, got {value!r}"
                )
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum must be in [0, 1), got {self.momentum!r}")
        if self.momentum and self.optimiser != "sgd":
            raise ValueError(
                f"momentum {self.momentum:g} is of SGD: say optimiser sgd, or leave it 0"
            )
        if self.fresh_adam and self.optimiser != "adam":
            raise ValueError("fresh adam is of Adam: leave it out, or say optimiser adam")
        choices: dict[str, tuple[str, ...]] = {
            "activation": ACTIVATIONS, "optimiser": OPTIMISERS, "start": tuple(LayerStart), "probe": tuple(Probe),
        }  # fmt: skip
        for name, known in choices.items():
            if (value := getattr(self, name)) not in known:
                raise ValueError(f"unknown {name} {value!r}: choose {' or '.join(known)}")
        for name in ("norm_first", "fresh_adam", "short_window", "layerwise"):
            if not isinstance(value := getattr(self, name), bool):
                raise ValueError(f"{name.replace('_', ' ')} must be true or false, got {value!r}")
        if self.probe == Probe.AUTHORS and self.length != AUTHORS_LENGTH:
            raise ValueError(
                f"the authors' sequence has {AUTHORS_LENGTH} tokens: probe authors needs a length of {AUTHORS_LENGTH}, "
                f"got {self.length}"
            )
        from joma._measure.gauges.registry import in_training

        in_training(self.gauges)
        from joma._jobs.machine import threads

        return Settings(
            **{**asdict(self), "gauges": tuple(self.gauges), "threads": self.threads or threads()}
        )


def check_whole(name: str, value: object, least: int = 1) -> None:
    """Refuse what is not a whole number of at least ``least``, and what 64 bits cannot hold."""
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value < 2**62:
        raise ValueError(
            f"{name.replace('_', ' ')} must be a whole number of at least {least}, got {value!r}"
        )
