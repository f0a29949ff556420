"""Attention patterns of a watched run: right to their stated error, few, whole after a kill, and harmless."""

import json
import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

import joma
from joma._measure.watch.patterns import PatternKeeper
from joma._runs.patterns import (
    PATTERNS,
    Pattern,
    Patterns,
    as_bytes,
    chosen,
    read_patterns,
    write_patterns,
)

T, D = 7, 8


class Attention(nn.Module):
    """Causal, two heads; keeps its last queries and keys."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(D, 3 * D)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, D // 2)).permute(2, 0, 3, 1, 4)
        self.last = q.detach(), k.detach()
        return scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2)

    def pattern(self):
        """Of the first sequence, mean over heads."""
        (q, k), later = self.last, torch.ones(T, T, dtype=torch.bool).triu(1)
        return (
            (q[0] @ k[0].mT / math.sqrt(D // 2))
            .masked_fill(later, -math.inf)
            .softmax(-1)
            .mean(0)
            .numpy()
        )


class Tiny(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Attention() for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x


def train(path, steps, probe, resume=False, first=1, model=None, **options):
    torch.manual_seed(0)
    model = model or Tiny()
    optimizer = torch.optim.SGD(model.parameters(), 0.3)
    options = {"gauges": ("entropy",), "every": 1, "live": False, **options}
    with joma.watch(model, path, probe=probe, resume=resume, **options) as w:
        for step in range(first, first + steps):
            torch.manual_seed(step)
            loss = model(torch.randn(2, T, D)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            w.step(loss, step=step)
    return model


def test_the_patterns_are_the_means_over_heads_of_the_probes_first_sequence(tmp_path):
    probe = torch.randn(3, T, D, generator=torch.Generator().manual_seed(5))
    words = [f"w{n}" for n in range(T)]
    model = train(tmp_path / "run", 4, probe, words=words)
    with torch.no_grad():
        model(probe)  # as at the last step
    stored = read_patterns(tmp_path / "run")
    assert stored.words == words
    assert list(stored.layers) == [0, 1]
    last = stored.kept[-1]
    assert last.step == 4
    for n in range(2):
        p = model.layers[n].pattern()
        assert (np.abs(last.shares(n) - p) <= np.sqrt(p) / 255 + 1e-5).all()
    table = joma.Run(tmp_path / "run").frame("entropy")
    top = table[table.layer == 1].groupby("step").value.mean()
    assert {pattern.step for pattern in stored.kept} == {1, int(top.idxmin()), 4}
    assert all(pattern.entropy == pytest.approx(top[pattern.step]) for pattern in stored.kept)
    assert joma.Run(tmp_path / "run").info["uniform"] == pytest.approx(
        [math.lgamma(T + 1) / T] * 2, abs=1e-5
    )


def test_keeping_three_as_they_come_keeps_the_first_the_lowest_and_the_last():
    rng = np.random.default_rng(0)
    for _ in range(200):
        entropies = rng.integers(0, 6, size=rng.integers(1, 12))  # with equal ones among them
        every = [Pattern(n, entropy, []) for n, entropy in enumerate(entropies)]
        kept = []
        for pattern in every:
            kept = chosen([*kept, pattern])
        assert [one.step for one in kept] == sorted({0, int(np.argmin(entropies)), len(every) - 1})


def test_a_weight_is_read_back_to_within_its_stated_error():
    p = np.concatenate([[0.0, 1.0], np.geomspace(1e-8, 1.0, 5000)])
    back = Pattern(1, 0.0, [as_bytes(p[None])]).shares(0)[0]
    assert (np.abs(back - p) <= np.sqrt(p) / 255 + 1 / 510**2).all()


def test_training_is_bitwise_what_it_was_and_a_failing_pattern_is_said_once(
    tmp_path, monkeypatch, recwarn
):
    probe = torch.randn(1, T, D)
    plain = train(None, 3, probe, patterns=False).state_dict()
    watched = train(tmp_path / "a", 3, probe).state_dict()
    assert all(torch.equal(plain[name], watched[name]) for name in plain)
    assert not recwarn.list

    def broken(*_):
        raise RuntimeError("no memory for it")

    monkeypatch.setattr("joma._measure.watch.patterns.as_bytes", broken)
    with pytest.warns(
        UserWarning, match="attention patterns are no longer recorded: RuntimeError: no memory"
    ) as said:
        broken_run = train(tmp_path / "b", 3, probe).state_dict()
    assert len(said) == 1
    assert all(torch.equal(plain[name], broken_run[name]) for name in plain)
    assert joma.Run(tmp_path / "b").frame("entropy").step.max() == 3  # gauges go on
    assert not (tmp_path / "b" / PATTERNS).exists()


def test_a_resumed_run_has_the_patterns_of_an_unbroken_one(tmp_path):
    probe = torch.randn(2, T, D)
    train(tmp_path / "whole", 6, probe)
    model = train(tmp_path / "parts", 3, probe)
    torch.manual_seed(0)
    train(tmp_path / "parts", 3, probe, resume=True, first=4, model=model)
    whole, parts = (
        json.loads((tmp_path / name / PATTERNS).read_text()) for name in ("whole", "parts")
    )
    assert whole == parts


def test_patterns_of_steps_that_are_made_again_are_dropped(tmp_path):
    probe = torch.randn(2, T, D)
    model = train(tmp_path / "run", 4, probe)
    train(tmp_path / "run", 1, probe, resume=True, first=2, model=model)
    assert [pattern.step for pattern in read_patterns(tmp_path / "run").kept] == [1, 2]


def test_a_damaged_file_begins_anew_and_stops_nothing(tmp_path):
    probe = torch.randn(2, T, D)
    model = train(tmp_path / "run", 2, probe)
    (tmp_path / "run" / PATTERNS).write_text('{"layers": {"0"')
    with pytest.warns(UserWarning, match="damaged"):
        train(tmp_path / "run", 1, probe, resume=True, first=3, model=model)
    assert [pattern.step for pattern in read_patterns(tmp_path / "run").kept] == [3]


def test_the_file_stays_small_for_a_deep_model_and_a_long_sequence(tmp_path):
    rng = np.random.default_rng(0)
    weights = [as_bytes(rng.dirichlet(np.ones(64), 64)) for _ in range(12)]  # incompressible
    kept = [Pattern(step, 1.0, weights) for step in (1, 2, 3)]
    write_patterns(tmp_path, Patterns({n: f"h.{n}" for n in range(12)}, ["word"] * 64, kept))
    assert (tmp_path / PATTERNS).stat().st_size < 300_000


def test_what_makes_no_sense_is_refused():
    model = Tiny()
    with pytest.raises(ValueError, match="give probe=batch"):
        joma.watch(model, gauges="entropy", patterns=True)
    with pytest.raises(ValueError, match="none are recorded"):
        joma.watch(model, gauges="entropy", words=["a"])
    with pytest.raises(TypeError, match="a list of strings"):
        joma.watch(model, gauges="entropy", probe=torch.randn(1, T, D), words="abc")
    assert PatternKeeper(None, False).wants == ()
