"""The exhibit on hierarchies: its rule on planted curves."""

import numpy as np
import pandas as pd
import pytest

from joma._runs import Run, RunWriter
from joma.paper.exhibits import hierarchy
from joma.paper.verdict import Verdict

STEPS = (0, 8, 16, 32, 64)
SETTINGS = {"objectives": ["class", "token"], "rho": [0.9]}


def planted(folder, first, trainings=8, late=1.0):
    """A run in which ``first[objective]`` says whose attention exceeds the threshold first."""
    config = {"exhibit": "hierarchy", "preset": "laptop", "settings": SETTINGS}
    rng = np.random.default_rng(0)
    with RunWriter.create(folder, kind="exhibit", config=config, seed=0) as writer:
        for objective, who in first.items():
            for draw in range(trainings):
                labels = {"objective": objective, "rho": 0.9, "layers": 2, "lr": 1e-3, "draw": draw}
                for number, step in enumerate(STEPS):
                    early = 0.1 * number + 0.001 * rng.random()
                    row = {"siblings": 0.05 * number, "cousins": 0.05 * number}
                    row |= {"ncorr_beta": 0.8 + early, "ncorr_alpha": 0.8 + late * 0.04 * number}
                    if who is not None:
                        row[who] = early
                    if step == STEPS[-1]:
                        row |= {"accuracy": 0.5, "bayes_accuracy": 0.6, "competition": -0.1 * draw}
                    writer.write(step, row, tree="tree", **labels)
                    flat = {"siblings": 0.0, "cousins": 0.0}
                    writer.write(step, flat, tree="permuted", **labels)
    return Run(folder)


@pytest.mark.parametrize(
    ("first", "verdict"),
    [
        ({"class": "siblings", "token": "siblings"}, Verdict.HOLDS),
        ({"class": "cousins", "token": "siblings"}, Verdict.UNDER),
        ({"class": "cousins", "token": "cousins"}, Verdict.FAILS),
    ],
)
def test_the_verdict_says_whose_attention_came_first(tmp_path, first, verdict):
    run = planted(tmp_path / "run", first)
    judgement = hierarchy.judge(run)
    assert judgement.verdict is verdict
    for objective, who in first.items():
        share = judgement.numbers["objectives"][hierarchy._label_name(objective)]["siblings first"]
        assert share["trainings"] == 8
        assert share["count"] == 8 * (who == "siblings")
        assert (
            judgement.numbers["objectives"][hierarchy._label_name(objective)]["permuted"][
                "trainings"
            ]
            == 0
        )
        assert (
            judgement.numbers["objectives"][hierarchy._label_name(objective)]["β before α"]["count"]
            == 8
        )


def test_trainings_that_never_turn_do_not_count(tmp_path):
    run = planted(tmp_path / "run", {"class": None, "token": None}, late=0.0)
    judgement = hierarchy.judge(run)
    assert judgement.verdict is Verdict.INCONCLUSIVE
    share = judgement.numbers["objectives"]["the class (root)"]["siblings first"]
    assert (share["trainings"], share["all trainings"]) == (0, 8)
    assert judgement.numbers["objectives"]["the class (root)"]["β before α"]["trainings"] == 0


def test_what_decides_is_the_sign_when_attention_first_turns(tmp_path):
    """A curve that rises little is not early: only the first step above the threshold counts."""
    rows = []
    curves = {"siblings": [0.0, 0.1, 0.15, 0.5], "cousins": [0.0, 0.0, 0.3, 0.4]}
    for gauge, values in curves.items():
        for step, value in enumerate(values):
            row = {"objective": "class", "rho": 0.9, "layers": 1, "lr": 1e-3, "draw": 0}
            rows.append({**row, "tree": "tree", "step": step, "gauge": gauge, "value": value})
    (turn,) = hierarchy.first_turns(pd.DataFrame(rows)).to_dict("records")
    assert turn["has_turned"]
    assert turn["step"] == 2
    assert not turn["siblings_first"]
