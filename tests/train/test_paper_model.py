"""The paper's model to the letter: its start, the authors' own figures at step 0, and PyTorch's tutorial loop."""

import math
import os
import random

import numpy as np
import pytest
import torch

from joma._data.corpora import corpus
from joma._train.language import authors_sequence, train
from joma._train.model import LanguageModel
from joma._train.settings import Settings
from joma._train.windows import epoch, streams, window

from .tutorial import TutorialModel, batchify, train_tutorial

WIKITEXT = os.environ.get("JOMA_DATA", "")
# attention entropy at step 0 by the authors' seed, in nats, layer by layer, on the sequence that they stored
AUTHORS = {
    1: (2.495, 2.545, 2.553, 2.567, 2.585),
    2: (2.495, 2.531, 2.553, 2.578, 2.598),
    3: (2.542, 2.564, 2.574, 2.590, 2.603),
}


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("JOMA_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def layer_weights(model):
    return [list(layer.parameters()) for layer in model.encoder.layers]


def test_the_start_is_the_tutorials_to_the_bit():
    torch.manual_seed(3)
    model = LanguageModel(90, layers=3, d=24, hidden=40, heads=2, dropout=0.2)
    torch.manual_seed(3)
    tutorial = TutorialModel(90, d=24, heads=2, hidden=40, layers=3, dropout=0.2)
    pairs = [
        (model.encoder, tutorial.transformer_encoder),
        (model.embed, tutorial.encoder),
        (model.decoder, tutorial.decoder),
    ]
    for ours, theirs in pairs:
        for (name, mine), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
            assert torch.equal(mine, other), name


def test_bounds_of_the_start():
    torch.manual_seed(0)
    model = LanguageModel(500, layers=2, d=100, hidden=60, init=0.07)
    layer = model.encoder.layers[1]
    bounds = {
        layer.linear1.weight: 1 / math.sqrt(100),  # uniform within ± 1/√fan_in
        layer.linear1.bias: 1 / math.sqrt(100),
        layer.linear2.weight: 1 / math.sqrt(60),
        layer.self_attn.out_proj.weight: 1 / math.sqrt(100),
        layer.self_attn.in_proj_weight: math.sqrt(6 / (100 + 300)),  # Xavier's
        model.embed.weight: 0.07,
        model.decoder.weight: 0.07,
    }
    for weight, bound in bounds.items():
        largest = float(weight.detach().abs().max())
        assert largest <= bound
        assert largest > bound * (
            1 - 8 / weight.numel()
        )  # the largest of n uniform numbers is 1 − 1/n of the bound
    assert not model.decoder.bias.any()


@pytest.mark.parametrize(
    ("start", "equal"), [("copied", True), ("apart", False), ("xavier", False)]
)
def test_layers_are_copies_of_one_unless_asked_otherwise(start, equal):
    torch.manual_seed(0)
    first, second = layer_weights(LanguageModel(50, layers=2, d=16, hidden=16, start=start))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True)) is equal
    torch.manual_seed(0)
    model = LanguageModel(50, layers=2, d=64, hidden=16, start=start)
    widest = max(float(layer.linear1.weight.detach().abs().max()) for layer in model.encoder.layers)
    assert (widest > 1 / math.sqrt(64)) is (start == "xavier")  # √(6/(64 + 16)) against 1/8


def test_the_authors_sequence():
    assert authors_sequence(np.arange(10 * 4000 + 7)).tolist() == [list(range(3500, 3535))]
    with pytest.raises(
        ValueError,
        match=r"window 100 of 10 streams, and this validation text of 30000 tokens has 85",
    ):
        authors_sequence(np.arange(30_000))


