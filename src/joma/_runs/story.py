"""A run in one sentence: what attention did, and whether anything is wrong. For terminal, page and notebook."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from math import exp
from typing import Any

from joma._runs.alerts import LEVELS, listed
from joma._runs.curve import Curve
from joma._runs.outcome import Outcome

MOST_LAYERS = 2  # with a sentence each; of deeper models those that moved most
_STATES = {
    "failed": "The run failed.",
    "killed": "The run was killed.",
    "interrupted": "The run was interrupted.",
    "diverged": "The loss diverged.",
}


def spread(entropy: float) -> str:
    """Return over how many tokens attention is spread, e to the entropy, in few digits.

    >>> spread(2.59), spread(0.05)
    ('13', '1.1')
    """
    tokens = exp(entropy)
    if tokens < 3:
        return f"{tokens:.1f}"
    return f"{tokens:.0f}"


def layer_sentence(layer: int, curve: Curve, unit: str = "tokens") -> str:
    """Return what the attention of a layer did, in words.

    >>> from joma._runs.curve import ENTROPY
    >>> layer_sentence(1, Curve(2.59, 1.54, 30, 2.03, ENTROPY), "words")
    'Attention of layer 1 fell from 13 to 5 words by step 30 and came back to 8.'
    """
    subject = f"Attention of layer {layer}"
    start = spread(curve.start)
    trough = spread(curve.trough)
    step = f"{curve.trough_step:,.0f}"
    if curve.collapsed:
        return f"{subject} collapsed from {start} to {trough} {unit} by step {step}."
    if curve.bounced:
        end = spread(curve.end)
        return (
            f"{subject} fell from {start} to {trough} {unit} by step {step} and came back to {end}."
        )
    if curve.dipped:
        return f"{subject} fell from {start} to {trough} {unit} by step {step}."
    return f"{subject} stayed at about {spread(curve.end)} {unit}."


def health(now: Outcome, *, is_watched: bool = True) -> str:
    """Return whether anything is wrong: "Healthy.", or the worst alerts and how the run ended."""
    sentences = []
    if now.status in _STATES:
        sentences.append(_STATES[now.status])
    levels = {str(alert["level"]) for alert in now.alerts}
    if levels:
        worst = max(levels, key=LEVELS.index)
        alerts = [alert for alert in now.alerts if alert["level"] == worst]
        kinds = listed(list(dict.fromkeys(map(_kind_and_place, alerts))), MOST_LAYERS + 1)
        sentences.append(f"{worst.capitalize()}: {kinds}.")
    elif is_watched and not sentences:
        sentences.append("Healthy so far." if now.status == "running" else "Healthy.")
    return " ".join(sentences)


def story(now: Outcome, kind: str) -> str:
    """Return the sentence of a run of this kind; "" if there is nothing to say."""
    unit = "words" if kind == "train" else "tokens"
    curves = now.curves.get("entropy", {})
    moved = sorted(curves, key=lambda layer: curves[layer].depth, reverse=True)
    told = sorted(moved[:MOST_LAYERS])
    sentences = [layer_sentence(layer, curves[layer], unit) for layer in told]
    if len(curves) > MOST_LAYERS:
        dipped = sum(curve.dipped for curve in curves.values())
        bounced = sum(curve.bounced for curve in curves.values())
        sentences.append(f"Of {len(curves)} layers {dipped} dipped, and {bounced} came back.")
    sentences.append(health(now, is_watched=kind in ("watch", "train") and bool(now.phases)))
    return " ".join(filter(None, sentences))


def figures(now: Outcome, layer: int) -> str:
    """Return the numbers behind the sentence of a layer: smoothed, as it uses them, and the lowest raw one."""
    curve = now.curves["entropy"][layer]
    text = f"entropy {curve} nats"
    if curve.rule.window > 1:
        text += f", medians of {curve.rule.window} measurements"
    if layer in now.lowest:
        step, value = now.lowest[layer]
        text += f"; the lowest single one is {value:.2f} at step {step:,}"
    return f"{text}: {curve.pattern}"


def by_block(alerts: Sequence[dict[str, Any]]) -> list[tuple[str, list[dict[str, Any]]]]:
    """Return alerts by block, those of the whole model first, and in each the worst first."""
    ordered = sorted(alerts, key=lambda alert: (_block(alert), -LEVELS.index(alert["level"])))
    groups = []
    for block, members in groupby(ordered, key=_block):
        name = "The whole model" if block < 0 else f"Block {block}"
        groups.append((name, list(members)))
    return groups


def _block(alert: dict[str, Any]) -> int:
    layer = alert.get("layer")
    return -1 if layer is None else int(layer)


def _kind_and_place(alert: dict[str, Any]) -> str:
    layer = alert.get("layer")
    place = "" if layer is None else f" in layer {layer}"
    return f"{alert['kind']}{place} from step {alert['step']:,}"
