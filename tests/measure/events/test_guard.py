"""Every layer is measured right or refused with the reason; some once gave wrong numbers."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

import joma
from tests.measure.watch.models import entropy_of, entropy_of_probabilities

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
    """Return entropy per head by layer; the second measurement relies on the first examination."""
    results = []
    with joma.watch(model, every=1, gauges="entropy") as w:
        for _ in range(steps):
            model(*(inputs or (states(),)))
            w.step()
            rows = w.frame().query("gauge == 'entropy' and step == @w.last_step")
            results.append(
                {
                    name: part.sort_values("head")["value"].tolist()
                    for name, part in rows.groupby("module")
                }
            )
    assert all(result == results[0] for result in results)
    return results[0]


def einsum(self, q, k, v):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # (B, T, H, d)
    scores = torch.einsum(self.options["scores"], q, k) / math.sqrt(q.shape[-1])
    return torch.einsum(self.options["values"], scores.softmax(-1), v)


def grouped(self, q, k, v):
    """All three heads share the keys and values of one; values have no axis of groups."""
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


def take_steps(model, w, number):
    for _ in range(number):
        model(states())
        w.step()


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
    return torch.stack(
        [F.scaled_dot_product_attention(q[:, h], k[:, h], v[:, h]) for h in range(H)], dim=1
    )


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
    return torch.cat(
        [F.scaled_dot_product_attention(part, k, v) for part in q.split(5, dim=2)], dim=2
    )


def swapped(self, q, k, v):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # (B, T, H, d): over heads
    return F.scaled_dot_product_attention(q, k, v)


def halves(q, k):
    return *q.chunk(2, dim=-1), *k.chunk(2, dim=-1)


def two_fused_maps(self, q, k, v):
    """Differential attention with a fused kernel, one call per map."""
    q1, q2, k1, k2 = halves(q, k)
    return F.scaled_dot_product_attention(q1, k1, v) - 0.3 * F.scaled_dot_product_attention(
        q2, k2, v
    )


def two_maps_of_one_call(self, q, k, v):
    """The same in one call, with the values twice, as transformers has it."""
    q1, q2, k1, k2 = halves(q, k)
    both = F.scaled_dot_product_attention(
        torch.cat([q1, q2], 1), torch.cat([k1, k2], 1), torch.cat([v, v], 1)
    )
    first, second = both.chunk(2, dim=1)
    return first - 0.3 * second


def two_maps_in_place(self, q, k, v):
    q1, q2, k1, k2 = halves(q, k)
    first = F.scaled_dot_product_attention(q1, k1, v)
    second = F.scaled_dot_product_attention(q2, k2, v).mul(0.3)
    first -= second
    return first


def two_maps_by_lerp(self, q, k, v):
    q1, q2, k1, k2 = halves(q, k)
    return torch.lerp(
        F.scaled_dot_product_attention(q1, k1, v), F.scaled_dot_product_attention(q2, k2, v), 0.3
    )


def two_maps_by_addcmul(self, q, k, v):
    q1, q2, k1, k2 = halves(q, k)
    first, second = (
        F.scaled_dot_product_attention(q1, k1, v),
        F.scaled_dot_product_attention(q2, k2, v),
    )
    return torch.addcmul(first, torch.full((H, 1, 1), 0.3), second, value=-1)


def two_maps_summed(self, q, k, v):
    q1, q2, k1, k2 = halves(q, k)
    both = torch.stack(
        [F.scaled_dot_product_attention(q1, k1, v), F.scaled_dot_product_attention(q2, k2, v)]
    )
    return (both * torch.tensor([1.0, -0.3])[:, None, None, None, None]).sum(dim=0)


def interleaved_maps_of_one_call(self, q, k, v):
    """In one call, with the two maps of a head next to one another, as in the paper's code."""
    q, k = (
        x.unflatten(-1, (2, -1)).transpose(2, 3).flatten(1, 2) for x in (q, k)
    )  # (B, 2H, T, d/2)
    both = F.scaled_dot_product_attention(q, k, v.repeat_interleave(2, dim=1)).unflatten(1, (H, 2))
    return both[:, :, 0] - 0.3 * both[:, :, 1]


def eager_maps_of_outputs(self, q, k, v):
    """Eager, with the outputs subtracted and not the weights."""
    q1, q2, k1, k2 = halves(q, k)
    return (q1 @ k1.mT).softmax(-1) @ v - 0.3 * ((q2 @ k2.mT).softmax(-1) @ v)


