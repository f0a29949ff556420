"""``JOMA_DATA=… python docs/foresight.py``: the authors' long runs, foretold from short runs of ours.

Two questions, both put to the full vocabulary of 28,782 words, the authors' starts and the sequence that they stored:

* What becomes of the first 29,000 steps of a run at a learning rate of 1e-5? Foretold by `joma forecast` from runs of
  a tenth of the length at 1e-4, on the common clock τ = Σ lr; beside it from runs at 2e-4, a twentieth.
* Which depths and rates collapse within 58,000 steps? Foretold from the first 580 steps.

What they measured is looked for in ``$JOMA_DATA/authors-wikitext-2``, see ``docs/authors.py``. Hours on two cores;
killed, the same command goes on where it was. Rows whose runs are not in ``--out`` are those of the recorded result.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from joma._forecast.clock import Key as CurveKey
from joma._forecast.clock import curves, curves_of, rms
from joma._forecast.forecast import forecast
from joma._measure.watch.phases import PHASES
from joma._runs import Run, write_json
from joma._runs.alerts import read_alerts
from joma._runs.encoding import unspell
from joma._runs.files import plain
from joma._show import plots
from joma._show.plots import panels as p
from joma._train.settings import Settings
from joma._train.sweep import RunEnd, sweep
from joma.paper.exhibits._curves import deep
from joma.paper.records import FOLDER as RECORDED

DOCS = Path(__file__).parent
Key = tuple[int, float, int]  # layers, lr, the authors' seed
DEPTHS = (1, 2, 5, 10)
SOURCE_LR = 1e-4
FASTER_LR = 2e-4  # was to be the source, until the losses that it foretells were seen: they lag on the clock
SEEDS = {1: (1, 2), 2: (1, 2), 5: (1,), 10: (1,)}  # of the sources, by depth: deep models take long
REACH = 0.29  # τ of the sources
TARGET_LR, TARGET_STEPS = 1e-5, 29_000
FIRST_STEPS = 580
FIRST_RATES = (1e-3, 1e-2)  # and that of the sources; at slower ones nothing has happened by then
SOURCES: list[Key] = [
    (layers, SOURCE_LR, seed) for seed in (1, 2) for layers in DEPTHS if seed in SEEDS[layers]
]
FASTER: list[Key] = [(layers, FASTER_LR, 1) for layers in DEPTHS]
BEGIN, END = "<!-- numbers -->", "<!-- /numbers -->"
COLLAPSED = (
    0.25 * math.lgamma(36) / 35
)  # nats: a quarter of what uniform causal attention over 35 tokens has
BASELINE_LR = 1e-3  # of the rule that knows the rate alone: from here on all collapse
AWAY = 0.3  # nats
RULE = (
    f"A run is foretold to collapse if in its first {FIRST_STEPS} steps it diverges, the watch calls a layer collapsed "
    f"or raises a critical alert, or if at their end a layer's entropy is {AWAY:g} nats below, or the validation loss "
    f"{AWAY:g} above, the source run of that depth at the same τ (at its last τ if it is beyond). A run "
    f"of the authors has collapsed if at its end a layer's entropy is below {COLLAPSED:.2f} nats, a quarter of that of "
    "uniform attention, in most seeds."
)
FIRST: list[Key] = [(layers, lr, 1) for lr in FIRST_RATES for layers in DEPTHS]


def settings(layers: int, lr: float, seed: int) -> Settings:
    """A run from the start of the authors' seed; a source is measured every 0.01 of the clock."""
    source = lr in (SOURCE_LR, FASTER_LR)
    every = round(0.01 / lr) if source else 20
    return Settings(
        data="wikitext-2", layers=layers, lr=lr, seed=seed + 2, steps=round(REACH / lr) if source else FIRST_STEPS,
        every=every, threads=1, probe="authors", fresh_adam=True, short_window=True,
        gauges=("entropy", "stable_rank"), valid_windows=31, valid_every=every if source else 100,
    )  # fmt: skip


def name(layers: int, lr: float, seed: int) -> str:
    """The run's folder."""
    return f"layers={layers},lr={lr:g},authors-seed={seed}"


