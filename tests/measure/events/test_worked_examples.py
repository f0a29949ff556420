"""The worked examples that stand above the rules for axes, padding and the guard are true."""

from __future__ import annotations

import pytest
import torch

from joma._measure.events.axes.features import ROW_FEATURES
from joma._measure.events.axes.layout import Axis, Layout
from joma._measure.events.axes.sizes import axes_by_sizes, axes_by_user
from joma._measure.events.axes.slices import axis_of_slices, slices_of
from joma._measure.events.guard.weights import WeightsOrder, compare_weights
from joma._measure.events.padding.arguments import readings_of
from joma._measure.events.padding.patterns import (
    KeyPattern,
    chooses_equally_many,
    depends_on_distance,
    document_numbers,
    is_one_stretch,
    reads_one_way,
    rescued_rows,
)
from joma._measure.events.padding.token_states import (
    DOUBTFUL,
    PADDING,
    REAL,
    UNKNOWN,
    PatternMemory,
    states_of_pattern,
)
from joma._measure.events.products import EinsumProduct, MatrixProduct, read_product


def drawn(*drawings: str) -> torch.Tensor:
    """Return the pattern (samples, T, T) of drawings with an x for a key that is seen."""
    samples = []
    for drawing in drawings:
        lines = [line.split() for line in drawing.strip().splitlines()]
        samples.append([[mark == "x" for mark in marks] for marks in lines])
    return torch.tensor(samples)


# Axes


@pytest.mark.parametrize(
    ("slices", "axis"),
    [
        ([0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3], Axis(12, 4, has_heads_first=False)),
        ([0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3], Axis(12, 4, has_heads_first=True)),
        ([2, 2, 2, 2], Axis(4, 1)),
        ([0, 1, 2, 3], Axis(4, 4)),
        ([0, -1, 2, 3, 0, 1, -1, 3], Axis(8, 4)),  # two rows of padding
        ([0, -1], None),  # one row alone fits samples and heads
        ([0, 1, 1, 0], None),
    ],
)
def test_slices_along_an_axis_show_its_meaning(slices, axis):
    assert axis_of_slices(torch.tensor(slices)) == axis


def test_channels_are_cut_into_slices_in_two_ways():
    consecutive, strided = slices_of(torch.arange(6)[None], 2)
    assert consecutive[0].tolist() == [[0, 1], [2, 3], [4, 5]]
    assert strided[0].tolist() == [[0, 3], [1, 4], [2, 5]]


@pytest.mark.parametrize("number", range(3))
def test_rotary_positions_keep_a_feature_of_each_row(number):
    """The direction does not survive a rotation, the energy of the pairs that it turns does."""
    generator = torch.Generator().manual_seed(number)
    rows = torch.randn(5, 8, generator=generator)
    angles = 2 * torch.pi * torch.rand(5, 4, generator=generator)
    first, second = rows[:, :4], rows[:, 4:]
    turned = torch.cat(
        [
            first * angles.cos() - second * angles.sin(),
            first * angles.sin() + second * angles.cos(),
        ],
        dim=1,
    )
    direction, half_pairs, neighbour_pairs, _, _ = ROW_FEATURES
    assert torch.allclose(half_pairs(turned), half_pairs(rows), atol=1e-5)
    assert not torch.allclose(direction(turned), direction(rows), atol=1e-2)
    # the same rotation of neighbours: interleave the two halves
    interleaved = rows.unflatten(1, (2, 4)).mT.flatten(1)
    turned_neighbours = turned.unflatten(1, (2, 4)).mT.flatten(1)
    assert torch.allclose(
        neighbour_pairs(turned_neighbours), neighbour_pairs(interleaved), atol=1e-5
    )


def test_energies_of_pairs_by_hand():
    _, half_pairs, neighbour_pairs, _, _ = ROW_FEATURES
    assert half_pairs.of(torch.tensor([3.0, 1, 4, 2])).tolist() == [25, 5]
    assert neighbour_pairs.of(torch.tensor([3.0, 4, 1, 2])).tolist() == [25, 5]


@pytest.mark.parametrize(
    ("sizes", "heads", "samples", "axes"),
    [
        ((4, 3), 4, None, (Axis(4, 4), Axis(3, 1))),
        ((4, 4), 4, None, None),
        ((4, 3), "heads batch", None, (Axis(4, 4), Axis(3, 1))),
        ((4, 3), "batch heads", None, (Axis(4, 1), Axis(3, 3))),
        ((12,), "heads batch", 3, (Axis(12, 4, has_heads_first=True),)),
    ],
)
def test_the_user_decides_about_axes(sizes, heads, samples, axes):
    assert axes_by_user(sizes, heads, samples) == axes


