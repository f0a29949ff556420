"""Vision Transformers of vit-pytorch."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.families import torchvision_operators
from benchmarks.families.measure import Case, Row, measure

torchvision_operators.define()

PLAIN = {
    "image_size": 32,
    "patch_size": 8,
    "num_classes": 5,
    "dim": 32,
    "depth": 2,
    "heads": 4,
    "mlp_dim": 40,
}
IMAGE = (2, 3, 32, 32)
MODELS: dict[str, tuple[str, dict[str, Any], tuple[int, ...]]] = {
    "ViT": ("vit", {**PLAIN, "dim_head": 8}, IMAGE),
    "SimpleViT": ("simple_vit", {**PLAIN, "dim_head": 8}, IMAGE),
    "SimpleViT ": ("simple_vit_with_register_tokens", {**PLAIN, "dim_head": 8}, IMAGE),
    "SimpleViT  ": ("simple_vit_with_qk_norm", {**PLAIN, "dim_head": 8}, IMAGE),
    "ViT ": ("vit_with_patch_dropout", {**PLAIN, "dim_head": 8}, IMAGE),
    "ViT   ": ("parallel_vit", {**PLAIN, "dim_head": 8}, IMAGE),
    "ViT    ": ("vit_for_small_dataset", {**PLAIN, "dim_head": 8}, IMAGE),
    "DeepViT": ("deepvit", {**PLAIN, "dim_head": 8}, IMAGE),
    "CaiT": ("cait", {**PLAIN, "dim_head": 8, "cls_depth": 2}, IMAGE),
    "CvT": ("cvt", {"num_classes": 5, "s1_emb_dim": 16, "s2_emb_dim": 16, "s3_emb_dim": 16, "s2_heads": 2,
                    "s3_heads": 2, "s3_depth": 2}, (2, 3, 64, 64)),
    "CrossViT": ("cross_vit", {"image_size": 32, "num_classes": 5, "depth": 1, "sm_dim": 32, "lg_dim": 32,
                               "sm_patch_size": 8, "lg_patch_size": 16, "sm_enc_heads": 4, "sm_enc_dim_head": 8,
                               "lg_enc_heads": 4, "lg_enc_dim_head": 8, "cross_attn_heads": 4,
                               "cross_attn_dim_head": 8}, IMAGE),
    "PiT": ("pit", {**PLAIN, "depth": (2, 2), "dim_head": 8}, IMAGE),
    "LeViT": ("levit", {"image_size": 64, "num_classes": 5, "dim": (32, 48, 64), "depth": 2, "heads": (2, 3, 4),
                        "mlp_mult": 2}, (2, 3, 64, 64)),
    "NesT": ("nest", {"image_size": 64, "patch_size": 4, "dim": 32, "heads": 3, "num_hierarchies": 3,
                      "block_repeats": (1, 1, 2), "num_classes": 5}, (2, 3, 64, 64)),
    "MobileViT": ("mobile_vit", {"image_size": (64, 64), "dims": [16, 16, 16], "channels":
                                 [16, 16, 24, 24, 48, 48, 64, 64, 80, 80, 96], "num_classes": 5}, (2, 3, 64, 64)),
    "TwinsSVT": ("twins_svt", {"num_classes": 5}, (2, 3, 224, 224)),
    "RegionViT": ("regionvit", {"dim": (16, 32, 32, 32), "depth": (1, 1, 1, 1), "window_size": 7, "num_classes": 5},
                  (2, 3, 224, 224)),
    "CrossFormer": ("crossformer", {"dim": (16, 32, 32, 32), "depth": (1, 1, 1, 1), "num_classes": 5},
                    (2, 3, 224, 224)),
    "ScalableViT": ("scalable_vit", {"num_classes": 5, "dim": 16, "heads": (2, 2, 2, 2), "depth": (1, 1, 1, 1),
                                     "ssa_dim_key": (8, 8, 8, 8), "reduction_factor": (8, 4, 2, 1),
                                     "window_size": (64, 32, None, None)}, (2, 3, 256, 256)),
    "SepViT": ("sep_vit", {"num_classes": 5, "dim": 16, "dim_head": 8, "heads": (1, 2, 2, 2), "depth": (1, 1, 1, 1),
                           "window_size": 7}, (2, 3, 224, 224)),
    "MaxViT": ("max_vit", {"num_classes": 5, "dim": 16, "depth": (1, 1), "dim_head": 8, "window_size": 7},
               (2, 3, 112, 112)),
    "NaViT": ("na_vit_nested_tensor", {**PLAIN, "dim_head": 8}, IMAGE),
    "XCiT": ("xcit", {**PLAIN, "cls_depth": 1, "dim_head": 8}, IMAGE),
    "T2TViT": ("t2t", {"dim": 32, "image_size": 64, "depth": 2, "heads": 4, "mlp_dim": 40, "num_classes": 5},
               (1, 3, 64, 64)),
}  # fmt: skip
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def models() -> list[str]:
    """Return the keys of the models."""
    return list(MODELS)


def rows(name: str) -> Iterator[Row]:
    """Measure a model in both types."""
    module, settings, shape = MODELS[name]
    title = f"{name.strip()} ({module})"
    for dtype in DTYPES:
        variant = f"eager, {dtype}, none"
        arguments = (name, module, settings, shape, dtype)
        yield measure("vit-pytorch", title, variant, lambda v=arguments: _case(*v))


def _case(
    name: str, module: str, settings: dict[str, Any], shape: tuple[int, ...], dtype: str
) -> Case:
    kind = getattr(importlib.import_module(f"vit_pytorch.{module}"), name.strip())
    torch.manual_seed(0)
    model = kind(**settings)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "to_q" in key and parameter.dim() >= 2:
                parameter.mul_(4)
    model = model.to(DTYPES[dtype]).eval()
    images = torch.randn(*shape, generator=torch.Generator().manual_seed(1)).to(DTYPES[dtype])
    return Case(
        model, lambda m: m(images), None, {}, None, frozenset(range(1, 4097)), DTYPES[dtype]
    )
