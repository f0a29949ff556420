"""Patterns of neurons: planted ones are found, and every test that they have to pass can fail."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from benchmarks.planted import BIAS, LENGTH, build
from torch import nn

import joma
from joma._inspect.collect import collect
from joma._inspect.group import Context, contexts
from joma._inspect.layer import APART, Case, Layer, apart, tail
from joma._inspect.masking import Question, mask
from joma._inspect.page import page
from joma._inspect.patterns import dealt, merged, replication
from joma._inspect.similar import Similarity, input_embedding
from joma._inspect.windows import batches
from tests.inspect.planted import FIRST, QUERIES, SECOND, Planted, corpus


@pytest.mark.parametrize(
    ("k", "n", "count", "total"), [(3, 32, 5, 400), (1, 4, 1, 2), (7, 7, 3, 10), (2, 5, 0, 9)]
)
def test_the_tail_is_the_sum_of_binomial_terms(k, n, count, total):
    q = count / total
    expected = sum(math.comb(n, m) * q**m * (1 - q) ** (n - m) for m in range(k, n + 1))
    assert tail(k, n, count, total) == pytest.approx(expected, rel=1e-9, abs=1e-300)


def _cases(*words, start=0):
    """One case per set of words, each in a document of its own."""
    return [Case(start + 2 * APART * n, frozenset(names)) for n, names in enumerate(words)]


def _layer(*neurons, others=200):
    """A layer of these neurons, and of others that attend to common words and to words of their own."""
    rest = [_cases(*[("the", f"own{n}")] * 8, start=7 * n) for n in range(others)]
    return Layer([*neurons, *rest])


def test_words_that_are_common_in_the_layer_are_no_pattern_and_others_are():
    neuron = _cases(*[("king", "the")] * 6, *[("rain", "the")] * 5, *[("the",)] * 8)
    layer = _layer(neuron)
    found = layer.groups(neuron, None)
    assert [group.words for group in found] == [["king"], ["rain"]]
    assert [group.members for group in found] == [list(range(6)), list(range(6, 11))]
    # the corrected p is that of the definition: contexts of the layer, its words, its neurons
    total, words = layer.focused, 200 + 3
    assert total == 200 * 8 + 19
    assert found[0].p == pytest.approx(201 * words * tail(6, 19, 6, total), rel=1e-9)
    assert found[0].expected == pytest.approx(6 / total)


def test_words_of_one_context_and_words_that_are_alike_are_one_pattern():
    neuron = _cases(
        *[("june",)] * 5, *[("august",)] * 5, *[("king",)] * 5, *[("queen",)] * 4, ("king", "queen")
    )
    layer = _layer(neuron)
    assert {tuple(g.words) for g in layer.groups(neuron, None)} == {
        ("june",),
        ("august",),
        ("king", "queen"),
    }
    months = {"june", "august"}
    found = layer.groups(neuron, lambda a, b: {a, b} == months)
    assert {frozenset(g.words) for g in found} == {frozenset(months), frozenset({"king", "queen"})}


def test_one_document_that_repeats_itself_is_no_pattern():
    near = [Case(30 * n, frozenset({"king"})) for n in range(8)]
    assert _layer(near).groups(near, None) == []
    far = _cases(*[("king",)] * 8)
    assert len(_layer(far).groups(far, None)) == 1
    assert apart([0, APART - 1, APART, 2 * APART - 1]) == 2


def test_dealt_contexts_have_no_patterns_and_merged_neurons_have_those_of_both():
    rng = np.random.default_rng(0)
    words = np.array([f"w{n}" for n in range(300)])
    neurons = [
        _cases(
            *[(words[n], words[(n + 7) % 300]) for _ in range(10)],
            *rng.choice(words, (10, 2)),
            start=3 * n,
        )
        for n in range(100)
    ]
    layer = Layer(neurons)
    assert dealt(layer, None, rng) == 0
    assert all(len(layer.groups(cases, None)) == 1 for cases in neurons)
    several = [len(layer.groups(merged(neurons[n], neurons[n + 50]), None)) for n in range(50)]
    assert np.mean(np.array(several) == 2) > 0.9


def test_replication_counts_held_out_contexts_against_the_layer():
    neuron = _cases(*[("king",)] * 8)
    group = _layer(neuron).groups(neuron, None)[0]
    there = _cases(("king",), ("a",), ("king", "b"), (), ("c",))
    p, members = replication(group, there, 10)
    assert members == [0, 2]
    q = group.expected
    assert p == pytest.approx(
        10 * sum(math.comb(4, m) * q**m * (1 - q) ** (4 - m) for m in (2, 3, 4)), rel=1e-6
    )
    assert replication(group, _cases(("a",), ("b",)), 10) == (1.0, [])


def test_alike_are_words_of_one_cluster_whatever_one_large_dimension_says():
    rng = np.random.default_rng(1)
    vectors = {f"w{n}": rng.standard_normal(32) for n in range(300)}
    centre = 3 * rng.standard_normal(32)
    vectors |= {
        month: centre + 0.5 * rng.standard_normal(32) for month in ("june", "august", "december")
    }
    for vector in vectors.values():
        vector[5] = 1000 + 50 * rng.standard_normal()
    alike = Similarity(vectors)
    assert alike("june", "august")
    assert alike("december", "june")
    pairs = [alike(f"w{2 * n}", f"w{2 * n + 1}") for n in range(150)]
    assert np.mean(pairs) < 0.05
    assert alike("june", "a word without an embedding")  # nothing is known of it
    orthonormal = Similarity({str(n): row for n, row in enumerate(np.eye(20))})
    assert not any(orthonormal(str(n), str(n + 1)) for n in range(19))


class _Looks(nn.Module):
    """Looks positions up before tokens."""

    def __init__(self):
        super().__init__()
        self.places, self.words = nn.Embedding(50, 4), nn.Embedding(50, 4)

    def forward(self, tokens):
        return self.words(tokens) + self.places(torch.arange(tokens.shape[1]))


def test_the_input_embedding_is_the_one_that_tokens_are_looked_up_in():
    model, tokens = _Looks(), torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])
    assert input_embedding(model, tokens) is model.words.weight
    assert input_embedding(Planted(), tokens) is None
    assert not model.words._forward_pre_hooks


@pytest.fixture(scope="module")
def planted():
    """A network with planted superposition, its plan, and what is found in it."""
    plan, network, tokens = build(seed=50, share=0.1, neurons=100, windows=1200)
    return plan, network, joma.superpose(network, tokens, length=LENGTH, masked=None)


def test_planted_superposition_is_found_and_nothing_else(planted):
    plan, _, found = planted
    superposed = {n for n in range(100) if found.superposed(0, n)}
    assert len(superposed & set(plan.superposed)) >= 0.8 * len(plan.superposed)
    assert len(superposed - set(plan.superposed)) <= 1
    for neuron in superposed & set(plan.superposed):
        words = [set(map(int, p.words)) for p in found.patterns(0, neuron) if p.passes]
        built = [set(plan.patterns[n]) for n in plan.neurons[neuron]]
        assert all(len(some & built[0]) >= 2 or len(some & built[1]) >= 2 for some in words)
        assert set().union(*words) <= built[0] | built[1]
    assert found.chance(2) == [0.0, 0.0]
    share, pairs = found.power(40)
    assert pairs == 40
    assert share > 0.1  # each pattern has half of the contexts then, and these are few here
    concepts = [
        n for n, holds in enumerate(plan.neurons) if len(holds) == 2 and n not in plan.superposed
    ]
    assert all(len(found.patterns(0, n)) <= 1 for n in concepts)  # two queries, one concept


def test_a_network_built_without_superposition_has_none():
    _, network, tokens = build(seed=51, share=0.0, neurons=100, windows=1200)
    found = joma.superpose(network, tokens, length=LENGTH, masked=None)
    assert int(found.counts().passed.sum()) == 0
    assert (found.frame().patterns == 1).sum() > 20  # single ones are there


def test_masking_takes_the_pattern_away_and_w_points_to_it_as_equation_60_says():
    network = Planted(sharpness=40.0)
    strongest = collect(network, batches([corpus(300, 32, seed=0)], 32, 16), None, k=32, T=32)[0]
    questions = []
    for neuron, words in ((0, FIRST), (0, SECOND), (1, FIRST), (2, SECOND)):
        there = [
            c for c in contexts(strongest, neuron) if c.tokens[c.query] == QUERIES[words == SECOND]
        ]
        questions.append(Question(neuron, [str(word) for word in words], there))
    w = network.layers[0].mlp[0].weight.detach()
    for question, masking in zip(
        questions, mask(network, 0, questions, str, np.random.default_rng(0)), strict=True
    ):
        assert (masking.contexts, masking.lower, masking.left) == (
            8,
            8,
            0.0,
        )  # v·b = 0 is left, and ξ < 0
        assert masking.control == pytest.approx(1.0, abs=0.01)
        # the direction is U_C of two of three words, 1/3 each in the mean, less what uniform attention brings instead
        words = w[question.neuron, list(map(int, question.words))]
        assert words.tolist() == [1.0, 1.0, 1.0]
        exact = 1 / (float(w[question.neuron].norm()) * math.sqrt(1 / 3 + 1 / 50))
        assert masking.pattern == pytest.approx(exact, abs=0.06)
        assert masking.held
    assert mask(network, 0, questions[2:], str, np.random.default_rng(0))[0].query == pytest.approx(
        # u₁ − (u₁ + u₂)/2: half of −ξ, and fillers that w does not see
        -0.3 / math.sqrt(3 + 0.09) / math.sqrt(2),
        abs=0.06,
    )


def test_words_that_do_nothing_to_the_neuron_do_not_pass_by_masking(planted):
    plan, network, found = planted
    neuron = next(n for n, holds in enumerate(plan.neurons) if not holds and found.contexts(0, n))
    there = [c for c in found.contexts(0, neuron) if c.attended][:8]
    words = sorted({found.word(int(c.tokens[place])) for c in there for place in c.attended})
    answer = mask(
        network, 0, [Question(neuron, words, there)], found.word, np.random.default_rng(0)
    )[0]
    assert there[0].activation == pytest.approx(1 - BIAS, abs=1e-4)  # w·u of the word itself
    assert not answer.lowers
    assert (answer.left, answer.control) == pytest.approx((1.0, 1.0), abs=1e-4)


def test_a_context_with_nothing_to_mask_is_no_evidence():
    tokens = np.arange(12)
    context = Context(1.0, 0, 11, tokens, [3], np.zeros(12), np.zeros(12))
    assert mask(
        Planted(), 0, [Question(0, ["elsewhere"], [context])], str, np.random.default_rng(0)
    ) == [None]
    assert mask(Planted(), 0, [], str, np.random.default_rng(0)) == []


def test_without_embeddings_nothing_is_called_unrelated():
    found = joma.superpose(Planted(), corpus(300, 32, seed=0), length=32, masked=None)
    assert found.alike is None
    assert not any(found.superposed(0, n) for n in range(240))
    assert "unrelated patterns" not in page(found, found.top(5))


def test_the_page_leads_with_neurons_that_pass_and_says_so(planted):
    _, _, found = planted
    first = found.top(3)
    assert all(found.superposed(*place) for place in first)
    text = page(found, first)
    assert text.count("2 unrelated patterns that pass all tests") == 3
    assert "on held-out text (p = " in text


class _Counted(nn.Module):
    def __init__(self, inner, counts, n):
        super().__init__()
        self.inner, self.counts, self.n = inner, counts, n

    def forward(self, *args, **kwargs):
        self.counts[self.n] += 1
        return self.inner(*args, **kwargs)


def test_a_pass_stops_after_the_last_layer_that_is_asked_for():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPTNeoXConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=3, num_attention_heads=2, intermediate_size=24,
        max_position_embeddings=64, initializer_range=0.5, use_cache=False,
    )  # fmt: skip
    model = transformers.GPTNeoXModel(config).eval()
    tokens = np.random.default_rng(0).integers(0, 50, 16 * 8 * 5)
    every = collect(model, batches([tokens], 16, 8), None, k=4, T=16)
    counts = [0, 0, 0]
    for n, layer in enumerate(model.layers):
        layer.attention = _Counted(layer.attention, counts, n)
    some = collect(model, batches([tokens], 16, 8), {1: None}, k=4, T=16)
    assert counts == [5, 5, 1]  # the first pass tells whether layers share one MLP
    assert list(some) == [1]
    torch.testing.assert_close(some[1].value, every[1].value)
    torch.testing.assert_close(some[1].tokens, every[1].tokens)
    few = collect(model, batches([tokens], 16, 8), {1: torch.tensor([3, 7])}, k=4, T=16)
    torch.testing.assert_close(few[1].value, every[1].value[[3, 7]])


def test_layers_that_share_one_mlp_are_all_seen():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.AlbertConfig(
        vocab_size=50, embedding_size=16, hidden_size=16, num_hidden_layers=3, num_attention_heads=2,
        intermediate_size=24, max_position_embeddings=64, initializer_range=0.5,
    )  # fmt: skip
    model = transformers.AlbertModel(config).eval()
    tokens = np.random.default_rng(0).integers(0, 50, 16 * 8 * 3)
    every = collect(model, batches([tokens], 16, 8), None, k=4, T=16)[0]
    asked = collect(model, batches([tokens], 16, 8), {0: None}, k=4, T=16)[0]
    torch.testing.assert_close(asked.value, every.value)
    context = Context(1.0, 0, 9, tokens[:16], [3], np.zeros(16), np.zeros(16))
    question = Question(0, [str(tokens[3])], [context])
    assert mask(model, 0, [question], str, np.random.default_rng(0)) == [None]


def test_an_untrained_model_has_new_weights_and_is_refused_where_it_cannot_be_made():
    with pytest.raises(ValueError, match="Planted has no config to be made anew from"):
        joma.superpose(Planted(), corpus(10, 32, seed=0), length=32, untrained=True)
    transformers = pytest.importorskip("transformers")
    config = transformers.GPTNeoXConfig(
        vocab_size=60,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=24,
        use_cache=False,
    )
    model = transformers.GPTNeoXModel(config)
    with torch.no_grad():
        model.layers[0].mlp.dense_h_to_4h.bias.fill_(100.0)  # so that it shows which one ran
    tokens = corpus(40, 32, seed=0)
    assert joma.superpose(model, tokens, length=32).frame().strongest.min() > 50
    assert joma.superpose(model, tokens, length=32, untrained=True).frame().strongest.max() < 50
