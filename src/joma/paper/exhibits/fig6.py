"""Figure 6: attention entropy per layer of the paper's language model over training, for several depths."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from joma._runs import Run, RunWriter
from joma._runs.curve import ENTROPY, RANK
from joma._runs.patterns import Patterns
from joma._show.plots import panels as p
from joma._show.plots import patterns
from joma.paper.exhibits import _curves
from joma.paper.exhibits._curves import (
    AXES,
    GRID,
    PLAIN,
    TO_THE_LETTER,
    TOY,
    TOY_RULE,
    best_loss,
    curves,
    measured,
)
from joma.paper.exhibits.base import Exhibit, Experiment, Progress, where
from joma.paper.exhibits.judgement import Judgement
from joma.paper.verdict import Verdict

# the paper's best validation losses, by depth
PAPER = {
    "wikitext-2": {1: 5.357, 2: 5.255, 5: 5.169, 10: 5.110},
    "wikitext-103": {1: 5.047, 2: 4.912, 5: 4.762, 10: 4.679},
}
# steps: per corpus, in the order of data
SETTINGS: dict[str, dict[str, Any]] = {
    "laptop": GRID | {"data": ["wikitext-2"], "lr": 1e-4, "steps": [5000], "every": 100},
    "paper": {"data": ["wikitext-2", "wikitext-103"], "vocabulary": None, "layers": [1, 2, 5, 10], "lr": 1e-4,
              "steps": [50_000, 200_000], "seeds": 1, "every": 100, **TO_THE_LETTER},
}  # fmt: skip
MARGIN = 0.1  # nats
RULE = (
    f"{ENTROPY.smoothed()}the entropy of the top layer dips by {ENTROPY.fall} below its start and rises again by "
    f"{ENTROPY.rise} until the end, at every depth; in models of several layers the bottom layer ends below the top "
    f"one by {MARGIN:g} nats at least (suppressed); holds: both, on every corpus; holds under a condition: the "
    f"first at some depth; fails: at none. {_curves.CLOSE_RULE}; a verdict that it could change is inconclusive. "
    "Curves are means over the seeds, and it is said in how many of them the "
    f"top layer bounces. The stable rank of the lower MLP is told by the same rule, a dip of {RANK.fall} and a rise "
    f"of {RANK.rise}, and does not decide. {TOY_RULE}"
)
WOULD_DECIDE = "models on WikiText at the paper's learning rate, with four seeds: --preset laptop --set seeds=4"
REVISED = (
    "any difference between the bottom and the top layer counted; now it is at least the margin. Models on the toy "
    "corpus were judged; now they are not. Two seeds decided, however small the margin; now it takes four"
)


def run(writer: RunWriter, settings: dict[str, Any], seed: int, progress: Progress) -> None:
    """Train one model per corpus, depth and seed."""
    if len(settings["steps"]) != len(settings["data"]):
        raise ValueError(
            f"steps {settings['steps']} must have one number per corpus in data {settings['data']}"
        )
    runs = [
        {"data": data, "layers": layers, "lr": settings["lr"], "steps": steps}
        for data, steps in zip(settings["data"], settings["steps"], strict=True)
        for layers in settings["layers"]
    ]
    _curves.train_all(writer, runs, settings, seed, progress)


def _paper(settings: dict[str, Any], data: str) -> dict[int, float]:
    """Return the paper's losses by depth, where ours can be compared with them."""
    if _is_comparable(settings):
        return PAPER.get(data, {})
    return {}


GAUGES = {"entropy": "attention entropy (nats)", "stable_rank": "stable rank of the lower MLP"}


def draw(run: Run) -> p.Chart:
    """Entropy above, stable rank below; one column per depth, one line per layer; one row per corpus.

    Then who attends to whom in the top layer of the deepest model, if its run recorded it.
    """
    settings = run.info["config"]["settings"]
    rows = []
    for data in settings["data"]:
        losses, paper = best_loss(run, data), _paper(settings, data)
        columns = []
        for layers in settings["layers"]:
            theirs = f" (paper {paper[layers]:.3f})" if layers in paper else ""
            loss = f"validation loss {losses[layers, settings['lr']]:.3f}{theirs}"
            title = f"{_curves.deep(layers)}: {loss}"
            title = f"{data}, {title}" if len(settings["data"]) > 1 else title
            panels = []
            for gauge, name in GAUGES.items():
                table, deepest = (
                    where(measured(run, gauge, data), layers=layers),
                    max(settings["layers"]),
                )
                lines = p.layer_lines(
                    table,
                    p.x("step", "minibatch", log=True),
                    p.y("value", name, zero=gauge == "entropy"),
                    deepest,
                )
                panels.append(
                    p.panel(title if gauge == "entropy" else None, lines, size=(320, 190))
                )
            columns.append(p.column(*panels, shared=True))
        rows.append(p.row(*columns, shared=True))
    chart = p.column(*rows, shared=True)
    attention = _attention(run)
    return (
        chart
        if attention is None
        else p.column(chart, patterns.draw(attention, top=True, size=200))
    )


def headline(run: Run) -> p.Chart:
    """Attention entropy of the deepest model on the first corpus, one line per layer."""
    settings = run.info["config"]["settings"]
    deepest = max(settings["layers"])
    table = where(measured(run, "entropy", settings["data"][0]), layers=deepest)
    step = p.x("step", "minibatch", log=True, ticks=3, format="~s")
    nats = p.y("value", "entropy (nats)", zero=True, ticks=4)
    return p.thumbnail(p.layer_lines(table, step, nats, deepest, legend=False))


