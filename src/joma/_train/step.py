"""One optimiser step of the language model: same arithmetic as the plain loop, half the time.

What is saved: logits are never whole (`projection.Projection`), the embedding's dense gradient is one reused buffer,
and the optimiser is the fused one, to which clipping is handed as a divisor instead of another pass over all gradients.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from joma._train.model import LanguageModel
from joma._train.projection import Embedding, Projection, clip_scale


class Stepper:
    """Make optimiser steps. Each of several processes has its share of the streams; gradients are averaged."""

    def __init__(
        self,
        model: LanguageModel,
        lr: float,
        clip: float,
        weight_decay: float = 0.0,
        *,
        momentum: float | None = None,
    ) -> None:
        """Take Adam, or SGD if ``momentum`` is a number, 0 included."""
        self.model = model
        self.clip = clip
        self._projection = Projection(model.decoder.weight, model.decoder.bias)
        self._embedding = Embedding(model.embed.weight)
        self._inner = list(model.encoder.parameters())
        options: Any = {"lr": lr, "weight_decay": weight_decay, "fused": True}
        self.optimizer: torch.optim.Optimizer
        if momentum is None:
            self.optimizer = torch.optim.Adam(model.parameters(), **options)
        else:
            self.optimizer = torch.optim.SGD(model.parameters(), momentum=momentum, **options)
        self._processes = 1
        if dist.is_available() and dist.is_initialized():
            self._processes = dist.get_world_size()

    def step(self, tokens: Tensor, targets: Tensor, layer: int | None = None) -> float:
        """Make a step on a window (B, T), of all parameters or of one ``layer``.

        Return the mean loss of all processes.
        """
        loss, square_norm = self.gradients(tokens, targets)
        if layer is None:
            self._update(square_norm)
            return loss
        trained = {id(parameter) for parameter in self.model.encoder.layers[layer].parameters()}
        held = [(p, p.grad) for p in self.model.parameters() if id(p) not in trained]
        for parameter, _ in held:
            parameter.grad = None  # optimisers pass over what has none
        gradients = [p.grad for p in self._inner if p.grad is not None]
        self._update(torch.stack([torch.linalg.vector_norm(g) for g in gradients]).square().sum())
        for parameter, gradient in held:
            parameter.grad = gradient
        return loss

    def _update(self, square_norm: Tensor) -> None:
        """Let the optimiser make its step with clipped gradients."""
        scale = 1.0
        if self.clip > 0:
            scale = clip_scale(square_norm, self.clip)
        device = self.model.embed.weight.device
        # the protocol of gradient scalers: the fused kernel divides by it on the way
        self.optimizer.grad_scale = torch.tensor(scale, device=device)  # type: ignore[attr-defined]
        self.optimizer.found_inf = torch.tensor(0.0, device=device)  # type: ignore[attr-defined]
        self.optimizer.step()

    def renew(self) -> None:
        """Forget Adam's moments, as a new Adam does; its hooks and whoever else holds it stay."""
        self.optimizer.state.clear()

    def gradients(self, tokens: Tensor, targets: Tensor) -> tuple[float, Tensor]:
        """Write all gradients; return the mean loss and their squared norm."""
        model = self.model
        for parameter in self._inner:
            parameter.grad = None
        self._embedding.clear()
        rows = torch.nn.functional.embedding(tokens, model.embed.weight.detach()).requires_grad_()
        states = model.encode(rows)
        flat = states.detach().flatten(0, 1)
        loss, gradient = self._projection.loss(flat, targets.flatten())
        states.backward(gradient.view_as(states))
        assert rows.grad is not None
        places = tokens
        row_gradient = rows.grad  # (B, T, d)
        if self._processes > 1:
            loss, places, row_gradient = self._average(loss, tokens, rows.grad)
        self._embedding.add(places, row_gradient)
        dense = [
            p.grad
            for p in (*self._inner, model.decoder.weight, model.decoder.bias)
            if p.grad is not None
        ]
        norms = torch.stack([torch.linalg.vector_norm(g) for g in dense])
        return float(loss), norms.square().sum() + self._embedding.square_norm()

    def _average(
        self, loss: Tensor, tokens: Tensor, gradient: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Average over processes; of the embedding only the rows that occur are exchanged."""
        n = self._processes
        for parameter in (*self._inner, self.model.decoder.weight, self.model.decoder.bias):
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad)
            parameter.grad /= n
        loss = loss.clone()
        dist.all_reduce(loss)
        all_tokens = [torch.empty_like(tokens) for _ in range(n)]
        all_gradients = [torch.empty_like(gradient) for _ in range(n)]
        dist.all_gather(all_tokens, tokens.contiguous())
        dist.all_gather(all_gradients, gradient.contiguous())
        return loss / n, torch.stack(all_tokens), torch.stack(all_gradients) / n

    @torch.no_grad()
    def loss(self, tokens: Tensor, targets: Tensor) -> float:
        """Return the mean loss in eval mode, without gradients."""
        training = self.model.training
        self.model.eval()
        try:
            states = self.model(tokens, project=False)
        finally:
            self.model.train(training)
        return float(self._projection.value(states.flatten(0, 1), targets.flatten()))
