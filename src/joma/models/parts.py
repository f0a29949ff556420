"""Parts of a block that gauges can be asked for, as in "stable_rank.qk": matrices and charges."""

from __future__ import annotations

_WEIGHTS = {
    "mlp_in": "the lower MLP matrix: projection into the hidden neurons",
    "mlp_out": "the upper MLP matrix: projection out of the hidden neurons",
    "q": "query projection",
    "k": "key projection",
    "v": "value projection",
    "o": "output projection of attention",
}
_PRODUCTS = {
    "qk": "W_Q W_Kᵀ per head",
    "vo": "W_O W_V per head",
}
# Products of projections have one value per head.
PRODUCTS = tuple(_PRODUCTS)
# Ending of the parts that LoRA adds to a matrix, as in "stable_rank.q_update".
UPDATE = "_update"
_UPDATES = {f"{part}{UPDATE}": f"LoRA's update of it: {text}" for part, text in _WEIGHTS.items()}
# The first part is the default.
PARTS = _WEIGHTS | _PRODUCTS | _UPDATES
CHARGES = {
    "qk": "queries against keys, per head",
    "vo": "values against outputs, per head",
    "mlp": "what enters a neuron against what leaves it",
    "norm": "a normalisation's channels against all that read them",
    "stream": "all that is written to the residual stream",
}
