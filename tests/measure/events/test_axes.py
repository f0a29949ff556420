"""The axis of heads is found by evidence and checked by brute force, or reported as uncertain."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn import functional

import joma
from tests.measure.watch.models import entropy_of, entropy_of_probabilities

T, D, H = 14, 32, 4
SIZE = D // H


def states(batch: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(batch, T, D, generator=torch.Generator().manual_seed(seed))


def measured(model: nn.Module, *inputs, **options) -> list[list[float]]:
    """Entropy per head and layer, as reported in two steps, which must be the same."""
    results = []
    with joma.watch(model, every=1, gauges="entropy", live=False, **options) as w:
        for _ in range(2):
            model(*inputs).square().mean().backward()
            w.step()
            rows = w.frame().query("gauge == 'entropy' and step == @w.last_step")
            results.append(
                [part.sort_values("head")["value"].tolist() for _, part in rows.groupby("layer")]
            )
    assert results[0] == results[1]
    return results[0]


class Styled(nn.Module):
    """Heads of very different sharpness in one of many styles; ``truth`` is (B, H, T, T)."""

    def __init__(self, style: str, kernel: str, change: str = "none") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.style, self.kernel, self.change = style, kernel, change
        self.q, self.k, self.v = (nn.Linear(D, D) for _ in range(3))
        self.norm = nn.RMSNorm(SIZE)
        with torch.no_grad():
            self.norm.weight.uniform_(0.5, 2.0)
            for h in range(H):
                self.q.weight[SIZE * h : SIZE * (h + 1)] *= 1 + 3 * h
        self.truth = torch.empty(0)

    def heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (H, SIZE)).transpose(1, 2)  # (B, H, T, d)

    def changed(self, x: torch.Tensor) -> torch.Tensor:
        if self.change == "none":
            return x
        if self.change == "scaled":
            return 0.7 * x
        if self.change == "normalised":
            return functional.rms_norm(x, (SIZE,)) * 2
        x = self.norm(x) if self.change == "norm and rotary" else x
        width = SIZE // 2 if self.change == "partial rotary" else SIZE
        angle = torch.arange(T)[:, None] * 0.9 ** torch.arange(width // 2)
        cos, sin = angle.cos().repeat(1, 2), angle.sin().repeat(1, 2)
        part, rest = x[..., :width], x[..., width:]
        first, second = part.chunk(2, dim=-1)
        return torch.cat([part * cos + torch.cat([-second, first], dim=-1) * sin, rest], dim=-1)

    def forward(self, x):
        B = len(x)
        q, k, v = self.heads(self.q(x)), self.heads(self.k(x)), self.heads(self.v(x))
        q, k = self.changed(q), self.changed(k)
        self.truth = (q @ k.mT / math.sqrt(SIZE)).detach()  # no softmax here: it would be seen
        arrange, undo = {
            "batch heads": (lambda t: t, lambda t: t),
            "heads batch": (lambda t: t.transpose(0, 1), lambda t: t.transpose(0, 1)),
            "(batch heads)": (lambda t: t.flatten(0, 1), lambda t: t.unflatten(0, (B, H))),
            "(heads batch)": (
                lambda t: t.transpose(0, 1).flatten(0, 1),
                lambda t: t.unflatten(0, (H, B)).transpose(0, 1),
            ),
            "batch one heads": (lambda t: t[:, None], lambda t: t[:, 0]),
        }[self.style]
        q, k, v = arrange(q), arrange(k), arrange(v)
        if self.kernel == "sdpa":
            y = functional.scaled_dot_product_attention(q, k, v)
        elif self.kernel == "bmm" and q.dim() == 3:
            y = torch.bmm(
                torch.softmax(torch.bmm(q, k.transpose(1, 2)) / math.sqrt(SIZE), dim=-1), v
            )
        else:
            y = (q @ k.transpose(-1, -2) / math.sqrt(SIZE)).softmax(dim=-1) @ v
        return undo(y).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("batch", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("kernel", ["sdpa", "matmul", "bmm"])
@pytest.mark.parametrize(
    "style", ["batch heads", "heads batch", "(batch heads)", "(heads batch)", "batch one heads"]
)
def test_heads_are_found_whatever_the_order_of_axes(style, kernel, batch):
    """Also where there are as many samples as heads, or a multiple of them."""
    model = Styled(style, kernel)
    (heads,) = measured(model, states(batch))
    assert heads == pytest.approx(entropy_of(model.truth).tolist(), abs=1e-5)


@pytest.mark.parametrize(
    "change", ["scaled", "normalised", "rotary", "partial rotary", "norm and rotary"]
)
@pytest.mark.parametrize("style", ["heads batch", "(batch heads)", "(heads batch)"])
@pytest.mark.parametrize("kernel", ["sdpa", "matmul"])
def test_queries_are_recognised_after_scaling_norms_and_rotary_positions(kernel, style, change):
    model = Styled(style, kernel, change)
    (heads,) = measured(model, states(4))
    assert heads == pytest.approx(entropy_of(model.truth).tolist(), abs=1e-5)


class Windows(nn.Module):
    """Attention in windows of 7 tokens; windows are averaged over, like samples."""

    def __init__(self, style: str, kernel: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.style, self.kernel = style, kernel
        self.qkv = nn.Linear(D, 3 * D)
        with torch.no_grad():
            for h in range(H):
                self.qkv.weight[SIZE * h : SIZE * (h + 1)] *= 1 + 3 * h
        self.truth = torch.empty(0)

    def forward(self, x):
        B = len(x)
        windows = self.qkv(x).view(B, 2, T // 2, 3, H, SIZE)
        order = {
            "batch heads windows": "bhw", "batch windows heads": "bwh", "(batch heads) windows": "bhw",
            "(batch windows) heads": "bwh",
        }[self.style]  # fmt: skip
        axes = {"b": 0, "w": 1, "h": 4}
        q, k, v = windows.permute(3, *(axes[name] for name in order), 2, 5)
        self.truth = (q @ k.mT / math.sqrt(SIZE)).detach()  # no softmax here: it would be seen
        self.truth = (
            self.truth.movedim(order.index("h"), 0).flatten(1, 2).transpose(0, 1)
        )  # (B·windows, H, …)
        if self.style.startswith("("):
            q, k, v = (t.flatten(0, 1) for t in (q, k, v))
        if self.kernel == "sdpa":
            y = functional.scaled_dot_product_attention(q, k, v)
        else:
            y = (q @ k.mT / math.sqrt(SIZE)).softmax(-1) @ v
        return y


@pytest.mark.parametrize("batch", [1, 2, 3, 4])
@pytest.mark.parametrize("kernel", ["sdpa", "matmul"])
@pytest.mark.parametrize(
    "style",
    [
        "batch heads windows",
        "batch windows heads",
        "(batch heads) windows",
        "(batch windows) heads",
    ],
)
def test_windows_are_averaged_over_like_samples(style, kernel, batch):
    model = Windows(style, kernel)
    (heads,) = measured(model, states(batch))
    assert heads == pytest.approx(entropy_of(model.truth).tolist(), abs=1e-5)


class Convolutional(nn.Module):
    """Convolutions project an image; heads are merged with samples; fewer keys (CvT, BoTNet)."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q, self.kv = nn.Conv2d(6, 2 * 8, 1), nn.Conv2d(6, 4 * 8, 2, stride=2)
        with torch.no_grad():
            self.q.weight[8:] *= 6
        self.truth = torch.empty(0)

    def forward(self, x):
        B = len(x)
        q, (k, v) = self.q(x), self.kv(x).chunk(2, dim=1)
        q, k, v = (
            t.unflatten(1, (2, 8)).flatten(0, 1).flatten(2).transpose(1, 2) for t in (q, k, v)
        )  # (B·2, XY, 8)
        p = (q @ k.mT / math.sqrt(8)).softmax(-1)
        self.truth = p.detach().unflatten(0, (B, 2))
        return p @ v


