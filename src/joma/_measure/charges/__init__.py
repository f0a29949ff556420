"""Charges: the conserved quantities of a Transformer's weights, and their laws of motion."""
