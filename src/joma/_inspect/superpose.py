"""`joma.superpose`: the unrelated patterns that fire each neuron of a model's MLPs (Figure 10)."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from joma._data.pretrained import encode
from joma._events.source import upper_mlps
from joma._inspect.collect import LEAST, Strongest, collect
from joma._inspect.group import (
    FIRES,
    HALF,
    MOST,
    SUPPORT,
    Context,
    Pattern,
    Word,
    attended_words,
    contexts,
    grouped,
    patterns,
)  # fmt: skip
from joma._inspect.windows import batches, corpus_text, encoded, not_empty, open_model, short_name

if TYPE_CHECKING:
    import pandas as pd
    from torch import nn

RULES = {"fires": FIRES, "share_of_attention": HALF, "most_attended": MOST, "support": SUPPORT, "least": LEAST}


class Superposition:
    """What fires the neurons of a model.

    Attributes:
        strongest: layer -> its neurons' strongest contexts.
        info: where they come from: model, data, tokens, names of the MLPs.
    """

    def __init__(self, strongest: dict[int, Strongest], word: Word, info: dict[str, Any]) -> None:
        self.strongest, self.info = strongest, info
        self.word: Word = cache(word)

    def contexts(self, layer: int, neuron: int) -> list[Context]:
        """The contexts that fire a neuron, the strongest first."""
        return contexts(self.strongest[layer], self._checked(layer, neuron))

    def patterns(self, layer: int, neuron: int) -> list[Pattern]:
        """The patterns of a neuron: groups of contexts that share no attended word with each other."""
        return patterns(self.contexts(layer, neuron), self.word)

    def frame(self) -> pd.DataFrame:
        """One row per neuron, the most patterns first; equal ones by how strong the second pattern is.

        Columns: layer, neuron, patterns, second (the second pattern's strongest activation over the first's),
        contexts (that fire it), spread (those among them whose attention is spread), strongest (activation).
        """
        return self._frame.copy()

    @cached_property
    def _frame(self) -> pd.DataFrame:
        import pandas as pd

        rows = []
        for layer, kept in self.strongest.items():
            for neuron in range(len(kept.value)):
                fires = contexts(kept, neuron)
                groups = patterns(fires, self.word)
                second = groups[1].strongest / groups[0].strongest if len(groups) > 1 else 0.0
                spread = sum(not context.attended for context in fires)
                strongest = fires[0].activation if fires else 0.0
                rows.append((layer, neuron, len(groups), second, len(fires), spread, strongest))
        columns = ["layer", "neuron", "patterns", "second", "contexts", "spread", "strongest"]
        table = pd.DataFrame(rows, columns=columns)
        return table.sort_values(
            ["patterns", "second", "layer", "neuron"], ascending=[False, False, True, True], ignore_index=True
        )

    def save(
        self, run: str | os.PathLike[str], *, neuron: int | None = None, top: int = 20, force: bool = False
    ) -> Path:
        """Write a run folder: counts for all neurons, page and JSON for the ``top`` neurons, or for one of them."""
        from joma._inspect.page import as_json, page
        from joma._run import RunWriter, staged, write_atomic, write_json

        chosen = self.top(top, neuron)
        path = Path(run)
        with staged(path, overwrite=force) as folder:
            axes = {name: ["neuron"] for name in ("patterns", "contexts", "strongest")}
            config = {key: value for key, value in self.info.items() if key != "mlps"}
            packages = ("joma", "torch", "transformers")
            with RunWriter.create(folder, kind="superpose", config=config, axes=axes, packages=packages) as writer:
                writer.note(mlps=self.info["mlps"], rules=RULES)
                for layer in self.strongest:
                    part = self._frame[self._frame.layer == layer].sort_values("neuron")
                    writer.write(0, {name: part[name].to_numpy() for name in axes}, layer=layer)
                write_json(folder / "superpose.json", as_json(self, chosen))
                write_atomic(folder / "superpose.html", page(self, chosen))
        return path

    def top(self, count: int = 20, neuron: int | None = None) -> list[tuple[int, int]]:
        """(layer, neuron) of those with the most patterns; or the neuron of that number in each layer there is."""
        if neuron is not None:
            return [(layer, self._checked(layer, neuron)) for layer in self.strongest]
        if count < 1:
            raise ValueError(f"top is {count}: at least one neuron is to be shown")
        chosen = self._frame.head(count)
        return list(zip(chosen.layer.tolist(), chosen.neuron.tolist(), strict=True))

    def chance(self, shuffles: int, seed: int = 0) -> list[float]:
        """The share of neurons with two or more patterns when contexts are dealt out at random, once per shuffle.

        Each neuron gets as many contexts as it has, of any neurons of its layer.
        """
        rng = np.random.default_rng(seed)
        layers = []
        for layer, strongest in self.strongest.items():
            neurons = [self.contexts(layer, neuron) for neuron in range(len(strongest.value))]
            pool = [(c.position, attended_words(c, self.word)) for contexts in neurons for c in contexts]
            layers.append(([len(contexts) for contexts in neurons], pool))
        shares = []
        for _ in range(shuffles):
            superposed = total = 0
            for sizes, pool in layers:
                order, start = rng.permutation(len(pool)), 0
                for size in sizes:
                    dealt = dict(pool[n] for n in order[start : start + size])  # a place in the text counts once
                    superposed += len(grouped(list(dealt.values()))) >= 2
                    start, total = start + size, total + 1
            shares.append(superposed / max(1, total))
        return shares

    def _checked(self, layer: int, neuron: int) -> int:
        if layer not in self.strongest:
            raise ValueError(f"layer {layer} was not measured; there are {', '.join(map(str, self.strongest))}")
        size = len(self.strongest[layer].value)
        if not 0 <= neuron < size:
            raise ValueError(f"there is no neuron {neuron} in layer {layer}: it has {size}, 0 to {size - 1}")
        return neuron

    def __repr__(self) -> str:
        return f"Superposition({self.info['model']!r} on {self.info['data']!r}, layers {list(self.strongest)})"


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
    progress: Callable[[float, str], None] = lambda share, what: None,
) -> Superposition:
    """Find what fires each neuron of a model's lower MLPs, in one pass over a corpus.

    Arguments:
        model: a folder in the hub's format, an id of the hub, or a model that is called with tokens (B, T).
        data: a corpus as `joma train` takes it (a path, pydoc, wikitext-2, …), or the tokens themselves.
        layer: which MLPs, counted from 0; all by default.
        neuron: one that will be asked for: checked before the pass.
        tokens: read so many at most.
        contexts: kept for each neuron.
        length: tokens per window: what a query can look back to.
        batch: windows at a time.
        tokenizer: of the model by default; an object, a folder or an id of the hub.
        revision: of a model on the hub.
        device: where to run.
        progress: called with the share of the corpus that is done.

    Returns:
        The strongest contexts of every neuron, grouped into patterns.
    """
    import torch

    for name, value, least in (("contexts", contexts, 2), ("length", length, LEAST), ("batch", batch, 1)):
        if value < least:
            raise ValueError(f"{name} is {value}: give at least {least}")
    if tokens is not None and tokens < LEAST:
        raise ValueError(f"tokens is {tokens}: give at least {LEAST}")
    wanted = None if layer is None else sorted({layer} if isinstance(layer, int) else set(layer))
    is_text = isinstance(data, (str, os.PathLike))
    name, text = corpus_text(data) if is_text else ("tokens", None)  # type: ignore[arg-type]
    is_model = isinstance(model, torch.nn.Module)
    net, tokenizer = open_model(model, tokenizer, revision, text=is_text)
    if not is_model:
        net.to(device)
    _check(net, wanted, neuron, length)
    share, count = 0.0, 0

    def read(done: float) -> None:
        nonlocal share
        share = done

    def done(number: int) -> None:
        nonlocal count
        count = number
        part = number / tokens if tokens else 0.0
        progress(min(1.0, max(share, part)), f"{number:,} tokens")

    if is_text:
        blocks: Any = encoded(text, lambda block: encode(tokenizer, block), read)
    else:
        array = np.asarray(data)
        if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
            raise ValueError(f"tokens must be whole numbers (n,); got {array.dtype} of shape {array.shape}")
        tokens = min(tokens or len(array), len(array))
        blocks = (array[n : n + (1 << 16)] for n in range(0, len(array), 1 << 16))
    stream = not_empty(batches(blocks, length, batch, tokens), str(name))
    strongest = collect(net, stream, wanted, contexts, length, done)
    info = {
        "model": type(net).__name__ if is_model else str(model), "revision": revision,
        "data": name, "tokens": count, "layers": list(strongest), "contexts": contexts, "length": length,
        "mlps": {n: upper_mlps(net)[n][0].rpartition(".")[0] for n in strongest},
    }  # fmt: skip
    return Superposition(strongest, _word(tokenizer), info)


def _check(net: nn.Module, layers: list[int] | None, neuron: int | None, length: int) -> None:
    """Refuse layers and neurons that do not exist, and windows that are too long, before any work."""
    uppers = upper_mlps(net)
    for n in range(len(uppers)) if layers is None else layers:
        if not 0 <= n < len(uppers):
            raise ValueError(f"there is no layer {n}: the model has {len(uppers)} MLPs, 0 to {len(uppers) - 1}")
        module: Any = uppers[n][1]
        size = module.in_features if hasattr(module, "in_features") else module.weight.shape[0]
        if neuron is not None and not 0 <= neuron < size:
            raise ValueError(f"there is no neuron {neuron} in layer {n}: it has {size}, 0 to {size - 1}")
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
