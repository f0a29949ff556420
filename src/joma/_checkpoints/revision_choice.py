"""The text that chooses checkpoints of a series, as in ``--revisions log:20``.

| text | meaning |
|---|---|
| `step0,step1000` | these, in this order |
| `1000..5000`, `1000..5000:500` | steps from … to …, all that exist, or every 500 |
| `pythia` | step0, 1, 2, 4, …, 512, 1000, then every 1,000 to 143,000: 154 in all |
| `all` | all that the hub or the folder lists |
| `log`, `log:20` | that many (20), evenly on a log scale, with the first and the last |
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence

LOG_COUNT = 20
# Names with the steps that they stand for, in the order of steps.
Listing = list[tuple[str, int]]
_RANGE = re.compile(r"(?:step[-_]?)?(\d+)\.\.(?:step[-_]?)?(\d+)(?::(\d+))?")
_NAME = re.compile(r"[\w./+-]+")


def choose_revisions(
    revisions: str | Sequence[str], list_all: Callable[[], Listing], *, can_invent: bool
) -> list[str]:
    """Return the names of the revisions that the text asks for.

    Arguments:
        revisions: the text, or a list of names.
        list_all: called only if the text cannot be understood without the list, which on the hub
            takes a request.
        can_invent: True if a range with a stride may be answered with "step1000", "step1500", …
            instead of the list: that is how branches on the hub are called.
    """
    if not isinstance(revisions, str):
        return check_names(list(revisions))
    text = revisions.strip()
    if text == "pythia":
        return [f"step{step}" for step in pythia_steps()]
    if text == "all":
        return [name for name, _ in list_all()]
    if text == "log" or text.startswith("log:"):
        return log_spaced(list_all(), _log_count(text))
    match = _RANGE.fullmatch(text)
    if match is not None:
        return _in_range(match, list_all, can_invent)
    return check_names([name.strip() for name in text.split(",")])


def _in_range(match: re.Match[str], list_all: Callable[[], Listing], can_invent: bool) -> list[str]:
    text = match[0]
    first = int(match[1])
    last = int(match[2])
    stride = int(match[3] or 1)
    if first > last or stride == 0:
        raise ValueError(f"the range {text!r} is empty: give FIRST..LAST or FIRST..LAST:STRIDE")
    if match[3] and can_invent:
        return [f"step{step}" for step in range(first, last + 1, stride)]
    listing = list_all()
    names = []
    for name, step in listing:
        if first <= step <= last and (step - first) % stride == 0:
            names.append(name)
    if not names:
        existing = list_some([name for name, _ in listing])
        raise ValueError(f"no checkpoint has a step in {text}: there are {existing}")
    return names


def check_names(names: list[str]) -> list[str]:
    """Return the names, each once; refuse those that cannot be a revision or a folder below."""
    for name in names:
        is_outside = ".." in name or name.startswith("/")
        if is_outside or not _NAME.fullmatch(name):
            raise ValueError(
                f"{name!r} is no revision: give names as step1000,step2000, a range 0..1000 or "
                "0..1000:100, or one of pythia, all, log, log:20"
            )
    return list(dict.fromkeys(names))


def pythia_steps() -> list[int]:
    """Return the 154 steps at which Pythia's checkpoints were saved."""
    powers = [2**n for n in range(10)]
    return [0, *powers, *range(1000, 143_001, 1000)]


def _log_count(text: str) -> int:
    number = text.partition(":")[2] or str(LOG_COUNT)
    if not number.isdigit() or int(number) < 1:
        raise ValueError(f"{text!r}: how many? Give log:20 or the like")
    return int(number)


def log_spaced(listing: Listing, count: int) -> list[str]:
    """Return about `count` of the names, evenly over log(step), with the first and the last."""
    if len(listing) <= count:
        return [name for name, _ in listing]
    if count == 1:
        return [listing[-1][0]]
    places = [math.log1p(step) for _, step in listing]
    width = (places[-1] - places[0]) / (count - 1)
    picked = set()
    for number in range(count):
        target = places[0] + width * number
        picked.add(min(range(len(places)), key=lambda n: abs(places[n] - target)))
    while len(picked) < count:  # several targets had the same nearest one: fill the widest gaps
        rest = [n for n in range(len(places)) if n not in picked]
        picked.add(max(rest, key=lambda n: min(abs(places[n] - places[m]) for m in picked)))
    return [listing[n][0] for n in sorted(picked)]


def list_some(names: Sequence[str], most: int = 6) -> str:
    """Return the first names, and how many there are if that is more."""
    text = ", ".join(names[:most])
    if len(names) > most:
        text += f", … ({len(names)} in all)"
    return text
