"""Messages to the user about a watch: each one is given once."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Any

from joma._runs.warning import warn as give_warning


class Notices:
    """Gives each message once, by its key, until the key is forgotten.

    Arguments:
        give: takes a message: `warn`, or `silent` in a process that does not report.

    Attributes:
        problems: sentences on what could not be measured so far.
    """

    def __init__(self, give: Callable[[str], None]) -> None:
        self.problems: list[str] = []
        self._give = give
        self._used_keys: set[Hashable] = set()

    def once(self, key: Hashable, message: str) -> None:
        """Give the message, unless one was given under this key."""
        if key not in self._used_keys:
            self._used_keys.add(key)
            self._give(message)

    def problem(self, key: Hashable, message: str) -> None:
        """Report once that something could not be measured; it stays readable in `problems`."""
        if message not in self.problems:
            self.problems.append(message)
        self.once(key, message)

    def say(self, message: str) -> None:
        """Give the message, whatever was given before. A checkpoint does not remember it."""
        self._give(message)

    def forget(self, key: Hashable) -> None:
        """Forget a key, so that its message is given again."""
        self._used_keys.discard(key)

    def state(self) -> list[Hashable]:
        """Return the keys under which a message was given."""
        return list(self._used_keys)

    def restore(self, state: Iterable[Any]) -> None:
        """Continue from a `state`, which may have been written as JSON."""
        self._used_keys = set()
        for key in state:
            if isinstance(key, list):  # a tuple, in JSON
                key = tuple(key)
            self._used_keys.add(key)


def warn(message: str) -> None:
    """Give the message as a `JomaWarning`."""
    give_warning(f"joma.watch: {message}")


def silent(message: str) -> None:
    """Drop the message: another process gives it."""
