"""Which queries are padding: from the mask that attention applies, and from arguments of the modules that are running.

For a self-attention the mask is the best evidence (`joma._measure.events.visibility`), and the names of arguments
(``attention_mask``, ``…key_padding_mask``) are the second. Where both speak they must agree: an argument may be 1 at
real tokens, True at padding or additive, and the reading is taken that the mask confirms. Padding that attention need
not hide is confirmed, too: causal attention over sequences padded at the end gives no attention to padding.

The queries of a cross-attention are those of the self-attention before it in the same block.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from joma._measure.events.reasons import Reason, Refusal
from joma._measure.events.visibility import (
    DOUBTFUL,
    PADDING,
    REAL,
    is_one_stretch,
    positions_of_keys,
    remembered_positions_of,
)
from joma._measure.gauges.masks import hidden_scores, lowest_seen

if TYPE_CHECKING:
    from joma._measure.events.events import AttentionEvent, Call

Rule = str | Tensor | Callable[[tuple[Any, ...], dict[str, Any]], Tensor | None]
# One for all modules, or one per side ("source", "target") or module; None for a side or module without padding.
Padding = Rule | Mapping[str, Rule | None]

# arguments (True for padding) that say which queries are padding; "attention_mask" says which are not
_PADDED = ("src_key_padding_mask", "tgt_key_padding_mask", "key_padding_mask")
_SIDES = {"source": re.compile(r"encoder|src|source"), "target": re.compile(r"decoder|tgt|target")}
_ADDED = -50.0  # an additive mask is below this at padding: −100, −1e4, −1e9, −inf
_NO_MASK = "position|token|type|label|target|ids"  # arguments (B, T) that are no masks
_LEAK = 1e-3  # attention of real queries on padding, up to which padding counts as hidden


# What the user says


@dataclass(eq=False)
class _Stated:
    """What the user says about the padding of some modules."""

    scope: str  # "" for all modules, "source" or "target", or the name of a module
    rule: Rule | None
    is_applied: bool = False
    misfits: list[str] = field(default_factory=list)  # what was found instead

    def covers(self, module: str) -> bool:
        """True if the module is one of these."""
        if self.scope in _SIDES:
            other = _SIDES["target" if self.scope == "source" else "source"]
            return bool(_SIDES[self.scope].search(module)) and not other.search(module)
        return self.scope in ("", module) or module.startswith(f"{self.scope}.")


class StatedPadding:
    """The user's ``padding=``, and whether it was ever applied."""

    def __init__(self, padding: Padding, modules: Sequence[str]) -> None:
        rules = padding if isinstance(padding, Mapping) else {"": padding}
        self._stated = [_Stated(scope, rule) for scope, rule in rules.items()]
        for stated in self._stated:
            rule = stated.rule
            if not (rule is None or isinstance(rule, (str, Tensor)) or callable(rule)):
                raise TypeError(
                    "padding= must be the name of an argument, a mask (B, T), a function of (args, kwargs), or a dict "
                    f"of these by side or module; got {type(rule).__name__}"
                )
            if not any(stated.covers(module) for module in modules):
                raise ValueError(
                    f"padding= names {stated.scope!r}, and no module of the model has that name; give the name of a "
                    'module, or "source" or "target" for modules called encoder or decoder'
                )

    def real(
        self, calls: tuple[Call, ...], B: int, T: int, device: torch.device
    ) -> tuple[bool, Tensor | None]:
        """Whether it applies to these tokens, and (B or 1, 1, T), True for real ones; None if all are."""
        fitting = [stated for stated in self._stated if stated.covers(calls[-1].name)]
        if not fitting:
            return False, None
        stated = max(fitting, key=lambda candidate: len(candidate.scope))
        for mask in _masks(stated.rule, calls):
            rows = None if mask is None else _rows(mask, B, T, device)
            if mask is None or rows is not None:
                stated.is_applied = True
                return True, None if rows is None else _read(rows)[:, None]
            shape = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
            stated.misfits.append(f"{shape}, for {B} samples of {T} tokens in {calls[-1].name}")
        return False, None

    def mistake(self) -> str | None:
        """Why a part of it was never applied; None if all of it was."""
        for stated in self._stated:
            if stated.is_applied or stated.rule is None:
                continue
            what = f"padding={stated.rule!r}" if isinstance(stated.rule, str) else "padding="
            where = f" for {stated.scope!r}" if stated.scope else ""
            if stated.misfits:
                seen = "; ".join(dict.fromkeys(stated.misfits[:3]))
                return f"{what}{where} was never applied: it must be a mask (B, T), 1 at real tokens; found {seen}"
            if isinstance(stated.rule, str):
                return f"{what}{where} was never applied: no module that ran has an argument of this name"
            return f"{what}{where} was never applied: no attention was seen there"
        return None


