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
