"""Known limits of the clock: where a forecast needs care. Measured in `joma docs foresight`."""

from __future__ import annotations

from collections.abc import Sequence

from joma._runs import Run
from joma._runs.measured import not_alike
from joma._runs.outcome import outcome

# Adam on language models: rates between which curves were seen to agree on the clock
SLOWEST, FASTEST = 1e-5, 1e-4
FACTOR = 30.0  # between the rates of the known runs and of the new one
DEEPEST = 10
MEMORY = (
    1000  # steps that Adam's second moments look back, 1/(1 − β₂): they do not scale with the rate
)


def caveats(runs: Sequence[Run], lr: float, steps: int, layers: int) -> tuple[str, ...]:
    """The sentences, none if nothing is known against the forecast."""
    told: list[str] = []
    adam = {str((run.info.get("config") or {}).get("optimiser", "")) for run in runs} <= {
        "",
        "adam",
    }
    if adam and not SLOWEST <= lr <= FASTEST:
        told.append(
            f"the clock was seen to hold under Adam for rates from {SLOWEST:g} to {FASTEST:g}, and {lr:g} is outside: "
            "larger rates leave the common curve, deep models first, and attention of the bottom layer may collapse"
        )
    rates = [max(found) for run in runs if (found := _rates(run))]  # of a schedule, its peak
    if adam and lr <= FASTEST and rates and max(rates) > FASTEST:
        told.append(
            f"the known runs have rates up to {max(rates):g}: from 2e-4 on, the loss of deep models lags on the clock, "
            "and a slower run will be ahead of this forecast"
        )
    if rates and max(max(rates) / lr, lr / min(rates)) > FACTOR:
        told.append(
            f"the known runs have rates from {min(rates):g} to {max(rates):g}, and {lr:g} is more than {FACTOR:g} "
            "times away"
        )
    if adam and rates and lr < min(rates) and steps * lr / max(rates) < MEMORY:
        told.append(
            f"the known runs reach the end of the forecast in fewer than {MEMORY:,} steps, the memory of Adam's second "
            "moments, which does not scale with the rate: the early part of the forecast is the least certain"
        )
    if layers > DEEPEST:
        told.append(
            f"the clock was not tried on models of more than {DEEPEST} layers, and these have {layers}"
        )
    if len(runs) == 1:
        told.append("one run has no spread: give runs of several seeds for a band")
    starts = [
        tuple((run.info.get("config") or {}).get(name) for name in ("seed", "lr")) for run in runs
    ]
    if repeated := [
        start for start in dict.fromkeys(starts) if None not in start and starts.count(start) > 1
    ]:
        seed, rate = repeated[0]
        told.append(
            f"several runs have seed {seed} at {rate:g}: these are one run again, and the band is too narrow"
        )
    caution = not_alike({str(run.path): run.info for run in runs})
    if caution:
        told.append(caution)
    for run in runs:
        if run.info.get("status") == "diverged":
            told.append(f"{run.path} diverged: its rate is beyond the clock")
        if layers_lost := [
            layer for layer, phase in enumerate(outcome(run).phases) if phase == "collapsed"
        ]:
            told.append(
                f"attention of layer {', '.join(map(str, layers_lost))} of {run.path} is collapsed at its end: such a "
                "rate has left the common curve, and a smaller one need not follow it"
            )
    return tuple(told)


def _rates(run: Run) -> list[float]:
    """The learning rates above 0 that were recorded, of the first group of parameters, or that the settings have."""
    recorded = [row["value"] for row in run.rows() if row["gauge"] == "lr"]
    first = [value[0] if isinstance(value, list) else value for value in recorded]
    settings = [(run.info.get("config") or {}).get("lr")]
    known = (
        [rate for rate in rates if isinstance(rate, (int, float)) and rate > 0]
        for rates in (first, settings)
    )
    return next(filter(None, known), [])
