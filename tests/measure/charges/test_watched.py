"""Charges in a watched run: balance, drift, the gradient identity before the step, and an alarm when it fails."""

import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional

import joma
from joma._measure.charges.by_layer import by_part
from joma.models.blocks import Blocks

from .families import batch, encoder, loss_of, make

PARTS = ("qk", "vo", "mlp", "norm", "stream")
ALL = [f"charge.{part}" for part in PARTS]


def train(
    model, family, optimizer, watch, steps=3, scale=1.0, autocast=None, before=lambda: None, seed=0
):
    """Steps on random data; ``before`` is run between backward and step."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        optimizer.zero_grad()
        data = batch(family, generator, next(model.parameters()).dtype)
        with torch.autocast("cpu", dtype=autocast, enabled=autocast is not None):
            loss = loss_of(family, model, data)
        (scale * loss.float()).backward()
        before()
        optimizer.step()
        watch.step()


def told(record):
    return [str(w.message) for w in record if "breaks a law" in str(w.message)]


def test_balance_and_drift_are_those_of_the_matrices():
    model = make("GPT-2")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    attention = model.transformer.h[1].attn

    def grams():
        w, b = attention.c_attn.weight.detach().T, attention.c_attn.bias.detach()
        both = torch.cat([w, b[:, None]], dim=1).unflatten(0, (3, 2, 8))  # (q k v, head, h, d + 1)
        return both[0] @ both[0].mT, both[1] @ both[1].mT

    with joma.watch(
        model, every=1, gauges=["charge.qk", "charge_drift.qk"], optimizer=optimizer
    ) as w:
        train(model, "GPT-2", optimizer, w, steps=1)
        q0, k0 = grams()
        train(model, "GPT-2", optimizer, w, steps=2)
        q, k = grams()
    frame = w.frame()
    last = frame[(frame.step == 3) & (frame.layer == 1)].set_index(["gauge", "head"]).value
    for head in range(2):
        balance = (q - k)[head].norm() / (q[head].norm() + k[head].norm())
        drift = (q - k - q0 + k0)[head].norm() / (q0[head].norm() + k0[head].norm())
        assert last["charge.qk", head] == pytest.approx(float(balance), rel=1e-12)
        assert last["charge_drift.qk", head] == pytest.approx(float(drift), rel=1e-9)
    assert frame[frame.step == 1].set_index("gauge").value["charge_drift.qk"].abs().max() == 0


@pytest.mark.parametrize("family", ["GPT-2", "GPT-NeoX", "Llama", "BERT"])
def test_all_parts_of_a_family_without_an_alarm(family):
    model = make(family, torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    parts = [part for part in PARTS if part in by_part(joma.charges(model), Blocks(model))]
    assert {"qk", "vo", "mlp", "norm", "stream"} == set(parts)
    gauges = [f"{gauge}.{part}" for gauge in ("charge", "charge_residual") for part in parts]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with joma.watch(model, every=1, gauges=gauges, optimizer=optimizer) as w:
            train(model, family, optimizer, w)
    frame = w.frame()
    frame = frame[frame.gauge.isin(gauges)]
    assert frame.value.notna().all()
    assert frame[frame.gauge.isin(["charge_residual.qk", "charge_residual.vo"])].value.max() < 1e-5
    balances = frame[frame.gauge.isin([f"charge.{part}" for part in PARTS[:4]])].value
    assert balances.between(0, 1).all()
    assert joma.charges(model).to_frame().balance.dropna().between(0, 1).all()


def test_a_detached_query_raises_an_alarm_that_names_it_and_what_it_was():
    model = make("GPT-2", torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    attention = model.transformer.h[1].attn
    joma_watch = joma.watch(model, every=1, gauges=["charge_residual.qk"], optimizer=optimizer)
    attention.c_attn.register_forward_hook(
        lambda _, args, out: torch.cat([out[..., :16].detach(), out[..., 16:]], dim=-1)
    )
    with warnings.catch_warnings(record=True) as record, joma_watch as w:
        warnings.simplefilter("always")
        train(model, "GPT-2", optimizer, w, steps=3)
    alarms = told(record)
    assert any(
        "(transformer.h.1.attn.qk), heads 0" in alarm and "detached" in alarm for alarm in alarms
    )
    assert [(alert.kind, alert.layer, alert.level) for alert in w.alerts] == [
        ("broken gradient", 1, "warning")
    ]
    assert not any("transformer.h.0.attn.qk" in alarm for alarm in alarms)
    assert len(alarms) == len(
        {alarm.split(": off")[0] for alarm in alarms}
    )  # once per charge, not per step
    frame = w.frame()
    residual = frame[frame.gauge == "charge_residual.qk"].groupby("layer").value
    assert residual.max()[0] < 1e-5
    assert residual.min()[1] > 0.1


def test_an_alarm_that_is_over_is_said_again_when_it_comes_again():
    model = make("GPT-2", torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    weight = model.transformer.h[0].attn.c_attn.weight
    steps = iter([3.0, 1.0, 3.0])
    with warnings.catch_warnings(record=True) as record:
        warnings.simplefilter("always")
        with joma.watch(model, every=1, gauges="charge.qk", optimizer=optimizer) as w:
            train(
                model, "GPT-2", optimizer, w, before=lambda: weight.grad[:, :16].mul_(next(steps))
            )
    assert [alarm.split(":")[1].strip() for alarm in told(record) if "0.attn.qk" in alarm] == [
        "step 1",
        "step 3",
    ]


@pytest.mark.parametrize("precision", ["bf16 autocast", "fp16-like scaling", "bf16 weights"])
def test_mixed_precision_raises_no_alarm_and_a_bug_in_it_does(precision):
    """A gradient scaled by 2**16 has the same relative residual; autocast is seen in the passes."""
    dtype = torch.bfloat16 if precision == "bf16 weights" else torch.float32
    options = {"scale": 2.0**16} if "scaling" in precision else {}
    options |= {"autocast": torch.bfloat16} if "autocast" in precision else {}
    for probe in (None, torch.arange(12)[None]):
        model = make("GPT-2", dtype)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with joma.watch(
                model, every=1, gauges=["charge_residual.qk"], optimizer=optimizer, probe=probe
            ) as w:
                train(model, "GPT-2", optimizer, w, **options)
        residual = w.frame().set_index("gauge").value["charge_residual.qk"]
        assert (residual.max() < 1e-5) == ("bf16" not in precision)
    weight = model.transformer.h[0].attn.c_attn.weight
    with warnings.catch_warnings(record=True) as record:
        warnings.simplefilter("always")
        with joma.watch(model, every=1, gauges="charge.qk", optimizer=optimizer) as w:
            train(
                model,
                "GPT-2",
                optimizer,
                w,
                steps=1,
                **options,
                before=lambda: weight.grad[:, :16].zero_(),
            )
    assert any("0.attn.qk), head" in alarm for alarm in told(record))
    assert [(alert.kind, alert.layer) for alert in w.alerts] == [("broken gradient", 0)]


@pytest.mark.parametrize("family", ["Llama", "GPT-2"])
def test_autocast_inside_the_forward_pass_raises_no_alarm(family):
    """Trainers wrap a model's own ``forward``: no autocast is on yet when the pass begins."""
    model = make(family, torch.float32)
    model.forward = torch.autocast("cpu", dtype=torch.bfloat16)(model.forward)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with joma.watch(model, every=1, gauges=["charge.qk"], optimizer=optimizer) as w:
            train(model, family, optimizer, w)


