"""The harness behind `make families`: it knows the truth, and it notices a table that differs."""

import json
import time
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch
from benchmarks.families.explained import Expected, codes_in, disagreements, first_call
from benchmarks.families.libraries import Coverage
from benchmarks.families.measure import (
    Case,
    Row,
    TimeLimit,
    Truth,
    _are_probabilities,
    compare,
    measure,
    time_limit,
)
from benchmarks.families.page import Results, read, text_of
from benchmarks.families.recorder import Recorder
from torch import nn

import joma
from tests.measure.events.test_styles import Talking
from tests.measure.events.test_styles import states as style_states
from tests.measure.watch.models import LENGTH, VOCABULARY, HandWrittenGPT


def tokens():
    return torch.randint(0, VOCABULARY, (3, LENGTH), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def watched():
    """A first call, and what a watch says of it."""
    model = HandWrittenGPT(heads=4).eval()
    real = {LENGTH: torch.ones(3, LENGTH, dtype=torch.bool)}
    with (
        first_call(model) as call,
        joma.watch(model, every=1, gauges="entropy", live=False) as w,
    ):
        model(tokens())
        w.step()
        return call, Expected(set(), w.explain(), [4, 4], real)


def test_a_table_that_agrees_has_no_disagreement(watched):
    call, expected = watched
    assert disagreements(call, expected) == []


def test_other_heads_padded_queries_codes_and_rows_are_noticed(watched):
    call, expected = watched
    padded = {LENGTH: torch.arange(LENGTH).expand(3, -1) > 1}
    rows = expected.watched.rows
    other = replace(expected.watched, rows=(replace(rows[0], heads=2), *rows[1:]))
    for wrong, words in (
        (replace(expected, heads=[4]), "the truth has [4]"),
        (replace(expected, real=padded), "0 padded queries, the inputs of 14 tokens have 6"),
        (replace(expected, codes={"loop"}), "the watch has ['loop']"),
        (replace(expected, watched=other), "blocks.0.attn: ('measured', 4, 42, 0, '')"),
    ):
        assert words in "; ".join(disagreements(call, wrong))


def test_codes_are_found_in_messages():
    assert codes_in("refused [no-product]; of 3 [a, b]; ran [unseen]") == {"no-product", "unseen"}


def test_arguments_by_position_and_by_name_become_one_batch():
    class Named(nn.Module):
        def forward(self, x, mask=None, **more):
            return x

    model = Named()
    x = torch.zeros(2)
    with first_call(model) as call:
        model(x, mask=1, other=2)
        model(x, mask=3)
    assert call.batch() == {"x": x, "mask": 1, "other": 2}
    with first_call(model) as call:
        model(x)
    assert call.batch() == (x,)


@pytest.mark.parametrize("how", ["sdpa", "softmax"])
def test_a_right_model_is_right_and_a_refused_one_has_its_code(how):
    def build():
        real = {LENGTH: torch.ones(3, LENGTH, dtype=torch.bool)}
        return Case(HandWrittenGPT(how, heads=4), lambda model: model(tokens()), 4, real)

    row = measure("none", "gpt", "own, float32, none", build)
    assert (row.verdict, row.truth) == ("right", "recorded")
    length = style_states(2).shape[1]
    states = style_states(2)
    refused = measure(
        "none",
        "talking",
        "own, float32, none",
        lambda: Case(Talking(), lambda model: model(states), None, {}, None, frozenset({length})),
    )
    assert (refused.verdict, refused.code) == ("refused", "no-product")


def test_a_disagreement_is_a_verdict_of_its_own(monkeypatch):
    monkeypatch.setattr("benchmarks.families.measure.disagreements", lambda *_: ["heads [2]"])
    row = measure(
        "none",
        "gpt",
        "own, float32, none",
        lambda: Case(HandWrittenGPT(), lambda m: m(tokens()), 2, {}, None, frozenset({LENGTH})),
    )
    assert (row.verdict, row.detail) == ("explained otherwise", "heads [2]")
    page = text_of(Results([vars(row)]))
    assert "1 explained otherwise" in page
    assert "| explained otherwise |" in page


def test_scores_are_not_taken_for_probabilities():
    scores = torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    assert not _are_probabilities(scores)
    assert _are_probabilities(scores.softmax(dim=-1))
    assert _are_probabilities(0.4 * scores.softmax(dim=-1))  # a learned sink takes the rest


def test_the_recorder_has_the_weights_of_multi_head_attention_per_head():
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(8, 2, batch_first=True)
    query = torch.randn(3, 1, 8)
    states = torch.randn(3, 5, 8)
    with Recorder({5}) as recorder:
        output, _ = attention(query, states, states)
    (weights,) = recorder.probabilities
    assert recorder.heads == [2]
    assert weights.shape == (3, 2, 1, 5)
    _, expected = attention(query, states, states, average_attn_weights=False)
    assert torch.allclose(weights, expected.double(), atol=1e-6)
    assert output.shape == query.shape


def test_a_softmax_that_may_be_local_attention_is_counted():
    with Recorder({LENGTH}) as recorder:
        torch.randn(2, 3, 4, 5, 6).softmax(dim=-1)  # blocks, heads, local queries and keys
        torch.randn(2, 9).softmax(dim=-1)  # a classifier
    assert (recorder.probabilities, recorder.unknown) == ([], 1)


@pytest.mark.parametrize(
    ("measured", "unknown", "verdict"),
    [
        ([[1.0, 2.0], [5.0, 6.0]], 1, "not compared"),  # the other layer may be local attention
        ([[1.0, 2.0], [5.0, 6.0]], 0, "wrong"),
        ([[1.0, 2.5], [5.0, 6.0]], 1, "wrong"),  # what the harness knows is not there
        ([[1.0, 2.0], [5.0, 6.0], [7.0, 8.0]], 1, "wrong"),
        ([[1.0, 2.0]], 1, "right"),
    ],
)
def test_what_the_harness_does_not_know_excuses_no_layer_that_it_knows(measured, unknown, verdict):
    layer = torch.tensor([1.0, 2.0], dtype=torch.float64)
    truth = Truth([layer], "recorded", shows_heads=True, unknown=unknown)
    assert compare(np.array(measured), truth, 1e-5)[0] == verdict


def work_without_end():
    while True:
        pass


def test_the_time_limit_counts_processor_time_only():
    with time_limit(1):
        time.sleep(1.2)
    with pytest.raises(TimeLimit, match="processor time"), time_limit(1):
        work_without_end()


def row_of(library, verdict="right", detail=""):
    return asdict(Row(library, "a", "sdpa, float32, none", verdict, detail=detail))


def test_the_page_names_samples_stopped_and_missing_libraries(tmp_path):
    complete = asdict(Coverage("timm", 3, 3, "x"))
    sample = asdict(Coverage("litgpt", 2, 9, "x"))
    for library, lines in (
        ("timm", [row_of("timm"), complete]),
        ("litgpt", [row_of("litgpt"), sample]),
        ("torchtune", [row_of("torchtune")]),
    ):
        text = "\n".join(["a line that a library printed", *map(json.dumps, lines)])
        (tmp_path / f"{library}.jsonl").write_text(text)
    results = read(tmp_path)
    page = text_of(results)
    assert "3 variants of 3 models: 3 right." in page
    assert "2 of 9 models of litgpt." in page
    assert "of 3 models of timm" not in page
    assert "did not come to their end:** torchtune." in page
    assert "**Not run:** transformers, vit-pytorch" in page
    assert "different versions" not in page
    other = replace(results.coverages[0], code="y")
    assert "different versions" in text_of(
        replace(results, coverages=[other, results.coverages[1]])
    )


def test_a_model_that_does_not_run_is_on_the_page_with_the_reason():
    rows = [row_of("timm", "not built", "ValueError: too large\nmore")]
    assert "- timm: a (`ValueError: too large`)" in text_of(Results(rows))
