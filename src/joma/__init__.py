"""joma: the training dynamics of Transformers (Tian et al., JoMA, ICLR 2024).

Measure, in training and on checkpoints:

    joma.watch(model, run="runs/mine")      gauges, phases and alerts of a model while it trains
    joma.explain(model, batch)              what a watch sees of a model, and how it knows
    joma.scan(checkpoints)                  gauges over a series of checkpoints
    joma.audit(checkpoints)                 copies, wrong shards, swapped steps and damage in such a series
    joma.charges(model)                     the conserved quantities of a model's weights
    joma.superpose(model, data)             neurons that several patterns fire
    joma.embedding_geometry(model, tokens)  how near to orthogonal a model's embeddings are
    joma.forecast(runs, lr=…, steps=…)      a run at another learning rate, before it is made
    joma.plot(run), joma.report(runs)       pictures and pages of what was measured
    joma.Run(path).frame()                  all numbers of a run, as a table
    joma.gauges(), @joma.gauge              what can be measured; a gauge of one's own
    @joma.alarm, joma.Alarm                 an alarm of one's own
    joma.GaugeKind                          a kind of gauge of one's own
    @joma.backend, joma.KernelBackend       an attention kernel of one's own

The theory, and the paper:

    joma.simulate(task)                     integrate the joint dynamics of a task of one's own
    joma.theory                             flows, first integrals, closed forms, and all claims, checked
    joma.reproduce("fig3")                  the paper's figures, with a verdict for each
    joma.nn, joma.integrations              a block without attention parameters; watches for trainers
    joma.types                              the types of results, for annotations

Warnings are of one category, `joma.JomaWarning`, which can be filtered.

Statistics of tensors: `attention_stats`, `stable_rank`, `effective_rank`, `embedding_coherence`, …

Everything is loaded on first use, so that ``import joma`` stays fast. ``joma --help`` has the same verbs.
"""

from __future__ import annotations

import importlib

TYPE_CHECKING = False
if TYPE_CHECKING:  # `typing` takes longer to import than all of this
    from typing import Any

__version__ = "0.1.0"

# name -> the private module that defines it
_API = {
    "Alarm": "joma._measure.watch.alarms.rule",
    "AttentionStats": "joma._measure.gauges.attention",
    "Coherence": "joma._measure.gauges.embedding",
    "Geometry": "joma._inspect.geometry",
    "JomaWarning": "joma._runs.warning",
    "Judgement": "joma.paper.exhibits.judgement",
    "GaugeKind": "joma._measure.gauges.kinds",
    "KernelBackend": "joma._measure.events.backends.kernel",
    "Run": "joma._runs",
    "Verdict": "joma.paper.verdict",
    "alarm": "joma._measure.watch.alarms.alarm_table",
    "attention_received": "joma._measure.gauges.logits",
    "attention_stats": "joma._measure.gauges.attention",
    "attention_stats_from_scores": "joma._measure.gauges.attention",
    "audit": "joma._checkpoints.audit.audit",
    "backend": "joma._measure.events.backends.backend_table",
    "charges": "joma._measure.charges.table",
    "effective_rank": "joma._measure.gauges.rank",
    "embedding_coherence": "joma._measure.gauges.embedding",
    "embedding_geometry": "joma._inspect.geometry",
    "embedding_series": "joma._inspect.geometry",
    "exhibit": "joma.paper.exhibits.index",
    "exhibits": "joma.paper.exhibits.index",
    "explain": "joma._measure.watch.explain",
    "forecast": "joma._forecast.forecast",
    "gauge": "joma._measure.gauges.registry",
    "gauges": "joma._measure.gauges.registry",
    "max_logit": "joma._measure.gauges.logits",
    "plot": "joma._show.pages.plot",
    "report": "joma._show.pages.runs",
    "reproduce": "joma._show.pages.reproduce",
    "scan": "joma._checkpoints.scan",
    "simulate": "joma._train.simulate",
    "spectral_norm": "joma._measure.gauges.rank",
    "stable_rank": "joma._measure.gauges.rank",
    "superpose": "joma._inspect.superpose",
    "watch": "joma._measure.watch.watch",
}

# name -> the extra that it needs, where the module that defines it needs another one first
_NEEDS = {"reproduce": "paper"}

__all__ = [
    "Alarm",
    "AttentionStats",
    "Coherence",
    "GaugeKind",
    "Geometry",
    "JomaWarning",
    "Judgement",
    "KernelBackend",
    "Run",
    "Verdict",
    "__version__",
    "alarm",
    "attention_received",
    "attention_stats",
    "attention_stats_from_scores",
    "audit",
    "backend",
    "charges",
    "effective_rank",
    "embedding_coherence",
    "embedding_geometry",
    "embedding_series",
    "exhibit",
    "exhibits",
    "explain",
    "forecast",
    "gauge",
    "gauges",
    "integrations",
    "max_logit",
    "models",
    "nn",
    "paper",
    "plot",
    "report",
    "reproduce",
    "scan",
    "simulate",
    "spectral_norm",
    "stable_rank",
    "superpose",
    "theory",
    "types",
    "watch",
]


def __getattr__(name: str) -> Any:
    if name in _NEEDS:
        from joma._extras import require

        require(_NEEDS[name], f"joma.{name}")
    if name in _API:
        value = getattr(importlib.import_module(_API[name]), name)
    elif name in ("integrations", "models", "nn", "paper", "theory", "types"):
        value = importlib.import_module(f"joma.{name}")
    else:
        raise AttributeError(
            f"module 'joma' has no attribute {name!r}; it has {', '.join(__all__)}"
        )
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
