"""Figure 8: attention entropy over training for several learning rates, with validation losses."""

from __future__ import annotations

from typing import Any

import altair as alt

from joma._exhibits._curves import AXES, best_loss, curves, entropy_story, measured, rank_story, train_all
from joma._exhibits.base import Experiment, Judgement, Progress
from joma._figures import Chart
from joma._run import Run, RunWriter
from joma._run.curve import ENTROPY
from joma.theory.verdict import Verdict

SETTINGS: dict[str, dict[str, Any]] = {
    "quick": {"data": "pydoc", "vocabulary": 1000, "layers": 1, "lr": [1e-5, 1e-4, 1e-3, 1e-2], "steps": 800,
              "every": 20, "threads": 1},
    "laptop": {"data": "wikitext-2", "vocabulary": 4000, "layers": 2, "lr": [1e-5, 1e-4, 1e-3, 1e-2], "steps": 7500,
               "every": 50, "threads": 1},
    "paper": {"data": "wikitext-2", "vocabulary": None, "layers": 2, "lr": [1e-6, 1e-5, 1e-4, 1e-3, 1e-2],
              "steps": 30_000, "every": 100, "threads": 1},
}  # fmt: skip
RULE = (
    "a run matches the theory if the entropy of its top layer dips and bounces without a collapse: "
    f"{ENTROPY.smoothed()}{ENTROPY}; holds: the run with the lowest validation loss matches, and every run that does "
    "not match has a higher loss than every one that does; holds under: the best run matches; fails: it does not"
)


def run(writer: RunWriter, settings: dict[str, Any], seed: int, progress: Progress) -> None:
    """Train one model per learning rate."""
    common = {key: settings[key] for key in ("data", "vocabulary", "layers", "steps", "every", "threads")}
    train_all(writer, "fig8", [{**common, "lr": lr} for lr in settings["lr"]], seed, progress)


def draw(run: Run) -> Chart:
    """One panel per learning rate, its best validation loss in the title."""
    data, layers = (run.info["config"]["settings"][name] for name in ("data", "layers"))
    frame, losses = measured(run, "entropy", data), best_loss(run, data)

    def panel(lr: float) -> alt.Chart:
        title = [f"lr {lr:g}", f"validation loss {losses[layers, lr]:.3f}"]
        legend = alt.Legend() if layers > 1 else None
        return (
            alt.Chart(frame[frame.lr == lr][["step", "layer", "value"]], width=230, height=170, title=title)
            .mark_line(strokeWidth=1.8)
            .encode(
                alt.X("step:Q", title="minibatch", scale=alt.Scale(type="log", nice=False)),
                alt.Y("value:Q", title="attention entropy (nats)", scale=alt.Scale(domain=[0, 2.7])),
                alt.Color("layer:O", scale=alt.Scale(scheme="plasma"), legend=legend),
                tooltip=["step", "layer", alt.Tooltip("value:Q", format=".3f")],
            )
        )

    return alt.hconcat(*map(panel, sorted(frame.lr.unique())))


def judge(run: Run) -> Judgement:
    """Do the patterns that match the theory give the lowest loss?"""
    data = run.info["config"]["settings"]["data"]
    layers, losses = curves(run, data), best_loss(run, data)
    matches = {key: layers[*key, key[0] - 1].pattern == "dip and bounce" for key in losses}
    best = min(losses, key=lambda key: losses[key])
    with_, without = ([losses[key] for key in losses if matches[key] is which] for which in (True, False))
    apart = not without or (with_ and max(with_) < min(without))
    verdict = "fails" if not matches[best] else "holds" if apart else "holds under"
    words = [
        f"lr {lr:g}: {losses[n, lr]:.3f}, "
        + ", ".join(c.pattern for (m, r, _), c in layers.items() if (m, r) == (n, lr))
        for n, lr in losses
    ]
    ranks, rank_numbers = rank_story(run, data)
    numbers = {
        "validation loss": {f"lr {lr:g}": loss for (_, lr), loss in losses.items()},
        "matches": {f"lr {lr:g}": match for (_, lr), match in matches.items()},
        "entropy": entropy_story(run, data),
        "stable rank": rank_numbers,
    }
    pattern = layers[*best, best[0] - 1].pattern
    return Judgement(
        Verdict(verdict),
        RULE,
        "; ".join([*words, ranks]),
        numbers,
        measured=f"lowest loss {losses[best]:.3f} at lr {best[1]:g}: {pattern}",
        paper="lowest loss with dip and bounce",
    )


EXPERIMENT = Experiment(SETTINGS, run, draw, judge, AXES)
