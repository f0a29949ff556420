"""How orthogonal are the representations of different tokens, at the input of each layer? (The slides' check.)

A representation is what a block is given for a token: one for each distinct token of a sample, at its first place.
Raw cosines say how far the vectors are from orthogonal; centred ones leave out what all of them have in common. Both
are also taken without what is far out of proportion (`joma._inspect.outliers`), which else decides them alone.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from joma._inspect.outliers import Outliers, find_outliers
from joma._measure.gauges.embedding import Coherence, centred, embedding_coherence, random_cosine
from joma._runs.warning import warn

if TYPE_CHECKING:
    import pandas as pd
    from torch import Tensor, nn

    from joma._checkpoints.options import CheckpointOptions

    Model = str | os.PathLike[str] | nn.Module

QUANTILES = (0.5, 0.9, 0.99)
KINDS = {
    "raw": "raw",
    "centred": "centred",
    "raw, no outliers": "raw_inner",
    "centred, no outliers": "centred_inner",
}
ALMOST = 2.0  # almost orthogonal: the mean |cos| is at most so many times that of random vectors
SAMPLE, LENGTH = 4096, 64  # tokens of a text that are taken, in windows of so many


@dataclass(frozen=True, eq=False)
class Geometry:
    """Cosines between tokens at the input of each layer, and between layers.

    Attributes:
        layers: names of the modules whose input it is.
        states: (tokens, d) for each layer; rows are the same tokens in all of them.
        tokens: (tokens,) their numbers; None if the model was not given tokens.
        positions: (tokens,) their places in their windows; None if they are not known.
    """

    layers: list[str]
    states: list[Tensor]
    tokens: Tensor | None = None
    positions: Tensor | None = None

    @property
    def dimension(self) -> int:
        """d"""
        return int(self.states[0].shape[1])

    @property
    def random(self) -> float:
        """Mean |cos| between random Gaussian vectors of this dimension."""
        return random_cosine(self.dimension)

    @cached_property
    def raw(self) -> list[Coherence]:
        """|cos| between different tokens, by layer."""
        return [embedding_coherence(x) for x in self.states]

    @cached_property
    def centred(self) -> list[Coherence]:
        """The same without the tokens' common mean."""
        return [embedding_coherence(centred(x)) for x in self.states]

    @cached_property
    def outliers(self) -> list[Outliers]:
        """Dimensions and tokens that are far out of proportion, by layer."""
        return [find_outliers(x, self.positions) for x in self.states]

    @cached_property
    def raw_inner(self) -> list[Coherence]:
        """|cos| without outlier dimensions, outlier tokens and the first token of windows."""
        return [
            embedding_coherence(found.inner(x))
            for x, found in zip(self.states, self.outliers, strict=True)
        ]

    @cached_property
    def centred_inner(self) -> list[Coherence]:
        """The same, and without the common mean of what is left."""
        pairs = zip(self.states, self.outliers, strict=True)
        return [embedding_coherence(centred(found.inner(x))) for x, found in pairs]

    def outlier_frame(self) -> pd.DataFrame:
        """One row per layer.

        Columns: layer, module; dimensions (outliers, the largest first), variance (the share of the variance over
        tokens that they hold); tokens (numbers of outlier tokens, the largest first; rows of ``states`` where numbers
        are not known), norm (the largest norm of a token, over the median); first (the median norm of the first tokens
        of windows, over that of the others; not a number where there are none), first_cosine (mean |cos| among them).
        """
        import pandas as pd

        rows = []
        for n, (x, found) in enumerate(zip(self.states, self.outliers, strict=True)):
            named = (
                found.tokens
                if self.tokens is None
                else [int(self.tokens[row]) for row in found.tokens]
            )
            rows.append(
                {
                    "layer": n, "module": self.layers[n], "dimensions": found.dimensions, "variance": found.variance,
                    "tokens": named, "norm": found.norm, "first": found.first,
                    "first_cosine": embedding_coherence(x[found.at_first]).mean,
                }
            )  # fmt: skip
        return pd.DataFrame(rows)

    def between(self, *, centre: bool = False) -> np.ndarray[Any, Any]:
        """(L, L) mean cosine between a token at the input of layer i and the same token at that of layer j."""
        import torch

        unit = [
            torch.nn.functional.normalize(centred(x) if centre else x.float(), dim=1)
            for x in self.states
        ]
        if len({x.shape[1] for x in unit}) > 1:
            raise ValueError(
                "layers have different dimensions: tokens cannot be compared between them"
            )
        return np.array([[float((x * y).sum(dim=1).mean()) for y in unit] for x in unit])

    def orthogonal(self, *, centre: bool = False) -> list[bool]:
        """Whether a layer's tokens are almost orthogonal: mean |cos| at most twice that of random vectors."""
        return [c.mean <= ALMOST * self.random for c in (self.centred if centre else self.raw)]

    def frame(self) -> pd.DataFrame:
        """One row per layer and kind: mean, signed_mean, rms, quantiles, maximum (coherence), random.

        Kinds: raw, centred, and both with ", no outliers": without outlier dimensions and tokens, position 0 apart.
        """
        import pandas as pd

        rows = [
            {
                "layer": n, "module": self.layers[n], "kind": kind, "mean": c.mean, "signed_mean": c.signed_mean,
                "rms": c.rms, **{f"q{100 * q:g}": c.quantile(q) for q in QUANTILES}, "maximum": c.maximum,
                "random": random_cosine(c.dimension), "tokens": c.rows, "dimension": c.dimension,
            }
            for kind, name in KINDS.items()
            for n, c in enumerate(getattr(self, name))
        ]  # fmt: skip
        return pd.DataFrame(rows)

    def __repr__(self) -> str:
        return f"Geometry({len(self.layers)} layers, {len(self.states[0])} tokens, d = {self.dimension})"


