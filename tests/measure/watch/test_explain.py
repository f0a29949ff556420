"""`joma.explain`: what is seen of a model, and how it is known."""

import json
import math

import pytest
import torch
from torch import nn
from torch.nn import functional

import joma
from joma._runs.explanation import Explanation, read_explanation
from tests.measure.events.test_axes import Hidden
from tests.measure.events.test_axes import states as axes_states
from tests.measure.events.test_styles import Talking
from tests.measure.events.test_styles import states as style_states
from tests.measure.watch.models import LENGTH, VOCABULARY, HandWrittenGPT, ManyHeads, tally_of


def tokens(batch=3, length=LENGTH):
    return torch.randint(0, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(0))


def rows_of(explanation, kind="attention"):
    return [row for row in explanation.rows if row.kind == kind]


@pytest.mark.parametrize(
    ("how", "backend", "mask", "check"),
    [
        ("sdpa", "sdpa", "causal", "output against softmax(s)·V"),
        ("softmax", "eager softmax", "in the scores", "weights against softmax(s)"),
        ("einsum", "eager softmax", "in the scores", "weights against softmax(s)"),
    ],
)
def test_a_hand_written_gpt_has_one_row_per_attention_and_per_mlp(how, backend, mask, check):
    explanation = joma.explain(HandWrittenGPT(how, heads=4), tokens())
    attentions = rows_of(explanation)
    assert [row.module for row in attentions] == ["blocks.0.attn", "blocks.1.attn"]
    for row in attentions:
        assert row.class_name == "HandWrittenAttention"
        assert row.status == "measured"
        assert row.backend == backend
        assert row.axes == "samples 3, heads 4, queries 14, keys 14"
        assert (row.heads, row.evidence) == (4, "found in the projection's output")
        assert (row.mask, row.hides) == (mask, "later keys")
        assert (row.queries, row.padded, row.padding_evidence) == (42, 0, "none")
        assert row.check == check
        assert 0 <= row.error < 1e-5
        assert row.matrices == "q k v o"
        assert (row.code, row.reason) == ("", "")
    mlps = rows_of(explanation, "MLP")
    assert [row.module for row in mlps] == ["blocks.0.mlp", "blocks.1.mlp"]
    assert mlps[1].matrices == "blocks.1.mlp.0 → blocks.1.mlp.2"
    assert mlps[1].evidence == "names and structure"


@pytest.mark.parametrize("training", [True, False])
def test_the_mask_of_multi_head_attention_shows_its_padding(training):
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).train(training)
    padding = torch.zeros(3, 9, dtype=torch.bool)
    padding[1, 6:] = True
    explanation = joma.explain(
        model, {"src": torch.randn(3, 9, 16), "src_key_padding_mask": padding}
    )
    assert len(rows_of(explanation)) == 2
    for row in rows_of(explanation):
        assert row.backend.startswith("multi-head forward")
        assert (row.heads, row.evidence) == (4, "certain from the function")
        assert (row.queries, row.padded) == (27, 3)
        assert row.padding_evidence == "mask and argument key_padding_mask"
        assert row.hides == "3 of 27 keys from all queries"


