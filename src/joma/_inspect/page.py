"""The page of a superposition: patterns and contexts of the chosen neurons, attended tokens in bold; and its JSON."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from joma._inspect.group import FIRES, HALF, MOST, SUPPORT, Context, Pattern
from joma._inspect.windows import short_name

if TYPE_CHECKING:
    from joma._inspect.superpose import Superposition

SHOWN = 4  # contexts of a pattern that are open to view; the others unfold
STYLE = """
:root { --ink: #1f2328; --soft: #57606a; --line: #d8dee4; --paper: #fff; --box: #f6f8fa; --link: #0550ae; --fire: 213 94 0; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6edf3; --soft: #9da7b3; --line: #30363d; --paper: #0d1117; --box: #161b22; --link: #79c0ff; --fire: 230 120 30; }
}
body { font: 16px/1.55 system-ui, sans-serif; color: var(--ink); background: var(--paper); margin: 0 auto; padding: 2rem 1rem; max-width: 62rem; }
h1 { font-size: 1.8rem; margin: 0 0 .3rem; overflow-wrap: anywhere; } h2 { font-size: 1.25rem; margin: 2.4rem 0 .2rem; } h3 { font-size: 1rem; margin: 1rem 0 .3rem; font-weight: 600; }
a { color: var(--link); } .soft, summary { color: var(--soft); } .soft { font-size: .92rem; } summary { cursor: pointer; }
.pattern { border-left: 3px solid rgb(var(--fire)); padding-left: .9rem; margin: 1rem 0 1.4rem; }
.words b { background: var(--box); border: 1px solid var(--line); border-radius: 4px; padding: 0 .3rem; font-family: ui-monospace, monospace; font-weight: 600; }
.context { font: 14px/1.7 ui-monospace, monospace; background: var(--box); border-radius: 6px; padding: .45rem .7rem; margin: .4rem 0; overflow-wrap: anywhere; white-space: pre-wrap; }
.context .value { float: right; color: var(--soft); padding-left: 1rem; }
.context b { font-weight: 800; border-bottom: 2px solid currentColor; } .context .query { outline: 2px solid var(--ink); border-radius: 3px; } .context i { color: var(--soft); font-style: normal; }
table { border-collapse: collapse; font-size: .92rem; } th, td { text-align: right; padding: .25rem .7rem; border-bottom: 1px solid var(--line); }
"""


def as_json(found: Superposition, chosen: Sequence[tuple[int, int]]) -> dict[str, Any]:
    """The same as the page, for programs."""
    return {
        **found.info,
        "rules": {"fires": FIRES, "share_of_attention": HALF, "most_attended": MOST, "support": SUPPORT},
        "neurons": [
            {
                "layer": layer,
                "neuron": neuron,
                "patterns": [
                    {"words": pattern.words, "contexts": [_context_json(found, c) for c in pattern.contexts]}
                    for pattern in found.patterns(layer, neuron)
                ],
                "others": [_context_json(found, c) for c in _others(found, layer, neuron)],
            }
            for layer, neuron in chosen
        ],
    }


def _context_json(found: Superposition, context: Context) -> dict[str, Any]:
    return {
        "activation": context.activation,
        "position": context.position,
        "query": context.query,
        "tokens": [found.word(token) for token in context.tokens.tolist()],
        "attended": context.attended,
        "mass": [round(x, 4) for x in context.mass.tolist()],
        "along": [round(x, 4) for x in context.along.tolist()],
    }


def _others(found: Superposition, layer: int, neuron: int) -> list[Context]:
    """Contexts that fire the neuron and belong to no pattern: alone, or with spread attention."""
    grouped = {c.position for pattern in found.patterns(layer, neuron) for c in pattern.contexts}
    return [c for c in found.contexts(layer, neuron) if c.position not in grouped]


def page(found: Superposition, chosen: Sequence[tuple[int, int]]) -> str:
    """One self-contained HTML page; all text of the corpus is escaped."""
    info, table = found.info, found.frame()
    counts = table.patterns.value_counts().sort_index(ascending=False)
    rows = "".join(f"<tr><td>{n}</td><td>{count:,}</td></tr>" for n, count in counts.items())
    title = f"Superposition in {escape(short_name(info['model']))}"
    layers = f"layer{'' if len(info['layers']) == 1 else 's'} {', '.join(map(str, info['layers']))}"
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title><style>{STYLE}</style></head><body>
<h1>{title}</h1>
<p class="soft">{info["tokens"]:,} tokens of {escape(str(info["data"]))} through {escape(str(info["model"]))}, {layers}:
{len(table):,} neurons, the {info["contexts"]} strongest contexts of each. Bold: what the query (framed) attends to.
Shade: the neuron's activation.</p>
<details><summary>How a pattern is told</summary><p class="soft">A context fires a neuron if it reaches {FIRES:g} of the
neuron's strongest activation. Attended are the fewest tokens that hold more than {HALF:g} of the attention (mean over heads) that is
neither on the window's first token nor on the query; where that takes more than {MOST} tokens, or more than a quarter of
those there are, attention is spread. Contexts that attend to a common word, directly or through others, are one group; a
group of {SUPPORT} or more is a pattern. Patterns of one neuron therefore share no attended word.</p></details>
<h2>Neurons by number of patterns</h2>
<table><thead><tr><th>patterns</th><th>neurons</th></tr></thead><tbody>{rows}</tbody></table>
{"".join(_neuron(found, layer, neuron) for layer, neuron in chosen)}
</body></html>
"""


