"""Which checkpoints a source stands for: the steps of one model, or several models.

A source is a folder, a file, the id of a model on the hub, or the name of a packaged model. A
`Selection` is either a *series* (checkpoints of one model, in the order of their steps) or a
*comparison* (models without steps, in the order in which they were given).
"""

from __future__ import annotations

import os
import re
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from joma._checkpoints import hub
from joma._checkpoints.folder import NAMES, SUFFIXES, has_weights, lone_file, refusal, weight_files
from joma._checkpoints.model import with_family
from joma._checkpoints.revision import Revision
from joma._checkpoints.revision_choice import Listing, check_names, choose_revisions, list_some
from joma._checkpoints.steps import step_of, steps_of_files, trained_steps
from joma._checkpoints.tensors import Tensors
from joma._data.packaged import MODELS, packaged
from joma._runs.names import harmless

Source = str | os.PathLike[str]
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
_UNKNOWN_STEP = "unknown step; plotted at step 0"


@dataclass(frozen=True)
class Checkpoint:
    """One checkpoint: a local folder or file, or a revision on the hub.

    Attributes:
        name: unique within a selection; it names the row.
        step: the training step; in a comparison, the place of the model.
        path: of a local checkpoint.
        repo: the id of a model on the hub.
        note: a remark for the row.
        file: the file of weights to read, if the repository has several.
        branch: the revision on the hub, if it is not `name`.
        is_listed: False if it was asked for by name and does not exist.
    """

    name: str
    step: int
    path: str | None = None
    repo: str | None = None
    note: str = ""
    file: str | None = None
    branch: str | None = None
    is_listed: bool = True

    def revision(
        self,
        report: hub.DownloadProgress | None = None,
        keep: bool = False,
        limit: int | None = None,
        dry: bool = False,
    ) -> Revision | None:
        """Return its files on the hub; None for a local checkpoint."""
        if self.repo is None:
            return None
        return Revision(self.repo, self.branch or self.name, report, keep, limit, dry, self.file)

    def exists(self) -> bool:
        """True if the folder or file of a local checkpoint is there."""
        return self.path is not None and Path(self.path).exists()

    def open(self) -> Tensors:
        """Return the tensors of a local checkpoint."""
        assert self.path is not None
        return with_family(Tensors.open(Path(self.path)))


@dataclass(frozen=True)
class Selection:
    """Checkpoints to measure.

    Attributes:
        checkpoints: in the order of their steps, or the models in the order in which they were given.
        is_comparison: True for models without steps, which are compared by name.
    """

    checkpoints: tuple[Checkpoint, ...]
    is_comparison: bool = False

    @property
    def names(self) -> list[str]:
        """The names of the checkpoints."""
        return [checkpoint.name for checkpoint in self.checkpoints]

    def baselines(self) -> dict[str, Checkpoint | None]:
        """Return, by name, the checkpoint that each one's change is measured from.

        In a series that is the last one with a smaller step, in a comparison the first model. The
        first checkpoint has none.
        """
        if self.is_comparison:
            base = self.checkpoints[0]
            since: dict[str, Checkpoint | None] = dict.fromkeys(self.names, base)
            since[base.name] = None
            return since
        ordered = sorted(self.checkpoints, key=lambda checkpoint: checkpoint.step)
        steps = [checkpoint.step for checkpoint in ordered]
        since = {}
        for checkpoint in self.checkpoints:
            earlier_count = bisect_left(steps, checkpoint.step)
            since[checkpoint.name] = ordered[earlier_count - 1] if earlier_count else None
        return since


def select_checkpoints(
    source: Source | Sequence[Source], revisions: str | Sequence[str] | None = None
) -> Selection:
    """Return the checkpoints of one source, or the models of several.

    Arguments:
        source: one source, or a list of them.
        revisions: which checkpoints of a series, see `revision_choice`. With several sources, one
            revision, which is taken of each.
    """
    if isinstance(source, (str, os.PathLike)):
        return _select_one(os.fspath(source), revisions)
    sources = [os.fspath(one) for one in source]
    if not sources:
        raise ValueError("no model: give a folder of checkpoints or the id of a model on the hub")
    if len(sources) == 1:
        return _select_one(sources[0], revisions)
    return _select_several(sources, revisions)


