"""Reducers against brute force: means, maxima, samples of queries, and their combination."""

from __future__ import annotations

import math
from itertools import combinations

import pytest
import torch

from joma._measure.watch.reducers import Max, Mean, QuerySample, Reducer, SampledMean

INF = math.inf
NAN = math.nan


def random_values(seed, batch=3, heads=2, queries=5):
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(batch, heads, queries, generator=generator)
    is_counted = torch.rand(batch, heads, queries, generator=generator) < 0.7
    return values, is_counted


def reduced(kind, *calls):
    reducer = kind()
    for values, is_counted in calls:
        reducer.add(values, is_counted)
    return reducer


def numbers_of(values, is_counted, head):
    return values[:, head][is_counted[:, head]].double().tolist()


@pytest.mark.parametrize("kind", [Mean, SampledMean])
def test_a_mean_counts_every_real_query_once(kind):
    calls = [random_values(seed, batch=seed + 1) for seed in range(3)]
    result = reduced(kind, *calls).result()
    for head in range(2):
        numbers = [number for call in calls for number in numbers_of(*call, head)]
        assert float(result.numbers[head]) == pytest.approx(sum(numbers) / len(numbers), rel=1e-12)
    assert result.measured.all()


def test_a_maximum_is_over_every_real_query():
    calls = [random_values(seed) for seed in range(3)]
    result = reduced(Max, *calls).result()
    for head in range(2):
        assert float(result.numbers[head]) == max(
            number for call in calls for number in numbers_of(*call, head)
        )


def test_values_of_keys_are_reduced_over_samples():
    values, is_counted = random_values(0)
    values = values[..., 0]  # (B, H)
    is_counted = is_counted[..., 0]
    mean = reduced(Mean, (values, is_counted)).result()
    largest = reduced(Max, (values, is_counted)).result()
    for head in range(2):
        numbers = numbers_of(values, is_counted, head)
        assert float(mean.numbers[head]) == pytest.approx(sum(numbers) / len(numbers), rel=1e-12)
        assert float(largest.numbers[head]) == max(numbers)


@pytest.mark.parametrize("kind", [Mean, Max, SampledMean])
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_padding_is_left_out_whatever_it_holds(kind, bad):
    values, is_counted = random_values(1)
    clean = reduced(kind, (values, is_counted)).result()
    spoilt = reduced(kind, (torch.where(is_counted, values, bad), is_counted)).result()
    assert torch.equal(clean.numbers, spoilt.numbers)


@pytest.mark.parametrize("kind", [Mean, Max, SampledMean])
def test_a_number_that_was_computed_and_is_not_finite_stays(kind):
    values = torch.tensor([[[1.0, NAN]], [[2.0, 3.0]]])  # (2, 1, 2)
    result = reduced(kind, (values, torch.ones_like(values, dtype=torch.bool))).result()
    assert result.measured.all()
    assert result.numbers.isnan().all()
    # The order does not matter: NaN is not dropped by a later maximum.
    later = torch.full((1, 1, 1), 5.0)
    every = torch.ones(1, 1, 1, dtype=torch.bool)
    two_calls = [(values, torch.ones_like(values, dtype=torch.bool)), (later, every)]
    assert reduced(kind, *two_calls).result().numbers.isnan().all()
    assert reduced(kind, *two_calls[::-1]).result().numbers.isnan().all()


def test_a_maximum_of_infinities():
    is_counted = torch.tensor([[[True, True, False]]])
    largest = reduced(Max, (torch.tensor([[[1.0, INF, NAN]]]), is_counted)).result()
    assert largest.numbers.tolist() == [INF]
    # All queries of the head see no key, so that there is no largest value.
    nothing = reduced(Max, (torch.full((1, 1, 3), -INF), is_counted)).result()
    assert not nothing.measured.any()


@pytest.mark.parametrize("kind", [Mean, Max, SampledMean])
def test_heads_without_a_real_query_are_not_measured(kind):
    values, is_counted = random_values(2)
    is_counted[:, 1] = False
    result = reduced(kind, (values, is_counted)).result()
    assert result.measured.tolist() == [True, False]
    assert math.isnan(result.numbers[1])


@pytest.mark.parametrize("kind", [Mean, Max])
def test_a_batch_without_samples(kind):
    empty = torch.zeros(0, 2, 4)
    result = reduced(kind, (empty, empty.bool())).result()
    assert result.measured.tolist() == [False, False]


@pytest.mark.parametrize("kind", [Mean, Max, SampledMean])
def test_two_reducers_merged_are_one_of_all_calls(kind):
    calls = [random_values(seed) for seed in range(4)]
    first = reduced(kind, *calls[:2])
    second = reduced(kind, *calls[2:])
    before = {name: part.clone() for name, part in second.parts.items()}
    merged = first.copy()
    merged.merge(second)
    one_batch = reduced(
        kind,
        (torch.cat([call[0] for call in calls]), torch.cat([call[1] for call in calls])),
    )
    torch.testing.assert_close(merged.result().numbers, one_batch.result().numbers)
    # Neither of the two has changed.
    assert all(torch.equal(second.parts[name], part) for name, part in before.items())
    assert torch.equal(first.result().numbers, reduced(kind, *calls[:2]).result().numbers)


