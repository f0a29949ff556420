"""joma without its extras: the core works, and what is missing is one sentence with the command for it."""

import json
import re
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pandas as pd
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from joma import Run, _extras

ROOT = Path(__file__).parents[1]
BLOCKED = (*_extras.MODULES["paper"], "transformers", "huggingface_hub", "gguf", "lightning", "ray")

# What a user does with the core; runs in a process where the modules of the extras cannot be imported.
CORE = """
import sys

for name in sys.argv[1].split(","):
    sys.modules[name] = None

import json
import torch
from torch import nn

import joma
from joma.cli import main

results = {}
torch.manual_seed(0)
model = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
with joma.watch(model, run="runs/mine", every=5, gauges="entropy,stable_rank") as watch:
    for step in range(20):
        x = torch.randn(4, 8, 16)
        loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        watch.step(loss=loss)
results["measured"] = sorted(set(watch.frame().gauge))
results["explained"] = str(joma.explain(model, torch.randn(4, 8, 16)))
results["charges"] = len(joma.charges(model))

block = joma.nn.JoMABlock(words=9, nodes=4, attention="exp", folded=True)
h = block(torch.tensor([3, 5]), torch.tensor([[1, 2, 2], [7, -1, -1]]))
h.sum().backward()
results["block"] = [list(h.shape), bool(block.v.grad.any())]

attempts = {
    "theory": lambda: joma.theory,
    "simulate": lambda: joma.simulate("two-tokens", "runs/simulation"),
    "superpose": lambda: joma.superpose(model, "pydoc"),
    "reproduce": lambda: joma.reproduce("fig3"),
    "exhibits": lambda: joma.exhibits(),
    "report": lambda: joma.report("runs/mine"),
}
results["errors"] = {}
for name, attempt in attempts.items():
    try:
        attempt()
    except ImportError as error:
        results["errors"][name] = [type(error).__name__, str(error)]

for step in (10, 20):
    torch.save(model.state_dict(), f"step{step}.pt")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.01 * torch.randn_like(parameter)
commands = {
    "status": ["status", "runs/mine"],
    "doctor": ["doctor"],
    "docs": ["docs", "watch"],
    "gauges": ["gauges"],
    "watch": ["watch"],
    "runs": ["runs"],
    "report": ["report", "runs/mine"],
    "report numbers": ["report", "runs/mine", "--out", "numbers.csv"],
    "report picture": ["report", "runs/mine", "--out", "figure.svg"],
    "hierarchy": ["hierarchy"],
    "scan": ["scan", ".", "--gauges", "stable_rank,change", "--out", "runs/scan"],
    "scan page": ["scan", ".", "--out", "runs/page", "--report", "page.html"],
    "audit": ["audit", ".", "--out", "runs/audit"],
    "claims": ["claims", "T2.invariant"],
    "simulate": ["simulate", "two-tokens"],
    "superpose": ["superpose", "smollm2", "--data", "pydoc"],
    "reproduce": ["reproduce", "fig3"],
    "demo": ["demo"],
}
import contextlib, io
results["commands"] = {}
for name, arguments in commands.items():
    sys.argv = ["joma", *arguments]
    out, err, code = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main()
        except SystemExit as end:
            code = end.code or 0
    results["commands"][name] = [code, out.getvalue(), err.getvalue()]
print(json.dumps(results))
"""


