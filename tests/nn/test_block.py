"""JoMABlock: the joint one is the theory's block; the folded one is the joint one; what it cannot do it refuses."""

import copy
import io

import numpy as np
import pytest
import torch

from joma.nn import JoMABlock
from joma.theory import Attention, BlockFlow, JointFlow, Task

M, K, Q, W, N = 6, 3, 4, 5, 12
KINDS = ("linear", "exp", "softmax")
EXACT = [(kind, pattern, None) for kind in KINDS for pattern in ("shared", "per_query")]
EXACT += [(kind, "shared", "parts") for kind in ("linear", "exp")]


def samples(seed=0, count=N):
    """Queries, contexts with gaps, and gradients from above."""
    rng = np.random.default_rng(seed)
    context = rng.integers(-1, M, size=(count, W))
    context[:, 0] = rng.integers(M, size=count)
    query = np.arange(count) % Q
    teacher = np.random.default_rng(77).standard_normal((M, K))
    g = teacher[context[:, 0]] + 0.3 * rng.standard_normal((count, K))
    return torch.tensor(query), torch.tensor(context), torch.tensor(g)


def block(kind="exp", pattern="per_query", seed=0, **more):
    """A joint block at a random state."""
    torch.manual_seed(seed)
    made = JoMABlock(
        M,
        K,
        queries=Q,
        attention=kind,
        activation="gelu",
        pattern=pattern,
        dtype=torch.float64,
        ratio=1.7,
        **more,
    )
    with torch.no_grad():
        made.v.mul_(5)
        made.z.add_(0.3 * torch.randn_like(made.z))
    return made


def loss_of(model, batch):
    query, context, g = batch
    return (
        -(g * model(query, context)).sum() / len(query)
        + 0.3 * model(query, context).square().mean()
    )


def train(model, batches, lr=0.2, momentum=0.0, optimiser=torch.optim.SGD, **more):
    if optimiser is torch.optim.SGD:
        more["momentum"] = momentum
    steps = optimiser(model.parameter_groups(lr), lr=lr, **more)
    losses = []
    for batch in batches:
        steps.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        steps.step()
        losses.append(loss.item())
    return losses


def agree(joint, folded, tolerance=1e-12):
    assert (joint.logits - folded.logits).abs().max() <= tolerance
    assert (joint.v - folded.v).abs().max() <= tolerance


