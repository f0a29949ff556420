"""The clock τ = Σ lr in a watch: from the optimiser or as told, in the table, in a resumed run; right or not known."""

import math

import pytest
import torch
from torch import nn

import joma

pytestmark = pytest.mark.filterwarnings("error:joma.watch")


def encoder():
    torch.manual_seed(0)
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True), 1)


def train(model, optimizer, w, steps, first=1, **told):
    torch.manual_seed(first)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 / (n + first))
    metrics = []
    for step in range(first, first + steps):
        model(torch.randn(2, 5, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        lr = optimizer.param_groups[0]["lr"] if told else None
        metrics.append(w.step(loss=1.0, step=step, **({"lr": lr} if told else {})))
        scheduler.step()
    return metrics


def harmonic(n):
    return sum(0.1 / k for k in range(1, n + 1))


@pytest.mark.parametrize("way", ["optimizer", "told"])
def test_the_table_has_the_clock(way):
    model = encoder()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with joma.watch(model, every=4, optimizer=optimizer if way == "optimizer" else None) as w:
        metrics = train(model, optimizer, w, 8, **({} if way == "optimizer" else {"lr": True}))
    assert not optimizer._optimizer_step_pre_hooks
    frame = w.frame()
    for step in (1, 4, 8):  # steps between measurements count
        rows = frame[frame.step == step]
        assert rows.tau.to_list() == pytest.approx([harmonic(step)] * len(rows), rel=1e-12)
        assert rows[rows.gauge == "lr"].value.to_list() == pytest.approx([0.1 / step])
        assert metrics[step - 1]["joma/tau"] == pytest.approx(harmonic(step))
    assert w.tau == pytest.approx([harmonic(8)])
    assert w.rates == pytest.approx([0.1 / 8])


def test_without_rates_there_is_no_clock():
    model = encoder()
    with joma.watch(model, every=1) as w:
        metrics = train(model, torch.optim.SGD(model.parameters(), lr=0.1), w, 2)
    assert not {"tau", "group"} & set(w.frame().columns)
    assert "joma/tau" not in metrics[0]
    assert w.tau == w.rates == []


def test_several_groups_and_optimisers():
    model = encoder()
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    first = torch.optim.SGD([{"params": matrices[:1]}, {"params": matrices[1:], "lr": 0.5}], lr=0.1)
    second = torch.optim.SGD(vectors, lr=0.01)
    with joma.watch(model, every=1, optimizer=[first, second]) as w:
        for step in range(2):
            model(torch.randn(2, 5, 8)).sum().backward()
            first.step()
            if step == 0:
                second.step()
            w.step()
    frame = w.frame()
    last = frame[frame.step == 2]
    for gauge, expected in (("lr", [0.1, 0.5, 0.01]), ("tau", [0.2, 1.0, 0.01])):
        rows = last[last.gauge == gauge].sort_values("group")
        assert rows.group.to_list() == [0, 1, 2]
        assert rows.value.to_list() == pytest.approx(expected)
    assert last.tau.to_list() == pytest.approx([0.2] * len(last))  # the first group's
    assert frame[frame.gauge == "entropy"].group.isna().all()


def test_steps_told_in_larger_increments_count_all_of_them():
    with joma.watch(encoder(), every=5, gauges="stable_rank") as w:
        for step in (5, 10, 15):
            w.step(step=step, lr=torch.tensor(0.1))
        w.step(step=20)  # as the last that was told
    assert w.tau == pytest.approx([2.0])


def test_a_rate_that_is_told_late_gives_no_clock():
    with joma.watch(encoder(), every=1, gauges="stable_rank") as w:
        w.step()
        with pytest.warns(
            UserWarning, match="τ is unknown: no learning rate was given before step 2"
        ):
            w.step(lr=0.1)
        w.step(lr=0.1)
    assert w.rates == [0.1]
    assert math.isnan(w.tau[0])
    assert w.frame().tau.isna().all()


def test_the_optimisers_rate_counts_and_what_is_told_beside_it_does_not():
    model = encoder()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with joma.watch(model, every=1, gauges="stable_rank", optimizer=optimizer) as w:
        optimizer.step()
        with pytest.warns(UserWarning, match="is ignored"):
            w.step(lr=0.7)
    assert w.tau == [0.1]


@pytest.mark.parametrize("way", ["optimizer", "told"])
def test_a_resumed_watch_goes_on_with_its_clock(tmp_path, way):
    told = {} if way == "optimizer" else {"lr": True}

    def begin(**options):
        model = encoder()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        options |= {"optimizer": optimizer} if way == "optimizer" else {}
        return model, optimizer, joma.watch(model, every=4, gauges="stable_rank", **options)

    model, optimizer, w = begin(run=tmp_path / "run")
    with w:
        train(model, optimizer, w, 6, **told)
        state = w.state_dict()
    model, optimizer, w = begin(run=tmp_path / "run", resume=True)
    with w:
        w.load_state_dict(state)
        train(model, optimizer, w, 2, first=7, **told)
    assert w.tau == pytest.approx([harmonic(8)])

    model, optimizer, w = begin(
        run=tmp_path / "run", resume=True
    )  # from the folder alone, after step 4
    with w:
        train(model, optimizer, w, 4, first=5, **told)
    assert w.tau == pytest.approx([harmonic(8)])
    assert w.frame().groupby("step").tau.first().to_dict() == pytest.approx(
        {1: 0.1, 4: harmonic(4), 8: harmonic(8)}
    )

    model, optimizer, w = begin(
        run=tmp_path / "run", resume=True
    )  # after step 6, at which nothing was recorded
    with w, pytest.warns(UserWarning, match="τ is unknown: "):
        train(model, optimizer, w, 2, first=7, **told)
    assert math.isnan(w.tau[0])


def test_a_state_of_another_version_is_refused():
    with joma.watch(encoder(), every=1, gauges="stable_rank") as w:
        old = {**w.state_dict(), "phases": []}
        del old["alarms"]
        with pytest.raises(ValueError, match="it lacks alarms"):
            w.load_state_dict(old)


def test_groups_of_one_rate_are_one_number_until_they_come_apart():
    model = encoder()
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.1)
    with joma.watch(model, every=1, gauges="stable_rank", optimizer=optimizer) as w:
        optimizer.step()
        w.step()
        optimizer.param_groups[1]["lr"] = 0.2
        optimizer.step()
        with pytest.warns(
            UserWarning, match="no longer have one learning rate: that of the first is recorded"
        ):
            w.step()
    assert w.frame().query("gauge == 'lr'").value.to_list() == [0.1, 0.1]
    assert "group" not in w.frame()
    assert w.tau == pytest.approx([0.2, 0.3])


def test_an_optimiser_that_finds_its_own_rate():
    class Own(torch.optim.Optimizer):
        def __init__(self, parameters):
            super().__init__(parameters, {"lr": None})

        def step(self, closure=None):
            pass

    model = encoder()
    optimizer = Own(model.parameters())
    with joma.watch(model, every=1, gauges="stable_rank", optimizer=optimizer) as w:
        optimizer.step()
        w.step()
    assert w.frame().tau.isna().all()
