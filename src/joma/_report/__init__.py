"""The page: one self-contained HTML file from what exhibits and claims wrote."""

from joma._report.page import write_report

__all__ = ["write_report"]