def _neuron(found: Superposition, layer: int, neuron: int) -> str:
    groups, others = found.patterns(layer, neuron), _others(found, layer, neuron)
    strongest = max((c.activation for c in found.contexts(layer, neuron)), default=0.0)
    count = "no pattern" if not groups else "1 pattern" if len(groups) == 1 else f"{len(groups)} unrelated patterns"
    body = "".join(_pattern(found, n, group, strongest) for n, group in enumerate(groups))
    if others:
        name = f"{len(others)} more that {'belongs' if len(others) == 1 else 'belong'} to no pattern"
        body += _folded(name, [_context(found, c, strongest) for c in others])
    return f"""<section id="n{layer}-{neuron}"><h2>Layer {layer}, neuron {neuron}: {count}</h2>
<p class="soft">{escape(str(found.info["mlps"].get(layer, "")))}; strongest activation {strongest:.3g}</p>{body}</section>
"""


def _pattern(found: Superposition, n: int, pattern: Pattern, strongest: float) -> str:
    words = " ".join(f"<b>{_visible(word)}</b>" for word in pattern.words[:12])
    more = f" and {len(pattern.words) - 12} more" if len(pattern.words) > 12 else ""
    texts = [_context(found, c, strongest) for c in pattern.contexts]
    hidden = _folded(f"{len(texts) - SHOWN} more", texts[SHOWN:]) if len(texts) > SHOWN else ""
    letter = chr(ord("A") + n) if n < 26 else str(n + 1)
    return (
        f'<div class="pattern"><h3>Pattern {letter}: {len(texts)} contexts</h3><p class="words">attends to {words}{more}'
        f"</p>{''.join(texts[:SHOWN])}{hidden}</div>"
    )


def _folded(name: str, parts: list[str]) -> str:
    return f"<details><summary>{name}</summary>{''.join(parts)}</details>"


def _context(found: Superposition, context: Context, strongest: float) -> str:
    """The window up to a few tokens after the query; shade by activation, bold for what is attended to."""
    bold, last = set(context.attended), min(len(context.tokens), context.query + 6)
    first = max(0, min([context.query - 24, *(place - 4 for place in context.attended)]))
    parts = ["<i>… </i>"] if first else []
    for place in range(first, last):
        shade = max(0.0, float(context.along[place])) / strongest if strongest else 0.0
        text = _visible(found.word(int(context.tokens[place])), inner=True)
        style = f' style="background:rgb(var(--fire) / {0.75 * min(1.0, shade):.2f})"' if shade >= 0.05 else ""
        tag = "b" if place in bold else "span"
        kind = ' class="query"' if place == context.query else ""
        title = f' title="activation {context.along[place]:.3g}, attention {context.mass[place]:.1%}"'
        parts.append(f"<{tag}{kind}{style}{title}>{text}</{tag}>")
    if last < len(context.tokens):
        parts.append("<i> …</i>")
    return f'<p class="context"><span class="value">{context.activation:.3g}</span>{"".join(parts)}</p>'


def _visible(text: str, inner: bool = False) -> str:
    """Escaped; line ends and tabs shown as signs, and outside of running text spaces too."""
    text = escape(text).replace("\r", "␍").replace("\n", "⏎").replace("\t", "⇥")
    return text if inner else text.replace(" ", "␣") or "∅"
