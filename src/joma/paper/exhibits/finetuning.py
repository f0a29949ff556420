"""What two fine-tunings did to the weights of a model, next to random changes of the same norm.

A BERT of chemical reactions in full precision, pretrained and fine-tuned twice (in the package rxnfp). Per layer and
part: the size of the change, its stable rank, and the stable rank of the matrix before and after; the cosines of the
embeddings; the attention entropy on reactions. Each number stands next to what random changes of the same norm give.
The reactions are made by joma (`labs/reactions.py`): they are in kind those that the model was trained on.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from joma._runs import Run, RunWriter
from joma._show.plots import panels as p
from joma.paper.exhibits._statistics import extent
from joma.paper.exhibits.base import Exhibit, Experiment, Progress, where
from joma.paper.exhibits.judgement import Judgement
from joma.paper.labs.finetuning import (
    PARTS,
    SMALL,
    FineTunings,
    attention_entropies,
    embedding_cosines,
    part_changes,
    randomly_changed,
)
from joma.paper.labs.reactions import reaction_ids
from joma.paper.verdict import Verdict

SETTINGS: dict[str, dict[str, Any]] = {
    "laptop": {"model": "rxnfp", "draws": 20, "changed": 5, "reactions": 128, "length": 49},
    "paper": {"model": "rxnfp", "draws": 200, "changed": 20, "reactions": 180, "length": 49},
}
AXES = {
    **{name: ["layer"] for name in ("change", "change_rank", "rank_before", "rank")},
    "random_change_rank": ["layer", "draw"],
    "random_rank": ["layer", "draw"],
    "random_cosine": ["draw"],
    "entropy_before": ["layer"],
    "entropy": ["layer"],
    "random_entropy": ["layer", "draw"],
}
LOWER = "mlp_in"
NAMES = {
    "mlp_in": "lower MLP",
    "mlp_out": "upper MLP",
    "q": "queries",
    "k": "keys",
    "v": "values",
    "o": "attention's output",
}
RULE = (
    "in few directions: the stable rank of the change is below that of every random change of the same norm, in every "
    "layer and all six parts (queries, keys, values, output, lower and upper MLP), for both fine-tunings. Otherwise than "
    "random: in more than half of the layers the stable rank of the lower MLP after fine-tuning lies outside the range of "
    "those after random changes, for both fine-tunings. Holds: both; holds under a condition: the first; else fails. "
    "Embeddings and attention entropy are reported and do not decide. One model of one kind was read"
)


def run(writer: RunWriter, settings: dict[str, Any], seed: int, progress: Progress) -> None:
    """Measure both fine-tunings and their random counterparts."""
    tunings = FineTunings.load(settings["model"], seed)
    ids = reaction_ids(tunings.vocabulary, settings["length"], settings["reactions"], seed)
    progress(0.1, "attention before fine-tuning")
    before = attention_entropies(tunings.base, ids)
    for n, (name, tuned) in enumerate(tunings.tuned.items()):
        share = 0.2 + 0.8 * n / len(tunings.tuned)
        rng = np.random.default_rng((seed, n))
        progress(share, f"{name}: weights")
        for part in part_changes(tunings.base, tuned, settings["draws"], rng):
            writer.write(0, part.values, model=name, part=part.part)
        cosines = embedding_cosines(tunings, tuned, settings["draws"], rng)
        writer.write(0, {f"embedding_{key}": cosines[key] for key in _SCALARS}, model=name)
        writer.write(0, {"random_cosine": np.array(cosines["random_cosine"])}, model=name)
        progress(share + 0.2, f"{name}: attention")
        # Draws of their own, so that fewer draws above leave them as they are.
        rng = np.random.default_rng((seed, n, 1))
        random = []
        for _ in range(settings["changed"]):
            changed = randomly_changed(tunings.base, tuned, rng)
            random.append(attention_entropies(changed, ids))
        entropies = {
            "entropy_before": before,
            "entropy": attention_entropies(tuned, ids),
            "random_entropy": np.stack(random, axis=1),
        }
        writer.write(0, entropies, model=name)


_SCALARS = ("change", "cosine_before", "cosine")


def _ranges(frame: pd.DataFrame, gauge: str) -> pd.DataFrame:
    """Return the range of a gauge of random changes, by model, part and layer."""
    keys = [key for key in ("model", "part", "layer") if frame[key].notna().any()]
    groups = where(frame, gauge=gauge).groupby(keys, dropna=False).value
    return groups.agg(low="min", high="max", mid="median").reset_index()


def draw(run: Run) -> p.Chart:
    """Ranks of the changes and of the lower MLP, and attention entropy, by layer."""
    frame = run.frame()
    names = list(dict.fromkeys(frame.model))
    layer = p.x("layer", "layer")
    colour = p.by("model", order=names)
    tip = {"model": None, "layer": None, "value": ".2f"}
    lower = where(frame, part=LOWER)
    panels = []
    for title, gauge, before, y_title in (
        ("The change of the lower MLP", "change_rank", None, "stable rank of the change"),
        ("The lower MLP", "rank", "rank_before", "stable rank"),
        ("Attention on reactions", "entropy", "entropy_before", "attention entropy (nats)"),
    ):
        rows = frame if gauge == "entropy" else lower
        marks = [
            p.bands(_ranges(rows, f"random_{gauge}"), layer, p.y("low", y_title), colour),
            p.lines(
                where(rows, gauge=gauge),
                layer,
                p.y("value"),
                colour,
                tip=tip,
                points=True,
                width=1.2,
            ),
        ]
        if before is not None:
            first = where(rows, gauge=before, model=names[0])
            marks.append(p.reference(first, layer, p.y("value")))
        note = "points: fine-tuned; bands: random changes of the same norm"
        if before is not None:
            note += "; dashed: before"
        panels.append(p.panel(title, *marks, note=note, size=(250, 210)))
    return p.row(*panels, shared=True)


def headline(run: Run) -> p.Chart:
    """Stable rank of the change of the lower MLP by layer, fine-tuned and random."""
    lower = where(run.frame(), part=LOWER)
    names = list(dict.fromkeys(lower.model))
    colour = p.by("model", order=names, legend=False)
    layer = p.x("layer", "layer", ticks=4)
    y = p.y("value", "rank of the change", ticks=4)
    band = p.bands(_ranges(lower, "random_change_rank"), layer, p.y("low"), colour)
    return p.thumbnail(p.lines(where(lower, gauge="change_rank"), layer, y, colour), band)


def judge(run: Run) -> Judgement:
    """Compare every change with random changes of the same norm."""
    frame = run.frame()
    models = {}
    for name in dict.fromkeys(frame.model):
        models[str(name)] = _numbers_of(where(frame, model=name))
    few = all(numbers["above"] == 0 for numbers in models.values())
    otherwise = all(2 * numbers["outside"] > numbers["layers"] for numbers in models.values())
    if few and otherwise:
        verdict = Verdict.HOLDS
    elif few:
        verdict = Verdict.UNDER
    else:
        verdict = Verdict.FAILS
    template = (
        "{models:{key}: the lower MLP changes by {change.least:.1%} to {change.most:.1%}, with a stable rank of "
        "{change rank.least:.1f} to {change rank.most:.1f} (random changes {random change rank.least:.0f} to "
        "{random change rank.most:.0f}); {below} of {matrices} changes have a lower one than every random change; its "
        "own stable rank {rank before:.2f} → {rank:.2f} in the mean (random {random rank:.2f}), outside the range of "
        "random changes in {outside} of {layers} layers; mean |cos| of embeddings {cosine before:.3f} → {cosine:.3f} "
        "(random {random cosine:.3f}); attention entropy {entropy before:.2f} → {entropy:.2f} nats (random "
        "{random entropy:.2f})}"
    )
    return Judgement(
        verdict,
        {"models": models},
        template,
        "{models:{key}: stable rank of the change {change rank.least:.1f} to {change rank.most:.1f}, random "
        "{random change rank.least:.0f} to {random change rank.most:.0f}}",
    )


def _numbers_of(frame: pd.DataFrame) -> dict[str, Any]:
    """Return the numbers of one fine-tuning."""
    below = 0
    matrices = 0
    for part in PARTS:
        rows = where(frame, part=part)
        rank = _by_layer(rows, "change_rank")
        lowest = where(rows, gauge="random_change_rank").groupby("layer").value.min()
        below += int((rank < lowest).sum())
        matrices += len(rank)
    lower = where(frame, part=LOWER)
    after = _by_layer(lower, "rank")
    random = where(lower, gauge="random_rank").groupby("layer").value
    outside = (after < random.min()) | (after > random.max())

    def mean(gauge: str) -> float:
        return float(where(frame, gauge=gauge).value.mean())

    return {
        "change": extent(_by_layer(lower, "change")),
        "change rank": extent(_by_layer(lower, "change_rank")),
        "random change rank": extent(where(lower, gauge="random_change_rank").value),
        "below": below,
        "above": matrices - below,
        "matrices": matrices,
        "layers": len(after),
        "outside": int(outside.sum()),
        "rank before": float(_by_layer(lower, "rank_before").mean()),
        "rank": float(after.mean()),
        "random rank": float(where(lower, gauge="random_rank").value.mean()),
        "change of the embeddings": mean("embedding_change"),
        "cosine before": mean("embedding_cosine_before"),
        "cosine": mean("embedding_cosine"),
        "random cosine": mean("random_cosine"),
        "entropy before": mean("entropy_before"),
        "entropy": mean("entropy"),
        "random entropy": mean("random_entropy"),
    }


def _by_layer(frame: pd.DataFrame, gauge: str) -> pd.Series[float]:
    return where(frame, gauge=gauge).set_index("layer").value.sort_index()


CODE_SLICE = {"model": SMALL, "draws": 2, "changed": 1, "reactions": 8, "length": 49}
# Everything but the draws that no number of its own comes from.
RECORD_SLICE = {"changed": 1}
EXHIBIT = Exhibit(
    id="finetuning",
    title="What fine-tuning changes",
    statement=(
        "Ours: fine-tuning changes weights in few directions, and moves the stable rank of the lower MLP otherwise "
        "than random changes of the same norm do."
    ),
    seconds=60,
    rule=RULE,
    experiment=Experiment(
        SETTINGS,
        run,
        draw,
        judge,
        AXES,
        headline=headline,
        slice_modules=("transformers",),
        code_slice=CODE_SLICE,
        record_slice=RECORD_SLICE,
    ),
    messages={
        Verdict.HOLDS: (
            "In the model that was read, fine-tuning changes weights in few directions, and moves their rank "
            "otherwise than chance"
        ),
        Verdict.UNDER: (
            "In the model that was read, fine-tuning changes weights in few directions; their rank does not always move "
            "otherwise than by chance"
        ),
        Verdict.FAILS: "In the model that was read, some changes are of as high a rank as random ones",
    },
)