def find_checkpoints(
    source: Source, revisions: str | Sequence[str] | None = None
) -> list[Checkpoint]:
    """Return the checkpoints of a series; refuse models without steps."""
    selection = select_checkpoints(source, revisions)
    if selection.is_comparison:
        raise ValueError(
            f"{os.fspath(source)} holds {len(selection.names)} models whose names have no step "
            f"({list_some(selection.names)}), and no series of checkpoints: joma scan compares them"
        )
    return list(selection.checkpoints)


# one source


def _select_one(source: str, revisions: str | Sequence[str] | None) -> Selection:
    if not source:
        raise ValueError("no model: give a folder of checkpoints or the id of a model on the hub")
    path = Path(source).expanduser().absolute()
    if path.exists():
        return _select_local(path, revisions)
    package_path = packaged(source)
    if package_path is not None:
        model = MODELS[source.partition("/")[0]]
        selection = _select_local(package_path, revisions, model.names)
        noted = []
        for checkpoint in selection.checkpoints:
            noted.append(replace(checkpoint, note=_join_notes(model.about, checkpoint.note)))
        return replace(selection, checkpoints=tuple(noted))
    is_path = source.startswith((".", "/", "~")) or source.endswith("/")
    if is_path or not _HUB_ID.fullmatch(hub.with_file(source)[0]):
        raise ValueError(
            f"there is no folder or file {path}; give one, or the id of a model on the hub"
        )
    return Selection(_note_shared_steps(_remote(source, revisions)))


def _select_local(
    path: Path, revisions: str | Sequence[str] | None, order: Sequence[str] = ()
) -> Selection:
    """Return the series or the models at a path; `order` are the names of models that come first."""
    models = _models_inside(path)
    if len(models) > 1:
        rank = {name: place for place, name in enumerate(order)}
        models.sort(key=lambda folder: (rank.get(folder.name, len(rank)), folder.name))
        return _compare([_unknown(folder) for folder in _named(models, path, revisions)])
    if models:
        path = models[0]
    present = _series_at(path)
    if revisions is None:
        return Selection(_note_shared_steps(present))
    listing = [(checkpoint.name, checkpoint.step) for checkpoint in present]
    by_name = {checkpoint.name: checkpoint for checkpoint in present}
    by_step = {checkpoint.step: checkpoint for checkpoint in reversed(present)}
    checkpoints = []
    for name in choose_revisions(revisions, lambda: listing, can_invent=False):
        step = step_of(name)
        match = by_name.get(name)
        if match is None and step is not None:
            match = by_step.get(step)
        if match is None:
            # It keeps its place: its row will report that it does not exist.
            match = Checkpoint(name, step or 0, str(path / name), is_listed=False)
        checkpoints.append(match)
    return Selection(_note_shared_steps(checkpoints))


def _models_inside(path: Path) -> list[Path]:
    """Return the sub-folders that are models, if the folder itself is neither a model nor a series."""
    if not path.is_dir() or _is_training_run(path) or has_weights(path):
        return []
    if _steps_of_entries(path) or lone_file(path) is not None or refusal(path):
        return []
    models = []
    for child in sorted(path.iterdir()):
        is_hidden = child.name.startswith(".")
        if not is_hidden and child.is_dir() and (has_weights(child) or lone_file(child)):
            models.append(child)
    return models


def _named(models: list[Path], path: Path, revisions: str | Sequence[str] | None) -> list[Path]:
    """Return those of the models that are asked for by name."""
    if revisions is None:
        return models
    by_name = {folder.name: folder for folder in models}
    names = revisions.split(",") if isinstance(revisions, str) else list(revisions)
    names = check_names([name.strip() for name in names])
    for name in names:
        if name not in by_name:
            raise ValueError(f"{path} has no model {name!r}: it has {list_some(list(by_name))}")
    return [by_name[name] for name in names]


