"""The page of an audit: its faults are on it, with what to do, and its status is not green."""

import re
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

import joma
from joma._show.pages.runs import report

FAULTS = ("identical", "not finite", "unreadable")


def series(folder, count=8):
    """Checkpoints that move a little from step to step."""
    a, b = torch.randn(2, 100, 8, generator=torch.Generator().manual_seed(0))
    for n in range(count):
        (folder / f"step-{n}").mkdir(parents=True)
        save_file(
            {"a.weight": a + 0.01 * n, "b.weight": b + 0.02 * n},
            folder / f"step-{n}/model.safetensors",
        )
    return folder


def with_faults(folder):
    """Three faults, one of each of FAULTS."""
    shutil.copy(folder / "step-1/model.safetensors", folder / "step-0/model.safetensors")
    damaged = load_file(folder / "step-7/model.safetensors")
    damaged["a.weight"][3, 3] = torch.nan
    save_file(damaged, folder / "step-7/model.safetensors")
    (folder / "step-4/model.safetensors").write_bytes(b"cut off")
    return folder


def cells(text):
    """The table of faults, row by row."""
    table = text[text.index('aria-label="Table of faults"') :].split("</table>")[0]
    return [re.findall(r">([^<>]+)<", row) for row in table.split("<tr>")[2:]]


def test_the_faults_of_an_audit_are_on_its_page_in_red(tmp_path):
    found = joma.audit(with_faults(series(tmp_path / "series")), run=tmp_path / "run", level="full")
    assert sorted({fault.kind for fault in found.faults}) == sorted(FAULTS)
    text = report(tmp_path / "run", tmp_path / "page.html").read_text()
    rows = cells(text)
    assert [row[1] for row in rows] == [fault.kind for fault in found.faults]
    assert [row[0] for row in rows] == [", ".join(fault.checkpoints) for fault in found.faults]
    assert all(row[3] == fault.what_to_do for row, fault in zip(rows, found.faults, strict=True))
    count = len(found.faults)
    assert f'<span class="badge bad">{count} faults found</span>' in text
    assert f'<span class="badge bad">faults</span> {count} faults in 4 of 8 checkpoints' in text
    assert 'badge good">done' not in text
    assert '<span class="dot bad" aria-hidden="true">' in text  # in the list of contents
    assert text.count('class="chart"') == 1
    assert "is a run of kind" not in text


def test_an_audit_without_faults_is_green_and_says_so(tmp_path):
    assert joma.audit(series(tmp_path / "series"), run=tmp_path / "run").ok
    text = report(tmp_path / "run", tmp_path / "page.html").read_text()
    assert '<span class="badge good">no faults found</span>' in text
    assert '<span class="badge good">done</span>' in text
    assert "Table of faults" not in text
    assert "Not judged: " in text


def test_an_audit_that_was_stopped_is_not_called_healthy(tmp_path, monkeypatch):
    """The faults of an earlier call are not taken for those of the one that was stopped."""
    from joma._checkpoints.audit import audit as module

    folder = series(tmp_path / "series", 5)
    joma.audit(folder, run=tmp_path / "run", revisions="0..3")

    def stopped(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "gather", stopped)
    with pytest.raises(KeyboardInterrupt):
        joma.audit(folder, run=tmp_path / "run")
    text = report(tmp_path / "run", tmp_path / "page.html").read_text()
    assert "no faults found" not in text
    assert "4 checkpoints gathered so far. Faults are judged at the end" in text
    assert 'badge good">' not in text


def test_an_audit_by_hashes_has_a_page_without_a_figure(tmp_path):
    joma.audit(series(tmp_path / "series"), run=tmp_path / "run", level="hashes")
    text = report(tmp_path / "run", tmp_path / "page.html").read_text()
    assert "no change between checkpoints to draw" in text
    assert "8 checkpoints by hashes:" in text
