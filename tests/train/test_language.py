"""The language-model lab: same arithmetic as the plain loop, resumable to the bit, honest about what goes wrong."""

from __future__ import annotations

import copy
import json
import multiprocessing
import os
import random
import shutil
import subprocess
import sys
import time

import pytest
import torch
from torch import nn

import joma
from joma._runs import RunError
from joma._runs.folder import LOCK
from joma._train import checkpoints
from joma._train.language import train
from joma._train.model import LanguageModel, sinusoids
from joma._train.projection import ROWS, Projection
from joma._train.settings import Settings
from joma._train.step import Stepper
from joma.cli import main

TINY = {"vocabulary": 300, "width": 16, "hidden": 24, "layers": 2, "heads": 2, "length": 12, "batch": 4, "lr": 1e-3,
        "every": 5, "threads": 1, "valid_windows": 2, "probe_windows": 1}  # fmt: skip


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("JOMA_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


# The step


@pytest.mark.parametrize("scale", [1.0, 400.0])  # with large logits, rows are shifted before exp
@pytest.mark.parametrize("rows", [1, ROWS, 2 * ROWS + 17])
def test_projection_is_cross_entropy(rows, scale):
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(509, 20) * 0.1)
    bias = nn.Parameter(torch.randn(509) * 0.1)
    x, y = scale * torch.randn(rows, 20), torch.randint(509, (rows,))
    twin = [t.detach().double().requires_grad_() for t in (weight, bias, x)]
    truth = nn.functional.cross_entropy(twin[2] @ twin[0].T + twin[1], y)
    truth.backward()
    projection = Projection(weight, bias)
    for _ in range(2):  # buffers are used again
        loss, dx = projection.loss(x, y)
        assert float(loss) == pytest.approx(float(truth.detach()), rel=1e-6)
        assert float(projection.value(x, y)) == pytest.approx(float(truth.detach()), rel=1e-6)
        largest = float(
            (twin[2] @ twin[0].T).detach().abs().max()
        )  # a logit in float32 is known to this times 6e-8
        for mine, other in (
            (weight.grad, twin[0].grad),
            (bias.grad, twin[1].grad),
            (dx, twin[2].grad),
        ):
            error = float((mine.double() - other).abs().max() / other.abs().max())
            assert error < 1e-6 + 2e-7 * largest


def plain_step(model, optimizer, inputs, targets, clip):
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), clip)
    optimizer.step()
    return float(loss.detach())


@pytest.mark.parametrize("momentum", [None, 0.0, 0.9], ids=["adam", "sgd", "momentum"])
def test_steps_are_those_of_the_plain_loop(momentum):
    torch.manual_seed(0)
    model = LanguageModel(700, layers=2, d=16, hidden=24, heads=2, dropout=0.0, length=12)
    twin = copy.deepcopy(model)
    lr = 1e-3 if momentum is None else 1.0
    fast = Stepper(model, lr=lr, clip=0.05, momentum=momentum)  # clips
    optimizer = torch.optim.Adam(twin.parameters(), lr=lr)
    if momentum is not None:
        optimizer = torch.optim.SGD(twin.parameters(), lr=lr, momentum=momentum)
    generator = torch.Generator().manual_seed(1)
    for step in range(100):
        x = torch.randint(700, (4, 13), generator=generator)
        inputs, targets = x[:, :-1], x[:, 1:]
        if step == 0:
            fast.gradients(inputs, targets)
            nn.functional.cross_entropy(twin(inputs).flatten(0, 1), targets.flatten()).backward()
            for (name, mine), other in zip(
                model.named_parameters(), twin.parameters(), strict=True
            ):
                assert torch.allclose(
                    mine.grad, other.grad, atol=1e-5 * float(other.grad.abs().max())
                ), name
        assert fast.step(inputs, targets) == pytest.approx(
            plain_step(twin, optimizer, inputs, targets, 0.05), abs=1e-4
        )


