"""The series of checkpoints that exhibits share, and what fig10 and embeddings make of it."""

from __future__ import annotations

import json
import shutil
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from joma._checkpoints.options import CheckpointOptions
from joma._data.pretrained import encode
from joma._inspect.superpose import superpose
from joma._inspect.windows import open_model
from joma._measure.gauges.embedding import embedding_coherence, random_cosine
from joma._runs import Run, RunWriter
from joma.paper.exhibits import _series, embeddings, fig10, get, make_exhibit

pytest.importorskip("transformers")
TINY = {
    "vocabulary": 300,
    "layers": 2,
    "d": 16,
    "heads": 2,
    "batch": 4,
    "length": 16,
    "steps": 5,
    "warmup": 2,
}


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JOMA_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield patch


@pytest.fixture(scope="module")
def tiny(cache):
    """A tiny series, asked for by two at the same time: path, and how often it was trained."""
    trained, told, paths = [], [], []
    original = _series._train

    def train(*args):
        trained.append(1)
        original(*args)

    cache.setattr(_series, "_train", train)

    def ask():
        paths.append(_series.series(TINY, 0, lambda share, what: told.append(share)))

    both = [threading.Thread(target=ask) for _ in range(2)]
    for thread in both:
        thread.start()
    for thread in both:
        thread.join()
    return SimpleNamespace(path=paths[0], paths=paths, trained=len(trained), told=told)


def test_the_series_is_trained_once_and_shared(tiny):
    assert tiny.trained == 1
    assert tiny.paths[0] == tiny.paths[1]
    assert min(tiny.told) == 0.0
    assert all(0 <= share <= 1 for share in tiny.told)


def test_the_checkpoints_are_at_pythias_steps_in_the_hubs_format(tiny):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    assert list(_series.checkpoints(tiny.path)) == [0, 1, 2, 4, 5]
    assert _series.saved_steps(2000) == [0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1000, 2000]
    folder = _series.checkpoints(tiny.path)[5]
    assert not list(folder.glob("*.bin"))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = "The  with statement:\n    is a class"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert (model.config.model_type, model.config.num_hidden_layers) == ("gpt_neox", 2)


def test_the_untrained_loss_is_near_that_of_a_uniform_guess_and_training_lowers_it(tiny):
    losses = _series.losses(tiny.path)
    assert losses[0] == pytest.approx(np.log(300), abs=0.2)
    assert losses[5] < losses[0]


def test_other_settings_or_seeds_are_another_series_and_a_damaged_one_is_made_again(tiny):
    with pytest.raises(ValueError, match="unknown settings of the series: depth"):
        _series.series({"depth": 3}, 0, lambda share, what: None)
    other = _series.series(TINY, 1, lambda share, what: None)
    assert other != tiny.path
    (other / "step-4" / "model.safetensors").unlink()
    assert _series.series(TINY, 1, lambda share, what: None) == other
    assert (other / "step-4" / "model.safetensors").stat().st_size > 0


def test_a_training_that_was_stopped_goes_on_to_the_same_bits(tiny, cache, monkeypatch):
    from safetensors.torch import load_file

    monkeypatch.setattr(_series, "SAVE_EVERY", 2)
    settings = {**TINY, "steps": 12}
    unbroken = _series.series(settings, 7, lambda share, what: None)
    kept = {
        step: load_file(path / "model.safetensors")
        for step, path in _series.checkpoints(unbroken).items()
    }
    kept_losses = _series.losses(unbroken)
    shutil.rmtree(unbroken)

    def stop(share, what):
        if "step 10" in what:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        _series.series(settings, 7, stop)
    told = []
    assert _series.series(settings, 7, lambda share, what: told.append(what)) == unbroken
    assert not any("step 0 of" in what for what in told)  # it did not begin again
    assert _series.losses(unbroken) == kept_losses
    for step, path in _series.checkpoints(unbroken).items():
        weights = load_file(path / "model.safetensors")
        assert all((weights[name] == kept[step][name]).all() for name in kept[step])
    assert not list(unbroken.parent.glob(".*.training"))


