"""Names from files, tensors and repositories, made safe to print, store and draw."""

from __future__ import annotations


def harmless(text: str) -> str:
    r"""Return the text with escapes instead of control characters, invalid UTF-8 and bidirectional marks.

    Terminals obey escape sequences, XML has no control characters, and files have no lone surrogates.

    >>> harmless("layer\x1b[2J")
    'layer\\x1b[2J'
    >>> harmless("naïve \udcff")
    'naïve \\udcff'
    """
    if text.isprintable():
        return text
    printable = ""
    for character in text:
        if character.isprintable():
            printable += character
        else:
            printable += repr(character)[1:-1]
    return printable
