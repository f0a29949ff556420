"""Table 1: normalised correlation between latents and their best hidden nodes, with the two baselines it needs.

Per column and seed: hierarchical data and a network are drawn, NCorr is taken before and after training, and once more
with the latents permuted over the distinct sequences. ``quick`` and ``laptop`` use a smaller embedding than the
paper's d = 1024 and fewer steps, and ``quick`` half of the columns and a larger rate; tables and verdict say so.
"""

from __future__ import annotations

import math
from typing import Any, cast

import altair as alt
import numpy as np
import pandas as pd

from joma._exhibits.base import Experiment, Judgement, Progress
from joma._figures import Chart
from joma._run import Run, RunWriter
from joma.theory.verdict import Verdict

# (C, N_ch, N0, N1) -> the paper's mean and sd for s = 0 and s = 1
PAPER = {
    (20, 2, 10, 20): ((0.99, 0.01), (0.81, 0.05)),
    (20, 2, 20, 30): ((0.97, 0.02), (0.80, 0.05)),
    (20, 3, 10, 20): ((1.00, 0.00), (0.69, 0.05)),
    (20, 3, 20, 30): ((0.96, 0.02), (0.68, 0.04)),
    (30, 2, 10, 20): ((0.99, 0.01), (0.73, 0.08)),
    (30, 2, 20, 30): ((0.94, 0.04), (0.74, 0.03)),
    (30, 3, 10, 20): ((0.99, 0.01), (0.72, 0.04)),
    (30, 3, 20, 30): ((0.95, 0.03), (0.66, 0.02)),
    (50, 2, 10, 20): ((0.99, 0.01), (0.58, 0.02)),
    (50, 2, 20, 30): ((0.95, 0.03), (0.55, 0.01)),
    (50, 3, 10, 20): ((0.99, 0.01), (0.64, 0.02)),
    (50, 3, 20, 30): ((0.95, 0.03), (0.61, 0.04)),
}
SETTINGS: dict[str, dict[str, Any]] = {
    "quick": {"columns": 6, "seeds": 3, "d": 64, "steps": 100, "lr": [1e-3]},
    "laptop": {"columns": 12, "seeds": 3, "d": 256, "steps": 2000, "lr": [1e-4]},
    "paper": {"columns": 12, "seeds": 5, "d": 1024, "steps": 10_000, "lr": [1e-5, 1e-4]},
}
RATES = {1e-5: "as printed", 1e-4: "as in the authors' script"}
COLUMN = ["C", "N_ch", "N0", "N1"]
AXES = {"ncorr": ["s"]}
# the paper's value, what was measured, and what any network would give
STATES = {
    "trained": "trained",
    "untrained": "untrained",
    "permuted": "trained, latents permuted",
    "untrained permuted": "untrained, latents permuted",
    "permuted draws": "trained, latents permuted over 1,280 draws",  # takes copies of C sequences for evidence
}
LAYERS = (0, 1)
RULE = (
    "a layer of latents is represented by training if in every column, over seeds, trained − untrained and "
    "trained − permuted both have a mean of more than 2 of their sd. Holds: both layers, at one of the learning rates "
    "(the text gives 1e-5, the authors' script 1e-4); holds under: one layer. That the paper's value comes out is told "
    "apart from that and does not decide: a column agrees if the means are no further apart than twice the sd of both "
    "together"
)