def maps_of_half_the_values(self, q, k, v):
    """The same where a kernel wants values of the keys' size: four calls."""
    q1, q2, k1, k2 = halves(q, k)
    v1, v2 = v.chunk(2, dim=-1)
    first = torch.cat([F.scaled_dot_product_attention(q1, k1, part) for part in (v1, v2)], dim=-1)
    second = torch.cat([F.scaled_dot_product_attention(q2, k2, part) for part in (v1, v2)], dim=-1)
    return first - 0.3 * second


@pytest.mark.parametrize(
    ("attend", "reason"),
    [
        (two_fused_maps, r"two attention maps over the same values .*\[difference\]"),
        (two_maps_of_one_call, r"two attention maps over the same values .*\[difference\]"),
        (two_maps_in_place, r"two attention maps over the same values .*\[difference\]"),
        (two_maps_by_lerp, r"two attention maps over the same values .*\[difference\]"),
        (two_maps_by_addcmul, r"two attention maps over the same values .*\[difference\]"),
        (two_maps_summed, r"two attention maps over the same values .*\[difference\]"),
        (interleaved_maps_of_one_call, r"two attention maps over the same values .*\[difference\]"),
        (eager_maps_of_outputs, r"two attention maps over the same values .*\[difference\]"),
        (maps_of_half_the_values, r"two attention maps over the same values .*\[difference\]"),
        (over_heads, "3 attentions in one call, in a loop over heads or samples"),
        (over_samples, "2 attentions in one call, in a loop over heads or samples"),
        (eager_over_heads, "in a loop over heads or samples"),
        (eager_over_samples, "in a loop over heads or samples"),
        (differential, "not multiplied with values as it is .*a difference of two"),
        (talking, "not multiplied with values as it is .*heads that are mixed"),
        (by_hand, "without a softmax function .exp and sum by hand"),
        (sigmoid, "without a softmax function .*a sigmoid"),
        (in_chunks, "in 2 pieces, 5 queries in one of them"),
        (
            swapped,
            "attends over 3 heads at each of 10 tokens, not over tokens: are two axes swapped",
        ),
    ],
)
def test_what_would_be_a_mixture_is_refused_with_the_reason(attend, reason):
    """In the exception if nothing else is seen, in a warning if other layers are."""
    model = Toy(attend)
    expected = model(states())
    with joma.watch(model, every=1, gauges="entropy") as w:
        assert torch.equal(model(states()), expected)
        with pytest.warns(joma.JomaWarning, match=reason):
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
        self.own, self.cross, self.memory = (
            nn.Linear(D, 3 * D),
            nn.Linear(D, D),
            nn.Linear(D, 2 * D),
        )
        self.truth: list[torch.Tensor] = []

    def attend(self, q, k, v):
        q, k, v = (x.unflatten(-1, (H, -1)).transpose(1, 2) for x in (q, k, v))
        scores = 3 * q @ k.mT
        self.truth.append(scores.detach())
        y = (
            F.scaled_dot_product_attention(q, k, v, scale=3.0)
            if self.how == "sdpa"
            else scores.softmax(-1) @ v
        )
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


def test_two_attentions_that_are_added_are_layers_of_their_own_if_each_has_its_values():
    """As an adapter adds attention to an image to that to a text."""

    def two_sources(self, q, k, v):
        self.truth = [q @ k.mT / math.sqrt(4), q @ k.flip(1).mT / math.sqrt(4)]
        own = F.scaled_dot_product_attention(q, k, v)
        return own + 0.5 * F.scaled_dot_product_attention(q, k.flip(1), v.flip(1))

    model = Toy(two_sources)
    for heads, scores in zip(measure(model).values(), model.truth, strict=True):
        assert heads == pytest.approx(entropy_of(scores).tolist(), abs=2e-6)


