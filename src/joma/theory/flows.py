"""The joint flow of MLP and attention (Eqn. 2), and what it shares with the folded one.

A flow ties three things together: the block (``_block``: what moves (v, ξ, z), and how fast), a chart (``_charts``:
which numbers the state vector holds) and the integrator (``_integrate``). It keeps no state of an integration.

An explicit embedding U = [U_C, u_m] (d, M + 1) makes ``w`` (d, K) the state: v = U_Cᵀ w, ξ = u_mᵀ w and
ẇ = η U [Σ s b; Σ s].
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from joma.theory import _integrate
from joma.theory._block import Block, checked, one_query_block
from joma.theory._charts import EmbeddedChart, JointChart, State
from joma.theory._integrate import Solution, System
from joma.theory.optimisers import PLAIN, Optimiser
from joma.theory.setting import Activation, Array, Attention, Task, finite
from joma.theory.trajectory import Slide, Trajectory

Start = tuple[
    ArrayLike | None, ArrayLike | None, ArrayLike | None, ArrayLike | None
]  # v, ξ, z and w, as given


def starts(given: Mapping[str, tuple[ArrayLike | None, tuple[int, ...]]]) -> list[Array]:
    """Starting values by name, each with the shape it must have; zeros where None is given."""
    arrays = []
    for name, (value, shape) in given.items():
        array = np.zeros(shape) if value is None else finite(value, name, len(shape))
        if array.shape != shape:
            raise ValueError(f"{name} must have shape {shape}, got {array.shape}")
        arrays.append(array)
    return arrays


class Flow:
    """What all flows share: a task, the block that is trained on it, and the integration."""

    def __init__(self, task: Task, block: Block) -> None:
        self.task, self.block = task, block

    @property
    def attention(self) -> Attention:
        """The attention function."""
        return self.block.attention

    @property
    def activation(self) -> Activation:
        """φ and φ′."""
        return self.block.activation

    @property
    def mlp_lr(self) -> float:
        """The learning rate of (v, ξ)."""
        return self.block.mlp_lr

    @property
    def attention_lr(self) -> float:
        """The learning rate of z."""
        return self.block.attention_lr

    @property
    def ratio(self) -> float:
        """r = attention_lr / mlp_lr, the only way in which the two rates enter the first integrals."""
        return self.block.ratio

    def start(
        self, v0: ArrayLike | None = None, xi0: ArrayLike | None = None, z0: ArrayLike | None = None
    ) -> State:
        """(v, ξ, z) at the start, checked: zeros where none is given."""
        M, K = self.task.tokens, self.task.nodes
        v, xi, z = starts({"v0": (v0, (M, K)), "xi0": (xi0, (K,)), "z0": (z0, (M,))})
        return v, xi, z

    def _system(self, given: Start) -> System:
        """The block in the coordinates in which it is integrated, at its start."""
        raise NotImplementedError

    def integrate(
        self,
        t_end: float,
        v0: ArrayLike | None = None,
        xi0: ArrayLike | None = None,
        z0: ArrayLike | None = None,
        *,
        w0: ArrayLike | None = None,
        times: int | ArrayLike = 201,
        rtol: float = 1e-12,
        atol: float = 1e-13,
        method: str = "auto",
        max_steps: int = 20_000,
    ) -> Trajectory:
        """Integrate the flow from the given start (zeros where none is given) to ``t_end``.

        Arguments:
            t_end: end of the time span, which starts at 0.
            v0, xi0, z0: start, (M, K), (K,) and (M,).
            w0: start of the weights (d, K) instead of v0 and xi0, with an explicit embedding.
            times: how many evenly spaced output times, or the times themselves.
            rtol, atol: tolerances of the integrator.
            method: a SciPy stepper ("DOP853", "RK45", "Radau", "BDF", "LSODA"), or "auto": DOP853, and LSODA from
                where the flow turns out to be stiff.
            max_steps: give up, with the trajectory so far, after that many steps.

        Returns:
            a ``Trajectory``; its ``ending`` says what ended it and when, its ``status`` the same in a sentence ("done"
            where the whole time span was covered).
        """
        if not (isinstance(t_end, (int, float, np.number)) and np.isfinite(t_end) and t_end > 0):
            raise ValueError(f"t_end must be a positive number, got {t_end!r}")
        if isinstance(times, (int, np.integer)):
            if times < 2:
                raise ValueError(f"times must be at least 2 output times, got {times}")
            out = np.linspace(0.0, t_end, int(times))
        else:
            out = finite(times, "times", 1)
            if out.size == 0 or (np.diff(out) <= 0).any() or out[0] < 0 or out[-1] > t_end:
                raise ValueError(f"times must increase within [0, t_end = {t_end:g}]")
        solution = _integrate.integrate(
            self._system((v0, xi0, z0, w0)),
            out,
            float(t_end),
            rtol=rtol,
            atol=atol,
            method=method,
            max_steps=max_steps,
        )
        return self._trajectory(solution, None)

    def _descend(
        self, steps: int, step: float, given: Start, optimiser: Optimiser = PLAIN
    ) -> Trajectory:
        if int(steps) != steps or steps < 1:
            raise ValueError(f"steps must be a positive integer, got {steps!r}")
        if not (np.isfinite(step) and step > 0):
            raise ValueError(f"step must be a positive number, got {step!r}")
        solution = _integrate.descend(self._system(given), int(steps), step, optimiser)
        trajectory = self._trajectory(solution, float(step))
        return trajectory if optimiser == PLAIN else replace(trajectory, optimiser=optimiser)

    def _trajectory(self, solution: Solution, step: float | None) -> Trajectory:
        return Trajectory(**self._fields(solution, step))

    def _fields(self, solution: Solution, step: float | None) -> dict[str, Any]:
        """What every kind of trajectory is made from."""
        return {
            "flow": self,
            "t": solution.t,
            "v": np.stack(solution.v),
            "xi": np.stack(solution.xi),
            "z": np.stack(solution.z),
            "ending": solution.ending,
            "switches": solution.switches,
            "slides": tuple(
                Slide(int(self.block.first[i]), k, a, b) for i, k, a, b in solution.slides
            ),
            "step": step,
        }

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(N={self.task.samples}, M={self.task.tokens}, K={self.task.nodes}, "
            f"attention={self.attention.kind!r}, activation={self.activation.name!r}, mlp_lr={self.mlp_lr:g}, "
            f"attention_lr={self.attention_lr:g}, temperature={self.attention.temperature:g})"
        )


class OneQueryFlow(Flow):
    """A flow of one query's block; see ``JointFlow`` for the arguments."""

    embedding: Array | None = None

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
        gram: Array | None = None
        if embedding is not None:
            self.embedding = self._checked_embedding(embedding, task)
            gram = self.embedding.T @ self.embedding
        super().__init__(task, one_query_block(task, settings, gram))

    def _checked_embedding(self, embedding: ArrayLike, task: Task) -> Array:
        """An explicit embedding (d, M + 1), or an error that says what is wrong with it."""
        raise NotImplementedError


