"""Charges: the conserved quantities of a Transformer's weights, found by structure, and their laws of motion."""
