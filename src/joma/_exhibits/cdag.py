"""Learning a hierarchy: which node of a graph learns which latent of a tree, and when (multi-layer appendix).

Data: class → α₀, α₁ → six β → eighteen tokens. A graph reads the tokens (and a constant) through nodes b that see the
tokens of one β each, nodes a that see all b, and outputs c that see all a, and is trained on the class from small
weights. Three cases: tanh nodes; tanh nodes with residual links b → c; linear nodes.

A latent is reached when the best node's correlation with it comes to a level of the most that tokens allow (that of
the exact posterior). The order in which latents are reached depends on the level: it is measured at several. Theorem 1
is checked on all edges and pairs of latents at all times.
"""

from __future__ import annotations

from typing import Any

import altair as alt
import numpy as np
import pandas as pd

from joma._exhibits.base import Experiment, Judgement, Progress
from joma._figures import Chart
from joma._run import Run, RunWriter
from joma.theory import CDAG, HBLT, CDAGPath
from joma.theory.cdag import cosine, implied, triples
from joma.theory.setting import Array
from joma.theory.verdict import Verdict

_COMMON = {"rho": 0.85, "t_end": 1000.0, "start": 0.1, "times": 42}
SETTINGS = {
    "quick": {**_COMMON, "samples": 500, "draws": 2},
    "laptop": {**_COMMON, "samples": 4000, "draws": 10},
    "paper": {**_COMMON, "samples": 10_000, "draws": 20},
}
AXES = {
    "correlation": ["latent", "node"],
    "best": ["latent"],
    "learned": ["level", "latent"],
    "ceiling": ["latent"],
    "owner": ["latent"],
}
CASES = {"tanh": "tanh nodes", "residual": "tanh nodes, residual links", "linear": "linear nodes"}
LATENTS = [*(f"class {k}" for k in range(4)), "α₀", "α₁", *(f"β{'₀₁₂₃₄₅'[b]}" for b in range(6))]
LAYER = ["class"] * 4 + ["α"] * 2 + ["β"] * 6
NODES = [*(f"b{i}" for i in range(6)), *(f"a{i}" for i in range(4)), *(f"c{i}" for i in range(4))]
OWN = {"class": "c", "α": "a", "β": "b"}  # the nodes as deep as a layer of latents
LEVELS = (0.9, 0.95, 0.97)  # of the possible correlation
SHARE = 0.95  # of the latents of a layer
KINDS = {
    "printed": "premises as printed",
    "condition": "with the condition on the angles",
    "persistent": "and at all times so far",
}


def graph(case: str) -> CDAG:
    """The graph of a case; its first input is the constant."""
    b = {f"b{i}": ["1", *(f"t{3 * i + j}" for j in range(3))] for i in range(6)}
    a = {f"a{i}": ["1", *b] for i in range(4)}
    c = {f"c{i}": ["1", *a, *(b if case == "residual" else ())] for i in range(4)}
    return CDAG({**b, **a, **c}, "linear" if case == "linear" else "tanh")


def run(writer: RunWriter, settings: dict[str, Any], seed: int, progress: Progress) -> None:
    """Train the three graphs on each draw of the data; correlations, learning times, loss, failures of Theorem 1."""
    tree = HBLT(3, 3, settings["rho"], class_to_latent=[[0.95, 0.95], [0.95, 0.05], [0.05, 0.95], [0.05, 0.05]])
    times = np.concatenate([[0.0], np.geomspace(0.1, settings["t_end"], settings["times"] - 1)])
    for draw in range(settings["draws"]):
        sample = tree.sample(settings["samples"], np.random.default_rng((seed, draw)))
        of_class, of_variable = tree.posterior(sample.tokens)
        target = np.eye(4)[sample.classes] - 0.25
        z = np.concatenate([target, *(1 - 2.0 * layer for layer in sample.latents)], axis=1)
        z -= z.mean(axis=0)
        guess = np.concatenate([of_class, 1 - 2 * of_variable[:, : z.shape[1] - 4]], axis=1)
        ceiling = np.diag(cosine(z, guess - guess.mean(axis=0)))
        writer.write(0, {"ceiling": ceiling}, draw=draw)
        for n, case in enumerate(CASES):
            progress((draw + n / 3) / settings["draws"], f"{CASES[case]}, draw {draw + 1} of {settings['draws']}")
            g = graph(case)
            x = np.column_stack([np.ones(len(z)), 1 - 2.0 * sample.tokens])
            order = [0 if name == "1" else 1 + int(str(name)[1:]) for name in (g.nodes[i] for i in g.inputs)]
            w0 = g.small_weights(settings["start"], np.random.default_rng((seed, draw, 1)))
            path = g.train(x[:, order], target, w0, times, method="RK45", rtol=1e-4)
            _measure(writer, path, z, ceiling, case, draw)


