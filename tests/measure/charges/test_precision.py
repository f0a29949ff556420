"""The precision of the passes is found out: no healthy model is called broken, and bugs are found."""

from contextlib import nullcontext

import pytest
import torch
import transformers
from torch import nn
from torch.nn import functional

import joma
from joma._measure.charges.rounding import shown_precision

VOCABULARY, LENGTH, WIDTH, HEADS = 61, 16, 32, 4
SIZE = WIDTH // HEADS
_TEXT = {"vocab_size": VOCABULARY, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}

MODELS = ("Llama", "GPT-2", "nanoGPT")
PRECISIONS = ("float32", "bfloat16 autocast", "float16 autocast", "bfloat16 weights")
AUTOCAST = {"bfloat16 autocast": torch.bfloat16, "float16 autocast": torch.float16}


class SelfAttention(nn.Module):
    """Causal attention as in nanoGPT; ``attends_in`` casts its inputs, as for a kernel in half precision."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.c_attn = nn.Linear(width, 3 * width)
        self.c_proj = nn.Linear(width, width)
        self.n_head = HEADS
        self.attends_in: torch.dtype | None = None

    def forward(self, x):
        B, T, d = x.shape
        q, k, v = (
            part.view(B, T, HEADS, -1).transpose(1, 2) for part in self.c_attn(x).split(d, dim=2)
        )  # (B, H, T, h)
        if self.attends_in is not None:
            q, k, v = (part.to(self.attends_in) for part in (q, k, v))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True).to(x.dtype)
        return self.c_proj(y.transpose(1, 2).reshape(B, T, d))


class MLP(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.c_fc = nn.Linear(width, 4 * width)
        self.gelu = nn.GELU()
        self.c_proj = nn.Linear(4 * width, width)

    def forward(self, x):
        return self.c_proj(self.gelu(self.c_fc(x)))


class NanoBlock(nn.Module):
    """``casts`` computes this block alone under autocast."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(width)
        self.attn = SelfAttention(width)
        self.ln_2 = nn.LayerNorm(width)
        self.mlp = MLP(width)
        self.casts: torch.dtype | None = None

    def forward(self, x):
        with nullcontext() if self.casts is None else torch.autocast("cpu", dtype=self.casts):
            x = x + self.attn(self.ln_1(x))
            return x + self.mlp(self.ln_2(x))


class NanoGPT(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.wte = nn.Embedding(VOCABULARY, width)
        self.wpe = nn.Embedding(LENGTH, width)
        self.h = nn.ModuleList(NanoBlock(width) for _ in range(2))
        self.ln_f = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens):
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1]))
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))


def make(name, precision="float32", seed=0):
    """A model of width 32 with two layers of four heads."""
    torch.manual_seed(seed)
    if name == "nanoGPT":
        model = NanoGPT()
    elif name == "Llama":
        size = {
            "hidden_size": WIDTH,
            "num_hidden_layers": 2,
            "num_attention_heads": HEADS,
            "intermediate_size": 64,
        }
        heads = {"num_key_value_heads": 2, "max_position_embeddings": LENGTH}
        config = transformers.LlamaConfig(**heads, **size, **_TEXT)
        model = transformers.LlamaForCausalLM(config)
    else:
        dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        size = {"n_positions": LENGTH, "n_embd": WIDTH, "n_layer": 2, "n_head": HEADS}
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**size, **dropout, **_TEXT))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.to(torch.bfloat16) if precision == "bfloat16 weights" else model


def backward(model, precision="float32", micro_batches=1, scale=1.0, seed=0):
    """Fill the gradients, from one or several micro-batches; half precision needs a loss that is scaled."""
    generator = torch.Generator().manual_seed(seed)
    kind = AUTOCAST.get(precision)
    scale = 2.0**10 * scale if kind == torch.float16 else scale
    for _ in range(micro_batches):
        tokens = torch.randint(0, VOCABULARY, (4, LENGTH), generator=generator)
        targets = torch.randint(0, VOCABULARY, (4 * LENGTH,), generator=generator)
        with torch.autocast("cpu", dtype=kind, enabled=kind is not None):
            output = model(tokens)
            logits = output if isinstance(output, torch.Tensor) else output.logits
            loss = functional.cross_entropy(logits.flatten(0, 1), targets)
        (scale / micro_batches * loss).backward()


def charges_of(model):
    """The charges; of a hand-written model it must be said where normalisations stand."""
    return joma.charges(model, norm="pre")


def query_projection(name, model, layer=1):
    """The module that makes the queries, and how a query's rows are found in its weight's gradient."""
    if name == "Llama":
        return model.model.layers[layer].self_attn.q_proj, lambda grad: grad
    if name == "nanoGPT":
        return model.h[layer].attn.c_attn, lambda grad: grad[:WIDTH]
    return model.transformer.h[layer].attn.c_attn, lambda grad: grad[:, :WIDTH].T


