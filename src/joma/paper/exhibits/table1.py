"""Table 1: normalised correlation between latents and their best hidden nodes, with the two baselines it needs.

Per column and seed: hierarchical data and a network are drawn, NCorr is taken before and after training, and once more
with the latents permuted over the distinct sequences. ``default`` and ``laptop`` use a smaller embedding than the
paper's d = 1024 and fewer steps, and ``default`` a larger rate, and both half of the columns; tables and verdict say so.
"""

from __future__ import annotations

import math
from typing import Any, cast

import numpy as np
import pandas as pd

from joma._runs import Run, RunWriter
from joma._show.plots import panels as p
from joma._show.plots.tables import latex, markdown
from joma.paper.exhibits._statistics import bounds, mean_interval
from joma.paper.exhibits.base import Exhibit, Experiment, Progress, where
from joma.paper.exhibits.judgement import Judgement, render
from joma.paper.labs.table1 import TABLE1
from joma.paper.verdict import Verdict

RATES = {1e-5: "as printed", 1e-4: "as in the authors' script"}
COLUMN = ["C", "N_ch", "N0", "N1"]
# the paper's value, what was measured, and what any network would give
STATES = {
    "trained": "trained",
    "untrained": "untrained",
    "permuted": "trained, latents permuted",
    "untrained permuted": "untrained, latents permuted",
    "permuted draws": "trained, latents permuted over 1,280 draws",  # takes copies of C sequences for evidence
}
LAYERS = (0, 1)


def summary(run: Run) -> pd.DataFrame:
    """One row per learning rate, column, layer and state: mean and sd over seeds; the paper's rows too."""
    frame = run.frame("ncorr")
    key = ["lr", *COLUMN, "s", "state"]
    measured = frame.groupby(key, sort=False).value.agg(mean="mean", sd="std").reset_index()
    paper = []
    for lr, *column in frame[key[:5]].drop_duplicates().itertuples(index=False):
        values = TABLE1[tuple(column)]
        for s in LAYERS:
            row = dict(zip(key, (lr, *column, s, "paper"), strict=True))
            paper.append(row | {"mean": values[s][0], "sd": values[s][1]})
    table = pd.concat([pd.DataFrame(paper), measured], ignore_index=True)
    several = len(run.info["config"]["settings"]["lr"]) > 1
    table["column"] = [
        f"C={row.C} N_ch={row.N_ch} ({row.N0}, {row.N1})" + (f", lr {rate(lr)}" if several else "")
        for row, lr in zip(table.itertuples(), table.lr.tolist(), strict=True)
    ]
    return table


def rate(lr: float) -> str:
    """A learning rate, and where it comes from."""
    return f"{lr:g} {RATES[lr]}" if lr in RATES else f"{lr:g}"


BASELINES = (
    "Of the paper's numbers, baselines reach {baselines:{untrained:.0%} at {key} by the untrained network "
    "and {permuted:.0%} by permuted latents}."
)
# The two gains that decide. Chance is the same network with its latents permuted: training changes it, too.
OVER_UNTRAINED = "trained − untrained"
BEYOND_CHANCE = "gain beyond chance"
GAIN = "{mean:+.3f} [{low:+.3f}, {high:+.3f}]"
LAYER = (
    "{key}: {trained:.2f} trained, {untrained:.2f} untrained, {permuted:.2f} permuted; "
    "{gains:{key} "
    + GAIN
    + "}; the paper's value in {agree} of {columns} columns, both gains above their noise in "
    "{passed} (above its own chance level: trained by {above chance.trained:.3f}, untrained by "
    "{above chance.untrained:.3f})"
)

BASELINE_STATES = ("untrained", "permuted")


def gains(wide: pd.DataFrame) -> dict[str, pd.Series[float]]:
    """Return what training adds, per column and seed: to NCorr, and to its distance from its own chance level."""
    trained = wide["trained"] - wide["permuted"]
    untrained = wide["untrained"] - wide["untrained permuted"]
    return {OVER_UNTRAINED: wide["trained"] - wide["untrained"], BEYOND_CHANCE: trained - untrained}


