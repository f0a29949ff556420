"""The real Trainer of Transformers on a tiny GPT-2: what it logs, counts and leaves behind."""

import importlib
import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch.utils.data import Dataset

import joma

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")
pytest.importorskip("tensorboard")

from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments  # noqa: E402

from joma.integrations.transformers import watch  # noqa: E402
from tests.integrations.tensorboard_files import scalars  # noqa: E402

WORDS, LENGTH = 16, 12
LR = 1e-2
EPSILON = float(np.finfo(np.float32).eps)


class Tokens(Dataset):
    """Random tokens; the first few of each sequence are no targets, so batches differ in how many they have."""

    def __init__(self, n=64, seed=0, fail_at=None):
        self.x = torch.randint(WORDS, (n, LENGTH), generator=torch.Generator().manual_seed(seed))
        self.fail_at, self.asked = fail_at, 0

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        self.asked += 1
        if self.asked == self.fail_at:
            raise RuntimeError("the disk is gone")
        labels = self.x[i].clone()
        labels[: 1 + i % 6] = -100
        return {"input_ids": self.x[i], "labels": labels}


def gpt(dropout=0.0):
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=WORDS, n_positions=LENGTH, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0,
        resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout, initializer_range=0.3,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def trainer_for(model, out, data=None, **options):
    arguments = {
        "max_steps": 6, "per_device_train_batch_size": 4, "logging_steps": 2, "report_to": "none", "use_cpu": True,
        "save_strategy": "no", "disable_tqdm": True, "learning_rate": LR, "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0, "weight_decay": 0.0, "optim": "adamw_torch", "dataloader_pin_memory": False,
    } | options  # fmt: skip
    batches = []

    def collate(items):
        batches.append({key: torch.stack([item[key] for item in items]) for key in items[0]})
        return dict(batches[-1])

    trainer = Trainer(
        model, TrainingArguments(str(out), **arguments), train_dataset=data or Tokens(), eval_dataset=Tokens(8, seed=1),
        data_collator=collate,
    )  # fmt: skip
    trainer.batches = batches
    return trainer


def means(frame):
    """(gauge, layer) -> {step: mean over heads}."""
    table = frame[frame.layer.notna()].groupby(["gauge", "layer", "step"])["value"].mean()
    result = {}
    for (gauge, layer, step), value in table.items():
        result.setdefault((gauge, int(layer)), {})[step] = value
    return result


def test_metrics_reach_tensorboard_next_to_the_loss_and_take_nothing_from_it(tmp_path):
    trainer = trainer_for(
        gpt(), tmp_path / "out", report_to="tensorboard", eval_strategy="steps", eval_steps=2
    )
    watched = watch(
        trainer, run=tmp_path / "run", every=2, gauges=("entropy", "stable_rank", "sink_mass")
    )
    trainer.train()
    logged, measured = scalars(tmp_path / "out"), means(watched.frame())
    assert list(logged["train/loss"]) == [2, 4, 6]
    assert list(logged["eval/loss"]) == [2, 4, 6]
    for gauge in ("entropy", "stable_rank", "sink_mass"):
        for layer in (0, 1):
            tag = logged[f"train/joma/{gauge}/layer_{layer:02d}"]
            assert list(tag) == [1, 2, 4, 6]
            # the run folder keeps each head with the digits of float32, the logger gets their exact mean
            stored = list(measured[gauge, layer].values())
            np.testing.assert_allclose(list(tag.values()), stored, rtol=2 * EPSILON, atol=0)
    assert joma.Run(tmp_path / "run").done


class Heard(TrainerCallback):
    """A reporter of the user's own."""

    def __init__(self):
        self.logs = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.logs.append(dict(logs))


@pytest.mark.parametrize("disable_tqdm", [True, False])
def test_without_a_reporter_the_trainer_does_not_print_all_layers_and_gauges(
    tmp_path, capsys, disable_tqdm
):
    trainer = trainer_for(gpt(), tmp_path / "out", report_to="none", disable_tqdm=disable_tqdm)
    reporter = Heard()
    trainer.add_callback(reporter)
    watch(trainer, every=1)
    trainer.train()
    printed = "".join(capsys.readouterr())
    assert "joma/" not in printed
    assert printed.count("'loss'") == 3  # its own numbers are printed as ever
    assert sum("joma/entropy/layer_00" in logs for logs in reporter.logs) == 6
    assert sum("loss" in logs for logs in reporter.logs) == 3
    assert not any("on_log" in vars(callback) for callback in trainer.callback_handler.callbacks)