def _measure(writer: RunWriter, path: CDAGPath, z: Array, ceiling: Array, case: str, draw: int) -> None:
    g = path.graph
    columns = [g.index(node) for node in NODES]
    best = np.empty((len(path.t), z.shape[1]))
    so_far = None
    for i, t in enumerate(path.t):
        signals = path.signals(i)
        f = signals.f[:, columns]
        correlation = np.abs(cosine(z, f - f.mean(axis=0)))
        best[i] = correlation.max(axis=1)
        loss = 0.5 * float((signals.g[:, list(g.outputs)] ** 2).sum(axis=1).mean())
        now = triples(g, path.w[i], signals, z)
        so_far = now.condition if so_far is None else so_far & now.condition
        left = np.abs(path.w[i] - path.w[0]) > np.abs(path.w[0])  # the start has been outgrown
        met = {"printed": now.premises, "condition": now.condition, "persistent": so_far & left[:, None, None]}
        values: dict[str, Any] = {"best": best[i], "loss": loss}
        if draw == 0:
            values["correlation"] = correlation
        writer.write(i, values, t=float(t), case=case, draw=draw)
        for kind, cases in met.items():
            failed = int((cases & (now.c4 <= 0)).sum())
            writer.write(i, {"failed": failed}, t=float(t), case=case, draw=draw, kind=kind, met=int(cases.sum()))
        if met["condition"].any():
            constant = implied(now.c1, now.c2, now.c3)[met["condition"]]
            writer.write(i, {"constant": float(np.median(constant))}, t=float(t), case=case, draw=draw)
    above = best >= np.multiply.outer(LEVELS, ceiling)[:, None, :]  # (level, T, latent)
    first = np.where(above.any(axis=1), path.t[above.argmax(axis=1)], -1.0)  # −1: never
    owner = correlation.argmax(axis=1)  # in the end
    writer.write(0, {"learned": first, "owner": owner}, case=case, draw=draw)


def draw(run: Run) -> Chart:
    """Best correlation over time; which node carries which latent in the end; failures of Theorem 1 and the loss."""
    frame = run.frame()
    ceiling = frame[(frame.gauge == "ceiling") & (frame.draw == 0)].set_index("latent").value
    top: list[Any] = []
    middle: list[Any] = []
    for case, title in CASES.items():
        here = frame[(frame.case == case) & (frame.draw == 0)]
        best = here[(here.gauge == "best") & (here.t > 0)][["t", "latent", "value"]]
        best = best.assign(
            share=best.value / best.latent.map(ceiling),
            layer=best.latent.map(lambda i: LAYER[int(i)]),
            name=best.latent.map(lambda i: LATENTS[int(i)]),
        )
        lines = (
            alt.Chart(best, title=alt.Title(title, subtitle="best node's share of the possible correlation"))
            .mark_line(strokeWidth=1.6)
            .encode(
                alt.X("t:Q", title="t", scale=alt.Scale(type="log")),
                alt.Y("share:Q", title=None, scale=alt.Scale(domain=[0.4, 1.02])),
                alt.Color("layer:N", title="latent", sort=["β", "α", "class"]),
                detail="name:N",
                tooltip=["name", alt.Tooltip("t", format=".3g"), alt.Tooltip("share", format=".3f")],
            )
        )
        rule = alt.Chart(pd.DataFrame({"y": LEVELS})).mark_rule(strokeDash=[4, 4]).encode(alt.Y("y:Q"))
        top.append((lines + rule).properties(width=250, height=180))
        cells = here[(here.gauge == "correlation") & (here.step == here.step.max())][["latent", "node", "value"]]
        cells = cells.assign(
            name=cells.latent.map(lambda i: LATENTS[int(i)]), unit=cells.node.map(lambda i: NODES[int(i)])
        )
        middle.append(
            alt.Chart(cells, title=alt.Title("in the end", subtitle="|correlation| of node and latent"))
            .mark_rect()
            .encode(
                alt.X("unit:N", title="node", sort=NODES, axis=alt.Axis(labelAngle=0)),
                alt.Y("name:N", title=None, sort=LATENTS[::-1]),
                alt.Color("value:Q", title=None, scale=alt.Scale(scheme="blues", domain=[0, 1])),
                tooltip=["unit", "name", alt.Tooltip("value", format=".3f")],
            )
            .properties(width=250, height=180)
        )
    failed = frame[(frame.gauge == "failed") & (frame.t > 0)]
    failed = failed.groupby(["case", "kind", "t"])[["value", "met"]].sum().reset_index()
    failed = failed[failed.met > 0].assign(share=lambda d: d.value / d.met)
    failed["kind"] = failed.kind.map(KINDS)
    bottom = [
        alt.Chart(
            failed[failed.case == case],
            title=alt.Title("Theorem 1", subtitle="share of triples whose conclusion fails"),
        )
        .mark_line(strokeWidth=1.8, point=alt.OverlayMarkDef(size=14))
        .encode(
            alt.X("t:Q", title="t", scale=alt.Scale(type="log", domain=[0.1, 1000])),
            alt.Y("share:Q", title=None, scale=alt.Scale(domain=[0, 1])),
            alt.Color("kind:N", title="premises", sort=list(KINDS.values())),
            tooltip=["kind", "met", alt.Tooltip("t", format=".3g"), alt.Tooltip("share", format=".4f")],
        )
        .properties(width=250, height=130)
        for case in CASES
    ]
    tables = [_table(frame, case) for case in CASES]
    rows = [alt.hconcat(*row) for row in (top, tables, middle, bottom)]
    return alt.vconcat(*rows).resolve_scale(color="independent")


