"""Layers trained one by one, and MLPs without an activation."""

import copy

import pytest
import torch

from joma._train.language import train
from joma._train.model import LanguageModel
from joma._train.settings import Settings
from joma._train.step import Stepper


def moved(before, after):
    return {
        name
        for name, value in after.state_dict().items()
        if not torch.equal(value, before.state_dict()[name])
    }


def test_a_step_of_one_layer_moves_nothing_else():
    torch.manual_seed(0)
    model = LanguageModel(30, layers=2, d=8, hidden=12, dropout=0.0)
    stepper, tokens = Stepper(model, lr=1e-2, clip=0.5), torch.randint(30, (4, 6))
    for layer in (1, 0, 1):
        before = copy.deepcopy(model)
        stepper.step(tokens, tokens, layer)
        names = moved(before, model)
        assert names
        assert all(name.startswith(f"encoder.layers.{layer}.") for name in names)
    before = copy.deepcopy(model)
    stepper.step(tokens, tokens)
    assert {"embed.weight", "decoder.weight"} <= moved(before, model)


def test_clipping_counts_the_layer_that_is_trained():
    torch.manual_seed(0)
    model = LanguageModel(30, layers=2, d=8, hidden=12, dropout=0.0)
    stepper, tokens = Stepper(model, lr=1e-2, clip=1e-3), torch.randint(30, (4, 6))
    seen = []
    stepper._update = lambda square_norm: seen.append(float(square_norm))
    stepper.step(tokens, tokens, 0)
    stepper.gradients(tokens, tokens)
    own = sum(float(p.grad.square().sum()) for p in model.encoder.layers[0].parameters())
    assert seen == [pytest.approx(own, rel=1e-5)]


def test_a_layerwise_run_trains_from_the_bottom(tmp_path, monkeypatch):
    monkeypatch.setenv("JOMA_CACHE", str(tmp_path / "cache"))
    trained = []
    step = Stepper.step

    def told(self, tokens, targets, layer=None):
        trained.append(layer)
        return step(self, tokens, targets, layer)

    monkeypatch.setattr(Stepper, "step", told)
    settings = Settings(
        vocabulary=60,
        layers=2,
        width=8,
        hidden=8,
        steps=5,
        every=5,
        layerwise=True,
        valid_windows=1,
    )
    train(settings, tmp_path / "run", say=lambda line: None)
    assert trained == [0, 0, 0, 1, 1]


def test_a_linear_mlp_is_one_matrix():
    torch.manual_seed(0)
    model = LanguageModel(30, layers=1, d=8, hidden=12, dropout=0.0, activation="linear").eval()
    layer, x = model.encoder.layers[0], torch.randn(2, 3, 8)
    with torch.no_grad():
        both = layer.linear2.weight @ layer.linear1.weight
        bias = layer.linear2.weight @ layer.linear1.bias + layer.linear2.bias
        torch.testing.assert_close(layer._ff_block(x), x @ both.T + bias)