@pytest.mark.parametrize("batch", [1, 2, 3])
def test_heads_of_convolutional_projections(batch):
    model = Convolutional()
    (heads,) = measured(model, torch.randn(batch, 6, 4, 6))
    assert heads == pytest.approx(entropy_of_probabilities(model.truth).tolist(), abs=1e-5)


class Hidden(Styled):
    """Queries that no projection shows: a learned map of each head lies between."""

    def __init__(self, style: str, kernel: str) -> None:
        super().__init__(style, kernel)
        self.map = nn.Parameter(torch.randn(H, SIZE, SIZE))

    def changed(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x).cumsum(dim=-1)


@pytest.mark.parametrize("style", ["(heads batch)", "(batch heads)"])
def test_a_layer_without_certain_heads_is_reported_as_one_and_said_once(style):
    model = Hidden(style, "matmul")
    with joma.watch(model, every=1, gauges="entropy", live=False) as w:
        model(states(3)).sum().backward()
        with pytest.warns(
            UserWarning, match=r"not certain which axis holds the heads of Hidden.*\[head-axis\]"
        ):
            w.step()
        model(states(3)).sum().backward()
        w.step()  # a second warning would be an error
        layer = w.latest.values["entropy"]
    expected = float(entropy_of(model.truth).mean())
    assert layer.shape == (1, 1)
    assert float(layer) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(
    ("style", "heads"),
    [
        ("(heads batch)", "heads batch"),
        ("(batch heads)", "batch heads"),
        ("heads batch", H),
        ("batch heads", {"": H}),
    ],
)
def test_the_user_can_say_where_the_heads_are(style, heads):
    model = Hidden(style, "matmul")
    (values,) = measured(model, states(3), heads=heads)
    assert values == pytest.approx(entropy_of(model.truth).tolist(), abs=1e-5)