def run(writer: RunWriter, settings: dict[str, Any], seed: int, progress: Progress) -> None:
    """Train one network per learning rate, column and seed; write NCorr before and after, and with permuted latents."""
    import torch

    from joma._train.hierarchy import HierarchyTransformer, Training, train
    from joma._train.hierarchy_data import make_hierarchy
    from joma._train.ncorr import measure_ncorr

    columns = list(PAPER)[: settings["columns"]]
    work = [(lr, column, draw) for lr in settings["lr"] for column in columns for draw in range(settings["seeds"])]
    for n, (lr, (C, N_ch, N0, N1), draw) in enumerate(work):
        name = f"lr {lr:g}, C = {C}, N_ch = {N_ch}, ({N0}, {N1}), seed {draw + 1}"
        progress(n / len(work), name)
        training = Training(steps=settings["steps"], lr=lr)
        drawn = int(np.random.SeedSequence((seed, draw)).generate_state(1)[0])
        data = make_hierarchy(N0, N1, N_ch, C, seed=drawn)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(drawn)
            model = HierarchyTransformer(data.M, C, settings["d"])
        where = {"lr": lr, "C": C, "N_ch": N_ch, "N0": N0, "N1": N1, "draw": draw}
        before = measure_ncorr(model, data, drawn)
        trained = train(
            model,
            data,
            training,
            drawn,
            lambda step, n=n, name=name: progress((n + step / settings["steps"]) / len(work), name),  # type: ignore[misc]
        )
        after = measure_ncorr(model, data, drawn)
        for state, values in {
            "untrained": before.value,
            "trained": after.value,
            "permuted": after.permuted,
            "untrained permuted": before.permuted,
            "permuted draws": after.permuted_draws,
        }.items():
            writer.write(training.steps, {"ncorr": values}, state=state, **where)
        distinct = data.distinct()
        with torch.no_grad():
            guess = model(torch.from_numpy(distinct.x)).argmax(dim=1).numpy()
        writer.write(
            training.steps,
            {
                "loss": float(np.mean(trained.losses[-10:])),
                "accuracy": float((guess == distinct.labels).mean()),
                # classes with the same tokens cannot be told apart
                "possible accuracy": len(np.unique(distinct.x, axis=0)) / C,
            },
            **where,
        )


def summary(run: Run) -> pd.DataFrame:
    """One row per learning rate, column, layer and state: mean and sd over seeds; the paper's rows too."""
    frame = run.frame("ncorr")
    key = ["lr", *COLUMN, "s", "state"]
    measured = frame.groupby(key, sort=False).value.agg(mean="mean", sd="std").reset_index()
    paper = []
    for lr, *column in frame[key[:5]].drop_duplicates().itertuples(index=False):
        values = PAPER[tuple(column)]
        for s in LAYERS:
            row = dict(zip(key, (lr, *column, s, "paper"), strict=True))
            paper.append(row | {"mean": values[s][0], "sd": values[s][1]})
    table = pd.concat([pd.DataFrame(paper), measured], ignore_index=True)
    several = len(run.info["config"]["settings"]["lr"]) > 1
    table["column"] = [
        f"C={row.C} N_ch={row.N_ch} ({row.N0}, {row.N1})" + (f", lr {_rate(lr)}" if several else "")
        for row, lr in zip(table.itertuples(), table.lr.tolist(), strict=True)
    ]
    return table


def _rate(lr: float) -> str:
    """A learning rate, and where it comes from."""
    return f"{lr:g} {RATES[lr]}" if lr in RATES else f"{lr:g}"


def tables(run: Run) -> dict[str, str]:
    """``table.md`` and ``table.tex``: the paper's columns as rows, mean ± sd over seeds beside the paper's numbers."""
    table = {(str(row.column), row.s, row.state): row for row in summary(run).itertuples()}
    names = list(dict.fromkeys(name for name, _, _ in table))
    states = ["paper", *STATES]
    header = ["", *(f"s = {s}: {state}" for s in LAYERS for state in states), "accuracy"]
    accuracy = run.frame("accuracy").groupby(["lr", *COLUMN], sort=False).value.mean()

    def cells(name: str, sign: str) -> list[str]:
        rows = [table[name, s, state] for s in LAYERS for state in states]
        return [f"{row.mean:.2f} {sign} {row.sd:.2f}" for row in rows]

    shown = dict(zip(names, accuracy, strict=True))
    markdown = [
        f"NCorr, mean ± sd over seeds. {_settings(run)} {_share(run)}",
        "",
        "| " + " | ".join(header) + " |",
        "|---|" + "--:|" * (len(header) - 1),
        *(f"| {name} | " + " | ".join(cells(name, "±")) + f" | {shown[name]:.2f} |" for name in names),
    ]
    latex = [
        "% NCorr, mean and sd over seeds. " + (_settings(run) + " " + _share(run)).replace("%", " percent"),
        r"\begin{tabular}{l" + "c" * (len(header) - 1) + "}",
        r"\hline",
        "& " + " & ".join(rf"\multicolumn{{{len(states)}}}{{c}}{{NCorr $(s={s})$}}" for s in LAYERS) + r" & \\",
        " & ".join(["", *states * len(LAYERS), "accuracy"]) + r" \\",
        r"\hline",
        *(
            f"${_latex(name)}$ & "
            + " & ".join(f"${cell}$" for cell in cells(name, r"\pm"))
            + f" & ${shown[name]:.2f}$ "
            + r"\\"
            for name in names
        ),
        r"\hline",
        r"\end{tabular}",
    ]
    return {"table.md": "\n".join(markdown) + "\n", "table.tex": "\n".join(latex) + "\n"}