def _masks(rule: Rule | None, calls: tuple[Call, ...]) -> Iterator[Any]:
    """The masks that a rule may mean; of a name, the argument of the outermost module that has it comes first."""
    if rule is None or isinstance(rule, Tensor):
        yield rule
    elif isinstance(rule, str):
        for call in calls:
            if rule in call.arguments:
                yield call.arguments[rule]
    else:
        yield rule(calls[0].args, calls[0].kwargs)


# What arguments say


def _rows(mask: Any, B: int, T: int, device: torch.device) -> Tensor | None:
    """A mask (B or 1, T), or None if it is not one."""
    if (
        not isinstance(mask, Tensor)
        or mask.dim() != 2
        or mask.shape[1] != T
        or mask.shape[0] not in (1, B)
    ):
        return None
    return mask.to(device)


def _read(rows: Tensor) -> Tensor:
    """True at real tokens, of a mask that is 1 there, or additive."""
    if rows.is_floating_point() and bool((rows < 0).any()):
        return rows > _ADDED
    return rows != 0


@dataclass(frozen=True, eq=False)
class _Claim:
    """An argument that says which tokens are padding, and how it may be read, the likeliest first."""

    name: str
    rows: Tensor
    readings: tuple[Tensor, ...]  # (B or 1, T) each, True at real tokens
    owner: Call  # the module whose argument it is
    inside: Call | None  # the module in it that leads to the attention


def _claim(
    calls: tuple[Call, ...], is_self: bool, B: int, T: int, device: torch.device
) -> _Claim | None:
    """What the arguments of the running modules say, the innermost first."""
    for depth in reversed(range(len(calls))):
        call = calls[depth]
        inside = calls[depth + 1] if depth + 1 < len(calls) else None
        arguments = call.arguments
        for name in _PADDED:
            if name == "key_padding_mask" and not is_self:
                continue  # of the memory that is attended to
            rows = _rows(arguments.get(name), B, T, device)
            if rows is not None:
                return _Claim(name, rows, _readings(rows, true_is_padding=True), call, inside)
        if "attention_mask" in arguments and (is_self or call is not calls[-1]):
            mask = arguments["attention_mask"]
            rows = _rows(mask, B, T, device)
            if rows is not None:
                return _Claim(
                    "attention_mask", rows, _readings(rows, true_is_padding=False), call, inside
                )
            if mask is None:
                return None
    return None


def _readings(rows: Tensor, true_is_padding: bool) -> tuple[Tensor, ...]:
    """How a mask (B or 1, T) may be read, True at real tokens, the likeliest first."""
    if rows.is_floating_point() and bool((rows < 0).any()):
        return (rows > _ADDED,)
    usual, other = rows != 0, rows == 0
    return (other, usual) if true_is_padding else (usual, other)


def _is_of_another_stream(claim: _Claim) -> bool:
    """Is a mask about other tokens: those of a text, where the attention is that of an image?

    So it is if another module in the one that was given the mask applies it, and if the module that leads to the
    attention is given an argument which is no sequence of so many tokens: ``pixel_values`` (B, 3, X, Y)
    and a mask (B, T).
    """
    if claim.inside is None:
        return False
    confirmed = claim.owner.confirmed.get(claim.name)
    if confirmed is not None and confirmed is not claim.inside:
        return True
    arguments = [value for value in claim.owner.arguments.values() if isinstance(value, Tensor)]
    handed_on = [
        value
        for value in (*claim.inside.args, *claim.inside.kwargs.values())
        if isinstance(value, Tensor) and any(value is argument for argument in arguments)
    ]
    return bool(handed_on) and all(value.shape[1:2] != claim.rows.shape[1:] for value in handed_on)


# Both together


