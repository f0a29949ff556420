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
_OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]*")  # of a command: no line ends within it
# macros that the converter does not know
_MACROS = {r"\textstyle": "", r"\arg": r"\operatorname{arg}", r"\nparallel": "∦"}
_MACRO = re.compile(r"\\(?:textstyle|arg|nparallel)(?![A-Za-z])\s?")


def typeset(text: str) -> Markup:
    """HTML of ``text``: formulas between dollars typeset, code between backticks, sub- and superscripts elsewhere."""
    parts, end = [], 0
    for match in _FORMULA.finditer(text):
        parts += [
            _prose(text[end : match.start()]),
            formula(match[1] or match[2], block=match[1] is not None),
        ]
        end = match.end()
    return Markup("".join([*parts, _prose(text[end:])]))


# browsers know the letters of these alphabets, and no longer the attribute that asks for them
_VARIANT = re.compile(
    r'<(m[in]) mathvariant="(double-struck|bold|bold-italic|script)">(\w)</m[in]>'
)


def _letter(match: re.Match[str]) -> str:
    tag, variant, letter = match.groups()
    kind = "DIGIT" if letter.isdigit() else "CAPITAL" if letter.isupper() else "SMALL"
    spelt = unicodedata.name(letter).split()[-1]
    alphabet = variant.replace("bold-italic", "bold italic").upper()
    for name in (
        f"MATHEMATICAL {alphabet} {kind} {spelt}",
        f"{alphabet} {kind} {spelt}",
    ):  # ℝ is older than 𝔼
        try:
            return f"<{tag}>{unicodedata.lookup(name)}</{tag}>"
        except KeyError:
            continue
    return match[0]


@lru_cache(maxsize=1024)
def formula(latex: str, *, block: bool = False) -> str:
    """MathML of a formula; its source as code where the converter does not know it."""
    from latex2mathml.converter import convert

    try:
        mathml = convert(
            _MACRO.sub(lambda m: _MACROS[m[0].rstrip()], latex),
            display="block" if block else "inline",
        )
    except Exception:  # the converter has an exception class for each way to fail, and IndexError
        return f"<code>{escape(latex)}</code>"
    mathml = re.sub(r"&(?![#\w]+;)", "&amp;", mathml)
    mathml = _VARIANT.sub(_letter, mathml)
    if "\\" in re.sub(r"<[^>]*>", "", mathml):  # an unknown macro is left as it stands
        return f"<code>{escape(latex)}</code>"
    return mathml.replace("<math ", f'<math aria-label="{escape(latex)}" ', 1)


def _prose(text: str) -> str:
    parts = re.split(r"`([^`]+)`", escape(text, quote=False))
    parts[1::2] = (f"<code>{code}</code>" for code in parts[1::2])
    parts[::2] = (_OPTION.sub(r"<code>\g<0></code>", _scripts(part)) for part in parts[::2])
    return "".join(parts)


def _scripts(text: str) -> str:
    def script(match: re.Match[str]) -> str:
        tag = "sub" if match[2] == "_" else "sup"
        return f"{match[1]}<{tag}>{_scripts(match[3].strip('{}'))}</{tag}>"

    return _SCRIPT.sub(script, text)


def markdown_table(text: str) -> Markup:
    """A Markdown text of paragraphs and pipe tables as HTML."""
    blocks = []
    for block in re.split(r"\n\s*\n", text.strip()):
        lines = [line.strip() for line in block.splitlines()]
        if (
            len(lines) > 2
            and all(line.startswith("|") for line in lines)
            and set(lines[1]) <= set("|-: ")
        ):
            head, rules, *body = (
                [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines
            )
            kinds = [' class="n"' if rule.endswith(":") else "" for rule in rules]
            row = "".join(
                f'<th scope="col"{k}>{_prose(c)}</th>' for c, k in zip(head, kinds, strict=False)
            )
            rows = "".join(
                "<tr>"
                + "".join(f"<td{k}>{_prose(c)}</td>" for c, k in zip(cells, kinds, strict=False))
                + "</tr>"
                for cells in body
            )
            table = f"<table><thead><tr>{row}</tr></thead><tbody>{rows}</tbody></table>"
            blocks.append(
                f'<div class="scroll" tabindex="0" role="region" aria-label="Table">{table}</div>'
            )
        else:
            blocks.append(f'<p class="meta">{_prose(" ".join(lines))}</p>')
    return Markup("\n".join(blocks))
