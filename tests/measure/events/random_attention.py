"""Small attention modules of random shapes, masks, layouts and types, with their true entropy.

`draw` makes a configuration from a number, `check` measures it with a watch and compares. The truth
is computed in float64 from the same queries and keys, the mask that the configuration asks for, and
the padding of the batch.
"""

from __future__ import annotations

import math
import random
import re
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

import joma

STYLES = ("sdpa", "eager", "bmm", "einsum", "multihead", "baddbmm")
HIDDEN = {
    "-inf": -math.inf,
    "-1e9": -1e9,
    "-1e4": -1e4,
}  # and "lowest", the lowest number of the type
TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-5, torch.bfloat16: 1e-2}


@dataclass(frozen=True)
class Configuration:
    """One attention, and how it is called.

    Attributes:
        layout: order of the leading axes of queries, keys and values.
        projection: "separate", or one matrix for all in the order "chunks" (3, H, d) or
            "interleaved" (H, 3, d).
        padding: "none", "left", "right" or "random".
        pattern: "full", "causal" or "window" (causal, at most four keys).
        argument: the name under which the mask is given.
        form: "rows" (B, T), "matrix" (B, 1, T, T), "keys" (B, 1, 1, T) or "pattern" (T, T).
        hides: how a hidden key is written: "bool", or a number that is added.
        rescue: what a query sees that would see nothing: "all" or "itself"; "none" for finite
            numbers.
    """

    seed: int
    style: str
    layout: str
    projection: str
    batch: int
    tokens: int
    heads: int
    key_heads: int
    size: int
    padding: str
    pattern: str
    argument: str
    form: str
    hides: str
    rescue: str
    change: str
    dtype: torch.dtype
    is_autocast: bool
    dropout: float
    is_training: bool
    is_sequence_first: bool
    windows: int

    @property
    def width(self) -> int:
        """Channels of the module's input."""
        return self.heads * self.size

    @property
    def computed_in(self) -> torch.dtype:
        """The type of queries and keys."""
        return torch.bfloat16 if self.is_autocast else self.dtype


@dataclass(frozen=True)
class Outcome:
    """What a watch made of a configuration: "right", "layer only", "refused" or "wrong"."""

    configuration: Configuration
    verdict: str
    error: float = 0.0
    reason: str = ""

    @property
    def code(self) -> str:
        """The short code of the reason."""
        codes = re.findall(r"\[([a-z-]+)\]", self.reason)
        return codes[-1] if codes else "no code"


def draw(seed: int) -> Configuration:
    """Draw a configuration; the same number gives the same one."""
    chance = random.Random(seed)
    style = chance.choice(STYLES)
    heads = chance.choice([1, 2, 3, 4, 6])
    tokens = chance.choice([1, 2, 3, 4, 5, 8, 12, 17, 24])
    batch = chance.choice([1, 2, 3, 5, heads, tokens])
    batch = min(batch, 12)
    windows = chance.choice([2, 3]) if style in ("sdpa", "eager") and chance.random() < 0.12 else 1
    padding = "none" if windows > 1 else chance.choice(["none", "left", "right", "random"])
    pattern = "full" if windows > 1 else chance.choice(["full", "causal", "window"])
    key_heads = chance.choice([n for n in (1, 2, 3) if heads % n == 0])
    if style not in ("sdpa", "eager") or chance.random() < 0.6 or windows > 1:
        key_heads = heads
    projection = "separate"
    if key_heads == heads:
        projection = chance.choice(["separate", "chunks", "interleaved"])
    argument, form, hides = _draw_mask(chance, style, padding, pattern)
    rescue = "none"
    if hides in ("bool", "-inf"):
        rescue = chance.choice(["all", "itself"])
    dtype, is_autocast = chance.choice(
        [(torch.float32, False)] * 3
        + [(torch.bfloat16, False), (torch.float64, False), (torch.float32, True)]
    )
    return Configuration(
        seed=seed,
        style=style,
        layout=_draw_layout(chance, style, windows),
        projection=projection,
        batch=batch,
        tokens=tokens * windows,
        heads=heads,
        key_heads=key_heads,
        size=chance.choice([4, 4, 8, 8, 16, 16, 5, 2]),
        padding=padding,
        pattern=pattern,
        argument=argument,
        form=form,
        hides=hides,
        rescue=rescue,
        change=chance.choice(["none", "none", "none", "rotary", "normalised"]),
        dtype=dtype,
        is_autocast=is_autocast,
        dropout=chance.choice([0.0, 0.0, 0.1, 0.3]),
        is_training=chance.random() < 0.6,
        is_sequence_first=style in ("bmm", "multihead", "einsum") and chance.random() < 0.3,
        windows=windows,
    )


