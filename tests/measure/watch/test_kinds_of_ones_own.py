"""Gauges on what a user's kind reads from the model: values, layers that come and go, errors."""

import pytest
import torch
from torch import nn

import joma
from joma._measure.gauges.kinds import KINDS
from joma._measure.gauges.registry import remove


@pytest.fixture
def gain():
    def read(model):
        return {name: m.weight for name, m in model.named_modules() if isinstance(m, nn.LayerNorm)}

    kind = joma.GaugeKind("gain", receives="gains (d,)", returns="a number", read=read)
    joma.gauge("gain_sum", on=kind)(lambda gains: float(gains.sum()))
    yield kind
    remove("gain_sum")
    KINDS.pop("gain", None)


def model():
    torch.manual_seed(0)
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 64, batch_first=True), 2)


def test_a_kind_with_read_is_measured_once_per_layer(gain):
    net = model()
    with joma.watch(net, every=1, gauges="gain_sum") as w:
        net(torch.randn(2, 5, 16)).sum().backward()
        values = w.step()
    assert list(values.values()) == [16.0] * 4


def test_a_gauge_that_raises_does_not_stop_training(gain):
    joma.gauge("gain_bad", on=gain)(lambda gains: 1 / 0)
    net = model()
    try:
        with joma.watch(net, every=1, gauges=("gain_sum", "gain_bad")) as w:
            net(torch.randn(2, 5, 16)).sum().backward()
            with pytest.warns(joma.JomaWarning, match="gain_bad could not be measured"):
                values = w.step()
        assert len(values) == 4
    finally:
        remove("gain_bad")


def test_a_kind_needs_read_and_a_name_of_its_own():
    with pytest.raises(ValueError, match="needs read="):
        joma.gauge("a_gauge", on=joma.GaugeKind("mine", receives="x", returns="y"))
    taken = joma.GaugeKind("weight", receives="x", returns="y", read=dict)
    with pytest.raises(ValueError, match="has a kind 'weight' already"):
        joma.gauge("a_gauge", on=taken)
