"""The structure of Transformers: `find` gives the embeddings, blocks, final norm and head of a model.

    structure = joma.models.find(model)
    structure.blocks[0].attention.heads     number of heads
    structure.blocks[0].mlp.upper.weight    the matrix out of the hidden neurons, as it acts now
    structure.matrices("qk")                W_Q W_Kᵀ of every head, as weight gauges measure it
    structure.missing                       what was not found, and why

Names are loaded on first use, since the command line reads `PARTS` and should not load torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from joma.models.blocks import Blocks
    from joma.models.matrices import LinearMap, Matrix
    from joma.models.mlps import MLPStructure
    from joma.models.norms import Normalisation
    from joma.models.parts import PARTS
    from joma.models.projections import AttentionStructure
    from joma.models.structure import BlockStructure, EmbeddingWeight, ModelStructure, find

_MODULE_OF = {
    "PARTS": "joma.models.parts",
    "AttentionStructure": "joma.models.projections",
    "BlockStructure": "joma.models.structure",
    "Blocks": "joma.models.blocks",
    "EmbeddingWeight": "joma.models.structure",
    "LinearMap": "joma.models.matrices",
    "MLPStructure": "joma.models.mlps",
    "Matrix": "joma.models.matrices",
    "ModelStructure": "joma.models.structure",
    "Normalisation": "joma.models.norms",
    "find": "joma.models.structure",
}

__all__ = [
    "PARTS",
    "AttentionStructure",
    "BlockStructure",
    "Blocks",
    "EmbeddingWeight",
    "LinearMap",
    "MLPStructure",
    "Matrix",
    "ModelStructure",
    "Normalisation",
    "find",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'joma.models' has no attribute {name!r}")
    value = getattr(importlib.import_module(_MODULE_OF[name]), name)
    globals()[name] = value
    return value
