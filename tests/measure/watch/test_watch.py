"""A watch never changes training, survives what goes wrong, and says what it saw."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import math
import pickle
import subprocess
import sys
import warnings
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import joma
from joma._measure.watch.inputs import NotWatchable
from tests.measure.watch.models import (
    LENGTH,
    VOCABULARY,
    HandWrittenGPT,
    entropy_of,
    sharpen,
    tally_of,
)

CALL = nn.Module.__call__


@pytest.fixture(autouse=True)
def _nothing_is_left_behind():
    yield
    assert nn.Module.__call__ is CALL
    assert torch.overrides._len_torch_function_stack() == 0


def tokens(seed: int = 0, batch: int = 4) -> torch.Tensor:
    return torch.randint(VOCABULARY, (batch, LENGTH), generator=torch.Generator().manual_seed(seed))


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    logits = model(x)
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), x[:, 1:].flatten())


class Checkpointed(HandWrittenGPT):
    reentrant = False

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.head(x)


def train(
    model: nn.Module, watched: bool, steps: int = 4, accumulate: int = 2, autocast: bool = False
):
    torch.manual_seed(7)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    w = (
        joma.watch(model, every=1, gauges=("entropy", "stable_rank", "coherence"))
        if watched
        else None
    )
    with w or contextlib.nullcontext():
        for step in range(steps):
            for micro in range(accumulate):
                with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
                    loss = loss_of(model, tokens(10 * step + micro)) / accumulate
                loss.backward()
            gradients = [p.grad.clone() for p in model.parameters()]
            optimizer.step()
            optimizer.zero_grad()
            if w is not None:
                w.step(loss=loss)
    return w, gradients, torch.get_rng_state()


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("kind", ["plain", "softmax", "encoder", "checkpoint", "reentrant"])
def test_training_is_bitwise_the_same(kind, autocast):
    torch.manual_seed(0)
    if kind == "encoder":
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.2, batch_first=True)
        model = nn.Sequential(
            nn.Embedding(VOCABULARY, 16), nn.TransformerEncoder(layer, 2), nn.Linear(16, VOCABULARY)
        )
    elif kind in ("checkpoint", "reentrant"):
        model = Checkpointed("sdpa", dropout=0.2)
        model.reentrant = kind == "reentrant"
    else:
        model = HandWrittenGPT("softmax" if kind == "softmax" else "sdpa", dropout=0.2)
    other = copy.deepcopy(model)
    w, gradients, state = train(model, True, autocast=autocast)
    _, expected, expected_state = train(other, False, autocast=autocast)
    assert all(torch.equal(a, b) for a, b in zip(gradients, expected, strict=True))
    assert all(
        torch.equal(a, b)
        for a, b in zip(model.state_dict().values(), other.state_dict().values(), strict=True)
    )
    assert torch.equal(state, expected_state)
    assert len(w.layers) == 2  # neither micro-batches nor recomputation add layers
    assert len(w.frame().query("gauge == 'entropy' and step == 1")) == 4


def test_micro_batches_are_one_batch():
    torch.manual_seed(0)
    model = sharpen(HandWrittenGPT("sdpa"))
    values = []
    for batches in ([tokens(1), tokens(2)], [torch.cat([tokens(1), tokens(2)])]):
        with joma.watch(model, every=1, gauges="entropy") as w:
            for x in batches:
                loss_of(model, x).backward()
            values.append(w.step())
    assert values[0] == pytest.approx(values[1], abs=1e-6)


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation_is_not_counted(reentrant):
    torch.manual_seed(0)
    model = sharpen(Checkpointed("sdpa"))
    model.reentrant = reentrant
    with joma.watch(model, every=1, gauges="entropy") as w:
        loss = loss_of(model, tokens())
        counted = {
            key: float(sums.of_gauge("entropy").parts["count"].sum())
            for key, sums in tally_of(w).combined.items()
        }
        loss.backward()
        assert {
            key: float(sums.of_gauge("entropy").parts["count"].sum())
            for key, sums in tally_of(w).combined.items()
        } == counted
        w.step()


def test_validation_between_steps_is_not_measured():
    torch.manual_seed(0)
    model = sharpen(HandWrittenGPT("sdpa"))
    with joma.watch(model, every=1, gauges="entropy") as w:
        loss_of(model, tokens(1)).backward()
        first = w.step()
        with torch.no_grad():
            loss_of(model, tokens(99))
        loss_of(model, tokens(1)).backward()
        assert w.step() == first


def test_when_it_measures():
    model = HandWrittenGPT("sdpa")
    due = {
        3: [1, 3, 6, 9],
        "log": [1, 2, 3, 4, 5, 6, 7, 8, 10],
        (lambda step: step in (2, 5)): [2, 5],
    }
    for every, expected in due.items():
        with joma.watch(model, every=every) as w:
            seen = []
            for step in range(1, 11):
                model(tokens())
                if w.step(loss=1.0):
                    seen.append(step)
        assert seen == expected == sorted(w.frame().step.unique())


def test_metrics_and_frame(tmp_path):
    torch.manual_seed(0)
    model = HandWrittenGPT("sdpa", layers=3)
    with joma.watch(model, run=tmp_path / "run", every=1, gauges=("entropy", "stable_rank")) as w:
        model(tokens())
        metrics = w.step(loss=torch.tensor(2.5, requires_grad=True), lr=0.1)
        model(tokens())
        w.step(loss=2.0)
    expected = [f"joma/{g}/layer_0{n}" for g in ("entropy", "stable_rank") for n in range(3)]
    assert list(metrics) == [*expected, "joma/tau"]  # the clock: a learning rate was given
    assert all(isinstance(value, float) for value in metrics.values())
    frame = w.frame()
    assert list(frame.columns)[:6] == ["step", "tau", "layer", "head", "gauge", "value"]
    assert frame.groupby("step").tau.unique().explode().tolist() == pytest.approx(
        [0.1, 0.2]
    )  # the last rate goes on
    heads = frame.query("step == 1 and gauge == 'entropy' and layer == 2")
    assert len(heads) == 2
    assert heads["value"].mean() == pytest.approx(metrics["joma/entropy/layer_02"])
    assert set(heads["module"]) == {"blocks.2.attn"}
    assert frame.query("gauge == 'loss'")["value"].tolist() == [2.5, 2.0]
    assert frame.query("gauge == 'lr'")["value"].tolist() == [
        0.1,
        0.1,
    ]  # also where it was not given: it goes on
    again = joma.Run(tmp_path / "run")
    assert again.done
    assert again.info["kind"] == "watch"
    assert again.info["layers"]["stable_rank"] == [f"blocks.{n}.mlp.0" for n in range(3)]


def test_probe_is_comparable_over_time_and_leaves_no_trace():
    torch.manual_seed(0)
    model = HandWrittenGPT("sdpa", dropout=0.5)
    probe = tokens(5)
    modes = [m.training for m in model.modules()]
    with joma.watch(model, every=1, probe=probe, gauges="entropy") as w:
        first = w.step()
        loss_of(model, tokens(1)).backward()
        second = w.step()
    assert first == second  # the weights did not move; the batch that passed does not matter
    assert [m.training for m in model.modules()] == modes
    expected = [
        float(entropy_of(b.attn.last).mean())
        for b in model.eval().blocks
        if model(probe) is not None
    ]
    assert list(second.values()) == pytest.approx(expected, abs=1e-5)


def test_probe_restores_random_state_and_buffers():
    class Noisy(HandWrittenGPT):
        def __init__(self):
            super().__init__("sdpa")
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x):
            self.count += torch.rand(())
            return super().forward(x)

    model = Noisy()
    state = torch.get_rng_state()
    with joma.watch(model, every=1, probe={"x": tokens()}, gauges="entropy") as w:
        w.step()
    assert torch.equal(torch.get_rng_state(), state)
    assert float(model.count) == 0.0


def test_padding_given_by_the_user():
    class Masked(HandWrittenGPT):
        def forward(self, x, real=None):
            return super().forward(x)

    torch.manual_seed(0)
    model, x = sharpen(Masked("sdpa")), tokens()
    real = torch.ones_like(x, dtype=torch.bool)
    real[:, 6:] = False
    expected = None
    for padding in ("real", lambda args, kwargs: kwargs["real"]):
        with joma.watch(model, every=1, gauges="entropy", padding=padding) as w:
            model(x, real=real)
            values = list(w.step().values())
        expected = [float(entropy_of(b.attn.last, real).mean()) for b in model.blocks]
        assert values == pytest.approx(expected, abs=1e-5)


def test_copying_and_pickling_a_watched_model():
    torch.manual_seed(0)
    model = HandWrittenGPT("sdpa")
    with joma.watch(model, every=1, gauges="entropy") as w:
        twin = copy.deepcopy(model)
        with torch.no_grad():
            for parameter in twin.parameters():
                parameter.zero_()
        assert not twin(tokens()).any()  # the copy runs on its own weights
        pickle.loads(pickle.dumps(model))
        torch.save(model.state_dict(), io.BytesIO())
        model(tokens())
        w.step()


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt])
def test_an_exception_in_the_model_leaves_nothing_behind(kind):
    class Fails(HandWrittenGPT):
        fail = True

        def forward(self, x):
            out = super().forward(x)
            if self.fail:
                raise kind("stop")
            return out

    model = Fails("sdpa")
    w = joma.watch(model, every=1, gauges="entropy")
    with pytest.raises(kind):
        model(tokens())
    assert torch.overrides._len_torch_function_stack() == 0
    model.fail = False
    model(tokens())
    assert len(w.step()) == 2
    w.close()
    model.fail = True
    with pytest.raises(kind), joma.watch(model, every=1):
        model(tokens())


def large_tensors() -> list[torch.Tensor]:
    gc.collect()
    return [
        thing
        for thing in gc.get_objects()
        if issubclass(type(thing), torch.Tensor) and thing.dim() >= 3
    ]


def test_no_tensor_is_kept_after_a_step():
    others = [
        weakref.ref(tensor) for tensor in large_tensors()
    ]  # of earlier tests, which may go meanwhile

    def own_tensors() -> int:
        tensors = large_tensors()
        of_others = {id(reference()) for reference in others}
        return sum(id(tensor) not in of_others for tensor in tensors)

    model = HandWrittenGPT("sdpa")
    with joma.watch(model, every=1, gauges=("entropy", "coherence")) as w:
        loss_of(model, tokens()).backward()
        w.step()
        model.zero_grad()
        for block in model.blocks:
            block.attn.last = None
        alive = own_tensors()
        for _ in range(3):
            loss_of(model, tokens()).backward()
            w.step()
        model.zero_grad()
        for block in model.blocks:
            block.attn.last = None
        assert own_tensors() == alive


# Bad input


def test_a_module_without_attention():
    with pytest.raises(NotWatchable, match=r"no attention was seen.*Looked for.*Found: 2 Linear"):
        joma.watch(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)))

    class Custom(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 4)

        def forward(self, x):
            return torch.softmax(
                self.b(self.a(x)), -1
            )  # a softmax, but not over a product of two activations

    model = Custom()
    with joma.watch(model, every=1) as w:
        model(torch.randn(2, 3, 4))
        with pytest.warns(joma.JomaWarning, match=r"no attention was seen in Custom"):
            w.step()
    with joma.watch(model, every=1, gauges="stable_rank") as w:
        assert list(w.step()) == ["joma/stable_rank/layer_00"]
    with pytest.raises(TypeError, match="is watched, not int"):
        joma.watch(3)


def test_a_model_that_did_not_run():
    model = HandWrittenGPT("sdpa")
    with joma.watch(model, every=1) as w:
        model(tokens())
        w.step()
        with pytest.warns(UserWarning, match="did not run since the last step"):
            metrics = w.step()
        assert all("stable_rank" in name for name in metrics)
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # said once
            w.step()
            model(tokens())
            assert "joma/entropy/layer_00" in w.step()


def test_nan_in_weights_is_said_and_training_goes_on():
    model = HandWrittenGPT("sdpa")
    with torch.no_grad():
        model.blocks[1].attn.qkv.weight[0, 0] = math.nan
        model.blocks[1].mlp[0].weight[0, 0] = math.nan
    with joma.watch(model, every=1) as w:
        model(tokens())
        with pytest.warns(UserWarning, match=r"joma\.watch") as said:
            metrics = w.step(loss=math.nan)
        (message,) = [str(warning.message) for warning in said]
        assert "weights: NaN first in blocks.1.attn.qkv.weight (layer 1); then in " in message
        assert math.isnan(metrics["joma/entropy/layer_01"])
        assert math.isnan(metrics["joma/stable_rank/layer_01"])
        assert metrics["joma/entropy/layer_00"] > 0
        heads = w.frame().query("gauge == 'entropy' and layer == 1")["value"]
        assert len(heads) == 2
        assert heads.isna().any()
        model(tokens())
        w.step(loss=math.nan)


def test_two_watches_on_one_model():
    model = HandWrittenGPT("sdpa")
    with joma.watch(model, every=1) as w:
        with pytest.raises(ValueError, match="watched already"):
            joma.watch(model.blocks)
        model(tokens())
        w.step()
    with joma.watch(model, every=1):
        pass


def test_run_folders(tmp_path):
    model, other = HandWrittenGPT("sdpa"), HandWrittenGPT("sdpa")
    from joma._runs import RunInUse

    with joma.watch(model, run=tmp_path / "a", every=1) as w:
        with pytest.raises(RunInUse, match="a"):
            joma.watch(other, run=tmp_path / "a")
        model(tokens())
        w.step(loss=1.0)
    with joma.watch(model, run=tmp_path / "a", every=1, resume=True) as w:
        model(tokens())
        w.step(loss=1.0)
    assert sorted(w.frame().step.unique()) == [1, 2]
    with joma.watch(model, run=tmp_path / "a", every=1, overwrite=True) as w:
        model(tokens())
        w.step(loss=1.0)
    assert sorted(w.frame().step.unique()) == [1]


def test_a_second_run_of_the_same_name_is_given_a_number_and_loses_nothing(tmp_path, monkeypatch):
    from joma._runs import RunError, RunWriter
    from joma._runs.folder import newest

    monkeypatch.chdir(tmp_path)
    model = HandWrittenGPT("sdpa")

    def train(every=1):
        with joma.watch(model, run="runs/mine", every=every) as w:
            model(tokens())
            w.step(loss=1.0)
        return str(w.path)

    assert train() == "runs/mine"
    first = Path("runs/mine/run.json").read_bytes()
    with pytest.warns(
        joma.JomaWarning,
        match=r"^joma.watch: runs/mine holds a run already \(done.* goes to runs/mine-2\.",
    ):
        assert train() == "runs/mine-2"
    Path("runs/mine-3").mkdir()
    Path("runs/mine-3/notes.txt").write_text("mine")  # not a run: never touched
    with pytest.warns(joma.JomaWarning, match=r"goes to runs/mine-4\."):
        assert train(every=2) == "runs/mine-4"  # other settings as well
    assert newest(Path("runs/mine")) == Path("runs/mine-4")
    assert newest(Path("runs/mine-4")) == Path("runs/mine-4")
    assert Path("runs/mine/run.json").read_bytes() == first
    assert [p.name for p in Path("runs/mine-3").iterdir()] == ["notes.txt"]
    RunWriter.create("runs/scan", kind="scan", config={}).finish("done")
    with pytest.raises(RunError, match="holds another run"):  # of another kind: most likely a slip
        joma.watch(model, run="runs/scan", every=1)


def test_going_on_from_before_the_last_row(tmp_path):
    model = HandWrittenGPT("sdpa")
    with joma.watch(model, run=tmp_path / "a", every=1) as w:
        for _ in range(5):
            model(tokens())
            w.step(loss=1.0)
    with joma.watch(model, run=tmp_path / "a", every=1, resume=True) as w:
        for step in (3, 4):
            model(tokens())
            w.step(loss=2.0, step=step)
    assert w.frame().query("gauge == 'loss'")["value"].tolist() == [1.0, 1.0, 2.0, 2.0]


@pytest.mark.parametrize("fails", [False, True])
def test_a_script_that_ends_without_close(tmp_path, fails):
    script = f"""
