"""`joma … --help`: plain words, examples that can be typed, completion of what joma has names for."""

import re
import shlex

import pytest
import typer
from typer.testing import CliRunner

from joma.cli import app
from joma.cli.help import EXAMPLES
from tests.cli.test_cli import joma


def walk(command, path=()):
    """Every command and group with the words that call it."""
    yield path, command
    for name, below in getattr(command, "commands", {}).items():
        yield from walk(below, (*path, name))


ROOT = typer.main.get_command(app)
PATHS = [path for path, _ in walk(ROOT)]


@pytest.mark.parametrize("path", PATHS, ids=" ".join)
def test_help_has_plain_words_and_shows_defaults_whole(path):
    text = joma(*path, "--help", check=0, columns=80).stdout
    assert not re.search(r"<\w+(\[.*?\])?>|list\[|\bPath\b|\bstr\b|\bint\b", text)
    assert not re.search(
        r"\[default:[^\]]*…[^)\]]", text
    )  # "runs/train-…" is a name; a cut-off default is not
    assert max(map(len, text.splitlines())) <= 80
    if path:
        assert "Example:" in text


@pytest.mark.parametrize(
    ("command", "usage"),
    [("plot", "[OPTIONS] RUN"), ("report", "[OPTIONS] RUNS..."), ("claims", "[OPTIONS] [IDS]...")],
)
def test_usage_has_brackets_around_what_may_be_left_out_and_none_around_what_is_needed(
    command, usage
):
    first = joma(command, "--help", check=0).stdout.strip().splitlines()[0]
    assert first.strip().endswith(f"joma {command} {usage}")


def test_a_sweep_shows_the_defaults_of_the_settings_that_it_takes_lists_of():
    text = joma("sweep", "train", "--help", check=0, columns=200).stdout
    for option, default in (
        ("--layers", "1"),
        ("--lr", "0.0001"),
        ("--norm-first", "false"),
        ("--gauges", "entropy"),
    ):
        assert re.search(rf"{option} .*\[default: \({default}", text), option


def test_commands_stand_in_panels():
    text = joma("--help", check=0).stdout
    assert re.findall(r"─ (\w+) ─", text) == ["Options", "Start", "Measure", "Theory", "Paper"]


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
