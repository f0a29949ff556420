"""The recipe of docs/watch-reference.md: QK-clip, driven by the largest logits that a watch measures."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

import joma
from tests.measure.watch.models import VOCABULARY, HandWrittenGPT

PAGE = Path(__file__).parents[3] / "docs" / "watch-reference.md"


class GPT(HandWrittenGPT):
    """With learned positions, so that attention can tell equal tokens apart."""

    def __init__(self) -> None:
        super().__init__("sdpa", d=32, heads=4)
        self.positions = nn.Parameter(torch.randn(24, 32))

    def forward(self, tokens):
        x = self.embed(tokens) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def train(rate, clip, steps=80):
    """Alerts, mean entropy at the end and the mean of the last ten losses, on words that come back after three."""
    torch.manual_seed(0)
    model = GPT()
    fast = {p for block in model.blocks for p in block.attn.qkv.parameters()}
    slow = [p for p in model.parameters() if p not in fast]
    optimizer = torch.optim.Adam([{"params": list(fast), "lr": rate}, {"params": slow, "lr": 1e-2}])
    losses = []
    watch = joma.watch(model, every=1, gauges=("entropy", "max_logit"))
    for _ in range(steps):
        tokens = torch.randint(VOCABULARY, (16, 3)).repeat(1, 8)
        loss = functional.cross_entropy(
            model(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        watch.step(loss=loss)
        losses.append(float(loss.detach()))
        if clip is not None:
            clip([block.attn for block in model.blocks], watch.latest.values["max_logit"])
    return watch.alerts, float(watch.latest.values["entropy"].mean()), sum(losses[-10:]) / 10


@pytest.mark.filterwarnings("ignore:.*(logit growth|collapse):UserWarning")
def test_qk_clip_keeps_a_model_healthy_at_a_rate_at_which_it_otherwise_collapses():
    recipe = {}
    exec(
        re.search(r'title="qk_clip.py"\n(.*?)```', PAGE.read_text(encoding="utf-8"), re.DOTALL)[1],
        recipe,
    )
    alerts, entropy, stuck = train(0.3, None)
    assert {"logit growth", "collapse"} <= {alert.kind for alert in alerts}
    assert entropy < 0.05
    alerts, entropy, clipped = train(0.3, recipe["qk_clip"])
    assert not alerts
    assert entropy > 0.3
    assert clipped < stuck / 2
    print(f"loss {stuck:.2f} without, {clipped:.2f} with")
