"""Which corpora and packaged models are on this machine, without asking the network."""

from __future__ import annotations

import os

from joma._data.corpora import WIKITEXT, local_wikitext
from joma._data.packaged import MODELS, packaged


def is_present(name: str) -> bool:
    """True if a corpus or a packaged model can be read here; "" needs nothing.

    >>> is_present(""), is_present("zipf")
    (True, True)
    """
    if name in WIKITEXT:
        return local_wikitext(name, os.environ.get("JOMA_DATA")) is not None
    if name in MODELS:
        try:
            return packaged(name) is not None
        except ValueError:
            return False
    return True
