"""The source of events: what observers are given, that they need nothing else, and that they cannot hurt a pass."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import joma
from joma._measure.events import events
from joma._measure.events.source import EventSource
from tests.measure.watch.models import LENGTH, VOCABULARY, HandWrittenGPT, entropy_of, sharpen

CALL = nn.Module.__call__


@pytest.fixture(autouse=True)
def _nothing_is_left_behind():
    yield
    assert nn.Module.__call__ is CALL
    assert torch.overrides._len_torch_function_stack() == 0


def tokens(seed: int = 0, batch: int = 3) -> torch.Tensor:
    return torch.randint(VOCABULARY, (batch, LENGTH), generator=torch.Generator().manual_seed(seed))


def build(how: str = "sdpa", **sizes) -> HandWrittenGPT:
    torch.manual_seed(0)
    return sharpen(HandWrittenGPT(how, **sizes))


class MaxLogit:
    """The largest logit per head: an observer as a newcomer would write it."""

    wants = (events.DotProduct,)

    def __init__(self):
        self.largest = {}

    def observe(self, event):
        scores = event.query @ event.key.mT / event.query.shape[-1] ** 0.5  # (B, H, Tq, Tk)
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        self.largest[event.place] = scores.masked_fill(hidden, -torch.inf).amax(dim=(0, 2, 3))


class Everything:
    """Keeps all events."""

    def __init__(self, *wants):
        self.wants, self.events = wants, []

    def observe(self, event):
        self.events.append(event)


def test_a_new_observer_takes_ten_lines_and_no_change_to_the_source():
    model, observer = build(), MaxLogit()
    with EventSource(model, [observer]).listening():
        model(tokens()).sum().backward()
    assert list(observer.largest) == [("blocks.0.attn", 0), ("blocks.1.attn", 0)]
    for largest, block in zip(observer.largest.values(), model.blocks, strict=True):
        torch.testing.assert_close(largest, block.attn.last.amax(dim=(0, 2, 3)))


class ResidualShare:
    """How large is what attention and MLP write, against the residual stream they write to?"""

    wants = (events.ModuleEnds,)

    def __init__(self):
        self.shares = {}

    def observe(self, event):
        if event.call.name.endswith((".attn", ".mlp")):
            self.shares[event.call.name] = float(event.output.norm() / event.block.states.norm())


def test_what_modules_write_to_the_residual_stream_can_be_observed():
    model, observer = build(), ResidualShare()
    x = tokens()
    with EventSource(model, [observer]).listening():
        model(x)
    assert list(observer.shares) == [
        "blocks.0.attn",
        "blocks.0.mlp",
        "blocks.1.attn",
        "blocks.1.mlp",
    ]
    with torch.no_grad():
        states = model.embed(x)
        expected = float(model.blocks[0].attn(model.blocks[0].ln1(states)).norm() / states.norm())
    assert observer.shares["blocks.0.attn"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("how", ["sdpa", "softmax", "einsum"])
def test_attention_events_hold_the_attention_that_was_computed(how):
    model, observer = build(how), Everything(events.AttentionEvent)
    with EventSource(model, [observer]).listening(), torch.no_grad():
        model(tokens())
    assert [type(event) for event in observer.events] == [
        events.DotProduct if how == "sdpa" else events.Scores
    ] * 2
    for event, block in zip(observer.events, model.blocks, strict=True):
        p = block.attn.last.softmax(dim=-1)  # (B, H, T, T)
        assert event.shape == p.shape[:3]
        assert event.block.module is block
        entropy = event.stats.entropy.double().mean(dim=(0, 2))  # of float32 numbers
        torch.testing.assert_close(entropy, entropy_of(block.attn.last), atol=1e-5, rtol=0)
        at = torch.tensor([0, 5, LENGTH - 1])
        torch.testing.assert_close(event.rows(1, at), p[1][:, at])
        if how == "sdpa":
            torch.testing.assert_close(event.output, p @ event.value)
        else:
            torch.testing.assert_close(event.probabilities, p)


def test_grouped_heads_masks_and_biases_have_the_rows_of_the_formula():
    class Grouped(nn.Module):
        def forward(self, q, k, v, mask):
            return nn.functional.scaled_dot_product_attention(
                q, k, v, mask, scale=0.3, enable_gqa=True
            )

    generator = torch.Generator().manual_seed(0)
    q, k = (
        torch.randn(2, 4, 6, 8, generator=generator),
        torch.randn(2, 2, 9, 8, generator=generator),
    )
    boolean = torch.rand(2, 1, 6, 9, generator=generator) > 0.3
    boolean[..., 0] = True
    for mask in (boolean, torch.randn(6, 9, generator=generator)):
        model, observer = Grouped(), Everything(events.DotProduct)
        with EventSource(model, [observer]).listening():
            model(q, k, k, mask)
        (event,) = observer.events
        scores = 0.3 * q @ k.repeat_interleave(2, dim=1).mT
        scores = (
            scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
        )
        torch.testing.assert_close(event.rows(1, torch.arange(6)), scores.softmax(dim=-1)[1])


def test_events_come_in_the_order_in_which_things_happen():
    model = build(layers=1)
    observer = Everything(*events.KINDS)
    x = tokens()
    with EventSource(model, [observer]).listening():
        output = model(x)
    seen = [(type(event).__name__, event.call.name) for event in observer.events]
    inner = [
        kind
        for kind in seen
        if kind[1] in ("blocks.0.attn", "blocks.0.mlp.2") and kind[0] != "ModuleEnds"
    ]
    assert inner == [
        ("ModuleBegins", "blocks.0.attn"), ("DotProduct", "blocks.0.attn"), ("BlockInput", "blocks.0.attn"),
        ("ModuleBegins", "blocks.0.mlp.2"), ("Hidden", "blocks.0.mlp.2"),
    ]  # fmt: skip
    first, last = observer.events[0], observer.events[-1]
    assert (type(first), type(last)) == (events.PassBegins, events.PassEnds)
    assert first.grad
    assert first.call.args[0] is x
    assert last.output is output
    hidden = next(event for event in observer.events if isinstance(event, events.Hidden))
    assert (hidden.layer, tuple(hidden.states.shape)) == (0, (3, LENGTH, 40))
    states = next(event for event in observer.events if isinstance(event, events.BlockInput))
    assert torch.equal(states.states, model.embed(x))
    assert torch.equal(states.tokens, x)


def test_nothing_is_computed_that_nobody_asked_for(monkeypatch):
    calls = []
    stats = events.stats_with_mask
    monkeypatch.setattr(events, "stats_with_mask", lambda *args: calls.append(1) or stats(*args))
    model, observer = build(), Everything(events.AttentionEvent)
    with EventSource(model, [observer, Everything(events.Hidden)]).listening():
        model(tokens())
    assert not calls
    assert observer.events[0].stats is observer.events[0].stats
    assert len(calls) == 1
    with joma.watch(model, every=1, gauges=("entropy", "sink_mass", "coherence")) as w:
        model(tokens())
        w.step()
    assert len(calls) == 1 + len(model.blocks)  # once per attention, whatever the number of gauges


class Fails:
    """Raises at every event."""

    wants = events.KINDS

    def observe(self, event):
        raise LookupError("oh")


def test_an_observer_that_fails_is_a_problem_of_the_module_and_hurts_neither_model_nor_others():
    model, other = build(), MaxLogit()
    expected = model(tokens()).detach()
    source = EventSource(model, [Fails(), other])
    with source.listening():
        assert torch.equal(model(tokens()), expected)
    assert set(source.problems) == {
        "HandWrittenGPT",
        *(name for name, _ in model.named_modules() if name),
    } - {"blocks"}
    assert all(isinstance(error, LookupError) for error in source.problems.values())
    assert len(other.largest) == 2
    with pytest.raises(ValueError, match="HandWrittenGPT: oh"):
        source.raise_problems()


def test_an_observer_may_use_the_model_itself():
    """As one that reads the vocabulary out of hidden states; what it computes is no event."""

    class Lens:
        wants = (events.BlockInput,)
        logits = None

        def observe(self, event):
            self.logits = model.head(event.states)

    model, lens, others = build(layers=1), Lens(), Everything(events.ModuleBegins)
    with EventSource(model, [lens, others]).listening():
        model(tokens())
    torch.testing.assert_close(lens.logits, model.head(model.embed(tokens())).detach())
    assert [event.call.name for event in others.events].count("head") == 1


def test_events_are_of_full_precision_under_autocast():
    class Product:
        wants = (events.BlockInput,)
        kind = None

        def observe(self, event):
            self.kind = (event.states.float() @ torch.ones(16, 2)).dtype

    model, observer = build(), Product()
    with EventSource(model, [observer]).listening(), torch.autocast("cpu", dtype=torch.bfloat16):
        model(tokens())
    assert observer.kind == torch.float32


def test_a_model_that_is_inspected_while_it_is_watched():
    model = build()
    with joma.watch(model, every=1, gauges="entropy") as w:
        model(tokens(1)).sum().backward()
        geometry = joma.embedding_geometry(model, tokens(2))
        values = w.step()
        model(tokens(1)).sum().backward()
        assert w.step() == values  # neither lost nor mixed with the other tokens
    assert len(geometry.layers) == 2


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # PyTorch's own
@pytest.mark.parametrize("per_sample", [False, True])
def test_torch_func_over_a_watched_model_goes_on_and_the_reason_is_said_once(per_sample):
    model = build()
    parameters = dict(model.named_parameters())

    def loss(parameters, x):
        logits = torch.func.functional_call(model, parameters, (x,))
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), x[:, 1:].flatten())

    gradient = torch.func.grad(loss)
    x = tokens()
    if per_sample:
        gradient, x = torch.func.vmap(gradient, in_dims=(None, 0)), x[:, None]
    for block in model.blocks:
        block.attn.keep = False
    expected = gradient(parameters, x)
    with joma.watch(model, every=1) as w:
        assert all(
            torch.equal(a, b)
            for a, b in zip(gradient(parameters, x).values(), expected.values(), strict=True)
        )
        with pytest.warns(
            UserWarning, match=r"HandWrittenGPT could not be measured.*torch\.func.*probe"
        ) as said:
            assert all("stable_rank" in name for name in w.step())
        assert len(said) == 1
        gradient(parameters, x)
        w.step()
    with joma.watch(model, every=1, gauges="entropy", probe=tokens()) as w:
        gradient(parameters, x)
        assert len(w.step()) == 2


def test_nested_tensors_are_refused_with_the_reason():
    model = build()
    source = EventSource(model, [])
    nested = torch.nested.nested_tensor([torch.randn(3, 4), torch.randn(5, 4)], layout=torch.jagged)
    assert not source.measurable(events.Call("blocks.0.attn", model, (), {}, 0), nested)
    assert "block-diagonal mask" in str(source.problems["blocks.0.attn"])


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # PyTorch's own
def test_attention_inside_of_vmap_is_left_out():
    class PerSample(nn.Module):
        def forward(self, x):
            y = nn.functional.scaled_dot_product_attention(x, x, x)
            one = torch.func.vmap(
                lambda q: nn.functional.scaled_dot_product_attention(q[None], q[None], q[None])[0]
            )
            return y + one(x)

    model, observer = PerSample(), Everything(events.AttentionEvent)
    source = EventSource(model, [observer])
    x = torch.randn(2, 3, 5, 4)
    expected = model(x)
    with source.listening():
        assert torch.equal(model(x), expected)
    assert len(observer.events) == 1
    assert "torch.func" in str(source.problems["PerSample"])
