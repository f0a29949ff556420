"""The hierarchy experiment: data as described, shortcut equal to plain torch modules, NCorr to brute force."""

import copy
import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from joma import Run
from joma._runs import RunWriter
from joma.paper.exhibits import get, make_exhibit, table1
from joma.paper.labs.distinct import distinct_logits, distinct_positions, find_distinct
from joma.paper.labs.hierarchy import (
    HierarchyTransformer,
    Training,
    distinct_loss,
    plain_loss,
    train,
)
from joma.paper.labs.hierarchy_data import Hierarchy, make_hierarchy
from joma.paper.labs.ncorr import best_correlation, maximal_activations, measure_ncorr

COLUMNS = [
    (N0, N1, N_ch, C) for C in (20, 50) for N_ch in (2, 3) for N0, N1 in ((10, 20), (20, 30))
]


# data


@pytest.mark.parametrize("column", COLUMNS)
def test_combinations_are_unique_and_of_size_n_ch(column):
    N0, N1, N_ch, C = column
    data = make_hierarchy(*column, seed=3)
    for owns, shape in zip(data.owns, ((N0, 99), (N1, N0), (C, N1)), strict=True):
        assert owns.shape == shape
        assert (owns.sum(axis=1) == N_ch).all()
        assert len(np.unique(owns, axis=0)) == len(owns)


@pytest.mark.parametrize("column", COLUMNS)
def test_sequences_are_the_sorted_union_behind_padding(column):
    data = make_hierarchy(*column, seed=4)
    samples = data.distinct()
    assert samples.x.shape == (column[3], 30)
    children = [[set(np.flatnonzero(row)) for row in owns] for owns in data.owns]
    for c in range(data.C):
        ones = children[2][c]
        zeros = set().union(*(children[1][i] for i in ones))
        tokens = sorted(set().union(*(children[0][i] for i in zeros)))
        assert samples.x[c].tolist() == [99] * (30 - len(tokens)) + tokens
        assert set(np.flatnonzero(samples.latents[1][c])) == ones
        assert set(np.flatnonzero(samples.latents[0][c])) == zeros


def test_without_noise_a_class_has_one_sequence():
    data, rng = make_hierarchy(seed=1), np.random.default_rng(0)
    labels = data.draw_labels(500, rng)
    assert (data.sample(labels, rng).x == data.distinct().x[labels]).all()


def test_noise_has_the_probabilities_of_its_edges():
    """Marginals over many draws against the closed form: 1 − Π over edges of P(edge silent)."""
    # T = M, and 12 words: hardly a sequence is empty, so that conditioning on a fit changes nothing measurable
    data = make_hierarchy(6, 8, 2, 4, M=13, T=13, rho=0.6, seed=2)
    labels = np.zeros(60_000, dtype=np.int64)
    samples = data.sample(labels, np.random.default_rng(0))
    err = 0.2
    p1 = np.where(data.owns[2][0], 1 - err, err)
    np.testing.assert_allclose(samples.latents[1].mean(axis=0), p1, atol=0.012)
    reach = err + (1 - 2 * err) * p1  # of one edge, whether its parent is on or off
    p0 = 1 - np.prod(np.where(data.owns[1], 1 - reach[:, None], 1.0), axis=0)
    np.testing.assert_allclose(samples.latents[0].mean(axis=0), p0, atol=0.012)
    assert len(np.unique(samples.x, axis=0)) > 100
    # tokens given the latents that were drawn: the edges of layer 0 alone
    silent = np.where(samples.latents[0], err, 1 - err)  # (N, N0)
    expected = 1 - np.exp(np.log(silent) @ data.owns[0]).mean(axis=0)
    seen = np.array([(samples.x == token).any(axis=1).mean() for token in range(12)])
    np.testing.assert_allclose(seen, expected, atol=0.012)


