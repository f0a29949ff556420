"""Saliency on a text: against a loop over the text, against chance, and the word rules."""

import numpy as np
import pytest

from joma._data.words import most_frequent, words_of
from joma.theory import Task, saliency


def brute(tokens, query, window, baseline="query"):
    """{l: (count, frequency, ‖Δ_l‖, best k, Δ_lk)} by a loop over the text and the paper's own definition."""
    names = sorted(set(tokens))
    number = {word: n for n, word in enumerate(names)}
    x, y = [], []
    for i in range(1, len(tokens) - 1):
        if tokens[i] == query:
            context = tokens[max(0, i - window) : i]
            row = np.zeros(len(names))
            for word in context:
                row[number[word]] += 1 / len(context)
            x.append(row)
            y.append(number[tokens[i + 1]])
    x, label = np.array(x), np.eye(len(names))[y]
    seen = label.any(axis=0)
    g = label - (label.mean(axis=0) if baseline == "query" else seen / seen.sum())
    found = Task(x, g).saliency()
    out = {}
    for l in np.flatnonzero(found.frequency > 0):
        delta = found.delta[l]
        out[names[l]] = (
            found.frequency[l],
            np.linalg.norm(delta),
            delta.max(),
            np.linalg.norm(found.discriminancy[l]),
        )
    return out


@pytest.mark.parametrize("baseline", ["query", "uniform"])
def test_every_number_against_a_loop_over_the_text(baseline):
    rng = np.random.default_rng(0)
    tokens = [f"w{n}" for n in rng.zipf(1.6, size=400) % 12]
    frame = saliency(tokens, "w1", window=5, min_count=1, baseline=baseline).set_index("token")
    expected = brute(tokens, "w1", 5, baseline)
    assert set(frame.index) == set(expected)
    for word, (frequency, size, lift, discriminancy) in expected.items():
        row = frame.loc[word]
        np.testing.assert_allclose(
            [row.frequency, row.saliency, row.lift, row.discriminancy],
            [frequency, size, lift, discriminancy],
            atol=1e-12,
        )
    assert (frame.saliency.diff().dropna() <= 0).all()
    np.testing.assert_allclose(frame.saliency, frame.frequency * frame.discriminancy)


def test_words_and_integers_give_the_same():
    rng = np.random.default_rng(1)
    numbers = rng.integers(9, size=500)
    words, same = saliency([str(n) for n in numbers], "4"), saliency(numbers, 4)
    assert words.token.tolist() == [str(n) for n in same.token]
    np.testing.assert_array_equal(words.saliency, same.saliency)
    np.testing.assert_array_equal(words.score, saliency(list(numbers), 4).score)


def test_a_planted_word_is_distinct_and_the_rest_is_chance():
    rng = np.random.default_rng(2)
    text = []
    for _ in range(1500):
        words = [f"n{n}" for n in rng.integers(40, size=8)]
        sign = rng.random() < 0.5
        words[rng.integers(8)] = "up" if sign else "down"
        text += [*words, "q", ("yes" if rng.random() < (0.8 if sign else 0.2) else "no")]
    frame = saliency(text, "q", window=8).set_index("token")
    assert frame.index[:2].tolist() in (["up", "down"], ["down", "up"])
    assert (frame.loc["up"].favours, frame.loc["down"].favours) == ("yes", "no")
    assert (frame.loc[["up", "down"]].kind == "distinct").all()
    rest = frame.drop(["up", "down"])
    assert len(rest) == 40
    assert (rest.kind == "distinct").mean() <= 0.1
    assert (rest.kind == "common").mean() >= 0.7


def test_scores_of_independent_targets_have_mean_0_and_spread_1():
    rng = np.random.default_rng(3)
    text = rng.integers(300, size=60_000)
    text[::10] = 0  # the query; its targets are independent of its contexts
    scores = saliency(text, 0, window=9).score
    assert len(scores) > 200
    assert abs(scores.mean()) < 0.3
    assert 0.7 < scores.std() < 1.4


def test_a_token_that_is_always_there_is_common():
    text = ["the", "q", "a", "the", "q", "b"] * 50
    row = saliency(text, "q", window=1).iloc[0]
    assert (row.token, row.kind, row.score) == ("the", "common", 0.0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("a b c", "a"), "split it into words"),
        (([], "a"), "at least one token"),
        ((np.ones((2, 2), int), 1), r"got shape \(2, 2\)"),
        ((np.ones(5), 1.0), "words or integers"),
        ((["apple", "b", "c"], "aple"), "Did you mean 'apple'.*3 different tokens"),
        ((["a", "b", "c"], "b"), "1 place"),
    ],
)
def test_bad_input_is_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        saliency(*arguments)


def test_bad_options_are_named():
    with pytest.raises(ValueError, match="window must be a positive number"):
        saliency(["a", "b"], "a", window=0)
    with pytest.raises(ValueError, match="Did you mean 'query'"):
        saliency(["a", "b"], "a", baseline="queries")


def test_pydoc_is_text_on_every_machine():
    words = words_of("pydoc")
    assert len(words) > 50_000
    assert not any('"' in word or word != word.lower() for word in words)
    code, vocabulary = most_frequent(words, 500)
    assert len(vocabulary) == len(set(vocabulary)) == 500
    assert code.max() == 499
    first = int(np.flatnonzero(code < 0)[0])
    assert words[first] not in vocabulary
    assert all(words[i] == vocabulary[code[i]] for i in range(1000) if code[i] >= 0)
    counts = np.bincount(code[code >= 0])
    assert (np.diff(counts) <= 0).all()
