"""What Figure 10's rule says of one model: superposed neurons, beside the controls."""

from __future__ import annotations

from typing import Any

import pandas as pd

from joma._exhibits.base import where
from joma.theory.verdict import Verdict

FOUND = 0.5  # the share of the neurons made one in pairs that must be found for "fails"


def judged(frame: pd.DataFrame, model: str) -> tuple[dict[str, Any], Verdict, str]:
    """Numbers, verdict, and both in a sentence."""
    share, several = {}, {}
    for state in ("trained", "untrained"):
        several[state] = where(frame, gauge="patterns", model=model, state=state).value >= 2
        share[state] = float((where(frame, gauge="passed", model=model, state=state).value >= 2).mean())
    level = where(frame, gauge="chance", model=model).value
    power, pairs = (float(where(frame, gauge=g, model=model).value.iloc[0]) for g in ("power", "pairs"))
    both = where(frame, gauge="fired_by_both", model=model)
    paired, others = (both[(both.a == both.b) == same].value for same in (True, False))
    total = len(several["trained"])
    superposed = round(share["trained"] * total)
    numbers = {
        **share, "neurons": total, "superposed": superposed,
        "two patterns": {state: float(values.mean()) for state, values in several.items()},
        "two patterns by chance": {"mean": float(level.mean()), "largest": float(level.max())},
        "merged neurons found": power if pairs else None, "pairs merged": int(pairs),
        "fired by A and B, by pair": paired.astype(int).tolist(), "by texts of two pairs": float(others.mean()),
    }  # fmt: skip
    if superposed and share["trained"] > max(float(level.max()), share["untrained"]):
        verdict = Verdict.HOLDS
    else:
        verdict = Verdict.FAILS if not superposed and power >= FOUND else Verdict.UNDECIDED
    sentence = (
        f"{model}: {superposed:,} of {total:,} neurons have two or more patterns that pass all tests (before training "
        f"{share['untrained'] * total:,.0f}); two patterns before these tests: {several['trained'].sum():,}, with "
        f"contexts dealt out at random {level.mean() * total:,.1f} (at most {level.max() * total:,.0f}); "
        f"{_found(power, pairs)}; the texts A and B "
        f"of the figure's pairs both fire {', '.join(f'{count:.0f}' for count in paired)} neurons, texts of two "
        f"pairs {others.mean():.1f} in the mean"
    )
    return numbers, verdict, sentence


def _found(power: float, pairs: float) -> str:
    """What the merged neurons say."""
    if not pairs:
        return "there are no neurons with one pattern that could be made one"
    return f"of {pairs:.0f} pairs of neurons made one, {power:.0%} are found"
