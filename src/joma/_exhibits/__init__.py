"""Exhibits: the paper's figures and tables, each with the same three verbs: run, draw, judge."""

from joma._exhibits.base import EXHIBITS, PRESETS, Exhibit, Outcome, Verdict, get, reproduce

__all__ = ["EXHIBITS", "PRESETS", "Exhibit", "Outcome", "Verdict", "get", "reproduce"]
