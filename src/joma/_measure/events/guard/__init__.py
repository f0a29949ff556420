"""Let an attention become an event only if its module computed it.

guard.py        when an attention is examined, what is decided, and what is remembered
candidate.py    an attention of a module call, until it is emitted or refused
comparison.py   what was compared, to which error, and the error that rounding explains
weights.py      eager attention: are the weights that meet the values the softmax of the scores?
output.py       fused attention: is the output softmax(s)·V?
mixtures.py     several attentions of one module that make no sense one by one
rejected.py     products and softmaxes that are no attention, and why
"""

from joma._measure.events.guard.candidate import AttentionCandidate as AttentionCandidate
from joma._measure.events.guard.comparison import FUNCTION_CHECK as FUNCTION_CHECK
from joma._measure.events.guard.guard import Guard as Guard
from joma._measure.events.guard.output import check_output as check_output
