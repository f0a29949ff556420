"""Checkpoints of `joma train` as models: its language model, and the tokeniser of its corpus.

They have no config.json: the settings are in the run.json of the training, and the sizes in the
weights.
"""

from __future__ import annotations

import json
import re
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from joma._checkpoints.reading import BadCheckpoint, parse_json
from joma._checkpoints.tensors import Tensors
from joma._data.corpora import Corpus, corpus
from joma._train.model import LanguageModel

_CHECKPOINT = re.compile(r"step-\d+")
# The mask of the model has this many rows and columns, one byte each: 256 MB.
_LONGEST = 1 << 14


def find_language_model(path: Path) -> Path | None:
    """Return the checkpoint of `joma train` at a path, for a run its last one; None if there is none."""
    if (path / "checkpoints").is_dir() and (path / "run.json").is_file():
        folders = [entry for entry in (path / "checkpoints").iterdir() if is_language_model(entry)]
        return max(folders, key=lambda folder: int(folder.name[5:]), default=None)
    if is_language_model(path):
        return path
    return None


def is_language_model(folder: Path) -> bool:
    """True if `joma train` wrote the folder."""
    is_checkpoint = folder.parent.name == "checkpoints" and _CHECKPOINT.fullmatch(folder.name)
    if not is_checkpoint or (folder / "config.json").exists():
        return False
    return (folder / "model.safetensors").is_file() and _settings(folder) is not None


def _settings(folder: Path) -> dict[str, Any] | None:
    """Return the settings of the training that a checkpoint belongs to; None if it is of no training."""
    path = folder.absolute().parent.parent / "run.json"
    try:
        info = parse_json(path.read_bytes())
    except (OSError, ValueError):
        return None
    config = info.get("config")
    if info.get("kind") != "train" or not isinstance(config, dict):
        return None
    return config


class SavedLanguageModel(LanguageModel):
    """The language model with the attributes that models of transformers have."""

    config: SimpleNamespace

    def get_input_embeddings(self) -> nn.Embedding:
        return self.embed

    def forward(self, input_ids: Tensor, project: bool = False) -> Tensor:
        """Return the states (B, T, d) before the decoder."""
        return super().forward(input_ids, project)


def load_language_model(folder: Path, tensors: Tensors) -> SavedLanguageModel:
    """Return the model of a checkpoint of `joma train`, in evaluation mode."""
    settings = _settings(folder)
    if settings is None:
        raise BadCheckpoint(f"{folder} is no checkpoint of joma train: its run.json is missing")
    state = {name: tensors.read(name) for name in sorted(tensors.names())}
    try:
        length = min(int(settings["length"]), _LONGEST)
        words, width = state["embed.weight"].shape
        hidden = state["encoder.layers.0.linear1.weight"].shape[0]
        layer_numbers = {int(name.split(".")[2]) for name in state if name.startswith("encoder.l")}
        with torch.random.fork_rng(devices=[]):
            model = SavedLanguageModel(
                words,
                layers=len(layer_numbers),
                d=width,
                hidden=hidden,
                heads=int(settings["heads"]),
                activation=str(settings["activation"]),
                norm_first=bool(settings["norm_first"]),
                length=length,
            )
        model.load_state_dict(state)
    except (KeyError, TypeError, ValueError, IndexError, RuntimeError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise BadCheckpoint(f"the model cannot be built from its run.json: {reason}") from error
    model.config = SimpleNamespace(max_position_embeddings=length, is_encoder_decoder=False)
    return model.eval()


class CorpusTokenizer:
    """The tokeniser of the corpus that a language model was trained on.

    Arguments:
        folder: the checkpoint.
    """

    def __init__(self, folder: Path) -> None:
        self._settings = _settings(folder) or {}

    @property
    def digest(self) -> str:
        """The settings that the tokeniser is made from."""
        keys = ("data", "tokeniser", "vocabulary")
        return json.dumps({key: self._settings.get(key) for key in keys})

    @cached_property
    def _corpus(self) -> Corpus:
        return corpus(
            self._settings["data"],
            tokeniser=self._settings["tokeniser"],
            vocabulary=self._settings["vocabulary"],
        )

    def load(self) -> WordTokenizer:
        """Return the tokeniser; the corpus is encoded again if it is not in the cache."""
        return WordTokenizer(self._corpus.tokeniser)


class WordTokenizer:
    """A tokeniser of joma, called as those of transformers are."""

    def __init__(self, tokeniser: Any) -> None:
        self._tokeniser = tokeniser
        # Word 0 stands for all words that are not in the vocabulary; byte pairs know every text.
        self.unk_token_id = 0 if tokeniser.kind == "words" else None

    def __call__(self, text: str, **options: Any) -> dict[str, list[int]]:
        return {"input_ids": self._tokeniser.encode(text).tolist()}

    def decode(self, ids: list[int]) -> str:
        """Return the text of token ids."""
        return str(self._tokeniser.decode(ids))
