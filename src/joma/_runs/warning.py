"""Warnings of joma: one category, and the place in the user's own code that they are about."""

from __future__ import annotations

import sys
import warnings
from types import FrameType

# Frames of these packages are between the user's code and joma: a model that is called by PyTorch, a callback that
# is called by a trainer, a context manager that is closed by `with`.
_BETWEEN = frozenset({
    "joma", "torch", "accelerate", "contextlib", "deepspeed", "lightning", "lightning_fabric", "peft",
    "pytorch_lightning", "transformers", "trl",
})  # fmt: skip


class JomaWarning(UserWarning):
    """Category of every warning that joma gives.

    Silence them by ``warnings.filterwarnings("ignore", category=joma.JomaWarning)``.
    """


def warn(message: str) -> None:
    """Give a `JomaWarning` that points to the call in the user's own code."""
    warnings.warn(message, JomaWarning, stacklevel=_level_of_user())


def _level_of_user() -> int:
    """Return the ``stacklevel``, for `warn`, of the innermost frame that is neither joma's nor a library's.

    Without such a frame, as at the end of the interpreter, the level is beyond the outermost frame: then Python names
    no line at all.
    """
    level = 1  # `warn`
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and str(frame.f_globals.get("__name__")).partition(".")[0] in _BETWEEN:
        frame = frame.f_back
        level += 1
    return level
