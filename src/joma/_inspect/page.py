"""The page of a superposition: patterns and contexts of the chosen neurons, attended tokens in bold; and its JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from joma._inspect.group import FIRES, HALF, MOST, SUPPORT, Context
from joma._inspect.windows import short_name

if TYPE_CHECKING:
    from joma._inspect.superposition import Superposition

SHOWN = 4  # contexts of a pattern that are open to view; the others unfold


def as_json(superposition: Superposition, chosen: Sequence[tuple[int, int]]) -> dict[str, Any]:
    """The same as the page, for programs."""
    return {
        **superposition.info,
        "rules": {"fires": FIRES, "share_of_attention": HALF, "most_attended": MOST, "support": SUPPORT},
        "neurons": [
            {
                "layer": layer,
                "neuron": neuron,
                "patterns": [
                    {"words": pattern.words, "contexts": [_context_json(superposition, c) for c in pattern.contexts]}
                    for pattern in superposition.patterns(layer, neuron)
                ],
                "others": [_context_json(superposition, c) for c in _others(superposition, layer, neuron)],
            }
            for layer, neuron in chosen
        ],
    }


def _context_json(superposition: Superposition, context: Context) -> dict[str, Any]:
    return {
        "activation": context.activation,
        "position": context.position,
        "query": context.query,
        "tokens": [superposition.word(token) for token in context.tokens.tolist()],
        "attended": context.attended,
        "mass": [round(x, 4) for x in context.mass.tolist()],
        "along": [round(x, 4) for x in context.along.tolist()],
    }


def _others(superposition: Superposition, layer: int, neuron: int) -> list[Context]:
    """Contexts that fire the neuron and belong to no pattern: alone, or with spread attention."""
    grouped = {c.position for pattern in superposition.patterns(layer, neuron) for c in pattern.contexts}
    return [c for c in superposition.contexts(layer, neuron) if c.position not in grouped]


def page(superposition: Superposition, chosen: Sequence[tuple[int, int]]) -> str:
    """One self-contained HTML page; Jinja escapes all text of the corpus."""
    from jinja2 import Environment, PackageLoader

    counts = superposition.frame().patterns.value_counts().sort_index(ascending=False).to_dict()
    environment = Environment(
        loader=PackageLoader("joma._inspect"), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    return environment.get_template("superposition.html").render(
        info=superposition.info, model=short_name(superposition.info["model"]), counts=counts, SHOWN=SHOWN,
        FIRES=FIRES, HALF=HALF, MOST=MOST, SUPPORT=SUPPORT,
        neurons=[_neuron(superposition, layer, neuron) for layer, neuron in chosen],
    )  # fmt: skip


def _neuron(superposition: Superposition, layer: int, neuron: int) -> dict[str, Any]:
    strongest = max((c.activation for c in superposition.contexts(layer, neuron)), default=0.0)
    patterns = [
        {
            "words": [_visible(word) for word in p.words],
            "contexts": [_context(superposition, c, strongest) for c in p.contexts],
        }
        for p in superposition.patterns(layer, neuron)
    ]
    others = [_context(superposition, c, strongest) for c in _others(superposition, layer, neuron)]
    return {
        "layer": layer,
        "neuron": neuron,
        "strongest": f"{strongest:.3g}",
        "patterns": patterns,
        "others": others,
    }


def _context(superposition: Superposition, context: Context, strongest: float) -> dict[str, Any]:
    """The window up to a few tokens after the query; shade by activation, bold for what is attended to."""
    last = min(len(context.tokens), context.query + 6)
    first = max(0, min([context.query - 24, *(place - 4 for place in context.attended)]))
    tokens = []
    for place in range(first, last):
        shade = max(0.0, float(context.along[place])) / strongest if strongest else 0.0
        tokens.append(
            {
                "text": _visible(superposition.word(int(context.tokens[place])), inner=True),
                "tag": "b" if place in context.attended else "span",
                "query": place == context.query,
                "shade": f"{0.75 * min(1.0, shade):.2f}" if shade >= 0.05 else "",
                "title": f"activation {context.along[place]:.3g}, attention {context.mass[place]:.1%}",
            }
        )
    activation, after = f"{context.activation:.3g}", last < len(context.tokens)
    return {"activation": activation, "before": first > 0, "tokens": tokens, "after": after}


def _visible(text: str, inner: bool = False) -> str:
    """Line ends and tabs as signs, and outside of running text spaces too."""
    text = text.replace("\r", "␍").replace("\n", "⏎").replace("\t", "⇥")
    return text if inner else text.replace(" ", "␣") or "∅"
