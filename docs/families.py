"""Makes ``docs/watch-families.md``: model families and call styles under a watch, each right or refused.

    python docs/families.py

Every family is a small random model whose attention is also computed by brute force: the probabilities that the model
itself gives with ``output_attentions=True`` under eager attention, in float64. Call styles are those of
``tests/events/test_guard.py``, against their own scores.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

sys.path.insert(0, str(Path(__file__).parent.parent))  # where tests are

from tests.events import test_flex as flex
from tests.events import test_guard as styles
from tests.watch.models import entropy_of, entropy_of_probabilities, sharpen

import joma
from joma._watch.inputs import NotWatchable

VOCABULARY, T = 96, 64
USUAL = {
    "vocab_size": VOCABULARY, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 40, "max_position_embeddings": 80,
}  # fmt: skip
GPT = {"vocab_size": VOCABULARY, "n_embd": 24, "n_layer": 2, "n_head": 4, "n_positions": 80}
GROUPED = {**USUAL, "num_key_value_heads": 2}
BART = {
    "vocab_size": VOCABULARY, "d_model": 24, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 40, "decoder_ffn_dim": 40, "max_position_embeddings": 80,
}  # fmt: skip
BLOCKED = {**USUAL, "block_size": 4, "num_random_blocks": 1, "attention_type": "block_sparse"}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "GPT-2": ("GPT2LMHeadModel", GPT),
    "GPT-J": ("GPTJForCausalLM", {**GPT, "rotary_dim": 6}),
    "GPT-BigCode (multi-query)": ("GPTBigCodeForCausalLM", GPT),
    "GPT-NeoX (Pythia)": ("GPTNeoXForCausalLM", USUAL),
    "OPT": ("OPTForCausalLM", {**{k: v for k, v in USUAL.items() if k != "intermediate_size"}, "ffn_dim": 40,
                               "word_embed_proj_dim": 24}),
    "BLOOM (ALiBi)": ("BloomForCausalLM", {"vocab_size": VOCABULARY, "hidden_size": 24, "n_layer": 2, "n_head": 4}),
    "Falcon (multi-query)": ("FalconForCausalLM", {**{k: v for k, v in USUAL.items() if k != "intermediate_size"},
                                                   "multi_query": True, "alibi": False}),
    "Llama (grouped queries)": ("LlamaForCausalLM", GROUPED),
    "Mistral (sliding window)": ("MistralForCausalLM", {**GROUPED, "sliding_window": 6}),
    "Qwen 2": ("Qwen2ForCausalLM", GROUPED),
    "Phi": ("PhiForCausalLM", {**GROUPED, "hidden_size": 32}),
    "Gemma 2 (soft-capping)": ("Gemma2ForCausalLM", {**GROUPED, "head_dim": 8, "sliding_window": 6}),
    "Mixtral (experts)": ("MixtralForCausalLM", {**GROUPED, "num_local_experts": 3}),
    "BERT": ("BertForMaskedLM", USUAL),
    "RoBERTa": ("RobertaForMaskedLM", USUAL),
    "DistilBERT": ("DistilBertForMaskedLM", {"vocab_size": VOCABULARY, "dim": 24, "n_layers": 2, "n_heads": 4,
                                             "hidden_dim": 40, "max_position_embeddings": 80}),
    "ALBERT (shared weights)": ("AlbertForMaskedLM", {**USUAL, "embedding_size": 16}),
    "BigBird, full": ("BigBirdForMaskedLM", {**BLOCKED, "attention_type": "original_full"}),
    "BigBird, block-sparse": ("BigBirdForMaskedLM", BLOCKED),
    "BART (encoder–decoder)": ("BartForConditionalGeneration", BART),
}  # fmt: skip


def main() -> None:
    """Measure all, and write the page."""
    lines = []
    for line in chain(_families(), _styles(), _flex()):
        print(line, flush=True)
        lines.append(line)
    page = Path(__file__).with_name("watch-families.md")
    page.write_text("\n".join([*_HEAD, *lines, ""]), encoding="utf-8")


_HEAD = [
    "# Families and call styles",
    "",
    "Made by `python docs/families.py`: small random models under [a watch](watch.md), their entropy per head against "
    "brute force in float64 (nats, the largest difference over layers and heads), or the reason for which a watch "
    "refuses them.",
    "",
    "| model or call style | attention | |",
    "|---|---|---|",
]


def _families() -> Iterator[str]:
    for title, (name, settings) in FAMILIES.items():
        for how in ("sdpa", "eager"):
            try:
                model = _build(name, settings, how)
            except ValueError:  # transformers has no such path for it
                continue
            yield _line(
                title, how, lambda model=model, name=name, settings=settings: _difference(model, name, settings)
            )


def _build(name: str, settings: dict[str, Any], how: str) -> nn.Module:
    kind = getattr(transformers, name)
    config = kind.config_class(**settings, bos_token_id=None, eos_token_id=None, pad_token_id=0)
    if kind.config_class.is_encoder_decoder or getattr(config, "is_encoder_decoder", False):
        config.decoder_start_token_id = 1
    torch.manual_seed(0)
    return sharpen(kind._from_config(config, attn_implementation=how)).eval()


def _difference(model: nn.Module, name: str, settings: dict[str, Any]) -> float:
    """The largest difference between a watch and the model's own probabilities."""
    tokens = torch.randint(1, VOCABULARY, (2, T), generator=torch.Generator().manual_seed(1))
    inputs = {"input_ids": tokens}
    if getattr(model.config, "is_encoder_decoder", False):
        inputs["decoder_input_ids"] = tokens.flip(1)
    with joma.watch(model, every=1, gauges="entropy") as w:
        model(**inputs)
        w.step()
        table = w.frame()
    with torch.no_grad():
        truth = _build(name, settings, "eager")(**inputs, output_attentions=True)
    names = (
        ("attentions",) if "attentions" in truth else ("encoder_attentions", "decoder_attentions", "cross_attentions")
    )
    expected = [entropy_of_probabilities(p) for key in names for p in truth[key]]
    if not expected:
        raise RuntimeError(f"{name} gives no probabilities to compare with: leave it out of the table")
    heads = table[table.gauge == "entropy"].pivot_table(index="layer", columns="head", values="value").to_numpy()
    return float((torch.tensor(heads) - torch.stack(expected)).abs().max())


