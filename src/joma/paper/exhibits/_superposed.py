"""What Figure 10's rule says of one model: superposed neurons, beside the controls."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd

from joma.paper.exhibits.base import where
from joma.paper.verdict import Verdict

# the share of the neurons made one in pairs that must be found: a search that misses more of them decides nothing
FOUND = 0.5
RULE = (
    "a pattern is words that a neuron's strong contexts attend to more often than its layer's (exact binomial, "
    "corrected for words and neurons), whose embeddings are unlike those of the neuron's other patterns; it passes if "
    "it comes back on held-out text, if masking its words lowers the activation more than masking others, and if w "
    "points to it more than 95 % of the layer's neurons do. A neuron with two that pass is superposed. Neurons are "
    f"also made one in pairs; where less than {FOUND:.0%} of these are found, the search has too little power, and the "
    "result is inconclusive. Otherwise, holds: every model has such neurons, a larger share than in any deal of "
    "contexts at random and than before training. Fails: none has. Else inconclusive"
)
WOULD_DECIDE = (
    f"a model and a text on which at least {FOUND:.0%} of the neurons made one in pairs are found; SmolLM2 and 60,000 "
    "tokens (--preset laptop) are not enough, --preset paper was not run"
)
REVISED = (
    "three contexts that attend to a common word were a pattern; chance made as many, and nothing was decided. Later, "
    "neurons above chance were enough for holds, however few of the neurons made one in pairs were found: SmolLM2 "
    "held by 2 neurons of 46,080 with 2% found"
)


def verdict_of(numbers: Mapping[str, Any]) -> Verdict:
    """Return the verdict that the rule gives to one model's numbers, measured now or recorded."""
    power = numbers["merged neurons found"]
    if power is None or not power >= FOUND:  # NaN is no power, either
        return Verdict.INCONCLUSIVE
    if not numbers["superposed"]:
        return Verdict.FAILS
    if numbers["trained"] > max(numbers["two patterns by chance"]["largest"], numbers["untrained"]):
        return Verdict.HOLDS
    return Verdict.INCONCLUSIVE


def judged(frame: pd.DataFrame, model: str) -> tuple[dict[str, Any], Verdict, str]:
    """Numbers, verdict, and both in a sentence."""
    share, several = {}, {}
    for state in ("trained", "untrained"):
        several[state] = where(frame, gauge="patterns", model=model, state=state).value >= 2
        share[state] = float(
            (where(frame, gauge="passed", model=model, state=state).value >= 2).mean()
        )
    level = where(frame, gauge="chance", model=model).value
    power, pairs = (
        float(where(frame, gauge=g, model=model).value.iloc[0]) for g in ("power", "pairs")
    )
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
    sentence = (
        f"{model}: {superposed:,} of {total:,} neurons have two or more patterns that pass all tests (before training "
        f"{share['untrained'] * total:,.0f}); two patterns before these tests: {several['trained'].sum():,}, with "
        f"contexts dealt out at random {level.mean() * total:,.1f} (at most {level.max() * total:,.0f}); "
        f"{_found(power, pairs)}; the texts A and B "
        f"of the figure's pairs both fire {', '.join(f'{count:.0f}' for count in paired)} neurons, texts of two "
        f"pairs {others.mean():.1f} in the mean"
    )
    return numbers, verdict_of(numbers), sentence


def _found(power: float, pairs: float) -> str:
    """What the merged neurons say."""
    if not pairs:
        return "there are no neurons with one pattern that could be made one"
    return f"of {pairs:.0f} pairs of neurons made one, {power:.0%} are found"
