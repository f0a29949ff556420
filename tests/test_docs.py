"""The documentation builds without warnings and without a network, what it shows runs, and its index is complete."""

import contextlib
import importlib
import inspect
import json
import re
import subprocess
import sys
import tomllib
import types
from importlib.metadata import EntryPoint
from importlib.util import find_spec
from pathlib import Path

import pandas as pd
import pytest
import typer
from benchmarks.report import browser, until
from typer.testing import CliRunner

import joma
from joma import Run
from joma._measure.events.backends.backend_table import all_backends, remove_backend
from joma._measure.gauges.registry import gauges, remove
from joma._measure.watch.alarms.alarm_table import all_alarms, remove_alarm
from joma._runs.alerts import read_alerts
from joma._runs.writer import RunWriter
from joma.cli import app, demo
from joma.paper import claims as registry
from joma.paper.claims import claims
from joma.paper.exhibits import ORDER, exhibits, get, make_exhibit
from joma.paper.exhibits.base import DEFAULT
from joma.paper.exhibits.index import remove as remove_exhibit
from joma.paper.exhibits.judgement import Judgement
from joma.paper.records import load
from joma.paper.verdict import Verdict
from tests.snippets import agrees, execute, fences, joma_commands, snippets

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
sys.path.insert(0, str(DOCS / "_build"))

import command_page  # noqa: E402
import contrasted  # noqa: E402
import dataflow  # noqa: E402
import facts  # noqa: E402
import front_page  # noqa: E402
import paper_index  # noqa: E402
import prose  # noqa: E402
import results  # noqa: E402
from marks import between  # noqa: E402