def _series_at(path: Path) -> list[Checkpoint]:
    """Return all checkpoints at a path: a file, a model, a run of `joma train`, or a folder of them."""
    if path.is_file():
        if path.suffix not in SUFFIXES:
            raise ValueError(
                f"{path} is no file of weights: their names end in {', '.join(SUFFIXES)}"
            )
        steps = steps_of_files(weight_files(path.parent))
        return [_alone(path, steps.get(path, step_of(path.stem)))]
    if _is_training_run(path):
        path = path / "checkpoints"
    if has_weights(path):
        return _model_with_checkpoints(path)
    steps = _steps_of_entries(path)
    if steps:
        return _in_order(steps)
    file = lone_file(path)
    if file is not None:
        for step in (step_of(path.name), trained_steps(path), step_of(file.stem)):
            if step is not None:
                return [_alone(path, step)]
        return [_alone(path, None)]
    if not any(path.iterdir()):
        raise ValueError(f"no checkpoints in {path}: the folder is empty")
    raise ValueError(
        refusal(path)
        or f"no checkpoints in {path}: looked for {', '.join(NAMES)}, folders step-*/ or "
        f"checkpoint-*/, folders of models, and files that differ in a number and end in "
        f"{', '.join(SUFFIXES)}"
    )


def _is_training_run(path: Path) -> bool:
    """True for the folder that `joma train` writes."""
    return (path / "run.json").is_file() and (path / "checkpoints").is_dir()


def _steps_of_entries(path: Path) -> dict[Path, int]:
    """Return the files and folders inside a folder whose names have a step."""
    return steps_of_files(weight_files(path)) | _steps_of_folders(path)


def _steps_of_folders(path: Path) -> dict[Path, int]:
    """Return the folders whose names have a step, also those without weights: their rows report it."""
    steps = {}
    for entry in path.iterdir():
        if entry.name.startswith(".") or not entry.is_dir():
            continue
        step = step_of(entry.name)
        if step is None:
            continue
        # A bare number may be anything: it counts as a step only with weights inside.
        if not entry.name.isdecimal() or has_weights(entry):
            steps[entry] = step
    return steps


def _in_order(steps: dict[Path, int]) -> list[Checkpoint]:
    checkpoints = [Checkpoint(harmless(path.name), step, str(path)) for path, step in steps.items()]
    return sorted(checkpoints, key=lambda checkpoint: (checkpoint.step, checkpoint.name))


def _alone(path: Path, step: int | None) -> Checkpoint:
    if step is None:
        return _unknown(path)
    return Checkpoint(harmless(path.name), step, str(path))


def _unknown(path: Path) -> Checkpoint:
    return Checkpoint(harmless(path.name), 0, str(path), note=_UNKNOWN_STEP)


def _model_with_checkpoints(path: Path) -> list[Checkpoint]:
    """Return the model in a folder, after the checkpoints that a Trainer has left next to it."""
    steps = {}
    for folder, step in _steps_of_folders(path).items():
        if has_weights(folder):
            steps[folder] = step
    last_step = trained_steps(path)
    if not steps:
        named = step_of(path.name)
        return [_alone(path, last_step if named is None else named)]
    checkpoints = _in_order(steps)
    note = ""
    if last_step is None:
        last_step = checkpoints[-1].step + 1
        note = "the model in the folder of the checkpoints; its step is not known, it is put last"
    return [*checkpoints, Checkpoint(harmless(path.name), last_step, str(path), note=note)]


def _remote(source: str, revisions: str | Sequence[str] | None) -> list[Checkpoint]:
    repo, file = hub.with_file(source)
    hub.check(repo)
    if revisions is None:
        names = ["main"]
    else:
        names = choose_revisions(revisions, lambda: _branches(repo), can_invent=True)
    steps = [step_of(name) for name in names]
    # Names without a step, such as main, come after those that have one.
    next_step = max((step for step in steps if step is not None), default=-1) + 1
    checkpoints = []
    for name, step in zip(names, steps, strict=True):
        note = ""
        if step is None:
            if len(names) > 1:
                note = "its name has no step: it is put after those that have one"
            step = next_step
            next_step += 1
        checkpoints.append(Checkpoint(name, step, repo=repo, note=note, file=file))
    return checkpoints


def _branches(repo: str) -> Listing:
    """Return the branches on the hub whose names have a step."""
    listing = []
    for name in hub.branches(repo):
        step = step_of(name)
        if step is not None:
            listing.append((name, step))
    if not listing:
        raise ValueError(
            f"no branch of {repo} has a step in its name: name the revisions one by one"
        )
    return sorted(listing, key=lambda item: item[1])


