"""Attention on the page: the cells are what the run recorded, and the words are text."""

import json

import numpy as np
import pandas as pd

from joma._runs.patterns import Pattern, Patterns, as_bytes, write_patterns
from joma._show.pages.runs import report
from joma._show.plots import specification
from joma._show.plots.patterns import MOST_CELLS, draw, shown_layers

from .pages import HOSTILE, watch_run


def causal(T, sharpness, layers):
    """Per layer a causal pattern, sharper with depth."""
    scores = sharpness * np.random.default_rng(0).normal(size=(layers, T, T))
    weights = np.exp(np.where(np.tril(np.ones((T, T))), scores, -np.inf))
    return [as_bytes(w) for w in weights / weights.sum(-1, keepdims=True)]


def some(T=5, layers=2, words=None):
    kept = [
        Pattern(step, entropy, causal(T, s, layers))
        for step, entropy, s in ((1, 1.4, 0), (8, 0.2, 3), (90, 1, 1))
    ]
    return Patterns({n: f"h.{n}" for n in range(layers)}, words, kept)


def test_cells_are_what_was_recorded_and_unseen_keys_have_none():
    patterns = some(words=["the", "'cat'", 'said "no"', "é", "\\"])
    spec = json.loads(specification(draw(patterns)))
    panels = [panel for line in spec["vconcat"] for panel in line["hconcat"]]
    titles = [
        f"layer {n}, {name}"
        for n in (0, 1)
        for name in ("start (step 1)", "sparsest (step 8)", "end (step 90)")
    ]
    assert [panel["title"] for panel in panels] == titles
    for number, panel in enumerate(panels):
        rows = pd.DataFrame(spec["datasets"][panel["data"]["name"]])
        assert len(rows) == 15  # of 25: the others are later than the query
        shares = patterns.kept[number % 3].shares(number // 3)
        np.testing.assert_allclose(rows.weight, shares[rows["query"], rows["key"]], atol=1e-4)
        assert rows["from"].tolist() == [patterns.words[n] for n in rows["query"]]


def test_of_a_deep_model_as_many_layers_are_drawn_as_a_page_bears():
    patterns = some(T=64, layers=12)
    assert shown_layers(patterns)[0] == 0
    assert shown_layers(patterns)[-1] == 11
    cells = sum(map(len, json.loads(specification(draw(patterns)))["datasets"].values()))
    assert cells <= MOST_CELLS


def test_the_page_of_a_run_shows_its_patterns_and_words_are_text(tmp_path):
    path = watch_run(tmp_path / "run", "run")
    assert "Who attends to whom" not in report([path], tmp_path / "page.html").read_text()
    write_patterns(path, some(words=[HOSTILE, "a", "b", "c", "d"]))
    text = report([path], tmp_path / "page.html").read_text()
    assert "Who attends to whom" in text
    # curves, heads over steps, patterns
    assert text.count('class="chart"') == 3
    assert HOSTILE not in text
