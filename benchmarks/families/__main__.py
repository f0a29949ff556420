"""Measure one library and print a JSON line per row. python -m benchmarks.families LIBRARY"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from dataclasses import asdict

import torch

LIBRARIES = {
    "transformers": "hub",
    "timm": "images",
    "vit-pytorch": "vits",
    "x-transformers": "layers",
    "litgpt": "gpts",
    "torchtune": "tunes",
    "torchtitan": "titans",
    "hand-written": "styles",
    "neutral": "neutral",
}


def main() -> None:
    """Measure a library."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.families", description=__doc__)
    parser.add_argument("library", choices=LIBRARIES)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    module = importlib.import_module(f"benchmarks.families.{LIBRARIES[arguments.library]}")
    for row in module.rows():
        json.dump(asdict(row), sys.stdout)
        print(flush=True)


if __name__ == "__main__":
    main()
