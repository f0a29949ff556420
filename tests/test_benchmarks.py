"""What benchmarks time is what they say that they time."""

from benchmarks.__main__ import markdown
from benchmarks._machine import Load, describe
from benchmarks._timing import row
from benchmarks.nanogpt import SHAKESPEARE, Shape, Training
from benchmarks.watch import all_gauges, time_steps

import joma

TINY = Shape(layers=2, heads=2, width=16, samples=1, length=8)


def test_measured_blocks_measure_every_step_and_the_others_none(tmp_path):
    times = time_steps(TINY, None, rounds=2, steps=3, folder=tmp_path / "run")
    table = joma.Run(tmp_path / "run").frame()
    # Two rounds and the one that warms up; each has a block of three measured steps, and one of
    # three that are not.
    steps = sorted(table[table.gauge == "entropy"].step.unique())
    assert steps == [1, 2, 3, 7, 8, 9, 13, 14, 15]
    assert [len(times.plain), len(times.measured), len(times.unmeasured)] == [2, 2, 2]
    assert times.ratio > 1


def test_all_gauges_are_measured(tmp_path):
    time_steps(TINY, all_gauges(), rounds=1, steps=2, folder=tmp_path / "run")
    measured = set(joma.Run(tmp_path / "run").frame().gauge)
    assert set(all_gauges()) <= measured
    assert len(all_gauges()) > 35


def test_the_large_model_has_the_size_of_nanogpt():
    assert 10.5e6 < Training(SHAKESPEARE).parameters < 11e6


def test_the_page_shows_every_row_below_the_state_of_the_machine():
    load = Load()
    rows = [row("a step", "`joma.watch`", "the plain step", 0.2, 0.1, "exact")]
    page = markdown({"watch": {"machine": describe(load), "rows": rows}})
    assert "| a step | `joma.watch` | the plain step | 0.2 s | 0.1 s | **0.5 ×** | exact |" in page
    assert page.index("## watch") < page.index("Python 3") < page.index("| a step")
