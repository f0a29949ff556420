"""Figure 7: the judge can say all it may say; the exhibit end to end from files at tiny settings."""

from __future__ import annotations

import json

import numpy as np
import pytest

import joma
from joma import Run
from joma._exhibits import fig7, get, reproduce
from joma._run.writer import RunWriter

STEPS = [0, *(2**n for n in range(10)), *range(1000, 20_001, 1000)]
BOUNCE = np.interp(np.log1p(STEPS), [0, 5, 10], [100.0, 40.0, 60.0])
DROP = np.interp(np.log1p(STEPS), [0, 10], [100.0, 40.0])
FLAT = np.full(len(STEPS), 100.0)


@pytest.mark.parametrize(
    ("bottom", "top", "verdict"),
    [
        (DROP, BOUNCE, "holds"),
        (BOUNCE, BOUNCE, "holds under"),
        (FLAT, BOUNCE, "holds under"),
        (DROP, DROP, "fails"),
        (DROP, FLAT, "fails"),
        (DROP, FLAT + 30 * (np.arange(len(STEPS)) == 7), "fails"),  # one odd checkpoint is no bounce
    ],
)
def test_judge(bottom, top, verdict, tmp_path):
    config = {"settings": {"models": {"m": None, "final": "main"}}}
    with RunWriter.create(tmp_path / "run", kind="exhibit", config=config, axes=fig7.AXES) as writer:
        for n, step in enumerate(STEPS):
            values = {"stable_rank": [bottom[n], 70.0, top[n]], "entropy": [2.0, 2.0, 2.0]}
            writer.write(step, values, model="m")
        writer.write(0, {"stable_rank": [1.0, 2.0, 3.0], "entropy": [1.0, 1.0, 1.0]}, model="final")  # not judged
    run = Run(tmp_path / "run")
    found = fig7.judge(run)
    assert found.verdict == verdict
    assert found.measured.startswith("stable rank of the top layer")
    assert "one checkpoint" in json.dumps(fig7.draw(run).to_dict())


def test_end_to_end_from_files(tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    monkeypatch.setenv("JOMA_CACHE", str(tmp_path / "cache"))
    small = {"vocabulary": 300, "layers": 2, "d": 16, "heads": 2, "batch": 2, "length": 16, "steps": 9, "warmup": 2}
    settings = {**fig7.SETTINGS["quick"], "series": small, "tokens": 128, "length": 16}
    monkeypatch.setitem(fig7.SETTINGS, "quick", settings)
    outcome = reproduce(get(["fig7"])[0], out=tmp_path / "out")
    assert outcome.verdict is not None
    frame = Run(outcome.path).frame("stable_rank")
    assert sorted(set(frame.step)) == [0, 1, 2, 4, 8, 9]
    (folder,) = (path.parent for path in (tmp_path / "cache/series").glob("*/series.json"))
    from safetensors.torch import load_file

    for step in (0, 9):
        state = load_file(folder / f"step-{step}/model.safetensors")
        sigma = np.linalg.svd(state["gpt_neox.layers.1.mlp.dense_h_to_4h.weight"].numpy(), compute_uv=False)
        value = frame[(frame.step == step) & (frame.layer == 1)].value.item()
        assert value == pytest.approx((sigma**2).sum() / sigma[0] ** 2, rel=1e-4)
    scans = list((tmp_path / "out/fig7-runs").iterdir())
    assert len(scans) == 1
    assert joma.Run(scans[0]).done


def scanned(steps, gauges=("stable_rank", "entropy"), same=None):
    """A scan's table of two layers, and where weights are another step's."""
    import pandas as pd

    rows = [
        {"step": step, "checkpoint": f"step{step}", "layer": layer, "gauge": gauge, "value": 1.0 + layer + step,
         "same_as": (same or {}).get(step, "")}
        for step in steps for gauge in gauges for layer in range(2)
    ]  # fmt: skip
    return pd.DataFrame(rows)


class Fake:
    """A scan that is done."""

    def __init__(self, frame, status):
        self._frame, self._status = frame, status
        self.failed = [name for name, how in status.items() if how != "ok"]

    def frame(self):
        return self._frame

    def status(self):
        return self._status

    def checkpoints(self):
        import pandas as pd

        return pd.DataFrame({"note": ["why"] * len(self._status)})


def exhibit(tmp_path, monkeypatch, fake):
    monkeypatch.setattr("joma._scan.scan.scan", lambda *args, **options: fake)
    settings = {"models": {"m": "all"}, "data": "pydoc", "tokens": 8, "length": 4}
    config = {"settings": settings}
    with RunWriter.create(tmp_path / "run", kind="exhibit", config=config, axes=fig7.AXES) as writer:
        fig7.run(writer, settings, 0, lambda share, what: None)
    return Run(tmp_path / "run")


def test_checkpoints_with_the_weights_of_another_step_are_left_out_and_told(tmp_path, monkeypatch):
    same = {1: "step4, step8", 4: "step1, step8", 8: "step1, step4"}  # two branches serve the final weights
    steps = [0, 1, 2, 4, 6, 8]
    fake = Fake(scanned(steps, same=same), dict.fromkeys([f"step{n}" for n in steps], "ok"))
    run = exhibit(tmp_path, monkeypatch, fake)
    assert sorted(set(run.frame().step)) == [0, 2, 6, 8]
    assert "step1, step4 of m" in fig7.judge(run).summary


def test_a_model_without_entropy_is_judged_by_its_stable_rank(tmp_path, monkeypatch):
    fake = Fake(scanned([0, 1, 2, 4], gauges=("stable_rank",)), {f"step{n}": "partly" for n in (0, 1, 2, 4)})
    run = exhibit(tmp_path, monkeypatch, fake)
    assert "entropy of the top layer could not be measured" in fig7.judge(run).summary
    fig7.draw(run).to_dict()


def test_a_model_of_which_all_failed_ends_the_exhibit(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="nothing of m could be measured: why"):
        exhibit(tmp_path, monkeypatch, Fake(scanned([0]), {"step0": "failed", "step1": "failed"}))
