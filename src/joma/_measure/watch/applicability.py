"""How far JoMA's premises hold for a watched model: thresholds, and one sentence for the run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas as pd

# Least cosine of successive mean gradients, as a share of what noise leaves, for Assumption 1.
STATIONARY = 0.8

# Largest share of attention that moves between measurements, for Theorem 1.
STEADY = 0.05

# Largest share of the logits' motion that Eqn. 17 misses.
PREDICTED = 0.5

# Largest cosine of token states that counts as almost orthogonal.
ORTHOGONAL = 0.3

# Least cosine that noise must leave of a direction for a measurement to show whether it is kept.
LEAST_CEILING = 0.3


@dataclass(frozen=True)
class Premise:
    """A premise of JoMA, measured.

    Attributes:
        value: the median over layers and the second half of the run.
        holds: True if it does; None if noise hides it.
        sentence: both in words.
    """

    value: float
    holds: bool | None
    sentence: str


def premises(table: pd.DataFrame) -> dict[str, Premise]:
    """Return the premises that were measured, by name.

    Arguments:
        table: of a run with block gauges and, for embeddings, "coherence".
    """
    last_half = table[table.step > table.step.max() / 2]
    medians: dict[str, float] = {}
    for name, rows in last_half.groupby("gauge"):
        if rows.value.notna().any():
            medians[str(name)] = float(rows.value.median())
    measured: dict[str, Premise] = {}
    if "gradient_stationarity" in medians:
        agreement = medians.get("gradient_agreement", 1.0)
        measured["gradients"] = _stationarity(medians["gradient_stationarity"], agreement)
    if "attention_drift" in medians:
        drift = medians["attention_drift"]
        measured["attention"] = Premise(
            drift, drift <= STEADY, f"{100 * drift:.1f} % of attention moves between measurements"
        )
    if "eqn17_residual" in medians:
        residual = medians["eqn17_residual"]
        measured["Eqn. 17"] = Premise(
            residual,
            residual <= PREDICTED,
            f"Eqn. 17 misses {100 * residual:.0f} % of the logits' motion",
        )
    if "coherence" in medians:
        cosine = medians["coherence"]
        measured["embeddings"] = Premise(
            cosine, cosine <= ORTHOGONAL, f"token states have cosines up to {cosine:.2f}"
        )
    return measured


def _stationarity(cosine: float, agreement: float) -> Premise:
    """Judge Assumption 1 by the cosine of successive mean gradients.

    ``agreement`` is the cosine of the mean gradients of the two halves of one interval.
    """
    # The mean of both halves is less noisy than one half, by the formula of Spearman and Brown.
    ceiling = 0.0
    if agreement > 0:
        ceiling = 2 * agreement / (1 + agreement)
    noise = f"noise alone would leave {ceiling:.2f}"
    if ceiling < LEAST_CEILING:
        return Premise(
            cosine, None, f"whether mean gradients keep their direction cannot be told ({noise})"
        )
    return Premise(
        cosine,
        cosine >= STATIONARY * ceiling,
        f"mean gradients keep their direction by cos {cosine:.2f} ({noise})",
    )


def sentence(table: pd.DataFrame) -> str:
    """Return which premises hold, in a sentence; "" if no block gauge was measured."""
    measured = premises(table)
    if not set(measured) - {"embeddings"}:
        return ""
    holding = [name for name, premise in measured.items() if premise.holds]
    decided = [name for name, premise in measured.items() if premise.holds is not None]
    count = f"{len(holding)} of {len(decided)} premises of JoMA hold here"
    if holding:
        count += f" ({', '.join(holding)})"
    return f"{count}: {'; '.join(premise.sentence for premise in measured.values())}."
