"""Exhibits contrast, hierarchy and assumptions: run at tiny settings, drawn, and judges that can say yes and no."""

from functools import partial

import numpy as np
import pytest

from joma import Run
from joma._runs import RunWriter
from joma._show import plots
from joma.paper.exhibits import assumptions, contrast, hierarchy
from joma.paper.exhibits._regimes import compare, rebounds
from joma.paper.exhibits.judgement import render
from joma.paper.exhibits.table1 import NOISY, TREND, noisy_numbers, noisy_table, trend_numbers

TINY = {
    "contrast": contrast.CODE_SLICE
    | {
        "data": "pydoc",
        "biases": [0.0],
        "mixture_end": 3.0,
        "exp_end": 3.0,
        "softmax_end": 3.0,
        "vocabulary": 60,
        "steps": 3,
        "every": 1,
        "valid_windows": 1,
    },
    "hierarchy": {
        "objectives": ["class", "token"],
        "rho": [0.9],
        "layers": [2],
        "lr": [1e-2],
        "seeds": 2,
        "width": 8,
        "steps": 9,
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


SETTINGS = contrast.SETTINGS["laptop"] | {"mixture_seeds": 20, "label_seeds": 10}


def write_flows(writer, regime, family, activations, rebound, count):
    """Flows that dip from 2 to 1 nats and come back by ``rebound(activation)``, not all by the same."""
    spread = 0.01 * (-1.0) ** np.arange(count)
    for activation in activations:
        values = {
            "start": np.full(count, 2.0),
            "trough": np.full(count, 1.0),
            "end": 1.0 + rebound(activation) + spread,
            "blown": np.zeros(count),
        }
        writer.write(0, values, family=family, **regime.labels, activation=activation)


def contrasted(folder, rebound, pairs=8, **changes):
    """A run in which attention comes back by ``rebound(group, activation)`` nats."""
    settings = SETTINGS | changes
    with RunWriter.create(
        folder / "run", kind="exhibit", config={"settings": settings}, axes=contrast.AXES
    ) as writer:
        for regime in contrast.mixture_regimes(settings):
            is_target = regime.has_target and regime.bias >= contrast.LARGE_BIAS
            of_group = partial(rebound, "target" if is_target else "fixed")
            activations = contrast.MIXTURE_ACTIVATIONS
            count = settings["mixture_seeds"]
            write_flows(writer, regime, "mixture", activations, of_group, count)
        for regime in contrast.label_regimes(settings):
            of_group = partial(rebound, "labels")
            activations = contrast.LABEL_ACTIVATIONS
            write_flows(writer, regime, "labels", activations, of_group, settings["label_seeds"])
        for activation in ("linear", "relu"):
            for seed in range(pairs):
                end = 1.0 + rebound("language", activation) + 0.01 * (-1) ** seed
                curve = [2.0] * 5 + [1.0] * 5 + [end] * 5
                for step, value in enumerate(curve):
                    writer.write(step, {"entropy": value}, activation=activation, seed=seed)
    return Run(folder / "run")


def nonlinear_in(*groups):
    """Rebounds of half a nat with nonlinear nodes in these groups, and none else."""
    return lambda group, activation: 0.5 * (group in groups and activation != "linear")


EVERYWHERE = nonlinear_in(*contrast.TITLES)


@pytest.mark.parametrize(
    ("rebound", "verdict"),
    [
        (EVERYWHERE, "holds"),
        (nonlinear_in("target"), "holds under a condition"),
        (nonlinear_in("language"), "holds under a condition"),
        (nonlinear_in(), "fails"),
        (lambda group, activation: 0.5, "fails"),  # linear nodes come back as well
        (lambda group, activation: 0.5 * (activation == "linear"), "fails"),
        (lambda group, activation: 0.5 * (activation == "relu"), "holds under a condition"),
    ],
)
def test_the_judge_of_the_contrast(tmp_path, rebound, verdict):
    found = contrast.judge(contrasted(tmp_path, rebound))
    assert found.verdict == verdict


def test_both_halves_of_the_contrast_are_counted_by_regime(tmp_path):
    rebounds_of = {"target": "relu gelu", "labels": "linear softplus gelu"}
    run = contrasted(
        tmp_path, lambda group, activation: 0.5 * (activation in rebounds_of.get(group, ""))
    )
    groups = contrast.judge(run).numbers["groups"]
    by_name = {name: groups[title] for name, title in contrast.TITLES.items()}
    returns = {name: numbers["returns"] for name, numbers in by_name.items()}
    assert returns == {
        "target": {"nonlinear only": 4},
        "fixed": {"neither": 32},
        "labels": {"both": 48},
        "language": {"neither": 1},
    }
    assert by_name["labels"]["equivalent"] == 48


@pytest.mark.parametrize("changes", [{"mixture_seeds": 19}, {"label_seeds": 9}])
def test_too_few_flows_decide_nothing(tmp_path, changes):
    assert contrast.judge(contrasted(tmp_path, EVERYWHERE, **changes)).verdict == "inconclusive"


def test_too_few_language_models_decide_nothing_about_their_group(tmp_path):
    found = contrast.judge(contrasted(tmp_path, EVERYWHERE, pairs=7))
    assert found.verdict == "holds under a condition"  # of the flows
    found = contrast.judge(contrasted(tmp_path / "few", nonlinear_in("language"), pairs=7))
    assert found.verdict == "fails"


def test_a_run_without_language_models_is_judged_by_its_flows(tmp_path):
    found = contrast.judge(contrasted(tmp_path, EVERYWHERE, pairs=0))
    assert found.verdict == "holds under a condition"
    assert contrast.TITLES["language"] not in found.numbers["groups"]


def test_a_difference_that_the_seeds_leave_open_is_undecided():
    rng = np.random.default_rng(0)
    noise = rng.normal(0.05, 0.1, 20)
    comparison = compare({"linear": np.zeros(20), "relu": noise}, {"linear": noise, "relu": noise})
    assert comparison.returns == "undecided"
    assert not comparison.is_equivalent
    assert not comparison.ends_denser


def test_a_curve_that_does_not_dip_has_no_rebound():
    start = np.array([2.0, 2.0, 2.0])
    trough = np.array([1.95, 1.0, 1.0])
    end = np.array([2.0, 1.0, 1.7])
    np.testing.assert_allclose(rebounds(start, trough, end), [0.0, 0.0, 0.7])


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
