"""What JoMA assumes, measured while models train (Assumption 1, Theorem 1's premises, almost orthogonal embeddings).

joint       the paper's language model, two layers, Adam
layerwise   the same, one layer after the other (“true for layer-wise training”)
gpt         a small GPT-2 (pre-norm, two heads) under Adam

Between measurements: how far the lower MLP's mean gradient E[g φ′ f] turns, and what noise alone would leave; how much
of the mean attention b̄ moves; what Eqn. 17 misses of the logits' motion; the largest cosine of token states.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from joma._measure.watch.applicability import (
    LEAST_CEILING,
    ORTHOGONAL,
    PREDICTED,
    STATIONARY,
    STEADY,
    premises,
)
from joma._runs import Run, RunWriter
from joma._show.plots import panels as p
from joma.paper.exhibits._curves import TOY, TOY_RULE
from joma.paper.exhibits.base import Exhibit, Experiment, Progress, where
from joma.paper.exhibits.judgement import Judgement
from joma.paper.verdict import Verdict

SETTINGS: dict[str, dict[str, Any]] = {
    "laptop": {"data": "wikitext-2", "vocabulary": 2000, "steps": 3000, "every": 100, "lr": 3e-4, "layers": 2,
               "width": 200},
    "paper": {"data": "wikitext-2", "vocabulary": None, "steps": 15_000, "every": 100, "lr": 1e-4, "layers": 2,
              "width": 200},
}  # fmt: skip
GAUGES = (
    "gradient_stationarity",
    "gradient_agreement",
    "attention_drift",
    "eqn17_residual",
    "coherence",
)
MODELS = {"joint": "language model, jointly", "layerwise": "layer by layer", "gpt": "small GPT-2"}
WOULD_DECIDE = "models on WikiText with batches so large that noise does not hide the mean gradient"
REVISED = "a direction of which noise leaves nothing counted as one that is not kept, and the statement as one that fails"
SHOWN = {
    "gradient_stationarity": "cos of successive mean gradients", "attention_drift": "share of attention that moves",
    "eqn17_residual": "what Eqn. 17 misses", "coherence": "largest cosine of token states",
}  # fmt: skip
RULE = (
    "medians over layers and the second half of training; gradients are stationary if successive mean gradients have "
    f"at least {STATIONARY:g} of the cosine that noise leaves (Spearman and Brown, from odd and even steps); b̄ if at "
    f"most {STEADY:.0%} of attention moves; Eqn. 17 predicts if it misses at most {PREDICTED:g}; states are almost "
    f"orthogonal up to a cosine of {ORTHOGONAL:g}. Assumption 1 holds if gradients are stationary in all three models, "
    "holds under layer-wise training if in that one, fails if in none. Where noise leaves a cosine below "
    f"{LEAST_CEILING:g} that cannot be measured, and unless it can in layer-wise training, the statement is inconclusive. "
    f"{TOY_RULE}"
)


def run(writer: RunWriter, settings: dict[str, Any], seed: int, progress: Progress) -> None:
    """Train the three models beside the exhibit, and refer to their runs."""
    folder = writer.path.parent / "assumptions-runs"
    models = settings.get("models", list(MODELS))
    settings = {name: value for name, value in settings.items() if name != "models"}
    for n, model in enumerate(models):

        def show(share: float, n: int = n, model: str = model) -> None:
            progress((n + share) / len(models), MODELS[model])

        make = _gpt if model == "gpt" else _language
        trained = make(
            folder / f"{model}-{seed}", settings, seed, show, layerwise=model == "layerwise"
        )
        writer.refer(trained, GAUGES, model=model)


def _language(
    path: Path, settings: dict[str, Any], seed: int, show: Any, *, layerwise: bool
) -> Run:
    from joma._train.language import train
    from joma._train.settings import Settings

    chosen = Settings(
        **settings, hidden=settings["width"], gauges=("entropy", *GAUGES), layerwise=layerwise, seed=seed, threads=1,
        valid_windows=1, probe_windows=1,
    )  # fmt: skip
    return train(
        chosen,
        path,
        force=True,
        say=lambda line: None,
        show=lambda state: show(state.step / state.steps),
    )


def _gpt(path: Path, settings: dict[str, Any], seed: int, show: Any, *, layerwise: bool) -> Run:
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    from joma._data.corpora import corpus
    from joma._measure.watch.watch import watch
    from joma._train.windows import streams, window

    text, length = (
        corpus(settings["data"], vocabulary=settings["vocabulary"], say=lambda line: None),
        35,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        sizes = {
            "vocab_size": text.size,
            "n_positions": length,
            "n_layer": settings["layers"],
            "n_embd": 64,
        }
        model = GPT2LMHeadModel(GPT2Config(**sizes, n_head=2, bos_token_id=None, eos_token_id=None))
        model.loss_type = "ForCausalLM"  # the default, of which it would warn
        optimiser = torch.optim.Adam(model.parameters(), lr=settings["lr"])
        data = streams(text.train, 10)
        gauges = ("entropy", *GAUGES)
        with watch(
            model, path, settings["every"], gauges, optimizer=optimiser, live=False, overwrite=True
        ) as watched:
            for step in range(settings["steps"]):
                tokens = torch.from_numpy(window(data, step, length)[0])
                loss = model(tokens, labels=tokens).loss
                optimiser.zero_grad()
                loss.backward()
                optimiser.step()
                watched.step(loss)
                show((step + 1) / settings["steps"])
    return Run(path)


def draw(run: Run) -> p.Chart:
    """The four gauges over training, one colour per model: means over its layers."""
    frame = run.frame()
    means = frame.groupby(["model", "gauge", "step"]).value.mean().reset_index()
    means = means.assign(model=means.model.map(MODELS))
    colour, step = p.by("model", order=list(MODELS.values())), p.x("step", "minibatch")
    panels = []
    for gauge, title in SHOWN.items():
        lines = p.lines(where(means, gauge=gauge), step, p.y("value", title, zero=False), colour)
        panels.append(p.panel(title, lines, size=(300, 170)))
    return p.column(p.row(*panels[:2], shared=True), p.row(*panels[2:], shared=True), shared=True)


def judge(run: Run) -> Judgement:
    """Check which premises hold for which model, by the thresholds of a watch."""
    frame = run.frame()
    models: dict[str, dict[str, Any]] = {}
    stationary: dict[str, bool | None] = {}
    for model, title in MODELS.items():
        measured = premises(where(frame, model=model))
        models[title] = {"premises": {}}
        for name, premise in measured.items():
            models[title]["premises"][name] = asdict(premise)
        if "gradients" in measured:
            stationary[model] = measured["gradients"].holds
    cosines = {}
    for model, holds in stationary.items():
        gradients = models[MODELS[model]]["premises"]["gradients"]
        cosines[model if holds is not None else f"{model} (noise)"] = gradients["value"]

    layerwise = stationary.get("layerwise")
    if run.info["config"]["settings"]["data"] == TOY:
        verdict = Verdict.INCONCLUSIVE
    elif all(stationary.get(model) for model in MODELS):
        verdict = Verdict.HOLDS
    elif layerwise:
        verdict = Verdict.UNDER
    elif layerwise is None or any(stationary.values()):
        verdict = Verdict.INCONCLUSIVE
    else:
        verdict = Verdict.FAILS
    return Judgement(
        verdict,
        {"models": models, "cosines": cosines},
        "{models:{key}: {premises:{sentence}}}",
        "cos of successive gradients: {cosines:{key} {value:.2f}}",
    )


CODE_SLICE = {
    "data": "zipf",
    "vocabulary": 500,
    "steps": 20,
    "every": 10,
    "lr": 1e-3,
    "layers": 2,
    "width": 50,
}
# Layer-wise training gives each layer its share of all steps: a shorter one differs from the start.
RECORD_SLICE = {"models": ["joint", "gpt"], "steps": 24}
EXHIBIT = Exhibit(
    id="assumptions",
    title="What JoMA assumes, measured",
    statement=(
        "Back-propagated gradients are stationary during most of training, and in layer-wise "
        "training (Assumption 1)."
    ),
    seconds=60,
    rule=RULE,
    paper="“stationary … during most”",
    would_decide=WOULD_DECIDE,
    revised=REVISED,
    experiment=Experiment(
        SETTINGS,
        run,
        draw,
        judge,
        slice_modules=("transformers",),
        code_slice=CODE_SLICE,
        record_slice=RECORD_SLICE,
    ),
    messages={
        Verdict.HOLDS: "Back-propagated gradients are stationary in all three models",
        Verdict.UNDER: (
            "Back-propagated gradients are stationary in layer-wise training, and not in all models"
        ),
        Verdict.FAILS: "Back-propagated gradients are not stationary, nor in layer-wise training",
        Verdict.INCONCLUSIVE: "are back-propagated gradients stationary?",
    },
)