def test_noisy_sequences_fit_and_are_sorted():
    data = make_hierarchy(20, 30, 3, 30, rho=0.95, seed=0)
    x = data.sample(np.arange(30).repeat(20), np.random.default_rng(1)).x
    for row in x:
        tokens = row[row != 99]
        assert 0 < len(tokens) <= 30
        assert (np.diff(tokens) > 0).all()
        assert (row[30 - len(tokens) :] == tokens).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"N0": 0}, "N0 must be a positive integer, got 0"),
        ({"C": 2.5}, "C must be a positive integer, got 2.5"),
        ({"rho": 1.5}, r"rho must be in \[0, 1\], got 1.5"),
        ({"rho": float("nan")}, "rho must be in"),
        ({"N0": 4, "N_ch": 3}, "20 different combinations of N_ch = 3 out of the N0 latents"),
        ({"N_ch": 3, "T": 10}, "tokens and T is 10"),
    ],
)
def test_bad_hierarchies_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        make_hierarchy(**change)


def test_hopeless_noise_is_refused():
    data = make_hierarchy(40, 30, 3, 30, T=27, rho=0.0)
    with pytest.raises(ValueError, match="rho nearer to 1"):
        data.sample(np.arange(30), np.random.default_rng(0))
    with pytest.raises(ValueError, match="need a random generator"):
        data.sample(np.arange(30))


# model and shortcut


def torch_modules(model, x):
    """The same function from `nn.TransformerEncoderLayer`s with the same weights: logits and gradients."""
    d = model.embed.weight.shape[1]
    h = model.embed(x)
    mask = torch.nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=h.dtype)
    for block in model.blocks:
        layer = torch.nn.TransformerEncoderLayer(
            d, 1, len(block.lower.bias), dropout=0.0, batch_first=True
        ).to(h.dtype)
        weights = {
            "self_attn.in_proj_weight": torch.cat(
                [block.query.weight, block.key.weight, block.value.weight]
            ),
            "self_attn.in_proj_bias": torch.zeros(3 * d, dtype=h.dtype),
            "self_attn.out_proj.weight": torch.eye(d, dtype=h.dtype),
            "self_attn.out_proj.bias": torch.zeros(d, dtype=h.dtype),
        }
        for theirs, ours in {
            "linear1": "lower",
            "linear2": "upper",
            "norm1": "norm1",
            "norm2": "norm2",
        }.items():
            module = getattr(block, ours)
            weights |= {f"{theirs}.weight": module.weight, f"{theirs}.bias": module.bias}
        h = torch.func.functional_call(layer, weights, (h,), {"src_mask": mask, "is_causal": True})
    return model.classes(h[:, -1])


def gradients(model, loss):
    return torch.autograd.grad(loss, list(model.parameters()))


def gap(a, b):
    """The largest difference of two gradients, parameter by parameter and relative to its size."""
    return max(float((p - q).norm() / q.norm()) for p, q in zip(a, b, strict=True))


def setting(column, d, layers=3, dtype=torch.float64, seed=0, **more):
    torch.manual_seed(seed)
    data = make_hierarchy(*column, seed=seed, **more)
    model = HierarchyTransformer(data.M, data.C, d, hidden=3 * d, layers=layers).to(dtype)
    labels = data.draw_labels(128, np.random.default_rng(seed))
    return data, model, torch.from_numpy(labels)


@pytest.mark.parametrize("layers", [1, 2, 3, 4])
@pytest.mark.parametrize("column", [(10, 20, 2, 20), (20, 30, 3, 50)])
def test_shortcut_gradients_equal_those_of_torch_modules(column, layers):
    data, model, labels = setting(column, d=16, layers=layers)
    truth = torch.nn.functional.cross_entropy(
        torch_modules(model, torch.from_numpy(data.distinct().x)[labels]), labels
    )
    loss = distinct_loss(model, find_distinct(data), labels)
    assert float(loss.detach()) == pytest.approx(float(truth.detach()), rel=1e-12)
    assert gap(gradients(model, loss), gradients(model, truth)) < 1e-10


@pytest.mark.parametrize(("column", "d"), [((10, 20, 2, 20), 128), ((20, 30, 3, 50), 32)])
def test_shortcut_gradients_equal_the_plain_ones_to_1e_5_in_single_precision(column, d):
    data, model, labels = setting(column, d, dtype=torch.float32)
    x = torch.from_numpy(data.sample(labels.numpy()).x)
    plain = gradients(model, plain_loss(model, x, labels))
    short = gradients(
        model, distinct_loss(model, find_distinct(data).to("cpu", torch.float32), labels)
    )
    assert gap(short, plain) < 1e-5


