"""A fixed sample of tokens, and the gauges that need the model to run on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from joma._checkpoints.language_model import is_language_model, load_language_model
from joma._checkpoints.model import load_model
from joma._checkpoints.options import CheckpointOptions
from joma._checkpoints.reading import BadCheckpoint
from joma._checkpoints.tensors import Tensors
from joma._data.corpora import texts
from joma._data.pretrained import check_tokens, first_tokens, has_tokenizer, load_tokenizer, quiet
from joma._measure.gauges.registry import get
from joma._measure.watch.inputs import check_model
from joma._measure.watch.measurement import Measurement
from joma._measure.watch.meters import AttentionMeter, MeterResult
from joma._measure.watch.passes import StepPasses
from joma._measure.watch.processes import Processes
from joma._measure.watch.watched import WatchedModel
from joma._runs.encoding import as_lists
from joma._runs.files import file_hash
from joma._runs.long_table import LongTable

# Tokens per window, if the model has as many positions.
DEFAULT_LENGTH = 512
# Tokens per forward pass. It is fixed because hidden-state gauges are means over passes.
TOKENS_PER_PASS = 4096
# A model without a limit on positions, such as one with relative positions only.
_NO_LIMIT = 1 << 30
# A tokenizer that does not know more than this share of a text belongs to another kind of text.
# Words outside of a word-level vocabulary are a few per cent in its own language.
_MOST_UNKNOWN = 0.5


class EmbeddedTokenizer(Protocol):
    """A tokenizer that is not a folder of files: inside a GGUF file, or that of a corpus.

    Attributes:
        digest: changes with what it is made from.
    """

    @property
    def digest(self) -> str: ...

    def load(self) -> Any:
        """Return the tokenizer."""


# A folder, an id on the hub, or a tokenizer that comes with the weights.
TokenizerPlace = str | Path | EmbeddedTokenizer


@dataclass(frozen=True)
class SampleResult:
    """Gauges on a sample.

    Attributes:
        values: gauge -> (layers, heads) or (layers,).
        layers: names of the layers.
        heads: gauge -> heads per layer.
        notes: remarks about them.
        has_not_finite: True if some of the values are not finite.
        problems: gauge -> why it could not be measured.
    """

    values: dict[str, Any]
    layers: list[str]
    heads: dict[str, list[int]]
    notes: list[str]
    has_not_finite: bool
    problems: dict[str, str]


def measure_on_sample(
    tensors: Tensors,
    places: Sequence[TokenizerPlace],
    gauges: Sequence[str],
    options: CheckpointOptions,
    folder: Path | None = None,
) -> SampleResult:
    """Measure attention and hidden-state gauges of a checkpoint.

    Arguments:
        tensors: its weights.
        places: where a tokenizer may be; the first place that has one counts.
        gauges: names.
        options: the sample.
        folder: of a local checkpoint, which tells whether `joma train` wrote it.
    """
    if options.reads_text:
        _first_with_tokenizer(places)  # refuses a missing one before anything is loaded
    if folder is not None and is_language_model(folder):
        model = load_language_model(folder, tensors)
        return _measure_model(model, places, gauges, options)
    with quiet():
        return _measure_model(load_model(tensors), places, gauges, options)


def _measure_model(
    model: Any,
    places: Sequence[TokenizerPlace],
    gauges: Sequence[str],
    options: CheckpointOptions,
) -> SampleResult:
    windows = sample(places, options, _window_length(model, options.length))
    check_tokens(model, windows)
    check_model(model)
    watched = WatchedModel(model, get(gauges), Processes(model))
    meter = AttentionMeter(watched)
    passes = StepPasses(watched, meter.observers)
    meter.attach(passes)
    with passes.source.listening(), torch.no_grad():
        for batch in windows.split(max(1, TOKENS_PER_PASS // windows.shape[1])):
            if model.config.is_encoder_decoder:
                model(input_ids=batch, decoder_input_ids=batch)
            else:
                model(input_ids=batch)
    result = MeterResult()
    meter.measure_passes(result)
    values = result.tables
    notes = [problem.message for problem in result.problems]
    problems = {name: _reason(name, notes) for name in gauges if name not in values}
    notes = [note for note in notes if not any(note in problem for problem in problems.values())]
    layers = watched.layers.names
    table_of_sample = LongTable.join(values.values())
    measurement = Measurement(0, table_of_sample, dict.fromkeys(values, layers), None)
    not_finite = list(measurement.not_finite())
    for bad in not_finite:
        notes.append(f"{bad.gauge} of layer {bad.layer} ({bad.module}) is not finite")
    lists = as_lists(table_of_sample)
    heads = {}
    for section in table_of_sample.sections:
        if len(section.shape) == 2:  # (layers, heads)
            heads[section.gauge] = meter.tally.widths(watched.layers.layers)
    return SampleResult(lists, layers, heads, notes, bool(not_finite), problems)


def _reason(gauge: str, notes: list[str]) -> str:
    """Return why a gauge has no values: the notes that name it, or else all notes."""
    naming = [note for note in notes if repr(gauge) in note]
    reasons = "; ".join(naming or notes) or "no pass of the model had anything to measure"
    return f"could not be measured: {reasons}"


def _window_length(model: Any, length: int | None) -> int:
    positions = _position_count(model)
    if length is None:
        return min(DEFAULT_LENGTH, positions)
    if length > positions:
        raise BadCheckpoint(
            f"length {length} is more than the {positions} positions that the model has"
        )
    return length


def _position_count(model: Any) -> int:
    config = model.config
    if hasattr(config, "get_text_config"):
        config = config.get_text_config()
    positions = getattr(config, "max_position_embeddings", None)
    if isinstance(positions, int) and positions > 0:
        return positions
    return _NO_LIMIT


# The sample of the last checkpoint: the checkpoints of a series share it.
_samples: dict[tuple[Any, ...], Tensor] = {}


def sample(places: Sequence[TokenizerPlace], options: CheckpointOptions, length: int) -> Tensor:
    """Return windows of token ids (B, length), the same for every checkpoint.

    A corpus gives the beginning of its validation text.
    """
    tokens = options.tokens or 0
    if tokens < 1 or length < 2:
        raise ValueError(
            f"{tokens} tokens in windows of {length}: at least one window of two tokens is needed"
        )
    wanted = max(1, tokens // length) * length
    if options.token_ids is not None:
        ids = torch.from_numpy(options.token_ids).reshape(-1)  # (n,)
        if len(ids) < length:
            raise ValueError(f"data has {len(ids)} token ids: a window of {length} is needed")
        return ids[: min(wanted, len(ids) // length * length)].reshape(-1, length)
    states = [_state(place) for place in places]
    key = (str(options.data), wanted, length, *states)
    if key not in _samples:
        windows = _encode(_first_with_tokenizer(places), options.data, wanted, length)
        _samples.clear()
        _samples[key] = windows
    return _samples[key]


def _encode(place: TokenizerPlace, data: Any, wanted: int, length: int) -> Tensor:
    """Return the first tokens of a corpus as windows (B, length)."""
    _, train, valid = texts(data)
    if isinstance(place, (str, Path)):
        tokenizer = load_tokenizer(place)
    else:
        tokenizer = place.load()
    ids = torch.tensor(first_tokens(tokenizer, chain(valid.blocks(), train.blocks()), wanted))
    if len(ids) < length:
        raise BadCheckpoint(f"{data} has {len(ids)} tokens only: a window of {length} is asked for")
    _check_vocabulary(tokenizer, ids, data)
    return ids[: len(ids) // length * length].reshape(-1, length)


def _check_vocabulary(tokenizer: Any, ids: Tensor, data: Any) -> None:
    """Refuse a tokenizer that hardly knows a word of the text."""
    unknown = getattr(tokenizer, "unk_token_id", None)
    if unknown is None:
        return
    share = float((ids == unknown).double().mean())
    if share > _MOST_UNKNOWN:
        raise BadCheckpoint(
            f"the tokenizer does not know {share:.0%} of the words in {data}: give text of the kind "
            "that the model was trained on (--data FILE), or token ids (--data IDS.npy)"
        )


def _first_with_tokenizer(places: Sequence[TokenizerPlace]) -> TokenizerPlace:
    """Return the first place that has a tokenizer; a name that is no folder is an id on the hub."""
    for place in places:
        if not isinstance(place, (str, Path)):
            return place
        folder = Path(place)
        if not folder.is_dir() or has_tokenizer(folder):
            return place
    raise BadCheckpoint(
        "no tokenizer with the weights: attention gauges need one (tokenizer.json), in its folder or "
        "the one above it, or named by --tokenizer FOLDER or ID (tokenizer= in Python), or token ids "
        "(--data IDS.npy); weight gauges do not"
    )


def _state(place: TokenizerPlace) -> tuple[Any, ...]:
    """Return what changes with the tokenizer: the hashes of its files."""
    from joma._checkpoints.hub import TOKENIZER

    if not isinstance(place, (str, Path)):
        return (place.digest,)
    folder = Path(place)
    if not folder.is_dir():
        return (str(place),)
    hashes = []
    for name in TOKENIZER:
        if (folder / name).is_file():
            hashes.append(file_hash(folder / name))
    return tuple(hashes)
