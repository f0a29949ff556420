"""Figure 7: the judge can say all it may say; the exhibit end to end from files at tiny settings."""

from __future__ import annotations

import json

import numpy as np
import pytest

import joma
from joma import Run
from joma._checkpoints.scan import Scan
from joma._runs.writer import RunWriter
from joma.paper.exhibits import fig7, get, make_exhibit

STEPS = [0, *(2**n for n in range(10)), *range(1000, 20_001, 1000)]
BOUNCE = np.interp(np.log1p(STEPS), [0, 5, 10], [100.0, 40.0, 60.0])
DROP = np.interp(np.log1p(STEPS), [0, 10], [100.0, 40.0])
FLAT = np.full(len(STEPS), 100.0)


def scanned(path, values, digests=None, status="ok"):
    """A scan with these values (step -> gauge -> one per layer), two heads that differ, and digests of the weights."""
    axes = {"stable_rank": ["layer"], "entropy": ["layer", "head"]}
    with RunWriter.create(path, kind="scan", config={}, axes=axes) as writer:
        for step, gauges in values.items():
            row = dict(gauges)
            if "entropy" in row:
                row["entropy"] = [[value - 0.5, value + 0.5] for value in row["entropy"]]
            facts = {
                "status": status,
                "note": "why",
                "digest": (digests or {}).get(step, f"weights of {step}"),
            }
            writer.write(step, {**row, "bytes_read": 1}, checkpoint=f"step{step}", **facts)
    return Scan(path)


def rising(steps, gauges=("stable_rank", "entropy")):
    return {step: {gauge: [1.0 + step, 2.0 + step] for gauge in gauges} for step in steps}


@pytest.mark.parametrize(
    ("bottom", "top", "verdict"),
    [
        (DROP, BOUNCE, "holds"),
        (BOUNCE, BOUNCE, "holds under a condition"),
        (FLAT, BOUNCE, "holds under a condition"),
        (DROP, DROP, "fails"),
        (DROP, FLAT, "fails"),
        (
            DROP,
            FLAT + 30 * (np.arange(len(STEPS)) == 7),
            "fails",
        ),  # one odd checkpoint is no bounce
    ],
)
def test_judge(bottom, top, verdict, tmp_path):
    values = {
        step: {"stable_rank": [bottom[n], 70.0, top[n]], "entropy": [2.0] * 3}
        for n, step in enumerate(STEPS)
    }
    final = {
        0: {"stable_rank": [1.0, 2.0, 3.0], "entropy": [1.0, 1.0, 1.0]}
    }  # one checkpoint: not judged
    scans = {"m": scanned(tmp_path / "m", values), "final": scanned(tmp_path / "final", final)}
    config = {"settings": {"models": {"m": None, "final": "main"}}}
    with RunWriter.create(
        tmp_path / "run", kind="exhibit", config=config, axes=fig7.AXES
    ) as writer:
        for model, scan in scans.items():
            writer.refer(Run(scan.path), list(fig7.GAUGES), model=model)
    run = Run(tmp_path / "run")
    found = fig7.judge(run)
    assert found.verdict == verdict
    assert found.measured.startswith("stable rank of the top layer")
    assert "one checkpoint" in json.dumps(fig7.draw(run).to_dict())


@pytest.mark.parametrize(
    ("layers", "verdict"),
    [
        ([DROP, DROP, FLAT, FLAT, BOUNCE, BOUNCE], "holds"),
        (
            [DROP, FLAT, FLAT, FLAT, BOUNCE, BOUNCE],
            "holds under a condition",
        ),  # one of two is not most of them
        ([DROP, DROP, FLAT, FLAT, DROP, BOUNCE], "fails"),
        (
            [DROP, DROP, BOUNCE, FLAT, DROP, BOUNCE, BOUNCE, FLAT, BOUNCE],
            "holds",
        ),  # two of three are
    ],
)
def test_groups_of_layers_are_judged(layers, verdict, tmp_path):
    values = {step: {"stable_rank": [layer[n] for layer in layers]} for n, step in enumerate(STEPS)}
    with RunWriter.create(tmp_path / "run", kind="exhibit", config={}, axes=fig7.AXES) as writer:
        writer.refer(Run(scanned(tmp_path / "m", values).path), list(fig7.GAUGES), model="m")
    found = fig7.judge(Run(tmp_path / "run"))
    assert found.verdict == verdict
    assert f"of {len(layers) // 3} top layers" in found.summary


def test_a_small_model_of_ours_decides_nothing_about_pretrained_ones(tmp_path):
    values = {
        step: {"stable_rank": [DROP[n], BOUNCE[n]], "entropy": [2.0] * 2}
        for n, step in enumerate(STEPS)
    }
    scan = scanned(tmp_path / "m", values)
    for models, verdict in (([fig7.OWN], "inconclusive"), ([fig7.OWN, "m"], "holds")):
        folder = tmp_path / str(len(models))
        config = {"settings": {"models": dict.fromkeys(models)}}
        with RunWriter.create(folder, kind="exhibit", config=config, axes=fig7.AXES) as writer:
            for model in models:
                writer.refer(Run(scan.path), list(fig7.GAUGES), model=model)
        found = fig7.judge(Run(folder))
        assert found.verdict == verdict