MAKE_TABLES = "run: python docs/make_figures.py tables"
ROWS = [row for rows in paper_index.SECTIONS.values() for row in rows]
# what the paper numbers; its multi-layer appendix counts anew
NUMBERED = {
    *(f"Eqn. {n}" for n in range(1, 106)),
    *(f"Theorem {n}" for n in range(1, 6)),
    *(f"Lemma {n}" for n in range(1, 10)),
    *(f"Figure {n}" for n in range(1, 11)),
    *("Table 1", "Assumption 1", "Definition 1", "Definition 2"),
    *(f"Eqn. {n} (multi-layer)" for n in range(1, 4)),
    *("Theorem 1 (multi-layer)", "Figure 1 (multi-layer)"),
}


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The built site: a warning fails the build."""
    folder = tmp_path_factory.mktemp("site")
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "--quiet",
        "--site-dir",
        str(folder),
    ]
    environment = {
        "PATH": "/usr/bin:/bin",
        "PYTHONPATH": str(ROOT / "src"),
        "NO_MKDOCS_2_WARNING": "1",
    }
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr, done.stderr
    return folder


def test_pages_fetch_nothing_from_elsewhere(site):
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > 20
    for page in pages:
        text = page.read_text()
        for tag in re.findall(r"<(?:link|script|img|iframe|source|video)\b[^>]*>", text):
            assert not re.search(r'(?:src|href)="(?:https?:)?//', tag), f"{page.name}: {tag}"
    assert not re.search(r"(?:url\(|@import)\s*[\"']?https?:", (site / "style.css").read_text())


SEARCH = """
const input = document.querySelector("[data-md-component=search-query]");
input.focus();
input.value = arguments[0];
input.dispatchEvent(new KeyboardEvent("keyup", { bubbles: true }));
"""


def test_search_works_on_pages_opened_from_disk(site, browser_paths):
    with browser(*browser_paths) as driver:
        for page in ("index.html", "api/joma.html"):  # the addresses of scripts differ
            driver.get((site / page).as_uri())
            until(driver, "document.querySelector('[data-md-component=search-query]')")
            driver.execute_script(SEARCH, "superposition")
            until(driver, "document.querySelectorAll('.md-search-result__item a').length > 3")
            found = driver.execute_script(
                "return document.querySelector('.md-search-result__item a').href"
            )
            assert found.startswith("file:")
            assert Path(found.removeprefix("file://").split("?")[0].split("#")[0]).is_file()


def test_formulas_are_mathml(site):
    pages = {str(page.relative_to(site)): page.read_text() for page in site.rglob("*.html")}
    assert pages["theory.html"].count("<math") > 10
    assert pages["errata.html"].count("<math") > 50
    assert not [name for name, text in pages.items() if "arithmatex" in text]
    for name, text in pages.items():
        text = re.sub(r"<(code|pre|script|style)\b.*?</\1>", "", text, flags=re.S)
        assert "$" not in re.sub(r"<[^>]*>", "", text), name
        for math in re.findall(
            r"<math.*?</math>", text, flags=re.S
        ):  # what the converter did not know
            assert not re.search(r"\\|^&(amp;)?$", re.sub(r"<[^>]*>", "\n", math), flags=re.M), (
                name,
                math,
            )


def test_the_reference_has_every_public_name(site):
    modules = ("joma", "joma.theory", "joma.theory.isotropic", "joma.paper.claims", "joma.models")
    for module in modules:
        text = (site / "api" / f"{module.rpartition('.')[2]}.html").read_text()
        loaded = importlib.import_module(module)
        values = {name: getattr(loaded, name) for name in loaded.__all__}
        values = {
            name: value
            for name, value in values.items()
            if isinstance(value, type | types.FunctionType)
        }
        assert values
        missing = [
            name
            for name, v in values.items()
            if f'id="{v.__module__}.{v.__qualname__}"' not in text
        ]
        assert missing == []


def test_every_numbered_thing_of_the_paper_is_in_the_index_once():
    found = [number for row in ROWS for number in paper_index.numbers(row.item)]
    numbered = [
        item
        for item in found
        if re.match(r"(Eqn|Theorem|Lemma|Figure|Table|Assumption|Definition)\b", item)
    ]
    assert len(numbered) == len(set(numbered))
    assert set(numbered) == NUMBERED


def test_all_code_of_the_index_can_be_imported():
    for name in {name for row in ROWS for name in row.code.split()}:
        try:
            known = find_spec(name) is not None
        except ModuleNotFoundError:
            known = False
        module, _, attribute = name.rpartition(".")
        assert known or hasattr(importlib.import_module(module), attribute), name


def test_the_index_names_every_claim_and_every_exhibit():
    assert {id for row in ROWS for id in row.claims.split()} == {claim.id for claim in claims()}
    named = {id for row in ROWS for id in row.exhibits.split()}
    assert named == set(ORDER)
    for row in ROWS:  # a figure's own exhibit stands in its row
        if (own := "fig" + row.item.removeprefix("Figure ")) in ORDER:
            assert own in row.exhibits.split()


def test_what_has_no_check_has_a_reason():
    for row in ROWS:
        assert bool(row.claims or row.exhibits) != bool(row.why), row.item


def test_the_page_of_the_index_has_all_rows():
    text = (DOCS / "paper-index.md").read_text()
    assert sum(line.startswith("| ") for line in text.splitlines()) - text.count(
        "| what it says |"
    ) == len(ROWS)
    verdicts = dict(re.findall(r"^## (\S+): (.+)$", (DOCS / "claims.md").read_text(), flags=re.M))
    for id, verdict in re.findall(r"claims\.md#([\w.]+)\): ([a-z ]+(?:, corrected)?)", text):
        assert verdicts[id] == verdict.strip(), id


def test_every_picture_has_a_command_that_makes_it():
    made = {f"{id}.png" for id in ORDER}  # docs/make_figures.py, part by part
    made |= {"watch.png", "simulate.png"} | {
        "rows.png",
        "spectra.png",
        "collapse.png",
        "dataflow.svg",
        "imports.svg",
    }
    made |= {"wikitext.png", "wikitext-hot.png"}  # docs/wikitext.py
    made |= {"tensorboard.png"}  # docs/loggers.py
    made |= {"demo.png", "page.png"}  # docs/make_figures.py demo
    made |= {"foresight.png"}  # docs/foresight.py
    assert {path.name for path in (DOCS / "figures").iterdir()} == made
    guide = (DOCS / "reproduce.md").read_text()
    for id, exhibit in exhibits().items():
        has_figure = DEFAULT in exhibit.experiment.settings or load(id) is not None
        assert (f"](figures/{id}.png)" in guide) == has_figure, id


def test_no_page_states_another_verdict_or_number_than_the_results():
    """Tables, sections and index are those of the records, as the current rules judge them."""
    findings = facts.findings()
    for name, mark, part in (
        ("results", "results", results.table(findings)),
        ("reproduce", "exhibits", results.sections(findings)),
    ):
        text = (DOCS / f"{name}.md").read_text()
        assert between(text, mark, part) == text, MAKE_TABLES
    index = (DOCS / "paper-index.md").read_text()
    assert paper_index.with_verdicts(index, facts.verdicts()) == index, MAKE_TABLES
    for page in facts.pages():
        text = page.read_text()
        assert facts.filled(text) == text, MAKE_TABLES


def test_results_of_exhibits_that_are_computed_are_stored():
    stored = json.loads(facts.COMPUTED.read_text())
    computed = {
        id
        for id, exhibit in exhibits().items()
        if DEFAULT in exhibit.experiment.settings and load(id) is None
    }
    assert set(stored) == computed
    for id, judgement in stored.items():
        rendered = Judgement.from_dict(judgement)
        assert (rendered.summary, rendered.measured) == (
            judgement["summary"],
            judgement["measured"],
        ), id


def test_fields_are_rendered_from_the_results_and_refuse_what_is_not_there():
    assert facts.filled("a <!-- = {fig3.verdict} -->fails<!-- / --> b") == (
        f"a <!-- = {{fig3.verdict}} -->{facts.verdicts()['fig3']}<!-- / --> b"
    )
    with pytest.raises(ValueError, match="no_such_number"):
        facts.filled("<!-- = {fig3.no_such_number} --><!-- / -->")


# Verdicts in emphasis, as pages state them of results: they are fields.
TYPED_VERDICT = re.compile(
    r"\*(" + "|".join(verdict for verdict in Verdict if verdict != Verdict.ERROR) + r")\*"
)


@pytest.mark.parametrize("page", sorted(DOCS.glob("*.md")), ids=lambda page: page.stem)
def test_no_verdict_is_typed(page):
    text = facts.FIELD.sub("", page.read_text())
    text = re.sub(r"<!-- (\w+) -->.*?<!-- /\1 -->", "", text, flags=re.S)
    assert TYPED_VERDICT.findall(text) == []


def test_the_picture_of_the_data_flow_is_as_drawn_and_knows_what_measures():
    assert (DOCS / "figures/dataflow.svg").read_text() == dataflow.svg()
    named = " ".join(title for *_, title, _ in dataflow.BOXES.values())
    for part in ("theory", "watch", "_checkpoints", "_inspect", "_runs", "paper", "_show"):
        assert part in named
    assert {("run", "report"), ("run", "exhibits"), ("superpose", "run")} <= set(dataflow.ARROWS)


def test_what_public_functions_return_is_in_the_reference(site):
    text = (site / "api/joma.html").read_text()
    for name in (
        "_measure.watch.watch.Watch",
        "_measure.watch.phases.Phase",
        "_checkpoints.scan.Scan",
        "_inspect.superposition.Superposition",
    ):
        assert f'id="joma.{name}"' in text


def test_the_guide_names_the_files_that_an_exhibit_leaves(tmp_path):
    outcome = make_exhibit(get(["fig3"])[0], out=tmp_path)
    left = re.search(
        r"## What an exhibit leaves\n(.*?)\n## ", (DOCS / "reproduce.md").read_text(), flags=re.S
    )[1]
    assert {file.name for file in outcome.path.iterdir()} - set(
        re.findall(r"`([\w.]+)`", left)
    ) == set()


def blocks(page, kind):
    """The code blocks of a page: (title, text)."""
    return re.findall(
        rf'```{kind}(?: title="([^"]*)")?\n(.*?)```', (DOCS / page).read_text(), flags=re.S
    )


PAGES = sorted(DOCS.glob("*.md"))
RUN = [
    page.name for page in PAGES if any(not snippet.needs for snippet in snippets(page.read_text()))
]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_block_of_a_page_says_what_comes_of_it(page):
    """What it prints, or what it needs to be run: for pages that are still to be written, too."""
    text = page.read_text()
    assert [snippet.code for snippet in snippets(text) if not snippet.told] == []
    assert {kind for kind, _ in fences(text)} <= {"python", "console", "text", "toml"}
    assert len(snippets(text)) == sum(kind in ("python", "console") for kind, _ in fences(text))
    printed = {snippet.printed for snippet in snippets(text)}
    typed = [code for kind, code in fences(text) if kind == "text" and code not in printed]
    assert [
        code for code in typed if re.search(r"^(\$ )?(joma|torchrun) |^with joma", code, flags=re.M)
    ] == []


ROOT_COMMAND = typer.main.get_command(app)


def parsed(words):
    """The words of a command, parsed to the last option and nothing more: no option's own function is called."""
    command, words = ROOT_COMMAND, list(words)
    while words and words[0] in getattr(command, "commands", {}):
        command = command.commands[words.pop(0)]
    context = command.make_context("joma", [], resilient_parsing=True)
    context.resilient_parsing = False
    given, rest, _ = command.make_parser(context).parse_args(words)
    assert not rest, rest
    return given


