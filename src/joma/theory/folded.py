"""The folded flow: attention integrated out of the block by the first integrals of Theorem 1 (Section 3)."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from joma.theory._block import checked, one_query_block
from joma.theory._charts import QuadricChart, WayChart
from joma.theory._integrate import System
from joma.theory.flows import Flow
from joma.theory.setting import Attention, Task


class FoldedFlow(Flow):
    """The block with its attention integrated out: the state is (v, ξ) alone, z comes from the first integral.

    Exact for linear and exp attention (Theorem 1). For softmax attention it uses Eqn. 18 with b̄ at the start,
    an approximation whose error is the difference to the ``JointFlow``.

    The arguments, and those of ``integrate``, are those of ``JointFlow``; there is no explicit embedding.
    """

    def __init__(
        self,
        task: Task,
        attention: str | Attention = "softmax",
        activation: Any = "linear",
        mlp_lr: float = 1.0,
        attention_lr: float = 1.0,
        *,
        temperature: float | None = None,
        A: float | None = None,
        embedding: ArrayLike | None = None,
    ) -> None:
        settings = checked(task, attention, activation, mlp_lr, attention_lr, temperature, A)
        if embedding is not None:
            raise ValueError("the folded flow needs orthonormal embeddings, so it takes no embedding; use JointFlow")
        super().__init__(task, one_query_block(task, settings))

    def _system(
        self, v0: ArrayLike | None, xi0: ArrayLike | None, z0: ArrayLike | None, w0: ArrayLike | None
    ) -> System:
        if w0 is not None:
            raise ValueError("w0 goes with an explicit embedding; without one give v0 and xi0")
        block, (v, xi, z) = self.block, self.start(v0, xi0, z0)
        if self.attention.kind == "linear" and self.ratio > 0:
            return System(block, *QuadricChart.at(v, xi, z, self.ratio))
        b_bar = None
        if self.attention.kind == "softmax":
            b_bar = block.p @ self.attention.weights(z, block.x)
            block = block.folded(b_bar)
        chart = WayChart(v, z, self.ratio / (2 * self.attention.temperature), b_bar)
        return System(block, chart, np.concatenate([np.zeros(v.size), xi]))
