"""What a run folder keeps of a reading: small, and the same to the bit for every rule."""

import json
import math

import numpy as np
import pytest

from joma._measure.watch.alarms import Alarms
from joma._measure.watch.readings import LOW, RECOVERED, Finding, LayerReading, Reading
from joma._runs.encoding import encode, unspell
from joma._runs.long_table import LongTable


def random_layer(generator, heads, possible=2.6):
    spread = generator.uniform(0, 2 * RECOVERED, heads)
    sink = generator.uniform(0.5, 1.0, heads)
    spread[generator.random(heads) < 0.1] = math.nan
    sink[generator.random(heads) < 0.1] = math.nan
    logsumexp = np.float32(generator.uniform(3, 30, heads)).astype(float)
    return LayerReading(
        generator.uniform(0, 3), possible, spread.tolist(), sink.tolist(), logsumexp.tolist()
    )


def random_reading(generator, step, widths):
    gauges = {
        "stable_rank.head": [generator.uniform(1, 3, heads).tolist() for heads in widths],
        "gradient_norm": [[generator.uniform(0, 1)] for _ in widths],
    }
    if generator.random() < 0.3:
        gauges["max_logit"] = [generator.uniform(3, 30, heads).tolist() for heads in widths]
    layers = [random_layer(generator, heads) for heads in widths]
    return Reading(step, generator.uniform(2, 3), layers, gauges)


def kept(reading):
    return Reading.from_json(json.loads(json.dumps(reading.to_json())))


@pytest.mark.parametrize("widths", [[4, 4], [4, 2, 0, 1], [1], [32] * 3])
@pytest.mark.parametrize("seed", range(5))
def test_rules_come_to_the_same_state_and_alerts_by_what_is_kept(widths, seed):
    generator = np.random.default_rng(seed)
    live, replayed = Alarms(), Alarms()
    for step in range(40):
        reading = random_reading(generator, step, widths)
        alerts = live.update(reading, ["a", "b", "c", "d"])
        again = replayed.update(kept(reading), ["a", "b", "c", "d"])
        assert [alert.to_json() for alert in alerts] == [alert.to_json() for alert in again]
    assert json.dumps(live.state()) == json.dumps(replayed.state())


@pytest.mark.parametrize(
    "values", [[1.5, math.nan], [math.inf, -math.inf], [0.1, 1e300], [1e-310, 2.0], [-0.0]]
)
def test_numbers_are_kept_to_the_bit(values):
    layer = LayerReading(values[0], 2.6, [LOW / 2] * len(values), [0.1] * len(values), values)
    finding = Finding("not finite", 0, None, "loss", math.nan, None, later=("x",))
    reading = Reading(7, None, [layer], {"gradient_norm": [[value] for value in values]}, [finding])
    again = kept(reading)
    assert np.array(again.layers[0].logsumexp).tobytes() == np.array(values).tobytes()
    assert np.array(again.layers[0].entropy).tobytes() == np.array(values[0]).tobytes()
    assert (
        np.array(again.gauges["gradient_norm"]).tobytes()
        == np.array([[value] for value in values]).tobytes()
    )
    assert (again.step, again.loss, again.findings[0].later) == (7, None, ("x",))


def test_a_reading_without_attention_is_kept():
    again = kept(Reading(1, 2.0, [], {}))
    assert list(again.layers) == []


def test_a_thousand_heads_take_less_than_eight_bytes_each():
    generator = np.random.default_rng(0)
    layers = []
    for _ in range(32):
        logsumexp = np.float32(generator.uniform(3, 30, 32)).astype(float).tolist()
        layers.append(LayerReading(generator.uniform(0, 3), 2.6, [0.9] * 32, [0.1] * 32, logsumexp))
    reading = Reading(
        1, 2.5, layers, {"stable_rank": [[generator.uniform(1, 50)] for _ in range(32)]}
    )
    assert len(json.dumps(reading.to_json())) < 8 * 1024


def test_tables_are_stored_as_the_shortest_decimals_of_float32():
    numbers = np.random.default_rng(0).uniform(-10, 10, 200).tolist()
    extremes = [math.nan, math.inf, -math.inf, 0.0, 1e-300, 1e300, 100.0, None]
    (text,) = encode(LongTable.per_layer("rank", [*numbers, *extremes]))
    stored = unspell(json.loads(text))
    assert np.array_equal(np.float32(stored[:200]), np.float32(numbers))
    assert max(len(repr(number)) for number in stored[:200]) <= 13
    assert math.isnan(stored[200])
    assert stored[201:] == extremes[1:]