@pytest.mark.parametrize(
    "page", [*PAGES, ROOT / "README.md", ROOT / "CONTRIBUTING.md"], ids=lambda page: page.stem
)
def test_every_command_of_a_page_has_the_options_that_it_is_given(page):
    named = {"claims": {claim.id for claim in claims()}, "reproduce": set(ORDER)}
    if page.name == "extend.md":
        named = {"claims": {"speed"}, "reproduce": {"times"}}
    for words in joma_commands(page.read_text()):
        if words[0] == "COMMAND":
            continue
        try:
            given = parsed([word for word in words if word != "…"])
        except Exception as error:
            raise AssertionError(f"joma {' '.join(words)}") from error
        for id in given.get("ids") or ():
            assert any(f"{known}.".startswith(f"{id}.") for known in named[words[0]]), words


def test_a_command_with_a_wrong_option_is_found():
    for wrong in ("scan x --gauge y", "train --steps", "demo x", "sweep --layer 1"):
        with pytest.raises(Exception, match=r"No such option|requires an argument|\['x'\]"):
            parsed(wrong.split())


def test_start_and_guides_are_short():
    texts = {name: prose.page_text(name) for name in (*prose.START, *prose.GUIDES)}
    words = {name: prose.word_count(text) for name, text in texts.items()}
    assert sum(words.values()) <= prose.MAX_WORDS
    assert [name for name in prose.GUIDES if words[name] > prose.MAX_GUIDE_WORDS] == []
    assert prose.mean_sentence(list(texts.values())) <= prose.MAX_SENTENCE


