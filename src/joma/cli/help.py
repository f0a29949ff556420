"""What `joma … --help` looks like: commands in panels, plain words for types, an example for each; and completion."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from joma._extras import has

# command -> one that can be typed as it is; tests parse them
EXAMPLES = {
    "demo": "joma demo --seed 1 --no-open",
    "watch": "joma watch runs/mine --in loop",
    "runs": "joma runs runs/sweep",
    "status": "joma status runs/mine",
    "report": "joma report runs/mine --out figure.svg --out numbers.csv",
    "forecast": "joma forecast runs/seed-0 runs/seed-1 --lr 1e-5 --steps 60000",
    "scan": "joma scan checkpoints/ --gauges stable_rank,stable_rank.qk",
    "audit": "joma audit EleutherAI/pythia-70m --revisions log --level hashes",
    "superpose": "joma superpose EleutherAI/pythia-70m --data pydoc --tokens 100000",
    "gauges": "joma gauges entropy",
    "claims": "joma claims T2.invariant",
    "simulate": "joma simulate two-tokens --attention exp --t-end 5",
    "reproduce": "joma reproduce fig3 --out runs/paper",
    "train": "joma train --layers 2 --lr 1e-3 --steps 2000",
    "sweep": "joma sweep --layers 1,2 --seed 0..2 --workers 2",
    "hierarchy": "joma hierarchy --rho 0.8 --steps 400",
    "doctor": "joma doctor --json",
    "docs": "joma docs watch",
}
_WORDS = {"int": "number", "integer": "number", "float": "number", "path": "path"}  # others: text


class _Plain:
    """Shows types in plain words: none for a switch, and none beside the name of an argument."""

    def get_params(self, ctx: Any) -> list[Any]:
        """All parameters, the one of help included."""
        params: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for param in params:
            if param.param_type_name == "argument":
                param.metavar = param.metavar or param.name.upper()
                param.display_type_rich = _nothing
                param.get_usage_pieces = partial(_usage, param)
            elif param.metavar is None:
                param.metavar = "" if param.is_flag else _word(param)
        return params


class Command(_Plain, TyperCommand):
    """A command with plain help."""


class CommandGroup(_Plain, TyperGroup):
    """A group of commands with plain help."""


def _nothing(ctx: Any) -> None:
    """What is shown beside an argument's name."""


def _usage(param: Any, ctx: Any) -> list[str]:
    """An argument in the line of usage: RUN, [TASK], RUNS..."""
    name = param.metavar if param.required else f"[{param.metavar}]"
    return [f"{name}{'...' * (param.nargs != 1)}"]


def _word(param: Any) -> str:
    """What kind of value an option takes."""
    descriptor = getattr(param, "type_descriptor", None)
    if descriptor is None:  # Typer before 0.20 has click's types
        kind = str(param.type.name)
    else:
        kind = "path" if descriptor.is_path else getattr(descriptor.annotation, "__name__", "str")
    return _WORDS.get(kind, "text")


def arrange(app: typer.Typer, panels: Iterable[tuple[str, Iterable[Any]]]) -> None:
    """Register the commands of modules, each in its panel and with its example."""
    for panel, modules in panels:
        for module in modules:
            known = {*map(id, app.registered_commands), *map(id, app.registered_groups)}
            module.register(app)
            added: list[Any] = [*app.registered_commands, *app.registered_groups]
            for info in added:
                if id(info) not in known:
                    info.rich_help_panel = panel
    for path, info in _walk(app):
        info.cls = CommandGroup if hasattr(info, "typer_instance") else Command
        if path in EXAMPLES:
            info.epilog = f"Example: [bold]{EXAMPLES[path]}[/bold]"


def _walk(app: Any, above: str = "") -> Iterator[tuple[str, Any]]:
    """Path of each command and group below, and where Typer keeps what it is told of it."""
    for info in app.registered_commands:
        yield f"{above}{info.name}", info
    for info in app.registered_groups:
        yield f"{above}{info.name}", info
        yield from _walk(info.typer_instance, f"{above}{info.name} ")


# What a shell completes. Registries are read when it asks.

# The modules that register joma's own gauges.
GAUGE_MODULES = tuple(
    f"joma._measure.gauges.{name}" for name in ("builtin", "assumptions", "stream")
)


def one_of(*words: str) -> Callable[[str], list[str]]:
    """Completes one of these words."""

    def complete(incomplete: str) -> list[str]:
        return [word for word in words if word.startswith(incomplete)]

    return complete


def exhibits(incomplete: str) -> list[tuple[str, str]]:
    """Return the ids of exhibits that begin so."""
    from joma.paper.exhibits.index import names

    # Titles would import every exhibit, and torch with them.
    return [(id, "") for id in names() if id.startswith(incomplete)]


def claims(incomplete: str) -> list[str]:
    """Ids of claims, and of groups of them."""
    if not has("theory"):
        return []
    from joma.paper.claims import claims

    ids = [claim.id for claim in claims()]
    groups = dict.fromkeys(id.split(".")[0] for id in ids)
    return [id for id in dict.fromkeys((*groups, *ids)) if id.startswith(incomplete)]


def gauges(incomplete: str) -> list[str]:
    """Return the gauges that complete the last of several names between commas."""
    before, comma, last = incomplete.rpartition(",")
    return [f"{before}{comma}{name}" for name in gauge(last)]


def gauge(incomplete: str) -> list[str]:
    """Return the gauges whose names begin so; after a dot, with the parts that they can be measured on."""
    kinds = gauge_kinds()
    name, dot, _ = incomplete.partition(".")
    names = list(kinds)
    if dot and name in kinds:
        names = [f"{name}.{part}" for part in _parts_of(kinds[name])]
    return [one for one in names if one.startswith(incomplete)]


def gauge_kinds() -> dict[str, str]:
    """Return gauge -> the name of its kind, without importing torch, which takes seconds.

    Of gauges that installed packages bring, the kind is not known and "".
    """
    from importlib.metadata import entry_points

    from joma.cli.sources import decorated

    kinds = {}
    for module in GAUGE_MODULES:
        for (name, *_), named, _ in decorated(module, "gauge"):
            kinds[name] = named["on"]
    for entry in entry_points(group="joma.gauges"):
        kinds.setdefault(entry.name, "")
    return kinds


def _parts_of(kind: str) -> list[str]:
    from joma._measure.gauges.kinds import KINDS

    if not kind:
        return []
    return list(KINDS[kind].parts)


def tasks(incomplete: str) -> list[tuple[str, str]]:
    """Names of synthetic tasks."""
    if not has("theory"):
        return []
    from joma.theory.tasks import TASKS

    return [(name, what) for name, (what, _) in TASKS.items() if name.startswith(incomplete)]


ENGINES = one_of("processes", "ray")
