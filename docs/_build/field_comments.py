"""A griffe extension: the comment behind a field of a dataclass (``value: Array  # (T, M)``) is its description."""

from __future__ import annotations

import re
from typing import Any

import griffe


class FieldComments(griffe.Extension):
    """Give fields without a docstring the comment that stands behind them."""

    def on_attribute_instance(self, *, attr: griffe.Attribute, **_: Any) -> None:
        """Called for each attribute."""
        if attr.docstring is not None or attr.lineno is None or not (attr.parent and attr.parent.is_class):
            return
        line = attr.lines_collection[attr.filepath][attr.lineno - 1]
        if found := re.search(r"  # (?!noqa|type:|fmt:)(.+)$", line):
            attr.docstring = griffe.Docstring(found[1], lineno=attr.lineno, parent=attr)
