"""Embeddings that train, and attention through them: what Section 7 leaves open.

The block of Eqn. 1 with the weights themselves as state: w (d, K), the embeddings U = [U_C, u_m] (d, M + 1), and logits
that are either free or z = U_Cᵀ W_K W_Qᵀ u_m. With B = E[s b] (M, K), σ = E[s] (K,) and ζ = E[Σ_k s_k (∂b/∂z)ᵀ v_k]:

    ẇ = η U [B; σ],       U̇ = η_u (w [B; σ]ᵀ + what the logits send back),
    ż = η_z ζ   or   Ẇ_K = η_z U_C ζ qᵀ,   Ẇ_Q = η_z u_m (Kᵀζ)ᵀ     with q = W_Qᵀu_m, K = U_Cᵀ W_K, z = K q

What is conserved (η = η_u = η_z = T = 1 where not said):

    frozen orthonormal U, free z    Theorem 1:  z − ½ Σ_k v_k²
    trained U, free z, any U        z_l − (η_z/2Tη_u) ‖u_l‖² (exp), z_l² − (η_z/η_u) ‖u_l‖² (linear); and U Uᵀ − w wᵀ
    z = U_Cᵀ W_K W_Qᵀ u_m           W_QᵀW_Q − W_KᵀW_K, for any U
    … where U trains too            also U Uᵀ − w wᵀ − W_Q W_Qᵀ − W_K W_Kᵀ

(the second line since u_lᵀu̇_l = η_u Σ_k v_lk B_lk and, for exp attention, ζ_l = Σ_k v_lk B_lk / T).

Under product logits and frozen orthonormal U, ż = (‖q‖² I + K Kᵀ) ζ, ζ = ½ d/dt Σ_k v_k² (exp): attention still follows
Σ v², through a positive definite matrix that itself grows. To first order it is that of the start.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from scipy.integrate import solve_ivp

from joma.theory._block import checked, one_query_block
from joma.theory.ending import Ending, EndingKind, done
from joma.theory.setting import Array, Task, finite


@dataclass(frozen=True, eq=False)
class EmbeddingPath:
    """An ``EmbeddingFlow``, integrated; shapes with time first."""

    t: Array  # (T,)
    w: Array = field(repr=False)  # (T, d, K)
    U: Array = field(repr=False)  # (T, d, M + 1)
    z: Array = field(repr=False)  # (T, M)
    W_Q: Array | None = field(default=None, repr=False)  # (T, d, e)
    W_K: Array | None = field(default=None, repr=False)  # (T, d, e)
    ending: Ending = field(kw_only=True)

    @property
    def status(self) -> str:
        """How the flow ended, in a sentence: "done", or why it ended early."""
        return str(self.ending)

    @property
    def v(self) -> Array:
        """U_Cᵀ w, (T, M, K)."""
        return np.swapaxes(self.U[:, :, :-1], 1, 2) @ self.w

    @property
    def preconditioner(self) -> Array:
        """‖q‖² I + K Kᵀ at the start, (M, M): ż = that · ζ for product logits."""
        if self.W_Q is None or self.W_K is None:
            raise ValueError("free logits have no preconditioner; give W_Q0 and W_K0 to the flow")
        q, K = self.W_Q[0].T @ self.U[0, :, -1], self.U[0, :, :-1].T @ self.W_K[0]
        return (q @ q) * np.eye(len(K)) + K @ K.T


def conserved(path: EmbeddingPath, *, trained: bool) -> Array:
    """What a path of exp attention with all rates 1 conserves by the table above, over time, (T, …).

    Arguments:
        trained: the embeddings train; else they are frozen and orthonormal.
    """
    if path.W_Q is None or path.W_K is None:
        square = (path.U[:, :, :-1] ** 2).sum(axis=1) if trained else (path.v**2).sum(axis=2)
        return path.z - 0.5 * square

    def outer(a: Array) -> Array:
        return a @ np.swapaxes(a, 1, 2)

    if trained:
        return outer(path.U) - outer(path.w) - outer(path.W_Q) - outer(path.W_K)
    return outer(np.swapaxes(path.W_Q, 1, 2)) - outer(np.swapaxes(path.W_K, 1, 2))


class EmbeddingFlow:
    """The joint flow with explicit, possibly training, embeddings and free or product logits.

    Arguments:
        task: what the query token sees.
        attention, activation: as for ``JointFlow``; the activation must be smooth.
        mlp_lr, attention_lr, embedding_lr: rates of w, of z (or of W_Q and W_K), and of U (0 freezes it).
        temperature: divides the logits.
    """

    def __init__(
        self,
        task: Task,
        attention: str = "exp",
        activation: Any = "gelu",
        *,
        mlp_lr: float = 1.0,
        attention_lr: float = 1.0,
        embedding_lr: float = 1.0,
        temperature: float = 1.0,
    ) -> None:
        settings = checked(task, attention, activation, mlp_lr, attention_lr, temperature, None)
        self.task, self.block = task, one_query_block(task, settings)
        if self.block.slopes is not None:
            raise ValueError(
                f"the activation must be smooth, got {self.block.activation.name!r}; use gelu or silu"
            )
        if not (np.isfinite(embedding_lr) and embedding_lr >= 0):
            raise ValueError(
                f"embedding_lr must be ≥ 0 (0 freezes the embeddings), got {embedding_lr}"
            )
        self.embedding_lr = float(embedding_lr)

    def field(
        self, w: Array, U: Array, z: Array | None, W_Q: Array | None, W_K: Array | None
    ) -> list[Array]:
        """The velocities of w, U and of z or (W_Q, W_K)."""
        block, context, query = self.block, U[:, :-1], U[:, -1]
        product = W_Q is not None and W_K is not None
        if product:
            assert W_Q is not None
            assert W_K is not None
            q, K = W_Q.T @ query, context.T @ W_K
            z = K @ q
        assert z is not None
        v = context.T @ w
        b, a = block.forward(v, query @ w, z)
        s = block.forces(a, block.activation.derivative(a))
        velocity = block.velocity(v, b, s)
        both = np.vstack([velocity.B, velocity.sigma])  # (M + 1, K)
        U_dot = w @ both.T
        if not product:
            return [block.mlp_lr * U @ both, self.embedding_lr * U_dot, velocity.z]
        assert W_Q is not None
        assert W_K is not None
        rate = block.attention_lr
        zeta = velocity.z / rate if rate > 0 else np.zeros_like(z)
        W_K_dot, W_Q_dot = np.outer(context @ zeta, q), np.outer(query, K.T @ zeta)
        U_dot[:, :-1] += np.outer(W_K @ q, zeta)
        U_dot[:, -1] += W_Q @ (K.T @ zeta)
        return [block.mlp_lr * U @ both, self.embedding_lr * U_dot, rate * W_Q_dot, rate * W_K_dot]

    def integrate(
        self,
        t_end: float,
        w0: ArrayLike,
        U0: ArrayLike,
        z0: ArrayLike | None = None,
        *,
        W_Q0: ArrayLike | None = None,
        W_K0: ArrayLike | None = None,
        times: int = 201,
        until: float = np.inf,
        rtol: float = 1e-11,
        atol: float = 1e-12,
    ) -> EmbeddingPath:
        """Integrate from w0 (d, K), U0 (d, M + 1) and either z0 (M,) or W_Q0 and W_K0 (d, e) to ``t_end``.

        ``until`` ends it sooner, when some logit has moved that far (sharp attention makes the flow stiff).
        """
        if not (np.isfinite(t_end) and t_end > 0):
            raise ValueError(f"t_end must be a positive number, got {t_end!r}")
        M, K = self.task.tokens, self.task.nodes
        w, U = finite(w0, "w0", 2), finite(U0, "U0", 2)
        if U.shape[1] != M + 1 or w.shape != (len(U), K):
            raise ValueError(
                f"U0 must be (d, {M + 1}) and w0 (d, {K}); got {U.shape} and {w.shape}"
            )
        if (z0 is None) == (W_Q0 is None and W_K0 is None):
            raise ValueError("give either z0 (free logits) or both W_Q0 and W_K0")
        if z0 is not None:
            start = [w, U, finite(z0, "z0", 1)]
            if start[2].shape != (M,):
                raise ValueError(f"z0 must have shape {(M,)}, got {start[2].shape}")
        else:
            if W_Q0 is None or W_K0 is None:
                raise ValueError("W_Q0 and W_K0 go together")
            start = [w, U, finite(W_Q0, "W_Q0", 2), finite(W_K0, "W_K0", 2)]
            if start[2].shape != start[3].shape or len(start[2]) != len(U):
                raise ValueError(
                    f"W_Q0 and W_K0 must be (d, e), got {start[2].shape} and {start[3].shape}"
                )
        shapes = [array.shape for array in start]
        cuts = np.cumsum([array.size for array in start])[:-1]

        def unpack(y: Array) -> list[Array]:
            return [
                part.reshape(shape) for part, shape in zip(np.split(y, cuts), shapes, strict=True)
            ]

        def slope(_: float, y: Array) -> Array:
            w, U, *rest = unpack(y)
            dots = self.field(
                w, U, *((rest[0], None, None) if len(rest) == 1 else (None, rest[0], rest[1]))
            )
            return np.concatenate([dot.ravel() for dot in dots])

        def logits(y: Array) -> Array:
            _, U, *rest = unpack(y)
            return rest[0] if len(rest) == 1 else U[:, :-1].T @ rest[1] @ (rest[0].T @ U[:, -1])

        def room(_: float, y: Array) -> float:
            return until - float(np.abs(logits(y) - logits(y0)).max())

        room.terminal = True  # type: ignore[attr-defined]
        y0, t = np.concatenate([array.ravel() for array in start]), np.linspace(0.0, t_end, times)
        solution = solve_ivp(
            slope,
            (0.0, t_end),
            y0,
            "DOP853",
            t,
            rtol=rtol,
            atol=atol,
            events=room if np.isfinite(until) else None,
        )
        states = [unpack(y) for y in solution.y.T]
        w_all, U_all = np.stack([s[0] for s in states]), np.stack([s[1] for s in states])
        t_last = float(solution.t[-1]) if len(solution.t) else 0.0
        message = f"the integrator stopped: {solution.message}"
        ending = (
            done(t_last) if solution.status >= 0 else Ending(EndingKind.INTEGRATOR, t_last, message)
        )
        z_all = np.stack([logits(y) for y in solution.y.T])
        if len(start) == 3:
            return EmbeddingPath(solution.t, w_all, U_all, z_all, ending=ending)
        W_Q, W_K = np.stack([s[2] for s in states]), np.stack([s[3] for s in states])
        return EmbeddingPath(solution.t, w_all, U_all, z_all, W_Q, W_K, ending=ending)
