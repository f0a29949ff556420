"""`joma doctor`: what is installed, what is missing, and the command for it."""

from __future__ import annotations

import importlib
import os
import platform
import shutil
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from joma._extras import pip_command
from joma.cli.terminal import AsJson, console, escape, print_facts, print_json, print_table, say

if TYPE_CHECKING:
    from packaging.requirements import Requirement
    from rich.console import Console

# Extras that are not for users, or that only sum up others.
_NOT_LISTED = ("bench", "docs", "dev", "all")
_PURPOSES = {
    "theory": "flows, closed forms, claims",
    "report": "figures and pages",
    "paper": "joma reproduce, simulate and superpose: theory and report",
    "hf": "models and corpora of the hub, the Trainer",
    "gguf": "GGUF files",
    "smollm2": "SmolLM2, with its tokenizer",
    "lightning": "Lightning's Trainer",
    "ray": "clusters",
}
# Libraries that are often installed and broken: those of the core, and those of extras.
_CORE_LIBRARIES = ("numpy", "pandas", "torch")
_EXTRA_LIBRARIES = ("scipy",)
_BROWSERS = ("chromium", "chromium-browser", "google-chrome", "firefox")
_HUB = "https://huggingface.co"
_SECONDS = 3.0  # that the network may take


@dataclass(frozen=True)
class RequiredPackage:
    """A distribution that joma or its extras require.

    Attributes:
        name: of the distribution.
        needed: "joma", or the extras that require it.
        installed: its version, None if it is not installed.
        wanted: the versions that fit, as in ">=2.6".
        problem: "" if an installed version fits.
    """

    name: str
    needed: tuple[str, ...]
    installed: str | None
    wanted: str
    problem: str = ""

    @property
    def ok(self) -> bool:
        """True if a version that fits is installed."""
        return not self.problem

    @property
    def is_core(self) -> bool:
        """True if joma needs it without extras, too."""
        return "joma" in self.needed


