"""Training with and without a watch: parameters must be the same to the bit."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable, Iterator

import torch
from torch import nn

import joma
from benchmarks.families.measure import Row
from joma.integrations.transformers import watch as watch_trainer

STEPS = 4


def models() -> list[str]:
    """Return the libraries whose trainings are compared."""
    return list(_trainings())


def rows(library: str) -> Iterator[Row]:
    """Train twice, and compare."""
    name, train = _trainings()[library]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            plain = train(False).state_dict()
            watched = train(True).state_dict()
    except Exception as error:
        detail = f"{type(error).__name__}: {str(error)[:200]}"
        yield Row(library, name, "training", "not built", detail=detail)
        return
    verdict = "wrong"
    if all(torch.equal(plain[key], watched[key]) for key in plain):
        verdict = "the same to the bit"
    yield Row(library, name, "training", verdict)


def _trainings() -> dict[str, tuple[str, Callable[[bool], nn.Module]]]:
    """Return library -> a title, and a function that trains with or without a watch."""
    return {
        "TRL": ("SFTTrainer, tiny Llama", _trl),
        "litgpt": ("loop, tiny Pythia", _litgpt),
    }


def _trl(is_watched: bool) -> nn.Module:
    from datasets import Dataset
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    words = {f"w{n}": n + 2 for n in range(60)} | {"<pad>": 0, "<eos>": 1}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")
    generator = torch.Generator().manual_seed(0)
    texts = [
        " ".join(f"w{int(n)}" for n in torch.randint(60, (5 + k % 7,), generator=generator))
        for k in range(32)
    ]
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=62, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=40, attention_dropout=0.1, pad_token_id=0, eos_token_id=1, bos_token_id=1,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    with tempfile.TemporaryDirectory() as folder:
        arguments = SFTConfig(
            output_dir=folder, max_steps=STEPS, per_device_train_batch_size=4, report_to=[], use_cpu=True, seed=0,
            bf16=False, save_strategy="no", max_length=16, disable_tqdm=True,
        )  # fmt: skip
        trainer = SFTTrainer(
            model=model, args=arguments, train_dataset=Dataset.from_dict({"text": texts}), processing_class=fast
        )  # fmt: skip
        if is_watched:
            watch_trainer(trainer, every=1)
        trainer.train()
    return model


def _litgpt(is_watched: bool) -> nn.Module:
    from litgpt import GPT, Config

    torch.manual_seed(0)
    model = GPT(
        Config.from_name(
            "pythia-14m", n_layer=2, n_embd=32, n_head=4, n_query_groups=4, head_size=8
        )
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    watch = joma.watch(model, every=1, live=False) if is_watched else None
    for _ in range(STEPS):
        tokens = torch.randint(0, 1000, (4, 17))
        logits = model(tokens[:, :-1])
        nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
        if watch is not None:
            watch.step()
    if watch is not None:
        watch.close()
    return model
