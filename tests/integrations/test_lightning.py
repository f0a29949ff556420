"""The real Trainer of Lightning on a tiny Transformer: what it logs, counts and leaves behind."""

import importlib
import logging
import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.utils.data import DataLoader

import joma

lightning = pytest.importorskip("lightning.pytorch")
pytest.importorskip("tensorboard")

from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger  # noqa: E402

from joma.integrations.lightning import WatchCallback  # noqa: E402
from tests.integrations.tensorboard_files import scalars  # noqa: E402

pytestmark = [  # what Lightning says of its own code and of tests that are small
    pytest.mark.filterwarnings(
        "ignore:`isinstance\\(treespec, LeafSpec\\)` is deprecated:FutureWarning"
    ),
    pytest.mark.filterwarnings("ignore:The '.*_dataloader' does not have many workers"),
    pytest.mark.filterwarnings(
        "ignore:The number of training batches .* is smaller than the logging interval"
    ),
]
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

WORDS, LENGTH, LR = 16, 12, 1e-2
EPSILON = float(np.finfo(np.float32).eps)


class Block(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.attn = nn.MultiheadAttention(16, 2, batch_first=True)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.drop = nn.Dropout(dropout)

    def forward(self, x):
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        x = x + self.drop(self.attn(x, x, x, attn_mask=mask, need_weights=False, is_causal=True)[0])
        return x + self.down(self.up(x).relu())


class Model(nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(WORDS, 16)
        self.blocks = nn.Sequential(Block(dropout), Block(dropout))
        self.head = nn.Linear(16, WORDS)

    def forward(self, x):
        return self.head(self.blocks(self.embedding(x)))


def loss_of(model, x):
    return F.cross_entropy(model(x)[:, :-1].flatten(0, 1), x[:, 1:].flatten())


class Module(lightning.LightningModule):
    def __init__(self, dropout=0.0, error=None):
        super().__init__()
        self.model, self.error = Model(dropout), error

    def training_step(self, batch, index):
        if index == 3 and self.error:
            raise self.error
        loss = loss_of(self.model, batch)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, index):
        self.log("valid_loss", loss_of(self.model, batch))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), LR)


def tokens(n, seed=0):
    return torch.randint(WORDS, (n, LENGTH), generator=torch.Generator().manual_seed(seed))


def fit(module, folder, *callbacks, batches=6, **options):
    trainer = lightning.Trainer(
        **{
            "accelerator": "cpu", "max_epochs": 1, "logger": False, "enable_progress_bar": False,
            "enable_model_summary": False, "enable_checkpointing": False, "default_root_dir": folder,
            "log_every_n_steps": 1, "val_check_interval": 2,
        } | options,
        callbacks=list(callbacks),
    )  # fmt: skip
    torch.manual_seed(1)
    trainer.fit(module, DataLoader(tokens(4 * batches), 4), DataLoader(tokens(8, seed=1), 8))
    return trainer


def test_metrics_reach_every_logger_with_the_step(tmp_path):
    loggers = [TensorBoardLogger(tmp_path / "tb"), CSVLogger(tmp_path / "csv")]
    watched = WatchCallback(run=tmp_path / "run", every=2, gauges=("entropy", "stable_rank"))
    fit(Module(), tmp_path, watched, logger=loggers)
    frame, logged = watched.frame(), scalars(tmp_path / "tb")
    assert len(logged["train_loss"]) == 6
    for gauge in ("entropy", "stable_rank"):
        for layer in (0, 1):
            rows = frame[(frame.gauge == gauge) & (frame.layer == layer)]
            measured = rows.groupby("step")["value"].mean()
            tag = logged[f"joma/{gauge}/layer_{layer:02d}"]
            assert list(tag) == measured.index.tolist() == [1, 2, 4, 6]
            # the run folder keeps each head with the digits of float32, the logger gets their exact mean
            np.testing.assert_allclose(list(tag.values()), measured, rtol=2 * EPSILON, atol=0)
    text = next((tmp_path / "csv").rglob("metrics.csv")).read_text()
    assert "joma/entropy/layer_01" in text.splitlines()[0]
    assert joma.Run(tmp_path / "run").done


@pytest.mark.parametrize("accumulate", [1, 4])
def test_values_are_those_of_a_plain_loop_and_accumulated_batches_are_one_step(
    tmp_path, accumulate
):
    watched = WatchCallback(every=1)
    fit(Module(), tmp_path, watched, accumulate_grad_batches=accumulate)

    model = Model()
    optimiser = torch.optim.AdamW(model.parameters(), LR)
    plain = joma.watch(model, every=1, live=False, optimizer=optimiser)
    batches = tokens(24).split(4)
    for n in range(0, 6, accumulate):  # a last step of two batches where four are accumulated
        losses = [loss_of(model, batch) for batch in batches[n : n + accumulate]]
        (sum(losses) / accumulate).backward()  # Lightning divides by four there too
        optimiser.step()
        optimiser.zero_grad()
        plain.step(float(sum(losses).detach()) / len(losses))
    plain.close()

    mine, theirs = watched.frame(), plain.frame()
    keys = ["step", "layer", "head", "gauge"]
    assert mine[keys].equals(theirs[keys])
    assert mine.step.unique().tolist() == list(range(1, 7 if accumulate == 1 else 3))
    assert mine.module.dropna().tolist() == [f"model.{name}" for name in theirs.module.dropna()]
    np.testing.assert_allclose(mine.value, theirs.value, rtol=2e-5)
    np.testing.assert_allclose(mine.tau, LR * mine.step, rtol=1e-12)


