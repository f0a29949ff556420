"""Records: longer runs of exhibits, kept in the package with the data that figure and rule need.

A record is one zip file, `recorded/<exhibit>.zip`:

| member | content |
|---|---|
| `record.json` | what was run: preset, settings, seed, date, versions, processor time, command |
| `run/…` | the run folder; below it, in `runs/<n>/`, the runs that it refers to, without checkpoints |
| `slices/<name>/…` | a short run, made with the record: `spot_check` computes it again |

A record holds no verdict. The current rule judges its data anew on the user's machine, and the figure
is drawn from the same data, so that heading and figure cannot disagree. A record stays valid when the
source changes: it has a version of its data format instead of a hash of the source.
"""

from __future__ import annotations

import datetime
import json
import lzma
import os
import struct
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from joma._data.packaged import verified_models
from joma._runs import Run, write_atomic

FOLDER = Path(__file__).parent / "recorded"
# Raise it when a member changes its meaning, and make the records again.
FORMAT = 2
# Bytes per record. All thirty together must fit into a wheel of 4 MB.
LARGEST = 100_000
# Significant digits of a measurement. Six are more than any rule or figure can tell apart, and halve
# the size of a record.
DIGITS = 6
# Entries of run.json that describe the machine and not the result.
MACHINE_ENTRIES = ("host", "pid")
_DETAILS = "record.json"
# What a reader of a damaged archive may raise.
_DAMAGE = (
    zipfile.BadZipFile,
    lzma.LZMAError,
    struct.error,
    EOFError,
    KeyError,
    TypeError,  # a `record.json` of another shape
    AttributeError,
    ValueError,
    OSError,
    RuntimeError,  # a flag that claims encryption; NotImplementedError for an unknown version
)


class DamagedRecord(ValueError):
    """A record that cannot be read, or that another version of joma wrote."""


@dataclass(frozen=True)
class Slice:
    """A short run of the exhibit, stored with the record.

    Attributes:
        settings: the settings of the short run.
        seed: its seed.
        data: the corpora and models that it needs, separated by spaces; "" if joma brings them along.
    """

    settings: dict[str, Any]
    seed: int
    data: str = ""


@dataclass(frozen=True)
class ExhibitRecord:
    """A longer run of an exhibit, with its data."""

    exhibit: str
    preset: str
    settings: dict[str, Any]
    seed: int
    date: str  # UTC, ISO 8601
    versions: dict[str, str]
    command: str
    core_minutes: float | None  # processor time; None if it was not measured
    slices: dict[str, Slice] = field(default_factory=dict)
    # SHA-256 of the weights of the packaged models that were read, by their names
    models: dict[str, str] = field(default_factory=dict)
    path: Path = Path()  # the zip file

    @property
    def day(self) -> str:
        """Date without the time."""
        return self.date[:10]

    @property
    def origin(self) -> str:
        """Date and cost, as a phrase: "recorded 2026-11-18, 24 core-minutes"."""
        if self.core_minutes is None:
            return f"recorded {self.day}"
        return f"recorded {self.day}, {self.core_minutes:.3g} core-minutes"

    def unpack(self, folder: Path) -> Run:
        """Write the recorded run into ``folder``, with the runs that it refers to."""
        return _unpack(self.path, "run/", folder)

    def unpack_slice(self, name: str, folder: Path) -> Run:
        """Write the stored slice into ``folder``, with the runs that it refers to."""
        return _unpack(self.path, f"slices/{name}/", folder)


def path_of(exhibit: str, folder: Path = FOLDER) -> Path:
    """Return where the record of an exhibit is, or would be."""
    return folder / f"{exhibit}.zip"


def load(exhibit: str, folder: Path = FOLDER) -> ExhibitRecord | None:
    """Return the record of an exhibit, or None if there is none.

    Raises `DamagedRecord` for a file that cannot be read or that has another format.
    """
    path = path_of(exhibit, folder)
    if not path.exists():
        return None
    details = _read_details(path)
    version = details.pop("format", None)
    if version != FORMAT:
        raise DamagedRecord(
            f"the record {path.name} has data format {version!r}, and this version of joma reads "
            f"{FORMAT}: make it again with `make record EXHIBIT={exhibit}`"
        )
    if details.get("exhibit") != exhibit:
        raise DamagedRecord(
            f"the record {path.name} is of the exhibit {details.get('exhibit')!r}: name it "
            f"{details.get('exhibit')}.zip, or make the right one with `make record EXHIBIT={exhibit}`"
        )
    try:
        slices = {name: Slice(**stored) for name, stored in details.pop("slices").items()}
        record = ExhibitRecord(**details, slices=slices, path=path)
        _ = record.origin, dict(record.settings), dict(record.versions)
    except _DAMAGE as error:
        raise damaged(path, error) from error
    return record


def _read_details(path: Path) -> dict[str, Any]:
    try:
        with zipfile.ZipFile(path) as archive:
            details = json.loads(archive.read(_DETAILS))
    except _DAMAGE as error:
        raise damaged(path, error) from error
    if not isinstance(details, dict):
        raise damaged(path, f"{_DETAILS} is no mapping")
    return details


def damaged(path: Path, reason: object) -> DamagedRecord:
    """Return the error of a record that cannot be used, with the reason."""
    text = str(reason) or type(reason).__name__
    if isinstance(reason, KeyError):
        text = f"it has no {reason}"
    return DamagedRecord(
        f"the record {path.name} is damaged ({text}): install joma again, or make the record with "
        f"`make record EXHIBIT={path.stem}`"
    )


