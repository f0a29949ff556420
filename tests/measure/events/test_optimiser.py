"""The optimiser, seen: rates and clock by hand, schedulers, accumulation and skipped steps, observers that fail."""

import math

import pytest
import torch
from torch import nn

import joma
from joma._measure.events.optimiser import StepBegins, StepEnds, Steps


def encoder():
    torch.manual_seed(0)
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True), 1)


def step(model, *optimizers):
    model(torch.randn(2, 5, 8)).square().mean().backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def groups_of(model):
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    return [{"params": matrices}, {"params": vectors, "lr": 0.25}]


def test_rates_and_clock_of_every_group_under_a_scheduler():
    model = encoder()
    optimizer = torch.optim.SGD(groups_of(model), lr=0.5)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    steps = Steps(model, optimizer)
    assert steps.tau == [0.0, 0.0]
    assert all(math.isnan(rate) for rate in steps.rates)
    for _ in range(4):
        step(model, optimizer)
        scheduler.step()  # after the step, as one does
    assert steps.rates == [0.25, 0.125]  # of the last step, not of the one to come
    assert steps.tau == pytest.approx(
        [0.5 + 0.5 + 0.25 + 0.25, 0.25 + 0.25 + 0.125 + 0.125], rel=1e-15
    )
    steps.leave()
    step(model, optimizer)
    assert steps.tau[0] == pytest.approx(1.5)


def test_a_step_counts_when_it_is_made():
    model = encoder()
    optimizer = torch.optim.SGD(model.parameters(), lr=torch.tensor(0.5))  # a rate may be a tensor
    steps = Steps(model, optimizer)
    for _ in range(3):  # accumulation
        model(torch.randn(2, 5, 8)).sum().backward()
    optimizer.step()
    assert steps.tau == [0.5]
    scaler = torch.amp.GradScaler("cpu")
    for p in model.parameters():
        p.grad = torch.full_like(p, math.inf)
    scaler.scale(torch.zeros(()))
    scaler.step(optimizer)  # skipped: there are infinite gradients
    scaler.update()
    assert steps.tau == [0.5]


def test_several_optimisers_and_groups_that_are_added():
    model = encoder()
    matrices, vectors = (group["params"] for group in groups_of(model))
    first, second = torch.optim.SGD(matrices[:1], lr=0.1), torch.optim.Adam(vectors, lr=0.01)
    steps = Steps(model, [first, second])
    step(model, first, second)
    first.add_param_group({"params": matrices[1:], "lr": 0.2})
    step(model, first)
    assert steps.tau == pytest.approx([0.2, 0.2, 0.01])
    assert steps.rates == pytest.approx([0.1, 0.2, 0.01])
    again = Steps(model, [first, second])
    again.restore(steps.state())
    assert again.tau == steps.tau
    with pytest.raises(ValueError, match="that of 2 optimisers, and 1 are watched"):
        Steps(model, first).restore(steps.state())


class Seen:
    def __init__(self, *wants, fail=False):
        self.wants, self.fail, self.events = wants, fail, []

    def observe(self, event):
        weight = event.optimizer.param_groups[0]["params"][0]
        self.events.append((type(event), event.rates, weight.detach().clone(), weight.grad.clone()))
        if self.fail:
            raise RuntimeError("an observer fails")


def test_observers_see_gradients_before_and_parameters_after():
    model = encoder()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    seen, failing = Seen(StepBegins, StepEnds), Seen(StepEnds, fail=True)
    steps = Steps(model, optimizer, [failing, seen])
    step(model, optimizer)
    (begins, rates, before, gradient), (ends, _, after, _) = seen.events
    assert (begins, ends, rates) == (StepBegins, StepEnds, (0.5,))
    assert torch.equal(after, before - 0.5 * gradient)
    assert len(failing.events) == 1
    assert "an observer fails" in str(steps.problems["Seen"])


def test_training_is_bitwise_what_it_was():
    results = []
    for watched in (False, True):
        model = encoder()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        steps = Steps(model, optimizer, [Seen(StepBegins, fail=True)]) if watched else None
        torch.manual_seed(1)
        for _ in range(3):
            step(model, optimizer)
        results.append([p.detach().clone() for p in model.parameters()])
        assert steps is None or steps.problems
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_what_is_no_optimiser_of_this_model_is_refused():
    model, other = encoder(), encoder()
    foreign = torch.optim.SGD(other.parameters(), lr=0.1)
    with pytest.raises(
        ValueError, match=r"the SGD holds 12 parameters, and none of them is one of the model's 12"
    ):
        joma.watch(model, optimizer=foreign)
    right = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="same SGD is given twice"):
        joma.watch(model, optimizer=[right, right])
    with pytest.raises(ValueError, match="none of them is one of"):
        joma.watch(model, optimizer=[right, foreign])
    with pytest.raises(
        TypeError, match=r"takes a torch.optim.Optimizer or a list of them, got float"
    ):
        joma.watch(model, optimizer=0.1)
    with pytest.raises(ValueError, match="holds no optimiser"):
        joma.watch(model, optimizer=[])
    joma.watch(model, optimizer=right).close()  # nothing is left behind by those that were refused
    assert not right._optimizer_step_pre_hooks
    assert not foreign._optimizer_step_pre_hooks
