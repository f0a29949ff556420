"""Random attention modules under a watch, against brute force. python -m benchmarks.random_attention

Each configuration is right, reported without heads ("layer only"), refused with a reason, or wrong.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter

from tests.measure.events.random_attention import check, draw


def main() -> None:
    """Check many configurations and print the tally; the exit code is 1 if one is wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.random_attention", description=__doc__
    )
    parser.add_argument("--configurations", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0, help="number of the first configuration")
    arguments = parser.parse_args()
    start = time.perf_counter()
    tally: Counter[str] = Counter()
    codes: Counter[str] = Counter()
    errors: dict[str, float] = {}
    for seed in range(arguments.seed, arguments.seed + arguments.configurations):
        outcome = check(draw(seed))
        tally[outcome.verdict] += 1
        if outcome.verdict in ("right", "layer only"):
            dtype = str(outcome.configuration.computed_in).removeprefix("torch.")
            errors[dtype] = max(errors.get(dtype, 0.0), outcome.error)
        if outcome.verdict == "refused":
            codes[outcome.code] += 1
        if outcome.verdict == "wrong":
            print(f"wrong by {outcome.error:.1e}: {outcome.configuration} {outcome.reason}")
    for verdict in ("right", "layer only", "refused", "wrong"):
        print(f"{verdict:12} {tally[verdict]:5}  {tally[verdict] / tally.total():6.1%}")
    print("refused:", ", ".join(f"{count} {code}" for code, count in codes.most_common()) or "none")
    print("largest error:", ", ".join(f"{error:.0e} in {dtype}" for dtype, error in errors.items()))
    print(f"{time.perf_counter() - start:.0f} s")
    sys.exit(1 if tally["wrong"] else 0)


if __name__ == "__main__":
    main()