def opened(out: Path, keys: list[Key]) -> dict[Key, Run]:
    """The runs that are complete, or have gone as far as is asked for."""
    found = {}
    for key in keys:
        path = out / name(*key)
        if (path / "run.json").exists():
            run = Run(path)
            if (
                run.info["status"] in ("done", "diverged")
                or run.latest().step.max() >= settings(*key).steps
            ):
                found[key] = run
    return found


def theirs(data: Path, layers: int, lr: float, seed: int) -> pd.DataFrame:
    """What the authors measured in one run, as the table of a run: step, gauge, layer, value."""
    parts = []
    for file, column, gauge in (
        ("entropy", "entropy", "entropy"),
        ("valid_loss", "valid_loss", "valid_loss"),
    ):
        table = pd.read_csv(data / f"{file}.csv")
        table = table[(table.layers == layers) & (table.lr == lr) & (table.seed == seed)]
        table = table.rename(columns={column: "value"}).assign(gauge=gauge)
        parts.append(
            table.reindex(columns=["step", "gauge", "layer", "value"]).astype({"layer": "Int64"})
        )
    return pd.concat(parts, ignore_index=True)


def scores(runs: dict[Key, Run], data: Path) -> pd.DataFrame:
    """Errors of the forecasts of the authors' runs, one row per source, depth, gauge and layer; pooled over seeds."""
    rows = []
    for layers, lr in sorted(
        {(layers, lr) for layers, lr, _ in runs if lr in (SOURCE_LR, FASTER_LR)}
    ):
        ours = [run for key, run in runs.items() if key[:2] == (layers, lr)]
        steps = TARGET_STEPS
        told = forecast(
            ours, lr=TARGET_LR, steps=steps, layers=layers, gauges=("entropy", "valid_loss")
        )
        targets = {seed: theirs(data, layers, TARGET_LR, seed) for seed in (1, 2, 3)}
        targets = {
            seed: table[table.step <= steps] for seed, table in targets.items() if len(table)
        }
        scored = pd.concat([told.score(table).assign(seed=seed) for seed, table in targets.items()])
        for (gauge, layer), part in scored.groupby(["gauge", "layer"], dropna=False):
            own = (
                [other_seeds(targets, seed, gauge, layer) for seed in targets]
                if len(targets) > 1
                else [math.nan]
            )
            errors = {column: rms(part[column]) for column in ("rms", "last", "same_step")}
            rows.append({
                "source": lr, "seeds": len(ours), "layers": layers, "gauge": gauge, "layer": layer,
                "targets": len(targets),
                "points": int(part.points.iloc[0]), **errors, "other_seeds": rms(own),
            })  # fmt: skip
    return pd.DataFrame(rows)


def other_seeds(
    targets: dict[int, pd.DataFrame], seed: int, gauge: str, layer: int | None
) -> float:
    """The error of foretelling a run by the mean of the authors' other runs in the same settings."""

    def curve(table: pd.DataFrame) -> pd.Series:
        own = table.layer.isna() if pd.isna(layer) else table.layer == layer
        rows = table[(table.gauge == gauge) & own & (table.step > 0)]
        return rows.set_index("step").value

    others = pd.concat([curve(table) for n, table in targets.items() if n != seed], axis=1).mean(
        axis=1
    )
    return rms(others - curve(targets[seed]))


def pooled(table: pd.DataFrame) -> dict[str, float]:
    """The errors of the top layers and of the validation loss over all depths, and against the other seeds."""
    table = table[table.source == SOURCE_LR]
    top = table[(table.gauge == "entropy") & (table.layer == table.layers - 1)]
    loss, known = table[table.gauge == "valid_loss"], top.dropna(subset=["other_seeds"])
    return {
        "top layer, nats": rms(top.rms),
        "top layer, nats, last value": rms(top["last"]),
        "top layer, nats, same step": rms(top.same_step),
        "top layer, nats, depths with several seeds": rms(known.rms),
        "top layer, nats, the target's other seeds": rms(known.other_seeds),
        "validation loss": rms(loss.rms),
        "validation loss, last value": rms(loss["last"]),
        "validation loss, same step": rms(loss.same_step),
        "validation loss, the target's other seeds": rms(loss.other_seeds),
    }


