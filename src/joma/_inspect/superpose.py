"""`joma.superpose`: find the patterns that fire each neuron of a model's MLPs (Figure 10), and test them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from joma._checkpoints.options import CheckpointOptions
from joma._data.packaged import described
from joma._data.pretrained import check_tokens, encode
from joma._extras import require
from joma._inspect.collect import LEAST, Strongest, collect
from joma._inspect.group import Word, contexts
from joma._inspect.layer import Layer, cases
from joma._inspect.masking import Question, mask
from joma._inspect.patterns import NeuronPattern, replication
from joma._inspect.similar import Similarity, input_embedding, similarity
from joma._inspect.superposition import Found, HeldOut, Superposition
from joma._inspect.windows import batches, corpus_text, encoded, not_empty, open_model, short_name
from joma._measure.events.hidden_neurons import upper_mlps

if TYPE_CHECKING:
    from torch import Tensor, nn


def superpose(
    model: str | os.PathLike[str] | nn.Module,
    data: str | os.PathLike[str] | Sequence[int] | np.ndarray[Any, Any],
    *,
    layer: int | Iterable[int] | None = None,
    neuron: int | None = None,
    tokens: int | None = None,
    contexts: int = 32,
    length: int = 64,
    batch: int = 16,
    tokenizer: Any = None,
    revision: str | None = None,
    device: str = "cpu",
    masked: int | None = 100,
    untrained: bool = False,
    seed: int = 0,
    progress: Callable[[float, str], None] | None = None,
) -> Superposition:
    """Find what fires each neuron of a model's lower MLPs, in one pass over a corpus, and test the patterns found.

    Patterns are found in the first half of the text; they have to come back in the second. Of neurons with two that do,
    the words of each pattern are masked.

    Arguments:
        model: a folder in the hub's format, a GGUF file, a checkpoint or run of ``joma train``, an id of
            the hub, a packaged model (``"smollm2"``), or a model that is called with tokens (B, T).
        data: a corpus as `joma train` takes it (a path, pydoc, wikitext-2, …), an array of token ids,
            or a ``.npy`` or ``.txt`` file of them.
        layer: which MLPs, counted from 0; all by default.
        neuron: one that will be asked for: checked before the pass.
        tokens: read so many tokens at most; by default the whole corpus.
        contexts: contexts kept for each neuron.
        length: tokens per window: what a query can look back to.
        batch: windows at a time.
        tokenizer: an object, or a folder or id on the hub; by default that of the model.
        revision: branch, tag or commit of a model on the hub, as "step1000".
        device: where to run: "cpu", "cuda", …
        masked: neurons whose patterns are masked at most, the surest first; None for all.
        untrained: a control: the same architecture with new weights.
        seed: of the words that are put in place of masked ones, and of new weights.
        progress: called with the share of the corpus that is done.

    Returns:
        The strongest contexts of every neuron, their patterns, and what the tests say of these.
    """
    require("paper", "joma.superpose")

    import torch

    for name, value, least in (("contexts", contexts, 2), ("batch", batch, 1)):
        if value < least:
            raise ValueError(f"{name} is {value}: give at least {least}")
    if tokens is not None and tokens < LEAST:
        raise ValueError(f"tokens is {tokens}: give at least {LEAST}")
    options = CheckpointOptions(
        data=data, tokens=tokens, length=length, tokenizer=tokenizer, shortest=LEAST
    )
    wanted = None if layer is None else sorted({layer} if isinstance(layer, int) else set(layer))
    ids = options.token_ids
    name, text = corpus_text(data) if ids is None else ("tokens", None)  # type: ignore[arg-type]
    is_model = isinstance(model, torch.nn.Module)
    net, tokenizer = open_model(model, options, revision)
    if not is_model:
        net.to(device)
    if untrained:
        net = _untrained(net, seed)
    _check(net, wanted, neuron, length)
    count, total = 0, 0

    def expect(number: int) -> None:
        nonlocal total
        total = min(tokens or number, number)

    def tell(share: float, what: str) -> None:
        if progress is not None:
            progress(share, what)

    def done(number: int) -> None:
        nonlocal count
        count = number
        tell(0.9 * min(1.0, number / max(1, total)), f"{number:,} tokens")

    if ids is None:
        blocks: Any = encoded(text, lambda block: encode(tokenizer, block), expect)
    else:
        if ids.ndim != 1:
            raise ValueError(
                f"tokens must be whole numbers (n,); got an array of shape {ids.shape}"
            )
        expect(len(ids))
        blocks = (ids[n : n + (1 << 16)] for n in range(0, len(ids), 1 << 16))
    stream = not_empty(batches(blocks, length, batch, tokens), str(name))
    sample: list[Tensor] = []

    def first_half() -> Iterator[Tensor]:
        for windows in stream:
            sample[:] = [windows]
            yield windows
            if 2 * count >= total:
                return

    every = None if wanted is None else dict.fromkeys(wanted)
    strongest = collect(net, first_half(), every, contexts, length, done)
    word = cache(_word(tokenizer))
    alike = similarity(input_embedding(net, sample[0]), strongest.values(), word)
    tell(0.9 * min(1.0, count / max(1, total)), "what is over-represented")
    found = _found(strongest, word, alike)
    asked = set() if neuron is None else {neuron}
    chosen = {n: sorted({m for layer, m in found if layer == n} | asked) for n in strongest}
    held_out = _held_out(net, stream, chosen, contexts, length, done, count)
    tell(0.9, "the second half of the text, and masking")
    found = _replicated(found, held_out, word)
    found = _masked(net, found, word, masked, neuron, np.random.default_rng(seed))
    info = {
        "model": type(net).__name__ if is_model else described(model), "revision": revision,
        "data": name, "tokens": count, "layers": list(strongest), "contexts": contexts, "length": length,
        "mlps": {n: upper_mlps(net)[n][0].rpartition(".")[0] for n in strongest},
        "embeddings_compared": alike is not None, "untrained": untrained,
    }  # fmt: skip
    return Superposition(strongest, word, info, found, held_out, alike)


def _found(strongest: dict[int, Strongest], word: Word, alike: Similarity | None) -> Found:
    """The patterns of all neurons that have one."""
    found: Found = {}
    for number, kept in strongest.items():
        layer = Layer.of(kept, word)
        for neuron, some in enumerate(layer.neurons):
            if groups := layer.groups(some, alike):
                there = contexts(kept, neuron)
                found[number, neuron] = [
                    NeuronPattern(g.words, [there[n] for n in g.members], g.p, g.places, g.expected)
                    for g in groups
                ]
    return found


def _held_out(
    net: nn.Module, stream: Iterator[Tensor], chosen: dict[int, list[int]], k: int, T: int,
    done: Callable[[int], None], start: int,
) -> dict[int, HeldOut]:  # fmt: skip
    """The strongest contexts of these neurons in what is left of the text."""
    import torch

    device = next(net.parameters()).device
    wanted = {n: torch.tensor(neurons, device=device) for n, neurons in chosen.items() if neurons}
    if not wanted:
        for windows in stream:  # nothing to look for; but its tokens are checked and counted
            check_tokens(net, windows)
            start += windows.numel()
            done(start)
        return {}
    kept = collect(net, stream, wanted, k, T, done, start)
    return {
        n: HeldOut({neuron: row for row, neuron in enumerate(chosen[n])}, rows)
        for n, rows in kept.items()
    }


def _replicated(found: Found, held_out: dict[int, HeldOut], word: Word) -> Found:
    """The same patterns, with what the held-out text says of them."""
    result: Found = {}
    for (number, neuron), groups in found.items():
        if number not in held_out:
            result[number, neuron] = groups
            continue
        kept, row = held_out[number].kept, held_out[number].rows[neuron]
        there, some = contexts(kept, row), cases(kept, row, word)
        tested = sum(len(patterns) for (n, _), patterns in found.items() if n == number)
        result[number, neuron] = []
        for group in groups:
            p, members = replication(group, some, tested)
            result[number, neuron].append(
                replace(group, held_out=[there[n] for n in members], replication=p)
            )
    return result


def _masked(
    net: nn.Module,
    found: Found,
    word: Word,
    most: int | None,
    neuron: int | None,
    rng: np.random.Generator,
) -> Found:
    """The same patterns, masked where two of a neuron replicate: of so many neurons, the surest first."""

    def second(place: tuple[int, int]) -> float:
        return sorted(p.replication for p in found[place] if p.replication is not None)[1]

    several = sorted((p for p in found if sum(x.replicated for x in found[p]) >= 2), key=second)
    chosen = several[:most] + [
        place for place in found if place[1] == neuron and place not in several[:most]
    ]
    result = dict(found)
    for number in sorted({layer for layer, _ in chosen}):
        asked = [
            (place, n) for place in chosen if place[0] == number for n in range(len(found[place]))
        ]
        questions = []
        for place, n in asked:
            pattern = found[place][n]
            there = sorted(
                [*pattern.contexts, *(pattern.held_out or [])], key=lambda c: -c.activation
            )
            questions.append(Question(place[1], pattern.words, there))
        for (place, n), masking in zip(asked, mask(net, number, questions, word, rng), strict=True):
            result[place] = [
                replace(p, masking=masking) if m == n else p for m, p in enumerate(result[place])
            ]
    return result


def _untrained(net: nn.Module, seed: int) -> nn.Module:
    """The same architecture with new weights."""
    import torch

    config = getattr(net, "config", None)
    if config is None or not hasattr(net, "init_weights"):
        raise ValueError(
            f"{type(net).__name__} has no config to be made anew from: give an untrained model instead"
        )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return type(net)(config).to(next(net.parameters()).device).eval()


def _check(net: nn.Module, layers: list[int] | None, neuron: int | None, length: int) -> None:
    """Refuse layers and neurons that do not exist, and windows that are too long, before any work."""
    uppers = upper_mlps(net)
    for n in range(len(uppers)) if layers is None else layers:
        if not 0 <= n < len(uppers):
            raise ValueError(
                f"there is no layer {n}: the model has {len(uppers)} MLPs, 0 to {len(uppers) - 1}"
            )
        module: Any = uppers[n][1]
        size = module.in_features if hasattr(module, "in_features") else module.weight.shape[0]
        if neuron is not None and not 0 <= neuron < size:
            raise ValueError(
                f"there is no neuron {neuron} in layer {n}: it has {size}, 0 to {size - 1}"
            )
    longest = getattr(getattr(net, "config", None), "max_position_embeddings", None)
    if isinstance(longest, int) and length > longest:
        raise ValueError(f"length is {length}, and the model takes at most {longest} tokens")


def _word(tokenizer: Any) -> Word:
    if tokenizer is None:
        return str
    return lambda token: str(tokenizer.decode([token]))


def default_run(model: object) -> Path:
    """The folder that a command writes to where none is named."""
    return Path("runs") / f"superpose-{short_name(model)}"
