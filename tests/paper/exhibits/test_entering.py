"""The exhibit entering: lifts of attention that is known, the model's own scores, and judges that say no."""

import math

import numpy as np
import pytest
import torch
from scipy import stats

from joma import Run
from joma._runs import RunWriter
from joma._show import plots
from joma._train.model import LanguageModel
from joma.paper.exhibits import entering
from joma.paper.labs.entering import EnteringRun, EnteringSettings, EnteringText, scores_of

SMALL = EnteringSettings(
    **{key: value for key, value in entering.CODE_SLICE.items() if key != "seeds"}
)


@pytest.fixture(scope="module")
def text():
    return EnteringText(SMALL)


def test_even_attention_prefers_no_word(text):
    n, T = text.probe.shape
    numbers = text.measure(np.zeros((n, T, T)))
    # All lifts are exactly 1, in no order.
    assert math.isnan(numbers["word_rank"])
    # the query itself is among the keys: ln(T!)/T
    assert numbers["entropy"] == pytest.approx(math.lgamma(T + 1) / T, abs=1e-12)


def test_scores_that_grow_with_frequency_or_cooccurrence_are_told_apart(text):
    # Not 1: what a word gets depends on the other words of its contexts, too.
    n, T = text.probe.shape
    frequency = 1e-3 * np.log1p(text.counts)
    by_word = np.repeat(frequency[text.probe][:, None, :], T, axis=1)
    assert text.measure(by_word)["word_rank"] > 0.8
    assert text.measure(-by_word)["word_rank"] < -0.8
    scores = np.zeros((n, T, T))
    m = text.number[text.probe]  # (n, T)
    row, i, j = np.nonzero((m[:, :, None] >= 0) & np.ones((1, 1, T), bool))
    scores[row, i, j] = 1e-3 * np.log(text.together[m[row, i], text.probe[row, j]] + 1e-9)
    assert text.measure(scores)["pair_rank"] > 0.8
    assert text.measure(-scores)["pair_rank"] < -0.8


def test_cooccurrence_is_a_count_of_pairs_of_places(text):
    query = int(text.queries[0])
    train = np.concatenate(
        [entering_window(text, n) for n in range((len(text.train) - 1) // SMALL.length)]
    )
    counts = np.zeros(text.size)
    for row in train:
        for i in np.flatnonzero(row == query):
            counts += np.bincount(row[:i], minlength=text.size)
    assert np.abs(text.together[0] - counts / counts.sum()).max() < 1e-12


def entering_window(text, n):
    start = n * SMALL.length
    return np.asarray(text.train[start : start + SMALL.length].T)


def test_scores_are_those_of_the_model():
    torch.manual_seed(0)
    model = LanguageModel(40, d=12, hidden=12, length=9).eval()
    tokens = torch.randint(40, (3, 9))
    seen = []
    layer = model.encoder.layers[0]
    rows = model.embed(tokens) * math.sqrt(12) + model.positions
    _, seen = layer.self_attn(rows, rows, rows, attn_mask=model.mask, need_weights=True)
    scores = torch.from_numpy(scores_of(model, tokens))
    attention = scores.masked_fill(model.mask, -math.inf).softmax(dim=2)
    assert (attention - seen).abs().max() < 1e-6


def test_training_moves_what_is_measured_and_measuring_does_not_move_training(text):
    losses = {}
    for every in (20, 40):
        settings = EnteringSettings(**(vars(SMALL) | {"every": every}))
        run = EnteringRun(text, "adam", 1e-2, 7)
        run.text = text
        object.__setattr__(text, "settings", settings)
        numbers = list(run.measurements())
        losses[every] = run.losses
        assert [step for step, _ in numbers] == list(range(0, 41, every))
        assert numbers[0][1]["entropy"] != numbers[-1][1]["entropy"]
    assert losses[20] == losses[40]


STEPS = np.arange(0, 1300, 50)


def made(folder, ranks):
    """A run with a dip and bounce of entropy, and these correlations (at the trough, at the end) per optimiser."""
    rng = np.random.default_rng(0)
    with RunWriter.create(folder / "run", kind="exhibit", config={}) as writer:
        for optimiser, (first, last, bounces) in ranks.items():
            for member in range(4):
                noise = 0.01 * rng.standard_normal()
                for step in STEPS:
                    fall = 1.0 if step >= 300 else step / 300
                    back = (step - 300) / 900 if step > 300 else 0.0
                    rank = first * fall + (last - first) * back + noise
                    entropy = 2.5 - fall + (0.5 * back if bounces else 0.0)
                    values = {"pair_rank": rank, "word_rank": -rank, "entropy": entropy}
                    writer.write(int(step), values, optimiser=optimiser, member=member)
    return Run(folder / "run")


STATED = (0.5, 0.1, True)
RISES = (0.2, 0.6, True)
BELOW = (-0.3, -0.5, True)
NO_DIP = (0.5, 0.1, False)


@pytest.mark.parametrize(
    ("sgd", "adam", "verdict"),
    [
        (STATED, STATED, "holds"),
        (STATED, RISES, "holds under a condition"),
        (NO_DIP, STATED, "holds under a condition"),
        (RISES, RISES, "fails"),
        (BELOW, NO_DIP, "fails"),
        (NO_DIP, NO_DIP, "inconclusive"),
    ],
)
def test_the_rule(tmp_path, sgd, adam, verdict):
    run = made(tmp_path, {"SGD": sgd, "Adam": adam})
    judgement = entering.judge(run)
    assert judgement.verdict == verdict
    assert judgement.numbers["seeds"] == 4
    plots.save(entering.draw(run), tmp_path)
    assert "NaN" not in (tmp_path / "figure.svg").read_text()


def test_seeds_that_disagree_decide_nothing(tmp_path):
    with RunWriter.create(tmp_path / "run", kind="exhibit", config={}) as writer:
        for optimiser in entering.RATES:
            for member, rank in enumerate((0.9, -0.9, 0.5, -0.6)):
                for step, entropy in (
                    (0, 2.5),
                    (50, 2.0),
                    (100, 1.5),
                    (150, 1.5),
                    (200, 2.0),
                    (250, 2.2),
                ):
                    values = {"pair_rank": rank, "word_rank": 0.0, "entropy": entropy}
                    writer.write(step, values, optimiser=optimiser, member=member)
    assert entering.judge(Run(tmp_path / "run")).verdict == "inconclusive"


def test_a_sample_that_is_too_small_is_refused():
    sample = EnteringText(EnteringSettings(**(vars(SMALL) | {"probe": 1, "least": 50})))
    n, T = sample.probe.shape
    with pytest.raises(ValueError, match="take more windows"):
        sample.measure(np.zeros((n, T, T)))


def test_ranks_are_spearmans(text):
    n, T = text.probe.shape
    scores = np.random.default_rng(1).standard_normal((n, T, T))
    numbers = text.measure(scores)
    pairs = text.pairs
    weights = np.exp(scores)
    total = np.array([[weights[r, i, :i].sum() for i in range(T)] for r in range(n)])
    share = weights[pairs.row, pairs.i, pairs.j] / total[pairs.row, pairs.i]
    lift = [share[pairs.word == l].sum() / (1 / pairs.i)[pairs.word == l].sum() for l in text.words]
    expected = stats.spearmanr(lift, text.counts[text.words]).statistic
    assert numbers["word_rank"] == pytest.approx(expected, abs=1e-12)
