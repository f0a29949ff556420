"""Padded queries are left out, by the mask that is applied, by arguments, or by the user."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn import functional

import joma
from joma._measure.events.padding.patterns import depends_on_distance
from joma._measure.events.padding.token_states import (
    DOUBTFUL,
    PADDING,
    REAL,
    states_of_pattern,
)
from tests.measure.watch.models import entropy_of, entropy_of_probabilities

B, T, D, H = 3, 14, 32, 4
SIZE = D // H
RIGHT = torch.arange(T)[None] < torch.tensor([14, 9, 5])[:, None]
LEFT = RIGHT.flip(1)
HOLES = torch.rand(B, T, generator=torch.Generator().manual_seed(5)) > 0.3
SIDES = {"right": RIGHT, "left": LEFT, "holes": HOLES}


def states(batch: int = B, length: int = T, seed: int = 1) -> torch.Tensor:
    return torch.randn(batch, length, D, generator=torch.Generator().manual_seed(seed))


def heads_of(model: nn.Module, *inputs, layer: int = 0, **options) -> list[float]:
    """Entropy per head of a layer, the same in two steps."""
    results = []
    with joma.watch(model, every=1, gauges="entropy", live=False, **options) as w:
        for _ in range(2):
            output = model(*inputs)
            output.square().mean().backward()
            w.step()
            results.append(w.latest.values["entropy"][layer].tolist())
    assert results[0] == results[1]
    return results[0]


class Attention(nn.Module):
    """Attention with a boolean (True takes part) or additive mask; ``truth`` has its scores."""

    def __init__(self, kernel: str = "eager") -> None:
        super().__init__()
        self.kernel = kernel
        self.q, self.k, self.v = (nn.Linear(D, D) for _ in range(3))
        nn.init.normal_(self.q.weight, 0, 0.5)
        self.truth = torch.empty(0)

    def forward(self, x, mask=None, memory=None):
        memory = x if memory is None else memory
        q, k, v = (
            layer(y).unflatten(-1, (H, SIZE)).transpose(1, 2)
            for layer, y in ((self.q, x), (self.k, memory), (self.v, memory))
        )
        scores = q @ k.mT / math.sqrt(SIZE)
        if mask is not None:
            hidden = mask.dtype == torch.bool
            scores = scores.masked_fill(~mask, -math.inf) if hidden else scores + mask
        self.truth = scores.detach()
        if self.kernel == "sdpa":
            y = functional.scaled_dot_product_attention(q, k, v, mask)
        else:
            y = scores.softmax(-1).nan_to_num() @ v
        return y.transpose(1, 2).flatten(2)


class Model(nn.Module):
    """A model whose mask has a meaningless name; ``how`` makes it from real tokens (B, T)."""

    def __init__(self, how, kernel: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.how, self.attend = how, Attention(kernel)

    def forward(self, x, data=None):
        return x + self.attend(x, self.how(data))


CAUSAL = torch.ones(T, T, dtype=torch.bool).tril()


def additive(keep: torch.Tensor, fill: float) -> torch.Tensor:
    return torch.zeros(keep.shape).masked_fill(~keep, fill)


def keys(real):
    return real[:, None, None]


def pairs(real):
    return real[:, None, :, None] & real[:, None, None]


def causal(real):
    return CAUSAL & real[:, None, None]


def window(real):
    near = (torch.arange(T)[:, None] - torch.arange(T)).abs() <= 3
    return near & real[:, None, None]


def unmasked(keep):
    """Rows that would see nothing see everything, as some libraries have it."""
    return keep | ~keep.any(dim=-1, keepdim=True)


HOW = {
    "keys": keys,
    "keys for each query": lambda real: keys(real).expand(B, 1, T, T),
    "keys, -1e9": lambda real: additive(keys(real), -1e9),
    "keys, -1e4": lambda real: additive(keys(real), -1e4),
    "keys, lowest": lambda real: additive(keys(real), torch.finfo(torch.float32).min),
    "causal": causal,
    "causal, lowest": lambda real: additive(causal(real), torch.finfo(torch.float32).min),
    "causal, -1e4": lambda real: additive(causal(real), -1e4),
    "causal, unmasked rows": lambda real: unmasked(causal(real)),
    "queries and keys, unmasked rows": lambda real: unmasked(pairs(real)),
    "queries and keys, lowest": lambda real: additive(pairs(real), torch.finfo(torch.float32).min),
}


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("kernel", ["eager", "sdpa"])
@pytest.mark.parametrize("how", HOW)
def test_the_mask_that_is_applied_shows_padding(how, kernel, side):
    """No argument has a name that says anything."""
    real = SIDES[side]
    model = Model(HOW[how], kernel)
    assert heads_of(model, states(), real) == pytest.approx(
        entropy_of(model.attend.truth, real).tolist(), abs=2e-5
    )


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("kernel", ["eager", "sdpa"])
def test_padding_of_a_window_is_seen(kernel, side):
    """Every real query sees itself; what lies outside of one stretch of keys is padding."""
    real = SIDES[side]
    model = Model(lambda real: unmasked(window(real)), kernel)
    assert heads_of(model, states(), real) == pytest.approx(
        entropy_of(model.attend.truth, real).tolist(), abs=2e-5
    )


@pytest.mark.parametrize("kernel", ["eager", "sdpa"])
@pytest.mark.parametrize(
    "how",
    [
        lambda _: None,
        lambda _: CAUSAL,
        lambda _: unmasked(CAUSAL.tril(-1)),
        lambda _: torch.ones(T, T, dtype=torch.bool),
        lambda _: (torch.arange(T)[:, None] - torch.arange(T)).abs() <= 3,
        lambda _: torch.block_diag(torch.ones(6, 6), torch.ones(8, 8)).bool(),
        lambda _: torch.block_diag(torch.ones(6, 6), torch.ones(8, 8)).bool() & CAUSAL,
        lambda _: CAUSAL | (torch.arange(T) < 4),
    ],
    ids=[
        "none",
        "causal",
        "strictly causal",
        "all",
        "window",
        "documents",
        "causal documents",
        "prefix",
    ],
)
def test_what_is_no_padding_is_counted(how, kernel):
    model = Model(how, kernel)
    assert heads_of(model, states()) == pytest.approx(
        entropy_of(model.attend.truth).tolist(), abs=2e-5
    )


def test_strictly_causal_attention_counts_every_query_that_sees_a_key():
    """Nobody sees the last token, and the first sees nothing."""
    model = Model(lambda _: CAUSAL.tril(-1), "eager")
    heads = heads_of(model, states())
    assert heads == pytest.approx(entropy_of(model.attend.truth[:, :, 1:]).tolist(), abs=2e-5)


class TopK(nn.Module):
    """Each query sees its three largest scores; keys that nobody chooses are no padding."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv = nn.Linear(D, 3 * D)
        nn.init.normal_(self.qkv.weight, 0, 0.4)

    def forward(self, x, attention_mask=None):
        q, k, v = self.qkv(x).unflatten(-1, (3, H, SIZE)).permute(2, 0, 3, 1, 4)
        scores = q @ k.mT
        if attention_mask is not None:
            scores = scores.masked_fill(~attention_mask[:, None, None], -math.inf)
        lowest = scores.topk(3, dim=-1).values[..., -1:]
        scores = scores.masked_fill(scores < lowest, -math.inf)
        self.truth = scores.detach()
        return scores.softmax(-1) @ v


