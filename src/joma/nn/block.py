"""`JoMABlock`: a Transformer block over words, with attention of its own or folded into the MLP (Section 3, Theorem 1).

A query word q sees a context of words with frequencies x (M,). With orthonormal embeddings (Section 2) the block is

    b = σ(z/T) ∘ x / A,     a = Σ_l b_l v_l + ξ_q,     h = φ(a)

with v = U_Cᵀw (M, K) and ξ = U_Qᵀw (Q, K), the residual connection, as parameters. The logits z are parameters too, or
follow from the steps of v (`_fold`).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from joma._attention import Attention
from joma._suggest import unknown_name
from joma.nn._fold import Carried, WatchedLogits, WatchedWeights

PATTERNS, CARRIES = ("per_query", "shared"), ("weights", "parts")
Carry = Literal["weights", "parts"]


def _linear(a: Tensor) -> Tensor:
    return a


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "linear": _linear, "relu": functional.relu, "leaky_relu": functional.leaky_relu, "gelu": functional.gelu,
    "silu": functional.silu,
}  # fmt: skip


def _count(value: Any, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be a positive integer, got {value!r}")
    return value


class JoMABlock(nn.Module):
    """One Transformer block over words, whose attention is trained as usual or follows the MLP (``folded=True``).

    A folded block has no attention parameters: the optimiser sees ``v`` and ``xi`` alone. Under plain SGD, on any
    minibatches, it is the joint block to rounding (not with ``carry="weights"`` under softmax). Under other optimisers
    it is a block of its own kind; ``off_descent`` says how far the steps were from plain gradient descent.

    Arguments:
        words: M, the number of context words.
        nodes: K, the number of hidden nodes.
        queries: Q, the number of query words; ``words`` by default.
        attention: "softmax", "exp" or "linear", or a `joma.theory.Attention` with its temperature and constant.
        activation: "relu", "gelu", "silu", "leaky_relu", "linear", or a function from a tensor to a tensor.
        pattern: "per_query" (each query has logits of its own) or "shared" (all queries have the same).
        folded: whether attention follows the MLP weights instead of being trained.
        residual: whether the query itself is added (ξ).
        ratio: r, the learning rate of attention over that of the MLP. A joint block leaves that to its optimiser:
            see `parameter_groups`.
        carry: how a folded block knows its attention. "weights": from the weights alone, for shared logits; exact for
            exp and linear attention, an approximation for softmax. "parts": what each backward pass brought to each
            logit is carried along; exact for all three. By default "weights" where that is exact, else "parts".
        momentum: of the optimiser, for a folded block: heavy ball with a constant rate. Exact with ``carry="weights"``.
        dtype, device: of the parameters.

    >>> block = JoMABlock(words=100, nodes=8, attention="exp", folded=True)
    >>> h = block(torch.tensor([3, 5]), torch.tensor([[1, 2, 2], [7, -1, -1]]))
    >>> h.shape, [name for name, _ in block.named_parameters()]
    (torch.Size([2, 8]), ['v', 'xi'])
    """

    z: nn.Parameter | None
    xi: nn.Parameter | None
    carried: Carried | None

    def __init__(
        self,
        words: int,
        nodes: int,
        *,
        queries: int | None = None,
        attention: str | Attention = "softmax",
        activation: str | Callable[[Tensor], Tensor] = "relu",
        pattern: Literal["per_query", "shared"] = "per_query",
        folded: bool = False,
        residual: bool = True,
        ratio: float = 1.0,
        carry: Carry | None = None,
        momentum: float = 0.0,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.words, self.nodes = _count(words, "words"), _count(nodes, "nodes")
        self.queries = self.words if queries is None else _count(queries, "queries")
        self.kind = attention if isinstance(attention, Attention) else Attention(attention)
        if isinstance(activation, str) and activation not in ACTIVATIONS:
            raise ValueError(
                unknown_name(activation, ACTIVATIONS, "activation") + " Or give a function."
            )
        self.activation = ACTIVATIONS[activation] if isinstance(activation, str) else activation
        if not callable(self.activation):
            raise TypeError(
                f"activation must be a name or a function from a tensor to a tensor, got {activation!r}"
            )
        if pattern not in PATTERNS:
            raise ValueError(unknown_name(pattern, PATTERNS, "pattern"))
        if not (math.isfinite(ratio) and ratio >= 0):
            raise ValueError(f"ratio must be a number ≥ 0 (0 freezes attention), got {ratio}")
        self.pattern, self.ratio = pattern, float(ratio)
        make: dict[str, Any] = {"dtype": dtype, "device": device}
        self.v = nn.Parameter(0.1 * torch.randn(self.words, self.nodes, **make))
        self.xi = nn.Parameter(torch.zeros(self.queries, self.nodes, **make)) if residual else None
        shape = (self.words,) if pattern == "shared" else (self.queries, self.words)
        # linear attention rests at v = z = 0 and has no attention to anything at z = 0
        self.z = nn.Parameter(torch.full(shape, 1.0 if self.kind.kind == "linear" else 0.0, **make))
        self.carried = None
        if folded:
            self._fold(carry, momentum)
        elif momentum or carry is not None:
            raise ValueError(
                "carry and momentum are for folded blocks; a joint block leaves momentum to its optimiser"
            )

    # -- the block -----------------------------------------------------------------------------------------

    def forward(self, query: Tensor, context: Tensor) -> Tensor:
        """The hidden nodes of each place.

        Arguments:
            query: (...) words.
            context: (..., W) words, −1 where there is none; a place without any context has its residual only.

        Returns:
            h (..., K).
        """
        on, word = self._checked(query, context)
        b, v = self._attend(query, word, on)
        flat = word.reshape(-1, word.shape[-1])
        a = functional.embedding_bag(flat, v, mode="sum", per_sample_weights=b.reshape(flat.shape))
        a = a.reshape(*query.shape, self.nodes)
        return self.activation(a if self.xi is None else a + functional.embedding(query, self.xi))

    def causal(self, words: Tensor, window: int) -> Tensor:
        """The hidden nodes at every word of texts: each word is a query to the ``window`` words before it.

        Arguments:
            words: (B, L) numbers.
            window: how far back a word sees.

        Returns:
            h (B, L, K).
        """
        padded = functional.pad(words, (_count(window, "window"), 0), value=-1)
        return self(words, padded.unfold(1, window, 1)[:, : words.shape[1]])

    @torch.no_grad()
    def attention(self, query: Tensor, context: Tensor) -> Tensor:
        """The attention b (..., W) that each place of the context gets; see `forward`."""
        on, word = self._checked(query, context)
        return self._attend(query, word, on)[0]

    def _checked(self, query: Tensor, context: Tensor) -> tuple[Tensor, Tensor]:
        """Which places of the context hold a word (..., W), and the words, 0 elsewhere."""
        for name, value, low, high in (
            ("query", query, 0, self.queries),
            ("context", context, -1, self.words),
        ):
            if value.is_floating_point() or value.dtype == torch.bool:
                raise TypeError(f"{name} must hold numbers of words (integers), got {value.dtype}")
            if value.numel() and not low <= int(value.min()) <= int(value.max()) < high:
                raise ValueError(
                    f"{name} must be in {low} … {high - 1}, got {int(value.min())} … {int(value.max())}"
                )
        if context.ndim == 0 or context.shape[:-1] != query.shape:
            raise ValueError(
                f"context must be (..., W) for query (...): got {(*context.shape,)} and {(*query.shape,)}"
            )
        return context >= 0, context.clamp(min=0)

    def _attend(self, query: Tensor, word: Tensor, on: Tensor) -> tuple[Tensor, Tensor]:
        """b (..., W), and v (M, K) as it is to be used with it."""
        places = word if self.pattern == "shared" else query[..., None] * self.words + word
        if self.carried is None:
            assert self.z is not None
            return self._scores(
                functional.embedding(places, self.z.view(-1, 1)).squeeze(-1), on
            ), self.v
        carried = self.carried
        carried.settle(self.v)
        logits = carried.z.view(-1)[places]
        if not torch.is_grad_enabled():
            return self._scores(logits, on), self.v
        if not self.v.requires_grad:
            raise RuntimeError(
                "v is frozen, and the attention of a folded block moves with it only; a joint block (folded=False, or "
                "block.unfold()) trains attention above a frozen MLP"
            )
        if carried.carry == "parts":
            _refuse_many_processes()
            logits = WatchedLogits.apply(logits.requires_grad_(), carried, places, self.v)  # type: ignore[no-untyped-call]
        b, b_bar = self._scores(logits, on), None
        if carried.carry == "weights" and self.kind.kind == "softmax":
            b_bar = torch.zeros_like(carried.z).index_add_(0, word.flatten(), b.flatten()) / max(
                1, query.numel()
            )
        return b, WatchedWeights.apply(self.v, carried, b_bar)  # type: ignore[no-untyped-call]

    def _scores(self, logits: Tensor, on: Tensor) -> Tensor:
        """b (..., W) from the logits (..., W) of the context's words."""
        scaled = logits / self.kind.temperature
        if self.kind.kind == "softmax":
            return (
                torch.softmax(scaled.masked_fill(~on, torch.finfo(scaled.dtype).min), dim=-1) * on
            )
        x = on / on.sum(dim=-1, keepdim=True).clamp(min=1).to(scaled.dtype)
        return x * (scaled if self.kind.kind == "linear" else torch.exp(scaled) / self.kind.A)

    # -- the fold ------------------------------------------------------------------------------------------

    @property
    def folded(self) -> bool:
        """Whether attention follows the MLP weights."""
        return self.carried is not None

    @property
    def logits(self) -> Tensor:
        """z as of now: (M,) if shared, else (Q, M); detached."""
        if self.carried is not None:
            self.carried.settle(self.v)
            return self.carried.z.clone()
        assert self.z is not None
        return self.z.detach().clone()

    @property
    def off_descent(self) -> float:
        """Of a folded block: how far its steps were from plain gradient descent, the largest ‖Δv + ηG‖/‖Δv‖ so far.

        Rounding for plain SGD, and for momentum that the block was told of: there the folds that can be exact are.
        """
        if self.carried is None:
            raise TypeError("a joint block does not follow steps, so it has no off_descent")
        self.carried.settle(self.v)
        return float(self.carried.off_descent)

    def fold(self, carry: Carry | None = None, momentum: float = 0.0) -> JoMABlock:
        """A folded copy that starts from the present weights and attention.

        Arguments:
            carry, momentum: as for the block.

        Returns:
            A block of its own.
        """
        other = self.unfold()
        other._fold(carry, momentum)
        return other

    def unfold(self) -> JoMABlock:
        """A joint copy that starts from the present weights and attention.

        Returns:
            A block of its own.
        """
        z, other = self.logits, copy.deepcopy(self)
        other.carried, other.z = None, nn.Parameter(z)
        return other

    def rebase(self) -> None:
        """Take weights that were changed by hand for the present ones, and keep the attention of a folded block."""
        if self.carried is not None:
            self.carried.weights.copy_(self.v.detach())
            self.carried.last_step.zero_()
            self.carried.memory.zero_()
            self.carried.forget()

    def parameter_groups(self, lr: float) -> list[dict[str, Any]]:
        """Parameters for an optimiser: those of the MLP with rate ``lr``, of a joint block also z with ``ratio · lr``.

        Arguments:
            lr: the learning rate of the MLP.

        Returns:
            The groups, as `torch.optim` takes them.
        """
        groups: list[dict[str, Any]] = [
            {"params": [p for p in (self.v, self.xi) if p is not None], "lr": lr}
        ]
        return groups if self.z is None else [*groups, {"params": [self.z], "lr": self.ratio * lr}]

    def _fold(self, carry: Carry | None, momentum: float) -> None:
        assert self.z is not None
        kind = self.kind.kind
        if not (math.isfinite(momentum) and 0 <= momentum < 1):
            raise ValueError(f"momentum must be in 0 ≤ μ < 1, got {momentum}")
        if carry is None:
            carry = "weights" if self.pattern == "shared" and kind != "softmax" else "parts"
        if carry not in CARRIES:
            raise ValueError(unknown_name(carry, CARRIES, "carry"))
        if carry == "weights":
            if self.pattern != "shared":
                raise ValueError(
                    "the weights fix the sum of the logits over queries, not those of each query: carry='parts', or "
                    "pattern='shared'"
                )
            if kind == "softmax" and momentum:
                raise ValueError(
                    "softmax from the weights has no law for momentum: use carry='parts'"
                )
            if kind == "linear" and bool((self.z == 0).any()):
                raise ValueError(
                    "a word with logit 0 moves no weight under linear attention: carry='parts', or z ≠ 0"
                )
        settings = (kind, carry, self.ratio, self.kind.temperature, float(momentum))
        self.carried, self.z = Carried(self.z, self.v, *settings), None

    def _save_to_state_dict(self, *args: Any, **kwargs: Any) -> None:
        if self.carried is not None:
            self.carried.settle(
                self.v
            )  # gradients are not saved, so the last step has to be in what is
        super()._save_to_state_dict(*args, **kwargs)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        if self.carried is not None:
            self.carried.forget()

    def extra_repr(self) -> str:
        """For ``print``."""
        how = "folded" if self.folded else "joint"
        return f"{self.words} words, {self.queries} queries, {self.nodes} nodes, {self.kind.kind}, {self.pattern}, {how}"


def _refuse_many_processes() -> None:
    if (
        torch.distributed.is_available()
        and torch.distributed.is_initialized()
        and torch.distributed.get_world_size() > 1
    ):
        raise RuntimeError(
            "parts cannot be carried in several processes: each would see those of its own samples only. Use shared "
            "logits with carry='weights', or folded=False"
        )
