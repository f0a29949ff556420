"""Linear against nonlinear nodes on the same inputs (abstract, Sections 3 and 4), regime by regime.

Three families of regimes, each with linear nodes and nonlinear ones on the same seeds:

- fixed gradients: Theorem 3's mixture of two isotropic components, with attention put back;
- cross-entropy: contexts of four tokens with class labels;
- the paper's language model, with and without its activation.

A regime's verdict compares how far attention entropy comes back after its dip, in nats, by paired differences.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import numpy as np
import pandas as pd

from joma._runs import Run, RunWriter
from joma._runs.curve import ENTROPY, describe, describe_all
from joma._show.plots import panels as p
from joma.paper.exhibits._curves import PLAIN, train_all
from joma.paper.exhibits._regimes import FLOWS, MARGIN, Contrast, Returns, compare, rebounds
from joma.paper.exhibits.base import Exhibit, Experiment, Progress, where
from joma.paper.exhibits.judgement import Judgement
from joma.paper.labs.contrast import late_times
from joma.paper.labs.regimes import FAMILIES, SOFTPLUS, LabelRegime, MixtureRegime
from joma.paper.verdict import Verdict
from joma.theory.bounce import softmax_entropy
from joma.theory.setting import Activation, Array

LANGUAGE: dict[str, Any] = {
    "data": "wikitext-2",
    "vocabulary": 2000,
    "layers": 1,
    "lr": 1e-4,
    "steps": 5000,
    "seeds": 8,
    "every": 100,
    "valid_windows": 16,
    "valid_every": 500,
    "gauges": ["entropy", "stable_rank"],
    **PLAIN,
}
REGIMES: dict[str, Any] = {
    "inputs": list(FAMILIES),
    "ratios": [2 / 3, 2.0, 4.0],
    "biases": [0.0, 20.0, 100.0],
    "mixture_seeds": 20,
    "mixture_end": 40.0,
    "labels": ["certain", "uncertain"],
    "zipf": [0.0, 1.0, 1.5],
    "rates": [1.0, 10.0],
    "label_seeds": 10,
    # Under softmax attention all is slower, and cheaper.
    "exp_end": 300.0,
    "softmax_end": 1000.0,
}
# A few flows of each family.
FEW = {
    "inputs": ["Gaussian"],
    "ratios": [4.0],
    "biases": [0.0, 20.0],
    "mixture_seeds": 2,
    "mixture_end": 10.0,
    "labels": ["uncertain"],
    "zipf": [1.0],
    "rates": [10.0],
    "label_seeds": 2,
    "exp_end": 30.0,
    "softmax_end": 30.0,
}
SETTINGS: dict[str, dict[str, Any]] = {
    "laptop": REGIMES | LANGUAGE,
    "paper": REGIMES
    | {"mixture_seeds": 100, "label_seeds": 50, "mixture_end": 150.0}
    | LANGUAGE
    | {"vocabulary": None, "steps": 20_000},
}
# Seeds per regime of the three families; with fewer, the statement is inconclusive.
ENOUGH = {"mixture": 20, "labels": 10, "language": 8}
LARGE_BIAS = 100.0
MIXTURE_ACTIVATIONS: dict[str, str | Activation] = {
    "linear": "linear",
    "relu": "relu",
    "gelu": "gelu",
}
LABEL_ACTIVATIONS: dict[str, str | Activation] = {
    "linear": "linear",
    "softplus": SOFTPLUS,
    "gelu": "gelu",
}
LANGUAGE_ACTIVATIONS = ("linear", "relu")
COLOURS = {"linear": "#d55e00", "relu": "#0072b2", "gelu": "#009e73", "softplus": "#cc79a7"}
MIXTURE_COLUMNS = ["inputs", "ratio", "bias", "xi"]
LABEL_COLUMNS = ["labels", "zipf", "informativeness", "rate", "attention"]
# Each flow's entropy at its start, trough and end; whether it blew up.
AXES = {"start": ["draw"], "trough": ["draw"], "end": ["draw"], "blown": ["draw"]}
POINTS = 121  # output times per flow, evenly spaced in ln t
# Regimes whose mean curve is stored and drawn, at every third of the times.
SHOWN = (
    MixtureRegime("Gaussian", 4.0, LARGE_BIAS, holds_bias=False),
    MixtureRegime("Gaussian", 4.0, 0.0, holds_bias=False),
    LabelRegime(is_certain=False, zipf=1.0, is_equal=True, rate=10.0, attention="exp"),
)
TITLES = {
    "target": f"fixed gradients, ξ(0) = {LARGE_BIAS:g}, finite target",
    "fixed": "fixed gradients, all else",
    "labels": "cross-entropy",
    "language": "language models",
}
AXIS = "attention entropy (nats)"
RULE = (
    "the rebound of a flow is how far its attention entropy rises from its trough to its end, in nats; it is 0 for a "
    f"flow that does not dip by {FLOWS.fall}. In a regime attention comes back in nonlinear nodes only if the 95 % "
    f"interval of the mean rebound is above {MARGIN:g} nats for every nonlinear activation, below it for linear nodes, "
    f"and that of the paired difference above {MARGIN:g}; it comes back in both, in neither, or in linear nodes only "
    "if the intervals of the means say so; else the regime is undecided. There are four groups of regimes: "
    f"{'; '.join(TITLES.values())}. Holds if every regime is nonlinear only; holds under a condition if at least half "
    f"of the regimes of a group are; else fails. With fewer seeds per regime than {ENOUGH['mixture']} (fixed "
    f"gradients) or {ENOUGH['labels']} (cross-entropy) the statement is inconclusive; with fewer pairs of language "
    f"models than {ENOUGH['language']} that group is undecided. Settings and rule were fixed on seeds below 100"
)
REVISED = (
    "flows from a small start under four kinds of gradients were counted together, and linear nodes that come back did "
    "not count against the statement; now each regime has its verdict, large biases among them, on new seeds"
)
WOULD_DECIDE = "20 seeds per regime of fixed gradients and 10 of cross-entropy: --preset laptop"


def mixture_regimes(settings: dict[str, Any]) -> Iterator[MixtureRegime]:
    """Yield the regimes of fixed gradients."""
    axes = (settings["inputs"], settings["ratios"], settings["biases"], (True, False))
    for inputs, ratio, bias, holds_bias in itertools.product(*axes):
        yield MixtureRegime(inputs, ratio, bias, holds_bias)


def label_regimes(settings: dict[str, Any]) -> Iterator[LabelRegime]:
    """Yield the regimes of cross-entropy."""
    axes = (
        settings["labels"],
        settings["zipf"],
        (True, False),
        settings["rates"],
        ("exp", "softmax"),
    )
    for labels, zipf, is_equal, rate, attention in itertools.product(*axes):
        yield LabelRegime(labels == "certain", zipf, is_equal, rate, attention)


def run(writer: RunWriter, settings: dict[str, Any], seed: int, progress: Progress) -> None:
    """Integrate the flows of all regimes, then train the language models."""
    _run_mixtures(writer, settings, seed, progress)
    _run_labels(writer, settings, seed, progress)
    model = {key: settings[key] for key in ("data", "layers", "lr", "steps")}
    models = [model | {"activation": activation} for activation in LANGUAGE_ACTIVATIONS]
    train_all(
        writer, models, settings, seed, lambda share, label: progress(0.2 + 0.8 * share, label)
    )


def _run_mixtures(
    writer: RunWriter, settings: dict[str, Any], seed: int, progress: Progress
) -> None:
    regimes = list(mixture_regimes(settings))
    seeds = [(seed, draw) for draw in range(settings["mixture_seeds"])]
    times = late_times(settings["mixture_end"], POINTS)
    for number, regime in enumerate(regimes):
        progress(0.1 * number / len(regimes), "fixed gradients")
        for name, activation in MIXTURE_ACTIVATIONS.items():
            flows = regime.flows(activation, seeds, times)
            # (T, flows); softmax(z): the samples are signed, and their tokens equally large
            entropy = np.stack([softmax_entropy(z) for z in flows.z])
            labels = {"family": "mixture", **regime.labels, "activation": name}
            _write_flows(writer, times, entropy, flows.blown, labels, is_shown=regime in SHOWN)


def _run_labels(writer: RunWriter, settings: dict[str, Any], seed: int, progress: Progress) -> None:
    regimes = list(label_regimes(settings))
    seeds = [(seed, draw) for draw in range(settings["label_seeds"])]
    for number, regime in enumerate(regimes):
        progress(0.1 + 0.1 * number / len(regimes), "cross-entropy")
        times = late_times(settings[f"{regime.attention}_end"], POINTS)
        for name, activation in LABEL_ACTIVATIONS.items():
            flows = regime.flows(activation, seeds, times)
            labels = {"family": "labels", **regime.labels, "activation": name}
            _write_flows(
                writer, times, flows.entropy(), flows.blown, labels, is_shown=regime in SHOWN
            )


def _write_flows(
    writer: RunWriter,
    times: Array,
    entropy: Array,
    blown: Array,
    labels: dict[str, str],
    *,
    is_shown: bool,
) -> None:
    """Write start, trough and end of each flow (T, flows), and the mean curve of a regime that is drawn."""
    curves = [describe(times, values, FLOWS) for values in entropy.T]
    values: dict[str, Any] = {}
    for name in ("start", "trough", "end"):
        # Ten thousandths of a nat are more than the rule can tell apart, and keep the record small.
        values[name] = [round(getattr(curve, name), 4) for curve in curves]
    values["blown"] = np.isfinite(blown).astype(float)
    writer.write(0, values, **labels)
    if is_shown:
        for index in range(0, len(times), 3):
            mean = round(float(entropy[index].mean()), 4)
            # The mean over fewer flows is another number: a slice must not be compared with it.
            time = float(times[index])
            writer.write(index, {"curve": mean}, t=time, flows=entropy.shape[1], **labels)


def compare_flows(frame: pd.DataFrame, family: str) -> dict[tuple[str, ...], Contrast]:
    """Compare the activations in all regimes of a family; the labels of the regime are the key."""
    columns = MIXTURE_COLUMNS if family == "mixture" else LABEL_COLUMNS
    rows = where(frame, family=family, gauge=["start", "trough", "end"])
    table = rows.pivot_table(
        index=[*columns, "activation", "draw"], columns="gauge", values="value"
    ).reset_index()
    comparisons: dict[tuple[str, ...], Contrast] = {}
    for key, regime in table.groupby(columns):
        assert isinstance(key, tuple)  # always for a list of columns
        rebound: dict[str, Array] = {}
        end: dict[str, Array] = {}
        for activation, flows in regime.groupby("activation"):
            flows = flows.sort_values("draw")
            trough = flows["trough"].to_numpy()
            last = flows["end"].to_numpy()
            rebound[str(activation)] = rebounds(flows["start"].to_numpy(), trough, last)
            end[str(activation)] = last
        comparisons[tuple(map(str, key))] = compare(rebound, end)
    return comparisons


def compare_models(frame: pd.DataFrame) -> Contrast | None:
    """Compare the language models of seeds that were trained with both activations; None without any."""
    if "seed" not in frame:
        return None
    curves = describe_all(where(frame, gauge="entropy"), ENTROPY, ["activation", "seed"])
    seeds = {activation: set[int]() for activation in LANGUAGE_ACTIVATIONS}
    for activation, seed in curves:
        seeds[activation].add(seed)
    pairs = sorted(set.intersection(*seeds.values()))
    if not pairs:
        return None
    rebound: dict[str, Array] = {}
    end: dict[str, Array] = {}
    for activation in LANGUAGE_ACTIVATIONS:
        of_seeds = [curves[activation, seed] for seed in pairs]
        rebound[activation] = np.array([c.bounce if c.dipped else 0.0 for c in of_seeds])
        end[activation] = np.array([curve.end for curve in of_seeds])
    return compare(rebound, end)


def _has_target(settings: dict[str, Any]) -> dict[tuple[str, ...], bool]:
    """Labels of a mixture's regime -> True if its bias is large and its weights have a finite target."""
    return {
        tuple(regime.labels.values()): regime.has_target and regime.bias >= LARGE_BIAS
        for regime in mixture_regimes(settings)
    }


