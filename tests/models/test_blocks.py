"""One numbering of blocks: hybrids, mixtures of experts, encoder-decoders, stages, lists inside of lists."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import joma
from joma.models.blocks import Blocks
from tests.measure.watch.models import HandWrittenAttention, ManyHeads


class MLP(nn.Module):
    def __init__(self, d: int = 8) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(d, 3 * d), nn.Linear(3 * d, d)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


class Block(nn.Module):
    """A block of a hybrid: attention or another mixer; one MLP, or experts and a shared one, or none."""

    def __init__(self, attention: bool, experts: int) -> None:
        super().__init__()
        self.mixer = HandWrittenAttention(8, 2, "sdpa") if attention else nn.Linear(8, 8)
        self.experts = nn.ModuleList(MLP() for _ in range(experts))
        if experts > 1:
            self.shared = MLP()

    def forward(self, x):
        x = x + self.mixer(x)
        for expert in self.experts:
            x = x + expert(x)
        return x


class Hybrid(nn.Module):
    def __init__(self, kinds) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Block(*kind) for kind in kinds)
        self.classifier = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.classifier(x)


def test_a_hybrid_with_experts_has_the_same_numbers_in_all_gauges():
    kinds = [(False, 1), (True, 3), (False, 0), (True, 1)]
    model = Hybrid(kinds)
    gauges = ("entropy", "coherence", "stable_rank", "stable_rank.qk")
    model.layers[1].mixer.n_heads = model.layers[3].mixer.n_heads = 2
    with joma.watch(model, every=1, gauges=gauges) as w:
        model(torch.randn(2, 5, 8))
        metrics = w.step(loss=1.0)
        table = w.frame()
    assert w.layers == ["layers.0", "layers.1.mixer", "layers.2", "layers.3.mixer"]
    numbers = {
        gauge: sorted({int(n) for n in table[table.gauge == gauge].layer})
        for gauge in (*gauges, "phase")
    }
    attends = [1, 3]
    assert numbers == {
        "entropy": attends, "coherence": attends, "stable_rank.qk": attends, "phase": attends,
        "stable_rank": [0, 1, 3, 4],  # the shared expert is a second MLP of its block
    }  # fmt: skip
    assert set(metrics) == {
        *(
            f"joma/{gauge}/layer_0{n}"
            for gauge in ("entropy", "coherence", "stable_rank.qk")
            for n in attends
        ),
        *(f"joma/stable_rank/layer_0{n}" for n in (0, 1, 3, 4)),
    }
    ranks = table[(table.gauge == "stable_rank") & (table.layer == 1)].sort_values("expert")
    assert ranks.expert.tolist() == [0, 1, 2]
    assert set(ranks["module"]) == {"layers.1.experts.*.up"}
    for expert, value in zip(model.layers[1].experts, ranks["value"], strict=True):
        sigma = torch.linalg.svdvals(expert.up.weight.detach().double())
        assert value == pytest.approx(float((sigma**2).sum() / sigma[0] ** 2), rel=1e-6)
    assert metrics["joma/stable_rank/layer_01"] == pytest.approx(ranks["value"].mean())
    assert set(table[(table.gauge == "stable_rank") & (table.layer == 4)]["module"]) == {
        "layers.1.shared.up"
    }


class Stage(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(True, 1) for _ in range(2))


@pytest.mark.parametrize(
    ("model", "names"),
    [
        (nn.Transformer(8, 2, 1, 1, 16, batch_first=True), ["encoder.layers.0", "decoder.layers.0"]),
        (nn.ModuleDict({"stages": nn.ModuleList([Stage(), Stage()])}),
         [f"stages.{n}.blocks.{m}" for n in range(2) for m in range(2)]),
        (nn.Sequential(ManyHeads(8, 2), nn.LayerNorm(8), ManyHeads(8, 2)), ["0", "2"]),
        (nn.Sequential(nn.Embedding(5, 8), nn.ModuleDict({"layers": nn.ModuleList([Block(True, 1), Block(True, 1)])})),
         ["1.layers.0", "1.layers.1"]),
        (nn.MultiheadAttention(8, 2), []),
    ],
    ids=["encoder-decoder", "stages", "list without MLPs", "list inside of a list", "no list"],
)  # fmt: skip
def test_which_modules_are_blocks(model, names):
    assert Blocks(model).names == names