def real_tokens(
    calls: tuple[Call, ...], stated: StatedPadding | None, B: int, T: int, device: torch.device
) -> Tensor | None:
    """(B or 1, 1, T), True for tokens that are not padding; None if none is known to be. For what is not attention."""
    if stated is not None:
        applies, real = stated.real(calls, B, T, device)
        if applies:
            return real
    for call in reversed(calls):
        if (B, T) in call.real:
            return call.real[B, T]
    claim = _claim(calls, True, B, T, device)
    return None if claim is None else claim.readings[0][:, None]


def real_queries(
    event: AttentionEvent, stated: StatedPadding | None, is_self: bool, certain: bool
) -> Tensor | None:
    """(B or 1, 1, Tq), True for queries that are not padding; None if none is known to be.

    Arguments:
        event: the attention.
        stated: what the user says.
        is_self: do queries and keys come from the same tokens?
        certain: is it certain which axes are samples and heads?
    """
    B, _, Tq = event.shape
    event.call.padding_evidence = "none"
    if stated is not None:
        applies, real = stated.real(event.calls, B, Tq, event.device)
        if applies:
            event.call.padding_evidence = "the user's padding="
            return real
    if not is_self:
        return _of_same_stream(event.calls, B, Tq, event.device)
    claim = _claim(event.calls, True, B, Tq, event.device)
    if claim is None and certain and _shows_everything(event):
        _note(event, B, Tq, None)
        return None
    states = _positions(event)
    if claim is not None and states is not None and _is_pattern(claim, event):
        claim = None
    real = _agreed(event, states, claim)
    if (
        not certain
        and claim is None
        and not _hides_padding(states)
        and _has_padding_elsewhere(event.calls, Tq)
    ):
        raise Refusal(
            Reason.HEAD_AXIS,
            "it is not certain which axis holds the samples, so the padding that an argument names cannot be left out; "
            "say so with heads=",
        )
    _note(event, B, Tq, real)
    return real


def _shows_everything(event: Any) -> bool:
    """True for fused attention without a mask, or plainly causal."""
    return not hasattr(event, "scores") and event.mask is None


def _note(event: AttentionEvent, B: int, T: int, real: Tensor | None) -> None:
    """Remember what was found, for a cross-attention and for other gauges of the same block."""
    event.block.real[B, T] = real
    if len(event.calls) > 1:
        event.calls[-2].real[B, T] = real


def _of_same_stream(calls: tuple[Call, ...], B: int, T: int, device: torch.device) -> Tensor | None:
    """What the self-attention before a cross-attention found; else what arguments around the module say."""
    for call in reversed(calls):
        if (B, T) in call.real:
            calls[-1].padding_evidence = "self-attention before it"
            return call.real[B, T]
    claim = _claim(calls, False, B, T, device)
    if claim is None:
        return None
    calls[-1].padding_evidence = f"argument {claim.name}"
    return claim.readings[0][:, None]


def _positions(event: Any) -> Tensor | None:
    """Return what positions (B or 1, T) are by the mask that a self-attention applies; None if it gives no evidence."""
    facts = getattr(event, "mask_facts", None)
    if facts is not None and "positions" in vars(facts):  # the layers of a pass share a mask
        shared: Tensor | None = vars(facts)["positions"]
        return shared
    if not hasattr(event, "scores") and facts is None and event.key.shape[2] == event.shape[2]:
        return torch.full(
            (1, event.shape[2]), REAL, dtype=torch.int8, device=event.device
        )  # causal, or all is seen
    sees = seen_keys(event)
    states = None
    if sees is not None:
        states = (
            positions_of_keys(sees[:, 0]) if sees.shape[1] == 1 else remembered_positions_of(sees)
        )
    if facts is not None:
        vars(facts)["positions"] = states
    return states


