"""A griffe extension: the fields of a dataclass become the "Attributes" of its docstring, with the comments behind them.

``value: Array  # (T, M)`` is listed as *value*, described by "(T, M)".
"""

from __future__ import annotations

import re
from typing import Any

import griffe


class FieldComments(griffe.Extension):
    """List the public fields of dataclasses whose docstrings do not do so themselves."""

    def on_class(self, *, cls: griffe.Class, **_: Any) -> None:
        """Called when a class is complete."""
        has_list = cls.docstring is None or re.search(
            r"^(Attributes|Arguments):", cls.docstring.value, flags=re.M
        )
        if has_list or "dataclass" not in str(cls.decorators[0].value if cls.decorators else ""):
            return
        lines = cls.lines_collection[cls.filepath]
        fields = []
        for name, attribute in cls.members.items():
            if name.startswith("_") or not attribute.is_attribute or "property" in attribute.labels:
                continue
            comment = re.search(r"  # (?!noqa|type:|fmt:)(.+)$", lines[(attribute.lineno or 1) - 1])
            if comment:
                fields.append(f"    {name}: {comment[1]}")
        if fields and cls.docstring is not None:
            cls.docstring.value += "\n\nAttributes:\n" + "\n".join(fields)
