"""The folded flow: attention integrated out of the block by the first integrals of Theorem 1 (Section 3)."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from joma.theory._charts import QuadricChart, WayChart
from joma.theory._integrate import System
from joma.theory.flows import OneQueryFlow, Start
from joma.theory.setting import Array, Task


class FoldedFlow(OneQueryFlow):
    """The block with its attention integrated out: the state is (v, ξ) alone, z comes from the first integral.

    Exact for linear and exp attention (Theorem 1). For softmax attention it uses Eqn. 18 with b̄ at the start,
    an approximation whose error is the difference to the ``JointFlow``.

    The arguments, and those of ``integrate``, are those of ``JointFlow``; there is no explicit embedding.
    """

    def _checked_embedding(self, embedding: ArrayLike, task: Task) -> Array:
        raise ValueError(
            "the folded flow needs orthonormal embeddings, so it takes no embedding; use JointFlow"
        )

    def _system(self, given: Start) -> System:
        if given[3] is not None:
            raise ValueError("w0 goes with an explicit embedding; without one give v0 and xi0")
        block, (v, xi, z) = self.block, self.start(*given[:3])
        if self.attention.kind == "linear" and self.ratio > 0:
            return System(block, *QuadricChart.at(v, xi, z, self.ratio))
        b_bar = None
        if self.attention.kind == "softmax":
            b_bar = block.p @ self.attention.weights(z, block.x)
            block = block.folded(b_bar)
        chart = WayChart(v, z, self.ratio / (2 * self.attention.temperature), b_bar)
        return System(block, chart, np.concatenate([np.zeros(v.size), xi]))
