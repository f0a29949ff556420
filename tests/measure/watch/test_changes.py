"""Gauges of gradients and updates: those of the very step, of the matrices named, and nothing kept between steps."""

import warnings

import pytest
import torch
from torch import nn

import joma
from joma._measure.watch.meters import ChangeMeter
from tests.measure.watch.models import meter_of

GAUGES = ("gradient_norm", "gradient_rank", "update_ratio", "update_rank")


def encoder(layers=2):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)


def stable_rank(w):
    s = torch.linalg.svdvals(w.double())
    return float((s**2).sum() / s[0] ** 2)


def train(model, optimizer, watch, steps, clip=None):
    """Steps; the gradients (of the part ``weight`` looks at) and the weights before and after the last of them."""
    for step in range(steps):
        torch.manual_seed(step)
        optimizer.zero_grad()
        (model(torch.randn(3, 5, 8)) - torch.randn(3, 5, 8)).square().mean().backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        gradients = {
            name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None
        }
        optimizer.step()
        watch.step()
    return gradients, before, {name: p.detach() for name, p in model.named_parameters()}


@pytest.mark.parametrize(
    ("part", "rows"),
    [("", ("linear1.weight", slice(None))), (".k", ("self_attn.in_proj_weight", slice(8, 16)))],
)
def test_they_are_those_of_the_gradient_used_and_the_step_made(part, rows):
    model = encoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with joma.watch(
        model, every=2, gauges=[gauge + part for gauge in GAUGES], optimizer=optimizer
    ) as w:
        gradients, before, after = train(model, optimizer, w, 4, clip=0.01)
    frame = w.frame()
    values = frame[frame.step == 4].set_index(["gauge", "layer"]).value
    for layer in range(2):
        name = f"layers.{layer}.{rows[0]}"
        g, w0, w1 = (x[name][rows[1]] for x in (gradients, before, after))
        assert values[f"gradient_norm{part}", layer] == pytest.approx(float(g.norm()), rel=1e-6)
        assert values[f"gradient_rank{part}", layer] == pytest.approx(stable_rank(g), rel=1e-5)
        assert values[f"update_ratio{part}", layer] == pytest.approx(
            float((w1 - w0).norm() / w0.norm()), rel=1e-5
        )
        assert values[f"update_rank{part}", layer] == pytest.approx(stable_rank(w1 - w0), rel=1e-4)


def test_nothing_is_kept_between_steps_and_steps_between_measurements_cost_nothing():
    model = encoder(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with joma.watch(model, every=3, gauges=GAUGES, optimizer=optimizer) as w:
        train(model, optimizer, w, 2)
        meter = meter_of(w, ChangeMeter)
        assert not meter._before
        assert not meter._values
    assert set(w.frame().step) == {1}


def test_a_matrix_that_is_not_stepped_is_nan_with_the_reason():
    model = encoder()
    optimizer = torch.optim.SGD(model.layers[1].parameters(), lr=0.1)
    with warnings.catch_warnings(record=True) as record:
        warnings.simplefilter("always")
        with joma.watch(
            model, every=1, gauges=["gradient_norm", "update_ratio"], optimizer=optimizer
        ) as w:
            train(model, optimizer, w, 1)
    said = [str(warning.message) for warning in record]
    assert any(
        "layers.0.linear1 (gradient_norm): no optimiser that is watched" in message
        for message in said
    )
    frame = w.frame()
    values = frame[frame.gauge.isin(["gradient_norm", "update_ratio"])]
    assert values[values.layer == 0].value.isna().all()
    assert values[values.layer == 1].value.gt(0).all()


def test_a_fused_optimiser_that_unscales_by_itself_has_the_unscaled_norm():
    model = encoder(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    with joma.watch(model, every=1, gauges="gradient_norm", optimizer=optimizer) as w:
        optimizer.grad_scale, optimizer.found_inf = (
            torch.tensor(2.0**10),
            torch.tensor(0.0),
        )  # as GradScaler does it
        gradients, _, _ = train(model, optimizer, w, 1)
    frame = w.frame()
    norm = float(gradients["layers.0.linear1.weight"].norm())
    assert frame[frame.gauge == "gradient_norm"].value.item() == pytest.approx(
        norm / 2**10, rel=1e-6
    )


def test_what_they_need_is_said():
    with pytest.raises(
        ValueError, match=r"gradient_rank is measured around an optimiser's step: give optimizer=…"
    ):
        joma.watch(encoder(), gauges="gradient_rank")
    with pytest.raises(
        ValueError, match="there is no part 'qk' of the gauge 'update_rank'; parts are mlp_in"
    ):
        joma.watch(encoder(), gauges="update_rank.qk")
