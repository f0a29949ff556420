"""Figure 6: attention entropy per layer of the paper's language model over training, for several depths."""

from __future__ import annotations

from typing import Any

import altair as alt

from joma._exhibits._curves import AXES, best_loss, curves, entropy_story, measured, rank_story, train_all
from joma._exhibits.base import Experiment, Judgement, Progress
from joma._figures import Chart
from joma._run import Run, RunWriter
from joma._run.curve import ENTROPY, RANK
from joma.theory.verdict import Verdict

# the paper's best validation losses, by depth
PAPER = {
    "wikitext-2": {1: 5.357, 2: 5.255, 5: 5.169, 10: 5.110},
    "wikitext-103": {1: 5.047, 2: 4.912, 5: 4.762, 10: 4.679},
}
SETTINGS: dict[str, dict[str, Any]] = {
    "quick": {"data": ["pydoc"], "vocabulary": 1000, "layers": [1, 2], "lr": 1e-3, "steps": 1200, "every": 20,
              "threads": 1},
    "laptop": {"data": ["wikitext-2"], "vocabulary": 4000, "layers": [1, 2, 5], "lr": 1e-4, "steps": 7500, "every": 50,
               "threads": 1},
    "paper": {"data": ["wikitext-2", "wikitext-103"], "vocabulary": None, "layers": [1, 2, 5, 10], "lr": 1e-4,
              "steps": 30_000, "every": 100, "threads": 1},
}  # fmt: skip
RULE = (
    f"{ENTROPY.smoothed()}the entropy of the top layer dips by {ENTROPY.fall} below its start and rises again by "
    f"{ENTROPY.rise} until the end, at every depth; in models of several layers the bottom layer ends below the top "
    "one (suppressed); holds: both, on every corpus; holds under: the first at some depth; fails: at none. The stable "
    f"rank of the lower MLP is told by the same rule, a dip of {RANK.fall} and a rise of {RANK.rise}, and does not "
    "decide"
)


def run(writer: RunWriter, settings: dict[str, Any], seed: int, progress: Progress) -> None:
    """Train one model per corpus and depth."""
    common = {key: settings[key] for key in ("vocabulary", "lr", "steps", "every", "threads")}
    runs = [{**common, "data": data, "layers": layers} for data in settings["data"] for layers in settings["layers"]]
    train_all(writer, "fig6", runs, seed, progress)


def _paper(settings: dict[str, Any], data: str) -> dict[int, float]:
    """The paper's losses by depth, where ours can be compared with them: none of another vocabulary."""
    return PAPER.get(data, {}) if settings["vocabulary"] is None else {}


def draw(run: Run) -> Chart:
    """Entropy above, stable rank below; one column per depth, one row per corpus, one line per layer."""
    corpora = run.info["config"]["settings"]["data"]
    rows = [_row(run, data, named=len(corpora) > 1) for data in corpora]
    return rows[0] if len(rows) == 1 else alt.vconcat(*rows)


def _row(run: Run, data: str, *, named: bool) -> alt.HConcatChart:
    settings = run.info["config"]["settings"]
    losses, paper = best_loss(run, data), _paper(settings, data)
    columns = []
    for layers in settings["layers"]:
        loss = losses[layers, settings["lr"]]
        theirs = f" (paper {paper[layers]:.3f})" if layers in paper else ""
        title = f"{layers} layer{'s' if layers > 1 else ''}: validation loss {loss:.3f}{theirs}"
        title = f"{data}, {title}" if named else title
        panels = [
            _panel(run, data, gauge, name, layers, title if gauge == "entropy" else None)
            for gauge, name in (
                ("entropy", "attention entropy (nats)"),
                ("stable_rank", "stable rank of the lower MLP"),
            )
        ]
        columns.append(alt.vconcat(*panels))
    return alt.hconcat(*columns)


def _panel(run: Run, data: str, gauge: str, name: str, layers: int, title: str | None) -> alt.Chart:
    frame = measured(run, gauge, data)
    frame = frame[frame.layers == layers][["step", "layer", "value"]]
    depth = list(range(max(run.info["config"]["settings"]["layers"])))
    scale = alt.Scale(scheme=alt.SchemeParams(name="plasma", extent=[0.0, 0.86]), domain=depth)
    colour = alt.Color("layer:O", title="layer", scale=scale)
    chart = (
        alt.Chart(frame, width=320, height=190)
        .mark_line(strokeWidth=1.8)
        .encode(
            alt.X("step:Q", title="minibatch", scale=alt.Scale(type="log", nice=False)),
            alt.Y("value:Q", title=name, scale=alt.Scale(zero=False)),
            colour,
            detail="layer:N",
            tooltip=["step", "layer", alt.Tooltip("value:Q", format=".3f")],
        )
    )
    return chart.properties(title=title) if title else chart


def judge(run: Run) -> Judgement:
    """Does the top layer turn sparse and dense again, and is the bottom layer suppressed?"""
    settings = run.info["config"]["settings"]
    corpora, depths, lr = settings["data"], settings["layers"], settings["lr"]
    deep = [n for n in depths if n > 1]
    bounced, complete = False, True
    summary, paths, losses = [], [], []
    numbers: dict[str, Any] = {}
    for data in corpora:
        name = f"{data}: " if len(corpora) > 1 else ""
        layers = curves(run, data)
        top = {n: layers[n, lr, n - 1] for n in depths}
        shown = [n for n, c in top.items() if c.bounced]
        suppressed = [n for n in deep if layers[n, lr, 0].end < top[n].end]
        bounced |= bool(shown)
        complete &= shown == depths and suppressed == deep
        words = [f"{n} layers, layer {k}: {c}" for (n, _, k), c in layers.items()]
        ranks, rank_numbers = rank_story(run, data)
        summary.append(
            f"{name}top layer dips and bounces at depths {shown or 'none'} of {depths}, bottom layer below it at "
            f"{suppressed or 'none'} of {deep}; {'; '.join(words)}; {ranks}"
        )
        paths.append(name + ", ".join(f"{n}: {c.start:.2f} → {c.trough:.2f} → {c.end:.2f}" for n, c in top.items()))
        paper = _paper(settings, data)
        losses += [f"{name}loss {', '.join(f'{paper[n]:.3f} ({n})' for n in depths if n in paper)}"] * bool(paper)
        numbers[data] = {
            "entropy": entropy_story(run, data),
            "stable rank": rank_numbers,
            "best validation loss": {f"{n} layers": loss for (n, _), loss in best_loss(run, data).items()},
            "the paper's": {f"{n} layers": loss for n, loss in PAPER.get(data, {}).items()},
        }
    return Judgement(
        Verdict("holds" if complete else "holds under" if bounced else "fails"),
        RULE,
        "; ".join(summary),
        numbers,
        measured=f"top layer, nats, by depth: {'; '.join(paths)}",
        paper="; ".join(["dips, then bounces", *losses]),
    )


EXPERIMENT = Experiment(SETTINGS, run, draw, judge, AXES)
