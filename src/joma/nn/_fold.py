"""Attention that follows the MLP weights: the step laws behind Theorem 1, as a layer's state.

A step of the optimiser moves the lower weights by Δv, and attention has to move with them. Plain gradient descent has
v⁺ = v − ηG with the gradient G = ∂L/∂v, and z⁺ = z − rη ∂L/∂z. There are two ways to have that without training z.

From the weights alone, for logits z (M,) that all queries share, sums over the nodes k:

    exp       Δz  = (r/T) Σ v ∘ Δv                         the change of (r/2T) Σ v², less (r/2T) Σ Δv²: T1.descent_law
    linear    zΔz =  r    Σ v ∘ Δv
    softmax   Δz  ≈ (r/T) Σ [ṽ ∘ Δv − b̄ (ṽᵀΔv)]             ṽ = v − b̄ᵀv, b̄ the mean attention of the step's samples

The first two are exact, on any minibatches; heavy-ball momentum μ adds R to their right-hand sides, with R = 0 at
first, R⁺ = μ (R − (r/T) Σ Δv²) for exp and R⁺ = μ (R + Δz² − r Σ Δv²) for linear attention. The third leaves out how
the samples differ in their attention, and no function of v could put it right (LAWS.no_go).

By parts, for any logits. Where each query has logits of its own, the weights fix the sum over queries only, and what
each query brought has to be carried: every backward pass leaves ∂L/∂z at the (query, word) pairs of its samples, and
the step moves them by −rη ∂L/∂z, with η = ‖Δv‖/‖G‖, as far as the weights went for their gradient. Under plain gradient
descent that is the learning rate. With momentum μ the logits go at once where the velocity would take them in the end,
by η/(1 − μ).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class Carried(nn.Module):
    """The logits of a folded block, and what is needed to move them when the weights have moved.

    Arguments:
        z: (M,) shared by all queries, or (Q, M).
        v: (M, K) the weights that belong to them.
        kind: "linear", "exp" or "softmax".
        carry: "weights" (shared logits only) or "parts".
        ratio: r, the rate of attention over that of the MLP.
        temperature: T.
        momentum: μ of the optimiser.
    """

    z: Tensor
    weights: Tensor  # (M, K) as they were when z was last moved
    last_step: Tensor  # (M, K), or nothing without momentum
    memory: Tensor  # (M,) R, or nothing without momentum
    off_descent: Tensor  # () the largest ‖Δv + ηG‖/‖Δv‖ so far

    def __init__(
        self,
        z: Tensor,
        v: Tensor,
        kind: str,
        carry: str,
        ratio: float,
        temperature: float,
        momentum: float,
    ) -> None:
        super().__init__()
        self.kind, self.carry = kind, carry
        self.ratio, self.temperature, self.momentum = ratio, temperature, momentum
        self.register_buffer("z", z.detach().clone())
        self.register_buffer("weights", v.detach().clone())
        size = len(v) if momentum else 0
        self.register_buffer(
            "last_step",
            torch.zeros(size, v.shape[1] if size else 0, dtype=v.dtype, device=v.device),
        )
        self.register_buffer("memory", v.new_zeros(size))
        self.register_buffer("off_descent", v.new_zeros(()))
        self.forget()

    # -- what the backward pass leaves ---------------------------------------------------------------------

    def forget(self) -> None:
        """Drop what backward passes have left."""
        self._gradient: Tensor | None = None  # (M, K) G
        self._parts: list[tuple[Tensor, Tensor]] = []  # places in z.ravel() and ∂L/∂z there
        self._attention: Tensor | None = None  # (M,) b̄, summed over passes
        self._passes, self._task = 0, -1

    def begin(self, v: Tensor) -> None:
        """A backward pass has reached the block: gradients that were thrown away without a step are forgotten."""
        task = torch._C._current_graph_task_id()
        if task != self._task and (v.grad is None or not v.grad.any()):
            self.forget()
        self._task = task

    def add_gradient(self, gradient: Tensor, attention: Tensor | None) -> None:
        """A gradient of v that autograd is about to add to ``v.grad``."""
        self._gradient = gradient if self._gradient is None else self._gradient + gradient
        self._passes += 1
        if attention is not None:
            self._attention = attention if self._attention is None else self._attention + attention

    def add_part(self, places: Tensor, gradient: Tensor) -> None:
        """∂L/∂z at places of ``z.ravel()``."""
        self._parts.append((places.flatten(), gradient.flatten()))

    def pending(self) -> list[Tensor]:
        """What backward passes have left and no step has used yet."""
        single = [tensor for tensor in (self._gradient, self._attention) if tensor is not None]
        return [*single, *(tensor for part in self._parts for tensor in part)]

    # -- what a step does ----------------------------------------------------------------------------------

    @torch.no_grad()
    def settle(self, v: Tensor) -> None:
        """Move the logits if the weights have moved since; do nothing if they have not."""
        if torch.equal(v, self.weights):
            return
        gradient = self._gradient
        if gradient is None:
            if torch.allclose(v, self.weights, rtol=0.0, atol=0.0, equal_nan=True):
                return  # training has diverged: no NaN is equal to itself
            raise RuntimeError(
                "the weights v of a folded JoMABlock have changed without a backward pass through it (set, loaded or "
                "averaged by hand?), so that its attention is not known. Call block.rebase() to keep the attention as "
                "it is and start from the present weights, or use folded=False"
            )
        step = v - self.weights
        news = (
            step - self.momentum * self.last_step if self.momentum else step
        )  # what this step's gradient brought
        norm = gradient.square().sum()
        along = torch.where(norm > 0, -(news * gradient).sum() / norm, 0.0)
        off = (news + along * gradient).norm() / news.norm()
        self.off_descent.copy_(torch.maximum(self.off_descent, torch.nan_to_num(off)))
        if self.carry == "weights":
            self.z += self._from_weights(step)
        else:
            rate = torch.where(norm > 0, torch.copysign(news.norm() / norm.sqrt(), along), 0.0)
            for places, part in self._parts:
                self.z.view(-1).index_add_(
                    0, places, (-self.ratio * rate / (1 - self.momentum)) * part
                )
        self.weights.copy_(v)
        if self.momentum:
            self.last_step.copy_(step)
        self.forget()

    def _from_weights(self, step: Tensor) -> Tensor:
        """Δz (M,) of shared logits, from Δv (M, K)."""
        r, T, v = self.ratio, self.temperature, self.weights
        if self.kind == "softmax":
            assert self._attention is not None
            b_bar = self._attention / self._passes
            centred = (v - b_bar @ v) * step  # (M, K)
            return (r / T) * (centred.sum(dim=1) - b_bar * centred.sum())
        drive = (r if self.kind == "linear" else r / T) * (v * step).sum(dim=1)
        if self.momentum:
            drive = drive + self.memory
        dz = self._quotient(drive) if self.kind == "linear" else drive
        if self.momentum:
            square = step.square().sum(dim=1)
            news = dz.square() - r * square if self.kind == "linear" else -(r / T) * square
            self.memory.add_(news).mul_(self.momentum)
        return dz

    def _quotient(self, drive: Tensor) -> Tensor:
        """drive/z (M,) of linear attention, refused where z is so near 0 that the quotient is rounding only."""
        noise = torch.finfo(drive.dtype).eps * self.ratio * self.weights.square().sum(dim=1)
        lost = self.z.abs() <= noise
        if lost.any():
            word = int(lost.nonzero()[0])
            raise ArithmeticError(
                f"the logit of word {word} is {float(self.z[word]):.2g}: under linear attention a word with logit 0 "
                "moves no weight, so that its attention cannot be had from the weights. Use carry='parts', or exp"
            )
        return drive / self.z


class WatchedWeights(torch.autograd.Function):
    """The weights as they are; on the way back their gradient is shown to ``carried``."""

    @staticmethod
    def forward(ctx: Any, v: Tensor, carried: Carried, attention: Tensor | None) -> Tensor:
        """v, unchanged."""
        ctx.v, ctx.carried, ctx.attention = v, carried, attention
        return v.view_as(v)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        """The gradient, unchanged."""
        ctx.carried.begin(ctx.v)
        ctx.carried.add_gradient(gradient, ctx.attention)
        return gradient, None, None


class WatchedLogits(torch.autograd.Function):
    """The logits of a batch as they are; on the way back their gradient is left with ``carried``."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, carried: Carried, places: Tensor, v: Tensor) -> Tensor:
        """The logits, unchanged."""
        ctx.carried, ctx.places, ctx.v = carried, places, v
        return logits.view_as(logits)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None, None]:
        """Nothing: there is no parameter behind the logits."""
        ctx.carried.begin(ctx.v)
        ctx.carried.add_part(ctx.places, gradient)
        return None, None, None, None