def test_positions():
    table = sinusoids(7, 6)
    for p in range(7):
        for i in range(3):
            angle = torch.tensor(p / 10000 ** (2 * i / 6))
            assert table[p, 2 * i] == pytest.approx(float(angle.sin()), abs=1e-6)
            assert table[p, 2 * i + 1] == pytest.approx(float(angle.cos()), abs=1e-6)


def test_the_model_is_causal():
    torch.manual_seed(0)
    model = LanguageModel(50, layers=2, d=16, heads=2, length=12).eval()
    x = torch.randint(50, (2, 12))
    y = x.clone()
    y[:, 8:] = 0
    assert torch.allclose(model(x)[:, :8], model(y)[:, :8], atol=1e-6)
    assert not torch.allclose(model(x)[:, 8:], model(y)[:, 8:], atol=1e-3)


# Runs


def outcome(path):
    """Weights and rows of a run, timings aside."""
    rows = [row for row in joma.Run(path).rows() if row["gauge"] != "seconds"]
    from safetensors.torch import load_file

    last = checkpoints.steps(path)[-1]
    return rows, load_file(checkpoints.folder(path, last) / "model.safetensors")


def same(one, other):
    (rows, weights), (other_rows, other_weights) = one, other
    assert rows == other_rows
    assert weights.keys() == other_weights.keys()
    assert all(torch.equal(weights[name], other_weights[name]) for name in weights)


def test_a_run(tmp_path):
    said = []
    run = train(Settings(**TINY, steps=20), tmp_path / "run", say=said.append)
    frame = run.frame()
    assert run.done
    assert sorted(frame.step.unique()) == [
        *range(1, 17),
        18,
        20,
    ]  # an eighth of the step apart at first
    assert {"loss", "valid_loss", "entropy", "stable_rank", "nonsink_entropy", "phase"} <= set(
        frame.gauge
    )
    losses = frame[frame.gauge == "valid_loss"]["value"]
    assert losses.iloc[-1] < losses.iloc[0]
    assert checkpoints.steps(run.path) == [20]
    train(Settings(**TINY, steps=20), tmp_path / "run", say=said.append)
    assert "complete" in said[-1]
    with pytest.raises(RunError, match=r"lr: 0.001 in the run, 0.01 asked"):
        train(Settings(**{**TINY, "lr": 0.01}, steps=20), tmp_path / "run")


def test_validation_losses_may_be_rarer_than_measurements(tmp_path):
    settings = Settings(**{**TINY, "every": 2, "valid_every": 3}, steps=20)
    frame = train(settings, tmp_path / "run", say=lambda line: None).frame()
    assert sorted(frame[frame.gauge == "valid_loss"].step) == [3, 6, 9, 12, 15, 18, 20]
    assert sorted(frame[frame.gauge == "entropy"].step.unique()) == [*range(1, 17), 18, 20]
    assert list(frame[frame.gauge == "loss"].step) == sorted(frame.step.unique())


def train_and_tell(pipe, environment, settings, path):
    """In a process that is to be killed: what it says, and each step, through the pipe."""
    os.environ.update(environment)
    train(
        settings,
        path,
        checkpoint_every=7,
        say=pipe.send,
        show=lambda progress: pipe.send(progress.step),
    )


def test_killed_at_random_it_ends_in_the_same_bits(fork_server, tmp_path):
    settings = Settings(**{**TINY, "steps": 60, "dropout": 0.3})
    train(settings, tmp_path / "whole", checkpoint_every=7, say=lambda line: None)
    choose = random.Random(3)
    stops = sorted(choose.sample(range(2, 58), 3))
    context = multiprocessing.get_context("forkserver")
    for stop in stops:
        receive, send = context.Pipe(duplex=False)
        arguments = (send, dict(os.environ), settings, tmp_path / "killed")
        process = context.Process(target=train_and_tell, args=arguments)
        process.start()
        send.close()
        while not (isinstance(said := receive.recv(), int) and said >= stop):
            pass
        time.sleep(choose.random() * 0.05)
        process.kill()
        process.join()
        receive.close()
    said = []
    train(settings, tmp_path / "killed", checkpoint_every=7, say=said.append)
    assert any("going on from step" in line for line in said)
    same(outcome(tmp_path / "whole"), outcome(tmp_path / "killed"))


