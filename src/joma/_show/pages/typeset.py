"""Text with LaTeX in $...$ as HTML with MathML, which browsers show by themselves; Markdown tables as HTML."""

from __future__ import annotations

import re
import unicodedata
from functools import lru_cache
from html import escape

from markupsafe import Markup

_FORMULA = re.compile(r"\$\$(.+?)\$\$|\$(.+?)\$", re.S)
# in plain text: v_k, x^{2}, ‖v‖^2; one letter or a bracket before it, so that attention_lr stays what it is
_SCRIPT = re.compile(
    r"((?<![A-Za-z_`.])(?:max|min|sup|inf|[^\W\d_][\u0300-\u036f]?)|[)\]‖])(_|\^)"
    r"(\{[^{}]*\}|[−-]?\d+\.\d+|[−-]?[A-Za-z0-9Α-ω±]{1,3}(?![A-Za-z0-9_])[′*]?)"
)
_TAGS = {"_": "sub", "^": "sup"}
_OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]*")  # of a command: no line ends within it
# macros that the converter does not know
_MACROS = {r"\textstyle": "", r"\arg": r"\operatorname{arg}", r"\nparallel": "∦"}
_MACRO = re.compile(r"\\(?:textstyle|arg|nparallel)(?![A-Za-z])\s?")


def typeset(text: str) -> Markup:
    """Return ``text`` as HTML: formulas between dollars typeset, code between backticks, sub- and superscripts."""
    parts: list[str] = []
    end = 0
    for match in _FORMULA.finditer(text):
        parts.append(_prose(text[end : match.start()]))
        parts.append(formula(match[1] or match[2], block=match[1] is not None))
        end = match.end()
    parts.append(_prose(text[end:]))
    return Markup("".join(parts))


# browsers know the letters of these alphabets, and no longer the attribute that asks for them
_VARIANT = re.compile(
    r'<(m[in]) mathvariant="(double-struck|bold|bold-italic|script)">(\w)</m[in]>'
)


def _letter(match: re.Match[str]) -> str:
    tag, variant, letter = match.groups()
    kind = "SMALL"
    if letter.isdigit():
        kind = "DIGIT"
    elif letter.isupper():
        kind = "CAPITAL"
    spelt = unicodedata.name(letter).split()[-1]
    alphabet = variant.replace("bold-italic", "bold italic").upper()
    # ℝ is older than 𝔼 and has the shorter name.
    for name in (f"MATHEMATICAL {alphabet} {kind} {spelt}", f"{alphabet} {kind} {spelt}"):
        try:
            return f"<{tag}>{unicodedata.lookup(name)}</{tag}>"
        except KeyError:
            continue
    return match[0]


@lru_cache(maxsize=1024)
def formula(latex: str, *, block: bool = False) -> str:
    """Return a formula as MathML; its source as code if the converter does not know it."""
    from latex2mathml.converter import convert

    display = "inline"
    if block:
        display = "block"
    known_macros = _MACRO.sub(lambda match: _MACROS[match[0].rstrip()], latex)
    try:
        mathml = convert(known_macros, display=display)
    except Exception:  # the converter has an exception class for each way to fail, and IndexError
        return f"<code>{escape(latex)}</code>"
    mathml = re.sub(r"&(?![#\w]+;)", "&amp;", mathml)
    mathml = _VARIANT.sub(_letter, mathml)
    if "\\" in re.sub(r"<[^>]*>", "", mathml):  # the converter leaves an unknown macro as it stands
        return f"<code>{escape(latex)}</code>"
    return mathml.replace("<math ", f'<math aria-label="{escape(latex)}" ', 1)


def _prose(text: str) -> str:
    parts = re.split(r"`([^`]+)`", escape(text, quote=False))
    parts[1::2] = (f"<code>{code}</code>" for code in parts[1::2])
    parts[::2] = (_OPTION.sub(r"<code>\g<0></code>", _scripts(part)) for part in parts[::2])
    return "".join(parts)


def _scripts(text: str) -> str:
    def script(match: re.Match[str]) -> str:
        tag = _TAGS[match[2]]
        return f"{match[1]}<{tag}>{_scripts(match[3].strip('{}'))}</{tag}>"

    return _SCRIPT.sub(script, text)


def markdown_table(text: str) -> Markup:
    """Return a Markdown text of paragraphs and pipe tables as HTML."""
    blocks: list[str] = []
    for block in re.split(r"\n\s*\n", text.strip()):
        lines = [line.strip() for line in block.splitlines()]
        if _is_table(lines):
            blocks.append(_table(lines))
        else:
            blocks.append(f'<p class="meta">{_prose(" ".join(lines))}</p>')
    return Markup("\n".join(blocks))


def _is_table(lines: list[str]) -> bool:
    """True for a row of headings, one of rules, and one of cells at least."""
    if len(lines) < 3 or not all(line.startswith("|") for line in lines):
        return False
    return set(lines[1]) <= set("|-: ")


def _table(lines: list[str]) -> str:
    """The lines of a pipe table as HTML; columns with a colon at the end of their rule hold numbers."""
    head, rules, *body = [_cells(line) for line in lines]
    kinds = [""] * len(rules)
    for place, rule in enumerate(rules):
        if rule.endswith(":"):
            kinds[place] = ' class="n"'
    heading = _row("th", [f' scope="col"{kind}' for kind in kinds], head)
    rows = "".join(_row("td", kinds, cells) for cells in body)
    table = f"<table><thead>{heading}</thead><tbody>{rows}</tbody></table>"
    return f'<div class="scroll" tabindex="0" role="region" aria-label="Table">{table}</div>'


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


def _row(tag: str, attributes: list[str], cells: list[str]) -> str:
    row = "<tr>"
    for attribute, cell in zip(attributes, cells, strict=False):
        row += f"<{tag}{attribute}>{_prose(cell)}</{tag}>"
    return f"{row}</tr>"
