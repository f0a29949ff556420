"""What a watch says of a layer is right, or refused with the reason: models that once gave wrong numbers silently."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from tests.watch.models import entropy_of, entropy_of_probabilities
from torch import nn

import joma
from joma._watch.inputs import NotWatchable

B, T, D, H = 2, 10, 12, 3


class Toy(nn.Module):
    """Queries, keys and values (B, H, T, d) of three heads, and a way to attend with them."""

    def __init__(self, attend, **options) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv = nn.Linear(D, 3 * D)
        with torch.no_grad():
            self.qkv.weight.mul_(4)
        self.attend, self.options = attend, options
        self.truth: list[torch.Tensor] = []  # scores (B, H, T, T), for brute force

    def forward(self, x):
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, H, -1).permute(2, 0, 3, 1, 4)
        self.truth = [(q @ k.mT / math.sqrt(q.shape[-1])).detach()]
        return self.attend(self, q, k, v)


def states(batch: int = B) -> torch.Tensor:
    return torch.randn(batch, T, D, generator=torch.Generator().manual_seed(3))


def measure(model: nn.Module, *inputs, steps: int = 2) -> dict[str, list[float]]:
    """Layer -> entropy per head; the second measurement is that of a module which was found right in the first."""
    results = []
    with joma.watch(model, every=1, gauges="entropy") as w:
        for _ in range(steps):
            model(*(inputs or (states(),)))
            w.step()
            rows = w.frame().query("gauge == 'entropy' and step == @w.last_step")
            results.append({name: part.sort_values("head")["value"].tolist() for name, part in rows.groupby("module")})
    assert all(result == results[0] for result in results)
    return results[0]


def einsum(self, q, k, v):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # (B, T, H, d)
    scores = torch.einsum(self.options["scores"], q, k) / math.sqrt(q.shape[-1])
    return torch.einsum(self.options["values"], scores.softmax(-1), v)


def grouped(self, q, k, v):
    """Keys and values of one head that all three share; an axis of groups that values do not have."""
    k, v = k[:, :1], v[:, :1]
    self.truth = [q @ k.mT]
    return torch.einsum("bkgts,bksd->bkgtd", (q[:, None] @ k[:, :, None].mT).softmax(-1), v)


def merged(self, q, k, v):
    """The same with heads and queries merged into one axis, as multi-query models do."""
    k, v = k[:, 0], v[:, 0]  # (B, T, d)
    self.truth = [q @ k[:, None].mT]
    scores = (q.flatten(1, 2) @ k.mT).unflatten(1, (H, T))
    return scores.softmax(-1).flatten(1, 2) @ v


def keys_first(self, q, k, v):
    """Softmax along another dimension."""
    return (k @ q.mT / math.sqrt(q.shape[-1])).softmax(dim=-2).transpose(-1, -2) @ v


def logarithm(self, q, k, v):
    return F.log_softmax(q @ k.mT / math.sqrt(q.shape[-1]), dim=-1).exp() @ v


def dropped(self, q, k, v):
    return F.dropout((q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1), 0.4) @ v


def dropped_sdpa(self, q, k, v):
    return F.scaled_dot_product_attention(q, k, v, dropout_p=0.4)


@pytest.mark.parametrize(
    "model",
    [
        Toy(einsum, scores="bthd,bshd->bths", values="bths,bshd->bthd"),
        Toy(einsum, scores="bthd,bshd->bhts", values="bhts,bshd->bthd"),
        Toy(einsum, scores="bthd,bshd->hbts", values="hbts,bshd->bthd"),
        Toy(einsum, scores="bt...d,bs...d->b...ts", values="b...ts,bs...d->bt...d"),
        Toy(grouped),
        Toy(merged),
        Toy(keys_first),
        Toy(logarithm),
        Toy(dropped),
        Toy(dropped_sdpa),
    ],
    ids=[
        "bths",
        "bhts",
        "hbts",
        "ellipsis",
        "groups",
        "merged",
        "keys first",
        "log_softmax",
        "dropout",
        "sdpa dropout",
    ],
)
def test_layouts_and_call_styles_that_are_measured(model):
    (heads,) = measure(model).values()
    assert heads == pytest.approx(entropy_of(model.truth[0]).tolist(), abs=2e-6)


def over_heads(self, q, k, v):
    return torch.stack([F.scaled_dot_product_attention(q[:, h], k[:, h], v[:, h]) for h in range(H)], dim=1)


def over_samples(self, q, k, v):
    return torch.stack([F.scaled_dot_product_attention(q[b], k[b], v[b]) for b in range(len(q))])


def eager_over_heads(self, q, k, v):
    return torch.stack([(q[:, h] @ k[:, h].mT).softmax(-1) @ v[:, h] for h in range(H)], dim=1)


def eager_over_samples(self, q, k, v):
    return torch.stack([(q[b] @ k[b].mT).softmax(-1) @ v[b] for b in range(len(q))])


def differential(self, q, k, v):
    (q1, q2), (k1, k2) = q.chunk(2, dim=-1), k.chunk(2, dim=-1)
    return ((q1 @ k1.mT).softmax(-1) - 0.3 * (q2 @ k2.mT).softmax(-1)) @ v


def talking(self, q, k, v):
    mix = torch.eye(H) + 0.5
    return torch.einsum("hg,bgts->bhts", mix, (q @ k.mT).softmax(-1)) @ v


def by_hand(self, q, k, v):
    weights = (q @ k.mT).exp()
    return (weights / weights.sum(-1, keepdim=True)) @ v


def sigmoid(self, q, k, v):
    return (q @ k.mT).sigmoid() @ v


def in_chunks(self, q, k, v):
    return torch.cat([F.scaled_dot_product_attention(part, k, v) for part in q.split(5, dim=2)], dim=2)


def swapped(self, q, k, v):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # (B, T, H, d): over heads
    return F.scaled_dot_product_attention(q, k, v)


@pytest.mark.parametrize(
    ("attend", "reason"),
    [
        (over_heads, "3 attentions in one call, in a loop over heads or samples"),
        (over_samples, "2 attentions in one call, in a loop over heads or samples"),
        (eager_over_heads, "in a loop over heads or samples"),
        (eager_over_samples, "in a loop over heads or samples"),
        (differential, "not multiplied with values as it is .*a difference of two"),
        (talking, "not multiplied with values as it is .*heads that are mixed"),
        (by_hand, "without a softmax function .exp and sum by hand"),
        (sigmoid, "without a softmax function .*a sigmoid"),
        (in_chunks, "in 2 pieces, 5 queries in one of them"),
        (swapped, "attends over 3 heads at each of 10 tokens, not over tokens: are two axes swapped"),
    ],
)
def test_what_would_be_a_mixture_is_refused_with_the_reason(attend, reason):
    """In the exception where nothing else is seen, in a warning where other layers are; training goes on."""
    model = Toy(attend)
    expected = model(states())
    with joma.watch(model, every=1, gauges="entropy") as w:
        assert torch.equal(model(states()), expected)
        with pytest.raises(NotWatchable, match=reason):
            w.step()

    both = Both(Attention(attend), Toy(dropped_sdpa))
    with joma.watch(both, every=1, gauges="entropy") as w:
        both(states())
        with pytest.warns(UserWarning, match=reason):
            w.step()
        assert w.layers == ["second"]


class Attention(Toy):
    """Its name says that it should be seen."""


class Both(nn.Module):
    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second

    def forward(self, x):
        return self.first(x), self.second(x)


class SelfAndCross(nn.Module):
    """Both in one module, with as many heads and tokens."""

    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.how = how
        self.own, self.cross, self.memory = nn.Linear(D, 3 * D), nn.Linear(D, D), nn.Linear(D, 2 * D)
        self.truth: list[torch.Tensor] = []

    def attend(self, q, k, v):
        q, k, v = (x.unflatten(-1, (H, -1)).transpose(1, 2) for x in (q, k, v))
        scores = 3 * q @ k.mT
        self.truth.append(scores.detach())
        y = F.scaled_dot_product_attention(q, k, v, scale=3.0) if self.how == "sdpa" else scores.softmax(-1) @ v
        return y.transpose(1, 2).flatten(2)

    def forward(self, x, memory):
        self.truth = []
        x = x + self.attend(*self.own(x).chunk(3, dim=-1))
        return x + self.attend(self.cross(x), *self.memory(memory).chunk(2, dim=-1))


@pytest.mark.parametrize("how", ["sdpa", "softmax"])
def test_self_and_cross_attention_in_one_module_are_layers_of_their_own(how):
    model = SelfAndCross(how)
    found = measure(model, states(), states().flip(0))
    assert list(found) == ["SelfAndCross", "SelfAndCross/1"]
    for heads, scores in zip(found.values(), model.truth, strict=True):
        assert heads == pytest.approx(entropy_of(scores).tolist(), abs=2e-6)


def test_two_maps_of_differential_attention_are_layers_of_their_own():
    def two_maps(self, q, k, v):
        (q1, q2), (k1, k2) = q.chunk(2, dim=-1), k.chunk(2, dim=-1)
        self.truth = [q1 @ k1.mT / math.sqrt(2), q2 @ k2.mT / math.sqrt(2)]
        return F.scaled_dot_product_attention(q1, k1, v) - 0.3 * F.scaled_dot_product_attention(q2, k2, v)

    model = Toy(two_maps)
    for heads, scores in zip(measure(model).values(), model.truth, strict=True):
        assert heads == pytest.approx(entropy_of(scores).tolist(), abs=2e-6)


class Router(nn.Module):
    """Tokens go to experts by their cosine with each: a softmax over a product of two activations."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.Parameter(torch.randn(5, D))

    def forward(self, x):
        weights = (F.normalize(x, dim=-1) @ F.normalize(self.experts, dim=-1).T).softmax(-1)  # (B, T, 5)
        return x * weights.amax(-1, keepdim=True)


