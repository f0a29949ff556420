"""Checks of what a writer is given: names of axes, extra columns, values of gauges."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from joma._runs.encoding import SPELT
from joma._runs.files import plain
from joma._runs.folder import RunError
from joma._runs.metric_lines import RESERVED

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

# NumPy's letters for booleans, integers, unsigned integers and floats.
_REAL_KINDS = "biuf"

# Every integer up to this one is a float64.
_LARGEST_INTEGER = 2**53


def checked_axes(gauge: str, names: Sequence[str]) -> list[str]:
    """Return the names of a gauge's axes; refuse names that a table cannot have."""
    is_ambiguous = len(set(names)) < len(names) or not set(names).isdisjoint(RESERVED)
    if isinstance(names, str) or is_ambiguous:
        raise RunError(
            f"the axes of gauge {gauge!r} are {names!r}: give a list of different names, "
            f"none of them {', '.join(RESERVED)}"
        )
    return list(names)


def checked_columns(
    columns: Mapping[str, object], axes: Mapping[str, Sequence[str]]
) -> dict[str, Any]:
    """Return extra columns; refuse those that cannot be read back or clash with another column."""
    taken = set(RESERVED)
    for names in axes.values():
        taken.update(names)
    clash = taken.intersection(columns)
    if clash:
        raise RunError(
            f"the extra columns {sorted(clash)} have names of other columns: rename them"
        )
    return {name: _checked_entry(name, value) for name, value in columns.items()}


def _checked_entry(name: str, value: object) -> Any:
    if isinstance(value, str) and value in SPELT:
        raise RunError(
            f"the extra column {name}={value!r} would be read as a number: use another word"
        )
    entry = plain(value, name)
    if isinstance(entry, (list, dict)):
        raise RunError(
            f"the extra column {name} is {entry!r}: give one number, string, boolean or None"
        )
    return entry


def checked_array(gauge: str, value: Any) -> tuple[NDArray[Any], NDArray[np.bool_] | None]:
    """Return a value as an array of real numbers, and which of them were measured.

    None stands for a number that was not measured. If there is none, the second result is None.
    """
    import numpy as np

    if not isinstance(value, np.ndarray) and hasattr(value, "tolist"):  # torch, on any device
        value = value.tolist()
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise RunError(f"gauge {gauge!r} is ragged: give an array, padded with None") from error
    measured = None
    if array.dtype.kind == "O" and array.ndim:
        measured = np.array([item is not None for item in array.flat]).reshape(array.shape)
        with suppress(TypeError, ValueError):
            array = np.asarray(np.where(measured, array, np.nan).tolist()).reshape(array.shape)
    if array.dtype.kind not in _REAL_KINDS:
        raise RunError(
            f"gauge {gauge!r} is {value!r}: give real numbers, with None where nothing was measured"
        )
    if array.dtype.kind in "iu" and array.size and np.abs(array).max() > _LARGEST_INTEGER:
        raise RunError(
            f"gauge {gauge!r} has an integer beyond 2**53, which a table of numbers cannot hold "
            "exactly: write it as a string in an extra column"
        )
    return array, measured
