"""Exhibits contrast, hierarchy and assumptions: run at tiny settings, drawn, and judges that can say yes and no."""

import numpy as np
import pandas as pd
import pytest

from joma import Run
from joma._runs import RunWriter
from joma._show import plots
from joma.paper.exhibits import assumptions, contrast, hierarchy
from joma.paper.exhibits.judgement import render
from joma.paper.exhibits.table1 import NOISY, TREND, noisy_numbers, noisy_table, trend_numbers

LANGUAGE = contrast.SETTINGS["laptop"]["language"] | {
    "vocabulary": 60,
    "steps": 3,
    "every": 1,
    "seeds": 1,
}
LANGUAGE |= {"data": "pydoc", "valid_windows": 1}
TINY = {
    "contrast": {
        "seeds": 2,
        "inputs": ["random"],
        "tokens": 4,
        "t_end": 3.0,
        "targets_end": [0.3, 0.5],
        "language": LANGUAGE,
    },
    "hierarchy": {
        "seeds": 2,
        "rho": 0.9,
        "layers": [2],
        "width": 8,
        "steps": 4,
        "every": 2,
        "lr": 1e-2,
    },
    "assumptions": {
        "data": "pydoc",
        "vocabulary": 60,
        "steps": 9,
        "every": 2,
        "lr": 1e-3,
        "layers": 2,
        "width": 16,
    },
}
MODULES = {"contrast": contrast, "hierarchy": hierarchy, "assumptions": assumptions}


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("JOMA_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


@pytest.mark.parametrize("id", TINY)
def test_run_drawn_and_judged(id, tmp_path):
    module = MODULES[id]
    config = {"settings": TINY[id]}
    with RunWriter.create(
        tmp_path / "run", kind="exhibit", config=config, axes=module.EXHIBIT.experiment.axes
    ) as writer:
        module.run(writer, TINY[id], 0, lambda share, what: None)
    run = Run(tmp_path / "run")
    found = module.judge(run)
    assert found.verdict == "inconclusive"  # few seeds, a toy corpus
    assert any(character.isdigit() for character in found.measured)
    plots.save(module.draw(run), tmp_path)
    assert (tmp_path / "figure.svg").read_text().count("<path") > 10


def contrasted(folder, bounced):
    """A run of 20 flows per cell of which ``bounced(kind, activation)`` bounce."""
    with RunWriter.create(folder / "run", kind="exhibit", config={}) as writer:
        for kind in contrast.KINDS:
            for activation in contrast.ACTIVATIONS:
                for s in range(20):
                    did = float(s < bounced(kind, activation))
                    values = {
                        f"{g}_{w}": did for g in ("entropy", "rank") for w in ("dipped", "bounced")
                    }
                    writer.write(
                        0,
                        values,
                        kind=kind,
                        activation=activation,
                        attention=("exp", "softmax")[s % 2],
                        draw=s,
                    )
        for step, value in enumerate([2.0] * 3 + [1.0] * 5 + [1.5] * 5):
            writer.write(step, {"entropy": value}, activation="relu", seed=0)
    return Run(folder / "run")


@pytest.mark.parametrize(
    ("bounced", "verdict"),
    [
        (lambda kind, activation: 0 if activation == "linear" else 18, "holds"),
        (lambda kind, activation: 18 if kind == "targets 32" else 0, "holds under a condition"),
        (
            lambda kind, activation: 18 if kind != "targets 32" else 0,
            "fails",
        ),  # linear nodes bounce as often
        (lambda kind, activation: 0, "fails"),
    ],
)
def test_the_judge_of_the_contrast(tmp_path, bounced, verdict):
    found = contrast.judge(contrasted(tmp_path, bounced))
    assert found.verdict == verdict
    assert "relu: dip and bounce" in found.summary


def levels(folder, early, late, permuted=None):
    """Twelve trainings of a deep tree whose levels are learned at steps ``early`` and ``late``; None: never."""
    with RunWriter.create(folder / "run", kind="exhibit", config={}) as writer:
        for draw in range(12):
            for tree in ("tree", "permuted"):
                times = (early, late) if tree == "tree" else (permuted, permuted)
                for step in range(0, 101, 10):
                    first, second = (float(t is not None and step >= t) for t in times)
                    row = {
                        "attention_siblings_0": 1 + first,
                        "attention_cousins_1": 1 + second,
                        "competition_0": -0.5,
                    }
                    row |= {"attention_others_0": 1.0, "attention_others_1": 1.0, "accuracy": 0.9}
                    row |= {"ncorr_beta": first, "ncorr_alpha": second}
                    writer.write(step, row, shape="deep", layers=2, draw=draw, tree=tree)
    return Run(folder / "run")


@pytest.mark.parametrize(
    ("early", "late", "verdict"),
    [(20, 60, "holds"), (60, 20, "fails"), (40, 40, "fails"), (None, None, "inconclusive")],
)
def test_the_judge_of_the_hierarchy(tmp_path, early, late, verdict):
    found = hierarchy.judge(levels(tmp_path, early, late))
    assert found.verdict == verdict
    if verdict == "holds":
        assert found.numbers["latents, tree"]["first"] == 20
        assert found.numbers["latents, tree"]["second"] == 60
        assert found.numbers["competition"]["mean"] == pytest.approx(-0.5)


def test_halfway_is_the_first_step_beyond_the_middle():
    rises = pd.Series([0.0, 0.1, 0.6, 0.4, 1.0], index=[0, 10, 20, 30, 40])
    assert hierarchy.halfway(rises, 0.05) == 20
    assert np.isnan(hierarchy.halfway(rises, 2.0))
    assert np.isnan(hierarchy.halfway(-rises, 0.05))


@pytest.mark.parametrize(
    ("cosines", "agreement", "verdict"),
    [
        ({"joint": 0.9, "layerwise": 0.9, "gpt": 0.9}, 0.8, "holds"),
        ({"layerwise": 0.9}, 0.8, "holds under a condition"),
        ({}, 0.8, "fails"),
        ({"joint": 0.9}, 0.8, "inconclusive"),
        ({}, 0.1, "inconclusive"),  # noise hides the mean gradient
        ({"joint": 0.9, "layerwise": 0.9, "gpt": 0.9}, -0.1, "inconclusive"),
    ],
)
def test_the_judge_of_the_assumptions(tmp_path, cosines, agreement, verdict):
    with RunWriter.create(
        tmp_path / "run", kind="exhibit", config={"settings": {"data": "wikitext-2"}}
    ) as writer:
        for model in assumptions.MODELS:
            for step in (10, 20):
                values = {
                    "gradient_stationarity": cosines.get(model, 0.1),
                    "gradient_agreement": agreement,
                }
                writer.write(
                    step, {**values, "attention_drift": 0.1, "eqn17_residual": 0.9}, model=model
                )
    found = assumptions.judge(Run(tmp_path / "run"))
    assert found.verdict == verdict
    gpt = found.numbers["models"][assumptions.MODELS["gpt"]]
    assert not gpt["premises"]["Eqn. 17"]["holds"]


def test_the_trend_of_table_1_and_its_noisy_columns(tmp_path):
    with RunWriter.create(
        tmp_path / "run", kind="exhibit", config={}, axes={"ncorr": ["s"], "noisy_ncorr": ["s"]}
    ) as writer:
        for draw in range(4):
            noise = 0.01 * np.array([1, -1]) * (-1) ** draw
            for N_ch, N0, level in ((2, 10, 0.9), (3, 20, 0.8)):
                labels = {"C": 20, "N_ch": N_ch, "N0": N0, "N1": N0 + 10, "draw": draw}
                writer.write(
                    1, {"ncorr": level + noise * (N_ch - 2)}, state="trained", lr=1e-4, **labels
                )
                for state, value in (
                    ("trained", 0.7 - 0.1 * N_ch),
                    ("untrained", 0.2),
                    ("permuted", 0.0),
                ):
                    writer.write(
                        1,
                        {"noisy_ncorr": np.full(2, value) + noise * (N_ch - 2)},
                        state=state,
                        rho=0.9,
                        **labels,
                    )
    numbers = trend_numbers(Run(tmp_path / "run"))
    assert "goes down" in render(TREND, numbers)
    assert numbers["change"]["mean"] == pytest.approx(-0.1)
    numbers = noisy_numbers(Run(tmp_path / "run"))
    text = render(NOISY, numbers)
    assert numbers["layers"]["s = 1"]["gain"]["mean"] == pytest.approx(0.25)
    assert "0.45 trained, 0.20 untrained, 0.00 permuted" in text
    assert numbers["change"]["mean"] == pytest.approx(-0.1)
    assert "with complexity it goes down: -0.100" in text
    assert (
        "| ρ=0.9 C=20 N_ch=3 (20, 30) | 0.40 ± 0.01 | 0.20 ± 0.01 | 0.00 ± 0.01 |"
        in noisy_table(Run(tmp_path / "run"))
    )
