"""`joma … --help`: plain words, examples that can be typed, completion of what joma has names for."""

import inspect
import re
import shlex
import subprocess
import sys
from dataclasses import fields

import pytest
import typer
from typer.testing import CliRunner

import joma
from joma._measure.gauges.registry import gauges, names_of
from joma.cli import app
from joma.cli.help import EXAMPLES, GAUGE_MODULES, gauge_kinds
from joma.cli.help import gauge as complete_gauge
from joma.cli.hierarchy import SETTINGS
from joma.cli.sources import decorated
from joma.paper.labs.tree import TreeSettings
from tests.cli.test_cli import joma as run_joma


def walk(command, path=()):
    """Every command and group with the words that call it."""
    yield path, command
    for name, below in getattr(command, "commands", {}).items():
        yield from walk(below, (*path, name))


ROOT = typer.main.get_command(app)
PATHS = [path for path, _ in walk(ROOT)]


@pytest.mark.parametrize("path", PATHS, ids=" ".join)
def test_help_has_plain_words_and_shows_defaults_whole(path):
    text = run_joma(*path, "--help", check=0, columns=80).stdout
    assert not re.search(r"<\w+(\[.*?\])?>|list\[|\bPath\b|\bstr\b|\bint\b", text)
    assert not re.search(
        r"\[default:[^\]]*…[^)\]]", text
    )  # "runs/train-…" is a name; a cut-off default is not
    assert max(map(len, text.splitlines())) <= 80
    if path:
        assert "Example:" in text


@pytest.mark.parametrize(
    ("command", "usage"),
    [
        ("simulate", "[OPTIONS] [TASK]"),
        ("audit", "[OPTIONS] SOURCE"),
        ("report", "[OPTIONS] RUNS..."),
        ("claims", "[OPTIONS] [IDS]..."),
    ],
)
def test_usage_has_brackets_around_what_may_be_left_out_and_none_around_what_is_needed(
    command, usage
):
    first = run_joma(command, "--help", check=0).stdout.strip().splitlines()[0]
    assert first.strip().endswith(f"joma {command} {usage}")


def test_a_sweep_shows_the_defaults_of_the_settings_that_it_takes_lists_of():
    text = run_joma("sweep", "--help", check=0, columns=200).stdout
    for option, default in (
        ("--layers", "1"),
        ("--lr", "0.0001"),
        ("--norm-first", "false"),
        ("--gauges", "entropy"),
    ):
        assert re.search(rf"{option} .*\[default: \({default}", text), option


def test_commands_stand_in_panels():
    text = run_joma("--help", check=0).stdout
    assert re.findall(r"─ (\w+) ─", text) == [
        "Options",
        "Start",
        "Watch",
        "Measure",
        "Theory",
        "Paper",
    ]


@pytest.mark.parametrize("path", EXAMPLES)
def test_examples_can_be_parsed(path):
    """Parsed to the last option without being run: what is unknown or lacks a value is an error of parsing."""
    program, *words = shlex.split(EXAMPLES[path])
    assert program == "joma"
    assert " ".join(words).startswith(path)
    command = ROOT
    while words and words[0] in getattr(command, "commands", {}):
        command = command.commands[words.pop(0)]
    assert command.make_context("joma", words).args == []


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("reproduce fig", {"fig2", "fig10"}),
        ("reproduce --preset l", {"laptop"}),
        ("claims T4", {"T4", "T4.ratio"}),
        ("scan x --gauges entropy,stable", {"entropy,stable_rank"}),
        ("train --gauges stable_rank.q", {"stable_rank.q", "stable_rank.qk"}),
        ("simulate two", {"two-tokens"}),
        ("simulate two-tokens --attention s", {"softmax"}),
        ("audit x --level h", {"hashes"}),
        ("gauges stable_r", {"stable_rank"}),
        ("watch --in l", {"loop", "lightning"}),
        ("hierarchy --objective t", {"token"}),
    ],
)
def test_a_shell_completes_what_joma_has_names_for(typed, expected):
    words = f"joma {typed}"
    environment = {
        "_JOMA_COMPLETE": "complete_bash",
        "COMP_WORDS": words,
        "COMP_CWORD": str(len(words.split()) - 1),
    }
    done = CliRunner().invoke(app, [], env=environment, prog_name="joma")
    offered = set(done.output.split())
    assert expected <= offered
    assert all(word.startswith(typed.split()[-1]) for word in offered)


def test_gauges_are_completed_without_importing_torch():
    code = (
        "import sys; from joma.cli import help; "
        "print(*help.gauges('entropy,stable_rank.q')); "
        "print(*[name for name in ('torch', 'numpy', 'pandas') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    completed, imported = done.stdout.splitlines()
    assert completed.split() == [
        "entropy,stable_rank.q",
        "entropy,stable_rank.qk",
        "entropy,stable_rank.q_update",
    ]
    assert imported == ""


def test_the_names_for_completion_are_those_of_the_registry():
    """They are read from the source of the modules that register gauges."""
    kinds = gauge_kinds()
    table = gauges()
    own = {
        name: gauge for name, gauge in table.items() if gauge.function.__module__ in GAUGE_MODULES
    }
    assert kinds == {name: gauge.on for name, gauge in own.items()}
    for name, gauge in own.items():
        assert complete_gauge(f"{name}.") == [f"{name}.{part}" for part in gauge.kind.parts]


@pytest.mark.parametrize(
    "name", ["scan", "audit", "superpose", "simulate", "forecast", "report", "reproduce"]
)
def test_options_of_commands_are_those_of_the_function(name):
    """Every parameter is an option with the same default, read from the source and not from the module."""
    signature = inspect.signature(getattr(joma, name))
    command = ROOT.commands[name]
    options = {param.name: param for param in command.params}
    left_out = set(signature.parameters) - set(options)
    assert left_out <= {
        "report",
        "progress",
        "observer",
    }  # functions that are called with the progress
    for parameter in signature.parameters.values():
        if parameter.name in left_out:
            continue
        option = options[parameter.name]
        default = parameter.default
        assert option.required == (default is inspect.Parameter.empty and name != "simulate"), (
            option.name
        )
        if isinstance(default, tuple):
            assert names_of(option.default) == list(default)
        elif default is not inspect.Parameter.empty:
            assert str(option.default or "") == str(default or ""), option.name
        assert option.help, option.name


def test_the_settings_of_the_hierarchy_are_those_of_its_lab():
    defaults = {field.name: field.default for field in fields(TreeSettings)}
    assert {name: default for name, (default, _) in SETTINGS.items()} == defaults


@pytest.mark.parametrize("module", GAUGE_MODULES)
def test_decorators_read_from_the_source_have_the_texts_of_the_functions(module):
    table = gauges()
    for (name, *_), named, docstring in decorated(module, "gauge"):
        assert table[name].on == named["on"]
        assert docstring.splitlines()[0] == table[name].help
