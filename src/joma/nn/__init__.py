"""Layers for PyTorch models: `JoMABlock`, a Transformer block whose attention can be folded into its MLP."""

from joma.nn.block import JoMABlock

__all__ = ["JoMABlock"]
