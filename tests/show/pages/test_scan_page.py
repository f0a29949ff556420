"""The page of a scan: every checkpoint is on it, with its status, its numbers and what was said of it."""

import re

from joma._runs import RunWriter
from joma._show.pages.runs import report

from .pages import HOSTILE


def scan_run(path, checkpoints):
    """A scan of these: (step, name, status, note, digest); the stable rank of layer l at step s is s + l."""
    axes = {"stable_rank": ["layer"]}
    with RunWriter.create(
        path, kind="scan", config={"model": "m", "gauges": ["stable_rank"]}, axes=axes
    ) as writer:
        writer.note(layers={"stable_rank": ["h.0", "h.1"]})
        for step, name, status, note, digest in checkpoints:
            measured = {} if status == "failed" else {"stable_rank": [step, step + 1.0]}
            columns = {"checkpoint": name, "status": status, "note": note, "digest": digest}
            writer.write(step, {**measured, "bytes_read": 8}, **columns)
        writer.finish("done", "of 4 checkpoints 1 failed")
    return path


def test_every_checkpoint_is_told_with_its_numbers_its_note_and_its_copies(tmp_path):
    found = [(0, "step-0", "ok", None, "x"), (8, HOSTILE, "failed", "cut <off>", None),
             (16, "step-16", "partly", "no router", "y"), (32, "copy", "ok", None, "x")]  # fmt: skip
    text = report([scan_run(tmp_path / "scan", found)], tmp_path / "page.html").read_text()
    table = text[text.index('aria-label="Table of checkpoints"') :].split("</table>")[0]
    rows = [re.findall(r">([^<>]+)<", row) for row in table.split("<tr>")[2:]]
    assert [row[0] for row in rows] == ["0", "8", "16", "32"]
    assert [row[2:] for row in rows] == [
        ["ok", "0.5", "copy"], ["failed", "–", "–"], ["partly", "16.5", "–"], ["ok", "32.5", "step-0"],
    ]  # fmt: skip
    assert HOSTILE not in text
    assert "cut &lt;off&gt;" in text
    assert (
        "4 checkpoints: 2 measured, 1 in part, 1 failed. 2 of them have the weights of another one."
        in text
    )
    assert 'badge fair">done</span> of 4 checkpoints 1 failed' in text
    assert text.count('class="chart"') == 1


def test_a_scan_of_which_nothing_could_be_read_has_a_page_too(tmp_path):
    path = scan_run(tmp_path / "scan", [(0, "step-0", "failed", "no weights", None)])
    text = report([path], tmp_path / "page.html").read_text()
    assert "no weights" in text
    assert 'class="chart"' not in text