@pytest.fixture(scope="module")
def made(tiny, cache, tmp_path_factory):
    out = tmp_path_factory.mktemp("exhibits")
    text = out / "text.txt"
    words = np.array("the cat sat on a mat and saw that dog run to it".split())  # noqa: SIM905
    words = np.random.default_rng(0).choice(words, 4000)
    text.write_text(" ".join(words))
    for module in (fig10, embeddings):
        small = {"series": TINY, "data": str(text), "tokens": 3000, "shuffles": 3, "sample": 500}
        cache.setitem(module.SETTINGS, "laptop", {key: small[key] for key in module.CODE_SLICE})
    return {id: make_exhibit(get([id])[0], "laptop", out) for id in ("fig10", "embeddings")}


@pytest.mark.parametrize("id", ["fig10", "embeddings"])
def test_the_exhibits_run_draw_and_judge_on_a_series(made, id):
    outcome = made[id]
    assert outcome.verdict is not None
    assert outcome.exhibit.rule == {"fig10": fig10, "embeddings": embeddings}[id].RULE
    assert outcome.verdict.measured
    assert (outcome.path / "figure.svg").stat().st_size > 1000


def test_embeddings_measures_every_checkpoint(made):
    frame = Run(made["embeddings"].path).frame("mean")
    assert sorted(set(frame.step)) == [0, 1, 2, 4, 5]
    assert set(frame.kind) == {"raw", "centred"}
    assert frame.value.between(0, 1).all()


def test_figure_10_counts_every_neuron_of_both_states(made):
    frame = Run(made["fig10"].path).frame("patterns")
    assert frame.groupby(["state", "layer"]).size().eq(64).all()
    assert (
        (made["fig10"].path / "superpose-small-GPT-NeoX.html")
        .read_text()
        .startswith("<!doctype html>")
    )
    assert json.loads((made["fig10"].path / "examples.json").read_text())["models"][
        "small GPT-NeoX"
    ]["neurons"]


def peaks(net, tokens):
    """The largest activation of each hidden neuron, by layer, at places that see eight tokens."""
    found = []
    hooks = [
        layer.mlp.dense_4h_to_h.register_forward_pre_hook(
            lambda module, given: found.append(given[0][0, 7:].amax(0))
        )
        for layer in net.layers
    ]
    with torch.no_grad():
        net.eval()(torch.tensor([tokens]))
    for hook in hooks:
        hook.remove()
    return torch.cat(found)


def test_figure_10_counts_the_neurons_that_both_texts_of_a_pair_fire(tiny, made):
    model = _series.checkpoints(tiny.path)[5]
    corpus = superpose(model, str(made["fig10"].path.parent / "text.txt"), tokens=3000)
    strongest = torch.cat([kept.value.amax(1) for kept in corpus.strongest.values()])
    net, tokenizer = open_model(model, CheckpointOptions(), None)
    texts = fig10.PAIRS[0][0], fig10.PAIRS[2][1]
    a, b = (peaks(net, encode(tokenizer, text)) >= 0.5 * strongest for text in texts)
    assert fig10.fired_by_both(model, None, corpus)[0][2] == int((a & b).sum()) > 0


def test_figure_10_shows_examples_of_every_model(tiny, made, tmp_path, monkeypatch):
    steps = _series.checkpoints(tiny.path)
    for name in ("one", "two"):
        shutil.copytree(steps[max(steps)], tmp_path / name)
        shutil.copytree(steps[min(steps)], tmp_path / name / "step0")
    monkeypatch.setenv("JOMA_MODELS", str(tmp_path))
    text = str(made["fig10"].path.parent / "text.txt")
    settings = {"models": ["some/one", "some/two"], "data": text, "tokens": 2000, "shuffles": 2}
    monkeypatch.setitem(fig10.SETTINGS, "laptop", settings)
    path = make_exhibit(get(["fig10"])[0], "laptop", tmp_path / "out").path
    examples = json.loads((path / "examples.json").read_text())["models"]
    assert list(examples) == ["some/one", "some/two"]
    assert all(shown["neurons"] for shown in examples.values())
    assert {"superpose-one.html", "superpose-two.html"} <= {file.name for file in path.iterdir()}
    svg = (path / "figure.svg").read_text()
    assert all(f"some/{name}: superposed neurons" in svg for name in ("one", "two"))


