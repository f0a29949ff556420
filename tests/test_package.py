"""The package as a whole: what importing it costs and shows."""

import json
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

import joma

ROOT = Path(__file__).parents[1]


def loaded_by(code: str) -> set[str]:
    script = (
        f"import sys, json; {code}; print(json.dumps(sorted(m.split('.')[0] for m in sys.modules)))"
    )
    out = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    ).stdout
    return set(json.loads(out.splitlines()[-1]))


def test_the_command_line_loads_nothing_heavy_before_a_command_needs_it():
    heavy = {"torch", "numpy", "scipy", "pandas", "altair", "vl_convert", "matplotlib"}
    assert not heavy & loaded_by("import joma, joma.cli.commands")


def test_theory_does_not_need_torch_or_pictures():
    assert not {"torch", "altair", "vl_convert", "pandas"} & loaded_by(
        "import joma.theory, joma.paper.claims"
    )


def test_integrations_do_not_load_their_libraries_before_they_are_used():
    trainers = {"transformers", "accelerate", "lightning", "pytorch_lightning"}
    assert not (trainers | {"torch"}) & loaded_by("import joma; joma.integrations.__all__")


def test_public_names_are_exactly_what_is_listed_and_stay_the_same_object():
    assert dir(joma) == sorted(joma.__all__)
    for name in joma.__all__:
        assert getattr(joma, name) is getattr(joma, name)
    with pytest.raises(AttributeError, match="it has Alarm, AttentionStats"):
        joma.nothing  # noqa: B018


def test_one_version_everywhere():
    assert version("joma") == joma.__version__
    assert f"version: {joma.__version__}" in (ROOT / "CITATION.cff").read_text()


def test_the_package_is_typed():
    assert (Path(joma.__file__).parent / "py.typed").exists()
