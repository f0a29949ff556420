"""MkDocs hooks: formulas become MathML when the site is built, and API pages list exactly what is public.

Browsers draw MathML without a script, so that the site needs no network.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterator
from functools import cache
from typing import Any

import griffe

import joma
from joma._show.pages.typeset import formula

FORMULA = re.compile(r'<(span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</\1>', flags=re.S)
API = re.compile(r"^<!-- api ([\w.]+)(?:: ([\w ]+))? -->$", flags=re.M)


@cache
def tree() -> Any:
    """The package as griffe reads it: nothing is imported, so that a build takes no time for torch."""
    return griffe.load("joma", search_paths=["src"], resolve_aliases=True)


def public(module: str) -> Iterator[tuple[str, Any]]:
    """The functions and classes that ``__all__`` of a module lists, with the names users write."""
    package = tree()[module.partition(".")[2]] if "." in module else tree()
    for name in map(str, package.exports):
        # names of the lazily loaded joma itself are in its table
        home = joma._API.get(name) if module == "joma" else None
        value = tree()[f"{home}.{name}".partition(".")[2]] if home else package.members.get(name)
        if value is not None and value.is_module:  # a function with the name of its module
            value = value.members.get(name)
        if value is not None and (value.is_class or value.is_function):
            yield f"{module}.{name}", value


def chosen(module: str, names: str | None) -> Iterator[tuple[str, Any]]:
    """All that is public in a module, or the names given, in their order."""
    if names is None:
        yield from public(module)
        return
    values = dict(public(module))
    for name in names.split():
        full = f"{module}.{name}"
        if full not in values:
            raise ValueError(f"{full} is not public: a page of the reference names it")
        yield full, values[full]


def reference(module: str, names: str | None = None) -> str:
    """A table of what a module has, or of the names given, then a mkdocstrings directive for each."""
    table, details = ["| name | |", "|---|---|"], []
    for full, value in chosen(module, names):
        target = value.canonical_path
        first = value.docstring.value.splitlines()[0].replace("|", r"\|").replace("``", "`")
        table.append(f"| [`{full.rpartition('.')[2]}`][{target}] | {first} |")
        details += [
            "",
            f"::: {target}",
            "    options:",
            f"      heading: {full}",
            f"      toc_label: {full}",
        ]
    return "\n".join(table + details)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Called by MkDocs with the source of each page."""
    return API.sub(lambda m: reference(m[1], m[2]), markdown)


def on_page_content(content: str, **_: Any) -> str:
    """Called by MkDocs with the HTML of each page."""
    return FORMULA.sub(
        lambda m: mathml(html.unescape(m[3]).strip(), "block" if m[2] == "[" else "inline"), content
    )


def mathml(latex: str, display: str) -> str:
    """One formula, as in the report; a logarithm keeps its distance, which the converter forgets."""
    drawn = formula(re.sub(r"\\ln(?![a-z(]) *", r"\\,\\ln\\,", latex), block=display == "block")
    if not drawn.startswith("<math"):
        raise ValueError(f"this formula cannot be typeset: {latex}")
    return drawn