@pytest.mark.parametrize(
    ("trained", "untrained", "by_chance", "power", "verdict"),
    [
        (0.2, 0.0, 0.05, 0.9, "holds"),
        (0.2, 0.0, 0.05, 0.5, "holds"),
        (
            0.2,
            0.0,
            0.05,
            0.49,
            "inconclusive",
        ),  # a search that misses most merged neurons shows neither
        (0.05, 0.0, 0.1, 0.9, "inconclusive"),  # dealt contexts have more
        (0.05, 0.05, 0.01, 0.9, "inconclusive"),  # as many before training
        (0.0, 0.0, 0.01, 0.9, "fails"),
        (0.0, 0.0, 0.01, 0.4, "inconclusive"),  # two neurons made one are not found, either
    ],
)
def test_the_judge_of_figure_10_asks_for_more_than_chance_and_for_power(
    tmp_path, trained, untrained, by_chance, power, verdict
):
    with RunWriter.create(tmp_path, kind="exhibit", config={}, axes=fig10.AXES) as writer:
        for state, share in (("trained", trained), ("untrained", untrained)):
            counts = np.where(np.arange(100) < 100 * share, 2.0, np.arange(100) % 2)
            counts[-1] = np.nan if state == "trained" else 0.0  # not tried
            writer.write(
                0, {"patterns": np.ones(100), "passed": counts}, model="m", state=state, layer=0
            )
        chances, pairs = by_chance + np.array([-0.01, 0.0, 0.01]), np.diag([4, 3, 2, 1]) + 1
        controls = {"chance": chances, "fired_by_both": pairs, "power": power, "pairs": 200}
        writer.write(0, controls, model="m", state="trained")
    found = fig10.judge(Run(tmp_path))
    assert found.verdict == verdict
    assert "made one in pairs" in fig10.EXHIBIT.would_decide
    numbers = found.numbers["models"]["m"]
    assert numbers["superposed"] == round(100 * trained)
    assert "both fire 5, 4, 3, 2 neurons, texts of two pairs 1.0" in found.summary
    assert numbers["two patterns by chance"]["mean"] == pytest.approx(by_chance)


@pytest.mark.parametrize(
    ("raw", "centred", "verdict"),
    [
        ([0.1, 0.119], [0.1, 0.1], "holds"),
        ([0.13, 0.9], [0.1, 0.1], "holds under a condition"),
        ([0.1, 0.9], [0.1, 0.5], "holds under a condition"),
        ([0.13, 0.3], [0.1, 0.13], "fails"),
    ],
)
@pytest.mark.parametrize("dimension", [2048, 64])
def test_the_judge_of_embeddings_compares_with_random_vectors(
    tmp_path, raw, centred, verdict, dimension
):
    """With d = 64 the drift of random vectors is not small: nothing is decided."""
    run = of_models(tmp_path, {"one": (raw, centred, dimension, 64)})
    found = embeddings.judge(run)
    assert f"mean |cos| up to {max(raw):.2f} (random vectors: 0.10, one)" == found.measured
    assert found.verdict == (verdict if dimension == 2048 else "inconclusive")
    drift = found.numbers["models"]["one"]["raw"]["drift by the law"][0]
    assert drift == pytest.approx(0.5 * (64 / dimension) ** 0.5 * raw[0] / 0.1)


def of_models(folder, models):
    """A run of embeddings: model -> mean |cos| as they are, without their mean, d, and different tokens per window."""
    with RunWriter.create(folder, kind="exhibit", config={}, axes=embeddings.AXES) as writer:
        for name, (raw, centred, dimension, different) in models.items():
            writer.write(0, {"mean": [0.0, 0.0], "random": 0.1}, kind="raw", model=name)
            for kind, values in (("raw", raw), ("centred", centred)):
                writer.write(9, {"mean": values, "random": 0.1}, kind=kind, model=name)
            writer.write(9, {"inner": [0.05, 0.07]}, model=name)
            facts = {"dimension": float(dimension), "different": float(different)}
            writer.write(9, facts, model=name)
    return Run(folder)