def embedding_geometry(
    model: Model, data: Any, *, tokens: int = SAMPLE, length: int = LENGTH, revision: str | None = None,
    tokenizer: Any = None,
) -> Geometry:  # fmt: skip
    """Cosines between the representations of different tokens at the input of each layer.

    Arguments:
        model: a model that is called with tokens (B, T); or, as in `joma.superpose`, a folder, a GGUF file or a name.
        data: (B, T) or (n,) token ids, or a ``.npy`` or ``.txt`` file of them; or a corpus (a path, pydoc,
            wikitext-2, …): its beginning.
        tokens: how many are taken of a corpus or of (n,) ids; at most 1,024 distinct ones are compared.
        length: tokens per window, where the ids are not (B, T).
        revision: of a model on the hub.
        tokenizer: of the model by default; an object, a folder or an id of the hub.

    Returns:
        The cosines, layer by layer.
    """
    from joma._checkpoints.options import CheckpointOptions
    from joma._inspect.windows import open_model

    options = CheckpointOptions(data=data, tokens=tokens, length=length, tokenizer=tokenizer)
    net, tokenizer = open_model(model, options, revision)
    return _measure(net, _sample(options, tokenizer))


def embedding_series(
    checkpoints: str | os.PathLike[str] | Mapping[int, Model], data: Any, *, tokens: int = SAMPLE,
    length: int = LENGTH, tokenizer: Any = None, each: Callable[[int, Geometry], None] | None = None,
) -> pd.DataFrame:  # fmt: skip
    """The geometry over checkpoints: `Geometry.frame` with a column ``step``.

    Arguments:
        checkpoints: step -> model, or a folder of folders step-N or checkpoint-N.
        data: as in `embedding_geometry`.
        tokens: as in `embedding_geometry`.
        length: as in `embedding_geometry`.
        tokenizer: of each model by default.
        each: given step and geometry, one checkpoint at a time.

    Returns:
        One row per layer and step, as `Geometry.frame`.
    """
    import pandas as pd

    models = checkpoints if isinstance(checkpoints, Mapping) else _folders(checkpoints)
    tables = []
    for step, model in sorted(models.items()):
        geometry = embedding_geometry(
            model, data, tokens=tokens, length=length, tokenizer=tokenizer
        )
        if each is not None:
            each(step, geometry)
        tables.append(geometry.frame().assign(step=step))
    return pd.concat(tables, ignore_index=True)


def _folders(source: str | os.PathLike[str]) -> dict[int, Model]:
    from joma._checkpoints.checkpoints import find_checkpoints

    if not Path(source).expanduser().is_dir():
        raise ValueError(f"there is no folder {source}")
    folders: dict[int, Model] = {}
    for checkpoint in find_checkpoints(os.fspath(source)):
        if checkpoint.step in folders:
            warn(
                f"joma: {checkpoint.name} is left out: {Path(str(folders[checkpoint.step])).name} is of step "
                f"{checkpoint.step} too. To choose, give a mapping step -> model"
            )
        folders.setdefault(checkpoint.step, str(checkpoint.path))
    return folders


def _sample(options: CheckpointOptions, tokenizer: Any) -> Tensor:
    """Return token ids (B, T) of what was given."""
    import torch

    count = options.tokens or 0
    length = options.length or LENGTH
    if count < 2:
        raise ValueError(f"tokens is {count}: give at least 2")
    ids = options.token_ids
    if ids is None:
        from joma._data.pretrained import first_tokens
        from joma._inspect.windows import corpus_text

        name, text = corpus_text(options.data)
        ids = np.array(first_tokens(tokenizer, text.blocks(), count), dtype=np.int64)
        if len(ids) < 2:
            raise ValueError(f"{name} is empty: at least 2 tokens are needed")
    if ids.size < 2:
        raise ValueError(f"data has {ids.size} token ids: at least 2 are needed")
    if ids.ndim == 1:
        ids = ids[:count]
        length = min(length, len(ids))
        ids = ids[: len(ids) // length * length].reshape(-1, length)  # (B, T)
    return torch.from_numpy(ids)


def _measure(net: nn.Module, tokens: Tensor) -> Geometry:
    """One pass, the input of each block with attention kept."""
    import torch

    from joma._data.pretrained import check_tokens
    from joma._inspect.seen import BlockInputs
    from joma._measure.events.source import EventSource

    check_tokens(net, tokens)
    inputs = BlockInputs()
    source = EventSource(net, [inputs])
    training = net.training
    net.eval()
    try:
        with torch.no_grad(), source.listening():
            net(tokens.to(next(net.parameters()).device))
    finally:
        net.train(training)
    source.raise_problems()
    if not inputs.states:
        raise ValueError(f"no attention was seen in {type(net).__name__}")
    for (name, _), states in inputs.states.items():
        if not bool(states.isfinite().all()):
            raise ValueError(f"the states at the input of {name} are not finite")
    counts = sorted({len(states) for states in inputs.states.values()})
    if len(counts) > 1 or counts[0] < 2:
        raise ValueError(f"layers were given {counts} different tokens: they cannot be compared")
    first = next(iter(inputs.states))  # the same tokens in all layers
    layers = [name for name, _ in inputs.states]
    return Geometry(
        layers, list(inputs.states.values()), inputs.tokens.get(first), inputs.positions[first]
    )
