"""The graphs that learn a hierarchy, the names of its latents and nodes, and which layer of latents is reached when."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from joma._runs import RunWriter
from joma.paper.exhibits._statistics import share_interval
from joma.paper.exhibits.base import where
from joma.theory import CDAG, HBLT, CDAGPath
from joma.theory.cdag import cosine, implied, triples
from joma.theory.hierarchy import HBLTSamples
from joma.theory.setting import Array

CASES = {"tanh": "tanh nodes", "residual": "tanh nodes, residual links", "linear": "linear nodes"}
LATENTS = [*(f"class {k}" for k in range(4)), "α₀", "α₁", *(f"β{'₀₁₂₃₄₅'[b]}" for b in range(6))]
LAYER = ["class"] * 4 + ["α"] * 2 + ["β"] * 6
NODES = [*(f"b{i}" for i in range(6)), *(f"a{i}" for i in range(4)), *(f"c{i}" for i in range(4))]
OWN = {"class": "c", "α": "a", "β": "b"}  # the nodes as deep as a layer of latents
LEVELS = (0.9, 0.95, 0.97)  # of the possible correlation
SHARE = 0.95  # of the latents of a layer
MOST = 0.5  # of the draws
KINDS = {
    "printed": "premises as printed",
    "condition": "with the condition on the angles",
    "persistent": "and at all times so far",
}
RULE = (
    "tanh nodes, at each level: the share of draws whose median times of reaching latents are in the order β, α, "
    f"class has a 95 % interval (Clopper–Pearson) above {MOST:.0%}, and ≥ {SHARE:.0%} of each layer are held in "
    f"the end; ≥ {SHARE:.0%} of each layer by a node as deep; holds: "
    "at all levels and Theorem 1 fails nowhere as printed; holds under a condition: at some levels, and Theorem 1 "
    "fails nowhere once its condition has held all along; inconclusive: at no level, and the interval of one "
    f"whose latents are held has {MOST:.0%} in it: fewer than 6 draws cannot decide"
)
WOULD_DECIDE = "more draws of the data: --preset laptop (10), or --set draws=10"
REVISED = "all draws had to be in order, however few; now the interval of their share decides"


def graph(case: str) -> CDAG:
    """The graph of a case; its first input is the constant."""
    b = {f"b{i}": ["1", *(f"t{3 * i + j}" for j in range(3))] for i in range(6)}
    a = {f"a{i}": ["1", *b] for i in range(4)}
    c = {f"c{i}": ["1", *a, *(b if case == "residual" else ())] for i in range(4)}
    return CDAG({**b, **a, **c}, "linear" if case == "linear" else "tanh")


def signals(tree: HBLT, sample: HBLTSamples) -> tuple[Array, Array, Array]:
    """The target (N, 4), the latents (N, latent), centred, and the most that tokens allow of each's correlation."""
    of_class, of_variable = tree.posterior(sample.tokens)
    target = np.eye(4)[sample.classes] - 0.25
    z = np.concatenate([target, *(1 - 2.0 * layer for layer in sample.latents)], axis=1)
    z -= z.mean(axis=0)
    guess = np.concatenate([of_class, 1 - 2 * of_variable[:, : z.shape[1] - 4]], axis=1)
    return target, z, np.diag(cosine(z, guess - guess.mean(axis=0)))


def measure_latents(
    writer: RunWriter, path: CDAGPath, z: Array, ceiling: Array, case: str, draw: int
) -> None:
    """Write what the nodes of a trained graph learned of the latents z (N, latent), and where Theorem 1 fails."""
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
        met = {
            "printed": now.premises,
            "condition": now.condition,
            "persistent": so_far & left[:, None, None],
        }
        values: dict[str, Any] = {"best": best[i], "loss": loss}
        if draw == 0:
            values["correlation"] = correlation
        writer.write(i, values, t=float(t), case=case, draw=draw)
        for kind, cases in met.items():
            failed = int((cases & (now.c4 <= 0)).sum())
            writer.write(
                i,
                {"failed": failed},
                t=float(t),
                case=case,
                draw=draw,
                kind=kind,
                met=int(cases.sum()),
            )
        if met["condition"].any():
            constant = implied(now.c1, now.c2, now.c3)[met["condition"]]
            writer.write(
                i, {"constant": float(np.median(constant))}, t=float(t), case=case, draw=draw
            )
    above = best >= np.multiply.outer(LEVELS, ceiling)[:, None, :]  # (level, T, latent)
    first = np.where(above.any(axis=1), path.t[above.argmax(axis=1)], -1.0)  # −1: never
    owner = correlation.argmax(axis=1)  # in the end
    writer.write(0, {"learned": first, "owner": owner}, case=case, draw=draw)