class Router(nn.Module):
    """A router by cosine: a softmax over a product of two activations, and no attention."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.Parameter(torch.randn(5, D))

    def forward(self, x):
        weights = (F.normalize(x, dim=-1) @ F.normalize(self.experts, dim=-1).T).softmax(
            -1
        )  # (B, T, 5)
        return x * weights.amax(-1, keepdim=True)


def test_a_cosine_router_is_no_attention():
    (layer,) = measure(Both(Router(), Toy(dropped_sdpa)))
    assert layer == "second"
    with joma.watch(Router(), every=1, gauges="entropy") as w:
        w.model(states())
        with pytest.warns(
            joma.JomaWarning,
            match=r"Router \(Router\) ran.*: a softmax of scores \(2, 10, 5\) is not multiplied",
        ):
            w.step()


def test_the_guard_looks_again_when_shapes_change():
    """A loop over one sample is measured; over two it is refused, and that step has no numbers."""
    model = Toy(over_samples)
    with joma.watch(model, every=1, gauges="entropy") as w:
        model(states(1))
        first = w.step()
        assert list(first.values()) == pytest.approx(
            [float(entropy_of(model.truth[0]).mean())], abs=2e-6
        )
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
        with pytest.warns(
            joma.JomaWarning, match=r"attention\.self: it attends in \d pieces, 4 queries in one"
        ):
            w.step()
    model.set_attention_type("original_full")
    with joma.watch(model, every=1, gauges="entropy") as w:
        p = model(tokens, output_attentions=True).attentions[0]
        assert w.step()["joma/entropy/layer_00"] == pytest.approx(
            float(entropy_of_probabilities(p).mean()), abs=2e-6
        )


def test_local_attention_next_to_global_tokens_is_refused_and_not_read_as_that_of_the_tokens():
    """PegasusX computes a plain softmax for its global tokens, and another one in blocks for all other tokens."""
    from transformers import PegasusXConfig, PegasusXForConditionalGeneration

    config = PegasusXConfig(
        vocab_size=100,
        d_model=32,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        block_size=8,
        num_global_tokens=4,
        max_position_embeddings=64,
        decoder_start_token_id=0,
        pad_token_id=0,
    )
    model = PegasusXForConditionalGeneration(config)
    ids = torch.randint(3, 90, (2, 37))
    explained = joma.explain(model, {"input_ids": ids, "labels": ids[:, :12]}).frame()
    attention = explained[explained.kind == "attention"].set_index("module")
    encoder = attention.loc["model.encoder.layers.0.self_attn"]
    assert encoder.status == "refused"
    assert encoder.code == "pieces"
    assert "only a part" in encoder.reason
    assert attention.loc["model.decoder.layers.0.self_attn"].status == "measured"


def test_local_attention_in_blocks_is_measured_without_padded_queries():
    from transformers import LongT5Config, LongT5ForConditionalGeneration

    config = LongT5Config(
        vocab_size=100,
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=1,
        num_heads=4,
        local_radius=4,
        global_block_size=4,
        decoder_start_token_id=0,
        dropout_rate=0.0,
    )
    model = LongT5ForConditionalGeneration(config)
    ids = torch.randint(3, 90, (2, 37))
    mask = torch.ones_like(ids)
    mask[1, 25:] = 0
    batch = {"input_ids": ids, "attention_mask": mask, "labels": ids[:, :12].clone()}
    with joma.watch(model, gauges="entropy", every=1) as watch:
        output = model(**batch, output_attentions=True)
        output.loss.backward()
        watch.step(loss=output.loss)
    frame = watch.frame()
    measured = frame[frame.gauge.eq("entropy") & frame.layer.eq(0)].sort_values("head")
    weights = output.encoder_attentions[0].detach()  # (samples, blocks, heads, queries, keys)
    entropy = torch.special.entr(weights).sum(dim=-1).movedim(2, -1).reshape(2, -1, 4)
    real = torch.cat([entropy[0, :37], entropy[1, :25]])
    assert measured["value"].tolist() == pytest.approx(real.mean(dim=0).tolist(), abs=1e-5)


class Mixing(nn.Module):
    """Talking heads that begin as the identity."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv, self.mix = nn.Linear(D, 3 * D), nn.Parameter(torch.eye(H))

    def forward(self, x):
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, H, -1).permute(2, 0, 3, 1, 4)
        p = (q @ k.mT).softmax(-1)
        return torch.einsum("bhij,gh->bgij", p, self.mix) @ v


@pytest.mark.parametrize("earlier", [1, 5, 20])
def test_the_guard_looks_again_though_shapes_stay_the_same(earlier):
    """Heads that begin to be mixed in training are refused, after a few measurements at most."""
    model = Mixing()
    with joma.watch(model, every=1, gauges="entropy") as w:
        for _ in range(earlier):
            model(states())
            assert w.step()
        torch.nn.init.normal_(model.mix)
        with pytest.warns(UserWarning, match=r"heads that are mixed.*\[no-product\]"):
            take_steps(model, w, 16)
        model(states())
        assert w.step() == {}