@pytest.mark.parametrize("kind", [Mean, Max, SampledMean])
def test_merging_into_an_empty_reducer_changes_no_bit(kind):
    reducer = reduced(kind, random_values(0))
    merged = kind()
    merged.merge(reducer)
    assert torch.equal(merged.result().numbers, reducer.result().numbers)


def test_numbers_of_passes():
    mean = Mean()
    largest = Max()
    for number in (1.0, 4.0, 1.0):
        mean.add_number(number)
        largest.add_number(number)
    assert mean.result().numbers.tolist() == [2.0]
    assert largest.result().numbers.tolist() == [4.0]
    largest.add_number(NAN)
    largest.add_number(7.0)
    assert largest.result().numbers.isnan().all()


@pytest.mark.parametrize("kind", [Mean, Max, SampledMean])
def test_a_table_has_the_heads_of_each_layer_and_gaps(kind):
    calls = [random_values(seed, heads=heads) for seed, heads in enumerate((1, 3))]
    table = kind.table(3, 3)
    for layer, call in zip((0, 2), calls, strict=True):
        table.put(layer, 0, reduced(kind, call))
    result = table.result()
    assert result.measured.tolist() == [[True, False, False], [False] * 3, [True] * 3]
    assert torch.equal(result.numbers[2], reduced(kind, calls[1]).result().numbers)


def sample_of(is_real, positions):
    return QuerySample(torch.tensor(positions), is_real)


def estimate(values, is_real, is_defined, positions):
    reducer = SampledMean()
    few = list(positions)
    is_counted = (is_real & is_defined)[..., few]
    reducer.add(values[..., few], is_counted, sample_of(is_real, few))
    return reducer


@pytest.mark.parametrize("has_padding", [False, True])
def test_a_sample_is_unbiased_over_all_samples_of_its_size(has_padding):
    """The mean over every possible sample is the exact mean, and so is the variance."""
    values, is_real = random_values(3, batch=2, queries=6)
    if not has_padding:
        is_real = torch.ones_like(is_real)
    is_real = is_real[:, :1].expand_as(values)  # padding is the same for all heads
    every = torch.ones_like(is_real)
    exact = reduced(Mean, (values, is_real)).result().numbers
    estimates = []
    variances = []
    for positions in combinations(range(6), 3):
        reducer = estimate(values, is_real, every, positions)
        estimates.append(reducer.result().numbers)
        variances.append(reducer.error().numbers.square())
    stacked = torch.stack(estimates)
    torch.testing.assert_close(stacked.mean(dim=0), exact, rtol=1e-10, atol=1e-12)
    # All samples were enumerated, so that the variance has no correction.
    torch.testing.assert_close(
        torch.stack(variances).mean(dim=0), stacked.var(dim=0, correction=0), rtol=1e-10, atol=1e-12
    )


def test_values_that_are_not_defined_everywhere_have_an_estimated_count():
    values, _ = random_values(4, batch=2, queries=6)
    is_real = torch.ones_like(values, dtype=torch.bool)
    is_defined = is_real.clone()
    is_defined[..., 0] = False
    totals = []
    counts = []
    for positions in combinations(range(6), 3):
        parts = estimate(values, is_real, is_defined, positions).parts
        totals.append(parts["total"])
        counts.append(parts["count"])
    exact = reduced(Mean, (values, is_defined)).parts
    torch.testing.assert_close(torch.stack(totals).mean(dim=0), exact["total"])
    torch.testing.assert_close(torch.stack(counts).mean(dim=0), exact["count"])


def test_only_samples_have_a_standard_error():
    call = random_values(5)
    assert reduced(Mean, call).error() is None
    assert reduced(Max, call).error() is None
    error = reduced(SampledMean, call).error()
    assert error is not None
    assert error.numbers.tolist() == [0.0, 0.0]


class TwoProcesses:
    """Combines with the parts of another process, as `Processes` does."""

    is_joint = True

    def __init__(self, other: Reducer):
        self.other = other

    def sum_(self, x):
        return x.add_(torch.stack(list(self.other.parts.values())))

    def max_(self, x):
        (largest,) = self.other.parts.values()
        # A maximum of the network may drop NaN.
        return x.copy_(torch.where(largest > x, largest, x))


@pytest.mark.parametrize("kind", [Mean, Max, SampledMean])
def test_processes_together_have_the_values_of_one(kind):
    calls = [random_values(seed) for seed in range(2)]
    tables = []
    for call in calls:
        table = kind.table(1, 2)
        table.put(0, 0, reduced(kind, call))
        tables.append(table)
    tables[0].combine(TwoProcesses(tables[1]))
    expected = reduced(kind, *calls).result().numbers
    torch.testing.assert_close(tables[0].result().numbers[0], expected)


def test_a_maximum_over_processes_never_hides_nan():
    table = Max.table(1, 1)
    bad = Max()
    bad.add_number(NAN)
    table.put(0, 0, bad)
    other = Max.table(1, 1)
    table.combine(TwoProcesses(other))
    assert table.result().numbers.tolist() == [[INF]]
