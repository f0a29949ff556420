"""The graphs that learn a hierarchy, the names of its latents and nodes, and which layer of latents is reached when."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from joma._exhibits._statistics import share_interval
from joma._exhibits.base import where
from joma._run import RunWriter
from joma.theory import CDAG, CDAGPath
from joma.theory.cdag import cosine, implied, triples
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


def graph(case: str) -> CDAG:
    """The graph of a case; its first input is the constant."""
    b = {f"b{i}": ["1", *(f"t{3 * i + j}" for j in range(3))] for i in range(6)}
    a = {f"a{i}": ["1", *b] for i in range(4)}
    c = {f"c{i}": ["1", *a, *(b if case == "residual" else ())] for i in range(4)}
    return CDAG({**b, **a, **c}, "linear" if case == "linear" else "tanh")


def measure(writer: RunWriter, path: CDAGPath, z: Array, ceiling: Array, case: str, draw: int) -> None:
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
        layer=learned.latent.map(layer_of), t=learned.value.where(learned.value >= 0, np.inf).astype(float)
    )
    ceiling = where(frame, gauge="ceiling")[["draw", "latent", "value"]].rename(columns={"value": "ceiling"})
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
            "share there before training": {k: float((d.value == 0).mean()) for k, d in rows.groupby("layer")},
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
            k: float(np.mean([NODES[int(n)][0] == OWN[str(k)] for n in rows.value])) for k, rows in layers
        },
        "loss ≤ ¼ at": float(loss[loss.value <= 0.25].groupby("draw").t.min().mean()),
        "final loss": float(where(loss, step=loss.step.max()).value.mean()),
        "Theorem 1 fails": {k: float(failed.value[k] / max(failed.met[k], 1)) for k in KINDS},
        "cases": {k: int(failed.met[k]) for k in KINDS},
        "median implied constant": float(constant.value.median()),
    }