def detach_queries(name, model, columns=slice(0, WIDTH), layer=1):
    """A bug: the output of the query projection is detached, in all heads or in some columns."""
    projection, _ = query_projection(name, model, layer)

    def cut(module, inputs, output):
        output = output.clone()
        output[..., columns] = output[..., columns].detach()
        return output

    projection.register_forward_hook(cut)


def names(deviations, kind="qk"):
    return {deviation.charge.name for deviation in deviations if deviation.charge.kind == kind}


# -- healthy models ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("micro_batches", [1, 4])
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", MODELS)
def test_a_healthy_model_is_not_called_broken_in_any_precision(name, precision, micro_batches):
    for seed in range(2):
        model = make(name, precision, seed)
        backward(model, precision, micro_batches, seed=seed)
        known = charges_of(model)  # made after the passes: nothing of them was observed
        assert known.check_gradients() == []
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        assert known.check_gradients() == []


@pytest.mark.parametrize("name", MODELS)
def test_gradients_of_a_real_scaler_pass_before_and_after_they_are_unscaled(name):
    model = make(name)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    tokens = torch.arange(4 * LENGTH).reshape(4, LENGTH) % VOCABULARY
    for _ in range(2):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            output = model(tokens)
            logits = output if isinstance(output, torch.Tensor) else output.logits
            loss = functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())
        scaler.scale(loss).backward()
        assert charges_of(model).check_gradients() == []
        scaler.unscale_(optimizer)
        assert charges_of(model).check_gradients() == []
        scaler.step(optimizer)
        scaler.update()


@pytest.mark.parametrize("precision", ["float32", "bfloat16 autocast"])
def test_a_healthy_compiled_model_is_not_called_broken(precision):
    model = make("nanoGPT")
    compiled = torch.compile(model, backend="aot_eager")
    backward(compiled, precision)
    assert charges_of(model).check_gradients() == []


def test_one_block_in_bfloat16_among_others_in_float32_is_healthy():
    """The other block holds to float32, which says nothing about this one."""
    model = make("nanoGPT")
    model.h[1].casts = torch.bfloat16
    backward(model)
    known = charges_of(model)
    assert names(known.check_gradients(computed_in=torch.float32), "vo") == {
        "h.1.attn.vo"
    }  # what it would be in float32
    assert known.check_gradients() == []


def test_a_model_at_its_optimum_where_gradients_cancel_is_healthy():
    model = make("Llama")
    known = charges_of(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for step in range(100):
        optimizer.zero_grad()
        backward(model, "bfloat16 autocast")  # the same batch in every step
        if step % 20 == 19:
            assert known.check_gradients() == []
        optimizer.step()


# -- a precision that does not show ------------------------------------------------------------------------


def test_attention_alone_in_bfloat16_is_inconclusive_and_the_warning_says_what_to_do():
    """Weights' gradients are products in float32: their significands show nothing of the kernel's type."""
    torch.manual_seed(0)
    model = NanoGPT(width=16)
    for block in model.h:
        block.attn.attends_in = torch.bfloat16
    backward(model)
    known = charges_of(model)
    message = r"inconclusive.*attn\.(vo|qk), head \d.*computed_in=torch\.float32"
    with pytest.warns(UserWarning, match=message):
        assert known.check_gradients() == []
    assert known.check_gradients(computed_in=torch.bfloat16) == []
    assert names(known.check_gradients(computed_in=torch.float32), "vo") == {
        "h.0.attn.vo",
        "h.1.attn.vo",
    }


def test_a_type_that_is_given_decides():
    model = make("Llama")
    backward(model, "bfloat16 autocast")
    known = charges_of(model)
    assert known.check_gradients(computed_in=torch.bfloat16) == []
    assert known.check_gradients(computed_in=torch.float32)
    assert known.check_gradients(tolerance=1e-6)


# -- bugs --------------------------------------------------------------------------------------------------


# Detached queries are off by 0.05 in Llama, whose law has few numbers, and by 0.14 or more in the
# others. The bound is 0.0003 in float32, 0.03 in float16 and 0.09 in bfloat16; it is 0.09 in float16,
# too, if several micro-batches hide which of the two it was.
ABOVE_THE_BOUND = [
    *((name, "float32", micro_batches) for name in MODELS for micro_batches in (1, 4)),
    *((name, precision, n) for name in MODELS[1:] for precision in PRECISIONS[1:] for n in (1, 4)),
    ("Llama", "float16 autocast", 1),
]


@pytest.mark.parametrize(("name", "precision", "micro_batches"), ABOVE_THE_BOUND)
def test_detached_queries_are_found_in_every_precision(name, precision, micro_batches):
    model = make(name, precision)
    known = charges_of(model)
    detach_queries(name, model)
    backward(model, precision, micro_batches)
    expected = {charge.name for charge in known if charge.kind == "qk" and charge.layer == 1}
    assert names(known.check_gradients()) == expected


@pytest.mark.parametrize("precision", PRECISIONS)
def test_queries_detached_in_one_head_are_found_with_the_head(precision):
    model = make("GPT-2", precision)
    known = charges_of(model)
    detach_queries("GPT-2", model, columns=slice(2 * SIZE, 3 * SIZE))
    backward(model, precision)
    (deviation,) = (d for d in known.check_gradients() if d.charge.kind == "qk")
    assert (deviation.charge.name, deviation.head) == ("transformer.h.1.attn.qk", 2)


# A gradient of the queries scaled by c is off by (c − 1)/(c + 1) of what detached queries are.
SCALED_ABOVE_THE_BOUND = [
    *((name, "float32", factor, n) for name in MODELS for factor in (1.5, 1.05) for n in (1, 4)),
    *((name, "float16 autocast", 1.5, 1) for name in MODELS[1:]),
    *(
        (name, precision, 6, n)
        for name in MODELS[1:]
        for precision in PRECISIONS[1:]
        for n in (1, 4)
    ),
]


@pytest.mark.parametrize(("name", "precision", "factor", "micro_batches"), SCALED_ABOVE_THE_BOUND)
def test_a_scaled_gradient_of_the_queries_is_found(name, precision, factor, micro_batches):
    """The charges of the other block are not blamed."""
    model = make(name, precision)
    known = charges_of(model)
    backward(model, precision, micro_batches)
    projection, rows = query_projection(name, model)
    with torch.no_grad():
        rows(projection.weight.grad).mul_(factor)
    expected = {charge.name for charge in known if charge.kind == "qk" and charge.layer == 1}
    assert names(known.check_gradients()) == expected


def test_gradients_clipped_one_by_one_are_found_in_float32_though_no_charge_holds():
    model = make("GPT-2")
    known = charges_of(model)
    backward(model)
    for parameter in model.parameters():
        torch.nn.utils.clip_grad_norm_([parameter], 1e-3)
    assert {d.charge.kind for d in known.check_gradients()} >= {"qk", "vo", "norm"}


def test_a_deviation_says_which_rounding_it_was_compared_with():
    model = make("GPT-2")
    known = charges_of(model)
    detach_queries("GPT-2", model)
    backward(model, "bfloat16 autocast")
    assert "rounding in bfloat16 allows 8.8e-02" in str(known.check_gradients()[0])
    model.zero_grad()
    backward(model)
    assert "(rounding allows 3.5e-04)" in str(known.check_gradients()[0])


# -- the law of a step -------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("settings", [{"momentum": 0.9, "nesterov": True}, {"weight_decay": 0.1}])
@pytest.mark.parametrize("name", MODELS)
def test_steps_of_a_healthy_model_keep_the_law_in_any_precision(name, settings, precision):
    model = make(name, precision)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, **settings)
    law = charges_of(model).law(optimizer)
    for step in range(3):
        optimizer.zero_grad()
        backward(model, precision, seed=step)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        law.before()
        optimizer.step()
        assert law.after() == []