def baselines(run: Run) -> dict[str, dict[str, float]]:
    """Return how much of the paper's numbers the baselines reach, by layer."""
    means = summary(run).pivot_table(index=["column", "s"], columns="state", values="mean")
    shares = means.div(means["paper"], axis=0).groupby("s").mean()
    reached = {}
    for s in LAYERS:
        reached[f"s = {s}"] = {state: float(shares[state][s]) for state in BASELINE_STATES}
    return reached


def rate_numbers(frame: pd.DataFrame) -> dict[str, Any]:
    """Return the numbers of one learning rate: by layer of latents, and by column."""
    wide = frame.pivot_table(index=[*COLUMN, "draw", "s"], columns="state", values="value")
    columns = _column_numbers(wide)
    means = frame.pivot_table(index="s", columns="state", values="value")
    layers = {}
    for s in LAYERS:
        entries = [entry for entry in columns if entry["s"] == s]
        of_layer = wide[wide.index.get_level_values("s") == s]
        by_name = gains(of_layer.droplevel("s"))
        intervals = {name: bounds(mean_interval(gain)) for name, gain in by_name.items()}
        layers[f"s = {s}"] = {
            **{state: float(means[state][s]) for state in ("trained", *BASELINE_STATES)},
            "gains": intervals,
            "paper": sum(entry["paper"] for entry in entries) / len(entries),
            "represented": all(gain["low"] > 0 for gain in intervals.values()),
            "agree": sum(entry["the paper's value"] for entry in entries),
            "passed": sum(entry[OVER_UNTRAINED] and entry[BEYOND_CHANCE] for entry in entries),
            "columns": len(entries),
            "above chance": {
                "trained": means.trained[s] - means.permuted[s],
                "untrained": means.untrained[s] - means["untrained permuted"][s],
            },
        }
    agree = sum(entry["the paper's value"] for entry in columns)
    return {
        "layers": layers,
        "by column": columns,
        "represented": sum(layer["represented"] for layer in layers.values()),
        "reproduces": 2 * agree >= len(columns),
    }


def _column_numbers(wide: pd.DataFrame) -> list[dict[str, Any]]:
    """Return one entry per column and layer of latents."""
    columns = []
    for key, part in wide.groupby([*COLUMN, "s"], sort=False):
        C, N_ch, N0, N1, s = cast("tuple[int, ...]", key)
        mean, sd = TABLE1[C, N_ch, N0, N1][s]
        entry: dict[str, Any] = {"C": C, "N_ch": N_ch, "N0": N0, "N1": N1, "s": s, "paper": mean}
        for state in STATES:
            entry[state] = part[state].mean()
        for name, gain in gains(part).items():
            entry[name] = bool(gain.mean() > 2 * gain.std())
        spread = math.hypot(sd, part.trained.std())
        entry["the paper's value"] = bool(abs(entry["trained"] - mean) <= 2 * spread)
        columns.append(entry)
    return columns


COLUMNS = (
    (20, 2, 10, 20),
    (20, 3, 20, 30),
)  # the simplest, and the most complicated with as many classes
HELD_OUT = {
    "trained held out": "trained",
    "untrained held out": "untrained",
    "permuted held out": "permuted",
}
KEYS = ["rho", "C", "N_ch", "N0", "N1", "draw", "s"]


def run_noisy(
    writer: RunWriter, settings: dict[str, Any], lr: float, seed: int, progress: Progress
) -> None:
    """Both columns at each ρ and seed; ``noisy_ncorr`` by state."""
    from joma.paper.labs.hierarchy import Training
    from joma.paper.labs.ncorr import train_and_measure

    noisy = settings["noisy"]
    work = [
        (rho, column, draw)
        for rho in noisy["rho"]
        for column in COLUMNS
        for draw in range(noisy["seeds"])
    ]
    for n, (rho, (C, N_ch, N0, N1), draw) in enumerate(work):
        progress(
            n / len(work), f"ρ = {rho:g}, C = {C}, N_ch = {N_ch}, ({N0}, {N1}), seed {draw + 1}"
        )
        drawn = int(np.random.SeedSequence((seed, draw)).generate_state(1)[0])
        training = Training(steps=noisy["steps"], lr=lr)
        states, _, _ = train_and_measure(
            (N0, N1, N_ch, C), settings["d"], training, drawn, lambda step: None, rho
        )
        for state, name in HELD_OUT.items():
            labels = {
                "rho": rho,
                "C": C,
                "N_ch": N_ch,
                "N0": N0,
                "N1": N1,
                "draw": draw,
                "state": name,
            }
            writer.write(training.steps, {"noisy_ncorr": states[state]}, **labels)


