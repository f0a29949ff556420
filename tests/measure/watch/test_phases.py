"""Phases on curves whose story is known."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest
import torch

import joma
from joma._measure.watch.phases import PATIENCE, PHASES, Phase, Phases
from joma._measure.watch.readings import nonsink_of_layer
from tests.measure.watch.models import LENGTH, VOCABULARY, HandWrittenGPT


def story(entropies, losses=None, nonsink=None, noise=0.0, seed=0):
    """The phases of a curve, without repetitions."""
    rng = np.random.default_rng(seed)
    phase, told = Phase(), []
    for n, entropy in enumerate(entropies):
        loss = math.nan if losses is None else losses[n]
        low = math.nan if nonsink is None else nonsink[n]
        name = phase.update(100 * (n + 1), entropy + noise * rng.standard_normal(), low, loss)
        if not told or told[-1] != name:
            told.append(name)
    return told, phase


def test_the_papers_curve():
    """2.53 nats, a trough of 1.61, a bounce to 1.87: sparse, then dense again."""
    down, up = np.linspace(2.53, 1.61, 20), np.linspace(1.61, 1.87, 20)
    told, phase = story([*down, *up])
    assert told == ["dense", "sparsifying", "bouncing"]
    assert phase.depth == pytest.approx(2.53 - 1.61, abs=0.02)
    assert phase.bounce == pytest.approx(1.87 - 1.61, abs=0.03)


def test_phases_are_printed_in_words_with_the_step_that_they_began_at():
    down, up = np.linspace(2.53, 1.61, 20), np.linspace(1.61, 1.87, 20)
    _, phase = story([*down, *up])
    began = next(n for n in range(1, 41) if story([*down, *up][:n])[0][-1] == "bouncing")
    assert phase.since == 100 * began
    shown = str(Phases([phase, Phase()]))
    assert shown == (
        f"layer 0: bouncing since step {100 * began:,} (1.86 nats, 0.92 below its peak at the lowest, 0.25 up again)\n"
        "layer 1: not measured"
    )
    assert "deque" not in shown
    assert "Phase(name='bouncing'" in repr(Phases([phase]))  # for those who look inside
    assert Phase.restored(phase.state()).since == phase.since
    old = {
        key: value for key, value in phase.state().items() if key != "since"
    }  # of an earlier version
    assert Phase.restored(old).name == "bouncing"


def test_back_to_where_it_was_is_dense():
    told, _ = story([*np.linspace(2.5, 1.5, 15), *np.linspace(1.5, 2.5, 15)])
    assert told == ["dense", "sparsifying", "bouncing", "dense"]


@pytest.mark.parametrize("seed", range(10))
def test_noise_does_not_make_it_flicker(seed):
    flat, _ = story([2.5] * 60, noise=0.02, seed=seed)
    assert flat == ["dense"]
    curve = [*np.linspace(2.5, 1.5, 30), *[1.5] * 30, *np.linspace(1.5, 2.0, 30), *[2.0] * 30]
    told, _ = story(curve, noise=0.015, seed=seed)
    assert told == ["dense", "sparsifying", "bouncing"]


def test_a_second_dip():
    told, phase = story(
        [*np.linspace(2.5, 1.5, 15), *np.linspace(1.5, 2.0, 15), *np.linspace(2.0, 1.2, 15)]
    )
    assert told == ["dense", "sparsifying", "bouncing", "sparsifying"]
    assert phase.trough == pytest.approx(1.2, abs=0.1)


def test_collapse_needs_low_entropy_and_a_loss_that_does_not_fall():
    n = 60
    entropies = [*np.linspace(2.5, 0.02, 20), *[0.02] * (n - 20)]
    stuck = [*np.linspace(6.0, 5.0, 20), *[5.0] * (n - 20)]
    told, _ = story(entropies, stuck, nonsink=entropies)
    assert told == ["dense", "sparsifying", "collapsed"]
    healthy = list(
        np.linspace(6.0, 3.0, n)
    )  # layer 1 of some healthy runs rests at 0.04 nats for epochs
    told, _ = story(entropies, healthy, nonsink=entropies)
    assert "collapsed" not in told
    sink = [1.0] * n  # what is not on the sink is spread out
    told, _ = story(entropies, stuck, nonsink=sink)
    assert "collapsed" not in told
    dip = [*np.linspace(2.5, 0.02, 20), *[0.02] * (PATIENCE - 3), *np.linspace(0.1, 2.0, 20)]
    told, _ = story(dip, [5.0] * len(dip), nonsink=dip)
    assert "collapsed" not in told


def test_collapse_is_left_again():
    low = [2.0] * 5 + [0.01] * 30 + [0.5] * 10
    told, _ = story(low, [5.0] * len(low), nonsink=low)
    assert told == ["dense", "sparsifying", "collapsed", "sparsifying", "bouncing"]


def test_sink_heads_do_not_count():
    assert nonsink_of_layer([0.0, 1.5], [0.99, 0.2]) == 1.5
    assert math.isnan(nonsink_of_layer([0.0, 0.0], [0.99, 0.95]))
    assert nonsink_of_layer([0.0, math.nan], [0.5, math.nan]) == 0.0


def test_a_collapsed_layer_alarms_once_and_names_the_cause():
    torch.manual_seed(0)
    model = HandWrittenGPT("sdpa")
    with torch.no_grad():  # enormous logits in the second layer only
        model.blocks[1].attn.qkv.weight.mul_(300)
    tokens = torch.randint(VOCABULARY, (4, LENGTH))
    with (
        joma.watch(model, every=1, gauges="entropy") as w,
        warnings.catch_warnings(record=True) as record,
    ):
        warnings.simplefilter("always")
        for _ in range(3 * PATIENCE):
            model(tokens)
            w.step(loss=4.0)
    said = [str(warning.message) for warning in record]
    assert len(said) == 1
    assert "layer 1 (blocks.1.attn)" in said[0]
    assert "learning rate that is too high" in said[0]
    assert [phase.name for phase in w.phases] == ["dense", "collapsed"]
    last = w.frame().query("gauge == 'phase'").groupby("layer")["value"].last()
    assert [PHASES[int(code)] for code in last] == ["dense", "collapsed"]


def test_a_handful_of_keys_is_no_collapse():
    torch.manual_seed(0)
    model = HandWrittenGPT("sdpa")
    with torch.no_grad():
        model.blocks[1].attn.qkv.weight.mul_(300)
    with joma.watch(model, every=1, gauges="entropy") as w:
        for _ in range(3 * PATIENCE):
            model(torch.randint(VOCABULARY, (4, 3)))
            w.step(loss=4.0)
    assert all(phase.name != "collapsed" for phase in w.phases)


@pytest.mark.filterwarnings("ignore:joma.watch")  # of logits that grow
def test_a_resumed_run_tells_the_phases_that_an_unbroken_one_tells(tmp_path):
    """From the folder alone, also where it goes on from before its last step, and after a line that was cut off."""

    def measured(steps, w, model, entropies):
        for step in steps:
            with torch.no_grad():
                for block in model.blocks:
                    block.attn.qkv.weight.copy_(entropies[step] * block.weight0)
            model(torch.arange(2 * LENGTH).view(2, LENGTH) % VOCABULARY)
            w.step(loss=3.0, step=step)

    torch.manual_seed(0)
    model = HandWrittenGPT("sdpa")
    for block in model.blocks:
        block.weight0 = block.attn.qkv.weight.detach().clone()
    sharpness = [1, 1, 1, 4, 12, 16, 14, 6, 3, 2, 1]
    states = []
    for name, parts in (
        ("unbroken", [range(1, 11)]),
        ("resumed", [range(1, 7), range(5, 8), range(8, 11)]),
    ):
        for part in parts:
            with joma.watch(
                model, run=tmp_path / name, every=1, gauges="entropy", resume=True
            ) as w:
                if part.start == 8:
                    assert [len(phase._recent) for phase in w.phases] == [
                        3,
                        3,
                    ]  # before the first step
                measured(part, w, model, sharpness)
            with (tmp_path / name / "phases.jsonl").open("a") as stream:
                stream.write("[11, [[0.")
        states.append([phase.state() for phase in w.phases])
    assert states[0] == states[1]
    assert {phase.name for phase in w.phases} != {"dense"}