@pytest.mark.parametrize("masked", [False, True])
def test_top_k_attention(masked):
    """What is seen depends on the scores: the mask says nothing, and an argument does."""
    model = TopK()
    inputs = (states(), RIGHT) if masked else (states(),)
    heads = heads_of(model, *inputs)
    assert bool((model.truth == -math.inf).all(dim=2).any()), "some key must be chosen by no query"
    assert heads == pytest.approx(
        entropy_of(model.truth, RIGHT if masked else None).tolist(), abs=2e-5
    )


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("by_keyword", [True, False])
def test_multihead_attention_by_keyword(by_keyword, need_weights):
    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.attend = nn.MultiheadAttention(D, H, batch_first=True)
            self.attend.in_proj_weight.data.mul_(4)

        def forward(self, x):
            pad = {"key_padding_mask": ~RIGHT, "need_weights": need_weights}
            if by_keyword:
                return self.attend(query=x, key=x, value=x, **pad)[0]
            return self.attend(x, x, x, **pad)[0]

    model = Wrapped()
    x = states()
    p = model.attend(x, x, x, key_padding_mask=~RIGHT, average_attn_weights=False)[1]
    assert heads_of(model, x) == pytest.approx(
        entropy_of_probabilities(p, RIGHT).tolist(), abs=2e-5
    )


