"""Why an attention is not measured, or only in part: short codes that people can filter and search for."""

from __future__ import annotations

from enum import Enum


class Reason(Enum):
    """A code, and what it means in a few words."""

    HEAD_AXIS = "head-axis"  # it is not certain which axis holds the heads: the layer is reported without them
    SWAPPED_AXES = "swapped-axes"  # queries are heads, and heads are tokens
    CHANNELS = "channels"  # it attends over channels, not over tokens
    DIFFERENCE = "difference"  # two attention maps over the same values are combined
    NO_PRODUCT = "no-product"  # a softmax that is not multiplied with values as it is
    NO_SOFTMAX = "no-softmax"  # scores that are multiplied with values without a softmax function
    PIECES = "pieces"  # several attentions in one call, each over a part of the queries
    LOOP = "loop"  # several attentions in one call, in a loop over heads or samples
    GUARD = "guard"  # the output is not softmax(scores)·V
    UNCHECKED = "unchecked"  # the output could not be compared with softmax(scores)·V
    PADDING_CONFLICT = "padding-conflict"  # an argument and the mask that was applied disagree about padding
    PADDING_UNCLEAR = "padding-unclear"  # the mask fits padding as well as real tokens, and no argument decides
    PART_OF_QUERIES = "part-of-queries"  # it attends with some of its queries: the share is reported


class Refusal(ValueError):
    """An attention cannot be measured; the message ends with the code of the reason."""

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(f"{message} [{reason.value}]")
        self.reason = reason