@pytest.mark.parametrize(
    ("sizes", "samples", "widths", "options", "axes"),
    [
        ((1, 1), 1, None, {}, (Axis(1, 1), Axis(1, 1))),
        ((3, 4), 3, None, {"shared_axis": 1}, (Axis(3, 1), Axis(4, 4))),
        ((3, 4), None, None, {}, (Axis(3, 1), Axis(4, 4))),
        ((3,), 3, (3,), {}, None),
        ((9, 3), 3, (3,), {"is_windowed": True}, None),
        ((9, 3), 3, (18,), {"is_windowed": True}, (Axis(9, 9), Axis(3, 1))),
        ((3, 4, 5), 3, (4,), {}, (Axis(3, 1), Axis(4, 4), Axis(5, 1))),
    ],
)
def test_sizes_that_leave_one_reading(sizes, samples, widths, options, axes):
    assert axes_by_sizes(sizes, samples, widths, **options) == axes


def test_a_layout_with_heads_outside():
    scores = torch.arange(12 * 14 * 14).view(12, 14, 14)
    arranged = Layout((Axis(12, 4, has_heads_first=True),), 1)(scores)
    assert arranged.shape == (3, 4, 14, 14)
    assert torch.equal(arranged[2, 1], scores[1 * 3 + 2])


def test_a_layout_carries_over_to_other_sizes():
    layout = Layout((Axis(2, 1), Axis(4, 4)), 2)
    resized = layout.resized((6, 4, 20))
    assert resized is not None
    assert resized.axes == (Axis(6, 1), Axis(4, 4))
    assert layout.resized((2, 8, 14)) is None


# Products


def test_a_product_by_einsum_names_its_axes():
    query = torch.randn(2, 5, 3, 4)  # (b, t, h, d)
    key = torch.randn(2, 7, 3, 4)
    scores = torch.einsum("bthd,bshd->bhts", query, key)
    product = read_product(torch.einsum, scores, ("bthd,bshd->bhts", query, key))
    assert isinstance(product, EinsumProduct)
    assert product.summed_size == 4
    assert product.outer_sizes == (5, 7)
    assert torch.equal(product.queries(scores.shape, -1), query.transpose(1, 2))
    assert torch.equal(product.keys(scores.shape, -1, 2), key.transpose(1, 2))


def test_hidden_axes_of_an_equation_correspond_from_the_right():
    first, second = torch.randn(2, 3, 4, 5), torch.randn(2, 4, 5, 6)
    output = torch.einsum("b...d,bkd...->b...k", first[:, 0], second.permute(0, 3, 2, 1))
    product = read_product(
        torch.einsum, output, ("b...d,bkd...->b...k", first[:, 0], second.permute(0, 3, 2, 1))
    )
    assert isinstance(product, EinsumProduct)
    assert product.labels == ("b①d", "bkd①")
    assert product.output_labels == "b①k"


def test_a_parameter_gives_its_axes_to_one_last_axis():
    states, weight = torch.randn(5, 2, 4), torch.randn(4, 3, 6)
    output = torch.einsum("tbd,dhk->tbhk", states, weight)
    product = read_product(torch.einsum, output, ("tbd,dhk->tbhk", states, weight))
    assert product is not None
    assert product.projected(1).shape == (5, 2, 18)


def test_weights_may_stand_on_either_side_of_a_product():
    weights, values = torch.randn(2, 3, 14, 14), torch.randn(2, 3, 14, 8)
    product = read_product(torch.matmul, values.mT @ weights.mT, (values.mT, weights.mT))
    assert isinstance(product, MatrixProduct)
    _, right = product.weights_candidates()
    assert torch.equal(right.weights, weights)
    assert torch.equal(right.values, values)


# Padding


@pytest.mark.parametrize(
    ("drawing", "states"),
    [
        ("x x x .\n x x x .\n x x x .\n x x x .", [REAL, REAL, REAL, PADDING]),
        ("x x x .\n x x x .\n x x x .\n . . . .", [REAL, REAL, REAL, PADDING]),
        ("x x x x\n . x . .\n . x x .\n . x x x", [PADDING, REAL, REAL, REAL]),
        (". . . .\n x . . .\n x x . .\n x x x .", [REAL, REAL, REAL, UNKNOWN]),
        ("x x . .\n x . x .\n . x x .\n x . x .", [REAL, REAL, REAL, UNKNOWN]),
    ],
    ids=["keys masked", "both masked", "rescued rows", "strictly causal", "top-2"],
)
def test_states_of_tokens_by_their_pattern(drawing, states):
    assert states_of_pattern(drawn(drawing)).tolist() == [states]


