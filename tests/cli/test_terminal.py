"""What commands print: numbers whole at any width, nothing beside the terminal, no control characters in a pipe."""

import io
import json
import math
import re

import pytest
import torch
from rich.console import Console
from safetensors.torch import save_file

from joma._measure.gauges.registry import gauges
from joma._runs import RunWriter
from joma.cli import terminal
from joma.cli.maths import plain_maths
from joma.paper.claims import claims
from joma.paper.exhibits import exhibits
from tests.cli.test_cli import joma

LOSSES = (4.123456789, math.nan, 0.000123456789)


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """A sweep of three runs, two checkpoints, and a watched run with an alert."""
    root = tmp_path_factory.mktemp("tables")
    axes = {"entropy": ["layer"], "phase": ["layer"]}
    for n, loss in enumerate(LOSSES):
        folder = root / "sweep" / f"data=wikitext-103,layers={n},lr=0.000{n},seed={n}"
        with RunWriter.create(folder, kind="train", config={"steps": 6000}, axes=axes) as writer:
            writer.note(phases=["dense", "sparsifying", "bouncing", "collapsed"])
            numbers = {
                "loss": loss,
                "valid_loss": 1234.5678 + n,
                "entropy": [2.6321, 1.5],
                "phase": [0, 1],
            }
            writer.write(5999 + n, numbers)
    alert = {
        "step": 12,
        "kind": "collapse",
        "level": "critical",
        "layer": 1,
        "heads": [],
        "gauge": "entropy",
    }
    alert |= {"module": "blocks.1", "later": [], "value": 0.0123456, "threshold": 0.1}
    alert |= {"what_to_do": "Lower the rate [by half]."}
    (folder / "alerts.jsonl").write_text(json.dumps(alert) + "\n")
    generator = torch.Generator().manual_seed(0)
    for step in (1000, 143000):
        path = root / "checkpoints" / f"step{step}"
        path.mkdir(parents=True)
        tensors = {f"blocks.{n}.up": torch.randn(16, 4, generator=generator) for n in range(2)}
        save_file(tensors, path / "model.safetensors")
    return {"sweep": root / "sweep", "checkpoints": root / "checkpoints", "run": folder, "out": root / "scan",
            "audit": root / "audit"}  # fmt: skip


COMMANDS = {
    "claims": ("claims", "L6", "L7"),
    "one claim": ("claims", "T2.invariant"),
    "gauges": ("gauges",),
    "exhibits": ("reproduce", "--list"),
    "tasks": ("simulate", "--list"),
    "one gauge": ("gauges", "stable_rank.qk"),
    "watch": ("watch",),
    "runs": ("runs", "{sweep}"),
    "sweep": ("status", "{sweep}"),
    "status": ("status", "{run}"),
    "scan": (
        *("scan", "{checkpoints}", "--out", "{out}", "--mlp", r"blocks\.\d+\.up"),
        *("--gauges", "stable_rank,spectral_norm,effective_rank"),
    ),
    "audit": ("audit", "{checkpoints}", "--out", "{audit}"),
}
WHOLE = {  # what has to be there in one piece
    "claims": ("0.64",),
    "runs": ("4.123", "NaN", "0.0001235", "6,001", "critical"),
    "sweep": ("4.123", "NaN", "0.0001235", "1236", "6,001", "2.066", "critical"),
    "status": ("0.01235", "0.1"),
    "scan": ("143,000", "stable_rank"),
    "audit": ("143,000",),
}


@pytest.mark.parametrize("width", [60, 80, 200])
@pytest.mark.parametrize("name", COMMANDS)
def test_numbers_are_whole_and_lines_fit_at_any_width(name, width, places):
    words = [word.format(**places) for word in COMMANDS[name]]
    done = joma(*words, columns=width)
    assert done.returncode in (0, 5), done.stderr
    assert "\x1b" not in done.stdout
    assert not re.search(r"\d…|…\d", done.stdout)
    assert all(
        re.search(rf"(?<![\w.]){re.escape(piece)}(?![\w.]*\w)", done.stdout)
        for piece in WHOLE.get(name, ())
    )
    # paths, and sentences with what to do, are left whole so that they can be copied
    prose = ("run: ", "page: ", "critical: ", "not judged: ", str(places["run"]))
    assert [
        line
        for line in done.stdout.splitlines()
        if len(line) > width and not line.startswith(prose)
    ] == []


