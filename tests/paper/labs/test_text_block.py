"""The block with free logits on text: its steps against autograd, its parts, its samples."""

import numpy as np
import pytest
import torch

from joma.paper.labs.text_block import Places, TextBlock, places


def small_batch(rng, V=7, window=4, count=6):
    context = rng.integers(-1, V, size=(count, window))
    context[:, 0] = rng.integers(V, size=count)
    return Places(rng.integers(V, size=count), context, rng.integers(V, size=count))


@pytest.mark.parametrize("attention", ["linear", "exp", "softmax"])
def test_a_step_is_the_gradient_step_of_autograd(attention):
    rng = np.random.default_rng(0)
    block = TextBlock(attention, 7, 5, rng, lr=0.3, attention_lr=0.8)
    block.z += 0.3 * rng.standard_normal(block.z.shape)
    block.xi += 0.1 * rng.standard_normal(block.xi.shape)
    batch = small_batch(rng)
    leaf = {
        n: torch.tensor(getattr(block, n).copy(), requires_grad=True)
        for n in ("v", "xi", "z", "W", "c")
    }
    outputs = []
    for query, context in zip(batch.query, batch.context, strict=True):
        x = torch.tensor(np.bincount(context[context >= 0], minlength=7) / (context >= 0).sum())
        z = leaf["z"][query]
        b = x * (z if attention == "linear" else z.exp())
        b = b / b.sum() if attention == "softmax" else b
        outputs.append(torch.relu(b @ leaf["v"] + leaf["xi"][query]) @ leaf["W"] + leaf["c"])
    loss = torch.nn.functional.cross_entropy(torch.stack(outputs), torch.tensor(batch.target))
    loss.backward()
    before = {n: getattr(block, n).copy() for n in leaf}
    assert block.step(batch) == pytest.approx(loss.item(), abs=1e-12)
    for name, tensor in leaf.items():
        rate = 0.8 if name == "z" else 0.3
        np.testing.assert_allclose(
            getattr(block, name), before[name] - rate * tensor.grad.numpy(), atol=1e-13
        )


def test_parts_of_all_queries_add_up_to_the_motion_of_v():
    rng = np.random.default_rng(1)
    block = TextBlock("softmax", 7, 5, rng, lr=0.3, attention_lr=0.8)
    for _ in range(20):
        block.step(small_batch(rng))
    np.testing.assert_allclose(
        block.part.reshape(7, 7, 5).sum(axis=0), block.v - block.v0, atol=1e-13
    )


def test_places_keep_known_words_only():
    found = places(np.array([0, -1, 1, 2, -1, 3, 0]), 2)
    assert found.query.tolist() == [1, 3]
    assert found.context.tolist() == [[-1, 0], [-1, 2]]
    assert found.target.tolist() == [2, 0]
    np.testing.assert_allclose(found.mean_context(1, 4), [1, 0, 0, 0])
