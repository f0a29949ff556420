"""Context embeddings that are only almost orthogonal (Section 7): how far do the first integrals drift?

Drift is ‖invariant(t) − invariant(0)‖ / ‖z(t) − z(0)‖ (z² for linear attention): the share of the motion that the
integral does not account for. A control stays exact for any context embeddings if u_q ⊥ U_C: with S = Σ_k (‖w_k‖² −
ξ_k²), Σ_l z_l = S/2 + c (exp), Σ_l z_l² = S + c (linear), Σ_l z_l = c (softmax).
"""

from __future__ import annotations

import numpy as np

from joma.theory.flows import JointFlow
from joma.theory.setting import Array, Task


def unit_vectors(d: int, M: int, rng: np.random.Generator) -> Array:
    """M random unit columns (d, M)."""
    U = rng.standard_normal((d, M))
    return U / np.linalg.norm(U, axis=0)


def tilted(M: int, epsilon: float, rng: np.random.Generator) -> Array:
    """(M, M) with UᵀU = I + ε E, E random symmetric with zero diagonal and largest entry 1."""
    E = np.triu(rng.uniform(-1.0, 1.0, (M, M)), 1)
    E = (E + E.T) / np.abs(E).max()
    return np.linalg.cholesky(np.eye(M) + epsilon * E).T


def drift_with(U: Array, task: Task, attention: str) -> dict[str, float]:
    """Drift of the invariant and of the control, with context embeddings U (d, M), and how coherent these are.

    GELU nodes from zero start, the query's embedding in a dimension of its own, until logits have moved by about 1.
    """
    d, M = U.shape
    embedding = np.zeros((d + 1, M + 1))
    embedding[:d, :M], embedding[d, M] = U, 1.0
    flow = JointFlow(task, attention, "gelu", embedding=embedding)
    z0 = np.ones(M) if attention == "linear" else np.zeros(M)
    path = flow.integrate(3.0 * M, z0=z0, times=2, rtol=1e-9, atol=1e-10)
    if not path.done or path.w is None:
        raise ArithmeticError(path.status)
    value, z = path.invariant().value, path.z**2 if attention == "linear" else path.z
    size = (path.w**2).sum(axis=(1, 2)) - (path.xi**2).sum(axis=1)  # (T,)
    scalar = z.sum(axis=1) - {"linear": 1.0, "exp": 0.5, "softmax": 0.0}[attention] * size
    G = U.T @ U - np.eye(M)
    return {
        "drift": float(np.linalg.norm(value[-1] - value[0]) / np.linalg.norm(z[-1] - z[0])),
        "control": float(abs(scalar[-1] - scalar[0]) / max(1.0, np.abs(z).max())),
        "coherence": float(np.abs(G).max()),
        "rms": float(np.sqrt((G**2).sum() / (M * (M - 1)))),
        "moved": float(np.abs(path.z[-1] - path.z[0]).max()),
    }
