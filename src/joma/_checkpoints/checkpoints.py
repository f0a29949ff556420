"""Which checkpoints: a folder of them, one model, or revisions of a model on the hub.

| revisions | meaning |
|---|---|
| `step0,step1000` | these, in this order |
| `1000..5000`, `1000..5000:500` | steps from … to …, every one there is, or every 500 |
| `pythia` | step0, 1, 2, 4, …, 512, 1000, then every 1,000 to 143,000: 154 in all |
| `all` | as the hub lists them, or all in the folder |
| `log`, `log:20` | so many (20) of them, evenly on a log scale, with the first and the last |
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from joma._checkpoints import hub
from joma._checkpoints.formats import NAMES, SUFFIXES, has_weights, lone_file, refusal, weight_files
from joma._checkpoints.revision import Revision
from joma._checkpoints.steps import step_of, steps_of_files, trained_steps
from joma._checkpoints.tensors import Tensors
from joma._data.packaged import MODELS, packaged
from joma._runs.names import harmless

LOG = 20
_HUB = re.compile(r"[\w.-]+(/[\w.-]+)?")
_RANGE = re.compile(r"(?:step[-_]?)?(\d+)\.\.(?:step[-_]?)?(\d+)(?::(\d+))?")


@dataclass(frozen=True)
class Checkpoint:
    """One point of a series: a local folder or file, or a revision on the hub."""

    name: str
    step: int
    path: str | None = None
    repo: str | None = None
    note: str = ""  # for its row
    file: str | None = (
        None  # the file of weights that is meant, of a model on the hub that has several
    )

    def revision(
        self,
        report: hub.DownloadProgress | None = None,
        keep: bool = False,
        limit: int | None = None,
        dry: bool = False,
    ) -> Revision | None:
        """Its files on the hub."""
        return (
            None
            if self.repo is None
            else Revision(self.repo, self.name, report, keep, limit, dry, self.file)
        )

    def open(self) -> Tensors:
        """The tensors of a local one."""
        assert self.path is not None
        return Tensors.open(Path(self.path))


def find_checkpoints(source: str, revisions: str | Sequence[str] | None = None) -> list[Checkpoint]:
    """The checkpoints to scan, in the order of their steps."""
    path = Path(source).expanduser().absolute()
    if not source:
        raise ValueError("no model: give a folder of checkpoints or the id of a model on the hub")
    if path.exists():
        return _noted(_local(path, revisions))
    if (file := packaged(source)) is not None:
        about = MODELS[source].about
        return _noted(
            [
                replace(c, note="; ".join(filter(None, (about, c.note))))
                for c in _local(file, revisions)
            ]
        )
    if (
        source.startswith((".", "/", "~"))
        or source.endswith("/")
        or not _HUB.fullmatch(hub.with_file(source)[0])
    ):
        raise ValueError(
            f"there is no folder or file {path}; give one, or the id of a model on the hub"
        )
    return _noted(_remote(source, revisions))


def _noted(checkpoints: list[Checkpoint]) -> list[Checkpoint]:
    """Each once; those that share a step have a note that says so."""
    checkpoints = list(dict.fromkeys(checkpoints))
    names: dict[int, list[str]] = {}
    for c in checkpoints:
        names.setdefault(c.step, []).append(c.name)
    result = []
    for c in checkpoints:
        others = [name for name in names[c.step] if name != c.name]
        said = [c.note] * bool(c.note) + [f"step {c.step} is also that of {_some(others)}"] * bool(
            others
        )
        result.append(replace(c, note="; ".join(said)))
    return result


def _local(path: Path, revisions: str | Sequence[str] | None) -> list[Checkpoint]:
    present = _in_folder(path)
    if revisions is None:
        return present
    chosen = _choose(revisions, [(c.name, c.step) for c in present])
    by_name, by_step = {c.name: c for c in present}, {c.step: c for c in reversed(present)}
    result = []
    for name in chosen:
        step = step_of(name)
        match = by_name.get(name) or (by_step.get(step) if step is not None else None)
        # a checkpoint that does not exist keeps its place: its row will say so
        result.append(match or Checkpoint(name, step or 0, str(path / name)))
    return result


def _in_folder(path: Path) -> list[Checkpoint]:
    """All checkpoints at a path: a file of weights, a model, a run of `joma train`, or a folder of these."""
    if path.is_file():
        if path.suffix not in SUFFIXES:
            raise ValueError(
                f"{path} is no file of weights: their names end in {', '.join(SUFFIXES)}"
            )
        return [
            _alone(path, steps_of_files(weight_files(path.parent)).get(path, step_of(path.stem)))
        ]
    if (path / "run.json").is_file() and (path / "checkpoints").is_dir():  # what joma train writes
        path = path / "checkpoints"
    if has_weights(path):
        return _with_model(path)
    steps = steps_of_files(weight_files(path)) | _steps_of_folders(path)
    if steps:
        return _in_order(steps)
    if (file := lone_file(path)) is not None:
        told = (step_of(path.name), trained_steps(path), step_of(file.stem))
        return [_alone(path, next((step for step in told if step is not None), None))]
    models = sorted(child.name for child in path.iterdir() if child.is_dir() and has_weights(child))
    raise ValueError(
        refusal(path)
        or f"no checkpoints in {path}: looked for {', '.join(NAMES)}, folders step-*/ or checkpoint-*/, and files "
        f"that differ in a number and end in {', '.join(SUFFIXES)}"
        + (
            f". Its folders {_some(models)} are models whose names tell no step: give one of them"
            if models
            else ""
        )
    )


def _steps_of_folders(path: Path) -> dict[Path, int]:
    """Folders whose names tell their step, with weights in them or not: a row will say so."""
    folders = [
        entry for entry in path.iterdir() if not entry.name.startswith(".") and entry.is_dir()
    ]
    steps = {folder: step for folder in folders if (step := step_of(folder.name)) is not None}
    return {
        folder: step
        for folder, step in steps.items()
        if not folder.name.isdecimal() or has_weights(folder)
    }


def _in_order(steps: dict[Path, int]) -> list[Checkpoint]:
    checkpoints = [Checkpoint(harmless(path.name), step, str(path)) for path, step in steps.items()]
    return sorted(checkpoints, key=lambda c: (c.step, c.name))


def _alone(path: Path, step: int | None) -> Checkpoint:
    note = "" if step is not None else "its step is not known: it stands at 0"
    return Checkpoint(harmless(path.name), step or 0, str(path), note=note)


def _with_model(path: Path) -> list[Checkpoint]:
    """A folder with a model in it; a Trainer also leaves checkpoints there, and the model is the last of them."""
    steps = {
        folder: step for folder, step in _steps_of_folders(path).items() if has_weights(folder)
    }
    if not steps:
        named = step_of(path.name)
        return [_alone(path, trained_steps(path) if named is None else named)]
    checkpoints, step = _in_order(steps), trained_steps(path)
    note = (
        ""
        if step is not None
        else "the model in the folder of the checkpoints; its step is not known, it is put last"
    )
    step = checkpoints[-1].step + 1 if step is None else step
    return [*checkpoints, Checkpoint(harmless(path.name), step, str(path), note=note)]


def _remote(source: str, revisions: str | Sequence[str] | None) -> list[Checkpoint]:
    repo, file = hub.with_file(source)
    hub.check(repo)
    names = ["main"] if revisions is None else _choose(revisions, None, repo)
    steps = [step_of(name) for name in names]
    after, checkpoints = max((step for step in steps if step is not None), default=-1) + 1, []
    for name, step in zip(names, steps, strict=True):
        note = ""
        if step is None:
            note = (
                "its name has no step: it is put after those that have one"
                if len(names) > 1
                else ""
            )
            step, after = after, after + 1
        checkpoints.append(Checkpoint(name, step, repo=repo, note=note, file=file))
    return checkpoints


def _choose(
    revisions: str | Sequence[str], available: list[tuple[str, int]] | None, repo: str | None = None
) -> list[str]:
    """Names of the chosen revisions; what there is on the hub is asked for only where it matters."""

    def there() -> list[tuple[str, int]]:
        if available is not None:
            return available
        assert repo is not None
        with_step = [
            (name, step) for name in hub.branches(repo) if (step := step_of(name)) is not None
        ]
        if not with_step:
            raise ValueError(
                f"no branch of {repo} has a step in its name: name the revisions one by one"
            )
        return sorted(with_step, key=lambda item: item[1])

    if not isinstance(revisions, str):
        return _checked(list(revisions))
    text = revisions.strip()
    if text == "pythia":
        return [f"step{n}" for n in pythia_steps()]
    if text == "all":
        return [name for name, _ in there()]
    if text == "log" or text.startswith("log:"):
        return log_spaced(there(), _count(text))
    if match := _RANGE.fullmatch(text):
        first, last, stride = int(match[1]), int(match[2]), int(match[3]) if match[3] else None
        if first > last or stride == 0:
            raise ValueError(f"the range {text!r} is empty: give FIRST..LAST or FIRST..LAST:STRIDE")
        if stride is not None and available is None:
            return [f"step{n}" for n in range(first, last + 1, stride)]
        chosen = [
            n
            for n, step in there()
            if first <= step <= last and (step - first) % (stride or 1) == 0
        ]
        if not chosen:
            raise ValueError(
                f"no checkpoint has a step in {text}: there are {_some([n for n, _ in there()])}"
            )
        return chosen
    return _checked([name.strip() for name in text.split(",")])


def _checked(names: list[str]) -> list[str]:
    for name in names:
        if not name or ".." in name or name.startswith("/") or not re.fullmatch(r"[\w./+-]+", name):
            raise ValueError(
                f"{name!r} is no revision: give names as step1000,step2000, a range 0..1000 or 0..1000:100, or one of "
                "pythia, all, log, log:20"
            )
    return list(dict.fromkeys(names))


def pythia_steps() -> list[int]:
    """The 154 steps at which Pythia's checkpoints were saved."""
    return [0, *(2**n for n in range(10)), *range(1000, 143_001, 1000)]


def _count(text: str) -> int:
    number = text.partition(":")[2] or str(LOG)
    if not number.isdigit() or int(number) < 1:
        raise ValueError(f"{text!r}: how many? Give log:20 or the like")
    return int(number)


def log_spaced(available: list[tuple[str, int]], count: int) -> list[str]:
    """About ``count`` of them, evenly over log(step), with the first and the last."""
    if len(available) <= count:
        return [name for name, _ in available]
    if count == 1:
        return [available[-1][0]]
    places = [math.log1p(step) for _, step in available]
    targets = [places[0] + (places[-1] - places[0]) * n / (count - 1) for n in range(count)]
    chosen = {min(range(len(places)), key=lambda i: abs(places[i] - target)) for target in targets}
    while len(chosen) < count:  # several targets had one nearest: fill the widest gaps
        rest = [i for i in range(len(places)) if i not in chosen]
        chosen.add(max(rest, key=lambda i: min(abs(places[i] - places[j]) for j in chosen)))
    return [available[i][0] for i in sorted(chosen)]


def _some(names: list[str]) -> str:
    return ", ".join(names[:6]) + (f", … ({len(names)} in all)" if len(names) > 6 else "")