def all_records(folder: Path = FOLDER) -> Iterator[ExhibitRecord]:
    """Yield all records, in the order of their names."""
    for path in sorted(folder.glob("*.zip")):
        record = load(path.stem, folder)
        assert record is not None
        yield record


def pack(
    run: Run,
    slices: Mapping[str, tuple[Slice, Run | None]],
    *,
    command: str,
    core_minutes: float | None,
    data_files: Sequence[str] = (),
    folder: Path = FOLDER,
) -> ExhibitRecord:
    """Write the record of a finished exhibit.

    Arguments:
        run: the run of the exhibit, at its longer preset.
        slices: name of each slice, its settings, and its run; None for a part of ``run`` itself.
        command: the command that made the run.
        core_minutes: processor time of the run.
        data_files: files of run folders, besides run.json and the measurements, that the figure reads.
        folder: where records are kept.
    """
    info = run.info
    config = info["config"]
    details = {
        "exhibit": config["exhibit"],
        "preset": config["preset"],
        "settings": config["settings"],
        "seed": info["seed"],
        "date": info.get("finished", _now()),
        "versions": info["versions"],
        "command": command,
        "core_minutes": core_minutes,
        "models": _models(config["settings"]),
    }
    described = {name: asdict(short) for name, (short, _) in slices.items()}
    members = {_DETAILS: _as_json({"format": FORMAT, **details, "slices": described})}
    members |= _members("run", run, data_files)
    for name, (_, short_run) in slices.items():
        if short_run is not None:
            members |= _members(f"slices/{name}", short_run)
    path = path_of(config["exhibit"], folder)
    _write_archive(path, members)
    if path.stat().st_size > LARGEST:
        raise ValueError(
            f"the record {path} has {path.stat().st_size:,} bytes, and at most {LARGEST:,} are "
            "kept in the package: measure less often, or store fewer gauges"
        )
    record = load(config["exhibit"], folder)
    assert record is not None
    return record


def _models(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the hashes of the packaged models that these settings name; they are verified."""
    named = settings.get("models", settings.get("model", ()))
    if isinstance(named, str):
        named = [named]
    return {name: digest for model in named for name, digest in verified_models(model).items()}


def _members(prefix: str, run: Run, data_files: Sequence[str] = ()) -> dict[str, bytes]:
    """Return the files of a run folder, and of the runs it refers to, by their names in the zip."""
    info = _without_machine(run.info)
    members: dict[str, bytes] = {}
    references = []
    for number, (path, reference) in enumerate(zip(run.members, info.get("runs", []), strict=True)):
        inner = f"runs/{number}"
        references.append({**reference, "path": inner})
        facts = _without_machine(Run(path).info)
        gauges = set(reference["gauges"])
        members |= _files(f"{prefix}/{inner}", path, facts, data_files, gauges)
    if references:
        info["runs"] = references
    return _files(prefix, run.path, info, data_files) | members


def _files(
    prefix: str,
    folder: Path,
    info: dict[str, Any],
    data_files: Sequence[str],
    gauges: set[str] | None = None,
) -> dict[str, bytes]:
    files = {f"{prefix}/run.json": _as_json(info)}
    for name in data_files:
        path = folder / name
        if path.exists():
            files[f"{prefix}/{name}"] = path.read_bytes()
    metrics = folder / "metrics.jsonl"
    if metrics.exists():
        files[f"{prefix}/metrics.jsonl"] = _thin(metrics.read_bytes(), gauges)
    return files


def _thin(metrics: bytes, gauges: set[str] | None) -> bytes:
    """Return the lines of these gauges, or of all, with `DIGITS` digits per number."""
    lines: list[bytes] = []
    measurement: list[dict[str, Any]] = []
    for line in metrics.splitlines():
        row = json.loads(line)
        is_last = row.pop("end", False)
        if gauges is None or row["gauge"] in gauges:
            measurement.append(_rounded(row))
        if is_last:
            # Readers drop what follows the last marked line.
            if measurement:
                measurement[-1]["end"] = True
            lines += map(_as_json, measurement)
            measurement = []
    return b"".join(line + b"\n" for line in lines)


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return value


def _without_machine(info: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in info.items() if name not in MACHINE_ENTRIES}


def _write_archive(path: Path, members: Mapping[str, bytes]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".partial-{os.getpid()}")
    try:
        with zipfile.ZipFile(partial, "w") as archive:
            for name, content in members.items():
                # A fixed date, so that equal data give equal bytes.
                entry = zipfile.ZipInfo(name, date_time=(2024, 1, 1, 0, 0, 0))
                # Lines of numbers that differ in a few digits take a quarter less than with LZMA.
                entry.compress_type = zipfile.ZIP_BZIP2
                archive.writestr(entry, content)
        write_atomic(path, partial.read_bytes())
    finally:
        partial.unlink(missing_ok=True)


def _unpack(path: Path, prefix: str, folder: Path) -> Run:
    try:
        with zipfile.ZipFile(path) as archive:
            for name in archive.namelist():
                if not name.startswith(prefix):
                    continue
                target = folder / name.removeprefix(prefix)
                if not target.resolve().is_relative_to(folder.resolve()):
                    raise DamagedRecord(f"the record {path.name} has a file outside its folder")
                # Reading checks the CRC of the member.
                content = archive.read(name)
                target.parent.mkdir(parents=True, exist_ok=True)
                write_atomic(target, content)
    except DamagedRecord:
        raise
    except _DAMAGE as error:
        raise damaged(path, error) from error
    return Run(folder)


def _as_json(content: object) -> bytes:
    return json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode()


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