def _table(frame: pd.DataFrame, case: str) -> Chart:
    """Median times by level and layer, and the draws in order, as a table."""
    cells = []
    for level, row in levels(frame, case).items():
        words = {layer: "never" if np.isinf(t) else f"{t:.3g}" for layer, t in row["median time"].items()}
        for column, text in {**words, "in order": row["draws in order"], "held": f"{row['held']:.0%}"}.items():
            cells.append({"level": level, "column": column, "text": text, "good": bool(row["good"])})
    return (
        alt.Chart(
            pd.DataFrame(cells),
            title=alt.Title("reached at t = …", subtitle="by level; draws in order; held in the end, least layer"),
        )
        .mark_text(fontSize=11)
        .encode(
            alt.X(
                "column:N",
                title=None,
                sort=["β", "α", "class", "in order", "held"],
                axis=alt.Axis(orient="top", labelAngle=0, domain=False, ticks=False),
            ),
            alt.Y("level:N", title=None, axis=alt.Axis(domain=False, ticks=False)),
            alt.Text("text:N"),
            color=alt.condition("datum.good", alt.value("#0072b2"), alt.value("#57606a")),
        )
        .properties(width=250, height=60)
    )


def _layer(latent: float) -> str:
    return LAYER[int(latent)]


def levels(frame: pd.DataFrame, case: str) -> dict[str, dict[str, Any]]:
    """For each level: times and shares by layer, the draws in order, and whether the hierarchy was learned bottom-up.

    A draw is in order if the median times of its layers are: β before α before the class.
    """
    here = frame[frame.case == case]
    learned = here[here.gauge == "learned"]
    learned = learned.assign(
        layer=learned.latent.map(_layer), t=learned.value.where(learned.value >= 0, np.inf).astype(float)
    )
    ceiling = frame[frame.gauge == "ceiling"][["draw", "latent", "value"]].rename(columns={"value": "ceiling"})
    end = here[(here.gauge == "best") & (here.step == here.step.max())].merge(ceiling, on=["draw", "latent"])
    end = end.assign(layer=end.latent.map(_layer), share=end.value / end.ceiling)
    found: dict[str, dict[str, Any]] = {}
    for i, level in enumerate(LEVELS):
        rows = learned[learned.level == i]
        medians = [d.groupby("layer").t.median() for _, d in rows.groupby("draw")]
        ordered = [bool(m["β"] < m["α"] < m["class"]) for m in medians]
        held = {k: float((d.share >= level).mean()) for k, d in end.groupby("layer")}
        found[f"{level:.0%}"] = {
            "good": all(ordered) and min(held.values()) >= SHARE,
            "draws in order": f"{sum(ordered)} of {len(ordered)}",
            "median time": {k: float(d.t.median()) for k, d in rows.groupby("layer")},
            "held": min(held.values()),
            "share held in the end": held,
            "share reached": {k: float((d.value >= 0).mean()) for k, d in rows.groupby("layer")},
            "share there before training": {k: float((d.value == 0).mean()) for k, d in rows.groupby("layer")},
        }
    return found