def _draw_mask(
    chance: random.Random, style: str, padding: str, pattern: str
) -> tuple[str, str, str]:
    """Name of the argument, its form, and how hidden keys are written."""
    hides = chance.choice(["bool", "-inf", "-1e9", "-1e4", "lowest"])
    if style == "multihead":
        # (T, T) and (B, T) are added: only finite numbers leave something to a query that sees
        # nothing
        if padding in ("left", "random") and pattern != "full":
            hides = chance.choice(["-1e9", "-1e4"])
        return "key_padding_mask", "rows", hides
    argument = chance.choice(["attention_mask", "key_padding_mask", "mask"])
    forms = ["rows", "matrix"]
    if padding == "none":
        forms = ["pattern", "matrix"]
    elif pattern == "full":
        forms.append("keys")
    form = chance.choice(forms)
    if argument == "key_padding_mask":
        form = "rows"
    return argument, form, hides


def _draw_layout(chance: random.Random, style: str, windows: int) -> str:
    if windows > 1:
        return chance.choice(
            ["(batch windows) heads", "batch windows heads", "batch heads windows"]
        )
    if style in ("bmm", "baddbmm"):
        return chance.choice(["(batch heads)", "(heads batch)"])
    if style == "einsum":
        return chance.choice(["bthd,bshd->bhts", "bhtd,bhsd->bhts", "tbhd,sbhd->bhts"])
    if style == "multihead":
        return chance.choice(["weights", "no weights", "weights per head"])
    return chance.choice(["batch heads", "batch heads", "heads batch"])


def real_tokens(configuration: Configuration) -> Tensor:
    """Boolean (B, T), True at tokens that are not padding; each sample has at least one."""
    B, T = configuration.batch, configuration.tokens
    generator = torch.Generator().manual_seed(configuration.seed)
    if configuration.padding == "none":
        return torch.ones(B, T, dtype=torch.bool)
    if configuration.padding == "random":
        real = torch.rand(B, T, generator=generator) < 0.7
        real[torch.arange(B), torch.randint(T, (B,), generator=generator)] = True
        return real
    lengths = torch.randint(1, T + 1, (B, 1), generator=generator)
    positions = torch.arange(T)
    if configuration.padding == "left":
        return positions >= T - lengths
    return positions < lengths


def visible_keys(configuration: Configuration, real: Tensor) -> Tensor:
    """Boolean (B, T, T): which keys queries see."""
    T = configuration.tokens
    pattern = torch.ones(T, T, dtype=torch.bool)
    if configuration.pattern != "full":
        pattern = pattern.tril()
    if configuration.pattern == "window":
        pattern = pattern.triu(-3)
    sees = pattern & real[:, None]
    is_empty = ~sees.any(dim=-1)
    if configuration.rescue == "all":
        sees = sees | is_empty[..., None]
    if configuration.rescue == "itself":
        sees = sees | (is_empty[..., None] & torch.eye(T, dtype=torch.bool))
    return sees


def added(configuration: Configuration, sees: Tensor, dtype: torch.dtype) -> Tensor:
    """What is added to the scores."""
    number = HIDDEN.get(configuration.hides, -math.inf)
    if configuration.hides == "lowest":
        number = torch.finfo(dtype).min
    return torch.zeros(sees.shape, dtype=dtype).masked_fill(~sees, number)