def _groups(run: Run) -> dict[str, dict[str, Contrast]]:
    """Group of `TITLES` -> regime, in words -> its comparison."""
    frame = run.frame()
    has_target = _has_target(run.info["config"]["settings"])
    groups: dict[str, dict[str, Contrast]] = {name: {} for name in TITLES}
    for key, comparison in compare_flows(frame, "mixture").items():
        inputs, ratio, bias, xi = key
        words = f"{inputs}, a₋/a₊ = {ratio}, ξ(0) = {bias}, ξ {xi}"
        groups["target" if has_target[key] else "fixed"][words] = comparison
    for key, comparison in compare_flows(frame, "labels").items():
        labels, zipf, informativeness, rate, attention = key
        words = f"{labels} labels, Zipf {zipf}, {informativeness}, r = {rate}, {attention}"
        groups["labels"][words] = comparison
    models = compare_models(frame)
    if models is not None:
        groups["language"]["linear against ReLU"] = models
    return groups


def _counted(comparisons: dict[str, Contrast]) -> Counter[Returns]:
    return Counter(comparison.returns for comparison in comparisons.values())


def _group_numbers(comparisons: dict[str, Contrast]) -> dict[str, Any]:
    """Return how many regimes of a group have each verdict."""
    returns = _counted(comparisons)
    return {
        "regimes": len(comparisons),
        "returns": {str(name): count for name, count in returns.most_common()},
        "nonlinear only": returns[Returns.NONLINEAR],
        "equivalent": sum(comparison.is_equivalent for comparison in comparisons.values()),
        "nonlinear ends denser": sum(c.ends_denser for c in comparisons.values()),
    }


