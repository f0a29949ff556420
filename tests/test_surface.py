"""Nothing that users could call, name or type in the first public state gets lost, or the changelog says why.

``surface.txt`` is what ``python tests/test_surface.py`` printed then: public names with their parameters and members,
commands with their options.
"""

import importlib
import inspect
import pydoc
import re
from pathlib import Path

import typer

import joma
from joma._train.simulate import simulate
from joma.cli import app
from joma.paper.exhibits import get, make_exhibit

HERE = Path(__file__).parent
CHANGES = (HERE.parent / "CHANGELOG.md").read_text(encoding="utf-8")
MODULES = ("joma", "joma.theory", "joma.theory.isotropic", "joma.paper.claims", "joma.integrations")
MODULES += (
    "joma.integrations.transformers",
    "joma.integrations.lightning",
    "joma.nn",
    "joma.models",
)
RETURNED = (
    "joma._measure.watch.watch.Watch",
    "joma._measure.watch.phases.Phase",
    "joma._checkpoints.scan.Scan",
)  # by public functions
RETURNED += ("joma._inspect.superposition.Superposition", "joma._runs.Run")


def public(value: type) -> list[str]:
    """The members of a class that joma wrote."""
    own = [base for base in value.__mro__ if base.__module__.split(".")[0] == "joma"]
    names = {
        name for base in own for name in (*vars(base), *getattr(base, "__dataclass_fields__", ()))
    }
    return sorted(name for name in names if not name.startswith("_"))


def is_exception(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, BaseException)


def parameters(value: object) -> list[str]:
    """The names of parameters that a caller can give; warnings and errors are not made by callers."""
    can_be_called = callable(value) and not is_exception(value)
    given = inspect.signature(value).parameters.values() if can_be_called else ()
    return [
        p.name
        for p in given
        if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) and not p.name.startswith("_")
    ]


def surface() -> dict[str, list[str]]:
    """Name -> its parameters as ``name=``, members as ``.name``, options as they are typed."""
    lines = {}
    for module in MODULES:
        loaded = importlib.import_module(module)
        for name in loaded.__all__:
            value = getattr(loaded, name)
            members = public(value) if isinstance(value, type) else []
            lines[f"{module}.{name}"] = [f"{p}=" for p in parameters(value)] + [
                f".{member}" for member in members
            ]
    for path in RETURNED:
        module, _, name = path.rpartition(".")
        lines[name] = [
            f".{member}" for member in public(getattr(importlib.import_module(module), name))
        ]
    for name, command in typer.main.get_command(app).commands.items():
        lines |= options(f"joma {name}", command)
    return lines


def options(name: str, command: object) -> dict[str, list[str]]:
    """The words of a command, and those of the commands below it."""
    words = [
        word
        for p in command.params
        for word in (
            (*p.opts, *p.secondary_opts) if p.param_type_name == "option" else (p.name.upper(),)
        )
    ]
    lines = {name: sorted(words)}
    for below, inner in getattr(command, "commands", {}).items():
        lines |= options(f"{name} {below}", inner)
    return lines


def first() -> dict[str, list[str]]:
    """Name or command -> its parts, of the first state."""
    lines = {}
    for line in (HERE / "surface.txt").read_text(encoding="utf-8").splitlines():
        name, parts = re.fullmatch(r"(joma(?: [a-z]+)+|\S+)((?: \S+)*)", line).groups()
        lines[name] = parts.split()
    return lines


def is_explained(name: str, part: str) -> bool:
    """Whether the changelog names it, in code marks: `JointFlow.forces` or `forces`; `--option` of a command."""
    word = part.strip(".=")
    owner = name.rpartition(".")[2]
    return any(
        re.fullmatch(rf"(?:joma\S*\.)?(?:{owner}\.)?{word}=?", quoted)
        for quoted in re.findall(r"`([^`]+)`", CHANGES)
    )


def test_no_public_name_parameter_member_command_or_option_is_lost():
    now = surface()
    lost = [
        name
        for name in first()
        if name not in now and not is_explained(name, name.rpartition(".")[2])
    ]
    lost += [
        f"{name} {part}"
        for name, parts in first().items()
        for part in parts
        if part not in now.get(name, parts) and not is_explained(name, part)
    ]
    assert lost == []


def callables():
    """Public functions, classes, and the public methods of classes, by their full names."""
    for module in MODULES:
        loaded = importlib.import_module(module)
        for name in loaded.__all__:
            value = getattr(loaded, name)
            if callable(value) and not is_exception(value):
                yield f"{module}.{name}", value
            for member in public(value) if isinstance(value, type) else ():
                if inspect.isfunction(method := inspect.getattr_static(value, member, None)):
                    yield f"{module}.{name}.{member}", method


def test_signatures_are_readable():
    """No `<function <lambda> at 0x…>` as a default."""
    assert [name for name, value in callables() if " at 0x" in str(inspect.signature(value))] == []


def test_python_has_the_verbs_of_the_command_line():
    commands = {info.name for info in app.registered_commands} - {
        "claims",
        "demo",
        "docs",
        "doctor",
        "gauges",
        "hierarchy",
        "runs",
        "status",
        "sweep",
        "train",
    }
    assert commands <= set(joma.__all__)
    text = pydoc.render_doc(joma, renderer=pydoc.plaintext)
    assert all(
        f"\n    {verb}(" in text for verb in ("watch", "plot", "simulate", "reproduce", "report")
    )


def test_no_file_that_a_command_wrote_is_lost(tmp_path):
    files = {"run.json", "metrics.jsonl", "figure.svg", "figure.png", "figure.pdf", "figure.json"}
    simulate("smooth-classes", tmp_path / "simulation", t_end=1.0)
    assert {file.name for file in (tmp_path / "simulation").iterdir()} == files
    exhibit = make_exhibit(get(["fig3"])[0], out=tmp_path).path
    written = {file.name for file in exhibit.iterdir()}
    assert files | {"verdict.json"} == written
    assert "`data.csv` is no longer written" in CHANGES


if __name__ == "__main__":
    for name, parts in surface().items():
        print(name, *parts)