def test_words_and_sentences_are_counted():
    page = (
        "# A title\n\nAttention is `dense`. It [falls](x.md):\n\n- to 0,\n- or back.\n\n| a | b |\n"
    )
    assert prose.sentence_lengths(page) == [3, 2, 2, 2]
    assert prose.word_count(page) == 13
    assert prose.word_count("```python\nprint(1)\n```\n") == 0


@pytest.mark.parametrize("name", [*prose.START, *prose.GUIDES])
def test_a_page_opens_with_what_the_reader_can_do_after_it(name):
    assert re.match(
        r"# .+\n\n.{0,200}?After this page you (can|know)", prose.page_text(name), re.DOTALL
    )


def every_option(command):
    """All options of a command and of those below it."""
    yield from (param for param in command.params if param.param_type_name == "option")
    for below in getattr(command, "commands", {}).values():
        yield from every_option(below)


@pytest.mark.parametrize("page", [*PAGES, ROOT / "README.md"], ids=lambda page: page.stem)
def test_an_option_that_is_a_switch_is_not_described_with_a_value(page):
    takes_value = {
        name for option in every_option(ROOT_COMMAND) if not option.is_flag for name in option.opts
    }
    flags = {
        name for option in every_option(ROOT_COMMAND) if option.is_flag for name in option.opts
    } - takes_value
    assert {"--json", "--force"} <= flags
    described = re.findall(
        r"`(--[a-z-]+) ([^`]+)`", page.read_text()
    )  # `--out FILE`, at the start of its own code
    assert [" ".join(option) for option in described if option[0] in flags] == []


@pytest.fixture
def _registries():
    """What a page registers is gone after it."""
    before = set(gauges()), {claim.id for claim in claims()}, set(exhibits())
    alarms_before = all_alarms()
    backends_before = all_backends()
    yield
    for backend in all_backends():
        if backend not in backends_before:
            remove_backend(backend.name)
    for alarm in all_alarms():
        if alarm not in alarms_before:
            remove_alarm(alarm.kind)
    for name in set(gauges()) - before[0]:
        remove(name)
    for claim in claims():
        if claim.id not in before[1]:
            registry.remove(claim.id)
    for id in set(exhibits()) - before[2]:
        remove_exhibit(id)
    written = (
        "mine", "my_package", "my_package.claims", "my_training", "premises", "qk_clip", "small_training",
        "tensorboard_example", "tiled",
    )  # fmt: skip
    for name in written:
        sys.modules.pop(name, None)