def _support(groups: dict[str, dict[str, Contrast]]) -> list[float]:
    """Return the share of regimes with nonlinear only, per group; 0 for a group that is not decided."""
    shares = []
    for name, comparisons in groups.items():
        is_decided = bool(comparisons)
        if name == "language":
            is_decided = all(c.count >= ENOUGH["language"] for c in comparisons.values())
        if comparisons and is_decided:
            shares.append(_counted(comparisons)[Returns.NONLINEAR] / len(comparisons))
        else:
            shares.append(0.0)
    return shares


def judge(run: Run) -> Judgement:
    """Check in which regimes attention comes back in nonlinear nodes and not in linear ones."""
    settings = run.info["config"]["settings"]
    groups = _groups(run)
    support = _support(groups)
    is_short = (
        settings["mixture_seeds"] < ENOUGH["mixture"] or settings["label_seeds"] < ENOUGH["labels"]
    )
    if is_short:
        verdict = Verdict.INCONCLUSIVE
    elif all(share == 1 for share in support):
        verdict = Verdict.HOLDS
    elif any(share >= 0.5 for share in support):
        verdict = Verdict.UNDER
    else:
        verdict = Verdict.FAILS
    numbers: dict[str, Any] = {"groups": {}, "regimes": {}}
    for name, comparisons in groups.items():
        if comparisons:
            numbers["groups"][TITLES[name]] = _group_numbers(comparisons)
            numbers["regimes"][TITLES[name]] = {
                regime: comparison.numbers() for regime, comparison in comparisons.items()
            }
    template = (
        "attention comes back in these nodes, by regime: "
        "{groups:{key}: {returns:{key} in {value}} of {regimes}}"
    )
    for comparison in groups["language"].values():
        numbers["language"] = {
            "pairs": comparison.count,
            "rebound": {name: asdict(value) for name, value in comparison.rebound.items()},
            "difference": asdict(comparison.difference["relu"]),
        }
        interval = "{mean:.2f} ({low:.2f} to {high:.2f})"
        difference = interval.replace("{", "{language.difference.")
        template += (
            f"; rebound of language models in nats: {{language.rebound:{{key}} {interval}}}, "
            f"difference {difference}, {{language.pairs}} pairs"
        )
    entries = numbers["groups"].values()
    numbers["all groups"] = {
        name: sum(entry[name] for entry in entries) for name in ("nonlinear only", "regimes")
    }
    short_template = (
        "attention comes back with nonlinear nodes only in {all groups.nonlinear only} of "
        "{all groups.regimes} regimes"
    )
    return Judgement(verdict, numbers, template, short_template)


