"""Cross-entropy over a large vocabulary: loss and all gradients in one pass, without the logits ever being whole.

Plain: logits L = X Wᵀ + b (N, V), log-softmax, and their gradients, each a pass over N·V numbers in main memory. Here a
block of rows and words stays in cache from product to product. With E = exp(L) unnormalised and Z its row sums,

    dX = (E W)/Z − W[y],      dW = Eᵀ(X/Z) − Σ_i 1[y_i] x_i,      db = Eᵀ(1/Z) − counts,

so the normalisation 1/Z is applied to the small factors. E is shifted by the row's maximum only where a bound on the
logits does not exclude overflow.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

ROWS, WORDS = 350, 2048  # a block: products of this shape run at full speed, and it fits the cache
_SAFE = 60.0  # exp(60) · 10⁶ words is far from overflow, exp(−60) · 10⁻⁶ far from underflow


class Projection:
    """The decoder's weight (V, d) and bias (V,) with gradients that are written in place, step after step."""

    def __init__(self, weight: Tensor, bias: Tensor) -> None:
        self.weight = weight
        self.bias = bias
        weight.grad = torch.empty_like(weight)
        bias.grad = torch.empty_like(bias)
        V = weight.shape[0]
        self._parts = [slice(start, min(V, start + WORDS)) for start in range(0, V, WORDS)]
        self._buffer = weight.new_empty(ROWS * V)

    @torch.no_grad()
    def loss(self, x: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return the mean cross-entropy of x (N, d) against targets (N,), and its gradient by x.

        The gradients of weight and bias are written to their ``.grad``.
        """
        W, b = self.weight, self.bias
        dW, db = W.grad, b.grad
        assert dW is not None
        assert db is not None
        N = len(x)
        dx = torch.zeros_like(x)
        total = x.new_zeros((), dtype=torch.float64)
        safe = self._is_safe(x)
        for start in range(0, N, ROWS):
            here = slice(start, start + ROWS)
            rows = x[here]  # (n, d)
            y = targets[here]  # (n,)
            out = dx[here]  # (n, d)
            blocks = self._blocks(len(rows))
            target_logits = (rows * W[y]).sum(dim=1) + b[y]  # (n,)
            top: Tensor | None = None
            if not safe:
                top = self._largest(rows, blocks)  # (n,)
            Z = rows.new_zeros(len(rows))
            for E, part in zip(blocks, self._parts, strict=True):
                torch.addmm(b[part], rows, W[part].T, out=E)
                if top is not None:
                    E.sub_(top[:, None])
                Z += E.exp_().sum(dim=1)
                out.addmm_(E, W[part])
            log_Z = Z.log()
            if top is not None:
                log_Z = log_Z + top
            total += (log_Z - target_logits).double().sum()
            inverse = (1 / (N * Z))[:, None]
            out *= inverse
            scaled = rows * inverse  # (n, d)
            keep = float(start > 0)
            for E, part in zip(blocks, self._parts, strict=True):
                dW[part].addmm_(E.T, scaled, beta=keep)
                db[part].addmv_(E.T, inverse[:, 0], beta=keep)
        dx.sub_(W[targets], alpha=1 / N)
        dW.index_add_(0, targets, x, alpha=-1 / N)
        db.index_add_(0, targets, torch.ones_like(targets, dtype=b.dtype), alpha=-1 / N)
        return (total / N).to(x.dtype), dx

    @torch.no_grad()
    def value(self, x: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross-entropy alone."""
        W, b = self.weight, self.bias
        total = x.new_zeros((), dtype=torch.float64)
        for start in range(0, len(x), ROWS):
            rows = x[start : start + ROWS]  # (n, d)
            y = targets[start : start + ROWS]  # (n,)
            E = self._blocks(len(rows))[0]
            parts = [
                torch.addmm(b[p], rows, W[p].T, out=E[:, : p.stop - p.start]).logsumexp(1)
                for p in self._parts
            ]
            log_Z = torch.stack(parts).logsumexp(0)
            total += (log_Z - (rows * W[y]).sum(dim=1) - b[y]).double().sum()
        return (total / len(x)).to(x.dtype)

    def _blocks(self, rows: int) -> list[Tensor]:
        """Return room for the logits of so many rows: one contiguous (rows, words) per part."""
        return [
            self._buffer[rows * part.start : rows * part.stop].view(rows, part.stop - part.start)
            for part in self._parts
        ]

    def _largest(self, rows: Tensor, blocks: list[Tensor]) -> Tensor:
        """Return the largest logit of each row."""
        largest = [
            torch.addmm(self.bias[part], rows, self.weight[part].T, out=E).amax(dim=1)
            for E, part in zip(blocks, self._parts, strict=True)
        ]
        return torch.stack(largest).amax(dim=0)

    def _is_safe(self, x: Tensor) -> bool:
        """True if no logit can overflow or vanish as exp: |L| ≤ ‖x‖‖w‖ + |b|."""
        bound = (
            torch.linalg.vector_norm(self.weight, dim=1).amax()
            * torch.linalg.vector_norm(x, dim=1).amax()
        )
        return bool(bound + self.bias.abs().amax() < _SAFE)


class Embedding:
    """An embedding (V, d) whose dense gradient is one buffer: only rows touched before are cleared."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight
        weight.grad = torch.zeros_like(weight)
        self._touched: Tensor | None = None

    def clear(self) -> None:
        """Zero the gradient."""
        assert self.weight.grad is not None
        if self._touched is not None:
            self.weight.grad.index_fill_(0, self._touched, 0.0)
        self._touched = None

    @torch.no_grad()
    def add(self, tokens: Tensor, gradient: Tensor) -> None:
        """Add the gradient (…, d) with respect to the rows of ``tokens`` (…)."""
        assert self.weight.grad is not None
        flat = tokens.flatten()
        self.weight.grad.index_add_(0, flat, gradient.flatten(0, -2))
        if self._touched is None:
            self._touched = flat
        else:
            self._touched = torch.cat([self._touched, flat])

    def square_norm(self) -> Tensor:
        """Return ‖gradient‖² from the rows that are not zero."""
        assert self.weight.grad is not None
        if self._touched is None:
            return self.weight.new_zeros(())
        return self.weight.grad[self._touched.unique()].square().sum()


def clip_scale(square_norm: Tensor, limit: float) -> float:
    """Return the divisor of gradients that makes their norm at most ``limit``, as in `clip_grad_norm_`."""
    norm = math.sqrt(float(square_norm))
    return max(1.0, (norm + 1e-6) / limit)
