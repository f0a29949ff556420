"""The residual stream, hidden neurons and routers: against what the model itself computes."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import joma
from joma._measure.gauges.stream import (
    Routing,
    Stream,
    active_neurons,
    dead_neurons,
    massive_activation,
    router_load,
)
from tests.measure.watch.models import LENGTH, VOCABULARY, HandWrittenGPT

GAUGES = (
    "stream_rms",
    "massive_activation",
    "attention_share",
    "mlp_share",
    "active_neurons",
    "dead_neurons",
)


def rms(x):
    return float(x.detach().double().square().mean().sqrt())


def by_hand(model, tokens, real=None):
    """Of each block: the stream after it, what attention and MLP wrote, its hidden neurons; of real tokens (n, …)."""
    keep = torch.ones(tokens.shape, dtype=torch.bool) if real is None else real
    x, blocks = model.embed(tokens), []
    for block in model.blocks:
        a = block.attn(block.ln1(x))
        hidden = block.mlp[1](block.mlp[0](block.ln2(x + a)))
        m = block.mlp[2](hidden)
        x = x + a + m
        blocks.append([y.detach()[keep] for y in (x, a, m, hidden)])
    return blocks


@pytest.mark.parametrize("padded", [False, True])
def test_stream_and_neurons_of_all_real_tokens(padded):
    torch.manual_seed(0)
    model = HandWrittenGPT("sdpa")
    with torch.no_grad():
        model.blocks[0].mlp[0].weight[:7] = 0  # dead: gelu(0) = 0
        model.blocks[0].mlp[0].bias[:7] = 0
    batches = [torch.randint(VOCABULARY, (2, LENGTH)) for _ in range(2)]
    real = torch.rand(2, LENGTH) < 0.6 if padded else None
    with joma.watch(model, gauges=("entropy", *GAUGES), padding=lambda args, kwargs: real) as w:
        for tokens in batches:
            model(tokens).sum().backward()
        model.eval()
        with torch.no_grad():
            model(batches[0])  # validation is left out
        metrics = w.step()
    parts = [by_hand(model, tokens, real) for tokens in batches]
    for n in range(2):
        states, attention, mlp, hidden = ([part[n][which] for part in parts] for which in range(4))
        expected = {
            "stream_rms": sum(map(rms, states)) / 2,
            "massive_activation": max(float(x.abs().max() / x.abs().median()) for x in states),
            "attention_share": sum(rms(a) / rms(x) for a, x in zip(attention, states, strict=True))
            / 2,
            "mlp_share": sum(rms(m) / rms(x) for m, x in zip(mlp, states, strict=True)) / 2,
            "active_neurons": sum(float((h.abs() > 0.1 * rms(h)).double().mean()) for h in hidden)
            / 2,
            "dead_neurons": sum(
                float((h.abs() <= 0.1 * rms(h)).all(0).double().mean()) for h in hidden
            )
            / 2,
        }
        for gauge, value in expected.items():
            assert metrics[f"joma/{gauge}/layer_0{n}"] == pytest.approx(value, rel=1e-5), gauge
    assert float(w.latest.values["dead_neurons"][0]) >= 7 / 40


def test_closed_forms():
    x = torch.ones(10, 8)
    x[3, 2] = -500.0
    assert massive_activation(Stream(x)) == 500.0
    assert massive_activation(Stream(torch.zeros(3, 3))) is None  # not defined, and not infinite
    assert math.isnan(massive_activation(Stream(torch.full((3, 3), math.nan))))
    neurons = torch.tensor([[1.0, 0.0, 0.0], [0.0, 0.0, 0.0], [0.0, -1.0, 0.001]])
    assert active_neurons(neurons) == pytest.approx(2 / 9)
    assert dead_neurons(neurons) == pytest.approx(1 / 3)
    balanced, one = torch.arange(8)[:, None] % 4, torch.zeros(8, 1, dtype=torch.long)
    assert router_load(Routing(torch.zeros(8, 4), balanced)) == 1.0
    assert router_load(Routing(torch.zeros(8, 4), one)) == 4.0


def test_an_encoder_of_pytorch():
    """Its attention does not call its own output projection as a module."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 40, dropout=0.0, batch_first=True, norm_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    x = torch.randn(3, 6, 16)
    with joma.watch(model, gauges=GAUGES) as w:
        model(x).sum().backward()
        metrics = w.step()
    first = model.layers[0]
    normed = first.norm1(x)
    a = first.self_attn(normed, normed, normed)[0]
    y = first(x)
    assert metrics["joma/attention_share/layer_00"] == pytest.approx(rms(a) / rms(y), rel=1e-5)
    assert metrics["joma/mlp_share/layer_00"] == pytest.approx(rms(y - x - a) / rms(y), rel=1e-4)


