"""`joma demo` as a stranger meets it, with a model and a training smaller than the real ones."""

import math
import sys
import webbrowser
from dataclasses import replace

import pytest

from joma import Run
from joma._runs.writer import RunWriter
from joma.cli import browser, demo, main


@pytest.fixture
def joma(tmp_path, monkeypatch, capsys):
    """The entry point in a folder of its own: words -> (exit code, stdout, stderr)."""
    small = replace(
        demo.SETTINGS,
        vocabulary=200,
        width=16,
        hidden=16,
        batch=4,
        length=8,
        steps=6,
        valid_windows=1,
    )
    monkeypatch.setattr(demo, "SETTINGS", small)
    monkeypatch.chdir(tmp_path)

    def call(*words):
        monkeypatch.setattr(sys, "argv", ["joma", *words])
        code = 0
        try:
            main()
        except SystemExit as end:
            code = end.code or 0
        shown = capsys.readouterr()
        return code, shown.out, shown.err

    return call


def test_it_leaves_a_run_and_its_page_opens_it_if_wanted_and_the_next_has_a_number(
    joma, tmp_path, monkeypatch
):
    opened = []
    monkeypatch.setattr(webbrowser, "open", opened.append)
    monkeypatch.setattr(browser, "has_windows", lambda: True)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    for folder, more in (("runs/demo", ["--no-open"]), ("runs/demo-2", [])):
        code, out, err = joma("demo", "--seed", "3", *more)
        assert code == 0, err
        assert f"page: {folder}/report.html" in out
        assert "joma.watch(model" in out
        page = (tmp_path / folder / "report.html").read_text()
        sentence = out.splitlines()[0]
        assert sentence.startswith("Attention of layer 0 ")
        assert f'<p class="lead">{sentence}</p>' in page
        run = Run(tmp_path / folder)
        assert run.done
        assert (run.info["seed"], run.latest().step.max()) == (3, 6)
    assert opened == [(tmp_path / "runs/demo-2/report.html").as_uri()]
    monkeypatch.setattr(sys.stdout, "isatty", lambda: False, raising=False)
    assert joma("demo", "--seed", "3")[0] == 0
    assert len(opened) == 1  # not into a pipe


def test_a_text_browser_is_not_started_on_a_terminal_without_windows(monkeypatch):
    monkeypatch.setattr(sys, "platform", "linux")
    opened = []
    monkeypatch.setattr(webbrowser, "open", opened.append)
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER"):
        monkeypatch.delenv(name, raising=False)
    assert not browser.open_page("file:///page.html")
    monkeypatch.setenv("WAYLAND_DISPLAY", "wayland-0")
    browser.open_page("file:///page.html")
    assert opened == ["file:///page.html"]


def test_folders_that_are_taken_are_refused_in_a_sentence(joma, tmp_path):
    (tmp_path / "file").write_text("mine")
    RunWriter.create(tmp_path / "run", kind="watch", config={}).finish("done")
    for place, reason in (
        ("file", "stays as it is"),
        ("run", "choose another --out"),
        ("/proc/x", "another --out"),
    ):
        code, _, err = joma("demo", "--out", place)
        assert code == 2
        assert reason in err
        assert err.count("\n") == 1
    assert (tmp_path / "file").read_text() == "mine"


def test_ctrl_c_is_one_line(joma, monkeypatch):
    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("joma._train.language.train", interrupted)
    code, _, err = joma("demo")
    assert code == 130
    (_, told) = [line for line in err.splitlines() if line]  # the first says what begins
    assert told == "joma: interrupted; what was complete is kept, nothing is half-written"


def test_the_story_counts_words_by_the_exponential_of_the_entropy(tmp_path):
    counts = [16] * 5 + [2] * 5 + [8] * 5
    with RunWriter.create(tmp_path, kind="train", config={}, axes={"entropy": ["layer"]}) as writer:
        for n, count in enumerate(counts):
            writer.write(10 * n, {"entropy": [math.log(count)], "loss": 5.0 - n / 10})
    lines = demo.story(Run(tmp_path))
    assert (
        lines[0] == "Attention of layer 0 fell from 16 to 2.0 words by step 50 and came back to 8."
    )
    assert "2.77 → 0.69" in lines[1]
    assert lines[1].endswith("the lowest single one is 0.69 at step 50: dip and bounce")