@pytest.mark.parametrize("accumulate", [1, 3])
def test_values_are_those_of_a_plain_loop_on_the_same_batches(tmp_path, accumulate):
    trainer = trainer_for(
        gpt(), tmp_path / "out", gradient_accumulation_steps=accumulate, max_steps=4, logging_steps=1,
        eval_strategy="steps", eval_steps=1, eval_on_start=True,
    )  # fmt: skip
    watched = watch(trainer, every=1)
    trainer.train()

    model = gpt().train()
    optimiser = torch.optim.AdamW(model.parameters(), LR, weight_decay=0.0)
    shape = torch.Size((4, LENGTH))
    batches = iter(
        [b for b in trainer.batches if b["input_ids"].shape == shape]
    )  # batches of evaluation are of 8
    plain = joma.watch(model, every=1, live=False, optimizer=optimiser)
    losses = []
    for _ in range(4):
        micro = [next(batches) for _ in range(accumulate)]
        targets = sum(int((b["labels"][:, 1:] != -100).sum()) for b in micro)
        total = torch.zeros(())
        for b in micro:
            logits = model(b["input_ids"]).logits[:, :-1]
            loss = (
                F.cross_entropy(logits.flatten(0, 1), b["labels"][:, 1:].flatten(), reduction="sum")
                / targets
            )
            loss.backward()
            total = total + loss.detach()
        optimiser.step()
        optimiser.zero_grad()
        losses.append(float(total))
        plain.step(total)
    plain.close()

    mine, theirs = watched.frame(), plain.frame()
    assert mine[["step", "layer", "head", "gauge", "module"]].equals(
        theirs[["step", "layer", "head", "gauge", "module"]]
    )
    np.testing.assert_allclose(mine.value, theirs.value, rtol=2e-5)
    np.testing.assert_allclose(mine.tau, LR * mine.step, rtol=1e-12)
    logged = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    np.testing.assert_allclose(mine[mine.gauge == "loss"].value, logged, rtol=1e-6)
    np.testing.assert_allclose(logged, losses, rtol=2e-5)


def test_training_is_bitwise_the_same_with_and_without_a_watch(tmp_path):
    weights, histories = [], []
    for watched in (False, True):
        trainer = trainer_for(
            gpt(dropout=0.1), tmp_path / f"out{watched}", gradient_accumulation_steps=2, eval_strategy="steps",
            eval_steps=3, max_grad_norm=1.0,
        )  # fmt: skip
        if watched:
            watch(
                trainer, every=1, gauges=("entropy", "stable_rank", "stable_rank.qk", "coherence")
            )
        trainer.train()
        weights.append(trainer.model.state_dict())
        histories.append([row["loss"] for row in trainer.state.log_history if "loss" in row])
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    assert histories[0] == histories[1]
    assert len(histories[0]) == 3


def test_steps_are_optimiser_steps_also_where_an_epoch_ends_within_one(tmp_path):
    trainer = trainer_for(
        gpt(),
        tmp_path / "out",
        Tokens(20),
        gradient_accumulation_steps=2,
        max_steps=-1,
        num_train_epochs=2,
    )  # 5 batches an epoch: steps of 2, 2 and 1
    watched = watch(trainer, every=1)
    trainer.train()
    assert trainer.state.global_step == 6
    assert watched.frame().step.unique().tolist() == [1, 2, 3, 4, 5, 6]