CHANGE = "{change.mean:+.3f} [{change.low:+.3f}, {change.high:+.3f}]"
NOISY = (
    "With noise, ρ = {ρ:g}, nodes chosen on one half and scored on the other: {layers:{key}: "
    "{trained:.2f} trained, {untrained:.2f} untrained, {permuted:.2f} permuted, gain {gain.mean:+.3f} "
    "[{gain.low:+.3f}, {gain.high:+.3f}]}; with complexity it {direction}: " + CHANGE + "."
)
NO_NOISY = "No columns with noise were trained."
TREND = (
    "From (N_ch = {from.N_ch}, ({from.N0}, {from.N1})) to ({to.N_ch}, ({to.N0}, {to.N1})) trained NCorr "
    "{direction}: " + CHANGE + " (paper {paper:+.3f}, “goes down a bit”)."
)
NO_TREND = "The trend with complexity is not judged: the columns that it compares were not trained."


def noisy_numbers(run: Run) -> dict[str, Any]:
    """Return trained − untrained, held out, per layer, and its trend; nothing without noisy columns."""
    frame = where(run.frame(), gauge="noisy_ncorr")
    if frame.empty:
        return {}
    table = frame.pivot_table(index=KEYS, columns="state", values="value")
    layers = {}
    for s in LAYERS:
        rows = table.xs(s, level="s")
        layers[f"s = {s}"] = {
            **{state: rows[state].mean() for state in HELD_OUT.values()},
            "gain": bounds(mean_interval(rows.trained - rows.untrained)),
        }
    by_column = frame.pivot_table(
        index=["rho", "draw", "s"], columns=["state", "N_ch"], values="value"
    )
    change = bounds(mean_interval(by_column["trained", 3] - by_column["trained", 2]))
    return {
        "layers": layers,
        "change": change,
        "direction": _direction(change),
        "ρ": sorted(frame.rho.unique()),
    }


def noisy_table(run: Run) -> str:
    """``noisy.md``: the columns with noise as rows, mean ± sd over seeds."""
    frame = where(run.frame(), gauge="noisy_ncorr")
    if frame.empty:
        return f"{NO_NOISY}\n"
    story = render(NOISY, noisy_numbers(run))
    header = ["", *(f"s = {s}: {state}" for s in LAYERS for state in HELD_OUT.values())]
    rows = []
    for (rho, C, N_ch, N0, N1), column in frame.groupby(KEYS[:5]):
        cells = [
            where(column, s=s, state=state).value for s in LAYERS for state in HELD_OUT.values()
        ]
        name = f"ρ={rho:g} C={C:g} N_ch={N_ch:g} ({N0:g}, {N1:g})"
        rows.append([name, *(f"{values.mean():.2f} ± {values.std():.2f}" for values in cells)])
    return markdown(f"NCorr, nodes chosen on one half of the draws. {story}", header, rows)


def _direction(change: dict[str, float]) -> str:
    if change["high"] < 0:
        return "goes down"
    if change["low"] > 0:
        return "goes up"
    return "shows no change"


