"""Hand-written call styles and FlexAttention, from the tests, against their own scores."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from tests.measure.events import test_flex as flex
from tests.measure.events import test_guard as styles
from tests.measure.watch.models import entropy_of
from torch import nn

from benchmarks.families.explained import Expected, FirstCall, codes_in, disagreements, first_call
from benchmarks.families.measure import TOLERANCE, Row, code_of

LIBRARY = "hand-written"


def models() -> list[str]:
    """Return the titles of the styles that are measured, those that are refused, and FlexAttention."""
    return list(_makers())


def rows(title: str) -> Iterator[Row]:
    """Measure a style."""
    yield _makers()[title]()


def _makers() -> dict[str, Callable[[], Row]]:
    """Return title -> a function that measures the style."""
    makers: dict[str, Callable[[], Row]] = {}
    measured = styles.test_layouts_and_call_styles_that_are_measured.pytestmark[0]
    for model, title in zip(measured.args[1], measured.kwargs["ids"], strict=True):
        makers[title] = partial(_row, title, "own", model, _difference)
    refused = styles.test_what_would_be_a_mixture_is_refused_with_the_reason.pytestmark[0]
    for attend, *_ in refused.args[1]:
        title = attend.__name__.replace("_", " ")
        makers[title] = partial(_row, title, "own", styles.Toy(attend), _difference)
    for case in flex.CASES:
        _, score_mod, mask_mod, key_heads = case
        parts = [part.__name__ for part in (score_mod, mask_mod) if part is not None]
        title = f"FlexAttention: {', '.join(parts)}, {key_heads} of {flex.HEADS} key heads"
        makers[title] = partial(_flex_row, title, *case)
    return makers


def _flex_row(title: str, call: str, score_mod: Any, mask_mod: Any, key_heads: int) -> Row:
    torch.manual_seed(0)
    model = flex.Flex(call, score_mod, mask_mod, key_heads)
    kernel = "flex"
    if call == "compiled":
        kernel = call
    return _row(title, kernel, model, _flex_difference)


def _difference(model: nn.Module) -> tuple[float, int]:
    """Return the largest difference of the entropies, and the true number of heads."""
    (heads,) = styles.measure(model).values()
    truth = entropy_of(model.truth[0])  # (heads,)
    return float((torch.tensor(heads) - truth).abs().max()), len(truth)


def _flex_difference(model: nn.Module) -> tuple[float, int]:
    return flex.difference(model, 3 * torch.randn(2, flex.T, 16)), flex.HEADS


def _row(
    title: str,
    kernel: str,
    model: nn.Module,
    difference: Callable[[nn.Module], tuple[float, int]],
) -> Row:
    variant = f"{kernel}, float32, none"
    verdict = "right"
    error = 0.0
    heads = 0
    reason = ""
    with warnings.catch_warnings(), first_call(model) as call:
        warnings.simplefilter("error", UserWarning)
        warnings.filterwarnings("ignore", message="flex_attention called without")
        try:
            error, heads = difference(model)
        except UserWarning as refusal:
            verdict = "refused"
            reason = str(refusal)
    code = ""
    if verdict == "refused":
        code = code_of(reason)
    elif not error <= TOLERANCE[torch.float32]:
        verdict = "wrong"
    others = _disagreements(call, verdict, reason, heads)
    if others:
        verdict = "explained otherwise"
        reason = "; ".join(others)
    return Row(LIBRARY, title, variant, verdict, error, code, "recorded", reason[:600])


def _disagreements(call: FirstCall, verdict: str, reason: str, heads: int) -> list[str]:
    expected = Expected(codes=codes_in(reason))
    if verdict == "right":
        expected = Expected(codes=set(), heads=[heads])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return disagreements(call, expected)
