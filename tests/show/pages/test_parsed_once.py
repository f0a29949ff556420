"""A report parses the measurements of each run once."""

from __future__ import annotations

from collections import Counter

from joma._runs import Run
from joma._runs.metric_lines import read_lines
from joma._show.pages.runs import report

from .pages import watch_run


def test_a_report_parses_each_run_once(tmp_path, monkeypatch):
    runs = [watch_run(tmp_path / "a", "first"), watch_run(tmp_path / "b", "second", 0.5)]
    parses = Counter()

    def counted_lines(metrics, gauge=None):
        parses[metrics.resolve()] += 1
        return read_lines(metrics, gauge)

    monkeypatch.setattr("joma._runs.reader.read_lines", counted_lines)
    for run in runs:
        Run(run).frame()
    assert set(parses.values()) == {1}  # the counter counts
    parses.clear()
    report(runs, tmp_path / "report.html")
    assert parses == {(run / "metrics.jsonl").resolve(): 1 for run in runs}
