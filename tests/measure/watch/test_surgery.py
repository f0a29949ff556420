"""A model whose modules are replaced while it is watched: the structure is found again, and the change recorded."""

from __future__ import annotations

import json
import logging
import warnings

import pytest
import torch
from torch import nn

import joma
from joma._measure.events.module_snapshot import ModuleSnapshot
from joma.models.blocks import Blocks
from tests.measure.watch.models import VOCABULARY, Block, HandWrittenGPT

D = 16


def stable_rank(w: torch.Tensor) -> float:
    sigma = torch.linalg.svdvals(w.detach().double())
    return float((sigma**2).sum() / sigma[0] ** 2)


def entropy(scores: torch.Tensor) -> list[float]:
    p = scores.double().softmax(-1)  # (B, H, T, T)
    h = -torch.where(p > 0, p * p.clamp_min(1e-300).log(), 0.0).sum(-1)
    return h.mean((0, 2)).tolist()


def tokens() -> torch.Tensor:
    return torch.randint(VOCABULARY, (2, 7), generator=torch.Generator().manual_seed(1))


def step(model: nn.Module, watch: joma.types.Watch) -> dict[str, float]:
    model(tokens()).square().mean().backward()
    return watch.step()


def changed(watch) -> list[dict]:
    return json.loads((watch.path / "run.json").read_text())["changes"]


@pytest.fixture
def model() -> HandWrittenGPT:
    torch.manual_seed(0)
    return HandWrittenGPT(layers=3)


def test_a_replaced_matrix_is_the_one_that_is_measured(model, tmp_path):
    with joma.watch(model, tmp_path / "run", every=1, live=False) as w:
        step(model, w)
        new = nn.Linear(D, 40)
        new.weight.data = torch.outer(torch.randn(40), torch.randn(D))
        model.blocks[1].mlp[0] = new
        with pytest.warns(
            UserWarning, match=r"step 2: the model was changed \(replaced: blocks.1.mlp.0\)"
        ):
            step(model, w)
        values = w.latest.values["stable_rank"].numpy()
        assert values[1] == pytest.approx(1.0)
        assert values[0] == pytest.approx(stable_rank(model.blocks[0].mlp[0].weight), rel=1e-5)
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # one notice per change
            step(model, w)
        assert changed(w) == [{"step": 2, "changes": ["replaced: blocks.1.mlp.0"]}]


def test_pruning_is_noticed_and_the_pruned_matrix_is_measured(model, tmp_path):
    with joma.watch(model, tmp_path / "run", every=1, live=False) as w:
        step(model, w)
        for block in model.blocks:
            nn.utils.prune.l1_unstructured(block.mlp[0], "weight", amount=0.7)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            step(model, w)
        torch.optim.SGD(model.parameters(), lr=10.0).step()
        step(model, w)
        for n, block in enumerate(model.blocks):
            linear = block.mlp[0]
            expected = stable_rank(linear.weight_orig * linear.weight_mask)
            assert w.latest.values["stable_rank"].numpy()[n] == pytest.approx(expected, rel=1e-5)


def test_replaced_attention_is_seen_with_its_own_heads_and_number(model, tmp_path):
    with joma.watch(model, tmp_path / "run", every=1, gauges="entropy", live=False) as w:
        step(model, w)
        model.blocks[1].attn = Block(D, 4, "sdpa", 40, 0.0).attn
        with pytest.warns(UserWarning, match="replaced: blocks.1.attn"):
            step(model, w)
        assert w.layers == [f"blocks.{n}.attn" for n in range(3)]
        table = w.latest.values["entropy"].numpy()
        for n, block in enumerate(model.blocks):
            expected = entropy(block.attn.last)
            assert table[n][: len(expected)] == pytest.approx(expected, abs=1e-5)


def test_a_block_that_is_removed_leaves_its_number_empty_and_the_others_keep_theirs(
    model, tmp_path
):
    kept = [model.blocks[0], model.blocks[2]]
    with joma.watch(model, tmp_path / "run", every=1, live=False) as w:
        step(model, w)
        del model.blocks[1]
        with pytest.warns(UserWarning, match=r"removed: blocks.2"):
            metrics = step(model, w)
        assert w.layers == [
            "blocks.0.attn",
            "blocks.1.attn (removed before step 2)",
            "blocks.1.attn",
        ]
        for number, block in zip((0, 2), kept, strict=True):
            expected = sum(entropy(block.attn.last)) / 2
            assert metrics[f"joma/entropy/layer_0{number}"] == pytest.approx(expected, abs=1e-5)
            expected = stable_rank(block.mlp[0].weight)
            assert metrics[f"joma/stable_rank/layer_0{number}"] == pytest.approx(expected, rel=1e-5)
        assert not [name for name in metrics if name.endswith("layer_01")]
        assert w.matrices == {"mlp_in": ["blocks.0.mlp.0", "blocks.1.mlp.0"]}


def test_a_block_that_is_added_gets_a_number_of_its_own(model, tmp_path):
    with joma.watch(model, tmp_path / "run", every=1, live=False) as w:
        step(model, w)
        model.blocks.append(Block(D, 2, "sdpa", 40, 0.0))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            metrics = step(model, w)
        assert changed(w)[0]["changes"][0] == "added: blocks.3"
        expected = sum(entropy(model.blocks[3].attn.last)) / 2
        assert metrics["joma/entropy/layer_03"] == pytest.approx(expected, abs=1e-5)
        assert metrics["joma/stable_rank/layer_03"] == pytest.approx(
            stable_rank(model.blocks[3].mlp[0].weight)
        )
        info = json.loads((w.path / "run.json").read_text())
        assert info["matrices"] == {"mlp_in": [f"blocks.{n}.mlp.0" for n in range(4)]}