def test_rank_of_hidden_states():
    torch.manual_seed(0)
    model = HandWrittenGPT("sdpa")
    with torch.no_grad():
        model.embed.weight[:] = torch.randn(VOCABULARY, 1) * torch.randn(16)  # on a line
    with joma.watch(model, gauges="hidden_rank") as w:
        model(torch.randint(VOCABULARY, (2, LENGTH))).sum().backward()
        metrics = w.step()
    assert metrics["joma/hidden_rank/layer_00"] == pytest.approx(1.0, abs=1e-3)
    assert metrics["joma/hidden_rank/layer_01"] > 1.5


class Router(nn.Module):
    def __init__(self, d, experts, k):
        super().__init__()
        self.linear, self.top_k = nn.Linear(d, experts, bias=False), k

    def forward(self, x):
        logits = self.linear(x.flatten(0, -2))
        scores, chosen = logits.softmax(-1).topk(self.top_k, dim=-1)
        return logits, scores, chosen


class Mixture(nn.Module):
    """Experts of two layers each; says what it routed."""

    def __init__(self, d, hidden, experts, k):
        super().__init__()
        self.gate = Router(d, experts, k)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(d, hidden), nn.GELU(), nn.Linear(hidden, d))
            for _ in range(experts)
        )

    def forward(self, x):
        self.last, scores, chosen = self.gate(x)
        flat = x.flatten(0, -2)
        y = sum(
            (scores * (chosen == n)).sum(-1, keepdim=True) * expert(flat)
            for n, expert in enumerate(self.experts)
        )
        self.chosen = chosen
        return y.view_as(x)


def test_routers_and_experts():
    torch.manual_seed(0)
    model = HandWrittenGPT("sdpa")
    for block in model.blocks:
        block.mlp = Mixture(16, 20, 5, 2)
    tokens = torch.randint(VOCABULARY, (2, LENGTH))
    with joma.watch(model, gauges=("router_entropy", "router_load", "mlp_share")) as w:
        model(tokens).sum().backward()
        metrics = w.step()
    for n, block in enumerate(model.blocks):
        p = block.mlp.last.detach().double().softmax(-1)
        entropy = float(-(p * p.log()).sum(-1).mean()) / math.log(5)
        assert metrics[f"joma/router_entropy/layer_0{n}"] == pytest.approx(entropy, rel=1e-6)
        load = torch.bincount(block.mlp.chosen.flatten(), minlength=5)
        assert metrics[f"joma/router_load/layer_0{n}"] == pytest.approx(
            5 * float(load.max()) / (2 * 2 * LENGTH)
        )
        assert metrics[f"joma/mlp_share/layer_0{n}"] > 0
    with pytest.raises(
        ValueError, match="router_load is measured on routers of experts, and none were found"
    ):
        joma.watch(HandWrittenGPT("sdpa"), gauges="router_load")


@pytest.mark.filterwarnings("ignore:joma.watch")
def test_activations_that_are_not_numbers_show_and_do_not_stop_the_training():
    model = HandWrittenGPT("sdpa")
    with torch.no_grad():
        model.blocks[1].mlp[2].bias[0] = math.nan
    with joma.watch(model, gauges=("entropy", *GAUGES)) as w:
        model(torch.randint(VOCABULARY, (2, LENGTH))).sum().backward()
        w.step()
    assert w.latest.values["stream_rms"].isnan().tolist() == [False, True]
    assert w.latest.values["massive_activation"].isnan().tolist() == [False, True]


def test_training_is_bitwise_the_same_with_every_gauge():
    """Watched with every gauge that there is, and not watched."""
    ends = []
    everything = [g.name for g in joma.gauges().values() if g.on not in ("router", "change")]
    for watched in (False, True):
        torch.manual_seed(0)
        model = HandWrittenGPT("sdpa", dropout=0.1)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
        w = joma.watch(model, every=1, gauges=everything, optimizer=optimizer) if watched else None
        for step in range(6):
            optimizer.zero_grad()
            tokens = torch.randint(
                VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(step)
            )
            loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
            loss.backward()
            optimizer.step()
            if w is not None:
                assert len(w.step(loss)) > 40
        if w is not None:
            w.close()
        ends.append([p.detach().clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))