@pytest.mark.parametrize("precision", PRECISIONS[:3])
def test_a_matrix_stepped_twice_is_found_in_any_precision_of_the_passes(precision):
    """The weights are in float32, and so is the step."""
    model = make("GPT-2")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    law = charges_of(model).law(optimizer)
    backward(model, precision)
    law.before()
    optimizer.step()
    weight = model.transformer.h[0].attn.c_proj.weight
    with torch.no_grad():
        weight -= 0.1 * weight.grad
    assert names(law.after(), "vo") == {"transformer.h.0.attn.vo"}


def test_a_gradient_that_is_off_is_off_in_the_law_of_the_step_too():
    model = make("GPT-2")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    known = charges_of(model)
    law = known.law(optimizer)
    backward(model)
    attention = model.transformer.h[1].attn
    attention.c_attn.weight.grad[:, :SIZE] *= 1.5
    law.before()
    optimizer.step()
    (deviation,) = (d for d in law.after() if d.charge.kind == "qk")
    assert (deviation.charge.name, deviation.head) == ("transformer.h.1.attn.qk", 0)


# -- what significands show --------------------------------------------------------------------------------


def values(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_float32_values_show_nothing_however_many():
    for size in (4, 16, 64, 512):
        assert shown_precision([values(size, size, seed=n) for n in range(20)]) is None


def test_columns_that_are_alike_show_nothing():
    """A gradient has them where inputs have: they repeat values, and not significands of other values."""
    one = values(64, 8)
    others = [torch.zeros(64, 64), torch.full((64, 64), torch.inf)]
    assert shown_precision([one.repeat(1, 8), *others]) is None


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("factor", [1.0, 2.0**-20, 0.3])
def test_rounded_values_show_it_after_scaling_and_accumulation(kind, factor):
    for micro_batches in (1, 2, 4, 32):
        total = sum(values(256, 256, seed=n).to(kind).float() for n in range(micro_batches))
        shown = shown_precision([factor * total])
        exact = micro_batches == 1 and factor != 0.3
        # the coarsest, where the type itself does not show
        assert shown == (kind if exact else torch.bfloat16)


def test_small_matrices_show_it_together():
    small = [values(4, 4, seed=n).bfloat16().float() * 0.3 for n in range(40)]
    assert shown_precision(small[:1]) is None
    assert shown_precision(small) == torch.bfloat16