class Attention(nn.Module):
    """Attention in one of the styles; ``queries`` and ``keys`` (B, H, T, d) of the last call."""

    def __init__(self, configuration: Configuration) -> None:
        super().__init__()
        self.configuration = configuration
        width, size = configuration.width, configuration.size
        if configuration.style == "multihead":
            is_batch_first = not configuration.is_sequence_first
            dropout = configuration.dropout
            self.inner = nn.MultiheadAttention(
                width, configuration.heads, dropout, batch_first=is_batch_first
            )
            self._sharpen(self.inner.in_proj_weight)
        elif configuration.projection == "separate":
            self.q = nn.Linear(width, width)
            self.k = nn.Linear(width, configuration.key_heads * size)
            self.v = nn.Linear(width, configuration.key_heads * size)
            self._sharpen(self.q.weight)
        else:
            self.qkv = nn.Linear(width, 3 * width)
            if configuration.projection == "chunks":
                self._sharpen(self.qkv.weight)
            else:
                self._sharpen(self.qkv.weight, stride=3)
        self.out = nn.Linear(width, width)
        self.queries = torch.empty(0)
        self.keys = torch.empty(0)

    def _sharpen(self, weight: nn.Parameter, stride: int = 1) -> None:
        """Give each head another sharpness, so that heads which are mixed up show."""
        size = self.configuration.size
        with torch.no_grad():
            for head in range(self.configuration.heads):
                start = stride * head * size
                weight[start : start + size] *= 1 + 2 * head

    def forward(self, x, attention_mask=None, key_padding_mask=None, mask=None):
        configuration = self.configuration
        given = next((m for m in (attention_mask, key_padding_mask, mask) if m is not None), None)
        if configuration.style == "multihead":
            return self._multihead(x, given)
        q, k, v = self._projected(x)  # (B, H or Hk, T, d)
        q, k = self._changed(q), self._changed(k)
        self.queries = q.detach()
        self.keys = k.detach()
        y = self._attend(
            q, k, v, self._mask(given, q.dtype, is_fused=configuration.style == "sdpa")
        )
        y = y.transpose(1, 2).flatten(2)  # (B, T, D)
        if configuration.is_sequence_first:
            y = y.transpose(0, 1)
        return self.out(y)

    def _projected(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        configuration = self.configuration
        size = configuration.size
        if configuration.projection == "separate":
            parts = [linear(x).unflatten(-1, (-1, size)) for linear in (self.q, self.k, self.v)]
        elif configuration.projection == "chunks":
            parts = [part.unflatten(-1, (-1, size)) for part in self.qkv(x).chunk(3, dim=-1)]
        else:
            parts = list(self.qkv(x).unflatten(-1, (configuration.heads, 3, size)).unbind(-2))
        if configuration.is_sequence_first:
            parts = [part.transpose(0, 1) for part in parts]
        q, k, v = (part.transpose(1, 2) for part in parts)
        return q, k, v

    def _changed(self, rows: Tensor) -> Tensor:
        change = self.configuration.change
        size = self.configuration.size
        if change == "normalised":
            return 2 * functional.rms_norm(rows, (size,))
        if change == "none" or size % 2:
            return rows
        angle = torch.arange(rows.shape[2])[:, None] * 0.9 ** torch.arange(size // 2)
        cos = angle.cos().repeat(1, 2).to(rows.dtype)
        sin = angle.sin().repeat(1, 2).to(rows.dtype)
        first, second = rows.chunk(2, dim=-1)
        return rows * cos + torch.cat([-second, first], dim=-1) * sin

    def _mask(self, given: Tensor | None, dtype: torch.dtype, is_fused: bool) -> Tensor | None:
        """The mask (B or 1, 1, T, T), boolean for True at keys that are seen, or additive."""
        configuration = self.configuration
        if given is None:
            return None
        if configuration.form == "rows":
            real = ~given if configuration.argument == "key_padding_mask" else given != 0
            sees = visible_keys(configuration, real)[:, None]
            if configuration.hides == "bool":
                return sees
            return added(configuration, sees, dtype)
        mask = given[None, None] if given.dim() == 2 else given
        return mask if mask.dtype == torch.bool or not is_fused else mask.to(dtype)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        configuration = self.configuration
        H = q.shape[1]
        if configuration.windows > 1:
            return self._in_windows(q, k, v)
        if configuration.style == "sdpa":
            return self._fused(q, k, v, mask)
        if k.shape[1] != H:
            k = k.repeat_interleave(H // k.shape[1], dim=1)
            v = v.repeat_interleave(H // v.shape[1], dim=1)
        scale = configuration.size**-0.5
        if configuration.style == "einsum":
            return self._einsum(q, k, v, mask, scale)
        if configuration.style == "eager":
            if configuration.layout == "heads batch":
                q, k, v = (part.transpose(0, 1) for part in (q, k, v))
                mask = None if mask is None else mask.transpose(0, 1)
            y = self._weights(q @ k.mT * scale, mask) @ v
            return y.transpose(0, 1) if configuration.layout == "heads batch" else y
        return self._merged(q, k, v, mask, scale)

    def _fused(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        configuration = self.configuration
        is_grouped = k.shape[1] != q.shape[1]
        is_heads_first = configuration.layout == "heads batch" and not is_grouped
        if is_heads_first:
            q, k, v = (part.transpose(0, 1) for part in (q, k, v))
            mask = None if mask is None else mask.transpose(0, 1)
        is_causal = mask is None and configuration.pattern == "causal"
        y = functional.scaled_dot_product_attention(
            q, k, v, mask, self._dropout, is_causal, enable_gqa=is_grouped
        )  # fmt: skip
        return y.transpose(0, 1) if is_heads_first else y

    def _in_windows(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        configuration = self.configuration
        n = configuration.windows
        parts = [part.unflatten(2, (n, -1)) for part in (q, k, v)]  # (B, H, n, w, d)
        if configuration.layout != "batch heads windows":
            parts = [part.transpose(1, 2) for part in parts]  # (B, n, H, w, d)
        if configuration.layout == "(batch windows) heads":
            parts = [part.flatten(0, 1) for part in parts]
        q, k, v = parts
        if configuration.style == "sdpa":
            y = functional.scaled_dot_product_attention(q, k, v, None, self._dropout)
        else:
            y = self._weights(q @ k.mT * configuration.size**-0.5, None) @ v
        if configuration.layout == "(batch windows) heads":
            y = y.unflatten(0, (-1, n))
        if configuration.layout != "batch heads windows":
            y = y.transpose(1, 2)
        return y.flatten(2, 3)

    @property
    def _dropout(self) -> float:
        return self.configuration.dropout if self.training else 0.0

    def _weights(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        if mask is not None and mask.dtype == torch.bool:
            scores = scores.masked_fill(~mask, -math.inf)
        elif mask is not None:
            scores = scores + mask
        return functional.dropout(scores.softmax(dim=-1), self._dropout)

    def _einsum(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
        left, right = self.configuration.layout.partition("->")[0].split(",")
        axes = {"b": 0, "h": 1, "t": 2, "s": 2, "d": 3}
        q = q.permute(*(axes[label] for label in left))
        k, v = (part.permute(*(axes[label] for label in right)) for part in (k, v))
        p = self._weights(torch.einsum(self.configuration.layout, q, k) * scale, mask)
        return torch.einsum(f"bhts,{right}->bhtd", p, v)

    def _merged(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
        """Samples and heads as one axis."""
        B, H, T, _ = q.shape
        if mask is not None:
            mask = mask.expand(B, H, T, T)
        is_heads_first = self.configuration.layout == "(heads batch)"
        if is_heads_first:
            q, k, v = (part.transpose(0, 1) for part in (q, k, v))
            mask = None if mask is None else mask.transpose(0, 1)
        q, k, v = (part.flatten(0, 1) for part in (q, k, v))
        mask = None if mask is None else mask.flatten(0, 1)
        if self.configuration.style == "baddbmm":
            bias = torch.zeros(len(q), T, T, dtype=q.dtype)
            if mask is not None and mask.dtype != torch.bool:
                bias = mask.to(q.dtype)
                mask = None
            p = self._weights(torch.baddbmm(bias, q, k.mT, beta=1.0, alpha=scale), mask)
        else:
            p = self._weights(torch.bmm(q * scale, k.mT), mask)
        y = torch.bmm(p, v)
        return y.unflatten(0, (H, B)).transpose(0, 1) if is_heads_first else y.unflatten(0, (B, H))

    def _multihead(self, x: Tensor, padding: Tensor | None) -> Tensor:
        """`nn.MultiheadAttention` with a pattern (T, T) and a mask of keys (B, T)."""
        configuration = self.configuration
        pattern = None
        T = configuration.tokens
        if configuration.pattern != "full":
            pattern = visible_keys(configuration, torch.ones(1, T, dtype=torch.bool))[0]
            pattern = (
                ~pattern
                if configuration.hides == "bool"
                else added(configuration, pattern, configuration.dtype)
            )
        if padding is not None and configuration.hides != "bool":
            padding = added(configuration, ~padding, configuration.dtype)
        if configuration.layout == "weights":
            y, _ = self.inner(x, x, x, key_padding_mask=padding, attn_mask=pattern)
        elif configuration.layout == "no weights":
            y, _ = self.inner(
                query=x,
                key=x,
                value=x,
                key_padding_mask=padding,
                attn_mask=pattern,
                need_weights=False,
            )
        else:
            y, _ = self.inner(x, x, x, padding, attn_mask=pattern, average_attn_weights=False)
        return self.out(y)

    def remember_rows(self, x: Tensor) -> None:
        """Project queries and keys as `nn.MultiheadAttention` does."""
        rows = functional.linear(x, self.inner.in_proj_weight, self.inner.in_proj_bias)
        if self.configuration.is_sequence_first:
            rows = rows.transpose(0, 1)
        q, k, _ = rows.unflatten(-1, (3, self.configuration.heads, -1)).permute(2, 0, 3, 1, 4)
        self.queries = q.detach()
        self.keys = k.detach()


class Model(nn.Module):
    """A normalisation and an attention, which get the same arguments."""

    def __init__(self, configuration: Configuration) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(configuration.width)
        self.attn = Attention(configuration)

    def forward(self, x, attention_mask=None, key_padding_mask=None, mask=None):
        return self.attn(self.norm(x), attention_mask, key_padding_mask=key_padding_mask, mask=mask)


def arguments_of(configuration: Configuration, real: Tensor) -> dict[str, Tensor]:
    """Return the mask by the configured name and in the configured form, if any key is hidden."""
    is_plain = configuration.padding == "none" and configuration.pattern == "full"
    if is_plain or configuration.windows > 1:
        return {}
    if configuration.style == "multihead":
        return {} if configuration.padding == "none" else {"key_padding_mask": ~real}
    if configuration.form == "rows":
        is_padding = configuration.argument == "key_padding_mask"
        rows = ~real if is_padding else real.long()
        return {configuration.argument: rows}
    sees = visible_keys(configuration, real)  # (B, T, T)
    if configuration.form == "pattern":
        sees = sees[0]
    elif configuration.form == "keys":
        sees = real[:, None, None]
    else:
        sees = sees[:, None]
    if configuration.hides != "bool":
        sees = added(configuration, sees, configuration.dtype)
    return {configuration.argument: sees}


def true_entropy(configuration: Configuration, attention: Attention, real: Tensor) -> Tensor:
    """Entropy (H,) over real queries, by brute force in float64."""
    q = attention.queries.double()
    k = attention.keys.double()
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    scores = q @ k.mT * configuration.size**-0.5
    sees = visible_keys(configuration, real)
    if configuration.windows > 1:
        window = torch.arange(configuration.tokens) // (
            configuration.tokens // configuration.windows
        )
        sees = (window[:, None] == window).expand_as(sees)
    scores = scores.masked_fill(~sees[:, None], -math.inf)
    p = scores.softmax(dim=-1)
    rows = -torch.special.xlogy(p, p).sum(dim=-1)  # (B, H, T)
    return torch.stack([rows[:, head][real].mean() for head in range(rows.shape[1])])


def check(configuration: Configuration) -> Outcome:
    """Measure one configuration with a watch, and compare."""
    torch.manual_seed(configuration.seed)
    model = Model(configuration).to(configuration.dtype)
    model.train(configuration.is_training)
    real = real_tokens(configuration)
    x = 1.5 * torch.randn(configuration.batch, configuration.tokens, configuration.width)
    x = x.to(configuration.dtype)
    if configuration.is_sequence_first:
        x = x.transpose(0, 1)
    x = x.contiguous()
    autocast = torch.autocast("cpu", torch.bfloat16) if configuration.is_autocast else nullcontext()
    with warnings.catch_warnings(record=True) as messages:
        warnings.simplefilter("always")
        with joma.watch(model, every=1, gauges="entropy", live=False) as watch:
            with autocast:
                model(x, **arguments_of(configuration, real)).float().square().mean().backward()
            watch.step()
            measured = watch.latest.values.get("entropy")
    if measured is None:
        return Outcome(configuration, "refused", reason=" ".join(watch.problems))
    if configuration.style == "multihead":
        with autocast:
            model.attn.remember_rows(model.norm(x))
    expected = true_entropy(configuration, model.attn, real)
    return _judge(
        configuration, torch.as_tensor(measured), expected, [str(w.message) for w in messages]
    )


def _judge(
    configuration: Configuration, measured: Tensor, expected: Tensor, messages: Sequence[str]
) -> Outcome:
    verdict = "right"
    reason = " ".join(messages)
    if measured.shape == (1, 1) and len(expected) > 1 and "[head-axis]" in reason:
        verdict = "layer only"
        expected = expected.mean(dim=0, keepdim=True)
    if measured.shape != (1, len(expected)):
        return Outcome(configuration, "wrong", math.inf, f"{tuple(measured.shape)}: {reason}")
    error = float((measured[0] - expected).abs().max())
    if not error <= TOLERANCE[configuration.computed_in]:
        verdict = "wrong"
    return Outcome(configuration, verdict, error, reason)
