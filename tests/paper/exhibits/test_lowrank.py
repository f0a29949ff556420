"""The exhibit lowrank on curves of known shape: when a rank has made half of its fall, and judges that say no."""

import numpy as np
import pandas as pd
import pytest

from joma import Run
from joma._runs import RunWriter
from joma._runs.curve import RANK, describe
from joma._show import plots
from joma.paper.exhibits import lowrank

STEPS = np.arange(0, 420, 20)


def fall(start, low, middle, end=None):
    """From start to low around a step, and to end."""
    curve = low + (start - low) / (1 + np.exp((STEPS - middle) / 15))
    return curve if end is None else curve + (end - low) * np.clip((STEPS - 250) / 150, 0, 1)


def made(folder, gradient, weight, data="wikitext-2"):
    settings = {"data": data, "layers": [1]}
    axes = {gauge: ["layer"] for gauge in (*lowrank.RANKS, "entropy")}
    curves = {
        "gradient_rank": gradient,
        "stable_rank": weight,
        "update_rank": weight,
        "entropy": fall(3.0, 1.0, 150, 2),
    }
    with RunWriter.create(
        folder / "run", kind="exhibit", config={"settings": settings}, axes=axes
    ) as writer:
        for n, step in enumerate(STEPS):
            values = {gauge: np.array([curve[n]]) for gauge, curve in curves.items()}
            writer.write(int(step), values, data=data, layers=1, lr=1e-3, seed=0)
    return Run(folder / "run")


def test_half_of_the_fall_is_told_after_the_peak():
    values = np.concatenate(
        [np.linspace(2, 10, 10), np.linspace(10, 1, 11)]
    )  # it starts low, and peaks at step 180
    frame = pd.DataFrame({"step": STEPS, "value": values})
    middle = lowrank.half_way(frame, describe(STEPS, values, RANK))
    assert 260 <= middle <= 320
    flat = pd.DataFrame({"step": STEPS, "value": np.linspace(1, 2, len(STEPS))})
    assert lowrank.half_way(flat, describe(STEPS, flat.value, RANK)) == np.inf


@pytest.mark.parametrize(
    ("gradient", "weight", "verdict"),
    [
        (fall(20, 2, 80), fall(20, 10, 200), "holds"),
        (fall(20, 2, 250), fall(20, 10, 100), "holds under a condition"),  # lower, but later
        (
            fall(20, 9, 80),
            fall(20, 10, 200),
            "holds under a condition",
        ),  # earlier, but hardly lower
        (fall(20, 9, 250), fall(20, 10, 100), "fails"),
    ],
)
def test_lower_and_earlier_are_judged_by_themselves(gradient, weight, verdict, tmp_path):
    run = made(tmp_path, gradient, weight)
    judgement = lowrank.judge(run)
    assert str(judgement.verdict) == verdict
    (tmp_path / "toy").mkdir()
    assert (
        lowrank.judge(made(tmp_path / "toy", gradient, weight, "pydoc")).verdict == "inconclusive"
    )
    assert "dip and bounce" in judgement.summary
    plots.save(lowrank.draw(run), tmp_path)
    assert "NaN" not in (tmp_path / "figure.svg").read_text()