def test_a_damaged_checkpoint_is_passed_over(tmp_path):
    settings = Settings(**TINY, steps=30)
    train(settings, tmp_path / "whole", checkpoint_every=10, keep=3, say=lambda line: None)
    shutil.copytree(tmp_path / "whole", tmp_path / "hurt")
    info = json.loads((tmp_path / "hurt/run.json").read_text())
    (tmp_path / "hurt/run.json").write_text(json.dumps({**info, "status": "running"}))
    for step, name in ((30, "model.safetensors"), (20, "state.safetensors")):
        path = checkpoints.folder(tmp_path / "hurt", step) / name
        data = bytearray(path.read_bytes())
        data[-3] ^= 1
        path.write_bytes(data if step == 30 else data[:-10])
    said = []
    train(settings, tmp_path / "hurt", checkpoint_every=10, keep=3, say=said.append)
    assert sum("damaged" in line for line in said) == 2
    assert "going on from step 10" in said[-1]
    same(outcome(tmp_path / "whole"), outcome(tmp_path / "hurt"))


def test_retention(tmp_path):
    train(
        Settings(**TINY, steps=30),
        tmp_path / "run",
        checkpoint_every=5,
        keep=1,
        keep_every=10,
        say=lambda line: None,
    )
    assert checkpoints.steps(tmp_path / "run") == [10, 20, 30]


@pytest.mark.filterwarnings("ignore:joma.watch")
def test_divergence_is_an_outcome(tmp_path):
    run = train(
        Settings(**{**TINY, "lr": 1e18, "clip": 0.0}, steps=50),
        tmp_path / "run",
        say=lambda line: None,
    )
    assert run.info["status"] == "diverged"
    assert "the loss is" in run.info["reason"]
    assert len(run.frame()) > 0
    said = []
    train(
        Settings(**{**TINY, "lr": 1e18, "clip": 0.0}, steps=50), tmp_path / "run", say=said.append
    )
    assert "complete" in said[-1]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"layers": 1.5}, "layers must be a whole number"),
        ({"layers": 0}, "layers must be a whole number"),
        ({"vocabulary": 0}, "capped at 0"),
        ({"lr": -1.0}, "learning rate must be positive"),
        ({"dropout": 1.0}, "dropout"),
        ({"threads": -1}, "threads must be a whole number of at least 0, got -1"),
        ({"seed": -1}, "seed must be a whole number of at least 0"),
        ({"clip": -1.0}, "clip must be a number of at least 0, got -1.0"),
        ({"weight_decay": -0.1}, "weight decay must be a number of at least 0"),
        ({"weight_decay": float("nan")}, "weight decay must be a number of at least 0"),
        ({"init": -0.1}, "init must be a number of at least 0"),
        ({"activation": "tanh"}, "unknown activation 'tanh': choose relu or gelu or linear"),
        ({"start": "alike"}, "unknown start 'alike': choose copied or apart or xavier"),
        ({"probe": "all"}, "unknown probe 'all': choose windows or authors"),
        ({"probe": "authors"}, "probe authors needs a length of 35, got 12"),
        ({"probe": "authors", "length": 35}, "window 100 of 10 streams"),
        ({"fresh_adam": 1}, "fresh adam must be true or false, got 1"),
        ({"optimiser": "lion"}, "unknown optimiser 'lion': choose adam or sgd"),
        ({"momentum": 0.9}, "momentum 0.9 is of SGD"),
        ({"optimiser": "sgd", "momentum": 1.0}, r"momentum must be in \[0, 1\), got 1.0"),
        ({"optimiser": "sgd", "fresh_adam": True}, "fresh adam is of Adam"),
        ({"valid_windows": -1}, "valid windows must be a whole number of at least 0, got -1"),
        ({"heads": 3}, "not a multiple of 3 heads"),
        ({"gauges": ("entropi",)}, "Did you mean"),
        ({"length": 100_000}, "shorter than a window"),
        ({"data": "no-such-thing"}, "unknown corpus"),
    ],
)
def test_bad_settings(wrong, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        train(Settings(**{**TINY, "steps": 5, **wrong}), tmp_path / "run", say=lambda line: None)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"checkpoint_every": 0}, "checkpoint every must be a whole number of at least 1, got 0"),
        ({"keep": 0}, "keep must be a whole number of at least 1, got 0"),
        ({"keep": -3}, "keep must be a whole number of at least 1, got -3"),
        ({"keep_every": 0}, "keep every must be a whole number of at least 1, got 0"),
        ({"device": "gpu"}, "device 'gpu' cannot be used here"),
        ({"device": "cuda:99"}, "device 'cuda:99' cannot be used here"),
    ],
)
def test_bad_options(wrong, message, tmp_path, monkeypatch, capsys):
    with pytest.raises(ValueError, match=message):
        train(Settings(**TINY, steps=5), tmp_path / "run", **wrong)
    options = [f"--{key.replace('_', '-')}={value}" for key, value in wrong.items()]
    monkeypatch.setattr(sys, "argv", ["joma", "train", *options, f"--out={tmp_path / 'run'}"])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_any_gauges_and_any_folder_can_be_asked_for(tmp_path, monkeypatch, capsys):
    options = [f"--{key.replace('_', '-')}={value}" for key, value in {**TINY, "steps": 3}.items()]
    out = tmp_path / "[a]"  # would be a style, were it markup
    for _ in range(2):  # trained, then found complete
        monkeypatch.setattr(
            sys,
            "argv",
            ["joma", "train", *options, "--gauges=nonsink_entropy", "--device=cpu", f"--out={out}"],
        )
        with pytest.raises(SystemExit) as end:
            main()
        said = capsys.readouterr()
        assert end.value.code == 0
        assert f"{out}: done" in said.out
        assert f"page: joma report {out} --open" in said.out
        assert "layer 1: " in said.out
        assert "entropy" not in said.out  # it was not measured
    assert f"{out} is complete" in said.err


