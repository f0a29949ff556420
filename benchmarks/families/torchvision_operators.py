"""Make ``import torchvision`` work where its compiled operators do not load (a CUDA build with a CPU build of torch).

timm and vit-pytorch import torchvision for its transforms, which need none of the operators.
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import torch


def define() -> None:
    """Declare the operators that torchvision registers fake kernels for; they have no other kernels then."""
    found = importlib.util.find_spec("torchvision")
    if found is None or found.origin is None:
        return
    text = (Path(found.origin).parent / "_meta_registrations.py").read_text()
    for name in re.findall(r'(?:register_meta\("|torchvision::)(\w+)"', text):
        torch.library.define(f"torchvision::{name}", "() -> ()")
