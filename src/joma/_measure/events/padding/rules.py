"""Decide which queries are padding: rules in their order, the first answer wins.

1. The user's ``padding=`` is followed.
2. A cross-attention has the queries of the self-attention before it in the same block; else an
   argument of a module around it is believed.
3. A self-attention has two witnesses: the mask that it applies (`token_states`), and an argument
   that claims to be a mask (`arguments`). An argument may be 1 at real tokens, True at padding, or
   additive: the reading is taken that the mask confirms. If no reading is confirmed, and the
   argument is not about other tokens, the witnesses contradict each other, and the attention is
   refused.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from joma._measure.events.events import DotProduct, Scores
from joma._measure.events.padding.answer import (
    NO_PADDING,
    PaddingAnswer,
    PaddingEvidence,
    TokenGrid,
    answer_from_rows,
)
from joma._measure.events.padding.arguments import (
    MaskArgument,
    arguments_like_masks,
    find_mask_argument,
    is_about_other_tokens,
    names_padding,
    readings_of,
)
from joma._measure.events.padding.token_states import DOUBTFUL, PADDING, REAL
from joma._measure.events.padding.visible_keys import states_by_mask, visible_keys
from joma._measure.events.reasons import Reason, Refusal

if TYPE_CHECKING:
    from joma._measure.events.events import AttentionEvent, Call
    from joma._measure.events.padding.stated import StatedPadding

# Attention of real queries on padding up to which padding counts as hidden. A mask of −100 leaves
# about e⁻¹⁰⁰ of it; without a mask, one of T keys gets about 1/T.
LEAK_LIMIT = 1e-3
_MOST_SAMPLES = 4  # samples with padding whose attention is looked at
_FEW_QUERIES = 8  # real queries of each that are looked at


@dataclass(frozen=True, eq=False)
class PaddingQuestion:
    """A self-attention, and its two witnesses.

    Attributes:
        event: the attention.
        states: states of tokens (B or 1, T) by its mask, of `token_states`; None without evidence.
        argument: an argument that claims to say which tokens are padding; None if there is none.
    """

    event: AttentionEvent
    states: Tensor | None
    argument: MaskArgument | None

    @property
    def hides_padding(self) -> bool:
        """True if the mask shows padding."""
        return self.states is not None and bool((self.states == PADDING).any())

    @property
    def grid(self) -> TokenGrid:
        """The queries."""
        return _grid_of(self.event)


def real_tokens(
    calls: tuple[Call, ...],
    stated: StatedPadding | None,
    samples: int,
    tokens: int,
    device: torch.device,
) -> Tensor | None:
    """Return True (B or 1, 1, T) at real tokens of states that do not attend; None if all are."""
    grid = TokenGrid(samples, tokens, device)
    if stated is not None:
        answer = stated.answer(calls, grid)
        if answer is not None:
            return answer.is_real
    for call in reversed(calls):
        if (samples, tokens) in call.real:
            return call.real[samples, tokens]
    argument = find_mask_argument(calls, True, grid)
    if argument is None:
        return None
    return argument.readings[0].is_real[:, None]


def find_padding(
    event: AttentionEvent,
    stated: StatedPadding | None,
    is_self_attention: bool,
    has_certain_axes: bool,
) -> PaddingAnswer:
    """Return which queries of an attention are real; a `Refusal` is raised if witnesses disagree.

    Arguments:
        event: the attention.
        stated: the user's ``padding=``.
        is_self_attention: True if queries and keys come from the same tokens.
        has_certain_axes: True if it is certain which axes are samples and heads.
    """
    grid = _grid_of(event)
    if stated is not None:
        answer = stated.answer(event.calls, grid)
        if answer is not None:
            return answer
    if not is_self_attention:
        return _padding_of_cross_attention(event.calls, grid)
    answer = _padding_of_self_attention(event, grid, has_certain_axes)
    _remember(event, grid, answer)
    return answer


def _grid_of(event: AttentionEvent) -> TokenGrid:
    samples, _, queries = event.shape
    return TokenGrid(samples, queries, event.device)


def _remember(event: AttentionEvent, grid: TokenGrid, answer: PaddingAnswer) -> None:
    """Keep the answer for a cross-attention and for other gauges of the same block."""
    place = (grid.samples, grid.tokens)
    event.block.real[place] = answer.is_real
    if len(event.calls) > 1:
        event.calls[-2].real[place] = answer.is_real


# A decoder block attends to its own 9 tokens, then with these 9 queries to 14 tokens of a memory.
def _padding_of_cross_attention(calls: tuple[Call, ...], grid: TokenGrid) -> PaddingAnswer:
    for call in reversed(calls):
        if (grid.samples, grid.tokens) in call.real:
            is_real = call.real[grid.samples, grid.tokens]
            return PaddingAnswer(is_real, PaddingEvidence("self-attention before it"))
    argument = find_mask_argument(calls, False, grid)
    if argument is None:
        return NO_PADDING
    reading = argument.readings[0]
    evidence = PaddingEvidence(f"argument {argument.name}", reading.convention)
    return PaddingAnswer(reading.is_real[:, None], evidence)


def _padding_of_self_attention(
    event: AttentionEvent, grid: TokenGrid, has_certain_axes: bool
) -> PaddingAnswer:
    argument = find_mask_argument(event.calls, True, grid)
    has_mask = not isinstance(event, DotProduct) or event.mask is not None
    if argument is None and has_certain_axes and not has_mask:
        return NO_PADDING
    states = states_by_mask(event)
    if argument is not None and states is not None and _is_pattern_of_keys(argument, event):
        argument = None
    question = PaddingQuestion(event, states, argument)
    answer = decide_padding(question)
    is_without_witness = argument is None and not question.hides_padding
    if not has_certain_axes and is_without_witness and names_padding(event.calls, grid.tokens):
        raise Refusal(
            Reason.HEAD_AXIS,
            "it is not certain which axis holds the samples, so the padding that an argument names "
            "cannot be left out; say so with heads=",
        )
    return answer


# attention_mask (14, 14), 14 samples of 14 tokens: a causal pattern of queries and keys, if it is
# what queries see; else one row per sample.
def _is_pattern_of_keys(argument: MaskArgument, event: AttentionEvent) -> bool:
    """True if a square mask is one of queries and keys, not of samples and tokens."""
    if argument.rows.shape[0] != argument.rows.shape[1]:
        return False
    sees = visible_keys(event)
    if sees is None:
        return False
    return any(bool((sees == reading.is_real).all()) for reading in argument.readings)


def decide_padding(question: PaddingQuestion) -> PaddingAnswer:
    """Return the first answer of a rule; a `Refusal` is raised if mask and argument disagree."""
    rules = RULES_WITHOUT_ARGUMENT
    if question.argument is not None:
        rules = RULES_WITH_ARGUMENT
    for rule in rules:
        answer = rule(question)
        if answer is not None:
            return answer
    return NO_PADDING


# Mask: real real real padding. Argument [1, 1, 1, 0]: read as "nonzero at real tokens", it agrees.
# Argument [0, 0, 0, 1]: read as "zero at real tokens", it agrees.
def argument_confirmed_by_mask(question: PaddingQuestion) -> PaddingAnswer | None:
    """Take the reading of the argument that agrees with the mask wherever the mask decides."""
    argument = question.argument
    states = question.states
    if argument is None or states is None:
        return None
    for reading in argument.readings:
        is_undecided = states < 0
        if bool((is_undecided | ((states == REAL) == reading.is_real)).all()):
            evidence = PaddingEvidence(f"mask and argument {argument.name}", reading.convention)
            answer = answer_from_rows(reading.is_real, evidence)
            if answer.is_real is not None:
                argument.owner.confirmed[argument.name] = argument.inner
            return answer
    return None


# Causal attention over [a b c pad]: the mask hides later keys only, so it shows no padding. But a,
# b and c give no attention to the last key, and the argument [1, 1, 1, 0] is right.
def argument_confirmed_by_attention(question: PaddingQuestion) -> PaddingAnswer | None:
    """Take a reading of the argument such that real queries give no attention to padding."""
    argument = question.argument
    states = question.states
    if argument is None:
        return None
    for reading in argument.readings:
        if states is not None and bool(((states == PADDING) & reading.is_real).any()):
            continue
        if is_hidden_from_real_queries(question.event, reading.is_real):
            evidence = PaddingEvidence(f"argument {argument.name}", reading.convention)
            return answer_from_rows(reading.is_real, evidence)
    return None


# CLIP is given input_ids and attention_mask (8, 77) of a text and pixel_values (8, 3, 224, 224). In
# the attention of the image, the mask means nothing.
def argument_about_other_tokens(question: PaddingQuestion) -> PaddingAnswer | None:
    """Leave an argument out that is about other tokens, and decide without it."""
    if question.argument is None or not is_about_other_tokens(question.argument):
        return None
    return decide_padding(replace(question, argument=None))


def refuse_contradiction(question: PaddingQuestion) -> None:
    """Refuse an attention whose mask contradicts every reading of the argument."""
    argument = question.argument
    assert argument is not None
    raise Refusal(
        Reason.PADDING_CONFLICT,
        f"the argument {argument.name!r} {tuple(argument.rows.shape)} of {argument.owner.name} and "
        "the mask that is applied disagree about which tokens are padding; say which are with "
        "padding=",
    )


# Mask: real real real padding, and no argument is called a mask: the last token is padding.
def mask_alone(question: PaddingQuestion) -> PaddingAnswer | None:
    """Believe the mask; another argument has to settle tokens that it leaves doubtful."""
    states = question.states
    if states is None:
        return None
    if bool((states == DOUBTFUL).any()):
        return _doubt_settled_by_argument(question, states)
    if not question.hides_padding:
        return NO_PADDING
    return PaddingAnswer((states != PADDING)[:, None], PaddingEvidence("mask"))


# Mask: doubtful doubtful real real. The argument my_mask = [0, 0, 1, 1] makes the first two
# padding; [1, 1, 1, 1] would not settle it, since every mask that is not needed is all ones.
def _doubt_settled_by_argument(question: PaddingQuestion, states: Tensor) -> PaddingAnswer:
    """Let an argument (B, T) of any name that fits the mask decide about doubtful tokens."""
    is_real = states == REAL
    is_undecided = states < 0
    is_doubtful = states == DOUBTFUL
    for name, rows in arguments_like_masks(question.event.calls, question.grid):
        for reading in readings_of(rows, true_is_padding=False):
            fits = bool((is_undecided | (is_real == reading.is_real)).all())
            if fits and bool((is_doubtful & ~reading.is_real).any()):
                is_padding = (states == PADDING) | (is_doubtful & ~reading.is_real)
                evidence = PaddingEvidence(f"mask and argument {name}", reading.convention)
                return PaddingAnswer(~is_padding[:, None], evidence)
    raise Refusal(
        Reason.PADDING_UNCLEAR,
        f"its mask fits {int(is_doubtful.sum())} tokens of padding as well as real tokens that "
        "nobody attends to, and no argument decides; say which are padding with padding=",
    )


# Each head chooses other keys (top-k), so that the mask is no evidence. But no real query attends
# to the tokens where my_mask = [1, 1, 1, 0] is 0.
def any_argument_hidden_from_attention(question: PaddingQuestion) -> PaddingAnswer | None:
    """Believe an argument of any name, if real queries give no attention to its padding."""
    event = question.event
    tokens = question.grid.tokens
    first_query = torch.zeros(1, dtype=torch.long, device=event.device)
    # Keys of other tokens show nothing about the queries. One more key is a learned sink.
    if event.rows(0, first_query).shape[-1] not in (tokens, tokens + 1):
        return None
    for name, rows in arguments_like_masks(event.calls, question.grid):
        for reading in readings_of(rows, true_is_padding=False):
            is_real = reading.is_real
            if not bool(is_real.all()) and is_hidden_from_real_queries(event, is_real):
                evidence = PaddingEvidence(f"argument {name}", reading.convention)
                return PaddingAnswer(is_real[:, None], evidence)
    return None


PaddingDecision = Callable[[PaddingQuestion], PaddingAnswer | None]
RULES_WITH_ARGUMENT: tuple[PaddingDecision, ...] = (
    argument_confirmed_by_mask,
    argument_confirmed_by_attention,
    argument_about_other_tokens,
    refuse_contradiction,
)
RULES_WITHOUT_ARGUMENT: tuple[PaddingDecision, ...] = (
    mask_alone,
    any_argument_hidden_from_attention,
)


def is_hidden_from_real_queries(event: AttentionEvent, is_real: Tensor) -> bool:
    """True if real queries, of (B or 1, T), give no attention to padding; a few are tried."""
    samples, _, tokens = event.shape
    is_real = is_real.expand(samples, tokens)
    padded_samples = [b for b in range(samples) if not bool(is_real[b].all())]
    # a sample without any real token is a wrong reading
    if any(not bool(is_real[b].any()) for b in padded_samples):
        return False
    for b in padded_samples[:_MOST_SAMPLES]:
        queries = is_real[b].nonzero()[:, 0]
        queries = queries[:: max(1, len(queries) // _FEW_QUERIES)]  # (P,)
        rows = _without_learned_sink(event, event.rows(b, queries), tokens)  # (H, P, T)
        # Keys of other tokens show nothing.
        if rows.shape[-1] != tokens:
            return True
        leak = rows[..., ~is_real[b]].sum(dim=-1)  # (H, P)
        if float(leak.nan_to_num().max()) > LEAK_LIMIT:
            return False
    return True


def _without_learned_sink(event: AttentionEvent, rows: Tensor, tokens: int) -> Tensor:
    """Drop the column of a learned sink from attention (H, P, T + 1)."""
    if rows.shape[-1] != tokens + 1:
        return rows
    if isinstance(event, Scores) and event.learned_sink == 0:
        return rows[..., 1:]
    return rows[..., :tokens]