def test_an_interrupted_run_is_unfinished_and_goes_on(tmp_path):
    settings = Settings(**TINY, steps=20)
    whole = train(settings, tmp_path / "whole", checkpoint_every=5, say=lambda line: None)

    def show(progress):
        if progress.step == 12:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(settings, tmp_path / "run", checkpoint_every=5, say=lambda line: None, show=show)
    assert joma.Run(tmp_path / "run").info["status"] == "interrupted"
    assert not (tmp_path / "run" / LOCK).exists()
    said = []
    assert train(settings, tmp_path / "run", checkpoint_every=5, say=said.append).done
    assert "going on from step 10" in said[-1]
    same(outcome(whole.path), outcome(tmp_path / "run"))


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sgd_goes_on_to_the_same_bits(tmp_path, momentum):
    settings = Settings(**TINY | {"lr": 1.0, "optimiser": "sgd", "momentum": momentum, "steps": 10})

    def stop(progress):
        if progress.step == 7:
            raise KeyboardInterrupt

    whole = train(settings, tmp_path / "whole", say=str)
    with pytest.raises(KeyboardInterrupt):
        train(settings, tmp_path / "cut", checkpoint_every=5, say=str, show=stop)
    gone_on = train(settings, tmp_path / "cut", checkpoint_every=5, say=str)
    wanted, got = (
        run.frame()[lambda rows: rows.gauge != "seconds"].value.to_numpy()
        for run in (whole, gone_on)
    )
    assert len(wanted)
    assert (wanted == got).all()


def test_an_empty_corpus(tmp_path):
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(ValueError, match="empty"):
        train(
            Settings(**{**TINY, "steps": 5, "data": str(tmp_path / "empty.txt")}), tmp_path / "run"
        )