def judge(run: Run) -> Judgement:
    """Bottom-up order and own layers with tanh nodes, by level; links and linear nodes; Theorem 1 over training."""
    frame = run.frame()
    numbers: dict[str, Any] = {}
    for case in CASES:
        here = frame[frame.case == case]
        loss = here[here.gauge == "loss"]
        owner = here[here.gauge == "owner"]
        owner = owner.assign(layer=owner.latent.map(_layer))
        failed = here[here.gauge == "failed"].groupby("kind")[["value", "met"]].sum()
        numbers[case] = {
            "levels": levels(frame, case),
            "share by a node of its layer": {
                k: float(np.mean([NODES[int(n)][0] == OWN[str(k)] for n in d.value])) for k, d in owner.groupby("layer")
            },
            "loss ≤ ¼ at": float(loss[loss.value <= 0.25].groupby("draw").t.min().mean()),
            "final loss": float(loss[loss.step == loss.step.max()].value.mean()),
            "Theorem 1 fails": {k: float(failed.value[k] / max(failed.met[k], 1)) for k in KINDS},
            "cases": {k: int(failed.met[k]) for k in KINDS},
            "median implied constant": float(here[here.gauge == "constant"].value.median()),
        }
    plain, residual = numbers["tanh"], numbers["residual"]
    fails = plain["Theorem 1 fails"]
    good = [level for level, row in plain["levels"].items() if row["good"]]
    own = min(plain["share by a node of its layer"].values())
    rule = (
        "tanh nodes, at each level: in all draws the median times of reaching latents are in the order β, α, class, "
        f"and ≥ {SHARE:.0%} of each layer are held in the end; ≥ {SHARE:.0%} of each layer by a node as deep; holds: "
        "at all levels and Theorem 1 fails nowhere as printed; holds under: at some levels, and Theorem 1 fails "
        "nowhere once its condition has held all along"
    )
    first = f"{LEVELS[0]:.0%}"
    parts = (
        f"{level}: β {row['median time']['β']:.0f}, α {row['median time']['α']:.0f}, class "
        f"{row['median time']['class']:.0f}, {row['draws in order']} draws in order, {row['held']:.0%} held"
        for level, row in plain["levels"].items()
    )
    alpha, classes = (
        numbers[case]["levels"][first]["share held in the end"][k]
        for case, k in (("residual", "α"), ("linear", "class"))
    )
    text = (
        f"tanh, learned bottom-up if learned means {' or '.join(good) or 'none'} of the possible correlation, of "
        f"{', '.join(plain['levels'])} ({'; '.join(parts)}), {own:.0%} by their own layer; residual links bring the "
        f"loss to ¼ at t = {residual['loss ≤ ¼ at']:.0f} instead of {plain['loss ≤ ¼ at']:.0f}, but hold "
        f"{alpha:.0%} of the α (at {first}); linear nodes hold {classes:.0%} of the classes; Theorem 1 fails in "
        f"{fails['printed']:.0%} of cases as printed, {fails['persistent']:.0%} under its condition"
    )
    measured = (
        f"bottom-up at {len(good)} of {len(LEVELS)} levels; Theorem 1 fails in {fails['printed']:.0%}, under its "
        f"condition {fails['persistent']:.0%}"
    )
    paper = "Theorem 1 fails in 0 %"
    if not good or own < SHARE or any(numbers[case]["Theorem 1 fails"]["persistent"] > 0 for case in CASES):
        return Judgement(Verdict("fails"), rule, text, numbers, measured, paper)
    printed = max(numbers[case]["Theorem 1 fails"]["printed"] for case in CASES)
    whole = len(good) == len(LEVELS) and printed == 0
    return Judgement(Verdict("holds" if whole else "holds under"), rule, text, numbers, measured, paper)


EXPERIMENT = Experiment(SETTINGS, run, draw, judge, AXES)
