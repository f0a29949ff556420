"""Gauges: pure functions of tensors, and the registry of their names."""
