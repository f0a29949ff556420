"""Meters: each measures some kinds of gauges, and the watch treats them alike."""

from joma._measure.watch.meters.attention import AttentionMeter
from joma._measure.watch.meters.changes import ChangeMeter
from joma._measure.watch.meters.charges import ChargeMeter
from joma._measure.watch.meters.meter import Meter, MeterProblem, MeterResult
from joma._measure.watch.meters.motions import MotionMeter
from joma._measure.watch.meters.read import ReadMeter
from joma._measure.watch.meters.streams import StreamMeter
from joma._measure.watch.meters.weights import WeightMeter

__all__ = [
    "AttentionMeter",
    "ChangeMeter",
    "ChargeMeter",
    "Meter",
    "MeterProblem",
    "MeterResult",
    "MotionMeter",
    "ReadMeter",
    "StreamMeter",
    "WeightMeter",
]
