"""Measure models of one library and print a JSON line per row.

python -m benchmarks.families LIBRARY
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import random
import sys
import time
from dataclasses import asdict

import torch

from benchmarks.families.libraries import LIBRARIES, Coverage
from joma._runs.fingerprint import fingerprint

SEED = 0  # of the order of models


def main() -> None:
    """Measure models in a random order, until all are done or the processor time is over."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.families", description=__doc__)
    parser.add_argument("library", choices=LIBRARIES)
    parser.add_argument(
        "--minutes", type=float, default=math.inf, help="of processor time; then no further model"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    library = importlib.import_module(f"benchmarks.families.{LIBRARIES[arguments.library]}")
    code = fingerprint([])
    models = library.models()
    # The order does not depend on the time: a longer run measures the same models and more.
    random.Random(SEED).shuffle(models)
    end = time.process_time() + 60 * arguments.minutes
    measured = 0
    for model in models:
        if time.process_time() > end:
            break
        for row in library.rows(model):
            _print(asdict(row))
        measured += 1
    _print(asdict(Coverage(arguments.library, measured, len(models), code)))


def _print(line: dict[str, object]) -> None:
    # One write, so that what a library prints cannot come between.
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