class Skipped(nn.Module):
    """A block's attention that is left out."""

    def forward(self, hidden_states, **options):
        return torch.zeros_like(hidden_states), None


def test_layers_are_numbered_as_blocks_are():
    """A block without attention is not searched for charges, and keeps its number."""
    model = make("Llama", torch.float32)
    model.model.layers[0].self_attn = Skipped()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    gauges = ["entropy", "stable_rank", "charge.qk", "charge_residual.qk", "charge.mlp"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with joma.watch(model, every=1, gauges=gauges, optimizer=optimizer) as w:
            train(model, "Llama", optimizer, w, steps=1)
    frame = w.frame()
    layers = {
        gauge: sorted(set(rows.layer))
        for gauge, rows in frame[frame.gauge.isin(gauges)].groupby("gauge")
    }
    assert layers == {
        "entropy": [1], "charge.qk": [1], "charge_residual.qk": [1], "stable_rank": [0, 1], "charge.mlp": [1],
    }  # fmt: skip
    assert frame[frame.gauge.isin(gauges)].value.notna().all()


@pytest.mark.parametrize("bug", [False, True])
def test_a_real_gradient_scaler_in_half_precision(bug):
    """Gradients are checked as `GradScaler` leaves them for the optimiser; a step that it skips is not judged."""
    model = make("GPT-2", torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler(
        "cpu", init_scale=2.0**40, backoff_factor=2.0**-8
    )  # the first ones overflow
    weight = model.transformer.h[0].attn.c_attn.weight
    generator = torch.Generator().manual_seed(0)
    stepped = []
    with warnings.catch_warnings(record=True) as record:
        warnings.simplefilter("always")
        with joma.watch(model, every=1, gauges=["charge_residual.qk"], optimizer=optimizer) as w:
            for _ in range(6):
                optimizer.zero_grad()
                with torch.autocast("cpu", dtype=torch.float16):
                    loss = loss_of("GPT-2", model, batch("GPT-2", generator, torch.float32))
                scale = scaler.get_scale()
                scaler.scale(loss).backward()
                if bug:
                    weight.grad[:, :16].zero_()
                scaler.step(optimizer)
                scaler.update()
                stepped.append(scaler.get_scale() >= scale)
                w.step()
    assert 0 < sum(stepped) < 6
    residuals = w.frame().set_index("gauge").value["charge_residual.qk"]
    steps = set(w.frame()[w.frame().gauge == "charge_residual.qk"].step)
    assert steps == {
        step for step, made in enumerate(stepped, 1) if made
    }  # a skipped step has no row
    assert residuals.max() > 0.1 if bug else residuals.max() < 2e-2
    assert bool(told(record)) == bug


def test_a_step_that_a_scaler_skips_is_said_and_not_judged():
    model = make("GPT-2", torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss_of("GPT-2", model, batch("GPT-2", torch.Generator().manual_seed(0))).backward()
    w = joma.watch(model, every=1, gauges="charge.qk", optimizer=optimizer)
    with w, pytest.warns(UserWarning, match="no step of the optimiser was seen"):
        w.step()


def test_parameters_that_are_in_no_optimiser_are_named_and_their_charges_left_alone():
    """Nobody sets their gradients to zero, so they would break the identity without a bug."""
    model = make("GPT-2", torch.float32)
    trained = [p for name, p in model.named_parameters() if "h.0.attn.c_proj" not in name]
    optimizer = torch.optim.SGD(trained, lr=0.1)
    with (
        pytest.warns(UserWarning, match="in no optimiser that is watched") as record,
        joma.watch(model, every=1, gauges=["charge.vo"], optimizer=optimizer) as w,
    ):
        train(model, "GPT-2", optimizer, w)
    (message,) = {str(warning.message) for warning in record}
    assert "transformer.h.0.attn.vo" in message


def test_several_optimisers_check_a_charge_that_they_share_before_the_first_step():
    model = make("GPT-2", torch.float32)
    gains = [p for p in model.parameters() if p.dim() < 2]
    matrices = [p for p in model.parameters() if p.dim() == 2]
    first, second = torch.optim.SGD(gains, lr=0.5), torch.optim.AdamW(matrices, lr=0.1)

    class Both:
        def zero_grad(self):
            first.zero_grad()
            second.zero_grad()

        def step(self):
            first.step()
            second.step()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with joma.watch(
            model, every=1, gauges=["charge_residual.norm"], optimizer=[first, second]
        ) as w:
            train(model, "GPT-2", Both(), w)
    frame = w.frame()
    of_blocks = frame.module.str.startswith(
        "transformer.h."
    )  # the last one is tied to the embedding: no charge
    assert frame[(frame.gauge == "charge_residual.norm") & of_blocks].value.max() < 1e-5


def test_what_cannot_be_measured_is_refused_with_the_reason():
    with pytest.raises(
        ValueError, match=r"charge_residual\.qk is measured before an optimiser's step"
    ):
        joma.watch(make("GPT-2"), gauges=["charge_residual.qk"])
    with pytest.raises(ValueError, match="no charge 'norm' in this model: post-norm"):
        joma.watch(encoder(norm_first=False), gauges=["charge.norm"])
    with pytest.raises(ValueError, match="no attention was found"):
        joma.watch(
            nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)), gauges=["charge.mlp"]
        )
    with torch.device("meta"):
        model = encoder()
    with pytest.raises(ValueError, match="meta device"):
        joma.watch(model, gauges=["charge.qk"])
    with pytest.raises(
        ValueError, match="there is no part 'o' of the gauge 'charge'; parts are qk, vo"
    ):
        joma.watch(encoder(), gauges=["charge.o"])


class Unknown(torch.optim.Optimizer):
    """An optimiser that joma does not know."""

    def __init__(self, parameters):
        super().__init__(parameters, {"rate": 0.1})

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.data -= group["rate"] * p.grad.sign()


def test_an_unknown_optimiser_has_its_gradients_checked_and_says_what_it_has_not():
    model = make("GPT-2", torch.float32)
    optimizer = Unknown(model.parameters())
    with pytest.raises(
        TypeError, match=r"not for Unknown.*gradient identity holds for every optimiser"
    ):
        joma.charges(model).law(optimizer)
    with joma.watch(model, every=1, gauges=["charge_residual.qk"], optimizer=optimizer) as w:
        train(model, "GPT-2", optimizer, w)
    frame = w.frame()
    assert frame[frame.gauge == "charge_residual.qk"].value.max() < 1e-5


def test_a_resumed_watch_has_the_same_drift():
    def run(stops):
        model = make("GPT-2")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        w = joma.watch(model, every=1, gauges=["charge_drift.vo"])
        generator = torch.Generator().manual_seed(0)
        for step in range(1, 5):
            optimizer.zero_grad()
            loss_of("GPT-2", model, batch("GPT-2", generator)).backward()
            optimizer.step()
            w.step()
            if step in stops:
                state = w.state_dict()
                w.close()
                w = joma.watch(model, every=1, gauges=["charge_drift.vo"])
                w.load_state_dict(state)
        w.close()
        frame = w.frame()
        return frame[frame.step == 4].value.to_list()

    assert run(()) == run((2,))


def test_a_scan_has_the_balance_of_each_checkpoint(tmp_path):
    model = make("GPT-NeoX", torch.float32)
    for step in (1, 2):
        model.save_pretrained(tmp_path / f"checkpoint-{step}")
        with torch.no_grad():
            model.gpt_neox.layers[0].attention.query_key_value.weight[:8] *= 2  # queries of head 0
    scan = joma.scan(tmp_path, gauges=ALL)
    assert not scan.failed
    frame = scan.frame()
    assert set(frame.gauge) == set(ALL)
    for gauge, rows in frame[frame.step == 1].groupby("gauge"):
        part = gauge.removeprefix("charge.")
        fresh = make("GPT-NeoX", torch.float32)
        with torch.no_grad():
            expected = torch.cat(
                [
                    layer.balance(layer.sums())
                    for layer in by_part(joma.charges(fresh), Blocks(fresh))[part]
                ]
            )
        assert rows.value.to_list() == pytest.approx(expected.tolist(), rel=1e-6)
    qk = frame[frame.gauge == "charge.qk"].pivot_table(
        index=["layer", "head"], columns="step", values="value"
    )
    assert qk.loc[(0, 0), 2] != qk.loc[(0, 0), 1]
    assert qk.loc[(1, 0), 2] == qk.loc[(1, 0), 1]
    assert scan.draw() is not None
    with pytest.raises(ValueError, match=r"charge_drift\.qk is measured while a model trains"):
        joma.scan(tmp_path, gauges=["charge_drift.qk"])


def test_the_stream_of_a_model_with_a_normalised_embedding_is_what_that_gives_out():
    """BLOOM: the embedding is normalised before the first block, so γ and β of that normalisation enter the stream."""
    import transformers

    torch.manual_seed(0)
    model = transformers.BloomForCausalLM(
        transformers.BloomConfig(
            vocab_size=61, hidden_size=16, n_layer=1, n_head=2, hidden_dropout=0.0
        )
    ).double()
    known = joma.charges(model)
    (stream,) = (charge for charge in known if charge.kind == "stream")
    assert "word_embeddings_layernorm.weight" in " ".join(side.name for side in stream.sides)
    with known.epsilon() as epsilon:
        logits = model(torch.arange(24).reshape(2, 12)).logits
        functional.cross_entropy(logits.flatten(0, 1), torch.arange(24)).backward()
    assert not known.check_gradients(epsilon=epsilon)
    assert float(stream.residual(lambda p: p.grad)) > 1e-8
