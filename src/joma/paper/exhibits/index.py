"""All exhibits: the paper's, in the order of the paper, and those that users register."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

from joma._runs import Run, RunWriter
from joma.paper.exhibits.base import PRESETS, Exhibit, Experiment, Judgement, Progress

if TYPE_CHECKING:
    from joma._show.plots import Chart

# fmt: off
_OURS = (
    Exhibit("folding", "Attention integrated out", seconds=5, statement=
      "A block without attention parameters follows the block with them (Theorem 1)."),
    Exhibit("fig2", "Figure 2: the first integral under softmax", seconds=3, statement=
      "ẑ from the first integral correlates highly with the true logits z; its two components do not."),
    Exhibit("saliency", "Saliency on real text", seconds=3, statement=
      "Δ = discriminancy × frequency covers more than distinct and common tokens (Section 3.1)."),
    Exhibit("fig3", "Figure 3: growth of the components", seconds=1, statement=
      "With linear activation some components of v₀ keep growing while the others saturate."),
    Exhibit("frozen", "Attention alone: the MLP frozen", seconds=15, statement=
      "With the MLP frozen, attention turns sparser: the joint dynamics is consistent with Scan & Snap (slides)."),
    Exhibit("fig4", "Figure 4: sparse, then dense", seconds=7, statement=
      "Salient components are learned first; attention entropy drops, then bounces back (Eqn. 6)."),
    Exhibit("contrast", "Linear against nonlinear", seconds=60, statement=
      "With nonlinear activations attention turns sparse, then dense; with linear ones it stays sparse (abstract)."),
    Exhibit("fig9", "Figure 9: the function G(y)", seconds=4, statement=
      "A line through the origin meets G(y) twice, and the flow has critical points where it does (Eqns. 57-59)."),
    Exhibit("fig5", "Figure 5: hierarchical data", seconds=5, statement=
      "Close tokens co-occur more; m–l and m′–l′ associate first, then their latents β–β′, while m–l′ stays slow."),
    Exhibit("hierarchy", "Hierarchies in trained Transformers", seconds=60, statement=
      "m associates with l and m′ with l′ before β with β′; hidden nodes come to represent y_β (Section 5)."),
    Exhibit("cdag", "Learning a hierarchy", seconds=15, statement=
      "Nodes near the output that learn a latent make the nodes below learn more basic ones (multi-layer appendix)."),
    Exhibit("fig6", "Figure 6: attention of a language model in training", seconds=130, statement=
      "Attention turns sparse, then dense again in the top layers of language models; bottom layers are suppressed."),
    Exhibit("fig7", "Figure 7: pretrained models over their checkpoints", seconds=110, statement=
      "The stable rank of the lower MLP drops and bounces in top layers and only drops in bottom ones."),
    Exhibit("fig8", "Figure 8: learning rates", seconds=190, statement=
      "The attention patterns that match the theory come with the lowest validation loss."),
    Exhibit("fig10", "Figure 10: pattern superposition", seconds=60, statement=
      "The same neuron in MLP hidden layers can be activated by multiple irrelevant combinations of tokens."),
    Exhibit("twoqueries", "Superposition constructed", seconds=20, statement=
      "A weight that holds the patterns of two queries matches both, if they are orthogonal (Appendix A.4, Eqn. 60)."),
    Exhibit("embeddings", "Embedding geometry", seconds=60, statement=
      "Embedding vectors are almost orthogonal, at different layers (assumption; cosine similarities in the slides)."),
    Exhibit("table1", "Table 1: latents and hidden nodes", seconds=35, statement=
      "Hidden nodes learn the latents of their layer: each latent has a node that correlates highly with it."),
    Exhibit("orthogonality", "Almost orthogonal embeddings", seconds=20, statement=
      "With |u_l·u_l′| ≤ ε, Theorem 1 has additional ε-related terms (Section 7)."),
    Exhibit("parameterised", "Attention through embeddings, embeddings that train", seconds=20, statement=
      "Ours: Theorem 1 with Z = U W_Q W_Kᵀ Uᵀ instead of free logits, and embeddings that train (open in Section 7)."),
    Exhibit("realtext", "Many queries on real text", seconds=20, statement=
      "Ours: the first integral, summed over queries, in a block trained by SGD on next-word prediction."),
    Exhibit("block", "A block with folded attention", seconds=60, statement=
      "Self-attention need not be updated explicitly: it is implicit in the lower MLP weights (Section 3)."),
    Exhibit("width", "Over-parameterisation", seconds=60, statement=
      "“Why we need over-parameterization?” (asked in the slides): a sweep over widths, residual on and off."),
    Exhibit("softmax", "Softmax: exact sums, and how good the first integral is", seconds=20, statement=
      "Ours: softmax conserves K + 1 sums exactly; early on, a centred velocity predicts z better than Eqn. 18."),
    Exhibit("assumptions", "What JoMA assumes, measured", seconds=60, statement=
      "Back-propagated gradients are stationary during most of training, and in layer-wise training (Assumption 1)."),
    Exhibit("optimisers", "The same task under different optimisers", seconds=15, statement=
      "Ours: the most salient token wins (Theorem 2) under the optimisers that people use, too."),
    Exhibit("foretold", "Where attention ends, foretold", seconds=25, statement=
      "Ours: final attention is known before training: exactly for exp attention, in order for softmax on real text."),
    Exhibit("clock", "The optimiser's clock", seconds=90, statement=
      "Ours: entropy, stable rank and loss are functions of τ = Σ lr; rates that are too large leave the curve."),
    Exhibit("sinks", "Sparse attention, or a sink?", seconds=60, statement=
      "Ours: heads of low attention entropy are parked on the first token, and spread beside it (Figures 6 and 7)."),
    Exhibit("lowrank", "Is the gradient of lower rank than the weight?", seconds=60, statement=
      "GaLore: the gradient of the lower MLP becomes low-rank before the weight does (from Theorem 2)."),
)
# fmt: on
EXHIBITS = {listed.id: listed for listed in _OURS}


def exhibit(
    id: str,
    title: str,
    statement: str,
    *,
    run: Callable[[RunWriter, dict[str, Any], int, Progress], None],
    draw: Callable[[Run], Chart],
    judge: Callable[[Run], Judgement],
    settings: Mapping[str, dict[str, Any]] | None = None,
    axes: Mapping[str, list[str]] | None = None,
    tables: Callable[[Run], dict[str, str]] | None = None,
    seconds: float = 60.0,
) -> Exhibit:
    """Register an exhibit of your own: `joma reproduce ID` makes it, and the page shows it.

    Arguments:
        id: an identifier, the name of its folder.
        title: for headings.
        statement: what is put to the test, in one line; the page counts it apart from the paper's statements.
        run: measures: ``run(writer, settings, seed, progress)`` writes rows by ``writer.write(step, {gauge: value},
            **labels)`` and says how far it is by ``progress(share, words)``.
        draw: an Altair chart, from nothing but the run folder.
        judge: the verdict, from nothing but the run folder.
        settings: preset ("default", "laptop", "paper") -> the settings that ``run`` is given; none by default.
        axes: the axes of gauges that are arrays: gauge -> names.
        tables: the texts of further files: name -> text.
        seconds: roughly what the quick preset takes; the longest is begun first.

    Returns:
        The exhibit. A package brings exhibits along by an entry point of the group ``joma.exhibits``.
    """
    if not id.isidentifier():
        raise ValueError(f"an exhibit's id must be an identifier such as 'fig3', got {id!r}")
    if missing := set(PRESETS) - set(settings or PRESETS):
        raise ValueError(
            f"exhibit {id!r} has no settings for the preset {', '.join(sorted(missing))}"
        )
    per_preset = dict(settings) if settings else {preset: {} for preset in PRESETS}
    exhibit = Exhibit(
        id, title, statement, seconds, Experiment(per_preset, run, draw, judge, axes or {}, tables)
    )
    known = EXHIBITS.get(id)
    if known is not None and (
        known.declared is None or known.declared.run.__module__ != run.__module__
    ):
        raise ValueError(f"there is an exhibit {id!r} already; choose another id")
    EXHIBITS[id] = exhibit
    return exhibit


def remove(id: str) -> None:
    """Forget an exhibit that was registered."""
    EXHIBITS.pop(id, None)


def exhibits() -> dict[str, Exhibit]:
    """All exhibits by id: joma's in the order of the paper, registered ones, and those that installed packages bring.

    Returns:
        Id -> exhibit, with its title, its statement and a rough cost.
    """
    for entry in entry_points(group="joma.exhibits"):
        if entry.name not in EXHIBITS:
            entry.load()
    return dict(EXHIBITS)


def get(ids: Iterable[str]) -> list[Exhibit]:
    """The exhibits with these ids; an unknown one is an error that names the nearest."""
    from joma.theory.setting import nearest

    table = exhibits()
    for id in (ids := list(dict.fromkeys(ids))):
        if id not in table:
            raise ValueError(nearest(id, table, "exhibit"))
    return [table[id] for id in ids]