def test_plain_path_with_noise_equals_torch_modules():
    data, model, labels = setting((10, 20, 2, 20), d=16, rho=0.9)
    x = torch.from_numpy(data.sample(labels.numpy(), np.random.default_rng(0)).x)
    truth = gradients(model, torch.nn.functional.cross_entropy(torch_modules(model, x), labels))
    assert gap(gradients(model, plain_loss(model, x, labels)), truth) < 1e-10


def test_the_equality_test_can_fail():
    """Without the ln p of the padding the gradients differ."""
    data, model, labels = setting((10, 20, 2, 20), d=16)
    right = find_distinct(data)
    wrong = copy.copy(right)
    object.__setattr__(wrong, "node_bias", right.node_bias.clamp(max=0.0))
    assert gap(gradients(model, distinct_loss(model, wrong, labels)),
               gradients(model, distinct_loss(model, right, labels))) > 1e-3  # fmt: skip


@settings(max_examples=25, deadline=None)
@given(st.lists(st.sets(st.integers(0, 6), max_size=5), min_size=1, max_size=8), st.integers(0, 3))
def test_any_padded_sequences(sets, spare):
    """Full rows, empty rows, equal rows, one row inside another: logits equal those of the plain model."""
    T = max(1, max(len(s) for s in sets) + spare)
    x = np.array([[7] * (T - len(s)) + sorted(s) for s in sets])
    torch.manual_seed(0)
    model = HierarchyTransformer(8, 3, d=8, hidden=12, layers=3).double()
    distinct = distinct_positions(x, pad=7)
    assert len(distinct.last) == len(np.unique(x, axis=0))
    with torch.no_grad():
        torch.testing.assert_close(
            distinct_logits(model, distinct)[distinct.sequence], model(torch.from_numpy(x))
        )


def test_rows_that_the_shortcut_cannot_take_are_refused():
    for row in ([1, 7, 2], [7, 1, 1]):
        with pytest.raises(ValueError, match="padding first"):
            distinct_positions(np.array([row]), pad=7)
    with pytest.raises(ValueError, match="non-empty table"):
        distinct_positions(np.zeros((0, 3), dtype=np.int64), pad=7)
    with pytest.raises(ValueError, match=r"rho = 0\.9"):
        find_distinct(make_hierarchy(rho=0.9))


def test_classes_with_the_same_tokens_share_a_row_and_keep_their_labels():
    owns = (
        np.eye(4, dtype=bool)[:, :3],
        np.ones((2, 4), dtype=bool),
        np.array([[1, 0], [0, 1]], dtype=bool),
    )
    data = Hierarchy(owns, T=5, rho=1.0)
    distinct = find_distinct(data)
    assert len(distinct.last) == 1
    torch.manual_seed(0)
    model = HierarchyTransformer(data.M, 2, d=8, hidden=8).double()
    labels = torch.tensor([0, 1, 1])
    truth = plain_loss(model, torch.from_numpy(data.sample(labels.numpy()).x), labels)
    assert float(distinct_loss(model, distinct, labels).detach()) == pytest.approx(
        float(truth.detach()), rel=1e-12
    )


def test_both_methods_train_alike():
    data, model, _ = setting((10, 20, 2, 20), d=16)
    other = copy.deepcopy(model)
    a = train(model, data, Training(steps=20, batch=32, lr=1e-3), seed=5)
    b = train(other, data, Training(steps=20, batch=32, lr=1e-3, method="plain"), seed=5)
    assert (a.method, b.method) == ("distinct", "plain")
    np.testing.assert_allclose(a.losses, b.losses, rtol=1e-9)
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-9)


def test_training_on_noisy_data_takes_the_plain_path_and_learns():
    data, model, _ = setting((10, 20, 2, 5), d=32, dtype=torch.float32, rho=0.95)
    done = train(model, data, Training(steps=60, batch=32, lr=1e-3))
    assert done.method == "plain"
    assert np.mean(done.losses[-10:]) < 0.7 * np.mean(done.losses[:3])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"steps": -1}, "steps must be ≥ 0"),
        ({"batch": 0}, "batch ≥ 1"),
        ({"lr": 0.0}, "lr must be > 0"),
        ({"lr": float("nan")}, "lr must be > 0"),
        ({"method": "fast"}, "method must be"),
    ],
)
def test_bad_training_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        Training(**change)