def test_a_cosine_router_is_no_attention():
    (layer,) = measure(Both(Router(), Toy(dropped_sdpa)))
    assert layer == "second"
    with joma.watch(Router(), every=1, gauges="entropy") as w:
        w.model(states())
        with pytest.raises(NotWatchable, match=r"Router: a softmax of scores \(2, 10, 5\) is not multiplied"):
            w.step()


def test_the_guard_looks_again_when_shapes_change():
    """A loop over one sample is measured; over two it is refused, and nothing of that step counts."""
    model = Toy(over_samples)
    with joma.watch(model, every=1, gauges="entropy") as w:
        model(states(1))
        first = w.step()
        assert list(first.values()) == pytest.approx([float(entropy_of(model.truth[0]).mean())], abs=2e-6)
        model(states(1))
        model(states(2))
        with pytest.warns(UserWarning, match="in a loop over heads or samples"):
            assert w.step() == {}
        model(states(1))
        assert w.step() == first


def test_block_sparse_attention_of_bigbird_is_refused():
    transformers = pytest.importorskip("transformers")
    settings = transformers.BigBirdConfig(
        vocab_size=61, hidden_size=24, num_hidden_layers=1, num_attention_heads=2, intermediate_size=40,
        max_position_embeddings=128, block_size=4, num_random_blocks=1, attention_type="block_sparse",
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.BigBirdModel(settings).eval()
    tokens = torch.randint(1, 61, (2, 64))
    with joma.watch(model, every=1, gauges="entropy") as w:
        model(tokens)
        with pytest.raises(NotWatchable, match=r"attention\.self: it attends in \d pieces, 4 queries in one"):
            w.step()
    model.set_attention_type("original_full")
    with joma.watch(model, every=1, gauges="entropy") as w:
        p = model(tokens, output_attentions=True).attentions[0]
        assert w.step()["joma/entropy/layer_00"] == pytest.approx(float(entropy_of_probabilities(p).mean()), abs=2e-6)
