"""The page: one self-contained HTML file from what runs, exhibits and claims wrote."""

from __future__ import annotations

from typing import Any

__all__ = ["write_report"]


def __getattr__(name: str) -> Any:
    if name == "write_report":  # later than `joma --help`
        from joma._report.page import write_report

        return write_report
    raise AttributeError(name)