def test_training_is_bitwise_the_same_with_and_without_a_watch(tmp_path):
    weights = []
    for callbacks in ([], [WatchCallback(every=1, gauges=("entropy", "stable_rank", "coherence"))]):
        module = Module(dropout=0.1)
        fit(module, tmp_path, *callbacks, accumulate_grad_batches=2)
        weights.append(module.state_dict())
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


@pytest.mark.parametrize(
    ("error", "leaves"),
    [(RuntimeError("the disk is gone"), RuntimeError), (KeyboardInterrupt(), SystemExit)],
)
def test_a_fit_that_fails_or_is_interrupted_leaves_a_run_that_says_so(
    tmp_path, monkeypatch, error, leaves
):
    monkeypatch.setattr(
        "signal.signal", lambda *_: None
    )  # Lightning would ignore Ctrl-C from then on
    watched = WatchCallback(run=tmp_path / "run", every=1)
    module = Module(error=error)
    with pytest.raises(leaves):
        fit(module, tmp_path, watched)
    run = joma.Run(tmp_path / "run")
    failed = isinstance(error, RuntimeError)
    assert run.info["status"] == ("failed" if failed else "interrupted")
    assert run.info["reason"] == (
        "RuntimeError: the disk is gone" if failed else "KeyboardInterrupt (Ctrl-C)"
    )
    assert run.frame("loss").step.tolist() == watched.frame().step.unique().tolist() == [1, 2, 3]
    joma.watch(module, live=False).close()  # which may be watched again


def test_two_optimisers_by_hand_make_one_step_a_batch(tmp_path):
    class Manual(Module):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch, index):
            loss = loss_of(self.model, batch)
            self.manual_backward(loss)
            for optimiser in self.optimizers():
                optimiser.step()
                optimiser.zero_grad()
            return loss

        def configure_optimizers(self):
            return [
                torch.optim.SGD(part.parameters(), LR)
                for part in (self.model.blocks, self.model.head)
            ]

    watched = WatchCallback(every=2)
    assert fit(Manual(), tmp_path, watched).global_step == 12
    frame = watched.frame()
    assert frame.step.unique().tolist() == [1, 2, 4, 6]
    np.testing.assert_allclose(frame.tau, LR * frame.step, rtol=1e-12)
    assert len(watched.watch.tau) == 2
    first = frame[(frame.gauge == "loss") & (frame.step == 1)].value.item()
    assert first == pytest.approx(loss_of(Model(), tokens(24)[:4]).item(), rel=1e-6)


def test_the_callback_serves_pytorch_lightning_too(tmp_path, monkeypatch):
    pl = pytest.importorskip("pytorch_lightning")
    for name in [name for name in sys.modules if name.partition(".")[0] == "lightning"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, "joma.integrations.lightning")
    mine = importlib.import_module("joma.integrations.lightning").WatchCallback(
        run=tmp_path / "run", every=1
    )
    assert isinstance(mine, pl.Callback)
    assert not isinstance(mine, WatchCallback)

    class Plain(pl.LightningModule):
        training_step, configure_optimizers = Module.training_step, Module.configure_optimizers

        def __init__(self):
            super().__init__()
            self.model, self.error = Model(), None

    trainer = pl.Trainer(
        callbacks=mine, accelerator="cpu", max_epochs=1, logger=False, enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=False, default_root_dir=tmp_path,
    )  # fmt: skip
    trainer.fit(Plain(), DataLoader(tokens(8), 4))
    assert joma.Run(tmp_path / "run").frame("loss").step.tolist() == [1, 2]


def test_what_is_wrong_is_said_before_training():
    with pytest.raises(ValueError, match="Did you mean 'entropy'"):
        WatchCallback(gauges="entropie")
    with pytest.raises(TypeError, match=r"unknown options \['evry'\]"):
        WatchCallback(evry=3)
    with pytest.raises(RuntimeError, match="training has not begun"):
        WatchCallback().frame()


def test_without_the_library_the_error_names_the_extra(monkeypatch):
    for name in ("lightning", "lightning.pytorch", "pytorch_lightning"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "joma.integrations.lightning")
    with pytest.raises(ImportError, match=r"pip install 'joma\[lightning\]'"):
        importlib.import_module("joma.integrations.lightning")


@pytest.mark.filterwarnings("ignore:joma.watch")
@pytest.mark.parametrize("action", ["stop", "lower"])
def test_a_critical_alert_stops_or_lowers_the_rate(tmp_path, critical_at_step_3, action):
    trainer = fit(Module(), tmp_path, WatchCallback(every=1, gauges="entropy", on_alert=action))
    assert trainer.global_step == (3 if action == "stop" else 6)
    assert trainer.optimizers[0].param_groups[0]["lr"] == (LR if action == "stop" else LR / 2)