def test_end_to_end_from_files(tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    monkeypatch.setenv("JOMA_CACHE", str(tmp_path / "cache"))
    small = {
        "vocabulary": 300,
        "layers": 2,
        "d": 16,
        "heads": 2,
        "batch": 2,
        "length": 16,
        "steps": 9,
        "warmup": 2,
    }
    settings = {**fig7.CODE_SLICE, "series": small, "data": "pydoc", "tokens": 128, "length": 16}
    monkeypatch.setitem(fig7.SETTINGS, "laptop", settings)
    outcome = make_exhibit(get(["fig7"])[0], "laptop", tmp_path / "out")
    assert outcome.verdict is not None
    frame = Run(outcome.path).frame("stable_rank")
    assert sorted(set(frame.step)) == [0, 1, 2, 4, 8, 9]
    (folder,) = (path.parent for path in (tmp_path / "cache/series").glob("*/series.json"))
    from safetensors.torch import load_file

    for step in (0, 9):
        state = load_file(folder / f"step-{step}/model.safetensors")
        sigma = np.linalg.svd(
            state["gpt_neox.layers.1.mlp.dense_h_to_4h.weight"].numpy(), compute_uv=False
        )
        value = frame[(frame.step == step) & (frame.layer == 1)].value.item()
        assert value == pytest.approx((sigma**2).sum() / sigma[0] ** 2, rel=1e-4)
    scans = list((tmp_path / "out/fig7-runs").iterdir())
    assert len(scans) == 1
    assert joma.Run(scans[0]).done


def exhibit(tmp_path, monkeypatch, scan):
    monkeypatch.setattr("joma._checkpoints.scan.scan", lambda *args, **options: scan)
    settings = {"models": {"m": "all"}, "data": "pydoc", "tokens": 8, "length": 4}
    config = {"settings": settings}
    with RunWriter.create(
        tmp_path / "run", kind="exhibit", config=config, axes=fig7.AXES
    ) as writer:
        fig7.run(writer, settings, 0, lambda share, what: None)
    return Run(tmp_path / "run")


@pytest.mark.parametrize(
    ("revisions", "chosen"), [("pythia", None), ("main", None), ("log:40", "log:40")]
)
def test_models_are_taken_from_a_folder_of_models_if_it_has_them(
    tmp_path, monkeypatch, revisions, chosen
):
    (tmp_path / "models/pythia-70m/step0").mkdir(parents=True)
    monkeypatch.setenv("JOMA_MODELS", str(tmp_path / "models"))
    result, asked = scanned(tmp_path / "scan", rising([0, 1, 2])), []
    monkeypatch.setattr(
        "joma._checkpoints.scan.scan",
        lambda source, *_, **options: asked.append((source, options)) or result,
    )
    models = {"EleutherAI/pythia-70m": revisions, "EleutherAI/pythia-1.4b": revisions}
    settings = {"models": models, "data": "pydoc", "tokens": 8, "length": 4}
    with RunWriter.create(
        tmp_path / "run", kind="exhibit", config={"settings": settings}
    ) as writer:
        fig7.run(writer, settings, 0, lambda share, what: None)
    here, hub = ((source, options["revisions"]) for source, options in asked)
    assert here == (str(tmp_path / "models/pythia-70m"), chosen)
    assert hub == ("EleutherAI/pythia-1.4b", revisions)


def test_checkpoints_with_the_weights_of_another_step_are_left_out_and_told(tmp_path, monkeypatch):
    digests = dict.fromkeys([1, 4, 8], "final weights")  # two branches serve the final weights
    run = exhibit(
        tmp_path, monkeypatch, scanned(tmp_path / "scan", rising([0, 1, 2, 4, 6, 8]), digests)
    )
    assert sorted(set(fig7.table(run)[0].step)) == [0, 2, 6, 8]
    assert "step1, step4 of m" in fig7.judge(run).summary


def test_a_model_without_entropy_is_judged_by_its_stable_rank(tmp_path, monkeypatch):
    scan = scanned(tmp_path / "scan", rising([0, 1, 2, 4], ["stable_rank"]), status="partly")
    run = exhibit(tmp_path, monkeypatch, scan)
    assert "entropy of the top layer could not be measured" in fig7.judge(run).summary
    fig7.draw(run).to_dict()


def test_a_model_of_which_all_failed_ends_the_exhibit(tmp_path, monkeypatch):
    scan = scanned(tmp_path / "scan", {0: {}, 1: {}}, status="failed")
    with pytest.raises(ValueError, match="nothing of m could be measured: why"):
        exhibit(tmp_path, monkeypatch, scan)


def test_a_checkpoint_that_was_measured_twice_counts_once(tmp_path, monkeypatch):
    scan = scanned(tmp_path / "scan", rising([0, 1, 2]))
    with RunWriter.resume(scan.path, {}) as writer:
        facts = {"checkpoint": "step1", "status": "ok", "note": None, "digest": "weights of 1"}
        writer.write(1, {"stable_rank": [7.0, 8.0], "bytes_read": 1}, **facts)
    frame, _ = fig7.table(exhibit(tmp_path, monkeypatch, scan))
    ranks = frame[(frame.gauge == "stable_rank") & (frame.step == 1)].set_index("layer").value
    assert ranks.to_dict() == {0: 7.0, 1: 8.0}
    assert frame[frame.gauge == "entropy"].value.tolist() == [
        1.0,
        2.0,
        2.0,
        3.0,
        3.0,
        4.0,
    ]  # means over both heads