def collapses(runs: dict[Key, Run], data: Path) -> pd.DataFrame:
    """What the first 580 steps foretell of each depth and rate, and what became of the authors' runs."""
    entropy = pd.read_csv(data / "entropy.csv")
    late = entropy[entropy.step >= 0.93 * entropy.step.max()]  # the last five that they stored
    ends = late.groupby(["layers", "lr", "seed", "layer"]).entropy.mean()
    lowest = ends.groupby(["layers", "lr", "seed"]).min() < COLLAPSED
    truth = lowest.groupby(["layers", "lr"]).mean() > 0.5  # in most seeds
    rows = []
    for (layers, lr, seed), run in runs.items():
        if lr == FASTER_LR or seed > 1:
            continue
        common = runs.get((layers, SOURCE_LR, 1))
        reasons = signs(run) + ([] if common is None else away(run, common))
        if common is None and not reasons:  # its source may tell more
            continue
        rows.append({
            "layers": layers, "lr": lr, "foretold": bool(reasons), "why": "; ".join(reasons),
            "collapsed": bool(truth.get((layers, lr), False)), "rate_alone": lr >= BASELINE_LR,
        })  # fmt: skip
    return pd.DataFrame(rows).sort_values(["layers", "lr"]) if rows else pd.DataFrame(rows)


def first(run: Run) -> pd.DataFrame:
    """What was measured in the first 580 steps."""
    frame = run.frame()
    return frame[frame.step <= FIRST_STEPS]


def signs(run: Run) -> list[str]:
    """Reasons to expect a collapse that the first steps of a run give by themselves; see `RULE`."""
    frame = first(run)
    phases = frame[(frame.gauge == "phase") & (frame.step == frame.step.max())]
    lost = [int(row.layer) for row in phases.itertuples() if row.value == PHASES.index("collapsed")]
    alerts = [alert for alert in read_alerts(run.path) if alert["step"] <= FIRST_STEPS]
    reasons = ["diverged"] * (run.info["status"] == "diverged")
    reasons += [f"phase of layer {layer} is collapsed" for layer in lost]
    reasons += sorted(
        {f"alert: {alert['kind']}" for alert in alerts if alert["level"] == "critical"}
    )
    return reasons


def away(run: Run, common: Run) -> list[str]:
    """Reasons that the first steps of a run give beside the source run of its depth, at the same τ; see `RULE`."""
    frame, gauges, reasons = first(run), ("entropy", "valid_loss"), []
    family = curves(common, gauges)
    for key, curve in curves_of(frame[frame.gauge.isin(gauges)], str(run.path)).items():
        expected = family[key].at(min(curve.tau[-1], family[key].tau[-1]))
        distance = float(
            np.median(curve.value[-5:] if key.layer is not None else curve.value[-1:]) - expected
        )
        if (key.gauge == "entropy" and distance < -AWAY) or (
            key.gauge == "valid_loss" and distance > AWAY
        ):
            reasons.append(f"{key} is {distance:+.2f} from the common curve")
    return reasons


def wanted(key: Key, record: dict[str, Any]) -> bool:
    """Whether a run is needed: means over seeds need all of them, a row that is recorded needs none.

    The first source of a depth is also what the cells of the other rates are held against.
    """
    layers, lr, seed = key
    seeds = SEEDS[layers] if lr == SOURCE_LR else (1,)
    told = {(row["layers"], float(row["lr"])) for row in record["collapse"]}
    compared = (lr, seed) == (SOURCE_LR, 1) and not all(
        (layers, rate) in told for rate in FIRST_RATES
    )
    return compared or not all(name(layers, lr, seed) in record["runs"] for seed in seeds)


def rates_and_seeds(data: Path) -> pd.DataFrame:
    """How far the authors' runs at two rates lie apart on the clock, and their seeds: rms over the τ that both measured."""
    rows = []
    ratio = round(SOURCE_LR / TARGET_LR)
    every = 1000  # steps between two of their measurements
    for layers in DEPTHS:
        for what in ({"gauge": "entropy", "layer": layers - 1}, {"gauge": "valid_loss"}):
            slow = by_seed(data, layers, TARGET_LR, what, ratio * every)
            fast = by_seed(data, layers, SOURCE_LR, what, every)
            points = slow.index.intersection(fast.index)
            between = [slow[i][points] - fast[j][points] for i in slow for j in fast]
            pairs = [(one, i, j) for one in (slow, fast) for i in one for j in one if i < j]
            within = [one[i][points] - one[j][points] for one, i, j in pairs]
            apart = {"rates": rms(np.concatenate(between)), "seeds": rms(np.concatenate(within))}
            rows.append({"layers": layers, **what, "points": len(points), **apart})
    return pd.DataFrame(rows).astype({"layer": "Int64"})