def _latex(name: str) -> str:
    return name.replace(" ", r",\ ", 2).replace("N_ch", r"N_{\rm ch}")


def _settings(run: Run) -> str:
    settings = run.info["config"]["settings"]
    paper = SETTINGS["paper"]
    smaller = [
        f"{key} {settings[key]:g} (paper {paper[key]:g})"
        for key in paper
        if key != "lr" and settings[key] != paper[key]
    ]
    rates = f"learning rate {', '.join(map(_rate, settings['lr']))}"
    return f"With {', '.join([*smaller, rates])}." if smaller else f"At the scale of the paper, {rates}."


def _share(run: Run) -> str:
    """How much of the paper's numbers the baselines reach, in words."""
    means = summary(run).pivot_table(index=["column", "s"], columns="state", values="mean")
    share = means.div(means["paper"], axis=0).groupby("s").mean()
    parts = [
        f"at s = {s} {share.untrained[s]:.0%} by the untrained network and {share.permuted[s]:.0%} by permuted latents"
        for s in LAYERS
    ]
    return f"Of the paper's numbers, baselines reach {', '.join(parts)}."


def draw(run: Run) -> Chart:
    """NCorr over columns for both layers: the paper's value, trained, untrained and chance; bars are ± 1 sd."""
    labels = {"paper": "the paper's value", **STATES}
    shown = {
        "paper": ("#24292f", "diamond"), "trained": ("#d55e00", "circle"), "untrained": ("#0072b2", "circle"),
        "permuted": ("#eaaa7a", "cross"), "untrained permuted": ("#7fb8d8", "cross"),
    }  # fmt: skip
    order = [labels[state] for state in shown]
    table = summary(run)
    table = table[table.state.isin(list(shown))]
    table = table.assign(
        low=table["mean"] - table.sd, high=table["mean"] + table.sd, what=[labels[state] for state in table.state]
    )
    colours, shapes = zip(*shown.values(), strict=True)
    scale = alt.Scale(domain=[0.3, 1.05])
    rows: list[Any] = []
    for s, title in zip(LAYERS, ("s = 0: latents that own tokens", "s = 1: latents that own latents"), strict=True):
        base = alt.Chart(
            table[table.s == s][["column", "what", "mean", "sd", "low", "high"]],
            title=alt.Title(
                title, subtitle="mean over latents of the best node's correlation; bars: ± 1 sd over seeds"
            ),
        ).encode(
            alt.X("column:N", sort=None, title=None, axis=alt.Axis(labelAngle=-30, labelLimit=200)),
            alt.XOffset("what:N", sort=order),
            alt.Color("what:N", sort=order, title=None, scale=alt.Scale(domain=order, range=list(colours))),
        )
        bars = base.mark_rule(strokeWidth=1.5).encode(alt.Y("low:Q", title="NCorr", scale=scale), alt.Y2("high:Q"))
        points = base.mark_point(filled=True, size=55, opacity=1).encode(
            alt.Y("mean:Q", title="NCorr", scale=scale),
            alt.Shape("what:N", sort=order, title=None, scale=alt.Scale(domain=order, range=list(shapes))),
            tooltip=["column", "what", alt.Tooltip("mean", format=".3f"), alt.Tooltip("sd", format=".3f")],
        )
        rows.append((bars + points).properties(width=640, height=200))
    return alt.vconcat(*rows)