class JointFlow(OneQueryFlow):
    """MLP and attention trained together (Eqn. 2), by gradient flow or by gradient descent.

    Arguments:
        task: what the query token sees.
        attention: "linear", "exp" or "softmax".
        activation: "linear", "relu", "leaky_relu", "gelu", "silu", or a pair of callables (φ, φ′).
        mlp_lr, attention_lr: learning rates of (v, ξ) and of z; ``attention_lr=0`` freezes attention.
        temperature: divides the logits; A: the constant normaliser of exp attention.
        embedding: (d, M + 1) with the query's column last; the weights w are then integrated themselves.

    >>> task = Task.classification([[0.7, 0.3], [0.2, 0.8]], [0, 1])
    >>> path = JointFlow(task, attention="exp").integrate(2.0)
    >>> path.status, path.v.shape, bool(path.invariant().max_drift < 1e-9)
    ('done', (201, 2, 2), True)
    """

    def _checked_embedding(self, embedding: ArrayLike, task: Task) -> Array:
        array = finite(embedding, "embedding", 2)
        if array.shape[1] != task.tokens + 1:
            raise ValueError(
                f"embedding must be (d, M + 1) = (d, {task.tokens + 1}): one column per context token, the query last; "
                f"got shape {array.shape}"
            )
        return array

    def _system(self, given: Start) -> System:
        v0, xi0, _, w0 = given
        v, xi, z = self.start(*given[:3])
        if self.embedding is None:
            if w0 is not None:
                raise ValueError("w0 goes with an explicit embedding; without one give v0 and xi0")
            chart = JointChart(v.shape, xi.shape, z.shape)
            return System(self.block, chart, chart.pack(v, xi, z))
        if w0 is not None:
            if v0 is not None or xi0 is not None:
                raise ValueError("give either w0 or (v0, xi0), not both")
            (w,) = starts({"w0": (w0, (len(self.embedding), self.task.nodes))})
        else:
            w = self.embedding @ np.vstack([v, xi])
        return System(
            self.block, EmbeddedChart(self.embedding, self.mlp_lr), np.concatenate([w.ravel(), z])
        )

    def _fields(self, solution: Solution, step: float | None) -> dict[str, Any]:
        fields = super()._fields(solution, step)
        if self.embedding is not None:
            chart = EmbeddedChart(self.embedding, self.mlp_lr)
            fields["w"] = np.stack([chart.weights(y) for y in solution.y])
        return fields

    def descend(
        self,
        steps: int,
        step: float = 0.1,
        v0: ArrayLike | None = None,
        xi0: ArrayLike | None = None,
        z0: ArrayLike | None = None,
        *,
        w0: ArrayLike | None = None,
        optimiser: Optimiser = PLAIN,
    ) -> Trajectory:
        """Full-batch training with the given step size; by default gradient descent, the paper's own experiments.

        Time runs as n · step, so the trajectory lies beside the flow's. φ′(0) is taken as PyTorch takes it.

        Arguments:
            steps, step: how many steps, and the step size; each parameter's learning rate is step times the flow's.
            v0, xi0, z0, w0: start, as for ``integrate``.
            optimiser: of ``joma.theory.optimisers``: SGD (momentum, weight decay), SignDescent, Adam, AdamW.

        Returns:
            a ``Trajectory``; its ``invariant().law`` is the exact law of SGD, None for other optimisers.
        """
        return self._descend(steps, step, (v0, xi0, z0, w0), optimiser)
