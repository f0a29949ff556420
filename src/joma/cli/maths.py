"""Formulas in a terminal: LaTeX as Unicode, `$\\dot z=\\tfrac12 v_k^2$` as "ż = ½v_k²".

The formula is parsed by latex2mathml, as for the pages; what is here turns its tree into a line.
"""

from __future__ import annotations

import re
import unicodedata
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from xml.etree.ElementTree import Element

_SUPERSCRIPTS = str.maketrans("0123456789+-−=()n′⊤T", "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁻⁼⁽⁾ⁿ′ᵀᵀ")
_ACCENTS = {"˙": "̇", "¨": "̈", "^": "̂", "~": "̃", "¯": "̄", "―": "̄", "→": "⃗", "\u203e": "̄"}
_FRACTIONS = {("1", "2"): "½", ("1", "4"): "¼", ("3", "4"): "¾", ("1", "3"): "⅓"}
_SPACED = set("=<>≤≥≪≫≠≈∼→⇒⇔↦∈∉⊂⊥∝≡:≔±∧∨")  # relations stand between blanks
_BINARY = set("+−")  # these too, but for a sign


def plain_maths(text: str) -> str:
    """The text with all that is between dollars as Unicode.

    >>> plain_maths(r"With $c=z^2(0)-\\sum_kv_k^2(0)$ and $\\dot z=\\tfrac12\\sqrt{\\mu+1}$.")
    'With c = z²(0) − Σ_k v_k²(0) and ż = ½√(μ + 1).'
    """
    return re.sub(r"\$\$?(.+?)\$\$?", lambda found: _formula(found[1]), text, flags=re.S)


@cache
def _formula(latex: str) -> str:
    from xml.etree import ElementTree

    try:
        from latex2mathml.converter import convert
    except ImportError:  # of the extra `report`: without it formulas stay as they are written
        return latex
    try:
        tree = ElementTree.fromstring(convert(latex))
    except Exception:  # a formula that it does not know stays as it is
        return latex
    return re.sub(r" +", " ", _line(tree)).strip()


def _line(node: Element) -> str:
    kind, children = node.tag.rpartition("}")[2], list(node)
    parts = [_line(child) for child in children]
    if kind in ("mi", "mn", "mtext"):
        return _letters(node.text or "")
    if kind == "mo":
        return _letters(node.text or "").replace("-", "−").replace("∑", "Σ").replace("∏", "Π")
    if kind == "mspace":
        return " "
    if kind == "mfrac":
        return _fraction(*parts)
    if kind in ("msqrt", "mroot"):
        return f"√{_group(parts[0])}"
    if kind in ("msub", "munder"):
        return f"{parts[0]}{_script('_', parts[1])}"
    if kind in ("msup", "mover"):
        return _over(*parts)
    if kind in ("msubsup", "munderover"):
        return f"{parts[0]}{_script('_', parts[1])}{_raised(parts[2])}"
    if kind == "mtr":
        return " ".join(parts)
    return "; ".join(parts) if kind == "mtable" else _row(children, parts)


def _row(children: list[Element], parts: list[str]) -> str:
    line = ""
    for child, part in zip(children, parts, strict=True):
        is_sum = part[:1] in ("Σ", "Π", "∫") and child.tag.rpartition("}")[2] != "mo"
        before = line.rstrip()[-1:]
        if part in _SPACED or (
            part in _BINARY and before and before not in _SPACED | set("([{,/|")
        ):
            line = f"{line.rstrip()} {part} "
        elif part == ",":
            line += ", "
        elif is_sum:  # with its bounds
            line += f"{part} "
        else:  # a name of several letters is a function: "ln A"
            named = re.search(r"[a-z]{2,}$", line) and re.match(r"\w", part)
            line += f" {part}" if named else part
    return line


def _letters(text: str) -> str:
    """Letters of mathematical alphabets as plain ones: 𝔼 as E."""
    return "".join(
        unicodedata.normalize("NFKC", c) if 0x1D400 <= ord(c) <= 0x1D7FF else c for c in text
    )


def _group(text: str) -> str:
    """In parentheses, unless it is one thing."""
    return text if re.fullmatch(r"\w|[\w.]+|\w_\w|\w[̀-ͯ]", text) else f"({text.strip()})"


def _fraction(above: str, below: str) -> str:
    if (above, below) in _FRACTIONS:
        return _FRACTIONS[above, below]
    return f"{_group(above)}/{_group(below)}"


def _script(sign: str, text: str) -> str:
    text = text.strip()
    return f"{sign}{text}" if len(text) == 1 else f"{sign}{{{text}}}"


def _raised(text: str) -> str:
    raised = text.strip().translate(_SUPERSCRIPTS)
    known = set("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁼⁽⁾ⁿ′ᵀ")
    return raised if raised and set(raised) <= known else _script("^", text)


def _over(base: str, above: str) -> str:
    if above in _ACCENTS and len(base) == 1:
        return unicodedata.normalize("NFC", base + _ACCENTS[above])
    if above in ("′", "'", "*", "∗"):
        return f"{base}{above}".replace("'", "′")
    return f"{base}{_raised(above)}"
