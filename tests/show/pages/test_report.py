"""The page as text: complete, self-contained, typeset, safe, and written whole or not at all."""

import base64
import errno
import gzip
import html
import json
import os
import re
import shutil
import xml.etree.ElementTree as ET
from contextlib import nullcontext
from dataclasses import replace
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

import altair as alt
import numpy as np
import pandas as pd
import pytest
import vl_convert
from typer.testing import CliRunner

from joma._jobs import InProcess
from joma._runs import Run, RunError, RunWriter
from joma._runs.curve import ENTROPY
from joma._show.pages.claims import group_of
from joma._show.pages.document import MOST_OF_ALL
from joma._show.pages.page import write_report
from joma._show.pages.plot import plot
from joma._show.pages.render import asset, capitalized
from joma._show.pages.runs import collect, report
from joma._show.pages.typeset import formula, markdown_table, typeset
from joma._show.plots import specification
from joma._show.plots.compare import MEAN
from joma._show.plots.compare import draw as compare
from joma._show.plots.interactive import interactive
from joma.cli import app, main
from joma.paper import claims as registry
from joma.paper.claims import Claim, claims
from joma.paper.exhibits import exhibits, get, make_exhibit
from joma.paper.exhibits.base import packaged_model
from joma.paper.exhibits.choices import with_settings
from joma.paper.exhibits.runner import Runner
from joma.paper.recorded import longer_run
from joma.paper.verdict import Verdict

from .pages import HOSTILE, watch_run


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    return [watch_run(folder / "a", HOSTILE), watch_run(folder / "b", "plain", 0.5)]


@pytest.fixture(scope="module")
def page(runs):
    return report(runs, runs[0].parent / "report.html").read_text()


