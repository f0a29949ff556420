"""The page of a superposition: patterns of the chosen neurons, their tests and contexts; and its JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from joma._inspect.group import Context
from joma._inspect.superposition import RULES
from joma._inspect.windows import short_name

if TYPE_CHECKING:
    from joma._inspect.patterns import NeuronPattern
    from joma._inspect.superposition import Superposition

SHOWN = 4  # contexts of a pattern that are open to view; the others unfold


def as_json(superposition: Superposition, chosen: Sequence[tuple[int, int]]) -> dict[str, Any]:
    """The same as the page, for programs."""
    return {
        **superposition.info,
        "rules": RULES,
        "neurons": [
            {
                "layer": layer,
                "neuron": neuron,
                "superposed": superposition.superposed(layer, neuron),
                "patterns": [
                    _pattern_json(superposition, pattern)
                    for pattern in superposition.patterns(layer, neuron)
                ],
                "others": [
                    _context_json(superposition, c) for c in _others(superposition, layer, neuron)
                ],
            }
            for layer, neuron in chosen
        ],
    }


def _pattern_json(superposition: Superposition, pattern: NeuronPattern) -> dict[str, Any]:
    held_out = pattern.held_out
    return {
        "words": pattern.words,
        "p": pattern.p,
        "places": pattern.places,
        "expected": pattern.expected,
        "held_out": None
        if held_out is None
        else [_context_json(superposition, c) for c in held_out],
        "replication": pattern.replication,
        "masking": None if pattern.masking is None else asdict(pattern.masking),
        "passes": pattern.passes,
        "contexts": [_context_json(superposition, c) for c in pattern.contexts],
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
    grouped = {
        c.position for pattern in superposition.patterns(layer, neuron) for c in pattern.contexts
    }
    return [c for c in superposition.contexts(layer, neuron) if c.position not in grouped]


def page(superposition: Superposition, chosen: Sequence[tuple[int, int]]) -> str:
    """One self-contained HTML page; Jinja escapes all text of the corpus."""
    from jinja2 import Environment, PackageLoader

    environment = Environment(
        loader=PackageLoader("joma._inspect"), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    return environment.get_template("superposition.html").render(
        info=superposition.info, model=short_name(superposition.info["model"]), SHOWN=SHOWN, RULES=RULES,
        layers=superposition.counts().to_dict("records"), controls=superposition.info.get("controls", []),
        compared=superposition.alike is not None,
        neurons=[_neuron(superposition, layer, neuron) for layer, neuron in chosen],
    )  # fmt: skip


def _neuron(superposition: Superposition, layer: int, neuron: int) -> dict[str, Any]:
    strongest = max((c.activation for c in superposition.contexts(layer, neuron)), default=0.0)
    patterns = superposition.patterns(layer, neuron)
    shown = [
        {
            "words": [_visible(word) for word in p.words],
            "tests": list(tests(p)),
            "passes": p.passes,
            "contexts": [_context(superposition, c, strongest) for c in p.contexts],
            "held_out": [_context(superposition, c, strongest) for c in p.held_out or []],
        }
        for p in patterns
    ]
    others = [_context(superposition, c, strongest) for c in _others(superposition, layer, neuron)]
    count = len(patterns)
    title = {0: "no pattern", 1: "1 pattern"}.get(count, f"{count} patterns")
    if superposition.superposed(layer, neuron):
        title = (
            f"superposed, {sum(p.passes for p in patterns)} unrelated patterns that pass all tests"
        )
    return {"layer": layer, "neuron": neuron, "strongest": f"{strongest:.3g}", "title": title, "patterns": shown,
            "others": others}  # fmt: skip


def tests(pattern: NeuronPattern) -> Iterator[tuple[bool | None, str]]:
    """Of each test: was it passed (None: not tried), and the numbers."""
    count = len(pattern.contexts)
    yield (
        True,
        (
            f"{count} contexts at {pattern.places} places, {pattern.expected:.1%} of the layer's (p = {pattern.p:.1g})"
        ),
    )
    if pattern.replication is None or pattern.held_out is None:
        yield None, "no held-out text"
    else:
        yield (
            pattern.replicated,
            f"{len(pattern.held_out)} on held-out text (p = {pattern.replication:.1g})",
        )
    if (masking := pattern.masking) is None:
        yield None, "masking not tried"
        return
    yield (
        masking.lowers,
        (
            f"masking its words leaves {masking.left:.0%} of the activation, masking others {masking.control:.0%}; "
            f"lower in {masking.lower} of {masking.contexts}"
        ),
    )
    if masking.pattern is None or masking.larger is None or masking.query is None:
        yield None, "the MLP's lower matrix was not found"
    else:
        yield (
            masking.held,
            (
                f"cos(w, pattern) = {masking.pattern:.2f}, larger in {masking.larger:.1%} of the layer's neurons; "
                f"cos(w, query) = {masking.query:.2f}"
            ),
        )


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