@pytest.fixture(scope="module")
def core(tmp_path_factory) -> tuple[Path, dict]:
    folder = tmp_path_factory.mktemp("core")
    command = [sys.executable, "-c", CORE, ",".join(BLOCKED)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder, json.loads(done.stdout.splitlines()[-1])


def test_the_core_watches_explains_and_folds(core):
    _, results = core
    assert {"entropy", "stable_rank", "loss"} <= set(results["measured"])
    assert "2 attentions, 2 MLPs" in results["explained"]
    assert results["charges"] > 0
    assert results["block"] == [[2, 4], True]


def test_python_says_at_once_which_extra_is_missing(core):
    _, results = core
    assert {name: kind for name, (kind, _) in results["errors"].items()} == dict.fromkeys(
        ["theory", "simulate", "superpose", "reproduce", "exhibits", "report"], "MissingExtra"
    )
    commands = {name: text.rpartition(": ")[2] for name, (_, text) in results["errors"].items()}
    paper = "pip install 'joma[paper]'"
    assert commands == {
        "theory": "pip install 'joma[theory]'",
        "report": "pip install 'joma[report]'",
        "simulate": paper,
        "superpose": paper,
        "reproduce": paper,
        "exhibits": paper,
    }


@pytest.mark.parametrize(
    "name",
    ["status", "runs", "watch", "doctor", "docs", "gauges", "scan", "audit", "report numbers"],
)
def test_commands_of_the_core_work(core, name):
    code, out, err = core[1]["commands"][name]
    assert code == 0, err
    assert out


@pytest.mark.parametrize("name", ["scan", "audit"])
def test_tables_are_printed_and_one_line_says_how_to_get_figures(core, name):
    folder, results = core
    _, out, _ = results["commands"][name]
    lines = [line for line in out.splitlines() if "figure" in line]
    assert lines == ["no figure was drawn; figures need: pip install 'joma[report]'"]
    assert "step" in out
    assert not (folder / f"runs/{name}/figure.svg").exists()


@pytest.mark.parametrize(
    ("name", "extra"),
    [
        ("claims", "theory"),
        ("hierarchy", "theory"),
        ("simulate", "paper"),
        ("superpose", "paper"),
        ("reproduce", "paper"),
        ("demo", "report"),
        ("scan page", "report"),
    ],
)
def test_other_commands_end_at_once_with_one_sentence(core, name, extra):
    folder, results = core
    code, out, err = results["commands"][name]
    assert (code, out) == (2, "")
    assert re.fullmatch(rf"joma: [^\n]+ needs [^\n]+: pip install 'joma\[{extra}\]'\n", err)
    assert not (folder / "runs/page").exists()


@pytest.mark.parametrize("name", ["report", "report picture"])
def test_a_report_prints_how_the_run_stands_and_says_how_to_get_a_page(core, name):
    folder, results = core
    code, out, err = results["commands"][name]
    assert code == 2
    assert re.search(r"^mine +done +20 ", out, flags=re.MULTILINE)
    assert err.endswith("pip install 'joma[report]'\n")
    assert err.count("\n") == 1
    assert not (folder / "runs/mine/report.html").exists()
    assert not (folder / "figure.svg").exists()


def test_numbers_need_no_extra(core):
    folder, _ = core
    table = pd.read_csv(folder / "numbers.csv")
    pd.testing.assert_frame_equal(table, Run(folder / "runs/mine").frame(), check_dtype=False)


def test_doctor_calls_extras_optional(core):
    _, out, _ = core[1]["commands"]["doctor"]
    assert "optional extra" in out


def test_the_table_of_modules_is_that_of_pyproject():
    """The modules of an extra are those of the distributions that `pyproject.toml` lists for it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    providers = packages_distributions()
    for extra, modules in _extras.MODULES.items():
        wanted = set()
        for line in extras[extra]:
            requirement = Requirement(line)
            if requirement.name == "joma":
                for inner in requirement.extras:
                    wanted |= {canonicalize_name(Requirement(one).name) for one in extras[inner]}
            else:
                wanted.add(canonicalize_name(requirement.name))
        provided = set()
        for module in modules:
            provided |= {canonicalize_name(name) for name in providers[module]} & wanted
        assert provided == wanted, extra


def test_all_has_every_extra_for_users_but_the_one_without_its_dependencies():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    (everything,) = extras["all"]
    assert Requirement(everything).extras == {"paper", "hf", "gguf", "lightning", "ray"}
    assert set(extras) - Requirement(everything).extras == {
        "all", "bench", "dev", "docs", "report", "smollm2", "theory"
    }  # fmt: skip


def test_a_finder_that_refuses_counts_as_missing(monkeypatch):
    class Refuses:
        def find_spec(self, name, path=None, target=None):
            if name == "ray":
                raise ImportError("not here")

    monkeypatch.delitem(sys.modules, "ray", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Refuses(), *sys.meta_path])
    assert not _extras.has("ray")
    with pytest.raises(_extras.MissingExtra) as error:
        _extras.require("ray", "A cluster")
    assert (
        str(error.value) == "A cluster needs ray, which is not installed: pip install 'joma[ray]'"
    )


def test_what_is_installed_is_not_imported():
    code = (
        "import sys; from joma._extras import has; "
        "print(has('paper'), 'scipy' in sys.modules, 'altair' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "False", "False"]
