"""Spot checks: compute a slice of a recorded run here, and compare it with the record.

A slice is a short run of the same exhibit. There are two, by name:

- `code`: on data that joma brings along (the corpus `zipf`, or a small seeded model). It is checked
  always, and shows that the code still computes what it computed when the record was made.
- `record`: the first steps of the recorded run itself. It is checked where its data are present.

Every number that both runs have is compared: same step, labels, gauge, layer and head.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from joma._extras import missing_modules, pip_command
from joma._runs import Run, RunWriter
from joma.paper.records import DIGITS, ExhibitRecord, Slice

if TYPE_CHECKING:
    import pandas as pd

    from joma.paper.exhibits.base import Exhibit

# Largest difference, as a share of the gauge's largest value in the slice. Processors order sums
# differently: that moves the loss of forty steps by about 1e-6 of itself. A wrong sign, mask, target
# or initialisation moves some number by more than 1e-2.
TOLERANCE = 1e-3
# Some gauges are errors that exact arithmetic would not have, around 1e-15. They depend on the order of
# sums altogether: values below this scale are compared with this scale.
SMALLEST_SCALE = 1e-6
# Columns that do not say what was measured. A digest of the weights differs wherever a last bit does.
NO_KEYS = ("value", "module", "digest", "note")
# Seconds are the machine's, and not compared.
TIME_GAUGES = "seconds"
# The extra that has the modules some slices need.
SLICE_EXTRA = "hf"
NAMES = {"code": "code checked", "record": "record checked"}


@dataclass(frozen=True)
class SpotCheck:
    """Outcome of one spot check.

    Attributes:
        name: "code" or "record".
        count: how many numbers were compared.
        first_step: the first step at which they were measured.
        last_step: the last one.
        difference: the largest difference, as a share of the gauge's largest value.
        where: gauge and step of that difference.
        here: the number that was computed here.
        recorded: the number in the record.
        is_comparable: False if the record was made with another version of torch or NumPy.
    """

    name: str
    count: int
    first_step: int
    last_step: int
    difference: float
    where: str
    here: float
    recorded: float
    is_comparable: bool = True

    @property
    def agrees(self) -> bool:
        """True if all numbers agree to the tolerance."""
        return self.difference <= TOLERANCE

    @property
    def has_failed(self) -> bool:
        """True if numbers disagree that should agree."""
        return self.is_comparable and not self.agrees

    def __str__(self) -> str:
        if self.agrees:
            return f"{NAMES[self.name]}: {self._compared} agree {self._precision}"
        numbers = f"{self.where} is {self.here:.6g} here and {self.recorded:.6g} in the record"
        if self.is_comparable:
            return f"spot check failed ({self.name}): {numbers}"
        return f"not comparable ({self.name}; other versions of torch or NumPy): {numbers}"

    @property
    def _compared(self) -> str:
        if self.first_step == self.last_step:
            return f"{self.count:,} numbers"
        return f"steps {self.first_step:,}–{self.last_step:,}"

    @property
    def _precision(self) -> str:
        if self.difference == 0:
            return "exactly"
        mantissa, exponent = f"{self.difference:.0e}".split("e")
        return f"to {mantissa}e{int(exponent)}"


def record_line(origin: str, checks: Sequence[SpotCheck], unchecked: str = "") -> str:
    """Return where a recorded exhibit comes from, and what was checked here, in a sentence.

    For example: "Recorded 2026-11-17, 24 core-minutes; code checked: steps 0–40 agree to 4e-4".

    Arguments:
        origin: date and cost of the record.
        checks: the spot checks that were made.
        unchecked: why there are none.
    """
    parts = [f"{origin[:1].upper()}{origin[1:]}", *map(str, checks)]
    if unchecked:
        parts.append(unchecked)
    return "; ".join(parts)


def why_unchecked(exhibit: Exhibit, record: ExhibitRecord) -> str:
    """Return why no slice of a record can be computed here; "" if one can."""
    missing = missing_modules(SLICE_EXTRA)
    needed = [name for name in exhibit.experiment.slice_modules if name in missing]
    if needed:
        return f"not checked here, without {', '.join(needed)}: {pip_command(SLICE_EXTRA)}"
    if not _present_slices(record):
        return "not checked here: its data are not on this machine"
    return ""


def compute_slice(exhibit: Exhibit, short: Slice, folder: Path) -> Run:
    """Run an exhibit with the settings of a slice, in ``folder``; runs it refers to lie next to it."""
    experiment = exhibit.experiment
    config = {"exhibit": exhibit.id, "preset": "slice", "settings": short.settings}
    with RunWriter.create(
        folder,
        kind="exhibit",
        config=config,
        seed=short.seed,
        axes=dict(experiment.axes),
        name=exhibit.id,
        packages=("joma", "numpy", "scipy", "torch"),
    ) as writer:
        experiment.run(writer, short.settings, short.seed, lambda share, label: None)
    return Run(folder)


def spot_checks(exhibit: Exhibit, record: ExhibitRecord) -> tuple[SpotCheck, ...]:
    """Check all slices of a record that can be computed here."""
    if why_unchecked(exhibit, record):
        return ()
    return tuple(spot_check(exhibit, record, name) for name in _present_slices(record))


def _present_slices(record: ExhibitRecord) -> list[str]:
    from joma._data.present import is_present

    return [name for name, short in record.slices.items() if is_present(short.data)]


def spot_check(exhibit: Exhibit, record: ExhibitRecord, name: str) -> SpotCheck:
    """Compute one slice of a record here, and compare all numbers that both have."""
    with tempfile.TemporaryDirectory() as folder:
        here = compute_slice(exhibit, record.slices[name], Path(folder) / "here" / exhibit.id)
        recorded = _recorded_rows(record, name, Path(folder) / "recorded")
        return compare(name, here.frame(), recorded.frame(), is_comparable=_same_versions(record))


def _recorded_rows(record: ExhibitRecord, name: str, folder: Path) -> Run:
    if name == "record":
        return record.unpack(folder)
    return record.unpack_slice(name, folder)


def compare(
    name: str, here: pd.DataFrame, recorded: pd.DataFrame, *, is_comparable: bool = True
) -> SpotCheck:
    """Compare two long tables in the rows that both have."""
    import numpy as np

    keys = [column for column in here.columns if column in recorded.columns]
    keys = [column for column in keys if column not in NO_KEYS]
    both = _labelled(here, keys).merge(
        _labelled(recorded, keys), on=keys, suffixes=("_here", "_recorded")
    )
    if both.empty:
        raise ValueError(
            f"the slice {name!r} and the record have no row in common: nothing to check"
        )
    value_here = both["value_here"].to_numpy(dtype=float)
    value_recorded = both["value_recorded"].to_numpy(dtype=float)
    # A gauge that passes through zero has no relative error of its own.
    scale = both["value_recorded"].abs().groupby(both["gauge"]).transform("max").to_numpy()
    scale = np.maximum(scale, SMALLEST_SCALE)
    with np.errstate(invalid="ignore"):
        differences = np.abs(value_here - value_recorded) / scale
    differences[value_here == value_recorded] = 0.0
    differences[np.isnan(value_here) & np.isnan(value_recorded)] = 0.0
    # A number that is not finite on one side only is as far away as can be.
    differences[np.isnan(differences)] = np.inf
    worst = int(differences.argmax())
    row = both.iloc[worst]
    return SpotCheck(
        name=name,
        count=len(both),
        first_step=int(both["step"].min()),
        last_step=int(both["step"].max()),
        difference=float(differences[worst]),
        where=f"{row['gauge']} at step {row['step']}",
        here=float(value_here[worst]),
        recorded=float(value_recorded[worst]),
        is_comparable=is_comparable,
    )


def _labelled(frame: pd.DataFrame, keys: list[str]) -> pd.DataFrame:
    """Return a frame whose labels can be compared: records keep `DIGITS` digits of a float."""
    frame = frame[~frame["gauge"].str.startswith(TIME_GAUGES)]
    floats = [key for key in keys if frame[key].dtype.kind == "f"]
    return frame.assign(**{key: frame[key].map(f"{{:.{DIGITS}g}}".format) for key in floats})


def _same_versions(record: ExhibitRecord) -> bool:
    """True if the libraries that decide the last digits have the record's major and minor version."""
    import numpy as np
    import torch

    installed = {"torch": torch.__version__, "numpy": np.__version__}
    return all(
        _minor(record.versions.get(name)) == _minor(text) for name, text in installed.items()
    )


def _minor(version: Any) -> tuple[str, ...]:
    return tuple(str(version).split("+")[0].split(".")[:2])
