"""``joma simulate``: integrate one task from a file or by name into a run folder, with its picture."""

from __future__ import annotations

import csv
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from joma._extras import require
from joma._runs import Run, RunWriter, staged

if TYPE_CHECKING:
    from joma.theory import Task, Trajectory
    from joma.theory.tasks import Start

AXES = {"v": ["token", "node"], "xi": ["node"], "z": ["token"]}


@dataclass(frozen=True)
class Problem:
    """A task with the start that came with it (None where the file has none)."""

    task: Task
    start: Start


def load_task(source: str, seed: int = 0, scale: float = 0.01, *, signed: bool = False) -> Problem:
    """The task in a ``.npz`` or ``.csv`` file, or a synthetic one by name (see ``joma simulate --list``).

    npz: arrays ``x`` (N, M) and one of ``g`` (N, K), ``labels`` (N,), ``y`` (N, K); optional ``p`` (N,), ``v0``,
    ``xi0``, ``z0``. csv: a header with columns ``x0, x1, …``, and ``g0, …`` or ``y0, …`` or ``label``; optional ``p``.
    What is not given starts normal with size ``scale``.
    """
    import numpy as np

    from joma.theory.tasks import TASKS, named_task, small_start

    rng = np.random.default_rng(seed)
    path = Path(source)
    given: dict[str, Any] = {}
    if path.suffix in (".npz", ".csv"):
        if not path.exists():
            raise ValueError(f"no file {source}")
        arrays = _read_npz(path) if path.suffix == ".npz" else _read_csv(path)
        task = _task(arrays, source, signed)
        given = {name: arrays[name] for name in ("v0", "xi0", "z0") if name in arrays}
    elif source in TASKS:
        task = named_task(source, rng)
    else:
        from joma._suggest import unknown_name

        raise ValueError(unknown_name(source, TASKS, "task") + " Or give a .npz or .csv file.")
    return Problem(task, small_start(task, rng, scale)._replace(**given))


def _read_npz(path: Path) -> dict[str, Any]:
    import numpy as np

    try:
        with np.load(path, allow_pickle=False) as file:
            return {name: file[name] for name in file.files}
    except (ValueError, OSError, EOFError) as error:
        raise ValueError(f"{path} is not a readable .npz of plain arrays: {error}") from None


def _read_csv(path: Path) -> dict[str, Any]:
    import numpy as np

    with path.open(newline="") as file:
        rows = list(csv.reader(file))
    if len(rows) < 2:
        raise ValueError(
            f"{path} has no rows; it needs a header such as x0,x1,label and one line per sample"
        )
    header, body = [name.strip() for name in rows[0]], rows[1:]
    try:
        values = np.array([[float(cell) for cell in row] for row in body if row])
    except ValueError as error:
        raise ValueError(
            f"{path}: {error}; all cells must be numbers and all rows as long as the header"
        ) from None
    if values.ndim != 2 or values.shape[1] != len(header):
        raise ValueError(f"{path}: rows must have the header's {len(header)} cells")
    arrays: dict[str, Any] = {}
    for name in ("x", "g", "y"):
        columns = sorted(
            (c for c in header if c[:1] == name and c[1:].isdigit()), key=lambda c: int(c[1:])
        )
        if columns:
            arrays[name] = values[:, [header.index(c) for c in columns]]
    for column, name in (("label", "labels"), ("p", "p")):
        if column in header:
            arrays[name] = values[:, header.index(column)]
    return arrays


def _task(arrays: dict[str, Any], source: str, signed: bool) -> Task:
    from joma.theory import Task

    targets = [name for name in ("g", "labels", "y") if name in arrays]
    if "x" not in arrays or len(targets) != 1:
        raise ValueError(
            f"{source} holds {', '.join(arrays) or 'nothing'}; it must hold x and exactly one of g (gradients), labels "
            "(classification) or y (regression)"
        )
    x, p = arrays["x"], arrays.get("p")
    if targets[0] == "labels":
        return Task.classification(x, arrays["labels"], p=p, signed=signed)
    if targets[0] == "y":
        return Task.regression(x, arrays["y"], p=p, signed=signed)
    return Task(x, arrays["g"], p, signed)


