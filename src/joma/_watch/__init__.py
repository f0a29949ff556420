"""Watching a model in training: capture of attention calls, the watch itself, phases."""
