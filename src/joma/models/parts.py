"""Parts of a block: the names of its matrices."""

from __future__ import annotations

# parts of a block that weight gauges can be measured on, as in "stable_rank.qk"; the first by default
PARTS = {
    "mlp_in": "the lower MLP matrix: projection into the hidden neurons",
    "mlp_out": "the upper MLP matrix: projection out of the hidden neurons",
    "q": "query projection",
    "k": "key projection",
    "v": "value projection",
    "o": "output projection of attention",
    "qk": "W_Q W_Kᵀ per head",
    "vo": "W_O W_V per head",
}
PRODUCTS = ("qk", "vo")  # of projections: one value per head
UPDATE = "_update"  # as in "stable_rank.q_update": what LoRA adds to a matrix
PARTS |= {f"{part}{UPDATE}": f"LoRA's update of it: {what}" for part, what in PARTS.items() if part not in PRODUCTS}
