"""The front page of the documentation, from the README: what joma is, its example, what it does and what was found."""

from __future__ import annotations

import re

from marks import between

SECTIONS = ("What it does", "What was found")
_COMMENT = re.compile(r"^<!--.*?-->\n", flags=re.M)
_LINK = re.compile(r"\]\(docs/")


def section(readme: str, title: str) -> str:
    """Return a section of the README with its heading."""
    match = re.search(rf"^## {title}\n.*?(?=^## |\Z)", readme, flags=re.M | re.S)
    if match is None:
        raise ValueError(f"the README has no section {title!r}")
    return match[0]


def first_screen(readme: str) -> str:
    """Return what stands between the title of the README and the commands before its first section."""
    screen = readme.removeprefix("# joma\n").partition("\n## ")[0]
    return screen.partition("\n```console\n")[0]


def copied(readme: str) -> str:
    """Return the parts of the README that the front page shows, with links as pages have them."""
    parts = [first_screen(readme), *(section(readme, title) for title in SECTIONS)]
    text = "\n\n".join(part.strip() for part in parts)
    return _LINK.sub("](", _COMMENT.sub("", text))


def filled(page: str, readme: str) -> str:
    """Return the front page as the README has it."""
    return between(page, "readme", copied(readme))