def _table(frame: pd.DataFrame, family: str, gauge: str) -> pd.DataFrame:
    """One row per regime and activation: labels, mean, low and high of "rebound" or "end"."""
    columns = MIXTURE_COLUMNS if family == "mixture" else LABEL_COLUMNS
    rows = []
    for key, comparison in compare_flows(frame, family).items():
        intervals = comparison.rebound if gauge == "rebound" else comparison.end
        for activation, interval in intervals.items():
            ends = {"mean": interval.mean, "low": interval.low, "high": interval.high}
            rows.append(dict(zip(columns, key, strict=True)) | {"activation": activation} | ends)
    return pd.DataFrame(rows)


def _dots(table: pd.DataFrame, title: str, axis: str, width: int) -> p.Chart:
    """Mean and interval of each regime in the column "regime"."""
    names = [name for name in COLOURS if name in set(table["activation"])]
    activation = p.by("activation", colours=COLOURS)
    x = p.x("regime", None, kind="N", sort=None, angle=-45)
    beside = p.offset("activation", names)
    spread = p.intervals(table, x, p.y("low", axis), activation, beside, high="high")
    tip = {"regime": None, "activation": None, "mean": ".2f", "low": ".2f", "high": ".2f"}
    marks = p.dots(table, x, p.y("mean", axis), activation, beside, tip=tip)
    return p.panel(title, spread, marks, size=(width, 150))


