"""The position in the data: parallel streams, and the window of each step.

The layout of PyTorch's `word_language_model` example, which the paper's loop follows: the tokens are cut into
`batch` streams of equal length, and a step takes the next `length` tokens of each. Nothing is shuffled, so
the window is a function of the step number alone.

>>> inputs, targets = window(streams(np.arange(11), batch=2), step=1, length=2)
>>> inputs.tolist(), targets.tolist()
([[2, 3], [7, 8]], [[3, 4], [8, 9]])
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def streams(tokens: NDArray[np.integer[Any]], batch: int) -> NDArray[np.integer[Any]]:
    """Cut tokens into parallel streams, one per column; what does not fill a row is left out.

    Arguments:
        tokens: (n,), memory-mapped or not; nothing is copied.
        batch: the number of streams.

    Returns:
        (n // batch, batch), a view.
    """
    if batch < 1:
        raise ValueError(f"batch is {batch}: at least one stream is needed")
    rows = len(tokens) // batch
    if rows < 2:
        raise ValueError(
            f"{len(tokens)} tokens in {batch} streams leave {rows} per stream, and 2 are the least (a token and "
            f"the one that follows it): take more text, or at most {len(tokens) // 2} streams"
        )
    return tokens[: rows * batch].reshape(batch, rows).T


def epoch(streams: NDArray[np.integer[Any]], length: int, *, short: bool = False) -> int:
    """Return the number of windows of `length` tokens in streams (rows, batch): (rows - 1) // length whole ones.

    Arguments:
        streams: (rows, batch), from `streams`.
        length: tokens per window.
        short: what is left over at the end, if anything is, counts as one more window.
    """
    rows, batch = streams.shape
    if length < 1:
        raise ValueError(f"length is {length}: a window has at least one token")
    if rows - 1 < length:
        raise ValueError(
            f"the corpus is shorter than a window: {batch} streams of {rows} tokens each, and windows of "
            f"{length} need {length + 1}. Take more text (at least {batch * (length + 1)} tokens), fewer "
            "streams or shorter windows"
        )
    if short:
        return (rows - 2 + length) // length  # rounded up
    return (rows - 1) // length


def window(
    streams: NDArray[np.integer[Any]], step: int, length: int, *, short: bool = False
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return what step number `step` trains on, counted from 0; after the last window comes the first.

    Arguments:
        streams: (rows, batch), from `streams`.
        step: the step's number.
        length: tokens per window.
        short: what is left over at the end of the streams is a window, too.

    Returns:
        Inputs and targets, (batch, length) each, or fewer tokens in a short window; a target is the token that
        follows.
    """
    if step < 0:
        raise ValueError(f"step is {step}: steps count from 0")
    start = step % epoch(streams, length, short=short) * length
    taken = np.array(streams[start : start + length + 1].T, dtype=np.int64, order="C", subok=False)
    return np.ascontiguousarray(taken[:, :-1]), np.ascontiguousarray(taken[:, 1:])
