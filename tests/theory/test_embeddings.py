"""Embeddings that train: the field against differences of the objective, and what is conserved."""

import numpy as np
import pytest

from joma.theory import EmbeddingFlow, JointFlow
from joma.theory.tasks import random_gradients

N, M, K, d, e = 10, 4, 3, 5, 2


def parameters(seed=0):
    rng = np.random.default_rng(seed)
    task = random_gradients(rng, samples=N, tokens=M, nodes=K)
    w, U = 0.5 * rng.standard_normal((d, K)), rng.standard_normal((d, M + 1))
    W_Q, W_K = 0.5 * rng.standard_normal((d, e)), 0.5 * rng.standard_normal((d, e))
    return task, w, U, 0.5 + 0.2 * rng.standard_normal(M), W_Q, W_K


def objective(task, attention, w, U, z):
    logits = z / 0.8
    b = task.x * (logits if attention == "linear" else np.exp(logits))
    b = b / b.sum(axis=1, keepdims=True) if attention == "softmax" else b
    a = (b @ U[:, :-1].T + U[:, -1]) @ w
    return float((task.p[:, None] * task.g * a / (1 + np.exp(-a))).sum())


def differences(value, arrays, h=1e-6):
    grads = []
    for n, array in enumerate(arrays):
        grad = np.zeros_like(array)
        for at in np.ndindex(*array.shape):
            pair = []
            for sign in (1, -1):
                moved = [a.copy() for a in arrays]
                moved[n][at] += sign * h
                pair.append(value(*moved))
            grad[at] = (pair[0] - pair[1]) / (2 * h)
        grads.append(grad)
    return grads


@pytest.mark.parametrize("attention", ["linear", "exp", "softmax"])
@pytest.mark.parametrize("product", [False, True])
def test_the_field_is_the_gradient(attention, product):
    task, w, U, z, W_Q, W_K = parameters()
    flow = EmbeddingFlow(task, attention, "silu", temperature=0.8)
    if product:
        dots = flow.field(w, U, None, W_Q, W_K)

        def value(w, U, q, k):
            return objective(task, attention, w, U, U[:, :-1].T @ k @ (q.T @ U[:, -1]))

        expected = differences(value, [w, U, W_Q, W_K])
    else:
        dots = flow.field(w, U, z, None, None)
        expected = differences(lambda w, U, z: objective(task, attention, w, U, z), [w, U, z])
    for dot, grad in zip(dots, expected, strict=True):
        np.testing.assert_allclose(dot, grad, atol=1e-8)


def drift(value):
    return np.abs(value - value[0]).max()


def gram(a):
    return a @ np.swapaxes(a, 1, 2)


def test_frozen_orthonormal_embeddings_are_theorem_1_and_the_joint_flow():
    task, w, _, z, _, _ = parameters()
    U = np.eye(d)[:, : M + 1]
    path = EmbeddingFlow(task, "exp", "gelu", embedding_lr=0).integrate(2.0, w, U, z - 1.5, times=5)
    joint = JointFlow(task, "exp", "gelu").integrate(2.0, w[:M], w[M], z - 1.5, times=5)
    np.testing.assert_allclose(path.z, joint.z, atol=1e-9)
    assert drift(path.z - 0.5 * (path.v**2).sum(axis=2)) < 1e-9


@pytest.mark.parametrize("attention", ["linear", "exp"])
def test_trained_embeddings_tie_logits_to_their_norms(attention):
    task, w, U, z, _, _ = parameters(1)
    flow = EmbeddingFlow(
        task, attention, "gelu", attention_lr=1.4, embedding_lr=0.7, temperature=0.8
    )
    path = flow.integrate(2.0, w, U, z - (1.5 if attention == "exp" else 0.0), times=9)
    norm = (path.U[:, :, :-1] ** 2).sum(axis=1)
    value = path.z - norm / 0.8 if attention == "exp" else path.z**2 - 2 * norm
    assert drift(path.z) > 0.01
    assert drift(value) < 1e-9
    # and the printed invariant is lost
    square = (path.v**2).sum(axis=2)
    assert (
        drift(path.z - 1.4 / 1.6 * square if attention == "exp" else path.z**2 - 1.4 * square)
        > 0.01
    )


def test_product_logits_keep_their_balance_and_start_as_the_preconditioner_says():
    task, w, U, _, W_Q, W_K = parameters(2)
    path = EmbeddingFlow(task, "exp", "gelu").integrate(0.5, w, U, W_Q0=W_Q, W_K0=W_K, times=9)
    assert drift(gram(np.swapaxes(path.W_Q, 1, 2)) - gram(np.swapaxes(path.W_K, 1, 2))) < 1e-9
    assert drift(gram(path.U) - gram(path.w) - gram(path.W_Q) - gram(path.W_K)) < 1e-9
    basis = np.eye(d)[:, : M + 1]
    ratios = []
    for t in (1e-2, 1e-3):
        path = EmbeddingFlow(task, "exp", "gelu", embedding_lr=0).integrate(
            t, w, basis, W_Q0=W_Q, W_K0=W_K, times=2
        )
        square = (path.v**2).sum(axis=2)
        moved = path.z[1] - path.z[0]
        gap = moved - path.preconditioner @ (square[1] - square[0]) / 2
        ratios.append(np.linalg.norm(gap) / np.linalg.norm(moved))
    assert ratios[1] < 0.15 * ratios[0] < 0.01  # first order: the gap is of second order in t


def test_until_ends_the_flow_when_a_logit_has_moved_that_far():
    task, w, U, z, _, _ = parameters()
    path = EmbeddingFlow(task, "exp", "gelu").integrate(50.0, w, U, z, times=2001, until=0.5)
    assert path.ending.done
    assert path.t[-1] < 50.0
    assert 0.3 < np.abs(path.z[-1] - path.z[0]).max() <= 0.5 + 1e-9


def test_bad_input_is_named():
    task, w, U, z, W_Q, W_K = parameters()
    with pytest.raises(ValueError, match="must be smooth, got 'relu'"):
        EmbeddingFlow(task, "exp", "relu")
    with pytest.raises(ValueError, match="embedding_lr must be ≥ 0"):
        EmbeddingFlow(task, "exp", "gelu", embedding_lr=-1)
    flow = EmbeddingFlow(task, "exp", "gelu")
    with pytest.raises(ValueError, match="either z0"):
        flow.integrate(1.0, w, U)
    with pytest.raises(ValueError, match="either z0"):
        flow.integrate(1.0, w, U, z, W_Q0=W_Q, W_K0=W_K)
    with pytest.raises(ValueError, match="go together"):
        flow.integrate(1.0, w, U, W_Q0=W_Q)
    with pytest.raises(ValueError, match=r"U0 must be \(d, 5\)"):
        flow.integrate(1.0, w, U[:, :3], z)
    with pytest.raises(ValueError, match=r"z0 must have shape \(4,\)"):
        flow.integrate(1.0, w, U, z[:2])
    with pytest.raises(ValueError, match="t_end"):
        flow.integrate(-1.0, w, U, z)
    with pytest.raises(ValueError, match="no preconditioner"):
        _ = flow.integrate(0.1, w, U, z).preconditioner
