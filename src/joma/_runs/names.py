"""Names that come from elsewhere (files, tensors, repositories), made fit to be printed, stored and drawn."""

from __future__ import annotations


def harmless(text: str) -> str:
    r"""The text with what is not printable spelt out: control characters, bytes that are no UTF-8, bidirectional marks.

    A terminal obeys escape sequences, XML has no control characters, and JSON and files have no half surrogates.

    >>> harmless("layer\x1b[2J")
    'layer\\x1b[2J'
    >>> harmless("naïve \udcff")
    'naïve \\udcff'
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
