"""Vision Transformers of timm: the smallest model of each module that attends."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.families import torchvision_operators
from benchmarks.families.measure import Case, Row, measure

torchvision_operators.define()

import timm  # noqa: E402  (torchvision needs its operators first)
from timm.layers import set_fused_attn  # noqa: E402

SMALLEST = (
    "test_",
    "atto",
    "femto",
    "pico",
    "nano",
    "xxs",
    "xxt",
    "xx_small",
    "extra_small",
    "tiny",
    "_t",
    "_s",
    "small",
)
MODULES = (
    "vision_transformer", "vision_transformer_hybrid", "vision_transformer_relpos", "vision_transformer_sam", "deit",
    "beit", "eva", "cait", "swin_transformer", "swin_transformer_v2", "swin_transformer_v2_cr", "xcit", "volo", "nest",
    "levit", "pit", "twins", "tnt", "visformer", "crossvit", "coat", "convit", "maxxvit", "mvitv2", "pvt_v2",
    "edgenext", "efficientformer", "efficientformer_v2", "fastvit", "davit", "gcvit", "hiera", "hieradet_sam2",
    "naflexvit", "tiny_vit", "mobilevit", "metaformer", "byoanet", "vitamin", "nextvit", "shvit", "swiftformer",
    "repvit", "efficientvit_mit", "efficientvit_msra", "sequencer", "csatv2",
)  # fmt: skip
PER_MODULE = 2
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def models() -> list[str]:
    """Return the smallest models of each module."""
    names: list[str] = []
    for module in MODULES:
        names += sorted(timm.list_models(module=module), key=_rank)[:PER_MODULE]
    return names


def rows(name: str) -> Iterator[Row]:
    """Measure a model, fused and eager, in both types."""
    for dtype in DTYPES:
        for kernel in ("sdpa", "eager"):
            variant = f"{kernel}, {dtype}, none"
            arguments = (name, kernel, dtype)
            yield measure("timm", name, variant, lambda v=arguments: _case(*v))


def _rank(name: str) -> tuple[int, int, str]:
    sizes = [n for n, word in enumerate(SMALLEST) if word in name]
    return min(sizes, default=len(SMALLEST)), len(name), name


def _case(name: str, kernel: str, dtype: str) -> Case:
    set_fused_attn(kernel == "sdpa")
    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=5)
    if sum(parameter.numel() for parameter in model.parameters()) > 120_000_000:
        raise ValueError("too large")
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if any(word in key.lower() for word in ("attn", "qkv")) and parameter.dim() == 2:
                parameter.mul_(3)
    model = model.to(DTYPES[dtype]).eval()
    size = model.default_cfg["input_size"]
    images = torch.randn(2, *size, generator=torch.Generator().manual_seed(1)).to(DTYPES[dtype])
    return Case(
        model, lambda m: m(images), None, {}, None, frozenset(range(2, 4097)), DTYPES[dtype]
    )