def _note_shared_steps(checkpoints: Sequence[Checkpoint]) -> tuple[Checkpoint, ...]:
    """Return each checkpoint once, with a note if another one has the same step."""
    checkpoints = list(dict.fromkeys(checkpoints))
    names: dict[int, list[str]] = {}
    for checkpoint in checkpoints:
        names.setdefault(checkpoint.step, []).append(checkpoint.name)
    noted = []
    for checkpoint in checkpoints:
        others = [name for name in names[checkpoint.step] if name != checkpoint.name]
        if others:
            shared = f"step {checkpoint.step} is also that of {list_some(others)}"
            checkpoint = replace(checkpoint, note=_join_notes(checkpoint.note, shared))
        noted.append(checkpoint)
    return tuple(noted)


def _join_notes(*notes: str) -> str:
    return "; ".join(note for note in notes if note)


# several models


def _select_several(sources: list[str], revisions: str | Sequence[str] | None) -> Selection:
    models: list[Checkpoint] = []
    addresses: list[tuple[str, ...]] = []
    for source in sources:
        selection = _select_one(source, revisions)
        if selection.is_comparison:
            models += selection.checkpoints
            addresses += [_address(model) for model in selection.checkpoints]
            continue
        model = _one_model(source, selection.checkpoints)
        path = Path(source).expanduser().absolute()
        models.append(model)
        # The model of a training has the name of its run, not that of its last step.
        addresses.append(path.parts if _is_training_run(path) else _address(model))
    return _compare(models, addresses)


def _one_model(source: str, checkpoints: Sequence[Checkpoint]) -> Checkpoint:
    """Return the model that a source stands for in a comparison; refuse a series."""
    model = checkpoints[-1]
    path = Path(source).expanduser().absolute()
    if _is_training_run(path):
        return replace(model, note=f"{model.name}, the last of {len(checkpoints)} checkpoints")
    if len(checkpoints) == 1:
        return model
    others = [checkpoint.name for checkpoint in checkpoints[:-1]]
    is_also_a_model = model.path == str(path)
    if not is_also_a_model:
        names = [checkpoint.name for checkpoint in checkpoints]
        raise ValueError(
            f"{source} is a series of {len(checkpoints)} checkpoints ({list_some(names)}): give "
            "one of them, or scan each series alone and draw the runs together with joma report"
        )
    note = f"the folder also holds {list_some(others)}, which are not compared: name them for that"
    return replace(model, note=note)


def _compare(
    models: Sequence[Checkpoint], addresses: Sequence[tuple[str, ...]] | None = None
) -> Selection:
    """Return a comparison, in which each model has a name of its own and a place instead of a step."""
    if addresses is None:
        addresses = [_address(model) for model in models]
    for place, address in enumerate(addresses):
        if address in addresses[:place]:
            raise ValueError(
                f"{'/'.join(address)} is given twice: a comparison takes each model once"
            )
    named = []
    for place, (model, name) in enumerate(zip(models, _distinct_names(addresses), strict=True)):
        note = model.note.replace(_UNKNOWN_STEP, "").strip("; ")
        branch = None
        if model.repo is not None:
            branch = model.branch or model.name
        named.append(replace(model, name=name, step=place, note=note, branch=branch))
    return Selection(tuple(named), is_comparison=True)


def _address(model: Checkpoint) -> tuple[str, ...]:
    """Return the parts of a path, or of an id on the hub with its revision."""
    if model.repo is None:
        return Path(str(model.path)).parts
    revision = model.branch or model.name
    parts = model.repo.split("/")
    if model.file is not None:
        parts.append(model.file)
    if revision != "main":
        parts[-1] += f"@{revision}"
    return tuple(parts)


def _distinct_names(addresses: Sequence[tuple[str, ...]]) -> list[str]:
    """Return the shortest end of each address that no other one has.

    >>> _distinct_names([("/", "a", "model"), ("/", "b", "model"), ("/", "other")])
    ['a/model', 'b/model', 'other']
    """
    names = []
    for address in addresses:
        length = 1
        while length < len(address):
            ending = address[-length:]
            same = [other for other in addresses if other[-length:] == ending]
            if len(same) == 1:
                break
            length += 1
        names.append(harmless("/".join(address[-length:])))
    return names