def test_bad_models_and_methods_are_refused():
    with pytest.raises(ValueError, match="d must be a positive integer, got 0"):
        HierarchyTransformer(10, 2, d=0)
    data, model, _ = setting((10, 20, 2, 20), d=8, rho=0.9)
    with pytest.raises(ValueError, match="'distinct' needs data without noise"):
        train(model, data, Training(steps=1, method="distinct"))
    with torch.no_grad():
        model.classes.bias[0] = torch.nan
    with pytest.raises(FloatingPointError, match="step 0"):
        train(model, data, Training(steps=1))


# NCorr


def brute_force(latents, activations):
    """Best Pearson correlation of each latent, pair by pair with `np.corrcoef`."""
    best = []
    for y in latents.T.astype(float):
        if y.std() == 0:
            best.append(np.nan)
            continue
        best.append(max(0.0 if a.std() == 0 else np.corrcoef(y, a)[0, 1] for a in activations.T))
    return np.array(best)


def test_best_correlation_equals_brute_force():
    rng = np.random.default_rng(0)
    y, a = rng.random((30, 7)) < 0.3, rng.standard_normal((30, 11))
    y[:, 2], a[:, 3] = True, 0.1
    a[:, 4] = -2.0 * y[:, 5]  # a perfect negative correlation is not the best one
    np.testing.assert_allclose(best_correlation(y, a), brute_force(y, a), rtol=1e-10)
    assert np.isnan(best_correlation(y, a)[2])
    with pytest.raises(ValueError, match="same N"):
        best_correlation(y, a[:-1])


def test_maximal_activations_are_those_of_single_sequences():
    data, model, _ = setting((10, 20, 2, 20), d=16, dtype=torch.float64)
    x = np.concatenate([data.distinct().x] * 13)  # more than one chunk
    seen = maximal_activations(model, x)
    for n, s in itertools.product((0, 19, 250), range(3)):
        with torch.no_grad():
            alone = model.hidden(torch.from_numpy(x[n : n + 1]))[1][s][0]  # (T, hidden)
        np.testing.assert_allclose(seen[s][n], alone.max(dim=0).values.numpy(), rtol=1e-9)


@pytest.mark.parametrize("rho", [1.0, 0.95])
def test_ncorr_is_the_mean_over_varying_latents(rho):
    data, model, _ = setting((10, 20, 2, 20), d=16, rho=rho)
    measured = measure_ncorr(model, data, seed=0, permutations=3)
    if rho == 1:
        samples = data.distinct()
        for s in (0, 1):
            a = maximal_activations(model, samples.x)[s]
            assert measured.value[s] == pytest.approx(
                np.nanmean(brute_force(samples.latents[s], a))
            )
    assert (measured.value > measured.permuted).all()
    assert (measured.permuted_draws < 0.2).all()  # 1,280 copies make any null look small


def test_a_planted_node_is_found_and_permuting_destroys_it():
    rng = np.random.default_rng(1)
    y = rng.random((400, 5)) < 0.5
    a = np.concatenate([rng.standard_normal((400, 20)), 3.0 * y + 1.0], axis=1)
    np.testing.assert_allclose(best_correlation(y, a), 1.0)
    assert best_correlation(y[rng.permutation(400)], a).max() < 0.3


def test_ncorr_refuses_what_it_cannot_compare():
    data, model, _ = setting((10, 20, 2, 20), d=8, layers=1)
    with pytest.raises(ValueError, match="model has 1 block"):
        measure_ncorr(model, data)


# the exhibit


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    patch, noisy = pytest.MonkeyPatch(), {"rho": [0.9], "seeds": 1, "steps": 2}
    patch.setitem(
        table1.SETTINGS,
        "laptop",
        {"columns": 2, "seeds": 2, "d": 16, "steps": 20, "lr": [1e-3], "noisy": noisy},
    )
    yield make_exhibit(get(["table1"])[0], "laptop", tmp_path_factory.mktemp("table1"))
    patch.undo()