def test_heads_of_unknown_modules_and_impossible_values_are_errors_at_once():
    with pytest.raises(ValueError, match="no module of the model has that name"):
        joma.watch(
            Styled("batch heads", "sdpa"), gauges="entropy", heads={"decoder": 4}, live=False
        )
    with pytest.raises(ValueError, match="must be a number of heads, or"):
        joma.watch(Styled("batch heads", "sdpa"), gauges="entropy", heads="first", live=False)


def test_an_order_that_was_found_holds_for_other_sizes():
    """Three samples show the order of a merged axis; other lengths and batches use it."""
    model = Styled("(heads batch)", "bmm")
    with joma.watch(model, every=1, gauges="entropy", live=False) as w:
        for batch, length in ((3, T), (4, T), (6, 9), (1, 5)):
            model(states(batch)[:, :length]).sum().backward()
            w.step()
            expected = entropy_of(model.truth).tolist()
            assert w.latest.values["entropy"][0].tolist() == pytest.approx(expected, abs=1e-5)


class Chosen(nn.Module):
    """Attends with five chosen queries of fourteen (ProbSparse)."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv = nn.Linear(D, 3 * D)
        self.truth = torch.empty(0)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, H, SIZE)).permute(2, 0, 3, 1, 4)
        top = q.norm(dim=-1).topk(5, dim=-1).indices[..., None].expand(-1, -1, -1, SIZE)
        p = (q.gather(2, top) @ k.mT).softmax(-1)
        self.truth = p.detach()
        return p @ v


def test_the_share_of_queries_that_attend_is_reported():
    model = Chosen()
    with joma.watch(model, every=1, gauges="entropy", live=False) as w:
        model(states(3)).sum().backward()
        with pytest.warns(
            UserWarning, match=r"attends with 35\.7% of its queries.*\[part-of-queries\]"
        ):
            w.step()
    expected = entropy_of_probabilities(model.truth).tolist()
    assert w.latest.values["entropy"][0].tolist() == pytest.approx(expected, abs=1e-5)


class Experts(nn.Module):
    """Two experts give the queries of two heads each, in the same slices of one output (JetMoe)."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q = nn.Linear(D, 2 * SIZE)
        self.kv = nn.Linear(D, 2 * D)
        self.truth = torch.empty(0)

    def forward(self, x):
        q = self.q(torch.stack([x, 6 * x.flip(-1)], dim=2)).flatten(2)  # (B, T, 2 · 2 · d)
        q, k, v = (
            t.unflatten(-1, (H, SIZE)).transpose(1, 2) for t in (q, *self.kv(x).chunk(2, dim=-1))
        )
        self.truth = (q @ k.mT / math.sqrt(SIZE)).detach()
        return functional.scaled_dot_product_attention(q, k, v)


@pytest.mark.filterwarnings("ignore:.*not certain which axis holds the heads")
def test_heads_of_several_experts_are_not_taken_for_windows():
    model = Experts()
    (heads,) = measured(model, states(3))
    truth = entropy_of(model.truth)
    assert heads in (
        pytest.approx(truth.tolist(), abs=1e-5),
        pytest.approx([float(truth.mean())], abs=1e-5),
    )


class SharedQueries(nn.Module):
    """All heads share the queries of one slice of a fused projection; each has its keys."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv = nn.Linear(D, SIZE + 2 * D)
        self.truth = torch.empty(0)

    def forward(self, x):
        q, k, v = self.qkv(x).split([SIZE, D, D], dim=-1)
        q = q[:, None].expand(-1, H, -1, -1)  # (B, H, T, d)
        k, v = (part.unflatten(-1, (H, SIZE)).transpose(1, 2) for part in (k, v))
        sharpness = torch.tensor([1.0, 3.0, 6.0, 9.0])[:, None, None]
        scores = q @ (sharpness * k).mT / math.sqrt(SIZE)
        self.truth = scores.detach()
        return (scores.softmax(dim=-1) @ v).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("batch", [2, 3])
def test_heads_that_share_their_queries_are_not_taken_for_samples_of_one_head(batch):
    """Values look like one head and sizes do not decide, so the layer is reported as one."""
    model = SharedQueries()
    with pytest.warns(
        joma.JomaWarning, match=r"not certain which axis holds the heads .*\[head-axis\]"
    ):
        ((mean,),) = measured(model, states(batch))
    assert mean == pytest.approx(float(entropy_of(model.truth).mean()), abs=1e-5)
