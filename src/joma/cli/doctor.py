"""`joma doctor`: what is installed, what is missing, and the command for it."""

from __future__ import annotations

import importlib
import os
import platform
import re
import shutil
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Annotated, Any

import typer

from joma.cli.terminal import AsJson, console, escape, print_facts, print_json, print_table, say

_FOR_DEVELOPERS = ("bench", "docs", "dev")  # extras that are not for users
_BROWSERS = ("chromium", "chromium-browser", "google-chrome", "firefox")
_HUB = "https://huggingface.co"
_SECONDS = 3.0  # that the network may take


@dataclass(frozen=True)
class Part:
    """A distribution that joma needs, or can use."""

    name: str
    needed: tuple[str, ...]  # by "joma" itself, or by these extras
    installed: str | None  # its version
    wanted: str  # as in ">=2.6"
    problem: str = ""

    @property
    def ok(self) -> bool:
        """Is it there, as wanted?"""
        return not self.problem

    @property
    def core(self) -> bool:
        """Does joma need it, whatever one does?"""
        return "joma" in self.needed


def _doctor(
    network: Annotated[
        bool, typer.Option("--network", help="Try to reach the Hugging Face hub.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Say what is installed, what is missing and how to get it; where data and models are kept. 0 if the core works."""
    parts = list(_parts())
    core = [part for part in parts if part.core]
    broken = _broken()
    facts = {
        "python": f"{platform.python_version()} ({sys.executable})",
        "system": f"{platform.system()} {platform.release()}, {platform.machine()}",
        **_devices(broken),
        "offline mode": "on (HF_HUB_OFFLINE)" if _offline() else "off",
        **({"hub": _reached()} if network else {}),
        "browser": _browser(),
    }
    folders = _folders()
    todo = _todo(core, parts, broken)
    ok = not broken and all(part.ok for part in core)
    if as_json:
        told = {
            "parts": [asdict(part) | {"ok": part.ok} for part in parts],
            "broken": broken,
            "folders": folders,
        }
        print_json({"ok": ok, **facts, **told, "todo": todo})
    else:
        _show(facts, parts, broken, folders, todo)
    if not ok:
        raise typer.Exit(1)


def _parts() -> Iterable[Part]:
    """joma itself, then what its metadata says that it and its extras for users need."""
    from joma import __version__

    yield Part("joma", ("joma",), __version__, "")
    try:
        lines = requires("joma") or []
    except PackageNotFoundError:  # run from its source, without being installed
        lines = []
    needed: dict[
        tuple[str, str], list[str]
    ] = {}  # (name, wanted) -> by whom: an extra may contain another
    for line in lines:
        requirement, _, marker = line.partition(";")
        name, wanted = re.fullmatch(
            r"\s*([\w.-]+)(?:\[.*?\])?\s*\(?(.*?)\)?\s*", requirement
        ).groups()  # type: ignore[union-attr]
        extra = re.search(r"extra == ['\"]([\w.-]+)['\"]", marker)
        if (whose := extra[1] if extra else "joma") not in _FOR_DEVELOPERS:
            needed.setdefault((name, wanted), []).append(whose)
    for (name, wanted), extras in needed.items():
        try:
            found: str | None = version(name)
        except PackageNotFoundError:
            found = None
        problem = (
            "not installed"
            if found is None
            else ""
            if _fits(found, wanted)
            else f"{wanted} is needed"
        )
        yield Part(name, tuple(sorted(extras)), found, wanted, problem)


def _fits(found: str, wanted: str) -> bool:
    try:
        from packaging.specifiers import SpecifierSet
    except ImportError:  # it comes with Altair; without it nothing is known
        return True
    return SpecifierSet(wanted).contains(found, prereleases=True)


def _broken() -> dict[str, str]:
    """Libraries that are needed and cannot be imported, with the reason."""
    reasons = {}
    for name in ("numpy", "scipy", "pandas", "torch"):
        try:
            importlib.import_module(name)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # a broken library raises whatever it likes
            reasons[name] = (
                f"{type(error).__name__}: {error}".splitlines() or [type(error).__name__]
            )[0]
    return reasons


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
    return any(os.environ.get(name, "").upper() in ("1", "ON", "YES", "TRUE") for name in
               ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"))  # fmt: skip


def _reached() -> str:
    """Whether the hub answers."""
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
    return next(
        filter(None, map(shutil.which, _BROWSERS)), "none found; pages can be opened by hand"
    )


def _folders() -> dict[str, dict[str, Any]]:
    """What is kept where, and how large it is."""
    from joma._data.folders import cache_folder

    hub = Path(os.environ.get("HF_HOME", Path.home() / ".cache" / "huggingface"))
    places: dict[str, Path | None] = {"cache of joma": cache_folder(), "cache of the hub": hub}
    for name in ("JOMA_DATA", "JOMA_MODELS"):
        places[name] = Path(os.environ[name]) if os.environ.get(name) else None
    return {
        name: {
            "path": None if path is None else str(path),
            "bytes": None if path is None else _size(path),
        }
        for name, path in places.items()
    }


def _size(path: Path) -> int | None:
    """Bytes of all files in a folder, links not followed; None if there is no such folder."""
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


def _todo(core: Iterable[Part], parts: Iterable[Part], broken: dict[str, str]) -> list[str]:
    """What to type."""
    lines = []
    if any(not part.ok for part in core):
        lines.append("pip install --upgrade joma")
    lines += [f"pip install --force-reinstall {name}" for name in broken]
    extras = dict.fromkeys(
        extra for part in parts if not part.core and not part.ok for extra in part.needed
    )
    return lines + [f"pip install 'joma[{extra}]'" for extra in extras]


def _show(
    facts: dict[str, str],
    parts: list[Part],
    broken: dict[str, str],
    folders: dict[str, Any],
    todo: list[str],
) -> None:
    from rich.filesize import decimal

    out = console()
    print_facts(out, {name: escape(text) for name, text in facts.items()})
    out.print()
    rows = []
    for part in parts:
        state, style = broken.get(part.name, part.problem) or "ok", "green"
        if state != "ok":
            style = "red" if part.core else "yellow"
        whose = ", ".join(part.needed)
        rows.append(
            (
                part.name,
                part.installed or "",
                part.wanted,
                whose,
                f"[{style}]{escape(state)}[/{style}]",
            )
        )
    print_table(out, ("package", "version", "wanted", "for", "*state"), rows)
    out.print()
    told = {}
    for name, place in folders.items():
        size = "not there yet" if place["bytes"] is None else decimal(place["bytes"])
        told[name] = "not set" if place["path"] is None else escape(f"{place['path']} ({size})")
    print_facts(out, told)
    if todo:
        out.print("\n[bold]What is missing[/bold]")
        for line in todo:
            say(f"  {line}", out)


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("doctor")(_doctor)
