"""Watching a model in training: gauges tied to a loop, phases, alarms."""
