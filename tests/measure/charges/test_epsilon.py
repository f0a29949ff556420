"""Charges up to ε: the recorded term is the right side of their identity, and what they move by in steps of SGD."""

import pytest
import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from joma._measure.charges.charge import Status
from joma._measure.charges.epsilon import EpsilonTerm
from joma._measure.charges.table import charges

from .families import batch, loss_of, make


def gradient(parameter):
    return parameter.grad


def in_double(self, states):
    """Llama's RMSNorm as printed, without its detour through float32."""
    return (
        self.weight
        * states
        * torch.rsqrt(states.square().mean(-1, keepdim=True) + self.variance_epsilon)
    )


def by_differences(charge, loss, relative=1e-3):
    """−2 Σ_n ε_n ∂L/∂ε_n by central differences."""
    total = 0.0
    for module in (norm.module for norm in charge.norms):
        key = "eps" if hasattr(module, "eps") else "variance_epsilon"
        eps = getattr(module, key)
        values = []
        for factor in (1 + relative, 1 - relative):
            setattr(module, key, eps * factor)
            with torch.no_grad():
                values.append(float(loss()))
        setattr(module, key, eps)
        total -= (values[0] - values[1]) / relative
    return total


def scale_of(charge):
    return sum(float(s.weights().norm() * s.of(gradient).norm()) for s in charge.sides)


@pytest.mark.parametrize("family", ["GPT-2", "GPT-NeoX", "Llama", "BERT", "ViT"])
def test_the_identity_holds_with_its_right_side_and_so_do_fifty_steps_of_sgd(family, monkeypatch):
    monkeypatch.setattr(LlamaRMSNorm, "forward", in_double)
    model, generator = make(family), torch.Generator().manual_seed(2)
    known = charges(model)
    up_to = [charge for charge in known if charge.status is Status.EPSILON]
    assert up_to
    lr = 0.05
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    start = [charge.value() for charge in up_to]
    moved, terms, most = ([0.0 for _ in start] for _ in range(3))
    for step in range(50):
        model.zero_grad()
        data = batch(family, generator)
        with known.epsilon() as epsilon:
            loss_of(family, model, data).backward()
        for n, charge in enumerate(up_to):
            b = float(charge.bilinear(gradient))
            assert abs(b - epsilon.of(charge)) <= 1e-12 * scale_of(charge)
            assert abs(b) <= epsilon.bound(charge) + 1e-14 * scale_of(charge)
            if step == 0:
                expected = by_differences(charge, lambda data=data: loss_of(family, model, data))
                assert epsilon.of(charge) == pytest.approx(expected, rel=1e-4)
            moved[n] += lr**2 * float(charge.square(gradient))
            terms[n] -= 2 * lr * epsilon.of(charge)
            most[n] += 2 * lr * epsilon.bound(charge)
        assert not known.check_gradients(epsilon=epsilon)
        optimizer.step()
    for charge, q, law, term, bound in zip(up_to, start, moved, terms, most, strict=True):
        off, size = float(charge.value() - q) - law, float(charge.size().sum())
        assert abs(off) <= bound
        assert abs(off - term) <= 1e-12 * size


def test_without_the_record_a_charge_up_to_epsilon_is_not_judged_and_with_it_a_bug_is_seen():
    model = make("GPT-2", torch.float32)
    known = charges(model)
    (stream,) = (charge for charge in known if charge.kind == "stream")
    with known.epsilon() as epsilon:
        loss_of("GPT-2", model, batch("GPT-2", torch.Generator().manual_seed(1))).backward()
    assert not known.check_gradients(epsilon=epsilon)
    model.transformer.wpe.weight.grad *= 2  # seen by the stream alone: its sum stays zero
    assert not known.check_gradients()
    assert [d.charge for d in known.check_gradients(epsilon=epsilon)] == [stream]


def test_the_record_leaves_nothing_on_the_model():
    model = make("GPT-2")
    with EpsilonTerm(charges(model)):
        pass
    assert not any(
        module._forward_hooks for module in model.modules() if isinstance(module, nn.LayerNorm)
    )
