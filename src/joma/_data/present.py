"""Which corpora and packaged models are on this machine, without asking the network."""

from __future__ import annotations

import os

from joma._data.corpora import WIKITEXT, local_wikitext
from joma._data.packaged import MODELS, verified_models


def is_present(names: str) -> bool:
    """True if corpora and packaged models can be read here; "" needs nothing.

    A model whose weights are not those that joma knows is not present.

    Arguments:
        names: of corpora and models, separated by spaces.

    >>> is_present(""), is_present("zipf")
    (True, True)
    """
    return all(_is_one_present(name) for name in names.split())


def _is_one_present(name: str) -> bool:
    if name in WIKITEXT:
        return local_wikitext(name, os.environ.get("JOMA_DATA")) is not None
    if name.partition("/")[0] in MODELS:
        try:
            return bool(verified_models(name))
        except ValueError:
            return False
    return True
