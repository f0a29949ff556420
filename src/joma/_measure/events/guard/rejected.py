"""Products and softmaxes that look like a part of attention and are none, and why.

Nothing is refused here: the modules are only named, with the reason, if they seem to attend and no
attention was seen in them.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from joma._measure.events.axes import possible_token_counts
from joma._measure.events.events import Call
from joma._measure.events.guard.weights import are_weights_of
from joma._measure.events.products import Product
from joma._measure.events.reasons import Reason, Refusal

_NO_SOFTMAX = (
    "its scores {scores} are multiplied with values, but without a softmax function (exp and sum "
    "by hand, a sigmoid, no normalisation, a kernel of its own): use torch.softmax or "
    "scaled_dot_product_attention"
)
_LINEAR = (
    "it multiplies keys with values first, and queries with the sum (linear attention): no softmax "
    "over keys is computed, so there is no distribution over tokens"
)
_NOT_DOT_PRODUCT = (
    "its weights {scores} are a softmax, but not of a product of queries and keys (outlook, "
    "additive or synthetic attention)"
)
_CHUNKS = (
    "its softmax is over scores {scores}, and its products of two activations are {products}: it "
    "attends in chunks or sliding blocks; watch it with full attention, if it has that option"
)


class RejectedModules:
    """Reasons why no attention was seen in modules.

    Attributes:
        sentences: module -> the reason in words, with its code.
    """

    def __init__(self) -> None:
        self.sentences: dict[str, str] = {}
        self._reasons: dict[str, Reason] = {}

    def reject(self, call: Call, reason: Reason, message: str) -> None:
        """Keep a reason. The first one stays, but linear attention explains all others."""
        if call.name not in self.sentences or reason is Reason.LINEAR:
            self.sentences[call.name] = str(Refusal(reason, message))
            self._reasons[call.name] = reason

    def on_softmax(self, call: Call, scores: Tensor) -> None:
        """Look at a softmax of scores (…, Tk) that are no product of two activations."""
        call.softmaxes.append(scores.detach())
        self._reject_chunks(call, scores)

    # Longformer, input (2, 64, 32), 4 heads, 16 keys on either side: products (8, 3, 32, 32) of
    # overlapping chunks are rearranged into scores (2, 64, 4, 33). There are 4 rows for each token,
    # and no product has the size of the scores.
    def _reject_chunks(self, call: Call, scores: Tensor) -> None:
        states = call.states
        if not call.products or scores.dim() < 3 or states is None:
            return
        rows = scores[..., 0].numel()
        tokens = max(1, states[..., 0].numel())
        if rows % tokens:
            return
        # Gates over heads or experts have three axes: (samples, tokens, heads).
        if call.chunks is None and scores.dim() > 3:
            call.chunks = tuple(scores.shape)
        shapes = [str(tuple(product.output.shape)) for product in call.products.values()]
        products = ", ".join(dict.fromkeys(shapes))
        message = _CHUNKS.format(scores=tuple(scores.shape), products=products)
        self.reject(call, Reason.CHUNKS, message)

    def on_product(self, call: Call, running: Sequence[Call], product: Product) -> None:
        """Look at a product of two activations that no attention waits for."""
        if self._reasons.get(call.name) is Reason.LINEAR:
            return
        if self._reject_linear(call, running, product.operands):
            return
        for operand in product.weights_candidates():
            weights = operand.weights
            if weights.dim() < 3:
                continue
            shape = tuple(weights.shape)
            # weights are the softmax of something else than a product
            if any(are_weights_of(scores, weights) for scores in call.softmaxes):
                message = _NOT_DOT_PRODUCT.format(scores=shape)
                self.reject(call, Reason.NOT_DOT_PRODUCT, message)
                continue
            # weights have the size of a product (q·k), and sum over an axis of the values
            has_size_of_scores = weights.numel() in call.products
            if has_size_of_scores and weights.shape[-1] in operand.values.shape[-2:]:
                self.reject(call, Reason.NO_SOFTMAX, _NO_SOFTMAX.format(scores=shape))

    def on_contraction(
        self, call: Call, running: Sequence[Call], operands: Sequence[Tensor]
    ) -> None:
        """Look at a product of three and more activations, which attention has no use for."""
        self._reject_linear(call, running, operands)

    # m = kᵀ v, (…, 8, 14) @ (…, 14, 8) -> (…, 8, 8), sums over 14 tokens and has no axis of tokens
    # left. Then q m, (…, 14, 8) @ (…, 8, 8): m is the operand that gives linear attention away.
    def _reject_linear(
        self, call: Call, running: Sequence[Call], operands: Sequence[Tensor]
    ) -> bool:
        """Reject linear attention: True if an operand is a product that was summed over tokens."""
        token_counts = possible_token_counts(running)
        for operand in operands:
            earlier: Product | None = call.products.get(operand.numel())
            if earlier is None:
                continue
            summed = earlier.summed_size
            outer_sizes = earlier.outer_sizes
            if summed is None or summed < 2 or not outer_sizes:
                continue
            sums_tokens = any(count % summed == 0 for count in token_counts)
            has_token_axis = any(size in (*token_counts, summed) for size in outer_sizes)
            if sums_tokens and not has_token_axis:
                self.reject(call, Reason.LINEAR, _LINEAR)
                return True
        return False