def _attention(run: Run) -> Patterns | None:
    """The patterns of the deepest model: of the first corpus and seed."""
    depths = [member["columns"]["layers"] for member in run.info.get("runs", [])]
    found = Run(run.members[depths.index(max(depths))]).patterns() if depths else None
    return found if found is not None and found.kept else None


def judge(run: Run) -> Judgement:
    """Check that the top layer turns sparse and dense again, and that the bottom layer is suppressed."""
    settings = run.info["config"]["settings"]
    depths = settings["layers"]
    corpora = {data: _corpus_numbers(run, data) for data in settings["data"]}
    bounces = [margin for corpus in corpora.values() for margin in corpus["margins"].values()]
    gaps = [gap for corpus in corpora.values() for gap in corpus["gaps"].values()]
    numbers = {
        "corpora": corpora,
        "depths": depths,
        "deeper": [depth for depth in depths if depth > 1],
        "seeds": settings["seeds"],
        "smallest margin": min(map(abs, bounces + gaps)),
    }

    def verdict_of(met: Sequence[bool]) -> Verdict:
        if all(met):
            return Verdict.HOLDS
        if any(met[: len(bounces)]):
            return Verdict.UNDER
        return Verdict.FAILS

    verdict = Verdict.INCONCLUSIVE
    if TOY not in corpora:
        verdict = _curves.verdict_of_all(verdict_of, bounces + gaps, settings["seeds"])
    template = (
        "{corpora:on {key} the top layer dips and bounces at depths {bouncing depths} of {depths}, in "
        "{seeds that bounce:{value} of {seeds} seeds at depth {key}}; the bottom layer ends "
        "below it at {suppressed at} of {deeper}; "
        + f"{{entropy:{_curves.CURVES}}}"
        + "; stable rank "
        "of the lower MLP falls and rises again in {stable rank.bounced} of {stable rank.layers} layers"
    )
    if _is_comparable(settings):
        template += (
            "; best validation loss {best validation loss:{value:.3f} ({key})}, the paper's "
            "{the paper's:{value:.3f} ({key})}"
        )
    tops = [top for corpus in corpora.values() for top in corpus["top"].values()]
    weakest = min(tops, key=lambda top: top["end"] - top["trough"])
    numbers["weakest"] = {
        "rise": weakest["end"] - weakest["trough"],
        "fall": weakest["start"] - weakest["trough"],
    }
    short_template = (
        "entropy of the top layer rises again by at least {weakest.rise:.2f} nats (after a fall of "
        "{weakest.fall:.2f})"
    )
    template += "}; {seeds} seeds, smallest margin {smallest margin:.3f} nats"
    return Judgement(verdict, numbers, template, short_template)


def _corpus_numbers(run: Run, data: str) -> dict[str, Any]:
    """Return what the curves did in the models that were trained on one corpus."""
    settings = run.info["config"]["settings"]
    depths = settings["layers"]
    lr = settings["lr"]
    by_layer = curves(run, data)
    top = {depth: by_layer[depth, lr, depth - 1] for depth in depths}
    seeds = _curves.seeds_that_bounce(run, data)
    # By how much the bottom layer ends below the top one, beyond what is asked for.
    gaps = {}
    for depth in depths:
        if depth > 1:
            gaps[depth] = top[depth].end - by_layer[depth, lr, 0].end - MARGIN
    losses = {_curves.deep(depth): loss for (depth, _), loss in best_loss(run, data).items()}
    papers = PAPER.get(data, {})
    return {
        "bouncing depths": [depth for depth, curve in top.items() if curve.bounced],
        "suppressed at": [depth for depth, gap in gaps.items() if gap >= 0],
        "margins": {depth: curve.margin for depth, curve in top.items()},
        "gaps": gaps,
        "top": {depth: curve.numbers() for depth, curve in top.items()},
        "seeds that bounce": {depth: len(seeds[depth, lr, depth - 1]) for depth in depths},
        "entropy": _curves.entropy_numbers(run, data),
        "stable rank": _curves.rank_numbers(run, data),
        "best validation loss": losses,
        "the paper's": {_curves.deep(n): papers[n] for n in depths if n in papers},
    }


def _is_comparable(settings: dict[str, Any]) -> bool:
    """True if losses can be compared with the paper's: all words, and all validation windows."""
    return settings["vocabulary"] is None and settings["valid_windows"] == 0


# Forty steps of a two-layer model on a text that joma brings along.
CODE_SLICE = {
    "data": ["zipf"],
    "vocabulary": 500,
    "layers": [2],
    "lr": 1e-3,
    "steps": [40],
    "seeds": 1,
    "every": 10,
    "valid_windows": 2,
    "valid_every": 0,
    **PLAIN,
}
RECORD_SLICE = {"layers": [1], "steps": [40], "seeds": 1}
EXHIBIT = Exhibit(
    id="fig6",
    title="Figure 6: attention of a language model in training",
    statement=(
        "Attention turns sparse, then dense again in the top layers of language models; "
        "bottom layers are suppressed."
    ),
    seconds=130,
    rule=RULE,
    paper="dips, then bounces",
    would_decide=WOULD_DECIDE,
    revised=REVISED,
    experiment=Experiment(
        SETTINGS,
        run,
        draw,
        judge,
        AXES,
        headline=headline,
        code_slice=CODE_SLICE,
        record_slice=RECORD_SLICE,
        data_files=("patterns.json",),
    ),
    messages={
        Verdict.HOLDS: (
            "In language models the top layer turns sparse, then dense; the bottom layer "
            "stays sparser"
        ),
        Verdict.UNDER: "In some language models the top layer turns sparse, then dense",
        Verdict.FAILS: "In no language model here does the top layer turn sparse, then dense",
        Verdict.INCONCLUSIVE: "does the attention of language models turn sparse, then dense?",
    },
)
