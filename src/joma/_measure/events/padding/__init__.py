"""Decide which queries of an attention are padding.

rules.py           the rules in their order: the user, the mask and an argument, the mask alone, …
stated.py          the user's ``padding=``
arguments.py       arguments of the running modules that are masks, and how they may be read
visible_keys.py    which keys the queries of an attention see
token_states.py    from the pattern of visible keys to real tokens and padding
patterns.py        properties of such patterns: causal, windowed, regular, …
answer.py          the answer, and its evidence
"""

from joma._measure.events.padding.answer import PaddingAnswer as PaddingAnswer
from joma._measure.events.padding.rules import find_padding as find_padding
from joma._measure.events.padding.rules import real_tokens as real_tokens
from joma._measure.events.padding.stated import Padding as Padding
from joma._measure.events.padding.stated import StatedPadding as StatedPadding