def test_lora_injected_into_the_live_model_is_measured(model, tmp_path):
    peft = pytest.importorskip("peft")
    with joma.watch(model, tmp_path / "run", every=1, live=False) as w:
        step(model, w)
        config = peft.LoraConfig(
            r=2, lora_alpha=3, target_modules=["mlp.0"], init_lora_weights=False
        )
        peft.inject_adapter_in_model(config, model)
        with pytest.warns(UserWarning, match="the model was changed"):
            step(model, w)
        for n, block in enumerate(model.blocks):
            layer = block.mlp[0]
            acts = (
                layer.base_layer.weight
                + 1.5 * layer.lora_B["default"].weight @ layer.lora_A["default"].weight
            )
            assert w.latest.values["stable_rank"].numpy()[n] == pytest.approx(
                stable_rank(acts), rel=1e-4
            )


def test_an_mlp_that_is_taken_out_is_not_measured_any_more(model, tmp_path):
    gauges = "entropy,stable_rank,update_ratio"
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with joma.watch(
        model, tmp_path / "run", every=1, gauges=gauges, optimizer=optimizer, live=False
    ) as w:
        model(tokens()).square().mean().backward()
        optimizer.step()
        w.step()
        for block in model.blocks:
            block.mlp = nn.Identity()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model(tokens()).square().mean().backward()
            optimizer.step()
            metrics = w.step()
        assert {name.split("/")[1] for name in metrics if "layer" in name} == {"entropy"}
        assert w.matrices == {}


def test_the_matrices_are_logged_once_and_stored_in_the_run(model, tmp_path, caplog):
    with (
        caplog.at_level(logging.INFO, "joma"),
        joma.watch(model, tmp_path / "run", every=1, live=False) as w,
    ):
        step(model, w)
        step(model, w)
    assert [record.getMessage() for record in caplog.records if record.name == "joma"] == [
        "joma measures the lower MLP matrix: 3, blocks.0.mlp.0 … blocks.2.mlp.0"
    ]
    info = json.loads((w.path / "run.json").read_text())
    assert info["matrices"] == w.matrices == {"mlp_in": [f"blocks.{n}.mlp.0" for n in range(3)]}
    assert "changes" not in info


def test_a_model_that_is_moved_or_compiled_in_parts_has_not_changed(model, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with joma.watch(model, tmp_path / "run", every=1, gauges="stable_rank", live=False) as w:
            step(model, w)
            model.double().float()
            model.load_state_dict(model.state_dict(), assign=True)
            step(model, w)


def test_blocks_keep_their_numbers():
    model = HandWrittenGPT(layers=3)
    blocks = Blocks(model)
    del model.blocks[0]
    model.blocks.append(Block(D, 2, "sdpa", 40, 0.0))
    blocks.renew(model, "gone")
    assert blocks.names == ["blocks.0 (gone)", "blocks.0", "blocks.1", "blocks.2"]
    assert blocks.modules[1:] == list(model.blocks)


def test_a_look_at_an_unchanged_model_is_cheap(model):
    from timeit import repeat

    structure = ModuleSnapshot(model)
    assert not structure.has_changed()
    per_module = min(repeat(structure.has_changed, number=50, repeat=5)) / 50 / len(structure.names)
    assert per_module < 2e-5  # about 1 µs; a slow machine is not a defect


class Looking(nn.Module):
    """Attention of an inner width, in a module that nothing names."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(D, 3 * D)
        self.b = nn.Linear(3 * D, D)

    def forward(self, x):
        y = self.a(x)
        return self.b(nn.functional.scaled_dot_product_attention(y, y, y))


class Unnamed(nn.Module):
    def __init__(self, wide: bool) -> None:
        super().__init__()
        self.one = Looking()
        self.two = nn.Module()
        self.two.c = nn.Linear(D, 4 * D if wide else 2 * D)
        self.two.d = nn.Linear(self.two.c.out_features, D)

    def forward(self, x):
        x = x + self.one(x)
        return x + self.two.d(self.two.c(x).relu())


def test_maps_with_attention_between_them_are_no_mlp_though_nothing_names_them():
    x = torch.randn(2, 5, D)
    model = nn.Sequential(Unnamed(True), nn.Identity())
    with joma.watch(model, every=1, live=False) as w:
        model(x).sum().backward()
        w.step()
        assert w.matrices == {"mlp_in": ["0.two.c"]}
    model = nn.Sequential(Unnamed(False), nn.Identity())
    with joma.watch(model, every=1, live=False) as w:
        model(x).sum().backward()
        with pytest.warns(
            UserWarning, match=r"0.one.a is not the lower matrix of an MLP: in 0.one, attention"
        ):
            metrics = w.step()
        assert w.matrices == {"mlp_in": []}
        assert not [name for name in metrics if "stable_rank" in name]
    with joma.watch(model, every=1, mlp=["0.two.c"], live=False) as w:
        model(x).sum().backward()
        assert w.step()["joma/stable_rank/layer_00"] == pytest.approx(
            stable_rank(model[0].two.c.weight), rel=1e-5
        )