def check_the_tutorial():
    """What its text says of its runs: which alert came first, which matrices moved, and that the fix is one."""
    steps = {row["kind"]: row["step"] for row in reversed(read_alerts(Path("runs/diverging")))}
    assert steps["logit growth"] + 30 < steps["diverging"]
    assert steps["logit growth"] + 30 < steps["collapse"]
    updates = joma.Run("runs/updates").frame().query("step > 1").groupby("gauge").value.median()
    for part in "qkvo":
        assert updates[f"update_ratio.{part}"] > 50 * updates["update_ratio.mlp_in"]
    assert read_alerts(Path("runs/fixed")) == []
    first, last = (joma.Run("runs/fixed").frame("loss").value.iloc[n] for n in (0, -1))
    assert last < first - 1


@pytest.mark.timeout(600)  # some seconds of one core each, and more than it looks on a busy machine
@pytest.mark.usefixtures("_registries")
@pytest.mark.parametrize("page", RUN)
def test_code_and_commands_of_a_page_run_and_print_what_it_says(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    scope = {}
    for snippet in snippets((DOCS / page).read_text()):
        if snippet.needs or snippet.commands == [
            "joma demo"
        ]:  # benchmarks/demo.py runs it as it is: tests/cli/test_demo.py
            continue
        execute(snippet, scope)
    if page == "tutorial.md":
        check_the_tutorial()
    if page == "getting-started.md":
        assert (scope["joint"].z - scope["folded"].z).__abs__().max() < 1e-6
        assert (tmp_path / "figure.svg").read_text().startswith("<svg")
        assert len(pd.read_csv(tmp_path / "numbers.csv"))
        assert (tmp_path / "runs/paper/fig3/verdict.json").exists()


def test_the_examples_of_loggers_log_what_the_run_has(tmp_path, monkeypatch):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.chdir(tmp_path)
    examples = dict(blocks("loggers.md", "python"))
    exec(examples["tensorboard_example.py"].replace("range(1, 301)", "range(1, 13)"), {})
    events = EventAccumulator("runs/tensorboard").Reload()
    frame = joma.Run("runs/logged").frame()
    entropy = frame[(frame.gauge == "entropy") & (frame.layer == 1)].groupby("step").value.mean()
    logged = {event.step: event.value for event in events.Scalars("joma/entropy/layer_01")}
    assert logged == pytest.approx(entropy.to_dict(), rel=1e-6)
    assert list(logged) == [1, 5, 10]

    class Logger(contextlib.nullcontext):
        rows, summary = {}, {}

        def log(self, numbers, step):
            self.rows[step] = numbers

    logger = Logger()
    logger.enter_result = logger
    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=lambda project: logger))
    exec(examples["wandb_example.py"].replace("range(1, 61)", "range(1, 8)"), {})
    assert list(logger.rows) == list(range(1, 8))
    assert {"loss", "joma/tau", "joma/entropy/layer_00"} <= set(logger.rows[5])
    assert set(logger.rows[6]) == {"loss"}
    assert logger.summary["phases"] == ["dense", "dense"]


def test_what_the_guide_says_of_the_demo_is_what_it_says(tmp_path):
    (shown,) = [
        s.printed
        for s in snippets((DOCS / "getting-started.md").read_text())
        if s.commands == ["joma demo"]
    ]
    with RunWriter.create(tmp_path, kind="train", config={}, axes={"entropy": ["layer"]}) as writer:
        for n, entropy in enumerate([2.6] * 5 + [1.5] * 5 + [2.1] * 5):
            writer.write(6 * n, {"entropy": [entropy], "loss": 7.2 - n / 5})
    assert agrees(
        "\n".join([*demo.story(Run(tmp_path)), "page: runs/demo/report.html", demo._NEXT]),
        shown.replace(" Healthy.", ""),  # without phases, nobody looked
        about=True,
    )