def by_seed(data: Path, layers: int, lr: float, what: dict[str, Any], every: int) -> pd.DataFrame:
    """What the authors measured at a rate every so many steps: a row per measurement after the first, a column per seed."""
    columns = {}
    for seed in (1, 2, 3):
        table = theirs(data, layers, lr, seed)
        for name, value in what.items():
            table = table[table[name] == value]
        table = table[(table.step > 0) & (table.step % every == 0)]
        if len(table):
            columns[seed] = pd.Series(table.value.to_numpy(), index=table.step.to_numpy() // every)
    return pd.DataFrame(columns)


def joined(table: pd.DataFrame, recorded: list[dict[str, Any]], by: list[str]) -> pd.DataFrame:
    """The rows of these runs, and those of the record that none of them takes the place of."""
    old = pd.DataFrame([{key: unspell(value) for key, value in row.items()} for row in recorded])
    if len(table):
        old = old[~old.set_index(by).index.isin(table.set_index(by).index)]
    both = pd.concat([table, old], ignore_index=True) if len(old) else table
    if "layer" in both:
        both = both.astype({"layer": "Int64"})
    return both.sort_values(
        [column for column in ("layers", "source", "lr", "gauge", "layer") if column in both]
    )


def page(table: pd.DataFrame, ends: pd.DataFrame, apart: pd.DataFrame) -> str:
    """The numbers as Markdown tables, for docs/foresight.md."""
    lines = []
    if len(table):
        lines += ["| layers | from lr | runs | what | points | forecast | last value | same step | their other seeds |",
                  "|--:|--:|--:|---|--:|--:|--:|--:|--:|"]  # fmt: skip
        for row in table.itertuples():
            what = "validation loss" if row.gauge == "valid_loss" else f"entropy, layer {row.layer}"
            own = "one seed" if row.other_seeds != row.other_seeds else f"{row.other_seeds:.3f}"
            errors = " | ".join(f"{error:.3f}" for error in (row.rms, row.last, row.same_step))
            lines.append(
                f"| {row.layers} | {row.source:g} | {row.seeds} | {what} | {row.points} | {errors} | {own} |"
            )
        lines += ["", f"| pooled over depths, from {SOURCE_LR:g} | rms |", "|---|--:|"]
        lines += [f"| {what} | {value:.3f} |" for what, value in pooled(table).items()]
        lines += [
            "",
            f"| layers | the authors' runs on the clock | points | {TARGET_LR:g} against {SOURCE_LR:g} | their seeds |",
            "|--:|---|--:|--:|--:|",
        ]
        for row in apart.itertuples():
            what = "validation loss" if row.gauge == "valid_loss" else f"entropy, layer {row.layer}"
            lines.append(
                f"| {row.layers} | {what} | {row.points} | {row.rates:.3f} | {row.seeds:.3f} |"
            )
    if len(ends):
        lines += ["", "| layers | lr | foretold to collapse | collapsed | by the rate alone | why |",
                  "|--:|--:|---|---|---|---|"]  # fmt: skip
        yes = {True: "yes", False: "no"}
        for row in ends.itertuples():
            answers = " | ".join(
                yes[answer] for answer in (row.foretold, row.collapsed, row.rate_alone)
            )
            lines.append(f"| {row.layers} | {row.lr:g} | {answers} | {row.why} |")
        lines += [
            "",
            "| rule | hits | misses | false alarms | right to be calm |",
            "|---|--:|--:|--:|--:|",
        ]
        for what, column in (("first 580 steps", "foretold"), ("rate alone", "rate_alone")):
            told, true = ends[column], ends.collapsed
            counts = [
                int((a & b).sum())
                for a, b in ((told, true), (~told, true), (told, ~true), (~told, ~true))
            ]
            lines.append(f"| {what} | {' | '.join(map(str, counts))} |")
    return "\n".join(lines)


def draw(runs: dict[Key, Run], data: Path) -> p.Chart:
    """Per depth: the top layer's entropy over τ in our runs, and in the authors' runs at 1e-5 and 1e-4."""
    panels, order = [], ["joma, 1e-4", "authors, 1e-5", "authors, 1e-4"]
    for layers in DEPTHS:
        tables = []
        for seed in SEEDS[layers]:
            if (key := (layers, SOURCE_LR, seed)) in runs:
                ours = curves(runs[key])[CurveKey("entropy", layers - 1)].until(REACH)
                tables.append(
                    pd.DataFrame(
                        {"tau": ours.tau, "value": ours.value, "which": order[0], "seed": seed}
                    )
                )
        if not tables:
            continue
        dots = []
        for rate, which in ((1e-5, order[1]), (1e-4, order[2])):
            table = pd.concat([theirs(data, layers, rate, seed) for seed in (1, 2, 3)])
            top = (
                (table.gauge == "entropy")
                & (table.layer == layers - 1)
                & (rate * table.step <= REACH + 1e-9)
            )
            dots.append(table[top].assign(tau=rate * table.step[top], which=which))
        x, y = p.x("tau", "τ = Σ lr"), p.y("value", "attention entropy, top layer", zero=True)
        marks = (p.lines(pd.concat(tables), x, y, p.by("which", order=order), detail="seed"),
                 p.dots(pd.concat(dots), x, y, p.by("which", order=order), size=14))  # fmt: skip
        panels.append(p.panel(deep(layers), *marks))
    pairs = [p.row(*panels[n : n + 2], shared=True) for n in range(0, len(panels), 2)]
    return p.column(*pairs, shared=True)


def main() -> None:
    """Train what is missing; write the tables and their numbers after each run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out", type=Path, default=Path("runs/foresight"), help="folder of the runs"
    )
    parser.add_argument(
        "--workers",
        type=int,
        default=2,
        help="runs at a time; 0 writes the tables of what there is",
    )
    parser.add_argument(
        "--figure",
        type=Path,
        default=DOCS / "figures" / "foresight.png",
        help="the picture to write",
    )
    parser.add_argument(
        "--page", type=Path, default=DOCS / "foresight.md", help="the page whose tables are written"
    )
    options = parser.parse_args()
    data = Path(os.environ.get("JOMA_DATA", ".")) / "authors-wikitext-2"
    if not (data / "entropy.csv").exists():
        parser.error(f"{data}/entropy.csv is not there: set JOMA_DATA to the folder that has it")
    keys = [*SOURCES[: len(DEPTHS)], *FIRST, *SOURCES[len(DEPTHS) :], *FASTER]  # second seeds last
    options.out.mkdir(parents=True, exist_ok=True)
    record = json.loads((RECORDED / "foresight.json").read_text())["foresight.json"]

    def write(end: RunEnd | None = None, n: int = 0, total: int = 0) -> None:
        if end is not None:
            print(f"{n}/{total} {end.path.name}: {end.status} {end.reason or ''}", flush=True)
        runs = opened(options.out, keys)
        table = joined(scores(runs, data), record["forecast"], ["layers", "source"])
        ends = joined(collapses(runs, data), record["collapse"], ["layers", "lr"])
        apart = rates_and_seeds(data)
        numbers = {
            "runs": sorted({*record["runs"], *(name(*key) for key in runs)}),
            "forecast": table.round(4).to_dict("records"),
            "pooled": {
                what: round(value, 4)
                for what, value in (pooled(table) if len(table) else {}).items()
            },
            "collapse": ends.to_dict("records"),
            "clock": apart.round(4).to_dict("records"),
        }
        write_json(options.out / "foresight.json", plain(numbers))
        if options.page.exists():
            head, _, tail = options.page.read_text().partition(BEGIN)
            options.page.write_text(
                f"{head}{BEGIN}\n{page(table, ends, apart)}\n{END}{tail.partition(END)[2]}"
            )
        if any(key in SOURCES for key in runs):
            with tempfile.TemporaryDirectory() as folder:
                plots.save(draw(runs, data), Path(folder))
                shutil.copyfile(Path(folder) / "figure.png", options.figure)

    if options.workers:  # not those whose rows are recorded
        runs = {name(*key): settings(*key) for key in keys if wanted(key, record)}
        sweep(runs, options.out, workers=options.workers, checkpoint_every=250, report=write)
    write()


if __name__ == "__main__":
    main()
