"""The user's ``padding=``: which modules it is about, and whether it was ever applied."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor

from joma._measure.events.padding.answer import PaddingAnswer, PaddingEvidence, TokenGrid
from joma._measure.events.padding.arguments import mask_rows, read_stated_mask

if TYPE_CHECKING:
    from joma._measure.events.events import Call

# The name of an argument, a mask (B, T), or a function of the model's (args, kwargs).
PaddingRule = str | Tensor | Callable[[tuple[Any, ...], dict[str, Any]], Tensor | None]
# One rule for all modules, or one per side ("source", "target") or module; None: no padding there.
Padding = PaddingRule | Mapping[str, PaddingRule | None]

_SIDES = {
    "source": re.compile(r"encoder|src|source"),
    "target": re.compile(r"decoder|tgt|target"),
}
_OTHER_SIDE = {"source": "target", "target": "source"}
_MOST_MISFITS = 3  # masks of a wrong shape that a message names
_EVIDENCE = PaddingEvidence("the user's padding=")


@dataclass(eq=False)
class _ScopedRule:
    """A rule for the padding of some modules.

    Attributes:
        scope: "" for all modules, "source", "target", or the name of a module.
        rule: the rule; None if these modules have no padding.
        is_applied: True once it gave a mask that fits.
        misfits: masks that did not fit, in words.
    """

    scope: str
    rule: PaddingRule | None
    is_applied: bool = False
    misfits: list[str] = field(default_factory=list)

    def covers(self, module: str) -> bool:
        """True if the rule is about this module."""
        if self.scope in _SIDES:
            is_on_side = bool(_SIDES[self.scope].search(module))
            return is_on_side and not _SIDES[_OTHER_SIDE[self.scope]].search(module)
        return self.scope in ("", module) or module.startswith(f"{self.scope}.")

    def masks(self, calls: tuple[Call, ...]) -> Iterator[Any]:
        """Yield the masks that the rule may mean; of arguments, the outermost module's first."""
        if self.rule is None or isinstance(self.rule, Tensor):
            yield self.rule
        elif isinstance(self.rule, str):
            for call in calls:
                if self.rule in call.arguments:
                    yield call.arguments[self.rule]
        else:
            yield self.rule(calls[0].args, calls[0].kwargs)

    def mistake(self) -> str | None:
        """Return why the rule was never applied; None if it was."""
        if self.is_applied or self.rule is None:
            return None
        subject = "padding="
        if isinstance(self.rule, str):
            subject = f"padding={self.rule!r}"
        if self.scope:
            subject = f"{subject} for {self.scope!r}"
        if self.misfits:
            misfits = "; ".join(dict.fromkeys(self.misfits[:_MOST_MISFITS]))
            return (
                f"{subject} was never applied: it must be a mask (B, T), 1 at real tokens; "
                f"found {misfits}"
            )
        if isinstance(self.rule, str):
            return f"{subject} was never applied: no module that ran has an argument of this name"
        return f"{subject} was never applied: no attention was seen there"


class StatedPadding:
    """The user's ``padding=``, with one rule for all modules or several."""

    def __init__(self, padding: Padding, modules: Sequence[str]) -> None:
        rules: Mapping[str, PaddingRule | None]
        if isinstance(padding, Mapping):
            rules = padding
        else:
            rules = {"": padding}
        self._rules = [_ScopedRule(scope, rule) for scope, rule in rules.items()]
        for scoped in self._rules:
            _check_rule(scoped, modules)

    def answer(self, calls: tuple[Call, ...], grid: TokenGrid) -> PaddingAnswer | None:
        """Return what the user says about the tokens of the innermost module; None if nothing."""
        covering = [scoped for scoped in self._rules if scoped.covers(calls[-1].name)]
        if not covering:
            return None
        scoped = max(covering, key=lambda candidate: len(candidate.scope))
        for mask in scoped.masks(calls):
            if mask is None:
                scoped.is_applied = True
                return PaddingAnswer(None, _EVIDENCE)
            rows = mask_rows(mask, grid)
            if rows is not None:
                scoped.is_applied = True
                return PaddingAnswer(read_stated_mask(rows)[:, None], _EVIDENCE)
            scoped.misfits.append(_describe_misfit(mask, grid, calls[-1].name))
        return None

    def mistake(self) -> str | None:
        """Return why a part of it was never applied; None if all of it was."""
        for scoped in self._rules:
            mistake = scoped.mistake()
            if mistake is not None:
                return mistake
        return None


def _check_rule(scoped: _ScopedRule, modules: Sequence[str]) -> None:
    rule = scoped.rule
    if not (rule is None or isinstance(rule, (str, Tensor)) or callable(rule)):
        raise TypeError(
            "padding= must be the name of an argument, a mask (B, T), a function of (args, "
            f"kwargs), or a dict of these by side or module; got {type(rule).__name__}"
        )
    if not any(scoped.covers(module) for module in modules):
        raise ValueError(
            f"padding= names {scoped.scope!r}, and no module of the model has that name; give the "
            'name of a module, or "source" or "target" for modules called encoder or decoder'
        )


def _describe_misfit(mask: Any, grid: TokenGrid, module: str) -> str:
    form = type(mask).__name__
    if isinstance(mask, Tensor):
        form = str(tuple(mask.shape))
    return f"{form}, for {grid.samples} samples of {grid.tokens} tokens in {module}"