class Named(nn.Module):
    """The mask of padding in an argument with a name that is known."""

    def __init__(self, to_mask, kernel: str = "eager") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.to_mask, self.attend = to_mask, Attention(kernel)

    def forward(self, x, attention_mask=None):
        return x + self.attend(x, self.to_mask(attention_mask))


@pytest.mark.parametrize(
    ("mask", "to_mask"),
    [
        (RIGHT.long(), lambda m: (m != 0)[:, None, None]),
        (RIGHT, lambda m: m[:, None, None]),
        (~RIGHT, lambda m: ~m[:, None, None]),
        ((~RIGHT).float(), lambda m: -1e9 * m[:, None, None]),
        (additive(RIGHT, -1e9), lambda m: m[:, None, None]),
        (additive(RIGHT, -math.inf), lambda m: m[:, None, None]),
        (additive(RIGHT, -100.0), lambda m: m[:, None, None]),
    ],
    ids=[
        "integer",
        "boolean",
        "True at padding",
        "1 at padding",
        "additive",
        "minus infinity",
        "-100",
    ],
)
@pytest.mark.parametrize("kernel", ["eager", "sdpa"])
def test_an_argument_is_read_as_the_mask_confirms(kernel, mask, to_mask):
    model = Named(to_mask, kernel)
    assert heads_of(model, states(), mask) == pytest.approx(
        entropy_of(model.attend.truth, RIGHT).tolist(), abs=2e-5
    )


def test_padding_that_causal_attention_need_not_hide():
    """Padded at the end, real queries see no padding without a mask; the argument names it."""
    model = Named(lambda _: CAUSAL, "sdpa")
    heads = heads_of(model, states(), RIGHT.long())
    assert heads == pytest.approx(entropy_of(model.attend.truth, RIGHT).tolist(), abs=2e-5)


@pytest.mark.parametrize("fill", [-math.inf, -1e9])
def test_a_mask_of_queries_and_keys_is_not_taken_for_padding_if_there_are_as_many_samples_as_tokens(
    fill,
):
    model = Named(lambda m: m)
    x = states(8, 8)
    heads = heads_of(model, x, additive(torch.ones(8, 8, dtype=torch.bool).tril(), fill))
    assert heads == pytest.approx(entropy_of(model.attend.truth).tolist(), abs=2e-5)


@pytest.mark.parametrize("kernel", ["eager", "sdpa"])
def test_an_argument_that_contradicts_the_mask_is_refused(kernel):
    """It names padding that all queries attend to."""
    model = Named(lambda _: None, kernel)
    with joma.watch(model, every=1, gauges="entropy", live=False) as w:
        model(states(), LEFT.long()).sum().backward()
        with pytest.warns(
            joma.JomaWarning,
            match=r"'attention_mask' \(3, 14\) of Named .*disagree .*\[padding-conflict\]",
        ):
            w.step()