def layer_of(latent: float) -> str:
    """The layer of a latent, by its number."""
    return LAYER[int(latent)]


def levels(frame: pd.DataFrame, case: str) -> dict[str, dict[str, Any]]:
    """For each level: times and shares by layer, the draws in order, and whether the hierarchy was learned bottom-up.

    A draw is in order if the median times of its layers are: β before α before the class.
    """
    here = where(frame, case=case)
    learned = where(here, gauge="learned")
    learned = learned.assign(
        layer=learned.latent.map(layer_of),
        t=learned.value.where(learned.value >= 0, np.inf).astype(float),
    )
    ceiling = where(frame, gauge="ceiling")[["draw", "latent", "value"]].rename(
        columns={"value": "ceiling"}
    )
    end = where(here, gauge="best", step=here.step.max()).merge(ceiling, on=["draw", "latent"])
    end = end.assign(layer=end.latent.map(layer_of), share=end.value / end.ceiling)
    by_level: dict[str, dict[str, Any]] = {}
    for i, level in enumerate(LEVELS):
        rows = learned[learned.level == i]
        medians = [d.groupby("layer").t.median() for _, d in rows.groupby("draw")]
        ordered = [bool(m["β"] < m["α"] < m["class"]) for m in medians]
        held = {k: float((d.share >= level).mean()) for k, d in end.groupby("layer")}
        share, low, high = share_interval(sum(ordered), len(ordered))
        held_all = min(held.values()) >= SHARE
        by_level[f"{level:.0%}"] = {
            "good": low > MOST and held_all,
            "open": low <= MOST <= high and held_all,  # too few draws to say
            "draws in order": f"{sum(ordered)} of {len(ordered)}",
            "share in order, with its 95 % interval": (share, low, high),
            "median time": {k: float(d.t.median()) for k, d in rows.groupby("layer")},
            "held": min(held.values()),
            "share held in the end": held,
            "share reached": {k: float((d.value >= 0).mean()) for k, d in rows.groupby("layer")},
            "share there before training": {
                k: float((d.value == 0).mean()) for k, d in rows.groupby("layer")
            },
        }
    return by_level


def story(frame: pd.DataFrame, case: str) -> dict[str, Any]:
    """The numbers of a case: by level, who carries the latents, the loss, and how often Theorem 1 fails."""
    loss, owner, failed, constant = (
        where(frame, case=case, gauge=gauge) for gauge in ("loss", "owner", "failed", "constant")
    )
    layers = owner.assign(layer=owner.latent.map(layer_of)).groupby("layer")
    failed = failed.groupby("kind")[["value", "met"]].sum()
    return {
        "levels": levels(frame, case),
        "share by a node of its layer": {
            k: float(np.mean([NODES[int(n)][0] == OWN[str(k)] for n in rows.value]))
            for k, rows in layers
        },
        "loss ≤ ¼ at": float(loss[loss.value <= 0.25].groupby("draw").t.min().mean()),
        "final loss": float(where(loss, step=loss.step.max()).value.mean()),
        "Theorem 1 fails": {k: float(failed.value[k] / max(failed.met[k], 1)) for k in KINDS},
        "cases": {k: int(failed.met[k]) for k in KINDS},
        "median implied constant": float(constant.value.median()),
    }


def by_level(numbers: dict[str, Any]) -> str:
    """When the layers of a case were reached, level by level, in words."""
    parts = []
    for level, row in numbers["levels"].items():
        times, (_, low, high) = row["median time"], row["share in order, with its 95 % interval"]
        parts.append(
            f"{level}: β {times['β']:.0f}, α {times['α']:.0f}, class {times['class']:.0f}, {row['draws in order']} "
            f"draws in order [{low:.0%}, {high:.0%}], {row['held']:.0%} held"
        )
    return "; ".join(parts)