def seen_keys(event: Any) -> Tensor | None:
    """Which keys queries see, (B or 1, T or 1, T); None if heads see different ones, or keys are other tokens."""
    mask_facts = getattr(event, "mask_facts", None)
    Tq = event.shape[2]
    if hasattr(event, "scores"):
        return _seen_in_scores(event.scores, event.learned_sink, Tq)
    keys = event.key.shape[2]
    if keys != Tq and (event.causal or mask_facts is None):
        return None
    if event.causal:
        return torch.ones(Tq, Tq, dtype=torch.bool, device=event.device).tril()[None]
    if mask_facts is None:
        return torch.ones(1, 1, keys, dtype=torch.bool, device=event.device)
    keep = mask_facts.keep.expand(-1, -1, -1, keys)  # (B or 1, H or 1, Tq or 1, Tk)
    if keep.shape[1] > 1 and not bool((keep == keep[:, :1]).all()):
        return None
    return _own_keys(keep[:, 0], Tq)


def _own_keys(sees: Tensor, queries: int) -> Tensor | None:
    """Return the columns of keys (B, Tq or 1, Tk) that are the queries' own tokens; None if unclear.

    Learned or cached keys stand before or behind them, and every query sees those. Where every query
    sees both ends, the queries' own tokens are those that have padding at one side only:

        x x x . . x    one key before: x x . . x, a hole; one key behind: x x x . ., padded at the end
    """
    extra = sees.shape[-1] - queries
    if extra == 0:
        return sees
    if extra < 0:
        return None
    sees_any = sees.any(dim=-1, keepdim=True)
    are_first = bool((sees[..., :extra] | ~sees_any).all())
    are_last = bool((sees[..., queries:] | ~sees_any).all())
    behind = sees[..., extra:]
    before = sees[..., :queries]
    if bool(sees.all()):
        return behind
    if are_first and are_last:
        are_first = bool(is_one_stretch(behind.any(dim=1)).all())
        are_last = bool(is_one_stretch(before.any(dim=1)).all())
    if are_first == are_last:
        return None
    return behind if are_first else before


def _seen_in_scores(scores: Tensor, learned_sink: int | None, queries: int) -> Tensor | None:
    """By eager scores (B, H, Tq, columns), from the first head; the last one must agree where keys are hidden."""
    by_head = []
    for head in dict.fromkeys((0, scores.shape[1] - 1)):
        columns = scores[:, head].detach()  # (B, Tq, columns)
        hidden = hidden_scores(
            columns, columns.amax(dim=-1, keepdim=True), lowest_seen(scores.dtype)
        )
        if learned_sink is not None:
            hidden = hidden[..., 1:] if learned_sink == 0 else hidden[..., :-1]
        own = _own_keys(~hidden, queries)
        if own is None:
            return None
        by_head.append(own)
        if not bool(hidden.any()):
            break
    if len(by_head) > 1 and not torch.equal(by_head[0], by_head[1]):
        return None
    return by_head[0]


def _is_pattern(claim: _Claim, event: AttentionEvent) -> bool:
    """Is a mask (T, T) one of queries and keys, though there are as many samples as tokens?"""
    if claim.rows.shape[0] != claim.rows.shape[1]:
        return False
    sees = seen_keys(event)
    return sees is not None and any(bool((sees == reading).all()) for reading in claim.readings)


def _agreed(event: AttentionEvent, states: Tensor | None, claim: _Claim | None) -> Tensor | None:
    """What mask and argument agree on, (B or 1, 1, T) or None; a `Refusal` if they contradict each other."""
    if claim is None and states is None:
        return _hidden_by_an_argument(event)
    if claim is None:
        event.call.padding_evidence = "mask" if _hides_padding(states) else "none"
        if states is not None and bool((states == DOUBTFUL).any()):
            states = _without_doubt(event, states)
        if not _hides_padding(states):
            return None
        assert states is not None
        return (states != PADDING)[:, None]
    for reading in claim.readings:
        if states is not None and bool(((states < 0) | ((states == REAL) == reading)).all()):
            event.call.padding_evidence = f"mask and argument {claim.name}"
            if bool(reading.all()):
                return None
            claim.owner.confirmed[claim.name] = claim.inside
            return reading[:, None]
    for reading in claim.readings:
        allowed = states is None or not bool(((states == PADDING) & reading).any())
        if allowed and _is_hidden(event, reading):
            event.call.padding_evidence = f"argument {claim.name}"
            return None if bool(reading.all()) else reading[:, None]
    if _is_of_another_stream(claim):
        return _agreed(event, states, None)
    raise Refusal(
        Reason.PADDING_CONFLICT,
        f"the argument {claim.name!r} {tuple(claim.rows.shape)} of {claim.owner.name} and the mask that is applied "
        "disagree about which tokens are padding; say which are with padding=",
    )


