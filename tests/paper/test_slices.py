"""Slices notice changes of the training code, and need nothing that is not in joma."""

import functools
import math

import numpy as np
import pytest
import torch
from torch import nn

from joma._data.present import is_present
from joma._train import windows
from joma._train.model import LanguageModel
from joma._train.projection import Projection
from joma.nn import JoMABlock
from joma.paper.exhibits import _series, exhibits, get
from joma.paper.exhibits.base import FRESH_SEED
from joma.paper.exhibits.spot_check import TOLERANCE, compare, compute_slice
from joma.paper.labs import hierarchy, text_block
from joma.paper.labs.distinct import Distinct
from joma.paper.labs.hierarchy import HierarchyTransformer
from joma.paper.labs.text_block import Places, TextBlock
from joma.paper.records import Slice, all_records

# One exhibit for each training loop.
LOOPS = {
    "language model": "fig6",
    "block in NumPy": "realtext",
    "block in torch": "block",  # the loop of width, too
    "small hierarchy Transformer": "table1",
    "small GPT-NeoX": "fig7",
}


@functools.cache
def _slice_settings(exhibit_id):
    (exhibit,) = get([exhibit_id])
    return exhibit, Slice(dict(exhibit.experiment.code_slice), FRESH_SEED)


def compute(exhibit_id, folder, monkeypatch):
    """Return the table of a code slice. A series of checkpoints that is in the cache is not trained."""
    exhibit, short = _slice_settings(exhibit_id)
    monkeypatch.setenv("JOMA_CACHE", str(folder / "cache"))
    return compute_slice(exhibit, short, folder / exhibit_id).frame()


class WrongSign(Projection):
    def loss(self, *args):
        loss, gradient = super().loss(*args)
        return loss, -gradient


def scale_start(patch, model):
    """Let a model start with weights that are a tenth larger."""
    original = model.__init__

    def init(self, *args, **options):
        original(self, *args, **options)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.mul_(1.1)

    patch.setattr(model, "__init__", init)


def negate_cross_entropy(patch):
    original = nn.functional.cross_entropy
    patch.setattr(nn.functional, "cross_entropy", lambda *args, **options: -original(*args))


def shift_windows(patch, place):
    original = windows.window

    def window(streams, step, length, **options):
        tokens, targets = original(streams, step, length, **options)
        return tokens, np.roll(targets, 1, axis=1)

    patch.setattr(place, window)


def change_places(patch, change):
    """Change the text that the blocks learn from."""
    original = text_block.places

    def places(code, window):
        return change(original(code, window))

    for module in ("realtext", "block"):
        patch.setattr(f"joma.paper.exhibits.{module}.places", places)


def show_target(places):
    """Each query sees the word that it predicts."""
    context = places.context.copy()
    context[:, 0] = places.target
    return Places(places.query, context, places.target)


def shift_target(places):
    return Places(places.query, places.context, np.roll(places.target, 1))


def in_training_of_series(patch, plant):
    """Plant a change while checkpoints are made, and not while they are measured."""
    original = _series._train

    def train(*args):
        with pytest.MonkeyPatch.context() as inner:
            plant(inner)
            original(*args)

    patch.setattr(_series, "_train", train)


def unmasked_attention(patch):
    original = nn.functional.scaled_dot_product_attention

    def attention(query, key, value, **options):
        return original(query, key, value, scale=options.get("scale"))

    patch.setattr(nn.functional, "scaled_dot_product_attention", attention)


def larger_initial_range(patch):
    import transformers

    config = functools.partial(transformers.GPTNeoXConfig, initializer_range=0.022)
    patch.setattr(transformers, "GPTNeoXConfig", config)


def wrong_sign(loop, patch):
    if loop == "language model":
        patch.setattr("joma._train.step.Projection", WrongSign)
    elif loop == "block in NumPy":
        original = TextBlock.__init__

        def init(self, *args, lr, attention_lr):
            original(self, *args, lr=-lr, attention_lr=-attention_lr)

        patch.setattr(TextBlock, "__init__", init)
    elif loop == "block in torch":
        negate_cross_entropy(patch)
    elif loop == "small hierarchy Transformer":
        original_loss = hierarchy.distinct_loss
        patch.setattr(hierarchy, "distinct_loss", lambda *args: -original_loss(*args))
    else:
        in_training_of_series(patch, negate_cross_entropy)


