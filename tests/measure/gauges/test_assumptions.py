"""Gauges of JoMA's premises: against the theory's own flow, brute force, and in a watched model."""

import math

import numpy as np
import pandas as pd
import pytest
import torch
import transformers
from torch import nn

import joma
from joma._measure.gauges.assumptions import (
    BlockMotion,
    attention_drift,
    cosine,
    eqn17_residual,
    gradient_agreement,
    gradient_stationarity,
    share_missed,
)
from joma._measure.gauges.kernels import gram_matrix
from joma._measure.watch.applicability import sentence
from joma.models.projections import query_bias


def weights(d=8, heads=2, hidden=12, seed=0):
    torch.manual_seed(seed)
    shapes = {"q": (d, d), "k": (d, d), "v": (d, d), "o": (d, d), "mlp_in": (hidden, d)}
    return {part: torch.randn(shape, dtype=torch.float64) for part, shape in shapes.items()}


def moved(before, part, size=1e-4):
    return {**before, part: before[part] + size * torch.randn_like(before[part])}


def test_logits_and_values_are_those_of_multi_head_attention():
    w, states = weights(), torch.randn(5, 8, dtype=torch.float64)
    w["q_bias"] = torch.randn(8, dtype=torch.float64)
    motion = BlockMotion(w, w, states, heads=2)
    attention = nn.MultiheadAttention(8, 2, batch_first=True, dtype=torch.float64)
    with torch.no_grad():
        attention.in_proj_weight.copy_(torch.cat([w["q"], w["k"], w["v"]]))
        attention.in_proj_bias[:8] = w["q_bias"]
        attention.in_proj_bias[8:16] = 3.0  # of the keys: all keys of a query alike
        attention.out_proj.weight.copy_(w["o"])
        torch.testing.assert_close(query_bias(attention), w["q_bias"])
        out, maps = attention(states[None], states[None], states[None], average_attn_weights=False)
    b = motion.logits(w).softmax(dim=-1)
    torch.testing.assert_close(b, maps[0])
    assert share_missed(maps[0], motion.logits(w)) < 1e-12
    without = {part: matrix for part, matrix in w.items() if part != "q_bias"}
    assert share_missed(maps[0], motion.logits(without)) > 0.1
    summed = torch.einsum("hqn,hnk->qk", b, motion.seen(w))
    torch.testing.assert_close(summed, out[0] @ w["mlp_in"].T)


def test_shared_keys_are_those_of_their_group():
    w, states = weights(), torch.randn(5, 8, dtype=torch.float64)
    shared = {**w, "k": w["k"][:4], "v": w["v"][:4]}
    whole = {**w, "k": w["k"][:4].repeat(2, 1), "v": w["v"][:4].repeat(2, 1)}
    one, other = (BlockMotion(x, x, states, heads=2) for x in (shared, whole))
    torch.testing.assert_close(one.logits(shared), other.logits(whole))
    torch.testing.assert_close(one.seen(shared), other.seen(whole))


def test_eqn17_is_exact_where_logits_follow_it_and_misses_all_where_they_do_not():
    # one head, W_Q and W_K such that Δz is what Eqn. 17 says: solve for the W_K that gives it
    d, n = 6, 6
    states = torch.eye(n, d, dtype=torch.float64)
    before = {part: torch.zeros(d, d, dtype=torch.float64) for part in ("q", "k")} | {
        "v": torch.eye(d, dtype=torch.float64), "o": torch.eye(d, dtype=torch.float64),
        "mlp_in": torch.rand(9, d, dtype=torch.float64),
    }  # fmt: skip
    before["q"] = torch.eye(d, dtype=torch.float64)
    step = 1e-6 * torch.rand(9, d, dtype=torch.float64)
    after = {**before, "mlp_in": before["mlp_in"] + step}
    pull = (step * before["mlp_in"]).sum(dim=0)  # Σ_k Δv ∘ v with v = w_k
    target = pull[None, :] - pull.sum() / n  # b̄ is uniform at z = 0
    after["k"] = target.expand(n, n) * math.sqrt(d)  # z_ml is the entry (m, l) over √d
    assert eqn17_residual(BlockMotion(before, after, states)) < 1e-4
    after["k"] = -after["k"]
    assert eqn17_residual(BlockMotion(before, after, states)) == 1.0
    assert eqn17_residual(BlockMotion(before, after)) is None


def test_drift_is_the_share_that_moved():
    states = torch.eye(2, dtype=torch.float64)
    zero, one = torch.zeros(2, 2, dtype=torch.float64), torch.eye(2, dtype=torch.float64)
    before = {"q": one, "k": zero}
    after = {"q": one, "k": torch.tensor([[200.0, 0.0], [200.0, 0.0]], dtype=torch.float64)}
    assert attention_drift(BlockMotion(before, before, states)) == 0
    assert attention_drift(BlockMotion(before, after, states)) == pytest.approx(
        0.5
    )  # uniform → all on the first


def test_stationarity_of_gradients_that_turn_and_of_noise():
    torch.manual_seed(0)
    g, noise = torch.randn(50, 50), [torch.randn(50, 50) for _ in range(3)]
    motion = BlockMotion({}, {}, earlier=g, halves=(2 * g, g))
    assert gradient_stationarity(motion) == pytest.approx(1.0)
    assert gradient_agreement(motion) == pytest.approx(1.0)
    noisy = BlockMotion(
        {}, {}, earlier=2 * g + noise[2] * math.sqrt(2), halves=(g + noise[0], g + noise[1])
    )
    ceiling = 2 * gradient_agreement(noisy) / (1 + gradient_agreement(noisy))
    assert gradient_stationarity(noisy) == pytest.approx(ceiling, abs=0.05)  # Spearman and Brown
    assert cosine(g, torch.zeros_like(g)) is None