def test_a_fused_output_that_changes_later_is_refused():
    """A kernel that becomes another function, as a gate that opens in training makes it."""

    class Replaced(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.qkv, self.gate = nn.Linear(D, 3 * D), 0.0

        def forward(self, x):
            q, k, v = self.qkv(x).view(*x.shape[:2], 3, H, -1).permute(2, 0, 3, 1, 4)
            output = F.scaled_dot_product_attention(q, k, v)
            with torch.no_grad():
                output += self.gate * output.flip(
                    1
                )  # in place: what was computed is not softmax(s)·V any more
            return output

    model = Replaced()
    with joma.watch(model, every=1, gauges="entropy") as w:
        model(states())
        assert w.step()
        model.gate = 1.0
        with pytest.warns(UserWarning, match=r"its output is not softmax.*\[guard\]"):
            take_steps(model, w, 16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("length", [10, 200])
def test_mixed_heads_are_refused_in_every_type_and_at_every_length(length, dtype):
    """Probabilities of 1/200 are far below any absolute tolerance."""
    model = Mixing()
    with torch.no_grad():
        model.qkv.weight.mul_(0.3)
        torch.nn.init.normal_(model.mix, std=0.5)
    x = torch.randn(1, length, D, generator=torch.Generator().manual_seed(3))
    with joma.watch(model, every=1, gauges="entropy") as w:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
            model(x)
        with pytest.warns(joma.JomaWarning, match=r"heads that are mixed.*\[no-product\]"):
            w.step()


@pytest.mark.parametrize("attend", ["sdpa", "eager"])
@pytest.mark.parametrize("length", [10, 200])
def test_low_precision_is_not_mistaken_for_another_function(length, attend):
    def attended(self, q, k, v):
        if attend == "sdpa":
            return F.scaled_dot_product_attention(q, k, v)
        return (q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1) @ v

    model = Toy(attended)
    x = torch.randn(2, length, D, generator=torch.Generator().manual_seed(3))
    with (
        joma.watch(model, every=1, gauges="entropy") as w,
        torch.autocast("cpu", dtype=torch.bfloat16),
    ):
        model(x)
        w.step()
    heads = w.latest.values["entropy"][0].tolist()
    assert heads == pytest.approx(entropy_of(model.truth[0]).tolist(), abs=3e-2)


def rotated(x: torch.Tensor) -> torch.Tensor:
    """Rotary positions computed in float32, as models do under autocast: the result is float32."""
    d = x.shape[-1]
    angle = torch.arange(x.shape[-2])[:, None] * 0.7 ** torch.arange(d // 2)
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def test_autocast_dropout_and_rotary_positions_are_checked_together():
    """Never "could not be measured" and a number all the same."""

    def attended(self, q, k, v):
        q, k = rotated(q), rotated(k)
        self.truth = [(q @ k.mT / math.sqrt(q.shape[-1])).detach().float()]
        return F.scaled_dot_product_attention(q, k, v, dropout_p=0.3)

    model = Toy(attended)
    with (
        joma.watch(model, every=1, gauges="entropy") as w,
        torch.autocast("cpu", dtype=torch.bfloat16),
    ):
        model(states())
        w.step()
    heads = w.latest.values["entropy"][0].tolist()
    assert heads == pytest.approx(entropy_of(model.truth[0]).tolist(), abs=3e-2)


def test_what_cannot_be_checked_is_refused(monkeypatch):
    """A check that fails is no reason to believe a number."""
    from joma._measure.events.guard import guard

    def fails(candidate):
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(guard, "check_output", fails)
    model = Toy(dropped_sdpa)
    with joma.watch(model, every=1, gauges="entropy") as w:
        model(states())
        with pytest.warns(
            joma.JomaWarning, match=r"could not be compared .*no such kernel.*\[unchecked\]"
        ):
            w.step()


class Channels(nn.Module):
    """Attention of channels to channels, at all tokens (XCiT)."""

    def __init__(self, kernel: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv, self.kernel = nn.Linear(D, 3 * D), kernel

    def forward(self, x):
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, H, -1).permute(2, 0, 3, 4, 1)  # (B, H, d, T)
        q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
        if self.kernel == "sdpa":
            return F.scaled_dot_product_attention(q, k, v)
        return (q @ k.mT).softmax(-1) @ v


@pytest.mark.parametrize("kernel", ["sdpa", "eager"])
@pytest.mark.parametrize("length", [T, D // H, 7])
def test_attention_over_channels_is_refused_by_name(length, kernel):
    """Also if there are as many channels in a head as tokens."""
    model = Channels(kernel)
    x = torch.randn(B, length, D, generator=torch.Generator().manual_seed(3))
    with joma.watch(model, every=1, gauges="entropy") as w:
        model(x)
        with pytest.warns(
            joma.JomaWarning, match=r"attends over 4 channels.*not over tokens \[channels\]"
        ):
            w.step()