TOGETHER = """
import json, sys
from pathlib import Path
import torch.distributed as dist
from joma._runs import RunError
from joma._train import checkpoints
from joma._train.language import train
from joma._train.processes import joined
from joma._train.settings import Settings
from joma.cli import main

settings, folder, options = json.loads(sys.argv[1]), sys.argv[2], sys.argv[3:]
out = folder + "/run"

def go(say=lambda line: None, show=lambda progress: None, checkpoint_every=5, **options):
    chosen = Settings(**{**settings, **options.pop("settings", {})})
    return train(chosen, out, say=say, show=show, checkpoint_every=checkpoint_every, **options)

def stop(progress):
    if progress.step == 11:
        raise KeyboardInterrupt

with joined() as rank:
    sys.argv = ["joma", "train", *options, "--out=" + folder + "/two"]
    try:
        main()
    except SystemExit as end:
        assert end.code == 0
    try:
        go(show=stop)
    except KeyboardInterrupt:
        pass
    dist.barrier()
    load = checkpoints.load
    def broken(run, step):  # the first process finds the newest one damaged: all must go on from the one before
        if rank == 0 and step == 10:
            raise ValueError("damaged")
        return load(run, step)
    checkpoints.load = broken
    said, steps = [], []
    assert go(say=said.append, show=lambda progress: steps.append(progress.step)).done
    assert said[-1] == "going on from step 5" and steps[0] == 6, (rank, said, steps)
    checkpoints.load = load
    assert go(show=stop).done  # complete: no process makes a step
    dist.barrier()  # the next call starts the run again, and another process may still be asking
    steps.clear()
    go(force=True, show=lambda progress: steps.append(progress.step))  # no process goes on from an old checkpoint
    assert steps[0] == 1, (rank, steps)
    try:
        go(settings={"lr": 0.5})
    except RunError as error:
        assert "lr: 0.001 in the run, 0.5 asked" in str(error), (rank, error)
    else:
        raise AssertionError("another config was accepted")
    wild = {"lr": 1e18, "clip": 0.0}
    assert go(settings=wild, force=True).info["status"] == "diverged"
    dist.barrier()
    assert go(settings=wild, show=stop).info["status"] == "diverged"

def threads():
    return {task.read_text().strip() for task in Path("/proc/self/task").glob("*/comm")}

assert not any("gloo" in thread for thread in threads()), threads()  # such a thread can abort the process at its end
"""


@pytest.mark.timeout(600)  # most of a minute of one core
def test_two_processes_of_torchrun(tmp_path, monkeypatch):
    """Without dropout, two processes do what one does; stopped, damaged, complete or diverged, they agree on it."""
    options = [
        f"--{key.replace('_', '-')}={value}"
        for key, value in {**TINY, "steps": 12, "dropout": 0.0}.items()
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    monkeypatch.setattr(sys, "argv", ["joma", "train", *options, f"--out={tmp_path / 'one'}"])
    with pytest.raises(SystemExit, match="0"):
        main()
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    script = tmp_path / "together.py"
    script.write_text(TOGETHER)
    two = [*torchrun, str(script), json.dumps({**TINY, "steps": 12}), str(tmp_path), *options]
    done = subprocess.run(two, capture_output=True, text=True, env=environment, timeout=240)
    assert done.returncode == 0, done.stderr
    rows, weights = outcome(tmp_path / "one")
    other_rows, other_weights = outcome(tmp_path / "two")
    assert len(rows) == len(other_rows)
    for mine, other in zip(rows, other_rows, strict=True):
        assert mine["gauge"] == other["gauge"]
        assert torch.allclose(
            torch.tensor(mine["value"]), torch.tensor(other["value"]), atol=1e-4
        ), mine["gauge"]
    for name in (
        weights
    ):  # a key's bias has gradient 0 but for rounding, of which Adam makes steps of full size
        assert name.endswith("in_proj_bias") or torch.allclose(
            weights[name], other_weights[name], atol=1e-4
        ), name