@pytest.mark.skipif(not WIKITEXT, reason="WikiText-2 is looked for in $JOMA_DATA")
def test_the_authors_entropies_at_step_0():
    text = corpus("wikitext-2")
    assert text.size == 28_782
    sequence = authors_sequence(text.valid)
    for seed, expected in AUTHORS.items():
        torch.manual_seed(seed + 2)
        model = LanguageModel(text.size, layers=5)
        # the tutorial's code reads the attention, since it needs nothing of joma's
        reader = TutorialModel(1, d=200, heads=1, hidden=200, layers=5, dropout=0.2)
        reader.transformer_encoder.load_state_dict(model.encoder.state_dict())
        reader.encoder = model.embed
        assert reader.entropies(sequence.T) == pytest.approx(expected, abs=0.0005)


def test_a_short_window_ends_the_epoch():
    data = streams(np.arange(2 * 12), 2)  # 12 rows: windows of 4, 4 and 3 tokens
    assert epoch(data, 4) == 2
    assert epoch(data, 4, short=True) == 3
    inputs, targets = window(data, 2, 4, short=True)
    assert inputs.tolist() == [[8, 9, 10], [20, 21, 22]]
    assert targets.tolist() == [[9, 10, 11], [21, 22, 23]]
    assert window(data, 3, 4, short=True)[0].tolist() == window(data, 0, 4)[0].tolist()
    assert epoch(streams(np.arange(2 * 9), 2), 4, short=True) == 2  # nothing is left over


SMALL = {"layers": 2, "width": 24, "hidden": 24, "heads": 1, "length": 12, "batch": 4, "lr": 1e-3, "dropout": 0.0,
         "every": 1, "threads": 1, "seed": 3, "gauges": ("entropy", "stable_rank")}  # fmt: skip


@pytest.mark.parametrize("letter", [False, True], ids=["defaults", "new Adam and short window"])
def test_steps_are_those_of_the_tutorial_loop(tmp_path, letter):
    """25 steps, over the end of an epoch: losses, entropy of the probe, stable rank."""
    choose = random.Random(0)
    (tmp_path / "text.txt").write_text(
        "\n".join(f"w{int(choose.paretovariate(1.0)) % 150}" for _ in range(730))
    )
    options = {"fresh_adam": letter, "short_window": letter}
    settings = Settings(
        **SMALL,
        **options,
        data=str(tmp_path / "text.txt"),
        steps=25,
        probe_windows=1,
        valid_windows=0,
    )
    run = train(settings, tmp_path / "run", say=lambda line: None)

    text = corpus(str(tmp_path / "text.txt"))
    data, valid = batchify(text.train, 4), batchify(text.valid, 4)
    assert epoch(streams(text.train, 4), 12) < 25  # a second epoch has begun
    assert (len(data) - 1) % 12  # and there is a short window
    torch.manual_seed(3)
    model = TutorialModel(text.size, d=24, heads=1, hidden=24, layers=2, dropout=0.0)
    tutorial = train_tutorial(model, data, valid[:12], steps=25, length=12, lr=1e-3, **options)

    frame = run.frame()
    losses = frame[frame.gauge == "loss"].sort_values("step").value.to_list()
    assert losses == pytest.approx(tutorial.losses, abs=1e-4)
    for gauge, theirs in (("entropy", tutorial.entropies), ("stable_rank", tutorial.stable_ranks)):
        for step, expected in theirs.items():
            rows = frame[(frame.gauge == gauge) & (frame.step == step)].sort_values("layer")
            assert rows.value.to_list() == pytest.approx(expected, abs=1e-3), (gauge, step)
    valid_loss = frame[(frame.gauge == "valid_loss") & (frame.step == 25)].value.item()
    assert valid_loss == pytest.approx(all_windows_loss(model, valid, short=letter), abs=1e-4)


@torch.no_grad()
def all_windows_loss(model, data, *, short):
    """The mean over the tokens of all windows, as the authors' `evaluate` has it."""
    model.eval()
    total = count = 0
    for i in range(0, len(data) - 1, 12):
        T = min(12, len(data) - 1 - i)
        if T == 12 or short:
            losses = torch.nn.functional.cross_entropy(
                model(data[i : i + T]).flatten(0, 1),
                data[i + 1 : i + 1 + T].reshape(-1),
                reduction="sum",
            )
            total, count = total + float(losses), count + data[i : i + T].numel()
    return total / count
