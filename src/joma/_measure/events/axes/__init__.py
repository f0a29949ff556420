"""Decide which axes of an attention are samples, heads, queries and keys.

rules.py          the rules in their order: the user, values, sizes; and what is refused
values.py         evidence by values: queries that are found again in the output of a projection
rows.py           ways to read rows of queries
features.py       what scaling, normalisation and rotary positions leave of a row
slices.py         from the numbers of slices along an axis to its meaning
projections.py    the outputs that are searched, and in which order
sizes.py          evidence by sizes, where they leave one reading only
inputs.py         numbers of samples and tokens that a module was given
same_tokens.py    self-attention or cross-attention
layout.py         the answer: from any axes to (samples, heads, queries, …)
"""

from joma._measure.events.axes.inputs import attends_in_pieces as attends_in_pieces
from joma._measure.events.axes.inputs import possible_token_counts as possible_token_counts
from joma._measure.events.axes.layout import Axis as Axis
from joma._measure.events.axes.layout import Layout as Layout
from joma._measure.events.axes.projections import RecordedProjection as RecordedProjection
from joma._measure.events.axes.projections import record_projection as record_projection
from joma._measure.events.axes.rules import AxesQuestion as AxesQuestion
from joma._measure.events.axes.rules import decide_layout as decide_layout
from joma._measure.events.axes.rules import find_query_axis as find_query_axis
from joma._measure.events.axes.same_tokens import come_from_same_tokens as come_from_same_tokens
from joma._measure.events.axes.sizes import ORDERS as ORDERS
from joma._measure.events.axes.sizes import Heads as Heads
