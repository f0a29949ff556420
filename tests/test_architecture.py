"""The import contract holds, also for what is imported by a name in a string; the picture of it is up to date."""

import ast
import importlib
import re
import sys
from pathlib import Path

import grimp
import pytest

import joma

ROOT = Path(__file__).parents[1]
SRC = ROOT / "src"
sys.path.insert(0, str(ROOT / "docs/_build"))

import imports  # noqa: E402


def named_in(path: Path) -> set[str]:
    """The modules of joma that a file names in strings, or reaches as attributes of the lazy package itself."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    modules = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr) and isinstance(
            node.values[0], ast.Constant
        ):  # f"joma.paper.exhibits.{name}"
            modules |= {node.values[0].value.rstrip(".")} if len(node.values) > 1 else set()
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            modules.add(node.value)
        elif (
            isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id == "joma"
        ):
            modules.add(joma._API.get(node.attr, f"joma.{node.attr}"))
        elif isinstance(node, ast.ImportFrom) and node.module == "joma" and node.level == 0:
            modules |= {joma._API.get(alias.name, f"joma.{alias.name}") for alias in node.names}
    return {name for name in modules if re.fullmatch(r"joma(\.\w+)+", name)}


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(SRC).with_suffix("").parts).removesuffix(".__init__")


def with_strings() -> tuple[grimp.ImportGraph, set[tuple[str, str]]]:
    """The import graph with the imports by string (those of the package itself are its lazy names), and the latter."""
    graph = grimp.build_graph("joma", cache_dir=None)
    added = set()
    for path in sorted(SRC.rglob("*.py")):
        module = module_of(path)
        for name in named_in(path):
            if module != "joma" and name in graph.modules and name != module:
                graph.add_import(importer=module, imported=name)
                added.add((module, name))
    return graph, added


def test_strings_that_name_modules_are_seen():
    _, added = with_strings()
    rooms = {(importer.split(".")[1], imported.split(".")[1]) for importer, imported in added}
    assert ("paper", "paper") in rooms


def test_imports_by_string_keep_the_layers_too():
    graph, _ = with_strings()
    layers = [{*row} for row in imports.layers()]
    assert not graph.find_illegal_dependencies_for_layers(layers=layers, containers={"joma"})


def test_the_lazy_names_of_the_package_are_where_it_says():
    for name, module in joma._API.items():
        value = getattr(importlib.import_module(module), name)
        assert value is getattr(joma, name)


def test_the_picture_and_the_table_of_rooms_are_up_to_date():
    made = "; if not: python docs/make_figures.py architecture"
    assert (ROOT / "docs/figures/imports.svg").read_text() == imports.svg(), made
    assert imports.table() in (ROOT / "docs/architecture.md").read_text(), made


MAPPED = (
    "_measure/events",
    "_measure/watch",
    "_measure/gauges",
    "_measure/charges",
    "_checkpoints",
)


@pytest.mark.parametrize("room", MAPPED)
def test_the_map_of_a_room_names_every_module(room):
    folder = ROOT / "src/joma" / room
    text = (folder / "__init__.py").read_text()
    modules = {path.name for path in folder.glob("*.py") if path.name != "__init__.py"}
    rooms = {f"{path.parent.name}/" for path in folder.glob("*/__init__.py")}
    named = set(re.findall(r"\b\w+\.py\b|(?<=\s)\w+/(?=\s)", text))
    assert named == modules | rooms


def test_every_path_in_the_architecture_exists():
    text = (ROOT / "docs/architecture.md").read_text()
    paths = re.findall(r"`((?:_?\w+/)+\w+\.py)`", text)
    assert len(paths) > 8
    for path in paths:
        assert (ROOT / "src/joma" / path).exists() or (ROOT / path).exists(), path


def test_a_class_name_exists_once():
    """A reader who knows a class by its name finds one definition."""
    places = {}
    for path in sorted((SRC / "joma").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(f"{path.relative_to(SRC)}:{node.lineno}")
    assert {name: found for name, found in places.items() if len(found) > 1} == {}
