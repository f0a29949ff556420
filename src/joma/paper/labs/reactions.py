"""Chemical reactions for models that read them, in SMILES: made, since joma brings no data set of reactions along.

A reaction is one of ten named ones (an amide coupling, an esterification, a Suzuki coupling, …), whose two
partners carry a substituent each. The strings are correct, and like those that such models were trained on
in kind; in variety they are far poorer.

>>> reactions()[0], len(reactions())
('CC(=O)O.NC>>CC(=O)NC', 3300)
>>> split("CC(=O)Cl.[Na+]>>CCl")
['C', 'C', '(', '=', 'O', ')', 'Cl', '.', '[Na+]', '>>', 'C', 'Cl']
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

START = "[CLS]"
END = "[SEP]"
# An atom, a bond, a bracket or a ring per token, as the models of rxnfp and rxnmapper split SMILES.
_TOKEN = re.compile(
    r"\[[^\]]+]|Br?|Cl?|N|O|S|P|F|I|b|c|n|o|s|p|\(|\)|\.|=|#|-|\+|\\|/|:|~|@|\?|>>?|\*|\$|%[0-9]{2}|[0-9]"
)
# Substituents that are written before the atom they are bound to, and behind it.
_BEFORE = (
    "C",
    "CC",
    "CCC",
    "CC(C)",
    "CC(C)(C)",
    "C1CCCCC1",
    "C1CCCC1",
    "COCC",
    "FC(F)(F)C",
    "c1ccccc1C",
)
_ARYL_BEFORE = (
    "c1ccccc1",
    "Cc1ccc(cc1)",
    "COc1ccc(cc1)",
    "Clc1ccc(cc1)",
    "Fc1ccc(cc1)",
    "N#Cc1ccc(cc1)",
    "FC(F)(F)c1ccc(cc1)",
    "O=[N+]([O-])c1ccc(cc1)",
    "c1ccc2ccccc2c1",
    "c1ccsc1",
)
_BEHIND = (
    "C",
    "CC",
    "CCC",
    "C(C)C",
    "CC(C)C",
    "C1CCCCC1",
    "CCOC",
    "CCN(C)C",
    "Cc1ccccc1",
    "CCc1ccccc1",
)
_ARYL_BEHIND = (
    "c1ccccc1",
    "c1ccc(C)cc1",
    "c1ccc(OC)cc1",
    "c1ccc(Cl)cc1",
    "c1ccc(F)cc1",
    "c1ccc(C#N)cc1",
    "c1cccnc1",
    "c1ccncc1",
    "c1cccc(Br)c1",
    "c1ccc(C(F)(F)F)cc1",
)
_ANY = ("any", "any")
# The reaction with places for its two substituents, and which substituents are allowed.
_NAMED = (
    ("{a}C(=O)O.N{b}>>{a}C(=O)N{b}", _ANY),  # amide coupling
    ("{a}C(=O)Cl.N{b}>>{a}C(=O)N{b}", _ANY),  # amide from an acid chloride
    ("{a}C(=O)O.O{b}>>{a}C(=O)O{b}", _ANY),  # esterification
    ("{a}C=O.N{b}>>{a}CN{b}", _ANY),  # reductive amination
    ("{a}S(=O)(=O)Cl.N{b}>>{a}S(=O)(=O)N{b}", _ANY),  # sulfonamide
    ("{a}N=C=O.N{b}>>{a}NC(=O)N{b}", _ANY),  # urea from an isocyanate
    ("{a}C(=O)O{b}.[Na+].[OH-]>>{a}C(=O)O", _ANY),  # hydrolysis of an ester
    ("{a}O.Br{b}>>{a}O{b}", ("any", "alkyl")),  # Williamson's ether
    ("{a}NC(=O)OC(C)(C)C.Br{b}>>{a}N{b}", ("any", "alkyl")),  # alkylation, deprotection
    ("{a}B(O)O.Br{b}>>{a}-{b}", ("aryl", "aryl")),  # Suzuki coupling
)


@functools.cache
def reactions() -> tuple[str, ...]:
    """Return all reactions, in SMILES."""
    before = {"any": _BEFORE + _ARYL_BEFORE, "aryl": _ARYL_BEFORE}
    behind = {"any": _BEHIND + _ARYL_BEHIND, "alkyl": _BEHIND, "aryl": _ARYL_BEHIND}
    made = []
    for pattern, (first, second) in _NAMED:
        for a in before[first]:
            for b in behind[second]:
                made.append(pattern.format(a=a, b=b))
    return tuple(made)


def split(reaction: str) -> list[str]:
    """Return the tokens of a reaction."""
    tokens = _TOKEN.findall(reaction)
    if "".join(tokens) != reaction:
        raise ValueError(f"{reaction!r} has characters that are not SMILES")
    return tokens


def used_tokens() -> list[str]:
    """Return the tokens of all reactions, with those of start and end first."""
    seen = {token for reaction in reactions() for token in split(reaction)}
    return [START, END, *sorted(seen)]


def reaction_ids(
    vocabulary: Sequence[str], length: int, count: int, seed: int
) -> NDArray[np.int64]:
    """Return token ids (count, length) of reactions that have exactly this length with start and end.

    Arguments:
        vocabulary: the tokens of the model, by number.
        length: tokens per reaction.
        count: how many different reactions.
        seed: which ones.
    """
    number = {token: n for n, token in enumerate(vocabulary)}
    rows = []
    for reaction in reactions():
        tokens = [START, *split(reaction), END]
        if len(tokens) == length:
            missing = [token for token in tokens if token not in number]
            if missing:
                raise ValueError(
                    f"the vocabulary has no token {missing[0]!r}: give that of a model of reactions"
                )
            rows.append([number[token] for token in tokens])
    if len(rows) < count:
        raise ValueError(
            f"{len(rows)} of the reactions have {length} tokens, and {count} are asked for: choose "
            "another length, or fewer reactions"
        )
    chosen = np.random.default_rng(seed).permutation(len(rows))[:count]
    return np.array(rows, dtype=np.int64)[chosen]