def trend_numbers(run: Run) -> dict[str, Any]:
    """Return how trained NCorr changes with complexity at equal C, here and in the paper; nothing without its columns."""
    frame = where(run.frame("ncorr"), state="trained")
    table = frame.pivot_table(
        index=["lr", "C", "draw", "s"], columns=["N_ch", "N0"], values="value"
    )
    if (2, 10) not in table or (3, 20) not in table:
        return {}
    difference = (table[3, 20] - table[2, 10]).dropna()
    change = bounds(mean_interval(difference))
    classes = sorted(int(C) for C in difference.index.unique("C"))
    paper = np.mean(
        [TABLE1[C, 3, 20, 30][s][0] - TABLE1[C, 2, 10, 20][s][0] for C in classes for s in LAYERS]
    )
    return {
        "change": change,
        "direction": _direction(change),
        "paper": paper,
        "classes": classes,
        "from": {"N_ch": 2, "N0": 10, "N1": 20},
        "to": {"N_ch": 3, "N0": 20, "N1": 30},
    }


SETTINGS: dict[str, dict[str, Any]] = {
    "laptop": {"columns": 6, "seeds": 3, "d": 256, "steps": 2000, "lr": [1e-4],
               "noisy": {"rho": [0.9], "seeds": 3, "steps": 200}},
    "paper": {"columns": 12, "seeds": 5, "d": 1024, "steps": 10_000, "lr": [1e-5, 1e-4],
              "noisy": {"rho": [0.8, 0.9], "seeds": 5, "steps": 10_000}},
}  # fmt: skip
AXES = {"ncorr": ["s"], "noisy_ncorr": ["s"]}
# The first losses are written, too: a spot check trains no further.
EARLY_STEPS = 40
EARLY_EVERY = 10  # steps whose losses are averaged
LEAST = {"d": 256, "steps": 2000}  # of a run that can test the statement
RULE = (
    "a layer of latents is represented by training if two gains, paired by column and seed and pooled over all of them, "
    "have a 95 % interval (Student's t) above 0: trained − untrained, and the gain beyond chance, (trained − permuted) − "
    "(untrained − untrained permuted), since training raises the chance level, too. Holds: both layers, at one of "
    "the learning rates (the text gives 1e-5, the authors' script 1e-4); holds under a condition: one layer. "
    "Neither: reproduces, but does not discriminate, if the paper's value comes out in half of the columns at least "
    "(a column agrees if the means are no further apart than twice the sd of both together); else fails. Below d = "
    f"{LEAST['d']} and {LEAST['steps']:,} steps the statement is inconclusive"
)
WOULD_DECIDE = (
    "a wider embedding, trained for longer: --preset laptop, or paper for the paper's own scale"
)
REVISED = (
    "every column had to pass by itself, by 2 sd over 3 to 5 seeds, and small networks were judged as fails. Then trained "
    "− untrained and trained − permuted decided, pooled: s = 1 passed, although its distance from chance had shrunk "
    "(0.097 trained, 0.109 untrained). Now the gain has to be larger than that of chance"
)
# Means over all columns.
PAPER = {s: float(np.mean([values[s][0] for values in TABLE1.values()])) for s in LAYERS}


def run(writer: RunWriter, settings: dict[str, Any], seed: int, progress: Progress) -> None:
    """Train one network per learning rate, column and seed; write NCorr before and after, and with permuted latents."""
    from joma.paper.labs.hierarchy import Training
    from joma.paper.labs.ncorr import train_and_measure

    columns = list(TABLE1)[: settings["columns"]]
    work = [
        (lr, column, draw)
        for lr in settings["lr"]
        for column in columns
        for draw in range(settings["seeds"])
    ]
    for n, (lr, (C, N_ch, N0, N1), draw) in enumerate(work):

        def show(
            step: int,
            n: int = n,
            name: str = f"C = {C}, N_ch = {N_ch}, ({N0}, {N1}), seed {draw + 1}",
        ) -> None:
            progress((n + step / settings["steps"]) / len(work), f"lr {work[n][0]:g}, {name}")

        show(0)
        drawn = int(np.random.SeedSequence((seed, draw)).generate_state(1)[0])
        steps = settings["steps"]
        training = Training(steps=settings.get("stop", steps), lr=lr)
        states, scores, losses = train_and_measure(
            (N0, N1, N_ch, C), settings["d"], training, drawn, show
        )
        labels = {"lr": lr, "C": C, "N_ch": N_ch, "N0": N0, "N1": N1, "draw": draw}
        early_losses = losses[:EARLY_STEPS]
        for end in range(EARLY_EVERY, len(early_losses) + 1, EARLY_EVERY):
            mean = float(np.mean(early_losses[end - EARLY_EVERY : end]))
            writer.write(end, {"early_loss": mean}, **labels)
        is_complete = training.steps == steps
        for state, values in states.items():
            if is_complete or state == "untrained":
                writer.write(steps, {"ncorr": values}, state=state, **labels)
        if is_complete:
            writer.write(steps, scores, **labels)
    run_noisy(writer, settings, settings["lr"][-1], seed, progress)


