"""`joma.superpose`: the bounded top-k is the true one, activations are those of the model, bad input is told."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import joma
from joma._inspect.collect import LEAST, Strongest, collect, context_keys
from joma._inspect.group import attended
from joma._inspect.windows import batches
from tests.inspect.planted import FIRST, SECOND, Planted, corpus


def test_activations_of_the_planted_neuron_are_the_papers_formula():
    found = joma.superpose(Planted(sharpness=40.0), corpus(60, 32, seed=1), length=32)
    assert len(found.contexts(0, 0)) > 20
    for context in found.contexts(0, 0):
        # all attention is on the pattern: v·b − ξ = 1 − 0.3
        assert context.activation == pytest.approx(0.7, abs=1e-4)
        on_pattern = [
            n
            for n, token in enumerate(context.tokens[: context.query])
            if token in (*FIRST, *SECOND)
        ]
        assert sum(context.mass[n] for n in on_pattern) == pytest.approx(1.0, abs=2e-3)
        assert set(context.attended) == set(on_pattern)


def _brute_force(activations, tokens, k):
    """(windows, T, h), (windows, T) -> for each neuron the k largest window peaks with different last tokens."""
    result = []
    for n in range(activations.shape[2]):
        best = {}
        for window in range(len(tokens)):
            t = LEAST - 1 + int(activations[window, LEAST - 1 :, n].argmax())
            key = tuple(tokens[window, t - LEAST + 1 : t + 1])
            best[key] = max(best.get(key, -math.inf), float(activations[window, t, n]))
        result.append(sorted(best.values(), reverse=True)[:k])
    return result


def _neox(**changes):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.GPTNeoXConfig(
        **sizes,
        intermediate_size=24,
        max_position_embeddings=64,
        initializer_range=0.5,
        use_cache=False,
        **changes,
    )
    return transformers.GPTNeoXModel(config).eval()


def test_the_bounded_top_k_is_that_of_a_dense_pass_with_repeated_text_counted_once():
    model = _neox()
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 50, (40, 20))
    tokens[10:16] = tokens[0]  # repeated word by word
    tokens[20:24, 5:] = tokens[1, 5:]
    dense: dict[int, list[torch.Tensor]] = {0: [], 1: []}
    handles = [
        layer.mlp.dense_4h_to_h.register_forward_pre_hook(
            lambda m, args, n=n: dense[n].append(args[0].detach())
        )
        for n, layer in enumerate(model.layers)
    ]
    with torch.no_grad():
        for window in tokens:
            model(torch.from_numpy(window[None]))
    for handle in handles:
        handle.remove()
    found = collect(model, batches([tokens.reshape(-1)], 20, 7), None, k=9, T=20)
    for n in (0, 1):
        expected = _brute_force(torch.cat(dense[n]).numpy(), tokens, 9)
        np.testing.assert_allclose(
            found[n].value.sort(dim=1, descending=True).values, expected, atol=1e-5
        )
    # the windows that are kept are those that the positions name, and the activations along them those of the pass
    one = found[1]
    for neuron in range(3):
        for slot in range(9):
            window, t = divmod(int(one.position[neuron, slot]), 20)
            assert t == int(one.query[neuron, slot])
            np.testing.assert_array_equal(one.tokens[neuron, slot], tokens[window])
            np.testing.assert_allclose(
                one.along[neuron, slot], dense[1][window][0, :, neuron], atol=5e-3
            )


@pytest.mark.parametrize("how", ["sdpa", "eager"])
def test_attention_rows_are_those_that_the_model_reports(how):
    model = _neox(attn_implementation="eager")
    tokens = np.random.default_rng(1).integers(0, 50, (6, 16))
    with torch.no_grad():
        reported = model(torch.from_numpy(tokens), output_attentions=True).attentions
    model.set_attn_implementation(how)
    found = collect(model, batches([tokens.reshape(-1)], 16, 4), None, k=3, T=16)
    for layer in (0, 1):
        for neuron in range(24):
            for slot in range(3):
                window, t = divmod(int(found[layer].position[neuron, slot]), 16)
                expected = reported[layer][window, :, t].mean(dim=0)
                np.testing.assert_allclose(
                    found[layer].mass[neuron, slot].float(), expected, atol=1e-3
                )


def _family(name):
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    if name == "llama":
        config = transformers.LlamaConfig(
            **sizes, intermediate_size=24, num_key_value_heads=1, use_cache=False
        )
        return transformers.LlamaModel(config), lambda m, x: m.act_fn(m.gate_proj(x)) * m.up_proj(x)
    if name == "gpt2":
        config = transformers.GPT2Config(
            vocab_size=50, n_embd=16, n_layer=1, n_head=2, n_inner=24, use_cache=False
        )
        return transformers.GPT2Model(config), lambda m, x: m.act(m.c_fc(x))
    if name == "opt":  # gives its MLPs all windows in one list
        config = transformers.OPTConfig(
            **sizes, ffn_dim=24, word_embed_proj_dim=16, use_cache=False
        )
        return transformers.OPTModel(config), lambda m, x: m.activation_fn(m.fc1(x))
    config = transformers.BertConfig(**sizes, intermediate_size=24)
    return transformers.BertModel(config), None


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert", "opt"])
def test_neurons_of_a_family_are_its_activation_after_the_gate(name):
    torch.manual_seed(0)
    model, formula = _family(name)
    model.eval()
    tokens = np.random.default_rng(2).integers(0, 50, (5, 12))
    found = collect(model, batches([tokens.reshape(-1)], 12, 5), {0: None}, k=2, T=12)[0]
    inputs = []
    mlp = {
        "bert": lambda: model.encoder.layer[0].intermediate, "llama": lambda: model.layers[0].mlp,
        "gpt2": lambda: model.h[0].mlp, "opt": lambda: model.decoder.layers[0],
    }[name]()  # fmt: skip
    given = mlp.fc1 if name == "opt" else mlp
    handle = given.register_forward_pre_hook(
        lambda m, args: inputs.append(args[0].reshape(5, 12, -1))
    )
    with torch.no_grad():
        model(torch.from_numpy(tokens))
        handle.remove()
        values = mlp(inputs[0]) if formula is None else formula(mlp, inputs[0])
    expected = values[:, LEAST - 1 :].amax(dim=1).T.sort(dim=1, descending=True).values[:, :2]
    torch.testing.assert_close(found.value.sort(dim=1, descending=True).values, expected)


def test_what_is_kept_does_not_grow_and_the_corpus_is_read_as_a_stream():
    model, taken = Planted(), []

    def blocks(count):
        for n in range(count):
            taken.append(n)
            yield corpus(16, 32, seed=n)

    short = collect(model, batches(blocks(2), 32, 16), None, k=4, T=32)[0]
    stream = batches(blocks(10**9), 32, 16)
    seen = []

    def stop(tokens):
        seen.append(len(taken))
        if tokens >= 20 * 16 * 32:
            raise StopIteration

    with pytest.raises(StopIteration):
        collect(model, stream, None, 4, 32, stop)
    assert max(np.diff(seen)) <= 1  # one block at a time
    long = collect(model, batches(blocks(30), 32, 16), None, k=4, T=32)[0]
    assert long.bytes() == short.bytes()


def test_contexts_with_the_same_last_tokens_have_the_same_key_and_others_not():
    tokens = torch.randint(0, 9, (50, 30), generator=torch.Generator().manual_seed(0))
    tokens[3, 10:18], tokens[4, 20:28] = tokens[0, :LEAST], tokens[0, :LEAST]
    keys = context_keys(tokens)
    assert keys[3, 17] == keys[4, 27] == keys[0, LEAST - 1]
    texts = {
        tuple(tokens[b, t - LEAST + 1 : t + 1].tolist()): int(keys[b, t])
        for b in range(50)
        for t in range(7, 30)
    }
    assert len(set(texts.values())) == len(texts)


def test_attended_are_the_fewest_keys_with_half_of_what_is_neither_sink_nor_query():
    mass = np.zeros((5, 40))
    mass[:, 0], mass[:, 39] = 0.5, 0.3  # sink and query
    mass[0, [5, 9, 11]] = 0.09, 0.06, 0.05  # of 0.2
    mass[1] = 1 / 40  # spread: it takes half of the keys
    mass[2, 1:39] = 0.0  # all on sink and query
    mass[3, [5, 9]] = 0.11, 0.09
    mass[4, [5, 9]] = 0.1, 0.1  # one of them is not more than half
    assert attended(mass, np.full(5, 39)) == [[5, 9], [], [], [5], [5, 9]]


def test_non_finite_activations_are_left_out():
    found = Strongest(1, 2, 10, torch.device("cpu"))
    activations = torch.zeros(3, 10, 1)
    activations[0, 9], activations[1, 9], activations[2, 9] = math.nan, math.inf, 2.0
    tokens = torch.arange(30).reshape(3, 10)
    found.add(
        activations,
        tokens,
        context_keys(tokens),
        torch.tensor([0, 10, 20]),
        lambda b, at: torch.zeros(len(at), 10),
    )
    assert found.value.max() == 2.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model in the hub's format with a word tokenizer, and a text whose words look like markup."""
    transformers = pytest.importorskip("transformers")
    from tokenizers import Tokenizer, models, pre_tokenizers

    path = tmp_path_factory.mktemp("hub") / "model"
    words = ["<unk>", "<script>", "&", *(f"w{n}" for n in range(47))]
    tokenizer = Tokenizer(
        models.WordLevel({word: n for n, word in enumerate(words)}, unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>"
    ).save_pretrained(path)
    _neox().save_pretrained(path)
    text = path.parent / "text.txt"
    rng = np.random.default_rng(0)
    text.write_text(" ".join(rng.choice(words, 3000)), encoding="utf-8")
    return path, text


def test_the_command_writes_a_page_that_escapes_the_text_and_json_beside_it(folder, tmp_path):
    from joma.cli import app

    model, text = folder
    out = tmp_path / "run"
    arguments = [
        "superpose",
        str(model),
        "--data",
        str(text),
        "--layer",
        "1",
        "--neuron",
        "3",
        "--out",
        str(out),
    ]
    done = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    page = (out / "superpose.html").read_text()
    assert "<script>" not in page
    assert "&lt;script&gt;" in page
    assert "http" not in page
    stored = json.loads((out / "superpose.json").read_text())
    assert [(n["layer"], n["neuron"]) for n in stored["neurons"]] == [(1, 3)]
    own = [c for group in stored["neurons"][0]["patterns"] for c in group["contexts"]] + stored[
        "neurons"
    ][0]["others"]
    assert own
    assert all(c["along"][c["query"]] == pytest.approx(c["activation"], rel=1e-2) for c in own)
    run = joma.Run(out)
    assert run.info["kind"] == "superpose"
    assert len(run.frame("patterns")) == 24
    with pytest.raises(Exception, match="holds a run already"):
        CliRunner().invoke(app, arguments, catch_exceptions=False)


def test_bad_input_is_told_before_the_pass(folder, tmp_path):
    model, text = folder
    with pytest.raises(ValueError, match="no layer 7: the model has 2 MLPs, 0 to 1"):
        joma.superpose(model, text, layer=7)
    with pytest.raises(ValueError, match="no neuron 24 in layer 1: it has 24"):
        joma.superpose(model, text, layer=1, neuron=24)
    with pytest.raises(ValueError, match="at most 64 tokens"):
        joma.superpose(model, text, length=100)
    with pytest.raises(ValueError, match="is not a model: it has no config"):
        joma.superpose(tmp_path, text)
    with pytest.raises(ValueError, match="there is no folder"):
        joma.superpose(tmp_path / "missing", text)
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(ValueError, match=r"empty\.txt has too little text"):
        joma.superpose(model, tmp_path / "empty.txt")
    with pytest.raises(ValueError, match="unknown corpus"):
        joma.superpose(model, tmp_path / "nowhere.txt")
    with pytest.raises(ValueError, match="no MLP was found in Linear"):
        joma.superpose(torch.nn.Linear(3, 3), [1] * 20)
    with pytest.raises(ValueError, match="comes without a tokenizer"):
        joma.superpose(Planted(), text)
    with pytest.raises(ValueError, match="whole numbers"):
        joma.superpose(Planted(), [0.5] * 20)


def test_a_missing_tokenizer_is_told_with_the_way_out(folder, tmp_path):
    _neox().save_pretrained(tmp_path / "bare")
    with pytest.raises(ValueError, match="--tokenizer"):
        joma.superpose(tmp_path / "bare", folder[1])
    found = joma.superpose(tmp_path / "bare", folder[1], tokenizer=folder[0], layer=0, tokens=500)
    assert 400 < found.info["tokens"] <= 500


def test_tokens_outside_of_the_vocabulary_are_told():
    model = _neox()
    late = np.arange(640) % 50
    late[-1] = 50  # in the last batch
    with pytest.raises(ValueError, match="token 50, the model 50 tokens"):
        joma.superpose(model, late, batch=2)
    with pytest.raises(ValueError, match="token 50, the model 50 tokens"):
        joma.embedding_geometry(model, late)
    with pytest.raises(ValueError, match="token -1, the model 50 tokens"):
        joma.embedding_geometry(model, late - 1)


def test_the_model_is_left_as_it_was():
    model = Planted().train()
    call = torch.nn.Module.__call__
    joma.superpose(model, corpus(10, 32, seed=0), length=32)
    assert model.training
    assert torch.nn.Module.__call__ is call
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_without_a_network_the_message_says_so_and_names_the_way_out(monkeypatch):
    pytest.importorskip("transformers")

    def fails(*args, **kwargs):
        raise OSError("Name or service not known")

    monkeypatch.setattr("socket.getaddrinfo", fails)
    with pytest.raises(
        ValueError, match="no-such-model is not a folder here, and the hub cannot be reached"
    ):
        joma.superpose("nobody/no-such-model", "pydoc")


class _Touch:
    """Unpickled, it makes a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def test_weights_that_carry_code_are_refused_and_nothing_is_executed(folder, tmp_path):
    model, text = folder
    _neox().config.save_pretrained(tmp_path)
    torch.save({"embed_in.weight": _Touch(tmp_path / "executed")}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match="refused, nothing of it was executed"):
        joma.superpose(tmp_path, text, tokenizer=model)
    assert not (tmp_path / "executed").exists()


def test_experts_are_refused():
    class Experts(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = (
                torch.nn.Parameter(torch.zeros(3, 8, 4)),
                torch.nn.Parameter(torch.zeros(3, 4, 8)),
            )

    with pytest.raises(ValueError, match="one of a stack of experts"):
        joma.superpose(torch.nn.ModuleDict({"experts": Experts()}), [1] * 20)