def _curve(rows: pd.DataFrame, x: Any, title: str) -> p.Chart:
    activation = p.by("activation", colours=COLOURS)
    lines = p.lines(rows, x, p.y("value", AXIS), activation)
    return p.panel(title, lines, size=(230, 150))


def _curve_panels(frame: pd.DataFrame) -> Iterator[p.Chart]:
    """Yield the mean curves of the regimes that are shown, and of the language models."""
    for regime in SHOWN:
        rows = where(frame, gauge="curve", **regime.labels) if "t" in frame else frame[:0]
        if rows.empty:
            continue
        if isinstance(regime, MixtureRegime):
            title = f"fixed gradients, a₋/a₊ = {regime.ratio:g}, ξ(0) = {regime.bias:g}"
        else:
            title = "cross-entropy, uncertain labels, r = 10, exp"
        yield _curve(rows[rows["t"] > 0], p.x("t", "t", log=True), title)
    entropy = where(frame, gauge="entropy")
    if not entropy.empty:
        means = entropy.groupby(["activation", "step"]).value.mean().reset_index()
        later = means[means["step"] > 0]
        yield _curve(later, p.x("step", "minibatch", log=True), "language model")


def draw(run: Run) -> p.Chart:
    """Curves of one regime per family; then rebound and end level of all regimes, linear against nonlinear."""
    frame = run.frame()
    rows = [p.row(*_curve_panels(frame), shared=True)]
    for gauge, axis in (("rebound", "rebound (nats)"), ("end", "entropy at the end (nats)")):
        table = where(_table(frame, "mixture", gauge), xi="trained")
        table["regime"] = table["inputs"] + ", " + table["ratio"]
        panels = [
            _dots(where(table, bias=bias), f"fixed gradients, ξ(0) = {bias}", axis, 230)
            for bias in sorted(set(table["bias"]), key=float)
        ]
        rows.append(p.row(*panels, shared=True))
    table = _table(frame, "labels", "rebound")
    words = table["informativeness"] + ", r = " + table["rate"]
    table["regime"] = "Zipf " + table["zipf"] + ", " + words
    for labels in sorted(set(table["labels"])):
        panels = []
        for attention in ("exp", "softmax"):
            rows_of_panel = where(table, labels=labels, attention=attention)
            title = f"cross-entropy, {labels} labels, {attention}"
            panels.append(_dots(rows_of_panel, title, "rebound (nats)", 360))
        rows.append(p.row(*panels, shared=True))
    return p.column(*rows, shared=True)


# Forty steps of a language model on a text that joma brings along.
CODE_SLICE = (
    LANGUAGE
    | FEW
    | {
        "data": "zipf",
        "vocabulary": 500,
        "steps": 40,
        "seeds": 1,
        "every": 10,
        "valid_windows": 2,
        "valid_every": 0,
    }
)
# The times are those of the record: its rows are compared. From ξ(0) = 0 and at r = 1 a flow takes little time.
RECORD_SLICE = {
    "inputs": ["Gaussian"],
    "biases": [0.0],
    "mixture_seeds": 2,
    "zipf": [1.0],
    "rates": [1.0],
    "label_seeds": 2,
    "steps": 40,
    "seeds": 1,
}
EXHIBIT = Exhibit(
    id="contrast",
    title="Linear against nonlinear",
    statement=(
        "With nonlinear activations attention turns sparse, then dense; with linear ones it "
        "stays sparse (abstract)."
    ),
    seconds=60,
    rule=RULE,
    paper="nonlinear yes, linear no",
    would_decide=WOULD_DECIDE,
    revised=REVISED,
    experiment=Experiment(
        SETTINGS, run, draw, judge, AXES, code_slice=CODE_SLICE, record_slice=RECORD_SLICE
    ),
    messages={
        Verdict.HOLDS: "Attention comes back with nonlinear nodes, and not with linear ones",
        Verdict.UNDER: "Attention comes back with nonlinear nodes only, in some regimes",
        Verdict.FAILS: "In no group of regimes does attention come back with nonlinear nodes only",
        Verdict.INCONCLUSIVE: "does attention come back with nonlinear nodes only?",
    },
)
