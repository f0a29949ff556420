"""`--set key=value`: every setting of every exhibit can be given as text, and what cannot be read is refused."""

import json
import sys

import pytest

from joma.cli import main
from joma.paper.exhibits import exhibits, make_exhibit
from joma.paper.exhibits.choices import choose, with_settings

FIG6 = exhibits()["fig6"].experiment.settings


def written(value):
    """A setting as one types it."""
    if value is None or isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict) or (
        isinstance(value, (list, tuple)) and (not value or isinstance(value[0], list))
    ):
        return json.dumps(value)
    return ",".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


@pytest.mark.parametrize("id", exhibits())
def test_every_setting_of_every_preset_can_be_typed(id):
    experiment = exhibits()[id].experiment
    for preset, settings in experiment.settings.items():
        for key, value in settings.items():
            as_read = json.loads(json.dumps(value))  # lists, no tuples
            assert choose(experiment.settings, preset, [f"{key}={written(value)}"]) == {
                key: as_read
            }, (preset, key)


def test_an_exhibit_with_other_settings_is_otherwise_the_same():
    exhibit = exhibits()["fig6"]
    changed = with_settings(exhibit, "laptop", ["every=7", "vocabulary=none"])
    expected = {**FIG6["laptop"], "every": 7, "vocabulary": None}
    assert changed.experiment.settings == {**FIG6, "laptop": expected}
    assert (changed.id, changed.experiment.run) == (exhibit.id, exhibit.experiment.run)
    assert exhibit.experiment.settings["laptop"]["every"] == FIG6["laptop"]["every"] != 7


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (
            ["stebs=7"],
            r"unknown setting 'stebs'. Did you mean 'steps'.* Known: data, vocabulary, layers",
        ),
        (["steps"], r"'steps' is not key=value. Keys: data, vocabulary, layers"),
        (["every=1.5"], r"every must be a whole number, got '1.5'"),
        (["every="], r"every must be a whole number, got ''"),
        (["lr=fast"], r"lr must be a number, got 'fast'"),
        (["lr=nan"], r"lr must be a number, got 'nan'"),
        (
            ["layers=1,two"],
            r"layers must be a list with commas, each item a whole number, got '1,two'",
        ),
        (["vocabulary=all"], r"vocabulary must be a whole number or none, got 'all'"),
        (["steps=1", "steps=2"], "steps is given twice"),
    ],
)
def test_what_cannot_be_read_is_refused(texts, message):
    with pytest.raises(ValueError, match=message):
        choose(FIG6, "laptop", texts)


def command(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["joma", "reproduce", *arguments])
    with pytest.raises(SystemExit) as end:
        main()
    return end.value.code


def test_the_command(monkeypatch, capsys, tmp_path):
    out = f"--out={tmp_path}"
    assert command(monkeypatch, "fig3", "--set", "times=21", "--set", "t_end=20", out) == 0
    settings = json.loads((tmp_path / "fig3/run.json").read_text())["config"]["settings"]
    assert settings == {"t_end": 20.0, "times": 21}
    assert "fig3" in (tmp_path / "report.html").read_text()
    assert command(monkeypatch, "fig3", out) == 2  # the folder has other settings
    assert (
        "holds another run (fig3, preset default, t_end 20.0, times 21, seed 100)"
        in capsys.readouterr().err
    )
    assert command(monkeypatch, "fig3", "--set", "time=3", out) == 2
    assert "unknown setting 'time'" in capsys.readouterr().err
    assert command(monkeypatch, "fig2", "fig3", "--set", "times=21", out) == 2
    assert "--set changes the settings of one exhibit" in capsys.readouterr().err


def test_a_preset_without_its_data_says_where_it_looked_and_what_to_do(tmp_path, monkeypatch):
    def unreachable(*args, **kwargs):
        raise ValueError("no route")

    monkeypatch.delenv("JOMA_DATA", raising=False)
    monkeypatch.setattr("joma._data.corpora.fetch", unreachable)
    with pytest.raises(
        ValueError, match=r"wikitext-2 was not found.*JOMA_DATA is not set.*set JOMA_DATA"
    ):
        make_exhibit(exhibits()["saliency"], out=tmp_path, preset="laptop")
