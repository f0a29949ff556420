"""The exhibit of the clock: judged on curves that keep to it, and on curves that do not."""

import numpy as np
import pytest

from joma import Run
from joma._runs import RunWriter
from joma._show import plots
from joma.paper.exhibits import clock
from joma.paper.exhibits.base import DEFAULT, PRESETS
from joma.paper.verdict import Verdict

SETTINGS = {"data": "wikitext-2", "layers": [1], "other_layers": [1], "seeds": 2,
            "rates": {"adam": [1e-3, 2e-3, 8e-3], "sgd": [1.0, 2.0, 8.0], "momentum": [1.0]},
            "tau": {"adam": 0.6, "sgd": 600.0, "momentum": 600.0}}  # fmt: skip


def entropy(share):
    return np.where(share < 1 / 3, 2.5 - 3 * share, 1.5 + 0.75 * (share - 1 / 3))


def made(folder, power=1.0, toy=False, seeds=2, apart=0.0):
    """Curves of two seeds per rate, as functions of lr^power · step; the fastest rate of Adam collapses half-way.

    The second rate lies ``apart`` above the first one.
    """
    settings = SETTINGS | {"seeds": seeds}
    if toy:
        settings["data"] = "pydoc"
    axes = {"entropy": ["layer"], "stable_rank": ["layer"]}
    with RunWriter.create(
        folder, kind="exhibit", config={"settings": settings}, axes=axes
    ) as writer:
        for kind, rates in settings["rates"].items():
            beta = 0.9 if kind == "momentum" else 0.0
            end = settings["tau"][kind]
            for rate in rates:
                for seed in range(seeds):
                    steps = round(end / rate)
                    for step in range(max(1, steps // 50), steps + 1, max(1, steps // 50)):
                        tau = rate * step
                        share = tau / end * (rate / min(rates)) ** (power - 1)
                        value = float(entropy(share)) + (0.05 if seed % 2 else -0.05)
                        value += apart * (rate != min(rates))
                        if kind == "adam" and rate == 8e-3 and tau > 0.3:
                            value = 0.0
                        values = {
                            "entropy": [value],
                            "stable_rank": [20 * value],
                            "valid_loss": value + 3,
                        }
                        columns = {"optimiser": "adam" if kind == "adam" else "sgd", "momentum": beta, "layers": 1,
                                   "lr": rate * (1 - beta), "seed": seed, "tau": tau * (1 - beta)}  # fmt: skip
                        writer.write(step, values, **columns)
    return Run(folder)


def test_curves_on_the_clock_hold_and_the_fastest_is_told_to_leave(tmp_path):
    judgement = clock.judge(made(tmp_path / "run"))
    assert judgement.verdict is Verdict.HOLDS
    adam = judgement.numbers["curves"]["adam, 1 layer, entropy, layer 0"]
    assert adam["between seeds"] == pytest.approx(0.1)
    # of four pairs of runs two have the same shift and two differ by 0.1
    assert adam["between rates"] == pytest.approx(0.1 / np.sqrt(2), rel=0.05)
    assert adam["exponent"] == pytest.approx(1, abs=0.05)
    assert "leaves it at τ = 0.3" in adam["fastest"]
    sgd = judgement.numbers["curves"][
        "sgd, 1 layer, entropy, layer 0"
    ]  # with momentum: only if τ counts it ten-fold
    assert sgd["ratio"] < 1.1


def test_curves_of_equal_steps_fail(tmp_path):
    judgement = clock.judge(made(tmp_path / "run", power=0.0))
    assert judgement.verdict is Verdict.FAILS
    assert judgement.numbers["curves"]["adam, 1 layer, entropy, layer 0"][
        "exponent"
    ] == pytest.approx(0, abs=0.05)


def test_two_seeds_leave_a_small_margin_open(tmp_path):
    # Seeds are 0.1 apart, so that rates may be 0.15 apart. 0.13 and 0.1 between half of the seeds make 0.148.
    close = clock.judge(made(tmp_path / "two", apart=0.13))
    assert close.verdict is Verdict.INCONCLUSIVE
    assert max(map(abs, close.numbers["margins"])) < 0.02
    assert clock.judge(made(tmp_path / "far", apart=0.3)).verdict is Verdict.FAILS
    # Of four seeds two are alike: 0.0816 apart on average, which allows 0.122.
    assert clock.judge(made(tmp_path / "kept", apart=0.09, seeds=4)).verdict is Verdict.HOLDS
    assert clock.judge(made(tmp_path / "left", apart=0.11, seeds=4)).verdict is Verdict.FAILS


def test_a_toy_decides_nothing(tmp_path):
    assert clock.judge(made(tmp_path / "run", toy=True)).verdict is Verdict.INCONCLUSIVE


def test_it_is_drawn_and_set_for_every_preset(tmp_path):
    assert set(clock.SETTINGS) == set(PRESETS) - {DEFAULT}  # it shows its record
    for settings in clock.SETTINGS.values():
        assert set(settings["rates"]) == set(settings["tau"])
    plots.save(clock.draw(made(tmp_path / "run")), tmp_path)
    assert "NaN" not in (tmp_path / "figure.svg").read_text()
