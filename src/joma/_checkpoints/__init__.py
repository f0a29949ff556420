"""Gauges over a series of checkpoints: which ones, what to read of them, and the scan itself."""