def tables(run: Run) -> dict[str, str]:
    """``table.md`` and ``table.tex``: the paper's columns as rows, mean ± sd over seeds beside the paper's numbers; and
    ``noisy.md``, those with noise."""
    table = {(str(row.column), row.s, row.state): row for row in summary(run).itertuples()}
    names = list(dict.fromkeys(name for name, _, _ in table))
    states = ["paper", *STATES]
    caption = f"{_settings(run)} {render(BASELINES, {'baselines': baselines(run)})}"
    accuracy = dict(
        zip(
            names,
            run.frame("accuracy").groupby(["lr", *COLUMN], sort=False).value.mean(),
            strict=True,
        )
    )

    def cells(name: str, sign: str) -> list[str]:
        rows = [table[name, s, state] for s in LAYERS for state in states]
        return [*(f"{row.mean:.2f} {sign} {row.sd:.2f}" for row in rows), f"{accuracy[name]:.2f}"]

    header = ["", *(f"s = {s}: {state}" for s in LAYERS for state in states), "accuracy"]
    formulas = {name: name.replace(" ", r",\ ", 2).replace("N_ch", r"N_{\rm ch}") for name in names}
    wide = [rf"\multicolumn{{{len(states)}}}{{c}}{{NCorr $(s={s})$}}" for s in LAYERS]
    headers = [["", *wide, ""], ["", *states * len(LAYERS), "accuracy"]]
    comment = f"NCorr, mean and sd over seeds. {caption}".replace("%", " percent")
    return {
        "table.md": markdown(
            f"NCorr, mean ± sd over seeds. {caption}", header, ([n, *cells(n, "±")] for n in names)
        ),
        "table.tex": latex(comment, headers, ([formulas[n], *cells(n, r"\pm")] for n in names)),
        "noisy.md": noisy_table(run),
    }


def _settings(run: Run) -> str:
    settings, paper = run.info["config"]["settings"], SETTINGS["paper"]
    differ = [key for key in paper if key not in ("lr", "noisy") and settings[key] != paper[key]]
    smaller = [f"{key} {settings[key]:g} (paper {paper[key]:g})" for key in differ]
    rates = f"learning rate {', '.join(map(rate, settings['lr']))}"
    return (
        f"With {', '.join([*smaller, rates])}."
        if smaller
        else f"At the scale of the paper, {rates}."
    )


SHOWN = {
    "paper": (p.INK, "diamond"), "trained": ("#d55e00", "circle"), "untrained": (p.ACCENT, "circle"),
    "permuted": ("#eaaa7a", "cross"), "untrained permuted": ("#7fb8d8", "cross"),
}  # fmt: skip


def draw(run: Run) -> p.Chart:
    """NCorr over columns for both layers: the paper's value, trained, untrained and chance; bars are ± 1 sd."""
    labels = {"paper": "the paper's value", **STATES}
    order = [labels[state] for state in SHOWN]
    table = where(summary(run), state=list(SHOWN))
    table = table.assign(
        low=table["mean"] - table.sd, high=table["mean"] + table.sd, what=table.state.map(labels)
    )
    colours, shapes = (
        dict(zip(order, values, strict=True)) for values in zip(*SHOWN.values(), strict=True)
    )
    column = p.x("column", kind="N", sort=None, angle=-30, axis={"labelLimit": 200})
    channels = p.by("what", order=order, colours=colours), p.offset("what", order)
    rows = []
    for s, title in zip(
        LAYERS, ("s = 0: latents that own tokens", "s = 1: latents that own latents"), strict=True
    ):
        part, (low, mean) = (
            where(table, s=s),
            (p.y(y, "NCorr", domain=(0.3, 1.05)) for y in ("low", "mean")),
        )
        spread = p.intervals(part, column, low, *channels, high="high")
        tip = {"column": None, "what": None, "mean": ".3f", "sd": ".3f"}
        points = p.dots(
            part,
            column,
            mean,
            *channels,
            p.shape("what", shapes),
            tip=tip,
            size=55,
            filled=True,
            opacity=1,
        )
        note = "mean over latents of the best node's correlation; bars: ± 1 sd over seeds"
        rows.append(p.panel(title, spread, points, note=note, size=(640, 200)))
    return p.column(*rows, shared=True)


