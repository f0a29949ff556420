"""Tables that scripts write into pages, between two comments."""

from __future__ import annotations

import re


def between(text: str, name: str, table: str) -> str:
    """``text`` with the table between the marks of that name; a page without them is an error."""
    marked = f"<!-- {name} -->\n{table}\n<!-- /{name} -->"
    text, count = re.subn(rf"<!-- {name} -->.*<!-- /{name} -->", lambda _: marked, text, flags=re.S)
    if count != 1:
        raise ValueError(
            f"the page has {count} places <!-- {name} --> … <!-- /{name} -->; it needs one"
        )
    return text