import torch, joma
from torch import nn
model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 1)
w = joma.watch(model, run={str(tmp_path / "run")!r}, every=1)
model(torch.randn(2, 5, 8))
w.step(loss=1.0)
{"1 / 0" if fails else ""}
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert "AttributeError" not in done.stderr
    info = joma.Run(tmp_path / "run").info
    assert info["status"] == ("failed" if fails else "done")
    assert not fails or "ZeroDivisionError" in info["reason"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"gauges": ("entropi",)}, "Did you mean 'entropy'"),
        ({"gauges": ()}, "no gauges"),
        ({"gauges": "entropy.q"}, "has no parts"),
        ({"gauges": "stable_rank.x"}, "parts are mlp_in"),
        ({"every": 0}, "positive number of steps"),
        ({"every": True}, "positive number of steps"),
        ({"every": "often"}, "positive number of steps"),
        ({"mlp": ["blocks.7.mlp.0"]}, "no matrix 'blocks.7.mlp.0'; there are"),
        ({"mlp": "nothing.*"}, "no matrix matches"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        joma.watch(HandWrittenGPT("sdpa"), **arguments)


def test_what_cannot_be_watched_is_refused_by_name():
    with pytest.raises(NotWatchable, match="DataParallel"):
        joma.watch(nn.DataParallel(HandWrittenGPT("sdpa")))


def test_a_kernel_that_was_not_seen_is_named():
    class Config:
        _attn_implementation = "flash_attention_2"

    class Opaque(nn.Module):
        def __init__(self):
            super().__init__()
            self.proj, self.config = nn.Linear(4, 4), Config()

        def forward(self, x):
            return self.proj(x)

    with joma.watch(Opaque(), every=1, gauges="entropy") as w:
        w.model(torch.randn(2, 3, 4))
        with pytest.warns(
            joma.JomaWarning, match=r"attn_implementation='flash_attention_2'.*'sdpa'"
        ):
            w.step()


def test_sharded_attention_is_refused_by_name():
    class Sharded(torch.Tensor):
        to_local = None  # what tells a DTensor

    class Parallel(HandWrittenGPT):
        def forward(self, x):
            q = torch.randn(1, 2, 5, 4).as_subclass(Sharded)
            nn.functional.scaled_dot_product_attention(q, q, q)
            return super().forward(x)

    model = Parallel("sdpa")
    with joma.watch(model, every=1) as w:
        model(tokens())
        with pytest.warns(joma.JomaWarning, match=r"Parallel.*context or tensor parallelism"):
            w.step()


def test_coherence_is_between_different_tokens():
    torch.manual_seed(0)
    model, x = HandWrittenGPT("sdpa"), tokens()
    with joma.watch(model, every=1, gauges="coherence") as w:
        model(x)
        metrics = w.step()
    kinds = x.unique()
    rows = nn.functional.normalize(model.embed.weight.detach()[kinds], dim=1)
    largest = (rows @ rows.T).fill_diagonal_(0).abs().max()
    assert len(kinds) < x.numel()  # some tokens occur twice: their cosine of 1 must not count
    assert metrics["joma/coherence/layer_00"] == pytest.approx(float(largest), rel=1e-5)


def test_attention_that_ran_unseen_is_named():
    class SecretAttention(nn.Module):
        def forward(self, x):
            weights = (x @ x.mT).exp()  # a softmax of its own making
            return weights / weights.sum(-1, keepdim=True) @ x

    model = HandWrittenGPT("sdpa")
    model.blocks.append(SecretAttention())
    with joma.watch(model, every=1) as w:
        model(0 * tokens())
        with pytest.warns(
            UserWarning, match=r"blocks.2 \(SecretAttention\) ran, but no attention was seen"
        ):
            w.step()


def test_named_matrices_and_a_gauge_of_ones_own():
    from joma._measure.gauges.registry import remove

    @joma.gauge("largest_weight", on="weight")
    def largest_weight(w):
        """The largest entry by size."""
        return float(w.abs().max())

    @joma.gauge("last_query", on="attention")
    def last_query(stats):
        """The entropy once more."""
        return stats.entropy

    try:
        model = HandWrittenGPT("sdpa")
        with joma.watch(
            model, every=1, gauges=("largest_weight", "last_query"), mlp=r"blocks\.\d\.mlp\.2"
        ) as w:
            model(tokens())
            metrics = w.step()
        assert w.matrices == {"mlp_in": ["blocks.0.mlp.2", "blocks.1.mlp.2"]}
        expected = float(model.blocks[1].mlp[2].weight.detach().abs().max())
        assert metrics["joma/largest_weight/layer_01"] == expected
    finally:
        remove("largest_weight")
        remove("last_query")


def test_a_gauge_that_fails_does_not_stop_training():
    from joma._measure.gauges.registry import remove

    @joma.gauge("broken", on="attention")
    def broken(stats):
        """Raises."""
        raise RuntimeError("oh")

    try:
        model = HandWrittenGPT("sdpa")
        with joma.watch(model, every=1, gauges=("broken", "entropy")) as w:
            loss_of(model, tokens()).backward()
            with pytest.warns(UserWarning, match="RuntimeError: oh"):
                w.step()
    finally:
        remove("broken")


def test_layers_with_different_numbers_of_heads():
    model = HandWrittenGPT("sdpa", heads=2)
    model.blocks[1].attn.heads = 4
    with joma.watch(model, every=1, gauges=("entropy", "stable_rank")) as w:
        model(tokens())
        w.step()
    counts = w.frame().query("gauge == 'entropy'").groupby("layer").size()
    assert counts.tolist() == [2, 4]
    assert len(w.frame()) == 2 + 4 + 2 + 2  # heads, stable ranks, phases


def test_what_it_shows():
    from joma._measure.watch.display import status_line

    model = HandWrittenGPT("sdpa", layers=3)
    w = joma.watch(model, every=1)
    assert "no measurement yet" in w._repr_html_()
    model(tokens())
    w.step(loss=3.25)
    text = status_line(w.last_step, w.latest.loss, w.phases).plain
    assert "step 1" in text
    assert "loss 3.25" in text
    assert "0–2 dense" in text
    page = w._repr_html_()
    assert "blocks.2.attn" in page
    assert page.count("<tr>") == 4
    w.close()
    assert "closed" in repr(w)


def test_a_terminal_gets_a_live_line(capfd):
    model = HandWrittenGPT("sdpa")
    with joma.watch(model, every=1, live=True) as w:
        model(tokens())
        w.step(loss=3.25)
    assert "loss 3.25" in capfd.readouterr().err
