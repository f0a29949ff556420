"""Messages to the user about a watch, each of them given once."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Any

from joma._runs.warning import warn as give_warning


class Notices:
    """Says each thing once, by its key, until it is forgotten.

    Attributes:
        problems: what could not be measured so far, in sentences.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self.problems: list[str] = []
        self._say = say
        self._said: set[Hashable] = set()

    def once(self, key: Hashable, message: str) -> None:
        """Say it, unless something was said under this key."""
        if key not in self._said:
            self._said.add(key)
            self._say(message)

    def problem(self, key: Hashable, message: str) -> None:
        """Report once that something could not be measured; it stays readable in `problems`."""
        if message not in self.problems:
            self.problems.append(message)
        self.once(key, message)

    def say(self, message: str) -> None:
        """Give the message, whatever was given before. A checkpoint does not remember it."""
        self._say(message)

    def forget(self, key: Hashable) -> None:
        """Forget that something was said under this key, so that it is said again."""
        self._said.discard(key)

    def state(self) -> list[Hashable]:
        """Return the keys under which something was said."""
        return list(self._said)

    def restore(self, state: Iterable[Any]) -> None:
        """Continue from a `state`, which may have been written as JSON: tuples are lists there."""
        self._said = {tuple(key) if isinstance(key, list) else key for key in state}


def warn(message: str) -> None:
    """Give the message as a warning of Python."""
    give_warning(f"joma.watch: {message}")


def silent(message: str) -> None:
    """Drop the message: another process gives it."""
