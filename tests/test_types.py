"""`joma.types` has the types of what public functions return, for annotations."""

import importlib
import inspect
import re
import subprocess
import sys

import pytest

import joma
import joma.types


@pytest.mark.parametrize("name", joma.types.__all__)
def test_every_type_is_the_class_that_joma_uses(name):
    module = importlib.import_module(joma.types._TYPES[name])
    assert getattr(joma.types, name) is getattr(module, name)
    assert isinstance(getattr(joma.types, name), type)


def returned_names() -> set[str]:
    """The names in the return annotations of public functions."""
    names = set()
    for function in filter(inspect.isfunction, (getattr(joma, name) for name in joma.__all__)):
        names |= set(re.findall(r"\w+", str(inspect.signature(function).return_annotation)))
    return names


def test_what_public_functions_return_can_be_named():
    elsewhere = {"Tensor", "DataFrame", "Path", "Callable", "Any", "AlarmClass", "BackendClass"}
    classes = {name for name in returned_names() if name[:1].isupper()}
    assert {"Watch", "Scan", "Audit", "Forecast", "Charges", "Explanation"} <= classes
    assert classes - elsewhere <= set(joma.types.__all__)


def test_type_checkers_and_python_see_the_same_names():
    """The imports for type checkers, the table for Python and `__all__` have the same names."""
    source = inspect.getsource(joma.types)
    imported = re.findall(r"^    from (joma\.\S+) import (.+)$", source, flags=re.MULTILINE)
    for_checkers = {}
    for module, names in imported:
        for name in names.split(", "):
            for_checkers[name] = module
    assert for_checkers == joma.types._TYPES
    assert sorted(joma.types.__all__) == sorted(joma.types._TYPES)


def test_it_costs_nothing_until_a_type_is_used():
    code = "import sys, joma.types; print('torch' in sys.modules, 'numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


def test_an_unknown_name_lists_those_that_exist():
    with pytest.raises(AttributeError, match=r"no attribute 'Wacth'; it has Alert, "):
        joma.types.Wacth  # noqa: B018