def _flex() -> Iterator[str]:
    """FlexAttention that a model calls itself."""
    for call, score_mod, mask_mod, key_heads in flex.CASES:
        parts = [f"{part.__name__}" for part in (score_mod, mask_mod) if part is not None]
        title = f"FlexAttention, {', '.join(parts)}, {key_heads} of {flex.HEADS} key heads"
        torch.manual_seed(0)
        model = flex.Flex(call, score_mod, mask_mod, key_heads)
        how = "compiled" if call == "compiled" else "flex"
        yield _line(title, how, lambda model=model: flex.difference(model, 3 * torch.randn(2, flex.T, 16)))


def _styles() -> Iterator[str]:
    measured = styles.test_layouts_and_call_styles_that_are_measured.pytestmark[0]
    for model, title in zip(measured.args[1], measured.kwargs["ids"], strict=True):
        yield _line(f"hand-written: {title}", "–", lambda model=model: _difference_of_style(model))
    refused = styles.test_what_would_be_a_mixture_is_refused_with_the_reason.pytestmark[0]
    for attend, _ in refused.args[1]:
        title = attend.__name__.replace("_", " ")
        yield _line(f"hand-written: {title}", "–", lambda attend=attend: _difference_of_style(styles.Toy(attend)))


def _difference_of_style(model: nn.Module) -> float:
    (heads,) = styles.measure(model).values()
    return float((torch.tensor(heads) - entropy_of(model.truth[0])).abs().max())


def _line(title: str, how: str, measure: Callable[[], float]) -> str:
    """A row of the table; what a watch warns of or raises is its reason."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        warnings.filterwarnings("ignore", message="flex_attention called without")
        try:
            result = f"right ({measure():.0e})"
        except (NotWatchable, UserWarning) as error:
            reason = str(error).partition("could be measured: ")[2] or str(error)
            result = f"refused: {reason.partition(';')[0]}"
    return f"| {title} | {how} | {result.replace('|', '∣')} |"


if __name__ == "__main__":
    main()