class Decoder(nn.Module):
    """Self- and cross-attention of one stream, under argument names of its own."""

    def __init__(self, kernel: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(
            [nn.ModuleDict({"own": Attention(kernel), "cross": Attention(kernel)})]
        )
        self.encoder = Attention(kernel)

    def forward(self, target, source, real_target, real_source):
        memory = self.encoder(source, None if real_source is None else keys(real_source))
        for layer in self.layers:
            target = target + layer["own"](target, causal(real_target))
            mask = None if real_source is None else keys(real_source)
            target = target + layer["cross"](target, mask, memory)
        return target


@pytest.mark.parametrize("kernel", ["eager", "sdpa"])
@pytest.mark.parametrize("length", [11, T])
@pytest.mark.parametrize("masked_source", [True, False])
def test_queries_of_cross_attention_are_those_of_the_self_attention_before_it(
    masked_source, length, kernel
):
    model = Decoder(kernel)
    source = (
        torch.arange(length)[None] < torch.tensor([6, length, 8])[:, None]
        if masked_source
        else None
    )
    with joma.watch(model, every=1, gauges="entropy", live=False) as w:
        model(states(), states(length=length, seed=2), RIGHT, source).sum().backward()
        w.step()
        found = dict(zip(w.layers, w.latest.values["entropy"].tolist(), strict=True))
    own, cross = model.layers[0]["own"], model.layers[0]["cross"]
    assert found["layers.0.own"] == pytest.approx(entropy_of(own.truth, RIGHT).tolist(), abs=2e-5)
    assert found["layers.0.cross"] == pytest.approx(
        entropy_of(cross.truth, RIGHT).tolist(), abs=2e-5
    )
    assert found["encoder"] == pytest.approx(
        entropy_of(model.encoder.truth, source).tolist(), abs=2e-5
    )


# padding=


class OneName(nn.Module):
    """The model's ``mask`` (B, T) is not what the module inside means by it."""

    def __init__(self, applied: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.attend, self.applied = Inner(), applied

    def forward(self, x, mask):
        return x + self.attend(
            x, mask=torch.where(mask | (not self.applied), 0.0, -1e3)[:, None, None]
        )


class Inner(Attention):
    def forward(self, x, mask=None):
        return super().forward(x, mask)


@pytest.mark.parametrize(
    "padding",
    ["mask", RIGHT, RIGHT.long(), lambda args, kwargs: args[1], {"attend": "mask"}, {"": RIGHT}],
    ids=["name", "mask", "integers", "function", "module", "all"],
)
def test_padding_is_a_name_a_mask_or_a_function(padding):
    model = OneName()
    heads = heads_of(model, states(), RIGHT, padding=padding)
    assert heads == pytest.approx(entropy_of(model.attend.truth, RIGHT).tolist(), abs=2e-5)


@pytest.mark.parametrize(
    ("padding", "message"),
    [
        (
            "maks",
            "padding='maks' was never applied: no module that ran has an argument of this name",
        ),
        (
            RIGHT[:2],
            r"was never applied: it must be a mask \(B, T\), 1 at real tokens; found \(2, 14\), for 3 samples",
        ),
        (lambda args, kwargs: args[1].T, r"was never applied: .*found \(14, 3\)"),
        ({"attend": "bias"}, "padding='bias' for 'attend' was never applied"),
    ],
)
def test_padding_that_was_never_applied_is_an_error_of_the_first_step(padding, message):
    model = OneName()
    with joma.watch(model, every=1, gauges="entropy", live=False, padding=padding) as w:
        model(states(), RIGHT).sum().backward()
        with pytest.raises(ValueError, match=message):
            w.step()


def test_a_name_that_only_an_inner_module_uses_for_something_else_is_an_error():
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attend = Inner()

        def forward(self, x):
            return self.attend(x, mask=keys(RIGHT))

    model = Outer()
    with joma.watch(model, every=1, gauges="entropy", live=False, padding="mask") as w:
        model(states()).sum().backward()
        with pytest.raises(
            ValueError, match=r"padding='mask' was never applied: .*found \(3, 1, 1, 14\)"
        ):
            w.step()


def test_padding_for_a_module_that_is_not_there_is_an_error_at_once():
    with pytest.raises(
        ValueError, match="padding= names 'decoder', and no module of the model has that name"
    ):
        joma.watch(OneName(), gauges="entropy", live=False, padding={"decoder": "mask"})
    with pytest.raises(TypeError, match="padding= must be the name of an argument"):
        joma.watch(OneName(), gauges="entropy", live=False, padding=3)


class TwoSides(nn.Module):
    """Padding that attention does not hide, so that only the user knows it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder, self.decoder, self.decoder_cross = Attention(), Attention(), Attention()

    def forward(self, target, source, real_target, real_source):
        memory = self.encoder(source)
        target = self.decoder(target)
        return self.decoder_cross(target, None, memory)


def test_padding_per_side():
    model = TwoSides()
    with joma.watch(
        model,
        every=1,
        gauges="entropy",
        live=False,
        padding={"source": "real_source", "target": "real_target"},
    ) as w:
        model(states(), states(seed=2), RIGHT, LEFT).sum().backward()
        w.step()
        found = dict(zip(w.layers, w.latest.values["entropy"].tolist(), strict=True))
    for name, real in (("encoder", LEFT), ("decoder", RIGHT), ("decoder_cross", RIGHT)):
        expected = entropy_of(getattr(model, name).truth, real).tolist()
        assert found[name] == pytest.approx(expected, abs=2e-5)


class Image(Attention):
    """An image (B, D, 2, 7) has 14 tokens."""

    def forward(self, pixels):
        return super().forward(pixels.flatten(2).transpose(1, 2))


class ImageFirst(nn.Module):
    """A text mask, and an image with as many tokens that has no padding, which comes first."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.image, self.text = Image(), Attention()

    def forward(self, words, pixels, attention_mask):
        return self.image(pixels) + self.text(words, keys(attention_mask))


class TwoTowers(nn.Module):
    """A text mask, and another sequence with as many tokens that has no padding."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.text, self.image = Attention(), Attention()

    def forward(self, words, pixels, attention_mask):
        return self.text(words, keys(attention_mask)) + self.image(pixels)


@pytest.mark.parametrize("kind", [TwoTowers, ImageFirst])
def test_a_text_mask_is_not_applied_to_an_image_with_as_many_tokens(kind):
    model = kind()
    pixels = (
        states(seed=2) if kind is TwoTowers else states(seed=2).transpose(1, 2).unflatten(2, (2, 7))
    )
    with joma.watch(model, every=1, gauges="entropy", live=False) as w:
        model(states(), pixels, RIGHT).sum().backward()
        w.step()
        found = dict(zip(w.layers, w.latest.values["entropy"].tolist(), strict=True))
    assert found["text"] == pytest.approx(entropy_of(model.text.truth, RIGHT).tolist(), abs=2e-5)
    assert found["image"] == pytest.approx(entropy_of(model.image.truth).tolist(), abs=2e-5)


class SplitHeads(nn.Module):
    """A module that only arranges axes, as einops' Rearrange does."""

    def forward(self, x):
        return x.unflatten(-1, (H, SIZE)).transpose(1, 2)


class SplitByModules(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.LayerNorm(D)
        self.q, self.k, self.v = (nn.Linear(D, D) for _ in range(3))
        self.split_q, self.split_k, self.split_v = (SplitHeads() for _ in range(3))
        nn.init.normal_(self.q.weight, 0, 0.4)

    def forward(self, x, mask):
        x = self.norm(x)
        q, k, v = self.split_q(self.q(x)), self.split_k(self.k(x)), self.split_v(self.v(x))
        scores = (q @ k.mT / math.sqrt(SIZE)).masked_fill(~mask[:, None, None], -math.inf)
        self.truth = scores.detach()
        return scores.softmax(-1) @ v


def test_heads_that_are_split_by_modules_are_those_of_a_self_attention():
    """Queries and keys have the same source, though a module lies before their projections."""
    model = SplitByModules()
    heads = heads_of(model, states(), RIGHT)
    assert heads == pytest.approx(entropy_of(model.truth, RIGHT).tolist(), abs=2e-5)


@pytest.mark.parametrize("is_named", [True, False])
def test_padding_that_sees_itself_is_refused_unless_an_argument_names_it(is_named):
    """In causal attention padded at the end, it looks like tokens that only read."""

    class SeesItself(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.qkv = nn.Linear(D, 3 * D)
            nn.init.normal_(self.qkv.weight, 0, 0.4)

        def forward(self, x, attention_mask=None):
            q, k, v = self.qkv(x).unflatten(-1, (3, H, SIZE)).permute(2, 0, 3, 1, 4)
            sees = (CAUSAL & RIGHT[:, None]) | torch.eye(T, dtype=torch.bool)
            scores = (q @ k.mT / math.sqrt(SIZE)).masked_fill(~sees[:, None], -math.inf)
            self.truth = scores.detach()
            return scores.softmax(-1) @ v

    model = SeesItself()
    if is_named:
        heads = heads_of(model, states(), RIGHT)
        assert heads == pytest.approx(entropy_of(model.truth, RIGHT).tolist(), abs=2e-5)
        return
    with joma.watch(model, every=1, gauges="entropy", live=False) as w:
        model(states()).square().mean().backward()
        with pytest.warns(joma.JomaWarning, match=r"\[padding-unclear\]"):
            assert w.step() == {}


def test_padding_of_top_k_attention_under_any_name():
    """Heads see different keys, so an argument decides whose padding nobody attends to."""

    class Renamed(TopK):
        def forward(self, x, keep):
            return super().forward(x, keep)

    model = Renamed()
    heads = heads_of(model, states(), RIGHT)
    assert heads == pytest.approx(entropy_of(model.truth, RIGHT).tolist(), abs=2e-5)


def test_numbers_of_positions_are_no_mask():
    """Position 0 is not padding where there are more keys than queries (cached, compressed)."""

    class MoreKeys(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.qkv = nn.Linear(D, 3 * D)
            nn.init.normal_(self.qkv.weight, 0, 0.4)

        def forward(self, x, places):
            q, k, v = self.qkv(x).unflatten(-1, (3, H, SIZE)).permute(2, 0, 3, 1, 4)
            k, v = (torch.cat([t, t.unflatten(2, (-1, 2)).mean(3)], dim=2) for t in (k, v))
            scores = q @ k.mT / math.sqrt(SIZE)
            scores = scores.masked_fill(
                torch.arange(k.shape[2]) > torch.arange(T)[:, None] + 7, -math.inf
            )
            self.truth = scores.detach()
            return scores.softmax(-1) @ v

    model = MoreKeys()
    heads = heads_of(model, states(), torch.arange(T).expand(len(states()), T))
    assert heads == pytest.approx(entropy_of(model.truth).tolist(), abs=2e-5)


def test_a_token_that_no_top_k_query_chose_is_never_called_padding():
    """By chance, what is chosen may look like padding at an end: then an argument has to decide."""
    chosen = torch.tensor([[[1, 1, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [1, 0, 1, 0]]]).bool()
    assert states_of_pattern(chosen).tolist() == [[REAL, REAL, REAL, DOUBTFUL]]
    random = torch.Generator().manual_seed(0)
    compared = 0
    for _ in range(200):
        scores = torch.randn(16, 6, 6, generator=random) + 2 * torch.eye(6)
        top_two = scores >= scores.topk(2, dim=-1).values[..., -1:]  # (16, 6, 6)
        for sees in top_two:
            is_seen = sees.any(dim=0)
            # What is seen may depend on the distance alone, as in a mask: nothing tells them apart.
            if is_seen.all() or depends_on_distance(sees[None], is_seen[None]):
                continue
            assert PADDING not in states_of_pattern(sees[None])
            compared += 1
    assert compared > 300