def _hidden_by_an_argument(event: AttentionEvent) -> Tensor | None:
    """Return what an argument (B, T) of any name says, if real queries give no attention to what it takes for padding.

    For masks that give no evidence of their own, since heads see different keys (top-k).
    """
    B, _, T = event.shape
    if event.rows(0, torch.zeros(1, dtype=torch.long, device=event.device)).shape[-1] not in (
        T,
        T + 1,
    ):
        return None  # keys are other tokens, or more of them: what they receive says nothing about queries
    for name, rows in _arguments_like_masks(event.calls, B, T, event.device):
        for reading in _readings(rows, true_is_padding=False):
            if not bool(reading.all()) and _is_hidden(event, reading):
                event.call.padding_evidence = f"argument {name}"
                return reading[:, None]
    return None


def _arguments_like_masks(
    calls: tuple[Call, ...], B: int, T: int, device: torch.device
) -> Iterator[tuple[str, Tensor]]:
    """Yield name and value of arguments (B, T) that hold two numbers, as masks do; the innermost module's first."""
    for call in reversed(calls):
        for name, value in call.arguments.items():
            rows = _rows(value, B, T, device)
            if rows is None or rows.shape[0] != B or re.search(_NO_MASK, name):
                continue
            is_additive = rows.is_floating_point() and bool(((rows == 0) | (rows < _ADDED)).all())
            if rows.dtype == torch.bool or is_additive or bool(((rows == 0) | (rows == 1)).all()):
                yield name, rows


def _without_doubt(event: AttentionEvent, states: Tensor) -> Tensor:
    """Decide what doubtful tokens are, by an argument (B, T) of any name that fits the mask; a `Refusal` if none does.

    Worked example: of [doubtful, doubtful, real, real], the argument [0, 0, 1, 1] makes [padding, padding, real, real].
    """
    B, _, T = event.shape
    is_real = states == REAL
    is_doubtful = states == DOUBTFUL
    for name, rows in _arguments_like_masks(event.calls, B, T, event.device):
        for reading in _readings(rows, true_is_padding=False):
            fits = ((states < 0) | (is_real == reading)).all()
            if bool(fits) and bool((is_doubtful & ~reading).any()):
                event.call.padding_evidence = f"mask and argument {name}"
                return torch.where(
                    is_doubtful, torch.where(reading, REAL, PADDING).to(states.dtype), states
                )
    raise Refusal(
        Reason.PADDING_UNCLEAR,
        f"its mask fits {int(is_doubtful.sum())} tokens of padding as well as real tokens that nobody attends to, and "
        "no argument decides; say which are padding with padding=",
    )


def _hides_padding(states: Tensor | None) -> bool:
    return states is not None and bool((states == PADDING).any())


def _has_padding_elsewhere(calls: tuple[Call, ...], T: int) -> bool:
    """Does an argument (any number of samples, T) say that there is padding?"""
    for call in calls:
        for name in (*_PADDED, "attention_mask"):
            mask = call.arguments.get(name)
            if isinstance(mask, Tensor) and mask.dim() == 2 and mask.shape[1] == T:
                usual = _readings(mask, name in _PADDED)[0]
                if not bool(usual.all()):
                    return True
    return False


def _is_hidden(event: AttentionEvent, real: Tensor) -> bool:
    """Do real queries give no attention to what a reading takes for padding? By some queries of some samples."""
    B, _, T = event.shape
    real = real.expand(B, T)
    padded = [b for b in range(B) if not bool(real[b].all())]
    if any(not bool(real[b].any()) for b in padded):
        return False
    for b in padded[:4]:
        queries = real[b].nonzero()[:, 0]
        queries = queries[:: max(1, len(queries) // 8)]
        rows = event.rows(b, queries)  # (H, P, columns)
        if rows.shape[-1] == T + 1:  # a learned sink
            rows = rows[..., 1:] if getattr(event, "learned_sink", None) == 0 else rows[..., :T]
        if rows.shape[-1] != T:
            return True  # keys are other tokens, which say nothing
        if float(rows[..., ~real[b]].sum(dim=-1).nan_to_num().max()) > _LEAK:
            return False
    return True
