"""The pictures of *What am I looking at?*: attention rows, spectra and a collapse, with the numbers that joma gives."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import altair as alt
import numpy as np
import pandas as pd
import torch

import joma
from joma._show.plots import Chart, save
from joma._show.pages.plot import plot

TOKENS = 16
COLLAPSE = "train --data pydoc --vocabulary 1000 --layers 1 --lr 1e-2 --steps 140 --every 10 --valid-windows 2"


def attention_rows() -> Chart:
    """Five ways in which one query can look at 16 keys."""
    noise = torch.randn(TOKENS, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    sink, one = torch.zeros(TOKENS), torch.zeros(TOKENS)
    sink[0], one[10] = 4.5, 12.0
    rows = {
        "dense": torch.zeros(TOKENS),
        "in between": 1.2 * noise,
        "sparse": 4 * noise,
        "a sink": sink + 0.4 * noise,
        "collapsed": one,
    }
    panels = []
    for name, scores in rows.items():
        stats = joma.attention_stats_from_scores(scores.double()[None, None, None])
        numbers = [
            f"entropy {stats.entropy.item():.2f} nats",
            f"effective tokens {stats.effective_tokens.item():.1f}",
            f"on the first token {stats.sink_mass.item():.2f}",
            f"non-sink entropy {stats.nonsink_entropy.item():.2f}",
        ]
        frame = pd.DataFrame({"key": np.arange(TOKENS), "attention": scores.softmax(-1).numpy()})
        frame["first"] = frame.key == 0
        panels.append(
            alt.Chart(frame, title=alt.Title(name, subtitle=numbers), width=200, height=110)
            .mark_bar()
            .encode(
                alt.X("key:O", axis=alt.Axis(labels=False, ticks=False)),
                alt.Y("attention:Q", scale=alt.Scale(domain=[0, 1]), axis=alt.Axis(tickCount=3)),
                alt.Color("first:N", scale=alt.Scale(range=["#0072b2", "#d55e00"]), legend=None),
            )
        )
    return alt.concat(*panels, columns=3, spacing=18)


def spectra() -> Chart:
    """Singular values of three 256 × 64 matrices with the same Frobenius norm."""
    make = torch.Generator().manual_seed(0)
    noise = torch.randn(256, 64, generator=make, dtype=torch.float64)
    left, right = (
        torch.randn(256, 4, generator=make).double(),
        torch.randn(4, 64, generator=make).double(),
    )
    spike, thin = torch.outer(left[:, 0], right[0]), left @ right
    matrices = {
        "as at the start: random": noise,
        "one direction has grown": noise + 0.5 * spike,
        "rank 4": thin,
    }
    panels, ticks = [], alt.Axis(grid=False, tickCount=4)
    for name, w in matrices.items():
        w = w / w.norm()
        numbers = [
            f"stable rank {float(joma.stable_rank(w)):.1f}",
            f"effective rank {float(joma.effective_rank(w)):.1f}",
        ]
        sigma = torch.linalg.svdvals(w).numpy()
        frame = pd.DataFrame({"number": np.arange(1, 65), "singular value": sigma})
        panels.append(
            alt.Chart(frame, title=alt.Title(name, subtitle=numbers), width=240, height=130)
            .mark_bar(color="#0072b2")
            .encode(
                alt.X(
                    "number:Q",
                    title="number of the singular value",
                    scale=alt.Scale(domain=[0, 65]),
                    axis=ticks,
                ),
                alt.Y(
                    "singular value:Q", scale=alt.Scale(domain=[0, 1]), axis=alt.Axis(tickCount=3)
                ),
            )
        )
    return alt.hconcat(*panels, spacing=20)


def make(runs: Path) -> dict[str, Path]:
    """Make the three pictures below ``runs``; picture name -> its folder."""
    folders = {name: runs / f"{name}-figure" for name in ("rows", "spectra", "collapse")}
    for folder in folders.values():
        folder.mkdir(parents=True, exist_ok=True)
    save(attention_rows(), folders["rows"])
    save(spectra(), folders["spectra"])
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "joma",
        *COLLAPSE.split(),
        "--out",
        str(runs / "collapse"),
    ]
    subprocess.run(command, check=True, capture_output=True)  # what is complete is not done again
    plot(runs / "collapse", folders["collapse"])
    return folders