@pytest.mark.parametrize("backend", ["sdpa", "eager"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_queries_of_bert_are_counted(backend, side):
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=32,
    )
    model = transformers.BertModel._from_config(config, attn_implementation=backend)
    mask = torch.ones(3, LENGTH, dtype=torch.long)
    hidden = slice(None, 5) if side == "left" else slice(-5, None)
    mask[1, hidden] = 0
    explanation = joma.explain(model, {"input_ids": tokens(), "attention_mask": mask})
    assert len(rows_of(explanation)) == 2
    for row in rows_of(explanation):
        assert row.backend == {"sdpa": "sdpa", "eager": "eager softmax"}[backend]
        assert row.heads == 4
        assert (row.queries, row.padded) == (42, 5)
        assert row.padding_evidence == "mask and argument attention_mask"
        assert row.hides == "5 of 42 keys from all queries"
    assert [row.kind for row in explanation.rows] == ["attention", "MLP"] * 2
    first, _ = rows_of(explanation, "MLP")
    assert first.matrices == "encoder.layer.0.intermediate.dense → encoder.layer.0.output.dense"


class Grouped(nn.Module):
    """Six heads of queries share two of keys and values."""

    def __init__(self):
        super().__init__()
        self.q_proj = nn.Linear(24, 24)
        self.k_proj = nn.Linear(24, 8)
        self.v_proj = nn.Linear(24, 8)

    def forward(self, x):
        q = self.q_proj(x).unflatten(-1, (6, 4)).transpose(1, 2)  # (B, 6, T, 4)
        k, v = (
            map_(x).unflatten(-1, (2, 4)).transpose(1, 2) for map_ in (self.k_proj, self.v_proj)
        )
        return (
            functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
            .transpose(1, 2)
            .flatten(2)
        )


def test_grouped_queries_have_the_heads_of_their_queries():
    (row,) = rows_of(joma.explain(Grouped(), torch.randn(2, 5, 24)))
    assert row.heads == 6
    assert row.matrices == "q k v"
    assert (row.mask, row.hides) == ("none", "nothing")


def test_talking_heads_are_refused_with_code_and_sentence():
    (row,) = rows_of(joma.explain(Talking(), style_states(2)))
    assert row.status == "refused"
    assert row.code == "no-product"
    assert "not multiplied with values as it is" in row.reason
    assert "[" not in row.reason[-15:]
    assert row.heads is None


def test_heads_that_nothing_decides_are_shown_as_a_layer():
    (row,) = rows_of(joma.explain(Hidden("(heads batch)", "matmul"), axes_states(3)))
    assert (row.status, row.code, row.heads) == ("layer only", "head-axis", None)
    assert row.evidence == "nothing decides"
    assert row.axes.startswith("samples or heads 12")


def test_the_user_can_decide_heads_and_padding():
    model = Hidden("(heads batch)", "matmul")
    (row,) = rows_of(joma.explain(model, axes_states(3), heads="heads batch"))
    assert (row.status, row.heads, row.evidence) == ("measured", 4, "the user's heads=")
    assert row.axes.startswith("heads 4 · samples 3")
    real = torch.ones(3, LENGTH)
    real[2, 10:] = 0
    first = rows_of(joma.explain(HandWrittenGPT(), tokens(), padding=real))[0]
    assert (first.padded, first.padding_evidence) == (4, "the user's padding=")


class Shared(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = HandWrittenGPT(layers=1).blocks[0]

    def forward(self, x):
        for _ in range(3):
            x = self.block(x)
        return x


def test_a_module_that_runs_three_times_is_one_row_with_three_calls():
    (row,) = rows_of(joma.explain(Shared(), torch.randn(2, 5, 16)))
    assert row.calls == 3


def test_heads_agree_with_a_watch_whose_own_table_is_the_same():
    model = HandWrittenGPT(heads=4)
    before = joma.explain(model, tokens())
    with joma.watch(model, every=1, gauges="entropy", live=False) as w:
        assert not rows_of(w.explain())
        assert w.explain().notes == ("No attention was measured yet.",)
        model(tokens()).sum().backward()
        w.step()
        during = w.explain()
        values = w.latest.values["entropy"]
    assert [row.heads for row in rows_of(during)] == [values.shape[1]] * len(values)
    for early, late in zip(before.rows, during.rows, strict=True):
        assert {**vars(early), "error": None} == {**vars(late), "error": None}


def test_padded_queries_agree_with_the_number_that_a_watch_averages_over():
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
    )
    model = transformers.BertModel(config)
    mask = torch.ones(3, LENGTH, dtype=torch.long)
    mask[0, -3:] = 0
    batch = {"input_ids": tokens(), "attention_mask": mask}
    (row,) = rows_of(joma.explain(model, batch))
    with joma.watch(model, every=1, gauges="entropy", live=False) as w:
        model(**batch).last_hidden_state.sum().backward()
        ((_, sums),) = tally_of(w).combined.items()
        assert sums.of_gauge("entropy").parts["count"].tolist() == [
            [row.queries - row.padded] * row.heads
        ]
        w.step()
        (during,) = rows_of(w.explain())
    assert (during.queries, during.padded) == (row.queries, row.padded) == (42, 3)


def test_one_head_modules_have_a_row_each():
    rows = rows_of(joma.explain(nn.Sequential(ManyHeads(16, 4)), torch.randn(2, 5, 16)))
    assert [row.module for row in rows] == [f"0.heads.{n}" for n in range(4)]
    assert [row.heads for row in rows] == [1] * 4


@pytest.mark.parametrize("training", [True, False])
def test_explaining_leaves_training_as_it_was(training):
    def run(is_explained):
        torch.manual_seed(0)
        model = nn.Sequential(HandWrittenGPT(dropout=0.3), nn.BatchNorm1d(LENGTH)).train(training)
        optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            optimiser.zero_grad()
            model(tokens()).square().mean().backward()
            if is_explained:
                joma.explain(model, tokens(2))
            optimiser.step()
        assert model.training is training
        return [*model.state_dict().values(), torch.rand(3)]

    for a, b in zip(run(False), run(True), strict=True):
        assert torch.equal(a, b)


def test_explaining_a_watched_model_is_no_measurement():
    model = HandWrittenGPT()
    with joma.watch(model, every=1, gauges="entropy", live=False) as w:
        model(tokens()).sum().backward()
        joma.explain(model, tokens(1))
        ((_, first), *_) = tally_of(w).combined.items()
        assert first.of_gauge("entropy").parts["count"].tolist() == [[42, 42]]


def test_a_run_folder_keeps_the_explanation_and_its_page_shows_it(tmp_path):
    model = HandWrittenGPT()
    with joma.watch(model, tmp_path / "run", every=1, live=False) as w:
        for _ in range(2):
            model(tokens()).sum().backward()
            w.step(1.0)
        expected = w.explain()
    stored = read_explanation(tmp_path / "run")
    assert [row.module for row in stored.rows] == [row.module for row in expected.rows]
    assert [row.heads for row in stored.rows] == [row.heads for row in expected.rows]
    text = joma.report(tmp_path / "run", tmp_path / "page.html").read_text(encoding="utf-8")
    assert "<summary>What joma saw of the model</summary>" in text
    assert "found in the projection&#39;s output" in text


def test_the_refusal_of_a_watch_is_in_its_run_folder(tmp_path):
    model = Talking()
    with joma.watch(model, tmp_path / "run", every=1, gauges="entropy", live=False) as w:
        model(style_states(2)).sum().backward()
        with pytest.warns(joma.JomaWarning, match="no-product"):
            w.step(1.0)
    (row,) = read_explanation(tmp_path / "run").rows
    assert (row.status, row.code) == ("refused", "no-product")


def test_a_module_in_which_nothing_was_seen_stays_in_the_table_of_a_watch():
    class LinearAttention(nn.Module):
        def __init__(self):
            super().__init__()
            self.mix = nn.Linear(16, 16)

        def forward(self, x):
            return self.mix(x.cumsum(dim=1))

    class Both(HandWrittenGPT):
        def __init__(self):
            super().__init__(layers=1)
            self.recurrence_attention = LinearAttention()

        def forward(self, ids):
            return self.head(self.blocks[0](self.recurrence_attention(self.embed(ids))))

    model = Both()
    early = {row.module: row.code for row in rows_of(joma.explain(model, tokens()))}
    assert early == {"blocks.0.attn": "", "recurrence_attention": "unseen"}
    with joma.watch(model, every=1, gauges="entropy", live=False) as w:
        model(tokens()).sum().backward()
        with pytest.warns(joma.JomaWarning, match="unseen"):
            w.step()
        assert {row.module: row.code for row in rows_of(w.explain())} == early


def test_the_printed_table_fits_into_100_columns_and_groups_equal_layers():
    model = HandWrittenGPT(layers=12)
    text = str(joma.explain(model, tokens()))
    assert max(map(len, text.splitlines())) <= 100
    assert len(text.splitlines()) < 30
    for word in (
        "12 attentions, 12 MLPs",
        "blocks.0–11.attn",
        "12 × HandWrittenAttention",
        "sdpa",
        "blocks.0–11.mlp",
        "0 → 2",
    ):
        assert word in text
    refused = str(joma.explain(Talking(), style_states(2)))
    assert "1 attention refused" in refused
    assert "[no-product]" in refused


def test_the_frame_has_one_column_per_fact_and_html_escapes():
    explanation = joma.explain(HandWrittenGPT(), tokens())
    frame = explanation.frame()
    assert len(frame) == 4
    assert frame.loc[frame.kind == "attention", "heads"].tolist() == [2, 2]
    assert frame.loc[frame.kind == "MLP", "heads"].isna().all()
    assert math.isfinite(frame.loc[frame.kind == "attention", "error"].max())
    assert "<td>blocks.0.attn</td>" in explanation._repr_html_()
    assert Explanation.from_json(json.loads(json.dumps(explanation.to_json()))) == explanation
    assert list(Explanation("Empty", ()).frame().columns) == list(frame.columns)


def test_a_model_without_attention_is_told_in_a_note():
    explanation = joma.explain(
        nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)), torch.randn(2, 4)
    )
    assert not rows_of(explanation)
    assert "no attention was seen" in explanation.notes[0]


