"""Exhibits: the paper's figures and tables, each with the same three verbs: run, draw, judge."""

from joma.paper.exhibits.base import PRESETS, Exhibit, Experiment
from joma.paper.exhibits.index import ORDER, exhibit, exhibits, get
from joma.paper.exhibits.judgement import Judgement
from joma.paper.exhibits.making import ExhibitOutcome, make_exhibit

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
    "make_exhibit",
]  # fmt: skip
