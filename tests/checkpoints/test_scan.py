"""Whole scans: kills, duplicates, failures, attention on a sample, engines, the command line."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import joma
from joma._checkpoints import scan as module
from joma._checkpoints.scan import Scan
from joma._jobs import cluster, local
from tests.checkpoints.models import D, H, lower, model, save, stable_rank
from tests.jobs import calls

STEPS = [0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, *range(1000, 10_000, 1000)]  # 20


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    """Twenty checkpoints without a config."""
    folder = tmp_path_factory.mktemp("bare")
    generator = torch.Generator().manual_seed(0)
    for step in STEPS:
        weights = {}
        for n in range(2):
            weights[f"layers.{n}.fc1.weight"] = torch.randn(300, 150, generator=generator)
            weights[f"layers.{n}.fc2.weight"] = torch.randn(150, 300, generator=generator)
        save_file(weights, folder / f"model-{step}.safetensors")
    return folder


@pytest.fixture(scope="module")
def whole(bare, tmp_path_factory):
    scan = joma.scan(str(bare), run=tmp_path_factory.mktemp("whole") / "run")
    assert len(scan.status()) == 20
    return scan


def same_rows(scan, other):
    lines = [(s.path / "metrics.jsonl").read_text().splitlines() for s in (scan, other)]
    assert lines[0] == lines[1]  # the same bits, none twice


def test_values(whole, bare):
    from safetensors.torch import load_file

    frame = whole.frame()
    assert list(frame.columns) == [
        "step",
        "checkpoint",
        "layer",
        "gauge",
        "value",
        "module",
        "same_as",
    ]
    for step in (0, 512, 9000):
        state = load_file(bare / f"model-{step}.safetensors")
        expected = [stable_rank(state[f"layers.{n}.fc1.weight"]) for n in range(2)]
        assert frame[frame.step == step].value.tolist() == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("seed", range(3))
def test_interrupted_anywhere_and_started_again(seed, bare, whole, tmp_path, monkeypatch):
    import joma._checkpoints.plan as plan

    choose, real = random.Random(seed), plan.StoredMatrix.read

    def fragile(*args):
        if choose.random() < 0.06:
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(plan.StoredMatrix, "read", fragile)
    interrupted = 0
    for _ in range(100):
        try:
            joma.scan(str(bare), run=tmp_path / "run")
            break
        except KeyboardInterrupt:
            interrupted += 1
    assert interrupted
    same_rows(Scan(tmp_path / "run"), whole)


def test_killed_at_random_and_started_again(bare, whole, tmp_path):
    script = (
        "import sys, time, joma._checkpoints.scan as s\n"
        "real = s._write\n"
        "def slow(*args, **options):\n    real(*args, **options)\n    time.sleep(0.02)\n"
        "s._write = slow\n"
        "s.scan(sys.argv[1], run=sys.argv[2])\n"
    )
    run, choose, killed = tmp_path / "run", random.Random(1), 0
    for _ in range(2):
        process = subprocess.Popen(
            [sys.executable, "-c", script, str(bare), str(run)], stderr=subprocess.PIPE
        )
        target = choose.randint(1, 8) + (
            len(Scan(run).status()) if (run / "run.json").exists() else 0
        )
        for _ in range(3000):
            if (run / "metrics.jsonl").exists() and (run / "metrics.jsonl").read_bytes().count(
                b"\n"
            ) >= 2 * target:
                break
            assert process.poll() is None, process.communicate()[1].decode()
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        killed += process.returncode == -signal.SIGKILL
    assert killed == 2
    assert 0 < len(Scan(run).status()) < 20
    joma.scan(str(bare), run=run)
    same_rows(Scan(run), whole)


def test_another_question_gets_a_numbered_folder_and_the_same_one_goes_on_in_its_own(
    bare, tmp_path, capfd
):
    run = tmp_path / "run"
    two = "0..1"
    first = joma.scan(str(bare), run=run, revisions=two)
    before = (run / "metrics.jsonl").read_bytes()
    assert capfd.readouterr().err == ""
    other = joma.scan(str(bare), run=run, revisions=two, gauges="spectral_norm")
    assert (first.path, other.path) == (run, tmp_path / "run-2")
    assert set(other.frame().gauge) == {"spectral_norm"}
    assert (run / "metrics.jsonl").read_bytes() == before
    (line,) = capfd.readouterr().err.splitlines()
    assert line == (
        f"joma.scan: {run} holds the scan of another config (gauges: ['stable_rank'] in the run, ['spectral_norm'] "
        f"asked): this one goes to {run}-2; overwrite=True (--force) replaces the old one"
    )
    assert joma.scan(str(bare), run=run, revisions=two, mlp=".*fc2").path == tmp_path / "run-3"
    rows = (tmp_path / "run-2/metrics.jsonl").read_bytes()
    again = joma.scan(str(bare), run=run, revisions=two, gauges="spectral_norm")
    assert again.path == tmp_path / "run-2"
    assert (tmp_path / "run-2/metrics.jsonl").read_bytes() == rows  # nothing was measured again
    assert f"this one goes on in {run}-2" in capfd.readouterr().err
    assert joma.scan(str(bare), run=run, revisions=two).path == run
    assert capfd.readouterr().err == ""
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "run-2", "run-3"]


def test_a_folder_with_a_run_of_another_kind_is_refused_and_stays(bare, tmp_path):
    from joma._runs import RunError

    joma.simulate("two-tokens", tmp_path / "run", t_end=1.0, times=11)
    before = (tmp_path / "run/run.json").read_bytes()
    with pytest.raises(
        RunError,
        match=r"run holds simulate 'run', done, created .*, and no scan: choose another fold",
    ):
        joma.scan(str(bare), run=tmp_path / "run")
    assert (tmp_path / "run/run.json").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_gauge_without_its_part_costs_the_others_nothing(bare, whole):
    """Without a config.json nothing tells how many heads there are: no W_Q W_Kᵀ per head."""
    scan = joma.scan(
        str(bare), revisions="0..4", gauges="stable_rank.qk,stable_rank,spectral_norm.vo"
    )
    alone = whole.frame()
    measured = scan.frame().drop(columns=["head"], errors="ignore")
    assert measured.equals(alone[alone.step <= 4])
    table = scan.checkpoints()
    assert set(table.status) == {"partly"}
    for problems in table.problems:
        assert list(problems) == ["stable_rank.qk", "spectral_norm.vo"]
        assert problems["stable_rank.qk"].startswith("no matrix found for 'qk'")
        assert problems["spectral_norm.vo"].startswith("no matrix found for 'vo'")
    assert [len(names) for names in scan.remarks().values()] == [
        4,
        4,
    ]  # each reason once, for all checkpoints
    assert all("stable_rank.qk: no matrix found for 'qk'" in note for note in table.note)


def test_a_damaged_matrix_costs_the_other_parts_and_layers_nothing(tmp_path):
    save("neox", tmp_path / "model")
    state = _state(tmp_path / "model")
    name = "gpt_neox.layers.2.mlp.dense_4h_to_h.weight"
    save_file({**state, name: state[name].to(torch.int8)}, tmp_path / "model/model.safetensors")
    scan = joma.scan(str(tmp_path / "model"), gauges="stable_rank.mlp_out,stable_rank")
    frame = scan.frame()
    assert frame[frame.gauge == "stable_rank"].value.tolist() == pytest.approx(
        [stable_rank(w) for w in lower("neox")], rel=1e-4
    )
    upper = [layer.mlp.dense_4h_to_h.weight for layer in model("neox").gpt_neox.layers[:2]]
    kept = frame[frame.gauge == "stable_rank.mlp_out"]
    assert kept.layer.tolist() == [0, 1]
    assert kept.value.tolist() == pytest.approx([stable_rank(w.detach()) for w in upper], rel=1e-4)
    assert scan.status() == {"model": "partly"}
    (problems,) = scan.checkpoints().problems
    assert list(problems) == ["stable_rank.mlp_out"]
    assert problems["stable_rank.mlp_out"].startswith(f"{name} is of type torch.int8")


def test_a_gauge_whose_function_raises_costs_the_others_nothing(bare, whole):
    from joma._measure.gauges.registry import remove

    @joma.gauge("picky", on="weight")
    def picky(w):
        raise ZeroDivisionError("too picky")

    try:
        scan = joma.scan(str(bare), revisions="0..1", gauges="picky,stable_rank")
    finally:
        remove("picky")
    alone = whole.frame()
    assert scan.frame().equals(alone[alone.step <= 1])
    assert scan.checkpoints().problems[0] == {
        "picky": "on layers.0.fc1: ZeroDivisionError: too picky"
    }


def test_a_kind_of_charge_that_a_model_lacks_costs_the_others_nothing(tmp_path):
    save("mixtral", tmp_path / "model")
    both = joma.scan(str(tmp_path / "model"), gauges="charge.mlp,charge.qk")
    alone = joma.scan(str(tmp_path / "model"), gauges="charge.qk")
    assert alone.failed == []
    values = both.frame()
    assert values[values.gauge == "charge.qk"].value.tolist() == alone.frame().value.tolist()
    assert list(both.checkpoints().problems[0]) == ["charge.mlp"]


def test_the_exit_status_says_whether_all_was_measured_and_each_reason_is_printed_once(
    bare, tmp_path, monkeypatch
):
    from typer.testing import CliRunner

    from joma.cli import app

    monkeypatch.chdir(tmp_path)
    run = CliRunner().invoke
    scan = ["scan", str(bare), "--revisions", "0..4", "--report", "page.html"]
    some = run(app, [*scan, "--gauges", "stable_rank,stable_rank.qk"])
    assert some.exit_code == 1
    assert some.output.count("no matrix found for 'qk'") == 1
    assert "all 4 checkpoints: stable_rank.qk: no matrix found for 'qk'" in some.output
    assert some.stdout.strip().splitlines()[-1] == "4 checkpoints: 0 failed, 4 measured in part"
    page = (tmp_path / "page.html").read_text()
    assert page.count("no matrix found for &#39;qk&#39;") == 1
    assert "<b>All 4 checkpoints</b>: stable_rank.qk: no matrix found" in page
    none = run(app, [*scan, "--gauges", "stable_rank.qk"])
    assert none.exit_code == 1
    assert none.stdout.strip().splitlines()[-1] == "4 checkpoints: 4 failed"
    assert "page: page.html" in none.stdout
    every = run(app, [*scan, "--json"])
    assert every.exit_code == 0
    told = json.loads(every.stdout)
    assert told["run"] == f"runs/scan-{bare.name}-3"
    assert [row["problems"] for row in told["checkpoints"]] == [{}] * 4


@pytest.fixture
def series(tmp_path):
    """NeoX checkpoints of which two are the same and others are bad in many ways."""
    root = tmp_path / "series"
    for step in (0, 1, 2, 4, 8):
        save(
            "neox",
            root / f"step-{step}",
            "sharded" if step == 2 else "bin" if step == 4 else "safetensors",
        )
    start = root / "step-0"
    save_file(
        {name: w + 1 for name, w in _state(start).items()}, start / "model.safetensors"
    )  # other weights
    index = json.loads((root / "step-2/model.safetensors.index.json").read_text())["weight_map"]
    shard = root / "step-2" / index["gpt_neox.layers.1.mlp.dense_h_to_4h.weight"]
    os.truncate(shard, shard.stat().st_size - 100)
    return root


def _state(folder):
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


def test_failures_have_rows_and_the_rest_goes_on(series):
    marker = series / "executed"

    class Bomb:
        def __reduce__(self):
            return os.mkdir, (str(marker),)

    torch.save({"x": Bomb()}, series / "step-4/pytorch_model.bin")
    (series / "step-16").mkdir()
    index = {"weight_map": {"a": "../step-1/model.safetensors"}}
    (series / "step-16/model.safetensors.index.json").write_text(json.dumps(index))
    shutil.copytree(series / "step-1", series / "step-32")
    state = _state(series / "step-32")
    name = "gpt_neox.layers.0.mlp.dense_h_to_4h.weight"
    save_file({**state, name: torch.zeros(3, D)}, series / "step-32/model.safetensors")
    scan = joma.scan(str(series), revisions=["step-0", "step-1", "step-2", "step-4", "step-8", "step-16", "step-32",
                                             "step-99"])  # fmt: skip
    table = scan.checkpoints().set_index("checkpoint")
    assert table.status.to_dict() == {
        "step-0": "ok", "step-1": "ok", "step-2": "partly", "step-4": "failed", "step-8": "ok", "step-16": "failed",
        "step-32": "partly", "step-99": "failed",
    }  # fmt: skip
    assert table.same_as.to_dict() == dict.fromkeys(table.index, "") | {
        "step-1": "step-8",
        "step-8": "step-1",
    }
    for checkpoint, words in {
        "step-2": "cut off", "step-4": "nothing of it was executed", "step-16": "outside of the checkpoint: refused",
        "step-32": "does not fit", "step-99": "no checkpoint step-99",
    }.items():  # fmt: skip
        assert words in table.note[checkpoint]
    assert not marker.exists()
    expected = [stable_rank(w) for w in lower("neox")]
    frame = scan.frame()
    assert frame[frame.step == 8].value.tolist() == pytest.approx(expected, rel=1e-4)
    # the layers that could be read are kept
    layers = {name: rows.layer.tolist() for name, rows in frame.groupby("checkpoint")}
    assert layers.pop("step-32") == [1, 2]
    # the shard of layer 1 is cut off
    file_of = json.loads((series / "step-2/model.safetensors.index.json").read_text())["weight_map"]
    lower_maps = [f"gpt_neox.layers.{layer}.mlp.dense_h_to_4h.weight" for layer in range(3)]
    in_other_shards = [n for n in range(3) if file_of[lower_maps[n]] != file_of[lower_maps[1]]]
    assert layers.pop("step-2") == in_other_shards != []
    assert list(layers) == ["step-0", "step-1", "step-8"]
    assert all(numbers == [0, 1, 2] for numbers in layers.values())


def test_retry_does_again_what_failed(series, tmp_path):
    run = tmp_path / "run"
    assert joma.scan(str(series), run=run).failed == ["step-2"]
    shutil.rmtree(series / "step-2")
    save("neox", series / "step-2", "sharded")
    assert joma.scan(str(series), run=run).failed == ["step-2"]
    again = joma.scan(str(series), run=run, retry=True)
    assert again.failed == []
    assert len(again.frame()) == 5 * 3


def reference_entropy(ids):
    """From the attention matrices that eager attention gives, (layers, heads)."""
    made = model("neox")
    made.set_attn_implementation("eager")
    with torch.no_grad():
        attentions = made(input_ids=ids, output_attentions=True).attentions
    made.set_attn_implementation("sdpa")
    return np.array(
        [torch.special.entr(p.double()).sum(-1).mean(dim=(0, 2)).numpy() for p in attentions]
    )


def test_attention_on_a_fixed_sample(tmp_path):
    save("neox", tmp_path / "step-1")
    save("neox", tmp_path / "step-2", "bin")
    ids = torch.randint(0, 60, (500,), generator=torch.Generator().manual_seed(0))
    scan = joma.scan(
        str(tmp_path), gauges=("entropy", "coherence", "stable_rank"), data=ids, tokens=200, length=24
    )  # fmt: skip
    assert scan.failed == []
    frame = scan.frame()
    expected = reference_entropy(ids[:192].reshape(8, 24))
    for step in (1, 2):
        rows = frame[(frame.step == step) & (frame.gauge == "entropy")]
        assert rows.value.to_numpy().reshape(3, H) == pytest.approx(expected, abs=1e-4)
        assert len(frame[(frame.step == step) & (frame.gauge == "coherence")]) == 3
    assert scan.status() == {"step-1": "ok", "step-2": "ok"}


def test_the_models_own_tokenizer_and_a_corpus(tmp_path):
    import tokenizers
    from transformers import PreTrainedTokenizerFast

    text = tmp_path / "text.txt"
    text.write_text("the cat sat on the mat and the dog ran away again\n" * 200)
    words = sorted(set(text.read_text().split()))
    made = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({w: n for n, w in enumerate(words)}, unk_token="the")
    )
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    save("neox", tmp_path / "series/step-1")
    options = {"gauges": "entropy,stable_rank", "data": str(text), "tokens": 64, "length": 16}
    without = joma.scan(str(tmp_path / "series"), **options)
    assert without.status() == {"step-1": "partly"}
    assert "entropy: no tokenizer with the weights" in without.checkpoints().note[0]
    assert set(without.frame().gauge) == {"stable_rank"}  # weight gauges still work
    PreTrainedTokenizerFast(tokenizer_object=made).save_pretrained(
        tmp_path / "series"
    )  # beside the steps
    scan = joma.scan(str(tmp_path / "series"), **options)
    assert scan.failed == []
    valid = (
        text.read_text()[int(0.9 * text.stat().st_size) :].split("\n", 1)[1].split()
    )  # the last tenth
    ids = torch.tensor([words.index(w) for w in valid[:64]]).reshape(4, 16)
    rows = scan.frame()
    got = rows[rows.gauge == "entropy"].value.to_numpy().reshape(3, H)
    assert got == pytest.approx(reference_entropy(ids), abs=1e-4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"data": [1, 2, 3] * 50, "length": 65}, "more than the 64 positions"),
        ({"data": [70] * 100, "length": 10}, "token 70, the model 60 tokens"),
        ({"data": [1, 2], "length": 10}, "2 token ids"),
    ],
)
def test_samples_that_do_not_fit(options, message, tmp_path):
    save("neox", tmp_path / "model")
    scan = joma.scan(str(tmp_path / "model"), gauges="entropy", **options)
    assert list(scan.status().values()) == ["failed"]
    assert message in scan.checkpoints().note[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gauges": "stabel_rank"}, "Did you mean 'stable_rank'"),
        ({"gauges": ""}, "no gauges"),
        ({"tokens": 0}, "tokens is 0: give at least 1"),
        ({"length": 1}, "length is 1: give at least 2"),
        ({"workers": 0}, "at least one worker"),
        ({"engine": "dask"}, "unknown engine 'dask'"),
    ],
)
def test_bad_options(options, message, bare):
    with pytest.raises(ValueError, match=message):
        joma.scan(str(bare), **options)


@pytest.fixture(params=["processes", "ray"])
def engine(request):
    """With warnings as errors, as everywhere in these tests."""
    if request.param == "ray":
        request.getfixturevalue("ray_cluster")
    return request.param


@pytest.mark.timeout(600)  # several processes that import torch
def test_workers_that_die_and_leak_are_replaced_and_the_rows_are_the_same(
    engine, bare, whole, tmp_path, monkeypatch
):
    monkeypatch.setattr(local, "_GROWTH", 20e6)
    monkeypatch.setattr(cluster, "_CALLS", 2)
    monkeypatch.setattr(module, "_measure_one", calls.measure_killed_once)
    reported = []
    scan = joma.scan(
        str(bare), run=tmp_path / "run", revisions="0..4", workers=2, engine=engine, data=tmp_path,
        report=lambda done, total, what: reported.append((done, len(Scan(tmp_path / "run").status()))),
    )  # fmt: skip
    assert (tmp_path / "killed").read_text().count("\n") == 2  # attempts
    processes = Counter(file.read_text() for file in tmp_path.glob("process-*"))
    assert processes.total() == 4
    assert max(processes.values()) <= 2
    alone = whole.frame()
    assert scan.frame().equals(alone[alone.step <= 4])
    alone = whole.checkpoints()
    assert scan.checkpoints().equals(alone[alone.step <= 4])
    assert {done for done, _ in reported} == set(range(5))
    assert all(
        done == stored for done, stored in reported
    )  # each row is written before the next is waited for


def test_a_worker_that_always_dies_takes_one_checkpoint_with_it(bare, monkeypatch):
    monkeypatch.setattr(module, "_measure_one", calls.measure_killed)
    table = joma.scan(str(bare), revisions="0..2", workers=2).checkpoints().set_index("step")
    assert table.status.to_dict() == {0: "ok", 1: "failed", 2: "ok"}
    assert table.note[1].startswith(
        "the process that measured it died: its process was killed (SIGKILL)"
    )


def test_picture_has_a_log_axis_with_step_0(whole):
    from joma._show.pages.plot import plot
    from joma._show.plots import save as save_figure

    chart = whole.draw().to_dict()
    assert '"symlog"' in json.dumps(chart)
    save_figure(whole.draw(), whole.path)
    assert plot(whole.path) == whole.path
    assert (whole.path / "figure.png").stat().st_size > 1000


def test_command_line(bare, series, tmp_path, monkeypatch, capsys):
    from typer.testing import CliRunner

    from joma.cli import app

    monkeypatch.chdir(tmp_path)
    run = CliRunner().invoke
    good = run(app, ["scan", str(bare), "--revisions", "0..16"])
    assert good.exit_code == 0, good.output
    assert good.output.strip().splitlines()[-1] == "6 checkpoints: 0 failed"
    assert (tmp_path / f"runs/scan-{bare.name}/figure.png").exists()
    more = run(app, ["scan", str(bare), "--revisions", "0..64"])
    assert more.output.strip().splitlines()[-1] == "8 checkpoints: 0 failed"
    bad = run(app, ["scan", str(series), "--out", str(tmp_path / "bad")])
    assert bad.exit_code == 1
    assert bad.output.strip().splitlines()[-1] == "5 checkpoints: 0 failed, 1 measured in part"
    assert "step-1: identical to step-4, step-8" in bad.output
    typo = run(app, ["scan", str(bare), "--gauges", "entropi"])
    assert isinstance(
        typo.exception, ValueError
    )  # joma.cli.main makes this one line and exit status 2
    assert "Did you mean 'entropy'" in str(typo.exception)


def touch(folder):
    folder.mkdir(parents=True)
    (folder / "model.safetensors").touch()


def test_the_last_line_counts_what_was_asked_for(tmp_path, monkeypatch):
    from typer.testing import CliRunner

    from joma.cli import app

    monkeypatch.chdir(tmp_path)
    save("neox", tmp_path / "series/step-1")
    touch(tmp_path / "series/step-2")
    run = CliRunner().invoke
    assert run(app, ["scan", "series"]).exit_code == 1
    good = run(app, ["scan", "series", "--revisions", "step-1"])
    assert good.output.strip().splitlines()[-1] == "1 checkpoint: 0 failed"
    assert good.exit_code == 0


def test_without_ray_the_error_says_how_to_get_it(tmp_path, monkeypatch):
    import importlib.util

    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *more: None if name == "ray" else find(name, *more),
    )
    touch(tmp_path / "step-1")
    with pytest.raises(ValueError, match=r"pip install 'joma\[ray\]'"):
        joma.scan(str(tmp_path), engine="ray")
