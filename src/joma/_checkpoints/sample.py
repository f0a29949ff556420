"""A fixed sample of tokens, and the gauges that need the model to run on it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from joma._checkpoints.gguf_model import OwnTokenizer
from joma._checkpoints.model import load_model
from joma._checkpoints.reading import BadCheckpoint
from joma._checkpoints.tensors import Tensors
from joma._data.corpora import texts
from joma._data.pretrained import check_tokens, first_tokens, has_tokenizer, load_tokenizer, quiet
from joma._measure.gauges.registry import get
from joma._measure.watch.alarms.notices import Notices
from joma._measure.watch.inputs import check_model
from joma._measure.watch.measurement import Measurement
from joma._measure.watch.passes import Passes
from joma._measure.watch.processes import Processes
from joma._runs.folder import file_hash
from joma.models.blocks import Blocks

Place = (
    str | Path | OwnTokenizer
)  # where a tokenizer may be: a folder, an id of the hub, inside the file of weights
LENGTH = 512
PASS = 4096  # tokens per forward pass: fixed, since hidden-state gauges are means over passes


@dataclass(frozen=True)
class Measured:
    """Values by gauge, (layers, heads) or (layers,); names of the layers; notes about them.

    ``problems``: gauge -> why it could not be measured.
    """

    values: dict[str, Any]
    layers: list[str]
    heads: dict[str, list[int]]  # gauge -> how many heads each layer has
    notes: list[str]
    not_numbers: bool  # whether some of them are NaN
    problems: dict[str, str]


def measure_on_sample(
    tensors: Tensors,
    places: Sequence[Place],
    gauges: Sequence[str],
    data: Any,
    tokens: int,
    length: int | None,
) -> Measured:
    """Attention and hidden-state gauges of a checkpoint; the tokenizer is that of the first of ``places`` with one."""
    with quiet():
        if isinstance(data, (str, os.PathLike)):
            _with_tokenizer(places)  # refuses a missing one before anything is loaded
        model = load_model(tensors)
        positions = _positions(model)
        if length is not None and length > positions:
            raise BadCheckpoint(
                f"length {length} is more than the {positions} positions that the model has"
            )
        windows = sample(places, data, tokens, min(LENGTH, positions) if length is None else length)
        check_tokens(model, windows)
        check_model(model)
        notes: list[str] = []
        passes = Passes(
            model, Blocks(model), get(gauges), None, Processes(model), Notices(notes.append)
        )
        with passes.source.listening(), torch.no_grad():
            for batch in windows.split(max(1, PASS // windows.shape[1])):
                more = {"decoder_input_ids": batch} if model.config.is_encoder_decoder else {}
                model(input_ids=batch, **more)
        values = passes.measure()
    missing = [name for name in gauges if name not in values]
    problems = {name: _reason(name, notes) for name in missing}
    notes = [note for note in notes if not any(note in problem for problem in problems.values())]
    layers = passes.layers
    measurement = Measurement(0, values, dict.fromkeys(values, layers), None)
    not_finite = list(measurement.not_finite())
    notes += [
        f"{bad.gauge} of layer {bad.layer} ({bad.module}) is not finite" for bad in not_finite
    ]
    heads = {
        name: passes.tally.widths(passes.numbering.layers)
        for name, table in values.items()
        if table.numbers.dim() == 2
    }
    lists = {name: table.to_lists() for name, table in values.items()}
    return Measured(lists, layers, heads, notes, bool(not_finite), problems)


def _reason(gauge: str, notes: list[str]) -> str:
    """Return why a gauge has no values: the notes that name it, or else all there are."""
    own = [note for note in notes if repr(gauge) in note]
    reasons = "; ".join(own or notes) or "no pass of the model had anything to measure"
    return f"could not be measured: {reasons}"


def _positions(model: Any) -> int:
    """How many positions a model has."""
    text = (
        model.config.get_text_config() if hasattr(model.config, "get_text_config") else model.config
    )
    positions = getattr(text, "max_position_embeddings", None)
    return positions if isinstance(positions, int) and positions > 0 else 1 << 30


_samples: dict[tuple[Any, ...], Tensor] = {}


def sample(places: Sequence[Place], data: Any, tokens: int, length: int) -> Tensor:
    """Windows of token ids, (B, length), the same for every checkpoint: the start of the corpus' validation text.

    ``data`` is the name or path of a corpus, or the ids themselves.
    """
    if tokens < 1 or length < 2:
        raise ValueError(
            f"{tokens} tokens in windows of {length}: at least one window of two tokens is needed"
        )
    wanted = max(1, tokens // length) * length
    if not isinstance(data, (str, os.PathLike)):
        ids = torch.as_tensor(data).reshape(-1).long()
        if len(ids) < length:
            raise ValueError(f"data has {len(ids)} token ids: a window of {length} is needed")
        return ids[: min(wanted, len(ids) // length * length)].reshape(-1, length)
    key = (str(data), wanted, length, *map(_state, places))
    if key not in _samples:
        _, train, valid = texts(data)
        blocks = chain(valid.blocks(), train.blocks())
        place = _with_tokenizer(places)
        tokenizer = place.load() if isinstance(place, OwnTokenizer) else load_tokenizer(place)
        ids = torch.tensor(first_tokens(tokenizer, blocks, wanted))
        if len(ids) < length:
            raise BadCheckpoint(
                f"{data} has {len(ids)} tokens only: a window of {length} is asked for"
            )
        _samples.clear()
        _samples[key] = ids[: len(ids) // length * length].reshape(-1, length)
    return _samples[key]


def _with_tokenizer(places: Sequence[Place]) -> Place:
    """The first place that has a tokenizer; what is no folder is an id of the hub."""
    for place in places:
        if (
            isinstance(place, OwnTokenizer)
            or not Path(place).is_dir()
            or has_tokenizer(Path(place))
        ):
            return place
    raise BadCheckpoint(
        "no tokenizer with the weights: attention gauges need one (tokenizer.json), in its folder or the one above "
        "it, or named by --tokenizer FOLDER or ID (tokenizer= in Python); weight gauges do not"
    )


def _state(place: Place) -> tuple[Any, ...]:
    """What the tokenizer's files are, by content: checkpoints of a series share one sample."""
    from joma._checkpoints.hub import TOKENIZER

    if isinstance(place, OwnTokenizer):
        return (place.digest,)
    if not Path(place).is_dir():
        return (str(place),)
    files = [Path(place) / name for name in TOKENIZER if (Path(place) / name).is_file()]
    return tuple(map(file_hash, files))
