"""Exhibits: the paper's figures and tables, each with the same three verbs: run, draw, judge."""

from joma.paper.exhibits.base import (
    PRESETS,
    Exhibit,
    ExhibitOutcome,
    Experiment,
    Judgement,
    reproduce,
)
from joma.paper.exhibits.index import ORDER, exhibit, exhibits, get

__all__ = [
    "ORDER",
    "PRESETS",
    "Exhibit",
    "ExhibitOutcome",
    "Experiment",
    "Judgement",
    "exhibit",
    "exhibits",
    "get",
    "reproduce",
]  # fmt: skip