def many(count=60):
    return [samples(seed, count=5) for seed in range(count)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("pattern", ["per_query", "shared"])
def test_the_joint_block_takes_the_steps_of_the_theory(kind, pattern):
    query, context, g = samples()
    if pattern == "shared":
        query = torch.zeros_like(query)
    x = np.stack([np.bincount(c[c >= 0], minlength=M) / (c >= 0).sum() for c in context.numpy()])
    attention = Attention(kind, temperature=1.4, A=2.0 if kind == "exp" else 1.0)
    torch.manual_seed(3)
    model = JoMABlock(
        M,
        K,
        queries=Q,
        attention=attention,
        activation="silu",
        pattern=pattern,
        ratio=1.7,
        dtype=torch.float64,
    )
    v0, z0 = model.v.detach().numpy().copy(), model.logits.numpy()
    task = Task(x, g.numpy())
    if pattern == "shared":
        path = JointFlow(task, attention, "silu", attention_lr=1.7).descend(20, 0.3, v0, None, z0)
    else:
        path = BlockFlow(task, query.numpy(), attention, "silu", attention_lr=1.7).descend(
            20, 0.3, v0, None, z0
        )
    steps = torch.optim.SGD(model.parameter_groups(0.3))
    for _ in range(20):
        steps.zero_grad()
        (-(g * model(query, context)).sum() / N).backward()
        steps.step()
    np.testing.assert_allclose(model.v.detach().numpy(), path.v[-1], atol=1e-13)
    np.testing.assert_allclose(model.logits.numpy(), path.z[-1], atol=1e-13)
    xi = model.xi.detach().numpy()
    np.testing.assert_allclose(xi[0] if pattern == "shared" else xi, path.xi[-1], atol=1e-13)


@pytest.mark.parametrize(("kind", "pattern", "carry"), EXACT)
def test_folded_is_joint_under_sgd_on_minibatches(kind, pattern, carry):
    joint = block(kind, pattern)
    folded = joint.fold(carry)
    assert {name for name, _ in folded.named_parameters()} == {"v", "xi"}
    start = joint.logits
    assert train(joint, many()) == pytest.approx(train(folded, many()), abs=1e-12)
    assert (joint.logits - start).abs().max() > 0.1
    agree(joint, folded)
    assert folded.off_descent < 1e-12


@pytest.mark.parametrize(("kind", "pattern", "carry"), EXACT)
def test_schedules_accumulation_skipped_steps_and_evaluation_keep_it_exact(kind, pattern, carry):
    joint = block(kind, pattern)
    folded = joint.fold(carry)
    for model in (joint, folded):
        steps = torch.optim.SGD(model.parameter_groups(0.2))
        plan = torch.optim.lr_scheduler.ExponentialLR(steps, 0.9)
        for n, batch in enumerate(many(20)):
            if n % 5 == 1:  # gradients that are thrown away, before the next pass or within it
                loss_of(model, samples(100)).backward()
                if n % 2:
                    steps.zero_grad(set_to_none=n % 3 == 0)
            if n % 5 == 2:
                torch.autograd.grad(loss_of(model, samples(101)), model.v)
            losses = loss_of(model, batch), loss_of(model, samples(200 + n))
            steps.zero_grad()
            losses[0].backward()
            if n % 5 != 3:  # two passes before a step
                losses[1].backward()
            steps.step()
            plan.step()
            with torch.no_grad():
                model(*batch[:2])
            model.eval()
            model(*batch[:2])
            model.train()
    agree(joint, folded)


@pytest.mark.parametrize("kind", ["linear", "exp"])
def test_momentum_that_the_block_knows_is_exact_from_the_weights(kind):
    joint = block(kind, "shared")
    folded, unaware = joint.fold(momentum=0.8), joint.fold()
    for model in (joint, folded, unaware):
        train(model, many(), lr=0.03, momentum=0.8)
    agree(joint, folded)
    assert folded.off_descent < 1e-11
    assert (joint.logits - unaware.logits).abs().max() > 1e-3
    assert unaware.off_descent > 0.1


def test_momentum_by_parts_is_ahead_by_the_velocity_only():
    joint = block("softmax")
    folded = joint.fold(momentum=0.8)
    start = joint.logits
    query, context, g = samples()
    for model in (joint, folded):
        steps = torch.optim.SGD(model.parameter_groups(1e-3), momentum=0.8)
        for _ in range(200):
            steps.zero_grad()
            (-(g * model(query, context)).sum() / N).backward()
            steps.step()
        if model is joint:
            velocity = (
                model.parameter_groups(1e-3)[1]["lr"] * steps.state[model.z]["momentum_buffer"]
            )
    ahead = folded.logits - joint.logits  # −μ N/(1 − μ), to first order in the rate
    torch.testing.assert_close(
        ahead, -velocity * 0.8 / 0.2, atol=2e-3 * float((joint.logits - start).abs().max()), rtol=0
    )


def test_softmax_from_the_weights_is_exact_if_all_samples_attend_alike():
    joint = block("softmax", "shared")
    folded = joint.fold("weights")
    query, _, g = samples()
    alike = (query, torch.tensor([[0, 1, 1, 4, -1]]).expand(N, -1), g)
    for model in (joint, folded):
        train(model, [alike] * 40)
    agree(joint, folded)
    for model in (joint, folded):
        train(model, many(40))
    assert (joint.logits - folded.logits).abs().max() > 1e-3


def test_linear_attention_carries_the_sign_of_a_logit_through_zero():
    joint = block("linear", "shared")
    with torch.no_grad():
        joint.z.fill_(0.2)
    folded = joint.fold()
    for model in (joint, folded):
        train(model, many(), lr=0.1)
    assert (joint.logits < 0).any()
    agree(joint, folded, 1e-11)


@pytest.mark.parametrize(("kind", "pattern", "carry"), EXACT)
def test_copies_and_checkpoints_continue_alike_wherever_they_are_taken(kind, pattern, carry):
    model = block(kind, pattern).fold(carry)
    train(model, many(5))
    steps = torch.optim.SGD(model.parameter_groups(0.2))
    loss_of(model, samples(50)).backward()
    twin = copy.deepcopy(
        model
    )  # between the backward pass and the step; PyTorch leaves out the gradients
    for one, same in zip(twin.parameters(), model.parameters(), strict=True):
        one.grad = same.grad.clone()
    steps.step()
    torch.optim.SGD(twin.parameter_groups(0.2)).step()
    file = io.BytesIO()
    torch.save(model.state_dict(), file)  # between the step and the next pass
    file.seek(0)
    other = block(kind, pattern, seed=9).fold(carry)
    other.load_state_dict(torch.load(file))
    for each in (model, twin, other):
        train(each, many(5))
    for each in (twin, other):
        assert torch.equal(each.logits, model.logits)
        assert torch.equal(each.v, model.v)


def test_unfolded_and_folded_again_it_goes_on():
    joint = block("exp")
    there = joint.fold()
    train(joint, many(10))
    train(there, many(10))
    back = there.unfold()
    train(joint, many(10))
    train(back, many(10))
    agree(joint, back)
    assert back.fold().folded
    assert not back.folded


def test_adam_is_noticed():
    folded = block("exp").fold()
    train(folded, many(5), optimiser=torch.optim.Adam)
    assert folded.off_descent > 0.1


def test_weights_changed_by_hand_are_refused_until_rebased():
    folded = block("exp").fold()
    z = folded.logits
    with torch.no_grad():
        folded.v += 0.1
    for use in (lambda: folded(*samples()[:2]), lambda: folded.logits, folded.state_dict):
        with pytest.raises(RuntimeError, match="changed without a backward pass"):
            use()
    folded.rebase()
    assert torch.equal(folded.logits, z)


def test_training_that_diverges_gives_nan_as_anywhere():
    folded = block("exp").fold()
    train(folded, many(5), lr=1e200)
    assert folded.v.isnan().any()
    assert folded(*samples()[:2]).isnan().any()
    with torch.no_grad():
        folded.v.nan_to_num_(0.0)
    with pytest.raises(RuntimeError, match="changed without a backward pass"):
        folded(*samples()[:2])


def test_frozen_weights_are_refused():
    folded = block("exp").fold()
    folded.v.requires_grad_(False)
    with torch.no_grad():
        folded(*samples()[:2])
    with pytest.raises(RuntimeError, match="frozen"):
        folded(*samples()[:2])


def test_a_logit_of_zero_under_linear_attention_is_refused():
    joint = block("linear", "shared")
    with torch.no_grad():
        joint.z[2] = 0.0
    with pytest.raises(ValueError, match="logit 0"):
        joint.fold()
    joint.fold("parts")
    folded = block("linear", "shared").fold()
    folded.carried.z[2] = 0.0
    with pytest.raises(ArithmeticError, match="word 2"):
        train(folded, many(2))


def test_second_derivatives_are_refused():
    folded = block("exp").fold()
    (gradient,) = torch.autograd.grad(loss_of(folded, samples()), folded.v, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


def test_without_residual_and_without_context():
    model = JoMABlock(M, K, queries=Q, attention="softmax", residual=False, activation="linear")
    out = model(torch.tensor([0, 1]), torch.tensor([[1, -1], [-1, -1]]))
    torch.testing.assert_close(out, torch.stack([model.v[1], torch.zeros(K)]))
    assert [name for name, _ in model.named_parameters()] == ["v", "z"]


def test_every_word_of_a_text_sees_the_window_before_it():
    model = JoMABlock(M, K, attention="exp", activation=torch.tanh)
    text = torch.tensor([[3, 1, 4, 1, 5], [2, 0, 2, 3, 3]])
    h = model.causal(text, window=2)
    assert h.shape == (2, 5, K)
    torch.testing.assert_close(h[1, 3], model(text[1, 3], text[1, 1:3]))
    torch.testing.assert_close(h[0, 0], torch.tanh(model.xi[3]))
    b = model.attention(text[1, 3:], text[1, None, 1:3].expand(2, 2))
    torch.testing.assert_close(b, torch.full((2, 2), 0.5))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"words": 0}, "words must be a positive integer"),
        ({"nodes": 2.5}, "nodes must be a positive integer"),
        ({"attention": "sofmax"}, "Did you mean 'softmax'"),
        ({"activation": "rely"}, "Did you mean 'relu'"),
        ({"pattern": "query"}, "per_query"),
        ({"ratio": -1.0}, "ratio must be a number"),
        ({"momentum": 0.9}, "for folded blocks"),
        ({"folded": True, "momentum": 1.0}, "0 ≤ μ < 1"),
        ({"folded": True, "carry": "weights"}, "fix the sum"),
        ({"folded": True, "carry": "weigths", "pattern": "shared"}, "Did you mean 'weights'"),
        (
            {"folded": True, "carry": "weights", "pattern": "shared", "momentum": 0.5},
            "no law for momentum",
        ),
    ],
)
def test_bad_settings_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        JoMABlock(**{"words": M, "nodes": K} | settings)


def test_bad_input_is_named():
    model = JoMABlock(M, K)
    with pytest.raises(TypeError, match="activation must be"):
        JoMABlock(M, K, activation=3)
    with pytest.raises(TypeError, match="integers"):
        model(torch.zeros(2), torch.zeros(2, 3))
    with pytest.raises(ValueError, match="query must be in 0 … 5"):
        model(torch.tensor([6]), torch.tensor([[0]]))
    with pytest.raises(ValueError, match="context must be in -1 … 5"):
        model(torch.tensor([0]), torch.tensor([[-2]]))
    with pytest.raises(ValueError, match="for query"):
        model(torch.tensor([0, 1]), torch.tensor([[0]]))
    with pytest.raises(TypeError, match="joint"):
        model.off_descent  # noqa: B018
    assert "joint" in repr(model)
