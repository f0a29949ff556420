"""Make the record of an exhibit: ``python -m joma.paper.make_record fig6`` (``make record EXHIBIT=fig6``).

The exhibit runs at its longer preset in this process, so that its processor time can be measured. Its
slices are computed next, and everything is packed into `recorded/`. Trainings are resumed where an
earlier call was stopped; the same command goes on.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from joma._runs import Run, write_json
from joma.paper.exhibits.base import FRESH_SEED, Exhibit
from joma.paper.exhibits.index import get
from joma.paper.exhibits.making import make_exhibit
from joma.paper.exhibits.spot_check import compute_slice
from joma.paper.records import FOLDER, ExhibitRecord, Slice, pack

PRESET = "laptop"
OUT = Path("runs/record")
_TIMES = "processor-seconds.json"
_LOWEST_PRIORITY = 19


def make_record(exhibit: Exhibit, out: Path = OUT, folder: Path = FOLDER) -> ExhibitRecord:
    """Run an exhibit at its longer preset, compute its slices, and pack them."""
    if exhibit.experiment.code_slice is None:
        raise ValueError(
            f"{exhibit.id} has no code_slice, so that its record could not be checked: give its "
            "Experiment the settings of a short run on data that joma brings along"
        )
    with _measured(out, exhibit.id):
        outcome = make_exhibit(exhibit, PRESET, out, FRESH_SEED)
    seconds = _read_times(out)[exhibit.id]
    command = f"python -m joma.paper.make_record {exhibit.id}"
    return pack_finished(exhibit, Run(outcome.path), seconds / 60, command, folder)


def pack_finished(
    exhibit: Exhibit, run: Run, core_minutes: float | None, command: str, folder: Path = FOLDER
) -> ExhibitRecord:
    """Pack a run that is done, with the slices of its exhibit."""
    experiment = exhibit.experiment
    settings = run.info["config"]["settings"]
    with tempfile.TemporaryDirectory() as scratch:
        slices: dict[str, tuple[Slice, Run | None]] = {}
        if experiment.code_slice is not None:
            short = Slice(dict(experiment.code_slice), FRESH_SEED)
            place = Path(scratch) / "code" / exhibit.id
            slices["code"] = (short, compute_slice(exhibit, short, place))
        if experiment.record_slice is not None:
            # Its numbers are those of the recorded run: nothing is stored twice.
            short = Slice(settings | experiment.record_slice, run.info["seed"], _data(settings))
            slices["record"] = (short, None)
        return pack(
            run,
            slices,
            command=command,
            core_minutes=core_minutes,
            data_files=experiment.data_files,
            folder=folder,
        )


def _data(settings: dict[str, object]) -> str:
    """Return the packaged models and corpora that a run needs, separated by spaces."""
    names: list[str] = []
    for key in ("model", "models", "data", "text"):
        value = settings.get(key, ())
        if isinstance(value, str):
            value = [value]
        names += [name for name in value if isinstance(name, str) and " " not in name]  # type: ignore[attr-defined]
    return " ".join(names)


@contextmanager
def _measured(out: Path, name: str) -> Iterator[None]:
    """Add the processor time of the block to what earlier calls needed."""
    start = time.process_time()
    try:
        yield
    finally:
        times = _read_times(out)
        times[name] = times.get(name, 0.0) + time.process_time() - start
        out.mkdir(parents=True, exist_ok=True)
        write_json(out / _TIMES, times)


def _read_times(out: Path) -> dict[str, float]:
    file = out / _TIMES
    if not file.exists():
        return {}
    times: dict[str, float] = json.loads(file.read_text())
    return times


def _give_way() -> None:
    """Take the lowest priority. Linux groups tasks by session, where `nice` alone has no effect."""
    with suppress(OSError, AttributeError):
        os.nice(_LOWEST_PRIORITY)
        Path("/proc/self/autogroup").write_text(str(_LOWEST_PRIORITY))


def main() -> None:
    """Make the records that are named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("exhibits", nargs="+", help="ids of exhibits, as fig6")
    parser.add_argument("--out", type=Path, default=OUT, help="folder of the runs")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="folder of the records")
    options = parser.parse_args()
    import torch

    torch.set_num_threads(1)  # the last bits of a sum depend on the number of threads
    _give_way()
    for exhibit in get(options.exhibits):
        record = make_record(exhibit, options.out, options.folder)
        print(f"{exhibit.id}: {record.origin}, {record.path.stat().st_size:,} bytes", flush=True)


if __name__ == "__main__":
    main()