def test_tables_show_the_means_of_the_run_beside_the_papers_numbers(small):
    markdown, latex = ((small.path / name).read_text() for name in ("table.md", "table.tex"))
    frame = Run(small.path).frame("ncorr")
    part = frame[(frame.N0 == 20) & (frame.s == 1) & (frame.state == "trained")].value
    (row,) = [line for line in markdown.splitlines() if line.startswith("| C=20 N_ch=2 (20, 30) |")]
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    column = 2 + len(table1.STATES)
    assert cells[column] == "0.80 ± 0.05"
    assert cells[column + 1] == f"{part.mean():.2f} ± {part.std():.2f}"
    assert (
        row.replace("±", r"\pm").count(r"\pm")
        == latex.splitlines()[7].count(r"\pm")
        == 2 * (1 + len(table1.STATES))
    )
    assert "d 16 (paper 1024)" in markdown


@pytest.mark.parametrize(
    ("trained", "verdict"),
    [((0.9, 0.9), "holds"), ((0.5, 0.9), "holds under a condition"), ((0.5, 0.5), "fails")],
)
def test_the_judge_asks_for_more_than_both_baselines(small, tmp_path, trained, verdict):
    config = Run(small.path).info["config"] | {
        "settings": {**table1.SETTINGS["paper"], "lr": [1e-4]}
    }  # can decide
    values = dict.fromkeys(table1.STATES, (0.4, 0.4)) | {
        "trained": trained,
        "untrained": (0.6, 0.6),
    }
    where = {"lr": 1e-4, "C": 20, "N_ch": 2, "N0": 10, "N1": 20}
    with RunWriter.create(
        tmp_path / "made-up", kind="exhibit", config=config, axes=table1.AXES
    ) as writer:
        for draw in range(3):
            for state, value in values.items():
                shift = 0.01 * draw * (state == "trained")
                writer.write(0, {"ncorr": np.array(value) + shift}, state=state, draw=draw, **where)
            writer.write(0, {"accuracy": 1.0, "possible accuracy": 1.0}, draw=draw, **where)
    judgement = table1.judge(Run(tmp_path / "made-up"))
    assert judgement.verdict == verdict
    agree = abs(trained[1] + 0.01 - 0.81) <= 2 * math.hypot(
        0.05, 0.01
    )  # the paper's value, told apart from the claim
    assert judgement.numbers["rates"]["lr 0.0001"]["layers"]["s = 1"]["agree"] == agree


def test_each_learning_rate_has_its_rows_and_its_label(small, tmp_path):
    """The claim holds at one of two rates only, and that decides."""
    config = Run(small.path).info["config"]
    config["settings"] = {**table1.SETTINGS["paper"], "lr": [1e-5, 1e-4]}
    column = {"C": 20, "N_ch": 2, "N0": 10, "N1": 20}
    with RunWriter.create(
        tmp_path / "made-up", kind="exhibit", config=config, axes=table1.AXES
    ) as writer:
        for lr, trained in ((1e-5, 0.5), (1e-4, 0.9)):
            for draw in range(3):
                values = dict.fromkeys(table1.STATES, 0.4) | {
                    "trained": trained + 0.01 * draw,
                    "untrained": 0.6,
                }
                for state, value in values.items():
                    writer.write(
                        0, {"ncorr": [value, value]}, state=state, draw=draw, lr=lr, **column
                    )
                writer.write(
                    0, {"accuracy": 1.0, "possible accuracy": 1.0}, draw=draw, lr=lr, **column
                )
    run = Run(tmp_path / "made-up")
    judgement = table1.judge(run)
    assert judgement.verdict == "holds"
    assert judgement.numbers["rates"]["lr 1e-05"]["layers"]["s = 0"]["passed"] == 0
    assert judgement.numbers["rates"]["lr 0.0001"]["layers"]["s = 0"]["passed"] == 1
    markdown = table1.tables(run)["table.md"]
    for label, value in (
        ("1e-05 as printed", "0.51 ± 0.01"),
        ("0.0001 as in the authors' script", "0.91 ± 0.01"),
    ):
        (row,) = [
            line
            for line in markdown.splitlines()
            if line.startswith(f"| C=20 N_ch=2 (10, 20), lr {label} |")
        ]
        assert value in row