def test_matrices_that_cannot_be_found_leave_attention_in_the_table(monkeypatch):
    def fails(*_):
        raise RuntimeError("no weights")

    monkeypatch.setattr("joma._measure.watch.explain.find", fails)
    with joma.watch(HandWrittenGPT(), every=1, gauges="entropy", live=False) as w:
        w.model(tokens()).sum().backward()
        w.step()
        explanation = w.explain()
        assert w.problems == []
    assert [row.heads for row in explanation.rows] == [2, 2]
    assert "no weights" in explanation.notes[0]


class Packed(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(16, 48)

    def forward(self, x, documents):
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        same = documents[:, None, :, None] == documents[:, None, None]
        return functional.scaled_dot_product_attention(q, k, v, same)


def test_a_mask_of_documents_hides_pairs():
    documents = torch.tensor([[0, 0, 0, 1, 1, 1]])
    (row,) = rows_of(joma.explain(Packed(), [torch.randn(1, 6, 16), documents]))
    assert (row.mask, row.hides, row.padded) == ("boolean", "50% of pairs of query and key", 0)


def test_new_shapes_are_new_facts():
    model = HandWrittenGPT(layers=1)
    with joma.watch(model, every=1, gauges="entropy", live=False) as w:
        for length in (14, 14, 14, 9):
            model(tokens(length=length)).sum().backward()
            w.step()
        (row,) = rows_of(w.explain())
    assert row.queries == 27
    assert row.axes == "samples 3, heads 2, queries 9, keys 9"


def test_bad_input_is_one_sentence():
    model = HandWrittenGPT()
    with pytest.raises(TypeError, match=r"^joma.explain takes a torch.nn.Module, not int$"):
        joma.explain(3, tokens())
    with pytest.raises(
        TypeError, match="batch must be a mapping, a sequence of arguments or a tensor, not int"
    ):
        joma.explain(model, 3)
    with pytest.raises(
        ValueError, match=r"the pass of the batch failed with TypeError: .*forward\(tokens\)"
    ):
        joma.explain(model, {"ids": tokens()})
    with pytest.raises(ValueError, match=r"batch: its ids are .* a vocabulary of 61"):
        joma.explain(model, tokens() + 100)
    with pytest.raises(ValueError, match="heads= names 'nowhere'"):
        joma.explain(model, tokens(), heads={"nowhere": 2})


def test_a_weight_that_is_not_finite_is_named_and_nothing_behind_it_is_verified():
    model = HandWrittenGPT(layers=3)
    with torch.no_grad():
        model.blocks[1].mlp[0].weight[0, 0] = math.nan
    explanation = joma.explain(model, tokens())
    (note,) = explanation.notes
    assert note.startswith("The pass is not finite: the weight blocks.1.mlp.0.weight holds nan.")
    first, second, third = rows_of(explanation)
    assert first.check == second.check == "output against softmax(s)·V"
    assert (third.check, third.error) == ("", None)
    text = str(explanation)
    assert "blocks.0–1.attn" in text
    assert "not verified" in text


def test_long_names_break_behind_dots():
    class Deep(nn.Module):
        def __init__(self):
            super().__init__()
            self.transformer_encoder = nn.ModuleDict({"attention_of_the_first": Grouped()})

        def forward(self, x):
            return self.transformer_encoder["attention_of_the_first"](x)

    lines = str(joma.explain(Deep(), torch.randn(2, 5, 24))).splitlines()
    assert any(line.startswith(" transformer_encoder. ") for line in lines)
    assert any(line.startswith(" attention_of_the_first ") for line in lines)


def test_attention_that_is_refused_is_not_called_missing():
    class ByHand(nn.Module):
        """A softmax that is written out: its weights are refused."""

        def forward(self, x):
            weights = (x @ x.mT).exp()  # (B, T, T)
            return weights / weights.sum(dim=-1, keepdim=True) @ x

    explanation = joma.explain(ByHand(), torch.randn(2, 5, 8))
    (row,) = rows_of(explanation)
    assert (row.status, row.code) == ("refused", "no-softmax")
    assert explanation.notes == ()
