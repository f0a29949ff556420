"""Formats of checkpoints behind one protocol: names, view, read_many."""

from __future__ import annotations

from joma._checkpoints.formats.gguf import GgufFile
from joma._checkpoints.formats.pickles import open_pickle
from joma._checkpoints.formats.safetensors import SafetensorsFile
from joma._checkpoints.formats.view import TensorFormat
from joma._checkpoints.reading import Reader


def open_file(reader: Reader) -> TensorFormat:
    """Open a file of weights by its suffix, and by its first bytes."""
    if reader.suffix == ".gguf":
        return GgufFile(reader)
    if reader.suffix == ".safetensors":
        return SafetensorsFile(reader)
    return open_pickle(reader)