ORTHOGONAL = ([0.1, 0.1], [0.1, 0.1])
PARALLEL = ([0.9, 0.9], [0.5, 0.5])


@pytest.mark.parametrize(
    ("models", "verdict"),
    [
        ({"a": (*ORTHOGONAL, 256, 14), "b": (*PARALLEL, 256, 64)}, "holds"),  # b decides nothing
        ({"a": (*ORTHOGONAL, 256, 14), "b": (*PARALLEL, 256, 14)}, "holds under a condition"),
        ({"a": (*PARALLEL, 1024, 64), "b": (*PARALLEL, 256, 14)}, "fails"),
        ({"a": (*ORTHOGONAL, 256, 64)}, "inconclusive"),
    ],
)
def test_models_that_decide_are_judged_together(tmp_path, models, verdict):
    assert embeddings.judge(of_models(tmp_path, models)).verdict == verdict


def test_few_random_vectors_without_their_mean_point_away_from_each_other():
    for count, dimension in ((24, 256), (1024, 64)):
        vectors = torch.randn(count, dimension, generator=torch.Generator().manual_seed(5))
        found = embedding_coherence(vectors - vectors.mean(dim=0)).mean
        assert found == pytest.approx(embeddings.random_centred(count, dimension), rel=0.06)
    assert embeddings.random_centred(24, 256) > 1.15 * random_cosine(256)
    assert embeddings.random_centred(1024, 64) == pytest.approx(random_cosine(64), rel=0.01)


def common_direction(vectors):
    """Vectors with twice the mean squared cosine, by a direction that all of them share."""
    d = vectors.shape[1]
    share = d**-0.5  # a cosine of this size adds 1/d to the mean square, as much as chance
    return (1 - share) ** 0.5 * vectors + share**0.5 * torch.randn(d) / d**0.5


def groups_of_eight(vectors):
    """Vectors with twice the mean squared cosine, by groups of which each shares a direction."""
    n, d = vectors.shape
    share = ((n - 1) / 7 / d) ** 0.5  # 7 of the n − 1 others are in the group
    directions = (torch.randn(n // 8, d) / d**0.5).repeat_interleave(8, dim=0)
    return (1 - share) ** 0.5 * vectors + share**0.5 * directions


@pytest.mark.parametrize("d", [512, 2048])
@pytest.mark.parametrize(
    ("plant", "passes"), [(None, True), (common_direction, False), (groups_of_eight, False)]
)
def test_the_bar_of_embeddings_lies_between_random_and_planted(d, plant, passes):
    """In 99 % of 300 draws of one window."""
    torch.manual_seed(0)
    below = []
    squares = []
    for _ in range(300):
        vectors = torch.randn(embeddings.CONTEXT, d) / d**0.5
        if plant is not None:
            vectors = plant(vectors)
        found = embedding_coherence(vectors)
        below.append(found.mean <= embeddings.MOST_TIMES_RANDOM * random_cosine(d))
        squares.append(d * found.rms**2)
    assert np.mean(squares) == pytest.approx(1 if passes else 2, rel=0.1)
    assert np.mean(np.array(below) == passes) >= 0.99


def test_contexts_dealt_out_at_random_are_those_of_the_layer(made, tiny):
    import joma

    found = joma.superpose(
        _series.checkpoints(tiny.path)[5],
        np.random.default_rng(0).integers(0, 300, 3000),
        length=32,
    )
    shares = found.chance(3, 0)
    assert len(shares) == 3
    assert all(0 <= share <= 1 for share in shares)


def test_public_models_are_looked_for_in_a_folder_first(tmp_path, monkeypatch):
    monkeypatch.setenv("JOMA_MODELS", str(tmp_path))
    (tmp_path / "pythia-70m" / "step1000").mkdir(parents=True)
    assert _series.located("EleutherAI/pythia-70m", "step1000") == (
        str(tmp_path / "pythia-70m" / "step1000"),
        None,
    )
    assert _series.located("EleutherAI/pythia-70m", "step2000") == (
        "EleutherAI/pythia-70m",
        "step2000",
    )