class Stop(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 3:
            raise KeyboardInterrupt


@pytest.mark.parametrize("how", ["data", "interrupt"])
def test_a_training_that_fails_or_is_interrupted_leaves_a_run_that_says_so(tmp_path, how):
    trainer = trainer_for(gpt(), tmp_path / "out", Tokens(fail_at=14) if how == "data" else None)
    watched = watch(trainer, run=tmp_path / "run", every=1)
    if how == "interrupt":
        trainer.add_callback(Stop)
    error = RuntimeError if how == "data" else KeyboardInterrupt
    with pytest.raises(error):
        trainer.train()
    run = joma.Run(tmp_path / "run")
    assert run.info["status"] == ("failed" if how == "data" else "interrupted")
    assert run.info["reason"].startswith(
        "RuntimeError: the disk is gone" if how == "data" else "KeyboardInterrupt"
    )
    assert run.frame().step.max() >= 2
    assert watched.frame().step.max() >= 2
    assert "training_step" not in vars(trainer)
    joma.watch(trainer.model, live=False).close()  # which may be watched again


def test_a_training_that_is_started_again_with_smaller_batches_keeps_one_run(tmp_path):
    class Full(Trainer):
        def training_step(self, model, inputs, *args, **kwargs):
            if self.state.global_step == 2 and len(inputs["input_ids"]) == 4:
                raise RuntimeError("CUDA out of memory. Tried to allocate 20.00 GiB")
            return super().training_step(model, inputs, *args, **kwargs)

    trainer = trainer_for(gpt(), tmp_path / "out", auto_find_batch_size=True, max_steps=4)
    trainer.__class__ = Full
    watch(trainer, run=tmp_path / "run", every=1)
    trainer.train()
    run = joma.Run(tmp_path / "run")
    assert run.done
    assert run.frame("loss").step.tolist() == [1, 2, 3, 4]


def test_a_resumed_training_goes_on_with_its_run(tmp_path):
    options = {"save_strategy": "steps", "save_steps": 3, "logging_steps": 1}
    first = trainer_for(gpt(), tmp_path / "out", max_steps=3, **options)
    watch(first, run=tmp_path / "run", every=1)
    first.train()
    second = trainer_for(gpt(), tmp_path / "out", max_steps=6, **options)
    watched = watch(second, run=tmp_path / "run", every=1, resume=True)
    second.train(resume_from_checkpoint=True)
    loss = watched.frame().query("gauge == 'loss'")
    assert loss.step.tolist() == [1, 2, 3, 4, 5, 6]
    np.testing.assert_allclose(loss.tau, LR * loss.step, rtol=1e-12)
    logged = [row["loss"] for row in second.state.log_history if "loss" in row]
    np.testing.assert_allclose(loss.value, logged, rtol=1e-6)
    third = trainer_for(gpt(), tmp_path / "out", max_steps=7, **options)
    watched = watch(third, run=tmp_path / "elsewhere", every=1)
    third.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-6"))
    assert [len(phase._recent) for phase in watched.phases] == [3] * len(
        watched.phases
    )  # the checkpoint has them


def test_what_is_wrong_is_said_before_training(tmp_path):
    trainer = trainer_for(gpt(), tmp_path / "out")
    with pytest.raises(ValueError, match="Did you mean 'entropy'"):
        watch(trainer, gauges="entropie")
    with pytest.raises(ValueError, match="every must be a positive number"):
        watch(trainer, every=0)
    with pytest.raises(TypeError, match=r"unknown options \['evry'\]"):
        watch(trainer, evry=3)
    with pytest.raises(TypeError, match=r"a transformers\.Trainer is watched, not GPT2LMHeadModel"):
        watch(trainer.model)
    watched = watch(trainer)
    with pytest.raises(RuntimeError, match="training has not begun"):
        watched.frame()
    assert "training has not begun" in repr(watched)
    with pytest.raises(ValueError, match="watched already"):
        watch(trainer)
    watched.close()
    assert "train" not in vars(trainer)
    watch(trainer).close()


def test_a_closed_watch_is_off_the_trainer(tmp_path):
    trainer = trainer_for(gpt(), tmp_path / "out", max_steps=2)
    watched = watch(trainer, run=tmp_path / "run", every=1)
    watched.close()
    trainer.train()
    assert not (tmp_path / "run").exists()
    assert not any("joma" in key for row in trainer.state.log_history for key in row)


def test_without_the_library_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.delitem(sys.modules, "joma.integrations.transformers")
    with pytest.raises(ImportError, match=r"pip install 'joma\[hf\]'"):
        importlib.import_module("joma.integrations.transformers")


@pytest.mark.filterwarnings("ignore:joma.watch")
@pytest.mark.parametrize("action", ["stop", "lower"])
def test_a_critical_alert_stops_or_lowers_the_rate(tmp_path, critical_at_step_3, action):
    trainer = trainer_for(gpt(), tmp_path, lr_scheduler_type="linear")
    rates = []

    class Rates(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            rates.append(trainer.optimizer.param_groups[0]["lr"])

    trainer.add_callback(Rates())
    watch(trainer, every=1, gauges="entropy", on_alert=action)
    trainer.train()
    linear = [LR * (1 - n / 6) for n in range(6)]
    if action == "stop":
        assert trainer.state.global_step == 3
    else:
        assert rates == pytest.approx([*linear[:3], *(rate / 2 for rate in linear[3:])])


def test_actions_that_do_not_exist_are_refused(tmp_path):
    with pytest.raises(
        ValueError, match="on_alert must be 'stop', 'lower' or a function of an alert; got 'halt'"
    ):
        watch(trainer_for(gpt(), tmp_path), on_alert="halt")