def test_the_minimal_example_is_short_and_goes_through_the_real_registration(tmp_path, monkeypatch):
    (title, code), ((_, toml), *_) = blocks("extend.md", "python")[0], blocks("extend.md", "toml")
    code_lines = [line for line in f"{code}{toml}".splitlines() if line]
    assert len(code_lines) < 50  # three extensions in one file, at 100 columns
    (tmp_path / title).write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    groups = tomllib.loads(toml)["project"]["entry-points"]
    for module in (
        "joma._measure.gauges.registry",
        "joma.paper.claims._registry",
        "joma.paper.exhibits.index",
    ):
        entries = {
            group: [EntryPoint(*item, group) for item in groups[group].items()] for group in groups
        }
        monkeypatch.setattr(f"{module}.entry_points", lambda group, entries=entries: entries[group])

    (commands,) = [
        snippet
        for snippet in snippets((DOCS / "extend.md").read_text())
        if snippet.kind == "console"
    ]
    monkeypatch.chdir(tmp_path)
    try:
        execute(commands, {})
        assert (
            "Sum of the singular values"
            in CliRunner().invoke(app, ["gauges", "nuclear_norm"]).output
        )
        assert (tmp_path / "runs/mine/times/figure.svg").exists()
        assert "Time × scale of the gradients" in (tmp_path / "runs/mine/report.html").read_text()
    finally:
        remove("nuclear_norm")
        registry.remove("speed")
        remove_exhibit("times")
        sys.modules.pop("mine", None)


def test_public_functions_document_every_argument_and_what_they_return():
    for module in (joma, joma.theory, joma.theory.isotropic, joma.paper.claims):
        for name in module.__all__:
            value = getattr(module, name)
            assert name == "__version__" or value.__doc__, name
            if not isinstance(value, types.FunctionType):
                continue
            text = inspect.getdoc(value) + "\n"
            part = re.search(r"^Arguments:\n(.*?)(?=^\S|\Z)", text, flags=re.S | re.M)
            told = re.findall(r"^ {4}([\w, ]+):", part[1], flags=re.M) if part else []
            missing = set(inspect.signature(value).parameters) - set(", ".join(told).split(", "))
            assert not missing, f"{name}: {missing}"
            assert "Returns:" in text, name


IMPORTED = """
import runpy, sys
for script in sys.argv[1:]:
    try:
        runpy.run_path(script, run_name="imported")
    except Exception as error:
        raise ImportError(script) from error
import benchmarks.__main__
"""


def test_scripts_of_the_docs_and_benchmarks_import_what_there_is():
    """They take hours and no test runs them; but a name that was changed elsewhere shows at once."""
    scripts = sorted(map(str, DOCS.glob("*.py")))
    assert len(scripts) > 5
    subprocess.run([sys.executable, "-c", IMPORTED, *scripts], check=True, cwd=ROOT)


def test_the_table_of_linear_against_nonlinear_nodes_is_that_of_the_record():
    page = (DOCS / "theory.md").read_text()
    assert between(page, "contrast", contrasted.table()) == page
    assert between(page, "contrast-labels", contrasted.label_table()) == page


def test_the_page_of_commands_has_every_command_as_it_is():
    page = (DOCS / "commands.md").read_text()
    expected = between(page, "commands", command_page.table())
    assert expected == page, "if not: python docs/make_figures.py pages"
    for name in ROOT_COMMAND.commands:
        assert page.count(f"\n| `joma {name}` | ") == 1, name


def test_the_front_page_says_what_the_readme_says():
    readme = (ROOT / "README.md").read_text()
    page = (DOCS / "index.md").read_text()
    assert front_page.filled(page, readme) == page, "if not: python docs/make_figures.py pages"
    first_sentence = re.search(r"^\*\*joma\*\* .*$", readme, flags=re.M)[0]
    assert page.startswith(f"# joma\n\n<!-- readme -->\n{first_sentence}\n")


def test_groups_of_the_reference_have_every_public_name_once():
    page = (DOCS / "api/joma.md").read_text()
    named = " ".join(re.findall(r"^<!-- api joma: (.+) -->$", page, flags=re.M)).split()
    is_documented = (type, types.FunctionType)
    public = [name for name in joma.__all__ if isinstance(getattr(joma, name), is_documented)]
    assert sorted(named) == sorted(public)