class Tags(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.tags, self.open, self.wrong = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag not in ("meta", "link", "input", "br", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        if not self.open or self.open.pop() != tag:
            self.wrong.append((tag, self.getpos()))


def unpacked(page, id):
    text = re.search(rf'<script type="text/plain" id="{re.escape(id)}">([^<]*)</script>', page)[1]
    return gzip.decompress(base64.b64decode(text))


def test_every_formula_of_every_claim_becomes_mathml():
    texts = [
        getattr(c, name) or ""
        for c in claims()
        for name in ("paper_formula", "corrected_formula", "derivation")
    ]
    formulas = [
        a or b for text in texts for a, b in re.findall(r"\$\$(.+?)\$\$|\$(.+?)\$", text, re.S)
    ]
    assert len(formulas) > 100
    for latex in formulas:
        result = formula(latex)
        assert result.startswith("<math"), latex
        ET.fromstring(result)  # well-formed
        assert "\\" not in re.sub("<[^>]*>", "", result), latex


def test_formulas_say_what_they_say():
    assert ">𝔼<" in formula(r"\mathbb E[x]")
    assert ">ℝ<" in formula(r"\mathbb R")
    assert "<mfrac>" in formula(r"\frac{a}{b}")
    assert "<msubsup>" in formula("v_k^2")


@pytest.mark.parametrize("latex", [r"\nosuchmacro{x}", r"\frac{a", r"a & <b>"])
def test_a_formula_that_cannot_be_converted_is_shown_as_its_source(latex):
    text = formula(latex)
    assert "<b>" not in text
    if not text.startswith("<math"):
        assert text.startswith("<code>")
    else:
        ET.fromstring(text)


def test_scripts_in_prose_and_names_with_underscores():
    assert typeset("z_m = Σ_k v_k²") == "z<sub>m</sub> = Σ<sub>k</sub> v<sub>k</sub>²"
    assert typeset("drift ∝ ε^1.001, x^2.") == "drift ∝ ε<sup>1.001</sup>, x<sup>2</sup>."
    assert typeset("e^{z_l}") == "e<sup>z<sub>l</sub></sup>"
    assert typeset("attention_lr / mlp_lr") == "attention_lr / mlp_lr"
    assert typeset("a < b & `x_y`") == "a &lt; b &amp; <code>x_y</code>"


def test_a_markdown_table_keeps_its_cells():
    text = markdown_table("Words & more.\n\n| a | b |\n|---|--:|\n| x<y | 1 |\n| z | 2 |")
    assert re.findall(r"<td[^>]*>(.*?)</td>", text) == ["x&lt;y", "1", "z", "2"]
    assert "Words &amp; more." in text


@pytest.mark.parametrize(
    ("id", "group"), [("T2.invariant", "Theorem 2"), ("L5", "Lemma 5"), ("E56.order", "Eqn. 56"), ("S7.x", "Section 7")]
)  # fmt: skip
def test_claims_are_grouped_by_their_place_in_the_paper(id, group):
    assert group_of(id) == group


def test_hostile_names_stay_text(page):
    tags = Tags(page)
    assert not tags.wrong
    assert not tags.open
    assert not [attributes for tag, attributes in tags.tags if "onerror" in attributes]
    assert not [tag for tag, _ in tags.tags if tag == "img"]
    assert "&lt;/script&gt;&lt;img src=x onerror=alert(1)&gt;" in page


def test_the_page_refers_to_nothing_outside(page):
    tags = Tags(page)
    for tag, attributes in tags.tags:
        for name in ("src", "href"):
            address = attributes.get(name, "")
            assert not re.match(r"(https?:)?//", address), (tag, address)
    policy = next(
        a["content"] for t, a in tags.tags if a.get("http-equiv") == "Content-Security-Policy"
    )
    assert "default-src 'none'" in policy


def test_embedded_files_are_the_run(page, runs):
    rows = pd.read_csv(pd.io.common.BytesIO(unpacked(page, "plain-csv")))
    pd.testing.assert_frame_equal(rows, Run(runs[1]).frame(), check_dtype=False)


def test_the_page_tells_what_each_layer_did_and_by_which_rule(page, tmp_path):
    assert "What each layer did" in page
    assert (
        "<dt>attention entropy (nats), layer 1</dt><dd>12.50 → 12.50 (step 1) → 14.50: flat</dd>"
        in page
    )
    assert f"<dd>{ENTROPY.smoothed()}{ENTROPY}</dd>" in page
    axes = {"entropy": ["layer"], "phase": ["layer"]}
    with RunWriter.create(tmp_path / "run", kind="train", config={}, axes=axes) as w:
        w.note(phases=["dense", "collapsed"])
        for step, entropy in enumerate([2.0, 2.0, 1.0, 0.0, 0.0, 0.0]):
            w.write(step, {"entropy": [entropy, 2 - entropy], "phase": [int(entropy == 0), 0]})
    text = report([tmp_path / "run"], tmp_path / "page.html").read_text()
    assert "(step 3) → 0.00: collapse</dd>" in text
    assert "2.00: flat</dd>" in text


def test_an_exhibit_whose_runs_are_gone_keeps_its_picture_and_says_what_is_missing(
    tmp_path, monkeypatch
):
    exhibit = get(["fig3"])[0]
    folder = make_exhibit(exhibit, out=tmp_path).path
    member = watch_run(tmp_path / "fig3-runs", "member")
    info = json.loads((folder / "run.json").read_text())
    info["runs"] = [{"path": "../fig3-runs", "gauges": ["loss"], "columns": {}}]
    (folder / "run.json").write_text(json.dumps(info))
    assert make_exhibit(exhibit, out=tmp_path).fresh is False
    shutil.move(member, tmp_path / "elsewhere")
    text = report([folder], tmp_path / "page.html").read_text()
    assert "There is no table of the numbers" in text
    assert text.count('<svg class="still"') == 1
    assert 'id="fig3-csv"' not in text
    assert make_exhibit(exhibit, out=tmp_path).fresh  # what has lost its runs is made again


def test_runs_over_each_other_show_the_mean_of_heads_and_layers(runs):
    specified = json.loads(specification(compare({"a": Run(runs[0]), "b": Run(runs[1])})))
    panel = next(
        p
        for p in specified["concat"]
        if p["encoding"]["y"]["title"].startswith("attention entropy")
    )
    rows = pd.DataFrame(specified["datasets"][panel["data"]["name"]])
    for run, level in (("a", 0.0), ("b", 0.5)):
        for which, base in ((MEAN, 5.0), ("layer 0", 0.0), ("layer 1", 10.0)):
            mine = rows[(rows.run == run) & (rows.which == which)].sort_values("step")
            np.testing.assert_allclose(mine.value, level + base + np.array([1, 2, 4, 8]))


def test_scans_get_an_axis_that_has_room_for_step_zero(tmp_path):
    paths = [watch_run(tmp_path / n, n, kind="scan", steps=(0, 1, 512, 143_000)[1:]) for n in "ab"]
    specified = json.loads(specification(compare({p.name: Run(p) for p in paths})))
    assert {panel["encoding"]["x"]["scale"]["type"] for panel in specified["concat"]} == {"symlog"}


def test_a_sweep_is_its_runs_and_no_run_is_said(tmp_path, runs):
    assert [run.path.name for run in collect([runs[0].parent])] == ["a", "b"]
    assert len(collect([runs[0], runs[0].parent])) == 2
    (tmp_path / "empty").mkdir()
    with pytest.raises(RunError, match=r"empty is not a run.*No folder inside"):
        collect([tmp_path / "empty"])
    with pytest.raises(RunError, match="does not exist"):
        collect([tmp_path / "nothing"])


def test_the_command_writes_the_page_and_says_what_is_wrong(tmp_path, runs, monkeypatch, capsys):
    out = tmp_path / "page.html"
    result = CliRunner().invoke(app, ["report", str(runs[1]), "--out", str(out)])
    assert result.exit_code == 0, result.output
    assert out.stat().st_size < 15e6
    (tmp_path / "file").write_text("x")
    for arguments in (
        [str(tmp_path), "--out", str(out)],
        [str(runs[1]), "--out", str(tmp_path / "file/page.html")],
    ):
        monkeypatch.setattr("sys.argv", ["joma", "report", *arguments])
        with pytest.raises(SystemExit) as end:
            main()
        assert end.value.code == 2
        assert capsys.readouterr().err.startswith("joma: ")


def shows(page):
    """The heading of a page."""
    return unescape(re.search(r"<h1>(.*?)</h1>", page.read_text())[1])


def copies(runs, folder):
    return [Path(shutil.copytree(run, folder / run.name)) for run in runs]


def test_the_page_of_a_run_is_in_its_folder_and_no_other_page_is_replaced(
    tmp_path, runs, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    a, b = copies(runs, tmp_path / "runs")
    (tmp_path / "report.html").write_text("the paper")  # of `make reproduce`
    for run in ("runs/a", "runs/b", "runs/a"):  # the last time it replaces its own page
        assert joma(monkeypatch, "report", run) == 0
        assert f"report: {run}/report.html" in capsys.readouterr().out
    assert (shows(a / "report.html"), shows(b / "report.html")) == (
        Run(a).info["name"],
        Run(b).info["name"],
    )
    assert (tmp_path / "report.html").read_text() == "the paper"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.html", "runs"]


def test_the_page_of_several_runs_has_their_names_and_a_page_of_its_own(
    tmp_path, runs, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    copies(runs, tmp_path / "old")
    copies(runs, tmp_path / "new")
    pages = {
        ("old/a", "old/b"): "old/report-a+b.html",
        ("new/a", "new/b/"): "new/report-a+b.html",
        ("new",): "new/report.html",
        ("old/a", "old/../old/a"): "old/a/report.html",
    }
    for folders, page in pages.items():
        assert joma(monkeypatch, "report", *folders) == 0
        assert f"report: {page} (" in capsys.readouterr().out
    mixed = report(["old/a", "new/a"])
    assert re.fullmatch(r"report-old-a\+new-a-[0-9a-f]{8}\.html", str(mixed))
    made = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.html")}
    assert made == {*pages.values(), str(mixed)}
    assert report(["old/a", "new/a"]) == mixed


def test_a_default_place_is_not_taken_from_another_file(tmp_path, runs, monkeypatch, capsys):
    (run,) = copies(runs[:1], tmp_path)
    page = run / "report.html"
    page.write_text("my own notes")
    assert joma(monkeypatch, "report", run) == 2
    assert capsys.readouterr().err == (
        f"joma: {page} is there already, and is no page of the same runs: it stays as it is; name another file with "
        "--out (out= in Python)\n"
    )
    assert page.read_text() == "my own notes"
    assert report(run, page) == page  # what is named is replaced
    assert report(run) == page
    with pytest.raises(ValueError, match="no run folder was given"):
        report([])


def test_the_page_of_the_paper_is_not_replaced_by_one_of_its_runs(made):
    first = report(made)
    assert first == made / "report.html"
    assert report(made) == first
    text = first.read_text()
    with pytest.raises(
        RunError, match=r"report\.html is there already, and is no page of the same runs"
    ):
        report(made, title="mine")
    assert first.read_text() == text


@pytest.mark.parametrize("moment", ["os.fsync", "os.replace"])
def test_an_interrupted_report_leaves_the_old_one_whole(tmp_path, runs, monkeypatch, moment):
    out = tmp_path / "report.html"
    out.write_text("the old one")

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(moment, interrupt)
    with pytest.raises(KeyboardInterrupt):
        report([runs[1]], out)
    assert out.read_text() == "the old one"
    assert os.listdir(tmp_path) == ["report.html"]


@pytest.mark.skipif(os.geteuid() == 0, reason="nothing is read-only for root")
def test_a_read_only_folder_is_said_before_anything_is_drawn(tmp_path, runs, monkeypatch):
    tmp_path.chmod(0o500)
    monkeypatch.setattr("joma._show.pages.runs._section", lambda *_: pytest.fail("drawn"))
    with pytest.raises(RunError, match="cannot write"):
        report([runs[1]], tmp_path / "report.html")


def test_a_folder_that_cannot_be_made_is_said_before_anything_is_drawn(tmp_path, runs, monkeypatch):
    monkeypatch.setattr("joma._show.pages.runs._section", lambda *_: pytest.fail("drawn"))
    (tmp_path / "file").write_text("x")
    with pytest.raises(RunError, match="cannot write"):
        report([runs[1]], tmp_path / "file" / "report.html")


def test_a_full_disk_is_said_before_anything_is_drawn(tmp_path, runs, monkeypatch):
    monkeypatch.setattr("joma._show.pages.runs._section", lambda *_: pytest.fail("drawn"))
    low = shutil.disk_usage(tmp_path)._replace(free=3_000_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: low)
    with pytest.raises(RunError, match="3 MB are free"):
        report([runs[1]], tmp_path / "report.html")
    assert os.listdir(tmp_path) == []


def ids(page):
    return [attributes["id"] for _, attributes in Tags(page).tags if "id" in attributes]


def test_runs_of_one_exhibit_and_of_awkward_names_have_ids_of_their_own(tmp_path, fig3):
    for name in ("one", "two"):
        shutil.copytree(fig3, tmp_path / name / "fig3")
    paths = [
        watch_run(tmp_path / f"run{n}", name)
        for n, name in enumerate(["a", "a-title", "claims", "summary", "a"])
    ]
    text = report(
        [tmp_path / "one/fig3", tmp_path / "two/fig3", *paths], tmp_path / "page.html"
    ).read_text()
    found = ids(text)
    assert len(found) == len(set(found))
    headings = re.findall(r"<h2[^>]*>([^<]*)</h2>", text)
    assert len(headings) == len(set(headings))
    assert {
        f"A few components keep growing while most saturate ({name}/fig3)"
        for name in ("one", "two")
    } <= set(headings)
    links = re.findall(r'<li><span[^>]*></span><a href="#([^"]*)"', text)
    assert set(links) <= set(found)
    assert len(links) == 9  # runs, over each other, and each


def test_every_figure_is_in_the_page_as_a_picture_that_needs_no_script(page):
    without_scripts = re.sub(r"<script.*?</script>", "", page, flags=re.S)
    boxes = re.findall(r'<div class="chart"[^>]*>(.*?)</div>', without_scripts, flags=re.S)
    assert len(boxes) == 5  # over each other, each run, and the heads of each
    for box in boxes:
        picture = ET.fromstring(box)
        assert picture.get("class") == "still"
        assert len(list(picture.iter("path"))) > 5
        assert any("entropy" in (text.text or "") for text in picture.iter("text"))


def test_of_many_runs_there_is_one_figure_and_links(tmp_path, monkeypatch):
    paths = [watch_run(tmp_path / f"r{n:02}", f"r{n:02}", n, steps=(1, 2)) for n in range(13)]
    text = report(paths, tmp_path / "page.html").read_text()
    assert text.count('class="chart"') == 1
    assert all(f'href="r{n:02}/metrics.jsonl"' in text for n in range(13))
    assert "figure.svg" not in text
    monkeypatch.setattr("joma._show.pages.runs.MOST_RUNS", 2)
    text = report(paths[:2], tmp_path / "page.html").read_text()
    assert text.count('class="chart"') == 5
    assert "metrics.jsonl" not in text


def test_many_runs_have_colours_of_their_own(tmp_path):
    runs = {f"r{n}": Run(watch_run(tmp_path / str(n), f"r{n}", n, steps=(1, 2))) for n in range(9)}
    svg = vl_convert.vegalite_to_svg(specification(compare(runs)))
    strokes = re.findall(
        r'run: (r\d);[^>]* aria-roledescription="line mark"[^>]* stroke="([^"]+)"', svg
    )
    assert {run for run, _ in strokes} == set(runs)
    assert len({colour for _, colour in strokes}) == len(set(strokes)) == 9


def test_a_comparison_of_very_much_is_thinned(tmp_path, monkeypatch):
    runs = {n: Run(watch_run(tmp_path / n, n, steps=range(1, 301), layers=3)) for n in "ab"}

    def rows():
        drawn = json.loads(specification(compare(runs)))["datasets"].values()
        return pd.DataFrame([row for rows in drawn for row in rows])

    whole = rows()
    assert len(whole) == 2 * 300 * 5  # loss, and entropy of three layers and on average
    monkeypatch.setattr("joma._show.plots.compare.MOST", 1000)
    fewer = rows()
    assert 500 < len(fewer) <= 1000
    assert fewer.groupby(["run", "which"]).step.agg(
        ["min", "max"]
    ).drop_duplicates().to_numpy().tolist() == [[1, 300]]
    monkeypatch.setattr("joma._show.plots.compare.MOST", 150)
    assert set(rows().which) == {MEAN}


@pytest.mark.parametrize("room", [True, False])
def test_what_has_no_room_is_left_out_or_linked(tmp_path, monkeypatch, room):
    path = plot(watch_run(tmp_path / "run", "run"))
    for name in ("MOST",) if room else ("MOST", "MOST_OF_ALL"):
        monkeypatch.setattr(f"joma._show.pages.document.{name}", 0)
    text = report([path], tmp_path / "page.html").read_text()
    assert ('<svg class="still"' in text) == room
    assert "data-file" not in text.split("<script")[0]
    assert ('class="chart"' in text) == room
    assert ("no room for this figure" in text) != room


def test_everything_that_can_be_embedded_stays_under_15_mb(page):
    embedded = sum(
        map(len, re.findall(r'<script type="text/plain" id="(?!vega")[^>]*>([^<]*)<', page))
    )
    assert (
        len(page.encode()) - embedded + MOST_OF_ALL < 14.5e6
    )  # and the claims take less than half a megabyte


@pytest.fixture(scope="module")
def fig3(tmp_path_factory):
    return make_exhibit(get(["fig3"])[0], out=tmp_path_factory.mktemp("made")).path


@pytest.fixture
def made(tmp_path, fig3, monkeypatch):
    """A folder with fig3, an engine that works here, and three claims: good, accepting its control, and broken."""
    monkeypatch.setattr(
        "joma.paper.exhibits.runner.open_engine", lambda *args, **rest: nullcontext(InProcess())
    )
    common = {"source": "", "statement": "s", "measures": "", "control": "", "tolerance": 0.5}
    checks = {
        "T1": lambda variant: np.inf if variant == "control" else 0.0,
        "T2": lambda variant: 0.25,
        "T3": lambda variant: 1 / 0,
    }
    some = tuple(Claim(id=id, check=check, **common) for id, check in checks.items())
    monkeypatch.setattr(registry, "claims", lambda: some)
    shutil.copytree(fig3, tmp_path / "out/fig3")
    return tmp_path / "out"


def test_a_folder_that_reproduce_wrote_becomes_its_page_again(made):
    found = Runner(get(["fig3"]), out=made, claims=True).run()
    assert [result.ok for result in found.claims] == [True, False, False]
    text = report([made], made / "again.html").read_text()
    rows = dict(
        re.findall(r'<tr data-verdict="([^"]*)" data-group="([^"]*)">', text.replace("\n", ""))
    )
    assert re.findall(r'<th scope="row">(T\d)<', text) == ["T1", "T2", "T3"], rows
    assert "inf, rejected" in text
    assert "NOT REJECTED" in text
    assert "ZeroDivisionError" in text
    watch_run(made / "mine", "my run")  # another run beside them is shown too
    text = report([made], made / "again.html").read_text()
    assert re.findall(r"<h2 id[^>]*>([^<]*)</h2>", text)[-2:] == ["Claims", "my run"]


def joma(monkeypatch, *arguments):
    monkeypatch.setattr("sys.argv", ["joma", *map(str, arguments)])
    try:
        main()
    except SystemExit as end:
        return end.code or 0


def test_what_failed_is_on_the_page_instead_of_what_was_there_before(made, monkeypatch, capsys):
    def broken(*_):
        raise ValueError("no <luck>")

    (fig3,) = get(["fig3"])
    monkeypatch.setattr(
        "joma.paper.exhibits.fig3.EXHIBIT",
        replace(fig3, experiment=replace(fig3.experiment, run=broken)),
    )
    assert joma(monkeypatch, "reproduce", "fig3", "--out", made, "--force") == 1
    assert joma(monkeypatch, "report", made, "--out", made / "again.html") == 0
    for name in ("report.html", "again.html"):
        text = (made / name).read_text()
        assert "ValueError: no &lt;luck&gt;" in text
        assert "this run:" not in text
        assert 'class="chart"' not in text
    monkeypatch.undo()
    assert capsys.readouterr().out.count("ValueError: no <luck>") == 1


def test_claims_that_could_not_be_checked_are_on_the_page(made, monkeypatch):
    assert Runner([], out=made, claims=True).run().claims is not None
    monkeypatch.setattr(registry, "check", lambda claim: 1 / 0)
    found = Runner([], out=made, claims=True, force=True).run()
    assert found.claims_error
    text = report([made], made / "again.html").read_text()
    assert "The claims could not be checked: ZeroDivisionError: division by zero" in text
    assert "data-group" not in text  # the old ones


def test_a_disk_that_is_full_in_the_end_does_not_hide_the_verdicts(made, monkeypatch, capsys):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("joma._show.pages.page.write_page", full)
    assert joma(monkeypatch, "reproduce", "fig3", "--out", made) == 2
    said = capsys.readouterr()
    assert "holds" in said.out
    assert "No space left on device" in said.err


def units(node):
    if "mark" in node:
        yield node
    for key in ("layer", "hconcat", "vconcat", "concat"):
        for child in node.get(key, []):
            yield from units(child)


def test_interaction_is_added_to_a_copy_with_names_that_are_used_once():
    data = pd.DataFrame({"x": [0, 1, 0, 1], "y": [1.0, 2.0, 3.0, 4.0], "layer": [0, 0, 1, 1]})
    line = alt.Chart(data).mark_line().encode(x="x:Q", y="y:Q", color="layer:N")
    text = alt.Chart(data).mark_text().encode(x="x:Q", y="y:Q", text="layer:N")
    drawn = json.loads(specification(alt.vconcat(line + text, line | line)))
    before = json.dumps(drawn)
    live, series = interactive(drawn)
    assert json.dumps(drawn) == before
    params = [param for unit in units(live) for param in unit.get("params", [])]
    names = [param["name"] for param in params]
    assert len(names) == len(set(names))
    assert sum(name.startswith("zoom") for name in names) == 3  # one a view
    curves = live["usermeta"]["curves"]
    assert len(curves) == 3
    assert {unit["name"] for unit in units(live) if unit["mark"]["type"] == "line"} == set(curves)
    assert all((about["x"]["field"], about["y"]["field"], about["series"]) == ("x", "y", ["layer"])
               for about in curves.values())  # fmt: skip
    assert [vars(s)["values"] for s in series] == [[0, 1]]  # the colour scale is shared by all
    lines = [unit for unit in units(live) if unit["mark"]["type"] == "line"]
    assert all(
        unit["encoding"]["opacity"]["condition"]["param"] == series[0].name for unit in lines
    )


def test_independent_colours_have_switches_of_their_own():
    data = pd.DataFrame({"x": [0, 1], "y": [1.0, 2.0], "a": ["p", "q"]})
    line = alt.Chart(data).mark_line().encode(x="x:Q", y="y:Q", color="a:N")
    drawn = json.loads(specification(alt.hconcat(line, line).resolve_scale(color="independent")))
    assert len(interactive(drawn)[1]) == 2


def test_what_is_not_decided_is_grey_counted_apart_and_says_what_would_decide_it(
    tmp_path, monkeypatch
):
    monkeypatch.setattr("joma.paper.recorded.longer_run", lambda id: None)
    exhibit = replace(get(["fig3"])[0], would_decide="a <larger> model", revised="it was judged")
    outcome = make_exhibit(exhibit, out=tmp_path)
    stored = json.loads((outcome.path / "verdict.json").read_text())
    (outcome.path / "verdict.json").write_text(json.dumps(stored | {"verdict": "inconclusive"}))
    text = write_report(tmp_path, [exhibit], None, preset="default", seed=0).read_text()
    assert "<dt>Would decide</dt><dd>a &lt;larger&gt; model</dd>" in text
    assert (
        f'<span class="badge neutral" title="inconclusive: {Verdict.INCONCLUSIVE.meaning}">' in text
    )
    assert "Inconclusive: Figure 3: growth of the components</h2>" in text
    assert 'Inconclusive: <a href="#fig3">Figure 3</a>' in text
    assert "Changed after a look at results: it was judged." in text
    assert "--seed 100" in text


def plain(markup):
    """The words of a piece of HTML."""
    words = " ".join(html.unescape(re.sub("<[^>]*>", " ", str(markup))).split())
    return re.sub(r" ([:;,.])", r"\1", words)


def test_only_what_the_paper_states_counts_as_the_papers(tmp_path):
    beyond = {id for id, exhibit in exhibits().items() if not exhibit.is_from_paper}
    assert beyond == {
        "parameterised", "realtext", "softmax", "optimisers", "foretold", "clock", "sinks", "lowrank",
        "finetuning",
    }  # fmt: skip
    mine = replace(
        get(["fig3"])[0], id="mine", experiment=replace(get(["fig3"])[0].experiment)
    )  # as a user registers one
    assert not mine.is_from_paper
    assert with_settings(get(["fig3"])[0], "default", ["times=20"]).is_from_paper


def test_the_verdicts_on_one_packaged_model_are_these():
    settings = {id: exhibit.experiment.settings["laptop"] for id, exhibit in exhibits().items()}
    resting = {id for id, chosen in settings.items() if packaged_model(chosen)}
    # embeddings and sinks read several models
    assert resting == {"finetuning", "fig10"}


def test_the_section_of_an_exhibit_is_headed_by_the_run_that_its_figure_shows(made):
    stored = json.loads((made / "fig3/verdict.json").read_text())
    (made / "fig3/verdict.json").write_text(json.dumps(stored | {"verdict": "fails"}))
    text = report([made], made / "again.html").read_text()
    assert longer_run("fig3").verdict is Verdict.HOLDS  # the longer run has no say
    heading = re.search(r'<h2 id="fig3-title">(.*?)</h2>', text)[1]
    assert heading == get(["fig3"])[0].message(Verdict.FAILS)
    rows = re.search(r'<dl class="outcome">(.*?)</dl>', text, flags=re.S)[1]
    assert f"<dt>Measured</dt><dd>{stored['measured']}</dd>" in rows
    assert "<dt>A longer run found</dt>" in rows
    assert "<dt>Rests on</dt><dd>this run: preset default, seed 100" in rows


def test_the_paper_page_has_no_word_in_capitals_that_are_not_in_the_source():
    assert "text-transform" not in asset("page.css") + asset("runs.css")
    assert capitalized("ẑ from the first integral") == "ẑ from the first integral"
    assert capitalized("attention turns sparse") == "Attention turns sparse"


def test_pictures_and_figures_on_the_page_have_as_many_digits_as_a_screen_shows():
    data = pd.DataFrame({"x": [0, 1], "y": [1 / 3, 200_000.0], "step": [123_456_789, 2]})
    drawn = json.loads(
        specification(alt.Chart(data).mark_line().encode(x="x:Q", y="y:Q", detail="step:N"))
    )
    (rows,) = interactive(drawn)[0]["datasets"].values()
    assert [row["y"] for row in rows] == [0.33333, 200_000.0]
    assert rows[0]["step"] == 123_456_789
