"""`final_attention` against the joint flow run to rest, on random tasks: python -m benchmarks.foretell [TASKS].

Tasks: regression, and classification with soft labels (which no direction separates, so that all have one minimiser);
K = 1 … 5 nodes, 3 to 6 tokens, r and T drawn anew, every other start at zero. Rest: ‖∇_u L‖ ≤ 1e-10 in every component.
"""

from __future__ import annotations

import sys
import time

import numpy as np

from joma.paper.labs.rest import run_to_rest
from joma.theory import JointFlow, Task, final_attention


def compare(n: int) -> tuple[float, float, str]:
    """The largest difference of logits on task n, when the flow came to rest, and what the task is."""
    rng = np.random.default_rng((16, n))
    nodes, tokens, samples = 1 + n % 5, 3 + n % 4, 24
    x, p = rng.random((samples, tokens)), rng.random(samples) + 0.1
    if n % 2 or nodes == 1:
        loss, task = "regression", Task.regression(x, rng.standard_normal((samples, nodes)), p=p)
    else:
        loss, task = (
            "classification",
            Task.classification(x, rng.dirichlet(np.ones(nodes), samples), p=p),
        )
    rates = {"attention_lr": float(rng.uniform(0.1, 3)), "temperature": float(rng.uniform(0.6, 2))}
    zero = n % 4 < 2
    start = (
        np.zeros((tokens, nodes)) if zero else 0.7 * rng.standard_normal((tokens, nodes)),
        np.zeros(nodes) if zero else rng.standard_normal(nodes),
        np.zeros(tokens) if zero else 0.5 * rng.standard_normal(tokens),
    )
    end = final_attention(task, *start, **rates)
    z, t = run_to_rest(JointFlow(task, "exp", **rates), *start)[2:]
    what = f"{loss}, K = {nodes}, M = {tokens}, r = {rates['attention_lr']:.2f}, T = {rates['temperature']:.2f}"
    return float(np.abs(end.z - z).max()), t, f"{what}, {'zero' if zero else 'other'} start"


def main(tasks: int = 50) -> None:
    """One line per task, and the largest difference."""
    worst = 0.0
    for n in range(tasks):
        began = time.process_time()
        error, t, what = compare(n)
        worst = max(worst, error)
        print(
            f"{n:3d}  {error:.1e}  rest at t = {t:8.3g}  {time.process_time() - began:5.1f} s  {what}",
            flush=True,
        )
    print(f"largest difference over {tasks} tasks: {worst:.1e}")
    sys.exit(0 if worst <= 1e-6 else 1)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