class Tiny(nn.Module):
    """Two encoder layers on four words."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(12, 8), nn.Linear(8, 12)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, tokens):
        return self.head(self.encoder(self.embed(tokens)))


def train(watched, model, optimiser, steps):
    for _ in range(steps):
        tokens = torch.randint(12, (4, 6))
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        watched.step(loss)


def test_a_watched_model_is_measured_and_the_run_ends_with_a_sentence(tmp_path):
    torch.manual_seed(0)
    model = Tiny()
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    gauges = [
        "entropy",
        "gradient_stationarity",
        "gradient_agreement",
        "attention_drift",
        "eqn17_residual",
    ]
    gauges.append("coherence")
    with joma.watch(model, tmp_path / "run", 4, gauges, optimizer=optimiser, live=False) as watched:
        train(watched, model, optimiser, 17)
    table = joma.Run(tmp_path / "run").frame()
    for name in gauges[1:5]:
        values = table[(table.gauge == name) & (table.step >= 8)].value
        assert len(values) == 2 * 3  # two layers, steps 8, 12 and 16
        assert np.isfinite(values).all()
        assert not (table[table.step == 1].gauge == name).any()  # nothing before to compare with
    assert table[table.gauge == "attention_drift"].value.between(0, 1).all()
    said = joma.Run(tmp_path / "run").info["applies"]
    assert said == sentence(table)
    assert "premises of JoMA hold here" in said


def test_a_direction_that_noise_hides_is_neither_kept_nor_left():
    rows = [("gradient_stationarity", 0.1), ("gradient_agreement", 0.1), ("attention_drift", 0.01)]
    table = pd.DataFrame(
        [{"step": 10, "layer": 0, "gauge": name, "value": value} for name, value in rows]
    )
    assert sentence(table) == (
        "1 of 1 premises of JoMA hold here (attention): whether mean gradients keep their direction cannot be told "
        "(noise alone would leave 0.18); 1.0 % of attention moves between measurements."
    )


def test_what_a_checkpoint_keeps_is_what_the_next_measurement_needs(tmp_path):
    gauges = ["eqn17_residual", "gradient_stationarity"]

    def run(split):
        torch.manual_seed(1)
        model = Tiny()
        optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
        first = joma.watch(model, None, 4, gauges, optimizer=optimiser, live=False)
        train(first, model, optimiser, 9)
        watched = first
        if split:
            state = first.state_dict()
            first.close()
            watched = joma.watch(model, None, 4, gauges, optimizer=optimiser, live=False)
            watched.load_state_dict(state)
        train(watched, model, optimiser, 8)
        values = watched.latest.values  # noqa: PD011 - not of pandas
        watched.close()
        return values

    whole, broken = run(False), run(True)
    for name in gauges:
        torch.testing.assert_close(whole[name], broken[name])


def test_a_model_without_blocks_is_refused():
    model = nn.Sequential(nn.MultiheadAttention(8, 2), nn.Linear(8, 8))
    with pytest.raises(
        ValueError, match="every block needs queries, keys, values, an output and a lower MLP"
    ):
        joma.watch(model, gauges=["eqn17_residual"])


def watched_model(model, forward):
    """Three steps of SGD under a watch: the table, and what it warned of."""
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    gauges = ["attention_drift", "eqn17_residual", "gradient_agreement"]
    with joma.watch(model, None, 1, gauges, optimizer=optimiser, live=False) as watched:
        for _ in range(3):
            optimiser.zero_grad()
            loss = forward(model)
            loss.backward()
            optimiser.step()
            watched.step(loss)
        return watched.frame(), watched.applies


TOKENS = torch.randint(12, (2, 16), generator=torch.Generator().manual_seed(0))
SIZES = {
    "vocab_size": 12, "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip


def test_a_layer_with_rotary_positions_is_refused_with_the_reason():
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))
    with pytest.warns(
        UserWarning, match=r"in 2 of 2 layers \(model\.layers\.0\.self_attn, .*rotary"
    ) as caught:
        table, applies = watched_model(model, lambda m: m(TOKENS, labels=TOKENS).loss)
    assert len(caught) == 1
    assert table[table.gauge.isin(["attention_drift", "eqn17_residual"])].value.isna().all()
    assert "Eqn. 17" not in applies


@pytest.mark.parametrize("batch_first", [True, False])
def test_biases_and_padding_are_part_of_the_logits(batch_first):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=batch_first)
    nn.init.normal_(layer.self_attn.in_proj_bias)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    states = torch.randn(2, 6, 8)
    padding = torch.tensor([[False] * 4 + [True] * 2, [False] * 6])

    def forward(model):
        given = states if batch_first else states.transpose(0, 1)
        return model(given, src_key_padding_mask=padding).square().mean()

    table, applies = watched_model(model, forward)
    values = table[table.gauge.isin(["attention_drift", "eqn17_residual"])]
    assert len(values) == 2 * 2 * 2
    assert np.isfinite(values.value).all()
    assert "Eqn. 17" in applies


@pytest.mark.parametrize("shape", [(5, 1), (200, 95), (40, 97), (300, 192), (7, 250)])
def test_a_gram_matrix_in_parts_is_the_product_with_the_transpose(shape):
    w = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    gram = gram_matrix(w)
    assert torch.allclose(gram, w.T @ w, rtol=0, atol=1e-12)