@pytest.mark.parametrize("name", [name for name in COMMANDS if name != "audit"])
def test_json_has_all_digits(name, places):
    words = [word.format(**places) for word in COMMANDS[name]]
    value = json.loads(joma(*words, "--json").stdout)
    assert value
    if name in ("runs", "sweep"):
        assert [row["loss"] for row in value] == [4.123456789, "nan", 0.000123456789]
        assert value[0]["step"] == 5999
    if name == "status":
        assert value["alerts"][0]["value"] == 0.0123456
    if name == "scan":
        assert [row["step"] for row in value["checkpoints"]] == [1000, 143000]
        assert all(
            isinstance(x, float) for row in value["checkpoints"] for x in row["means"].values()
        )


@pytest.mark.parametrize("name", ["claims", "sweep", "status"])
def test_no_color_means_none_on_a_terminal_either(name, places, monkeypatch):
    words = [word.format(**places) for word in COMMANDS[name]]
    monkeypatch.setenv("FORCE_COLOR", "1")  # as if it were a terminal
    assert "\x1b" not in joma(*words).stdout  # which sets NO_COLOR


def test_a_pipe_has_no_width_unless_it_is_given_one(monkeypatch, capsys):
    rows = [("a" * 90, "1.2345", "word " * 200)]
    monkeypatch.delenv("COLUMNS", raising=False)
    terminal.print_table(terminal.console(), ("name", ">number", "*prose"), rows)
    head, line = capsys.readouterr().out.splitlines()
    assert line == f"{'a' * 90}  1.2345  {'word ' * 200}".rstrip()
    assert head.split() == ["name", "number", "prose"]
    monkeypatch.setenv("COLUMNS", "60")
    terminal.print_table(terminal.console(), ("name", ">number", "*prose"), rows)
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 60


@pytest.mark.parametrize("width", [12, 30, 45, 60, 80])
def test_every_character_of_every_cell_is_printed(width):
    cells = (
        "run-of-thirty-characters-000001",
        "-1.2345e-10",
        "a reason of several words: 0.5",
        "[b]not markup",
    )
    out = Console(file=io.StringIO(), width=width)
    terminal.print_table(
        out, ("name", ">loss", "*why", "~odd"), [tuple(map(terminal.escape, cells))] * 2
    )
    printed = "".join(out.file.getvalue().split())
    assert max(map(len, out.file.getvalue().splitlines())) <= width
    for cell in cells if width <= 60 else ():
        assert printed.count("".join(cell.split())) == 2


def test_columns_without_a_cell_are_left_out():
    out = Console(file=io.StringIO(), width=80)
    terminal.print_table(out, ("run", "*reason", ">loss"), [("a", "", "1"), ("b", "", "")])
    assert out.file.getvalue().splitlines()[0].split() == ["run", "loss"]


def test_headings_stand_above_columns_that_are_aligned():
    out = Console(file=io.StringIO(), width=80)
    terminal.print_table(out, ("name", ">n"), ["First", ("a", "1"), "Second", ("longer", "1000")])
    assert out.file.getvalue().splitlines() == [
        *("name       n", "", "First", "a          1", "", "Second", "longer  1000"),
    ]


def test_no_latex_reaches_the_terminal():
    for claim in claims():
        texts = (claim.statement, claim.correction, claim.condition, claim.remark, claim.counterexample,
                 claim.derivation, claim.measures, claim.control)  # fmt: skip
        for text in texts:
            shown = plain_maths(text or "")
            assert not re.search(r"[\\$]", shown), (claim.id, shown)
            assert shown.isprintable()
    assert not [
        exhibit.id for exhibit in exhibits().values() if re.search(r"[\\$]", exhibit.statement)
    ]
    assert not [gauge.name for gauge in gauges().values() if re.search(r"[\\$]", gauge.help)]


@pytest.mark.parametrize(
    ("latex", "line"),
    [
        (r"$\dot z=\tfrac12\sum_k v_k^2$", "ż = ½Σ_k v_k²"),
        (r"$\frac{a+b}{c}\le -\sqrt{\pi/2}$", "(a + b)/c ≤ −√(π/2)"),
        (r"$e^{-\mu_k^2/2}$", "e^{−μ_k²/2}"),
        (r"$\ln A$ and $W_V^\top\bar b$", "ln A and W_Vᵀb̄"),
        (r"costs 5 in all", "costs 5 in all"),
        (r"$\mathbb E[g]\in\mathbb R$", "E[g] ∈ R"),
    ],
)
def test_formulas_as_unicode(latex, line):
    assert plain_maths(latex) == line


def test_claims_say_what_they_are_about():
    out = joma("claims", "L7", "T2.saliency", check=0).stdout
    assert "Lemmas 6 and 7 and Theorem 4: salient components converge first\nL7 " in out
    assert "\nTheorem 2: linear activations, winner takes all\nT2.saliency " in out