def judge(run: Run) -> Judgement:
    """Does training bring the latents out, beyond what any features would show? By RULE, column by column."""
    frame = run.frame("ncorr")
    rates = sorted(frame.lr.unique().tolist())
    judged = {lr: _judge_rate(frame[frame.lr == lr]) for lr in rates}
    complete = {lr: [s for s in LAYERS if all(judged[lr]["passed"][s])] for lr in rates}
    best = max(rates, key=lambda lr: len(complete[lr]))
    text = " ".join(f"Learning rate {_rate(lr)}: {judged[lr]['text']}." for lr in rates)
    numbers: dict[str, Any] = {
        f"lr {lr:g}": {"columns": judged[lr]["columns"], **judged[lr]["numbers"]} for lr in rates
    }
    numbers["accuracy"] = float(run.frame("accuracy").value.mean())
    numbers["possible accuracy"] = float(run.frame("possible accuracy").value.mean())
    columns = judged[best]["columns"]
    paper = {s: float(np.mean([entry["paper"] for entry in columns if entry["s"] == s])) for s in LAYERS}
    return Judgement(
        Verdict({2: "holds", 1: "holds under", 0: "fails"}[len(complete[best])]),
        RULE,
        f"{text} {_settings(run)} {_share(run)}",
        numbers,
        measured="; ".join(f"lr {lr:g}, {judged[lr]['measured']}" for lr in rates),
        paper="; ".join(f"s = {s}: {paper[s]:.2f}" for s in LAYERS),
    )


def _judge_rate(frame: pd.DataFrame) -> dict[str, Any]:
    """Columns, counts and sentences of one learning rate."""
    wide = frame.pivot_table(index=[*COLUMN, "draw", "s"], columns="state", values="value")
    columns: list[dict[str, Any]] = []
    for key, part in wide.groupby([*COLUMN, "s"], sort=False):
        C, N_ch, N0, N1, s = cast("tuple[int, ...]", key)
        mean, sd = PAPER[C, N_ch, N0, N1][s]
        entry: dict[str, Any] = dict(zip([*COLUMN, "s"], map(int, (C, N_ch, N0, N1, s)), strict=True))
        entry |= {"paper": mean} | {state: float(part[state].mean()) for state in STATES}
        for baseline in ("untrained", "permuted"):
            gain = part.trained - part[baseline]
            entry[f"above {baseline}"] = bool(gain.mean() > 2 * gain.std())
        spread = math.hypot(sd, float(part.trained.std()))
        entry["the paper's value"] = bool(abs(entry["trained"] - mean) <= 2 * spread)
        columns.append(entry)
    means = frame.pivot_table(index="s", columns="state", values="value")
    above = {"trained": means.trained - means.permuted, "untrained": means.untrained - means["untrained permuted"]}
    numbers: dict[str, Any] = {}
    passed: dict[int, list[bool]] = {}
    sentences = []
    for s in LAYERS:
        entries = [entry for entry in columns if entry["s"] == s]
        passed[s] = [entry["above untrained"] and entry["above permuted"] for entry in entries]
        agree = sum(entry["the paper's value"] for entry in entries)
        numbers[f"above chance at s = {s}"] = {state: float(gain[s]) for state, gain in above.items()}
        numbers[f"passed at s = {s}"] = sum(passed[s])
        numbers[f"the paper's value at s = {s}"] = agree
        sentences.append(
            f"s = {s}: {means.trained[s]:.2f} trained, {means.untrained[s]:.2f} untrained, {means.permuted[s]:.2f} "
            f"permuted; the paper's value in {agree}, above both baselines in {sum(passed[s])} of {len(entries)} "
            f"columns (above its own chance level: trained by {above['trained'][s]:.2f}, untrained by "
            f"{above['untrained'][s]:.2f})"
        )
    measured = ", ".join(f"s = {s}: {means.trained[s]:.2f} (untrained {means.untrained[s]:.2f})" for s in LAYERS)
    return {
        "columns": columns, "numbers": numbers, "passed": passed, "text": "; ".join(sentences), "measured": measured,
    }  # fmt: skip


EXPERIMENT = Experiment(SETTINGS, run, draw, judge, AXES, tables=tables)
