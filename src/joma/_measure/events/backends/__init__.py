"""Backends: the ways in which models compute attention, one class each, in one table."""
