"""Cross-entropy over a large vocabulary: loss and all gradients in one pass, without the logits ever being whole.

Plain: logits L = X Wᵀ + b (N, V), log-softmax, and their gradients, each a pass over N·V numbers in main memory. Here a
chunk of rows stays in cache from the first product to the last. With E = exp(L) unnormalised and Z its row sums,

    dX = (E W)/Z − W[y],      dW = Eᵀ(X/Z) − Σ_i 1[y_i] x_i,      db = Eᵀ(1/Z) − counts,

so the normalisation 1/Z is applied to the small factors. E is shifted by the row's maximum only where a bound on the
logits does not exclude overflow.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

ROWS = 140  # at a time: 140 · 28,782 floats are 16 MB
_SAFE = 60.0  # exp(60) · 10⁶ words is far from overflow, exp(−60) · 10⁻⁶ far from underflow


class Projection:
    """The decoder's weight (V, d) and bias (V,) with gradients that are written in place, step after step."""

    def __init__(self, weight: Tensor, bias: Tensor) -> None:
        self.weight, self.bias = weight, bias
        weight.grad, bias.grad = torch.empty_like(weight), torch.empty_like(bias)
        self._logits = weight.new_empty(ROWS, weight.shape[0])

    @torch.no_grad()
    def loss(self, x: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Mean cross-entropy of x (N, d) against targets (N,), and its gradient with respect to x.

        The gradients of weight and bias are written to their ``.grad``.
        """
        W, b = self.weight, self.bias
        dW, db = W.grad, b.grad
        assert dW is not None
        assert db is not None
        N = len(x)
        bound = float(torch.linalg.vector_norm(W, dim=1).amax() * torch.linalg.vector_norm(x, dim=1).amax())
        safe = bound + float(b.abs().amax()) < _SAFE
        dx = torch.empty_like(x)
        total = x.new_zeros((), dtype=torch.float64)
        for start in range(0, N, ROWS):
            part = slice(start, min(N, start + ROWS))
            y, rows = targets[part], x[part]
            E = self._logits[: len(y)]
            torch.addmm(b, rows, W.T, out=E)
            if not safe:
                E.sub_(E.amax(dim=1, keepdim=True))
            chosen = E.gather(1, y[:, None])[:, 0]
            E.exp_()
            Z = E.sum(dim=1)
            total += (Z.log() - chosen).double().sum()
            inverse = (1 / (N * Z))[:, None]
            torch.mm(E, W, out=dx[part])
            dx[part] *= inverse
            scaled = rows * inverse
            if start == 0:
                torch.mm(E.T, scaled, out=dW)
                torch.mv(E.T, inverse[:, 0], out=db)
            else:
                dW.addmm_(E.T, scaled)
                db.addmv_(E.T, inverse[:, 0])
        dx.sub_(W[targets], alpha=1 / N)
        dW.index_add_(0, targets, x, alpha=-1 / N)
        db.index_add_(0, targets, torch.ones_like(targets, dtype=b.dtype), alpha=-1 / N)
        return (total / N).to(x.dtype), dx

    @torch.no_grad()
    def value(self, x: Tensor, targets: Tensor) -> Tensor:
        """The mean cross-entropy alone."""
        total = x.new_zeros((), dtype=torch.float64)
        for start in range(0, len(x), ROWS):
            y = targets[start : start + ROWS]
            logits = self._logits[: len(y)]
            torch.addmm(self.bias, x[start : start + ROWS], self.weight.T, out=logits)
            total += (logits.logsumexp(dim=1) - logits.gather(1, y[:, None])[:, 0]).double().sum()
        return (total / len(x)).to(x.dtype)


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
        self._touched = flat if self._touched is None else torch.cat([self._touched, flat])

    def square_norm(self) -> Tensor:
        """‖gradient‖² from the rows that are not zero."""
        assert self.weight.grad is not None
        if self._touched is None:
            return self.weight.new_zeros(())
        return self.weight.grad[self._touched.unique()].square().sum()


def clip_scale(square_norm: Tensor, limit: float) -> float:
    """What gradients are divided by so that their norm is at most ``limit``, as in `clip_grad_norm_`."""
    norm = math.sqrt(float(square_norm))
    return max(1.0, (norm + 1e-6) / limit)
