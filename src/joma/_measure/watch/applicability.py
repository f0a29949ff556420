"""One sentence at the end of a watched run: how far JoMA's premises hold for this model."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas as pd

STATIONARY, STEADY, PREDICTED, ORTHOGONAL = (
    0.8,
    0.05,
    0.5,
    0.3,
)  # thresholds, in the order of `premises`
TOLD = 0.3  # the least cosine that noise may leave of a direction, so that it can be told whether it is kept


def premises(table: pd.DataFrame) -> dict[str, tuple[float, bool | None, str]]:
    """Premise -> its number, whether it holds, and both in words; medians over layers and the run's second half.

    Where mean gradients are hardly more than noise, nobody can tell whether they keep their direction: None.

    Arguments:
        table: of a run with block gauges (and, for embeddings, "coherence"); what was not measured is left out.
    """
    last = table[table.step > table.step.max() / 2]
    found = {
        name: float(rows.value.median())
        for name, rows in last.groupby("gauge")
        if rows.value.notna().any()
    }
    out: dict[str, tuple[float, bool | None, str]] = {}
    if "gradient_stationarity" in found:
        now, noise = found["gradient_stationarity"], found.get("gradient_agreement", 1.0)
        # a mean of both halves is less noisy than one of them: Spearman and Brown
        ceiling = 2 * noise / (1 + noise) if noise > 0 else 0.0
        text = f"mean gradients keep their direction by cos {now:.2f} (noise alone would leave {ceiling:.2f})"
        if ceiling < TOLD:
            text = f"whether mean gradients keep their direction cannot be told (noise alone would leave {ceiling:.2f})"
        out["gradients"] = now, now >= STATIONARY * ceiling if ceiling >= TOLD else None, text
    if "attention_drift" in found:
        drift = found["attention_drift"]
        out["attention"] = (
            drift,
            drift <= STEADY,
            f"{100 * drift:.1f} % of attention moves between measurements",
        )
    if "eqn17_residual" in found:
        residual = found["eqn17_residual"]
        out["Eqn. 17"] = (
            residual,
            residual <= PREDICTED,
            f"Eqn. 17 misses {100 * residual:.0f} % of the logits' motion",
        )
    if "coherence" in found:
        cosine = found["coherence"]
        out["embeddings"] = (
            cosine,
            cosine <= ORTHOGONAL,
            f"token states have cosines up to {cosine:.2f}",
        )
    return out


def sentence(table: pd.DataFrame) -> str:
    """What the run says of JoMA's premises; "" if no block gauge was measured."""
    measured = premises(table)
    if not set(measured) - {"embeddings"}:
        return ""
    held = [name for name, (_, holds, _) in measured.items() if holds]
    told = sum(holds is not None for _, holds, _ in measured.values())
    count = f"{len(held)} of {told} premises of JoMA hold here" + (
        f" ({', '.join(held)})" if held else ""
    )
    return f"{count}: " + "; ".join(text for *_, text in measured.values()) + "."
