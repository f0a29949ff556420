"""The task of Figure 2: joma's integrator against the autograd SGD loop that one would write in PyTorch.

Under linear and exp attention the drift of the exact first integral tells how good each is. Under softmax (the
figure's own) no per-token integral is exact, so there both are compared with a reference from another method at
tighter tolerance.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from benchmarks._timing import alternate, row
from joma.theory import JointFlow, Trajectory
from joma.theory.tasks import class_distributions, small_start

STEPS, TEMPERATURE = 2000, 0.5
CASES = {
    "softmax": 0.1,
    "linear": 0.1,
    "exp": 0.02,
}  # attention and step size; exp is unstable at 0.1


def run(rounds: int = 5) -> list[dict[str, Any]]:
    """Time and accuracy of both sides for the three attentions."""
    return [_case(attention, step, rounds) for attention, step in CASES.items()]


def _case(attention: str, step: float, rounds: int) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    task = class_distributions(rng, smooth=True)
    start = small_start(task, rng)
    if attention == "linear":
        start = start._replace(z0=start.z0 + 1.0)  # zero logits are a fixed point
    flow = JointFlow(task, attention, "linear", temperature=TEMPERATURE)
    x, labels = torch.tensor(task.x.copy()), torch.arange(task.nodes)

    def joma() -> Trajectory:
        return flow.integrate(STEPS * step, *start)

    def sgd() -> Trajectory:
        v, xi, z = (torch.tensor(part, requires_grad=True) for part in start)
        optimiser = torch.optim.SGD([v, xi, z], lr=step)
        loss_function = torch.nn.CrossEntropyLoss()
        states = []
        for n in range(STEPS + 1):
            states.append([part.detach().numpy().copy() for part in (v, xi, z)])
            if n == STEPS:
                break
            optimiser.zero_grad()
            logits = z / TEMPERATURE
            b = x * (logits if attention == "linear" else torch.exp(logits))
            if attention == "softmax":
                b = b / b.sum(1, keepdim=True)
            loss_function(b @ v + xi, labels).backward()
            optimiser.step()
        return Trajectory(
            flow,
            step * np.arange(STEPS + 1),
            *(np.stack(part) for part in zip(*states, strict=True)),
        )

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    (fast, path), (slow, descent) = alternate(joma, sgd, rounds=rounds)
    torch.set_num_threads(threads)
    if attention == "softmax":
        reference = flow.integrate(STEPS * step, *start, method="Radau", rtol=1e-10, atol=1e-12).z[
            -1
        ]
        errors = [float(np.abs(p.z[-1] - reference).max()) for p in (path, descent)]
        what = "error in z at the end"
    else:
        errors = [p.invariant().max_drift for p in (path, descent)]
        what = "drift of the first integral"
    return row(
        f"Figure 2's task, {attention} attention, t = {STEPS * step:g}",
        "`JointFlow.integrate`",
        "2,000 autograd SGD steps in PyTorch (float64, one thread)",
        fast,
        slow,
        f"{what}: {errors[0]:.0e} against {errors[1]:.0e}",
        joma_error=errors[0],
        against_error=errors[1],
    )