def judge(run: Run) -> Judgement:
    """Check that training brings the latents out, beyond what any features would show, at each rate."""
    frame = run.frame("ncorr")
    settings = run.info["config"]["settings"]
    rates = {}
    for lr in sorted(frame.lr.unique().tolist()):
        rates[f"lr {lr:g}"] = {"label": rate(lr), **rate_numbers(where(frame, lr=lr))}
    best = max(rates.values(), key=lambda numbers: numbers["represented"])
    noisy = noisy_numbers(run)
    trend = trend_numbers(run)
    numbers = {
        "rates": rates,
        "best": best,
        "accuracy": run.frame("accuracy").value.mean(),
        "possible accuracy": run.frame("possible accuracy").value.mean(),
        "scale": _settings(run),
        "baselines": baselines(run),
        "noisy": render(NOISY, noisy) if noisy else NO_NOISY,
        "trend": render(TREND, trend) if trend else NO_TREND,
        "noisy numbers": noisy,
        "trend numbers": trend,
    }
    if any(settings[key] < least for key, least in LEAST.items()):
        verdict = Verdict.INCONCLUSIVE
    elif best["represented"] == len(LAYERS):
        verdict = Verdict.HOLDS
    elif best["represented"]:
        verdict = Verdict.UNDER
    elif any(numbers["reproduces"] for numbers in rates.values()):
        verdict = Verdict.INDISTINCT
    else:
        verdict = Verdict.FAILS
    conclusion = f"{{best.layers:at {{key}} {{gains:{{key}} {GAIN}}}}}"
    return Judgement(
        verdict,
        numbers,
        f"{{rates:learning rate {{label}}: {{layers:{LAYER}}}}}. {{scale}} {BASELINES} {{noisy}} "
        f"{{trend}} So: {conclusion}",
        "NCorr {best.layers:{trained:.2f} at {key} (untrained: {untrained:.2f})}",
    )


CODE_SLICE = {
    "columns": 1,
    "seeds": 1,
    "d": 32,
    "steps": 40,
    "lr": [1e-3],
    "noisy": {"rho": [], "seeds": 0, "steps": 0},
}
# One network, as it starts and in its first steps.
RECORD_SLICE = {
    "columns": 1,
    "seeds": 1,
    "stop": 40,
    "noisy": {"rho": [], "seeds": 0, "steps": 0},
}
EXHIBIT = Exhibit(
    id="table1",
    title="Table 1: latents and hidden nodes",
    statement=(
        "Hidden nodes learn the latents of their layer: each latent has a node that "
        "correlates highly with it."
    ),
    seconds=35,
    rule=RULE,
    paper="; ".join(f"s = {s}: {mean:.2f}" for s, mean in PAPER.items()),
    would_decide=WOULD_DECIDE,
    revised=REVISED,
    experiment=Experiment(
        SETTINGS,
        run,
        draw,
        judge,
        AXES,
        tables=tables,
        code_slice=CODE_SLICE,
        record_slice=RECORD_SLICE,
    ),
    messages={
        Verdict.HOLDS: "Hidden nodes learn the latents of both layers",
        Verdict.UNDER: "Hidden nodes learn the latents of one layer",
        Verdict.INDISTINCT: "The values of Table 1 come out, and do not show that training made them",
        Verdict.FAILS: "The values of Table 1 do not come out",
        Verdict.INCONCLUSIVE: "do hidden nodes learn the latents of their layer?",
    },
)