def test_strictly_causal_samples_of_different_lengths():
    sees = drawn(
        ". . . . .\n x . . . .\n x x . . .\n x x x . .\n x x x x .",
        ". . . . .\n x . . . .\n x x . . .\n x x x . .\n x x x . .",
    )
    assert states_of_pattern(sees).tolist() == [
        [REAL, REAL, REAL, REAL, UNKNOWN],
        [REAL, REAL, REAL, PADDING, PADDING],
    ]


@pytest.mark.parametrize(
    ("drawing", "token", "state"),
    [
        ("x . . . .\n . x . . .\n . . x . .\n . . x x .\n . . x x x", 0, DOUBTFUL),
        ("x . . . .\n . x . . .\n . . x . .\n . . x x .\n . . x x x", 1, DOUBTFUL),
        ("x . . .\n . x . .\n x . x .\n x . x x", 1, PADDING),
        ("x x . . .\n x x . . .\n . . x x .\n . . x x .\n . . . . x", 4, UNKNOWN),
        ("x . . . .\n x x . . .\n x x x . .\n x x x x .\n x x x . x", 3, DOUBTFUL),
        ("x . . . .\n x x . . .\n x x x . .\n x x x x .\n x x x . x", 4, DOUBTFUL),
    ],
)
def test_states_of_tokens_that_nobody_else_sees(drawing, token, state):
    assert int(states_of_pattern(drawn(drawing))[0, token]) == state


def test_properties_of_patterns():
    rescued = drawn("x x x x\n . x . .\n . x x .\n . x x x")
    assert rescued_rows(KeyPattern(rescued)).tolist() == [[True, False, False, False]]
    regular = drawn("x . . .\n x x . .\n x x . .\n x x . x")
    assert depends_on_distance(regular, regular.any(dim=1)).tolist() == [True]
    stretches = torch.tensor([[False, True, True, True, False], [True, True, False, True, True]])
    assert is_one_stretch(stretches).tolist() == [True, False]
    largest = drawn(
        "x . x .\n x x . .\n . x x .\n x . x .", "x . . .\n x x . .\n . x x .\n x . x ."
    )
    assert chooses_equally_many(KeyPattern(largest)).tolist() == [True, True]
    reading = drawn("x . . . .\n x x . . .\n x x x . .\n x x x x .\n x x x . x")
    assert reads_one_way(KeyPattern(reading)).tolist() == [[False, False, False, True, True]]
    packed = drawn("x x . . .\n x x . . .\n . . x x .\n . . x x .\n . . . . x")
    assert document_numbers(KeyPattern(packed)).tolist() == [[1, 1, 2, 2, 3]]


def test_a_pattern_is_worked_out_once_and_the_oldest_is_forgotten():
    memory = PatternMemory()
    patterns = []
    for tokens in range(2, 3 + PatternMemory.MOST_PATTERNS):
        patterns.append(torch.ones(1, tokens, tokens, dtype=torch.bool).tril())
    states = [memory.states_of(pattern) for pattern in patterns]
    assert memory.states_of(patterns[-1].clone()) is states[-1]
    assert memory.states_of(patterns[0]) is not states[0]
    for pattern, expected in zip(patterns, states, strict=True):
        assert torch.equal(states_of_pattern(pattern), expected)


@pytest.mark.parametrize(
    ("rows", "true_is_padding", "likeliest"),
    [
        ([1, 1, 1, 0], False, [True, True, True, False]),
        ([False, False, False, True], True, [True, True, True, False]),
        ([0.0, 0.0, 0.0, -1e4], False, [True, True, True, False]),
        ([0.0, 0.0, 0.0, -1e4], True, [True, True, True, False]),
    ],
)
def test_the_likeliest_reading_of_a_mask(rows, true_is_padding, likeliest):
    readings = readings_of(torch.tensor([rows]), true_is_padding)
    assert readings[0].is_real.tolist() == [likeliest]


# The guard


@pytest.mark.parametrize(
    ("weights", "error"),
    [
        ([0.5, 0.3, 0.2], 0.0),
        ([0.625, 0.0, 0.25], 0.0),  # dropout at rate 0.2
        ([0.5, 0.0, 0.2], None),  # a mask after the softmax
        ([0.3, 0.5, 0.2], None),
    ],
)
def test_weights_are_the_softmax_perhaps_after_dropout(weights, error):
    scores = torch.tensor([[0.5, 0.3, 0.2]]).log()
    comparison = compare_weights(scores, torch.tensor([weights]), WeightsOrder((0,), None))
    if error is None:
        assert comparison is None
    else:
        assert comparison is not None
        assert comparison.error == pytest.approx(error, abs=1e-6)