def _doctor(
    network: Annotated[
        bool, typer.Option("--network", help="Try to reach the Hugging Face hub.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Report what is installed, what is missing, how to get it, and where data and models are kept.

    The exit status is 0 if the core works. Extras are optional.
    """
    packages = list(_packages())
    core = [package for package in packages if package.is_core]
    broken = _broken()
    facts = {
        "python": f"{platform.python_version()} ({sys.executable})",
        "system": f"{platform.system()} {platform.release()}, {platform.machine()}",
        **_devices(broken),
        "offline mode": "on (HF_HUB_OFFLINE)" if _offline() else "off",
    }
    if network:
        facts["hub"] = _reached()
    facts["browser"] = _browser()
    extras = _extras(packages, broken)
    folders = _folders()
    todo = _todo(core, broken)
    ok = not broken.keys() & set(_CORE_LIBRARIES) and all(package.ok for package in core)
    if as_json:
        details = {
            "parts": [asdict(package) | {"ok": package.ok} for package in packages],
            "broken": broken,
            "extras": extras,
            "folders": folders,
        }
        print_json({"ok": ok, **facts, **details, "todo": todo})
    else:
        _show(facts, core, extras, broken, folders, todo)
    if not ok:
        raise typer.Exit(1)


def _packages() -> Iterator[RequiredPackage]:
    """Yield joma itself, then what its metadata says that it and its extras for users require."""
    from joma import __version__

    yield RequiredPackage("joma", ("joma",), __version__, "")
    # (name, versions) -> who requires it: an extra may contain another
    needed: dict[tuple[str, str], list[str]] = {}
    for requirement, extra in _requirements():
        owner = extra or "joma"
        if owner not in _NOT_LISTED:
            key = (requirement.name, str(requirement.specifier))
            needed.setdefault(key, []).append(owner)
    for (name, wanted), owners in needed.items():
        installed = _version(name)
        problem = ""
        if installed is None:
            problem = "not installed"
        elif not _fits(installed, wanted):
            problem = f"{wanted} is needed"
        yield RequiredPackage(name, tuple(sorted(owners)), installed, wanted, problem)


def _requirements() -> Iterator[tuple[Requirement, str]]:
    """Yield each requirement of this platform with its extra, "" for the core."""
    from importlib import metadata

    from packaging.requirements import Requirement

    try:
        described = metadata.metadata("joma")
    except metadata.PackageNotFoundError:  # run from its source, without being installed
        return
    requirements = [Requirement(line) for line in described.get_all("Requires-Dist") or []]
    for extra in ("", *(described.get_all("Provides-Extra") or [])):
        for requirement in requirements:
            marker = requirement.marker
            applies = marker is None or marker.evaluate({"extra": extra})
            is_of_the_core = marker is None or marker.evaluate({"extra": ""})
            if applies and (not extra or not is_of_the_core):
                yield requirement, extra


def _version(name: str) -> str | None:
    from importlib import metadata

    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _fits(installed: str, wanted: str) -> bool:
    from packaging.specifiers import SpecifierSet

    return SpecifierSet(wanted).contains(installed, prereleases=True)


def _broken() -> dict[str, str]:
    """Return the libraries that should be there and cannot be imported, with the reason."""
    installed_extras = [name for name in _EXTRA_LIBRARIES if _version(name) is not None]
    reasons = {}
    for name in (*_CORE_LIBRARIES, *installed_extras):
        try:
            importlib.import_module(name)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # a broken library raises whatever it likes
            lines = f"{type(error).__name__}: {error}".splitlines()
            reasons[name] = lines[0]
    return reasons


def _extras(
    packages: Iterable[RequiredPackage], broken: dict[str, str]
) -> dict[str, dict[str, Any]]:
    """Return, per extra, what is missing or broken of it and the command that installs it."""
    extras: dict[str, dict[str, Any]] = {}
    for package in packages:
        if package.is_core:
            continue
        for extra in package.needed:
            entry = extras.setdefault(extra, {"missing": []})
            problem = broken.get(package.name) or package.problem
            if problem:
                entry["missing"].append(f"{package.name} ({problem})")
    for extra, entry in extras.items():
        entry["ok"] = not entry["missing"]
        entry["command"] = pip_command(extra)
    return extras


def _devices(broken: dict[str, str]) -> dict[str, str]:
    cores = getattr(os, "process_cpu_count", os.cpu_count)()
    if "torch" in broken:
        return {"processor": f"{cores} cores"}
    import torch

    found = {"processor": f"{cores} cores, {torch.get_num_threads()} threads of PyTorch"}
    try:
        names = [torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count())]
        found["cuda"] = ", ".join(names) if torch.cuda.is_available() and names else "none"
    except Exception as error:  # a driver that does not fit
        found["cuda"] = f"broken: {error}".splitlines()[0]
    return found


def _offline() -> bool:
    variables = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    return any(os.environ.get(name, "").upper() in ("1", "ON", "YES", "TRUE") for name in variables)


def _reached() -> str:
    """Return a sentence: does the hub answer?"""
    from urllib.error import HTTPError
    from urllib.request import Request, urlopen

    host = os.environ.get("HF_ENDPOINT", _HUB)
    try:
        with urlopen(Request(host, method="HEAD"), timeout=_SECONDS):
            return f"{host} answers"
    except HTTPError as error:
        return f"{host} answers ({error.code})"
    except (OSError, ValueError) as error:
        return f"{host} cannot be reached: {getattr(error, 'reason', error)}"


def _browser() -> str:
    for name in _BROWSERS:
        path = shutil.which(name)
        if path is not None:
            return path
    return "none found; pages can be opened by hand"


def _folders() -> dict[str, dict[str, Any]]:
    """Return the folders in which data are kept, with their sizes."""
    from joma._data.folders import cache_folder

    hub = Path(os.environ.get("HF_HOME", Path.home() / ".cache" / "huggingface"))
    places: dict[str, Path | None] = {"cache of joma": cache_folder(), "cache of the hub": hub}
    for name in ("JOMA_DATA", "JOMA_MODELS"):
        places[name] = Path(os.environ[name]) if os.environ.get(name) else None
    folders: dict[str, dict[str, Any]] = {}
    for name, path in places.items():
        folders[name] = {"path": None, "bytes": None}
        if path is not None:
            folders[name] = {"path": str(path), "bytes": _size(path)}
    return folders


def _size(path: Path) -> int | None:
    """Return the bytes of all files in a folder, links not followed; None if there is no such folder."""
    if not path.is_dir():
        return None
    total = 0
    for folder, _, files in os.walk(path, onerror=lambda error: None):
        for name in files:
            try:
                total += os.lstat(os.path.join(folder, name)).st_size
            except OSError:
                continue
    return total


def _todo(core: Iterable[RequiredPackage], broken: dict[str, str]) -> list[str]:
    """Return the commands that mend the core."""
    commands = []
    if any(not package.ok for package in core):
        commands.append("pip install --upgrade joma")
    commands += [f"pip install --force-reinstall {name}" for name in broken]
    return commands


def _show(
    facts: dict[str, str],
    core: Iterable[RequiredPackage],
    extras: dict[str, dict[str, Any]],
    broken: dict[str, str],
    folders: dict[str, dict[str, Any]],
    todo: list[str],
) -> None:
    out = console()
    print_facts(out, {name: escape(text) for name, text in facts.items()})
    out.print()
    rows = []
    for package in core:
        problem = broken.get(package.name) or package.problem
        state = f"[red]{escape(problem)}[/red]" if problem else "[green]ok[/green]"
        rows.append((package.name, package.installed or "", package.wanted, state))
    print_table(out, ("package", "version", "wanted", "*state"), rows)
    out.print()
    _show_extras(extras, out)
    _show_folders(folders, out)
    if todo:
        out.print("\n[bold]What is missing[/bold]")
        for command in todo:
            say(f"  {command}", out)


def _show_extras(extras: dict[str, dict[str, Any]], out: Console) -> None:
    """Print one row per extra, all of them optional, and the command for each that is missing."""
    if not extras:
        return
    rows = []
    for extra, entry in extras.items():
        state = "[green]installed[/green]"
        if entry["missing"]:
            state = escape("without " + ", ".join(entry["missing"]))
        rows.append((extra, _PURPOSES.get(extra, ""), state))
    print_table(out, ("optional extra", "*for", "*state"), rows)
    commands = [entry["command"] for entry in extras.values() if entry["missing"]]
    for command in commands:
        say(f"  {command}", out)
    out.print()


def _show_folders(folders: dict[str, dict[str, Any]], out: Console) -> None:
    from rich.filesize import decimal

    lines = {}
    for name, place in folders.items():
        if place["path"] is None:
            lines[name] = "not set"
            continue
        size = "empty"
        if place["bytes"] is not None:
            size = decimal(place["bytes"])
        lines[name] = escape(f"{place['path']} ({size})")
    print_facts(out, lines)


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("doctor")(_doctor)