def default_run(source: str) -> Path:
    """The run folder of a task, if none is named."""
    return Path("runs") / f"simulate-{Path(source).stem}"


def simulate(
    task: str | os.PathLike[str],
    out: str | os.PathLike[str] | None = None,
    *,
    attention: str = "softmax",
    activation: str = "relu",
    t_end: float = 10.0,
    mlp_lr: float = 1.0,
    attention_lr: float = 1.0,
    temperature: float = 1.0,
    folded: bool = False,
    step: float | None = None,
    times: int = 201,
    scale: float = 0.01,
    signed: bool = False,
    seed: int = 0,
    force: bool = False,
) -> Trajectory:
    """Integrate the joint dynamics of a task: a run folder with its picture.

    Arguments:
        task: a .npz or .csv file, or the name of a synthetic task, as in ``joma simulate --list``.
        out: the run folder to write; runs/simulate-TASK by default.
        attention: "linear", "exp" or "softmax".
        activation: "linear", "relu", "leaky_relu", "gelu" or "silu".
        t_end: end of the time span.
        mlp_lr: learning rate of the MLP weights.
        attention_lr: learning rate of the attention logits; 0 freezes them.
        temperature: divides the attention logits.
        folded: integrate attention out (Theorem 1).
        step: gradient descent with this step size instead of the flow.
        times: how many output times.
        scale: size of the random start where the file gives none.
        signed: admit negative x.
        seed: seed of synthetic tasks and starts.
        force: replace the run in the folder.

    Returns:
        The trajectory, with ``t``, ``v``, ``xi``, ``z``, ``entropy()`` and ``invariant()``.

    >>> import joma, tempfile
    >>> path = joma.simulate(
    ...     "two-tokens", tempfile.mkdtemp() + "/run", attention="exp", t_end=1.0, times=11
    ... )
    >>> bool(path.invariant().max_drift < 1e-6)  # Theorem 1
    True
    """
    require("paper", "joma.simulate")

    from joma._show import plots
    from joma._show.plots import simulation
    from joma.theory import FoldedFlow, JointFlow

    source = os.fspath(task)
    out = default_run(source) if out is None else Path(out)
    problem = load_task(source, seed, scale, signed=signed)
    options = (attention, activation, mlp_lr, attention_lr)
    config = {
        "task": source, "attention": attention, "activation": activation, "t_end": t_end, "mlp_lr": mlp_lr,
        "attention_lr": attention_lr, "temperature": temperature, "folded": folded, "step": step, "times": times,
        "scale": scale, "signed": signed,
    }  # fmt: skip
    if step is not None and folded:
        raise ValueError("--step is gradient descent on the joint flow; leave out --folded")
    with staged(out, overwrite=force) as folder:
        if step is not None:
            joint = JointFlow(problem.task, *options, temperature=temperature)
            path = joint.descend(max(1, round(t_end / step)), step, *problem.start)
        else:
            kind = FoldedFlow if folded else JointFlow
            path = kind(problem.task, *options, temperature=temperature).integrate(
                t_end, *problem.start, times=times
            )
        packages = ("joma", "numpy", "scipy")
        with RunWriter.create(
            folder,
            kind="simulate",
            config=config,
            seed=seed,
            axes=AXES,
            name=out.name,
            packages=packages,
        ) as writer:
            entropy, drift = path.entropy(), path.invariant().drift
            every = max(1, len(path.t) // times)
            for i in [*range(0, len(path.t) - 1, every), len(path.t) - 1]:
                gauges = {
                    "v": path.v[i],
                    "xi": path.xi[i],
                    "z": path.z[i],
                    "entropy": entropy[i],
                    "drift": drift[i],
                }
                writer.write(i, gauges, t=float(path.t[i]))
            if not path.done:
                writer.finish("done", reason=path.status)
        plots.save(simulation.draw_run(Run(folder)), folder)
    return path
