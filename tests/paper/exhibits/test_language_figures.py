"""Figures 6 and 8: what a curve did, and the exhibits at tiny settings."""

from __future__ import annotations

import itertools
import json
import shutil

import numpy as np
import pytest

from joma import Run
from joma._measure.watch.phases import PHASES
from joma._runs import RunInUse
from joma._runs.curve import ENTROPY, describe
from joma._runs.writer import RunWriter
from joma._train import language
from joma.paper.exhibits import fig6, fig8, get, make_exhibit
from joma.paper.exhibits._curves import best_loss, seeds_that_bounce, train_all
from joma.paper.exhibits._curves import curves as curves_of

STEPS = np.arange(0, 1000, 10)
AXES = {"entropy": ["layer"], "stable_rank": ["layer"], "phase": ["layer"]}


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("JOMA_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


def shape(*corners: float) -> np.ndarray:
    return np.interp(STEPS, np.linspace(0, STEPS[-1], len(corners)), corners)


@pytest.mark.parametrize(
    ("values", "pattern"),
    [
        (shape(2.53, 1.61, 1.87), "dip and bounce"),
        (shape(2.6, 1.6, 1.6), "dip"),
        (shape(2.6, 0.1), "dip"),
        (shape(2.6, 2.58, 2.6), "flat"),
        (shape(1.0, 2.5, 2.5), "flat"),
    ],
)
def test_what_a_curve_did(values, pattern):
    found = describe(
        STEPS, values + 0.005 * np.random.default_rng(0).standard_normal(len(values)), ENTROPY
    )
    assert found.pattern == pattern
    if pattern == "dip and bounce":
        assert found.depth == pytest.approx(0.92, abs=0.03)
        assert found.bounce == pytest.approx(0.26, abs=0.03)
        assert abs(found.trough_step - 500) <= 30


def made_up(path, settings, curves, losses):
    """A run with these curves: (layers, lr) -> one per layer; the same on every corpus."""
    corpora = settings["data"] if isinstance(settings["data"], list) else [settings["data"]]
    writer = RunWriter.create(path, kind="exhibit", config={"settings": settings}, axes=AXES)
    with writer:
        for data, ((layers, lr), lines) in itertools.product(corpora, curves.items()):
            for n, step in enumerate(STEPS):
                values = {
                    "entropy": [line[n] for line in lines],
                    "stable_rank": [30 * line[n] for line in lines],
                    "phase": [
                        PHASES.index("collapsed" if line[n] < 0.2 else "dense") for line in lines
                    ],
                    "valid_loss": losses[layers, lr],
                }
                writer.write(
                    int(step), values, data=data, layers=layers, lr=lr, seed=0, status="done"
                )
    return Run(path)


GOOD, LOW, DIP = shape(2.53, 1.61, 1.87), shape(2.5, 1.0, 1.2), shape(2.6, 0.1)


@pytest.mark.parametrize(
    ("bottom", "top", "single", "verdict"),
    [
        (LOW, GOOD, GOOD, "holds"),
        (GOOD, LOW, GOOD, "holds under a condition"),  # the bottom layer is not suppressed
        (
            GOOD - 0.05,
            GOOD,
            GOOD,
            "holds under a condition",
        ),  # below the top one, but by less than the margin
        (LOW, DIP, GOOD, "holds under a condition"),
        (LOW, DIP, DIP, "fails"),
    ],
)
def test_the_judge_of_figure_6(bottom, top, single, verdict, tmp_path):
    settings = {"vocabulary": None, "valid_windows": 0, "layers": [1, 2], "lr": 1e-3, "seeds": 4}
    curves = {(1, 1e-3): [single], (2, 1e-3): [bottom, top]}
    wiki = made_up(
        tmp_path / "run", settings | {"data": ["wikitext-2"]}, curves, dict.fromkeys(curves, 5.0)
    )
    assert fig6.judge(wiki).verdict == verdict
    toy = made_up(
        tmp_path / "toy", settings | {"data": ["pydoc"]}, curves, dict.fromkeys(curves, 5.0)
    )
    said = fig6.judge(toy)
    assert said.verdict == "inconclusive"
    assert "WikiText" in fig6.EXHIBIT.would_decide
    # the made-up stable rank is 30 times the entropy: it falls and rises where the entropy does, collapse or not
    assert (
        f"rises again in {sum(line is not DIP for line in (bottom, top, single))} of 3 layers"
        in said.summary
    )
    assert [c["pattern"] for c in said.numbers["corpora"]["pydoc"]["entropy"].values()].count(
        "collapse"
    ) == sum(line is DIP for line in (bottom, top, single))


@pytest.mark.parametrize(
    ("seeds", "rise", "verdict"),
    [
        (2, 0.26, "holds"),
        (2, 0.1, "inconclusive"),  # a bounce is 0.092 nats
        (2, 0.08, "inconclusive"),
        (2, 0.05, "fails"),
        (4, 0.1, "holds"),
        (4, 0.08, "fails"),
    ],
)
def test_figure_6_needs_four_seeds_for_small_margins(seeds, rise, verdict, tmp_path):
    settings = {"vocabulary": None, "valid_windows": 0, "layers": [1], "lr": 1e-3, "seeds": seeds}
    curves = {(1, 1e-3): [shape(2.53, 1.61, 1.61 + rise)]}
    settings["data"] = ["wikitext-2"]
    run = made_up(tmp_path / "run", settings, curves, dict.fromkeys(curves, 5.0))
    assert fig6.judge(run).verdict == verdict


def test_figure_6_at_the_papers_scale_has_the_papers_losses_of_both_corpora_beside_ours(tmp_path):
    settings = {**fig6.SETTINGS["paper"], "layers": [1, 2]}
    curves = {(1, 1e-4): [GOOD], (2, 1e-4): [LOW, GOOD]}
    run = made_up(tmp_path / "run", settings, curves, {(1, 1e-4): 5.5, (2, 1e-4): 5.25})
    said = fig6.judge(run)
    assert said.verdict == "holds"
    drawn = json.dumps(fig6.draw(run).to_dict())
    for data, losses in (
        ("wikitext-2", (5.357, 5.255)),
        ("wikitext-103", (5.047, 4.912)),
    ):  # Figure 6's captions
        assert said.numbers["corpora"][data]["the paper's"] == {
            "1 layer": losses[0],
            "2 layers": losses[1],
        }
        assert f"the paper's {losses[0]} (1 layer), {losses[1]} (2 layers)" in said.summary
        assert f"{data}, 1 layer: validation loss 5.500 (paper {losses[0]})" in drawn
        assert f"{data}, 2 layers: validation loss 5.250 (paper {losses[1]})" in drawn


def test_exhibits_have_one_thread_and_their_settings_say_so():
    assert {
        preset["threads"] for module in (fig6, fig8) for preset in module.SETTINGS.values()
    } == {1}


FLAT, SPARSE = shape(2.6, 2.59, 2.6), shape(2.6, 1.0)
RATES = (1e-4, 3e-4, 1e-3, 1e-2)


def grid(folder, losses, lines, *, data="wikitext-2", seeds=4):
    """Two depths at four rates: the same losses and top layers at both."""
    settings = {"data": data, "vocabulary": None, "layers": [1, 2], "lr": list(RATES)}
    curves = {}
    for lr, line in zip(RATES, lines, strict=True):
        curves[1, lr] = [line]
        curves[2, lr] = [line, line]
    by_cell = {(layers, lr): losses[RATES.index(lr)] - layers for layers, lr in curves}
    return made_up(folder, settings | {"seeds": seeds}, curves, by_cell)


@pytest.mark.parametrize(
    ("losses", "lines", "verdict"),
    [
        ((7.0, 6.0, 6.1, 7.1), (FLAT, GOOD, GOOD, DIP), "holds"),
        ((7.0, 6.0, 6.1, 7.1), (FLAT, GOOD, GOOD, SPARSE), "holds under a condition"),
        ((6.0, 7.0, 7.1, 6.1), (FLAT, GOOD, GOOD, DIP), "fails"),
        # the best run matches, and so does the worst: no association
        ((6.1, 6.0, 6.9, 6.2), (FLAT, GOOD, GOOD, DIP), "inconclusive"),
        # all runs match, or none
        ((7.0, 6.0, 6.1, 7.1), (GOOD, GOOD, GOOD, GOOD), "inconclusive"),
        ((7.0, 6.0, 6.1, 7.1), (FLAT, FLAT, FLAT, DIP), "inconclusive"),
    ],
)
def test_the_judge_of_figure_8(losses, lines, verdict, tmp_path):
    said = fig8.judge(grid(tmp_path / "run", losses, lines))
    assert said.verdict == verdict
    toy = grid(tmp_path / "toy", losses, lines, data="pydoc")
    assert fig8.judge(toy).verdict == "inconclusive"
    assert "WikiText" in fig8.EXHIBIT.would_decide


def test_figure_8_needs_four_seeds_for_small_differences(tmp_path):
    close = ((6.015, 6.0, 6.005, 6.018), (FLAT, GOOD, GOOD, DIP))
    assert fig8.judge(grid(tmp_path / "four", *close)).verdict == "holds"
    two = fig8.judge(grid(tmp_path / "two", *close, seeds=2))
    assert two.verdict == "inconclusive"  # all losses count as equal
    assert two.numbers["association"]["correlation"] == 0
    # It dips by 0.92 nats, so that a rise of 0.092 is a bounce.
    hardly = shape(2.53, 1.61, 1.71)
    run = grid(tmp_path / "rise", (7.0, 6.0, 6.1, 7.1), (FLAT, GOOD, hardly, DIP), seeds=2)
    said = fig8.judge(run)
    assert (said.numbers["judged"], said.numbers["all"]) == (6, 8)
    assert said.numbers["runs"]["1 layer, lr 0.001"]["open"]
    assert not said.numbers["runs"]["1 layer, lr 0.01"]["open"]


def test_the_rank_correlation_is_that_of_pairs_and_its_chance_is_counted():
    cells = [fig8.Cell(1, 0.1 * n, loss, n < 2, False) for n, loss in enumerate((1, 3, 2, 4, 5))]
    found = fig8.associate(cells, seeds=4)
    # Matches at losses 1 and 3, others at 2, 4, 5: five of six pairs for, one against.
    assert (found.correlation, found.pairs) == (pytest.approx(4 / 6), 6)
    # Of the ten ways to deal out two matches only {1, 2} and {1, 3} do as well.
    assert found.chance_of_more == pytest.approx(2 / 10)
    assert found.chance_of_less == pytest.approx(9 / 10)
    assert fig8.associate([], seeds=4).chance_of_more == 1


def test_figure_8_judges_every_depth(tmp_path):
    """One depth as the paper says, at the other nothing collapses."""
    settings = {"data": "wikitext-2", "vocabulary": None, "layers": [1, 2], "lr": [1e-3, 1e-2]}
    curves = {
        (1, 1e-3): [GOOD],
        (1, 1e-2): [DIP],
        (2, 1e-3): [LOW, GOOD],
        (2, 1e-2): [LOW, shape(2.5, 1.2)],
    }
    losses = {(1, 1e-3): 5.0, (1, 1e-2): 6.0, (2, 1e-3): 4.5, (2, 1e-2): 5.5}
    run = made_up(tmp_path / "run", settings | {"seeds": 4}, curves, losses)
    said = fig8.judge(run)
    assert said.verdict == "inconclusive"  # two pairs, all as stated, are too few
    association = said.numbers["association"]
    assert (association["correlation"], association["chance_of_more"]) == (1, 1 / 4)
    assert said.numbers["depths that collapse at the largest rate"] == [1]
    drawn = json.dumps(fig8.draw(run).to_dict())
    assert "1 layer" in drawn
    assert "2 layers" in drawn
    assert "lr 0.01: 5.500" in drawn  # the loss of each rate beside its curve


def test_curves_are_means_over_seeds_and_a_collapse_is_that_of_most(tmp_path):
    writer = RunWriter.create(
        tmp_path / "run", kind="exhibit", config={}, axes={"entropy": ["layer"], "phase": ["layer"]}
    )
    lines = {0: GOOD, 1: GOOD + 0.1, 2: DIP}
    with writer:
        for seed, line in lines.items():
            for n, step in enumerate(STEPS):
                phase = PHASES.index("collapsed" if line[n] < 0.2 else "dense")
                values = {"entropy": [line[n]], "phase": [phase], "valid_loss": 5.0 + seed}
                writer.write(int(step), values, data="pydoc", layers=1, lr=1e-3, seed=seed)
    run = Run(tmp_path / "run")
    found = curves_of(run, "pydoc")[1, 1e-3, 0]
    assert found.end == pytest.approx(sum(float(line[-1]) for line in lines.values()) / 3, abs=0.02)
    assert not found.collapsed
    assert seeds_that_bounce(run, "pydoc") == {(1, 1e-3, 0): [0, 1]}
    assert best_loss(run, "pydoc") == {(1, 1e-3): 6.0}


def test_a_run_is_taken_again_only_if_nothing_that_decides_it_has_changed(tmp_path, monkeypatch):
    settings = {**fig6.CODE_SLICE, "seeds": 1}
    runs = [{"data": "pydoc", "layers": 1, "lr": 1e-3, "steps": 1}]

    def folder():
        taken = []

        def train(language, out, **_):
            taken.append(out)
            raise RuntimeError("not now")

        monkeypatch.setattr("joma._train.language.train", train)
        writer = RunWriter.create(
            tmp_path / f"exhibit-{len(list(tmp_path.iterdir()))}", kind="exhibit", config={}
        )
        with pytest.raises(RuntimeError, match="not now"), writer:
            train_all(writer, runs, settings, 0, lambda share, what: None)
        return taken[0]

    first = folder()
    assert first.parent == tmp_path / "language-runs"
    assert folder() == first
    with monkeypatch.context() as patch:
        patch.setattr("joma._runs.fingerprint._versions", lambda: {"torch": "another"})
        assert folder() != first
    monkeypatch.setattr("joma._runs.fingerprint._joma_digest", lambda: b"of another source")
    assert folder() != first


@pytest.mark.parametrize("name", ["fig6", "fig8"])
def test_exhibits_from_training_to_picture(name, tmp_path, monkeypatch):
    module = {"fig6": fig6, "fig8": fig8}[name]
    steps = {10: [10] if name == "fig6" else 10, 6: [6] if name == "fig6" else 6}
    data = {"fig6": ["pydoc"], "fig8": "pydoc"}[name]
    tiny = {**module.CODE_SLICE, "data": data, "steps": steps[10], "every": 5, "vocabulary": 200}
    tiny["lr"] = 1e-8 if name == "fig6" else [1e-9, 1e-8]
    monkeypatch.setitem(module.SETTINGS, "laptop", tiny)
    outcome = make_exhibit(get([name])[0], "laptop", tmp_path)
    assert outcome.verdict.verdict == "inconclusive"  # a toy corpus
    assert (outcome.path / "figure.svg").stat().st_size > 5_000
    runs = tmp_path / "language-runs"
    assert len(list(runs.iterdir())) == len(tiny["layers"] if name == "fig6" else tiny["lr"])

    made = {path: path.stat().st_mtime_ns for path in runs.glob("*/checkpoints/*/state.json")}
    assert made
    monkeypatch.setattr("joma._show.plots.save", lambda chart, folder: None)
    shutil.rmtree(outcome.path)
    # The runs are there: only drawn and judged.
    again = make_exhibit(get([name])[0], "laptop", tmp_path)
    assert again.verdict == outcome.verdict
    assert {path: path.stat().st_mtime_ns for path in made} == made

    (runs / "notes").mkdir()
    monkeypatch.setitem(module.SETTINGS, "paper", {**tiny, "steps": steps[6], "vocabulary": 150})
    # Not taken from the other preset.
    other = make_exhibit(get([name])[0], "paper", tmp_path, force=True)
    assert Run(other.path).frame("valid_loss").step.max() == 6
    assert not any(path.exists() for path in made)  # force makes the runs again, too
    assert (runs / "notes").exists()  # what is no run stays


def test_exhibits_share_a_run_and_come_back_to_one_that_another_trains(tmp_path, monkeypatch):
    settings = {**fig6.CODE_SLICE, "seeds": 1, "vocabulary": 200}
    runs = [{"data": "pydoc", "layers": 1, "lr": lr, "steps": 2} for lr in (1e-3, 1e-4)]
    monkeypatch.setattr("joma.paper.exhibits._curves.POLL", 0.0)
    real, calls, busy = language.train, [], ["lr=0.001"]

    def train(settings, out, **rest):
        calls.append(settings.lr)
        if busy and busy[0] in out.name:
            busy.pop()
            raise RunInUse("somebody else trains it")
        return real(settings, out, **rest)

    monkeypatch.setattr("joma._train.language.train", train)
    members = []
    for name in ("a", "b"):
        with RunWriter.create(tmp_path / name, kind="exhibit", config={}) as writer:
            train_all(writer, runs, settings, 0, lambda share, what: None)
        members.append([path.name for path in Run(tmp_path / name).members])
    assert calls[:3] == [1e-3, 1e-4, 1e-3]  # the one in use was come back to
    assert members[0] == members[1]
    assert ["lr=0.001" in member for member in members[0]] == [
        True,
        False,
    ]  # in the order that was asked for
    assert len(list((tmp_path / "language-runs").iterdir())) == 2
