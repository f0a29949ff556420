"""Hand-written call styles and FlexAttention, from the tests, against their own scores."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator

import torch
from tests.measure.events import test_flex as flex
from tests.measure.events import test_guard as styles
from tests.measure.watch.models import entropy_of
from torch import nn

from benchmarks.families.measure import TOLERANCE, Row, code_of

LIBRARY = "hand-written"


def rows() -> Iterator[Row]:
    """Measure the styles that are measured, those that are refused, and FlexAttention."""
    measured = styles.test_layouts_and_call_styles_that_are_measured.pytestmark[0]
    for model, title in zip(measured.args[1], measured.kwargs["ids"], strict=True):
        yield _row(title, "own", lambda model=model: _difference(model))
    refused = styles.test_what_would_be_a_mixture_is_refused_with_the_reason.pytestmark[0]
    for attend, *_ in refused.args[1]:
        title = attend.__name__.replace("_", " ")
        yield _row(title, "own", lambda attend=attend: _difference(styles.Toy(attend)))
    for call, score_mod, mask_mod, key_heads in flex.CASES:
        parts = [part.__name__ for part in (score_mod, mask_mod) if part is not None]
        title = f"FlexAttention: {', '.join(parts)}, {key_heads} of {flex.HEADS} key heads"
        torch.manual_seed(0)
        model = flex.Flex(call, score_mod, mask_mod, key_heads)
        kernel = "compiled" if call == "compiled" else "flex"
        yield _row(
            title,
            kernel,
            lambda model=model: flex.difference(model, 3 * torch.randn(2, flex.T, 16)),
        )


def _difference(model: nn.Module) -> float:
    (heads,) = styles.measure(model).values()
    return float((torch.tensor(heads) - entropy_of(model.truth[0])).abs().max())


def _row(title: str, kernel: str, difference: Callable[[], float]) -> Row:
    variant = f"{kernel}, float32, none"
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        warnings.filterwarnings("ignore", message="flex_attention called without")
        try:
            error = difference()
        except UserWarning as refusal:
            reason = str(refusal)
            return Row(
                LIBRARY,
                title,
                variant,
                "refused",
                code=code_of(reason),
                truth="recorded",
                detail=reason[:600],
            )
    verdict = "right" if error <= TOLERANCE[torch.float32] else "wrong"
    return Row(LIBRARY, title, variant, verdict, error, truth="recorded")