def another_start(loop, patch):
    if loop == "language model":
        scale_start(patch, LanguageModel)
    elif loop == "block in NumPy":
        original = TextBlock.__init__

        def init(self, *args, **options):
            original(self, *args, **options)
            self.v *= 1.1

        patch.setattr(TextBlock, "__init__", init)
    elif loop == "block in torch":
        scale_start(patch, JoMABlock)
    elif loop == "small hierarchy Transformer":
        scale_start(patch, HierarchyTransformer)
    else:
        in_training_of_series(patch, larger_initial_range)


def wrong_mask(loop, patch):
    if loop == "language model":

        def encode(self, rows):
            length = rows.shape[1]
            x = self.dropout(rows * math.sqrt(rows.shape[2]) + self.positions[:length])
            # Each query sees the word that it predicts.
            return self.encoder(x, mask=self.mask[:length, :length].triu(2), is_causal=False)

        patch.setattr(LanguageModel, "encode", encode)
    elif loop in ("block in NumPy", "block in torch"):
        change_places(patch, show_target)
    elif loop == "small hierarchy Transformer":
        original = hierarchy.find_distinct

        def find_distinct(data):
            parts = dict(vars(original(data)))
            for name in ("node_bias", "word_bias"):
                parts[name] = torch.zeros_like(parts[name])
            return Distinct(**parts)

        patch.setattr(hierarchy, "find_distinct", find_distinct)
    else:
        in_training_of_series(patch, unmasked_attention)


def shifted_target(loop, patch):
    if loop == "language model":
        shift_windows(patch, "joma._train.language.window")
    elif loop in ("block in NumPy", "block in torch"):
        change_places(patch, shift_target)
    elif loop == "small hierarchy Transformer":
        original = hierarchy.distinct_logits
        patch.setattr(hierarchy, "distinct_logits", lambda *args: original(*args).roll(1, dims=0))
    else:
        in_training_of_series(
            patch, lambda inner: shift_windows(inner, "joma._train.windows.window")
        )


@pytest.fixture(scope="module")
def unchanged(tmp_path_factory):
    """Return the table of an exhibit's code slice, computed once."""

    @functools.cache
    def table(exhibit_id):
        with pytest.MonkeyPatch.context() as patch:
            return compute(exhibit_id, tmp_path_factory.mktemp(exhibit_id), patch)

    return table


@pytest.mark.filterwarnings(
    "ignore:.*encountered in:RuntimeWarning"
)  # uphill, a block may overflow
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("plant", [wrong_sign, another_start, wrong_mask, shifted_target])
def test_code_slices_notice_planted_changes(plant, loop, unchanged, tmp_path, monkeypatch):
    right = unchanged(LOOPS[loop])
    plant(loop, monkeypatch)
    wrong = compute(LOOPS[loop], tmp_path, monkeypatch)
    assert compare("code", wrong, right).difference > 5 * TOLERANCE


@pytest.mark.parametrize("exhibit_id", LOOPS.values())
def test_code_slices_give_the_same_numbers_again(exhibit_id, unchanged, tmp_path, monkeypatch):
    again = compute(exhibit_id, tmp_path, monkeypatch)
    check = compare("code", again, unchanged(exhibit_id))
    assert check.difference == 0.0
    assert check.count >= 16


def test_every_record_has_a_code_slice():
    for record in all_records():
        assert "code" in record.slices, record.exhibit


def test_code_slices_need_no_data_and_no_packaged_model():
    count = 0
    for exhibit in exhibits().values():
        settings = exhibit.experiment.code_slice
        if settings is None:
            continue
        count += 1
        sources = []
        for name in ("data", "text"):
            value = settings.get(name, [])
            sources += [value] if isinstance(value, str) else value
        assert set(sources) <= {"zipf"}, exhibit.id
        assert not is_present("smollm2") or settings.get("model") != "smollm2", exhibit.id
        assert "smollm2" not in settings.get("models", ())
    assert count >= 14


def test_record_slices_change_settings_of_the_recorded_run_or_stop_it():
    """A slice must keep what decides the numbers: data, sizes, rates."""
    decisive = {"data", "text", "vocabulary", "V", "K", "d", "width", "window", "batch", "length"}
    for exhibit in exhibits().values():
        changes = exhibit.experiment.record_slice
        if changes is not None:
            assert not decisive & changes.keys(), exhibit.id
