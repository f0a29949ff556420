"""Charges of real architectures: each call is true, each law holds step by step, planted bugs are found and named."""

from collections import Counter

import pytest
import torch
from torch import nn

from joma._measure.charges.charge import Status
from joma._measure.charges.law import StepLaw
from joma._measure.charges.table import charges

from .families import FAMILIES, batch, encoder, gpt2, llama, loss_of, make


def gradient(parameter):
    return parameter.grad


def backward(family, model, generator):
    model.zero_grad()
    loss_of(family, model, batch(family, generator, next(model.parameters()).dtype)).backward()


# what each family has: kind -> status -> how many charges
EXPECTED = {
    "GPT-2": {"qk exact": 2, "key_bias exact": 2, "vo exact": 2, "mlp none": 2, "norm exact": 4, "norm none": 1,
              "sum exact": 9, "sum none": 2, "stream up to ε": 1},
    "GPT-NeoX": {"qk exact": 4, "key_bias none": 2, "vo exact": 2, "mlp none": 2, "norm exact": 5, "sum exact": 10,
                 "stream up to ε": 1},
    "Llama": {"qk exact": 2, "vo exact": 2, "mlp exact": 2, "norm exact": 5, "sum exact": 1, "sum none": 5,
              "stream up to ε": 1},
    "OPT": {"qk exact": 2, "key_bias exact": 2, "vo exact": 2, "mlp exact": 2, "norm exact": 4, "norm none": 1,
            "sum exact": 9, "sum none": 2, "stream none": 1},
    "BERT": {"qk exact": 2, "key_bias exact": 2, "vo exact": 2, "mlp none": 2, "norm exact": 1, "norm none": 3,
             "sum exact": 10, "sum none": 1, "stream up to ε": 4},
    "ViT": {"qk exact": 2, "key_bias exact": 2, "vo exact": 2, "mlp none": 2, "norm exact": 5, "sum exact": 13,
            "stream up to ε": 1},
    "nn.TransformerEncoder": {"qk exact": 2, "key_bias exact": 2, "vo exact": 2, "mlp exact": 2, "norm exact": 4,
                              "norm none": 1, "sum exact": 8, "stream none": 1},
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_what_a_family_has_is_what_its_gradients_say(family):
    model = make(family)
    known = charges(model)
    assert Counter(f"{c.kind} {c.status}" for c in known) == EXPECTED[family]
    backward(family, model, torch.Generator().manual_seed(1))
    for charge in known:
        residual = float(charge.residual(gradient).max())
        if charge.status is Status.EXACT:
            assert residual <= 1e-14, charge.name
        elif charge.status is Status.NONE:
            assert residual > 1e-6, (charge.name, charge.reason)


@pytest.mark.parametrize("family", FAMILIES)
def test_exact_charges_move_as_sgd_says_over_fifty_steps(family):
    """Q(θ₅₀) − Q(θ₀) = Σ Q(Δθ), with the steps taken from copies of the weights; what is none does not."""
    model, generator = make(family), torch.Generator().manual_seed(2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    known = [charge for charge in charges(model) if charge.sides]
    start = [charge.value() for charge in known]
    law = [torch.zeros_like(value) for value in start]
    for _ in range(50):
        backward(family, model, generator)
        earlier = {id(p): p.detach().clone() for p in model.parameters()}
        optimizer.step()
        for n, charge in enumerate(known):
            law[n] += charge.square(lambda p, earlier=earlier: p.detach() - earlier[id(p)])
    for charge, value, moved in zip(known, start, law, strict=True):
        off = float(torch.linalg.vector_norm(charge.value() - value - moved))
        size = sum(
            float(torch.linalg.vector_norm(side.parameter.detach())) for side in charge.sides
        )
        size = size if charge.form == "linear" else float(charge.size().sum())
        if charge.status is Status.EXACT:
            assert off <= 1e-14 * size, charge.name
        elif charge.status is Status.NONE:
            assert off > 1e-6 * size, (charge.name, charge.reason)


@pytest.mark.parametrize(
    "settings",
    [
        {"momentum": 0.9},
        {"momentum": 0.9, "nesterov": True},
        {"momentum": 0.8, "dampening": 0.3, "weight_decay": 0.1},
        {"weight_decay": 0.1},
    ],
)
def test_the_law_per_step_knows_momentum_decay_and_rates(settings):
    model, generator = make("GPT-2"), torch.Generator().manual_seed(3)
    queries = [p for name, p in model.named_parameters() if "c_attn" in name]
    others = [p for name, p in model.named_parameters() if "c_attn" not in name]
    groups = [{"params": queries, "lr": 0.02}, {"params": others, "lr": 0.05}]
    optimizer = torch.optim.SGD(groups, **settings)
    law = charges(model).law(optimizer)
    exact = 0
    for n in range(8):
        backward("GPT-2", model, generator)
        groups[0]["lr"] = optimizer.param_groups[0]["lr"] = 0.02 / (
            1 + n
        )  # a schedule on one of them
        law.before()
        optimizer.step()
        deviations = law.after()
        assert not deviations, "; ".join(map(str, deviations))
        exact += len(law._before)
    assert exact >= 8 * 15


@pytest.mark.parametrize("family", FAMILIES)
def test_float32_stays_within_the_bounds_stated(family):
    model, generator = make(family, torch.float32), torch.Generator().manual_seed(4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    known = charges(model)
    law = known.law(optimizer)
    for _ in range(5):
        backward(family, model, generator)
        assert not known.check_gradients()
        assert all(
            float(c.residual(gradient).max()) < 1e-5
            for c in known.conserved
            if c.kind in ("qk", "vo")
        )
        law.before()
        optimizer.step()
        assert not law.after()


# -- planted bugs ------------------------------------------------------------------------------------------


def attention_rows(model, layer=1):
    """The query columns of GPT-2's fused weight, (d, 3d): head h is columns 8h … 8h + 7."""
    return model.transformer.h[layer].attn.c_attn


class DetachedQuery(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        q, k, v = self.inner(x).chunk(3, dim=-1)
        return torch.cat([q.detach(), k, v], dim=-1)


def test_a_detached_query_is_named():
    model = make("GPT-2", torch.float32)
    known = charges(model)
    layer = model.transformer.h[1].attn
    layer.c_attn = DetachedQuery(layer.c_attn)
    backward("GPT-2", model, torch.Generator().manual_seed(1))
    found = {d.charge.name for d in known.check_gradients()}
    assert "transformer.h.1.attn.qk" in found
    assert "transformer.h.0.attn.qk" not in found
    assert all(d.value > 0.1 for d in known.check_gradients() if d.charge.kind == "qk")


def test_a_gradient_scaled_in_one_head_is_named_with_its_head():
    model = make("GPT-2", torch.float32)
    known = charges(model)
    backward("GPT-2", model, torch.Generator().manual_seed(1))
    attention_rows(model).weight.grad[:, 8:16] *= 1.5
    (found,) = (d for d in known.check_gradients() if d.charge.kind == "qk")
    assert (found.charge.name, found.head) == ("transformer.h.1.attn.qk", 1)


def test_one_matrix_stepped_twice_is_found_by_the_law_of_the_step():
    model, generator = make("GPT-2", torch.float32), torch.Generator().manual_seed(1)
    known = charges(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    law = known.law(optimizer)
    backward("GPT-2", model, generator)
    assert not known.check_gradients()  # the gradients are fine
    law.before()
    optimizer.step()
    output = model.transformer.h[0].attn.c_proj.weight
    with torch.no_grad():
        output -= 0.1 * output.grad
    assert "transformer.h.0.attn.vo" in {d.charge.name for d in law.after()}


def test_a_forgotten_zero_grad_is_a_small_deviation():
    """B(θ₂, g₁ + g₂) = B(Δθ, g₁) = −lr Q(g₁): of second order, found in float64 by its size."""
    model, generator = make("GPT-2"), torch.Generator().manual_seed(1)
    known = charges(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = [batch("GPT-2", generator) for _ in range(2)]
    loss_of("GPT-2", model, data[0]).backward()
    optimizer.step()
    loss_of("GPT-2", model, data[1]).backward()
    found = [d for d in known.check_gradients() if d.charge.kind == "qk"]
    assert found
    assert all(1e-8 < d.value < 1e-1 for d in found)


@pytest.mark.parametrize(
    "bug", ["q and k scaled alike", "everything stepped twice", "a wrong loss"]
)
def test_what_no_charge_can_see_is_not_claimed(bug):
    model, generator = make("GPT-2"), torch.Generator().manual_seed(1)
    known = charges(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    if bug == "q and k scaled alike":
        for block in model.transformer.h:
            block.attn.scaling = 3.0
    inputs, targets = batch("GPT-2", generator)
    loss = loss_of("GPT-2", model, (inputs, targets.flip(0) if bug == "a wrong loss" else targets))
    loss.backward()
    assert not known.check_gradients()
    law = known.law(optimizer)
    for _ in range(2 if bug == "everything stepped twice" else 1):
        law.before()
        optimizer.step()
        assert bug == "everything stepped twice" or not law.after()


def test_any_optimiser_and_clipping_by_the_global_norm_keep_the_identity():
    model, generator = make("Llama", torch.float32), torch.Generator().manual_seed(5)
    known = charges(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(5):
        backward("Llama", model, generator)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        assert not known.check_gradients()
        optimizer.step()
    for parameter in model.parameters():
        torch.nn.utils.clip_grad_norm_([parameter], 1e-3)
    assert {d.charge.kind for d in known.check_gradients()} >= {"qk", "vo", "norm"}
    with pytest.raises(TypeError, match=r"not for AdamW.*check_gradients"):
        StepLaw(known, optimizer)


def test_a_loss_that_normalisation_pins_raises_no_alarm():
    """The mean square of a LayerNorm's output hardly depends on what is below: gradients there are mostly rounding."""
    for seed in range(3):
        torch.manual_seed(seed)
        model = encoder()
        known = charges(model)
        model(torch.randn(4, 10, 16)).square().mean().backward()
        assert not known.check_gradients()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        law = known.law(optimizer)
        law.before()
        optimizer.step()
        assert not law.after()


# -- facts that decide -------------------------------------------------------------------------------------


def statuses(model, kind, **options):
    return {str(c.status) for c in charges(model, **options) if c.kind == kind}


def test_dropout_after_a_writer_makes_the_mean_seen():
    layer = nn.TransformerEncoderLayer(16, 2, 24, dropout=0.1, norm_first=True)
    model = nn.TransformerEncoder(layer, 1, norm=nn.LayerNorm(16), enable_nested_tensor=False)
    assert statuses(model, "sum") == {"none"}
    assert statuses(model, "qk") == {"exact"}


def test_a_frozen_side_takes_the_charge_away():
    model = gpt2()
    model.transformer.h[0].mlp.c_proj.requires_grad_(False)
    model.transformer.h[0].attn.c_proj.requires_grad_(False)
    (vo,) = (c for c in charges(model) if c.name == "transformer.h.0.attn.vo")
    assert (vo.status, "frozen" in vo.reason) == (Status.NONE, True)


def test_post_norm_has_its_channels_taken_and_a_stream_per_sublayer():
    model = encoder(norm_first=False)
    assert statuses(model, "norm") == {"none"}
    streams = [c for c in charges(model) if c.kind == "stream"]
    assert [str(c.status) for c in streams] == ["none", "up to ε", "up to ε", "up to ε"]


class PlainAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.proj, self.heads = nn.Linear(16, 48), nn.Linear(16, 16), 2


class Plain(nn.Module):
    """A hand-written block in which nothing tells where the normalisation stands."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Module()])
        block = self.blocks[0]
        block.attn = PlainAttention()
        block.ln1, block.ln2 = nn.LayerNorm(16), nn.LayerNorm(16)
        block.mlp = nn.Sequential(nn.Linear(16, 24), nn.GELU(), nn.Linear(24, 16))


def test_where_a_normalisation_stands_must_be_said_of_an_unknown_model():
    model = Plain()
    assert statuses(model, "qk") == statuses(model, "vo") == {"exact"}
    (reason,) = {c.reason for c in charges(model) if c.kind == "norm"}
    assert "norm='pre'" in reason
    assert statuses(model, "norm", norm="pre") == {"exact"}


def test_a_model_without_attention_is_refused():
    with pytest.raises(ValueError, match="no attention was found in Linear"):
        charges(nn.Linear(3, 3))


def test_a_model_on_the_meta_device_has_calls_but_no_values():
    with torch.device("meta"):
        model = llama()
    frame = charges(model).to_frame()
    assert set(frame["status"]) == {"exact", "none", "up to ε"}
    assert frame["balance"].isna().all()


def test_the_table():
    known = charges(make("Llama"))
    frame = known.to_frame()
    row = frame.set_index("name").loc["model.layers.0.self_attn.vo"]
    assert (row["layer"], row["numbers"], row["status"]) == (0, 2 * 4 * 5 // 2, "exact")
    assert 0 <= row["balance"] < 1
    assert "rotary" in str(known)
