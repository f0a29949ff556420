"""`--set` with values that make no sense: one sentence for every setting of every exhibit, and never a KeyError."""

import json
import re

import pytest

from joma.cli import main
from joma.paper.exhibits import PRESETS, exhibits, make_exhibit
from joma.paper.exhibits._series import SERIES
from joma.paper.exhibits.choices import with_settings
from joma.paper.exhibits.index import ORDER

NONSENSE = ["0", "-1", "", "[]", "{}", "abc", "nan", "none", "1e30", str(10**12)]
# where such a value makes sense all the same: settings -> values
SENSE = {
    (
        "valid_windows",
        "valid_every",
        "angles",
        "clock.steps",
        "embeddings.steps",
        "fig8.tau",
        "biases",
        "zipf",
    ): {"0"},
    ("vocabulary",): {"none"},
    ("series",): {"{}"},  # as usual
    ("saliency.queries",): {"0", "-1", "abc", "nan", "none", "1e30", str(10**12)},  # words
}
OWN = ORDER


def makes_sense(id, key, text):
    if (id, key, text) == ("entering", "vocabulary", "none"):
        return False  # it counts pairs of words, and no preset takes all of them
    return any({key, f"{id}.{key}"} & set(keys) and text in texts for keys, texts in SENSE.items())


def refusal(id, preset, text):
    """What is said of a setting, None if it is taken."""
    try:
        with_settings(exhibits()[id], preset, [text])
    except ValueError as error:
        return str(error)
    return None


@pytest.fixture(autouse=True)
def _empty_folder(tmp_path, monkeypatch):
    """Where no file is called "abc"."""
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("id", OWN)
def test_what_makes_no_sense_is_refused_in_one_sentence(id):
    for preset, settings in exhibits()[id].experiment.settings.items():
        for key in settings:
            for text in NONSENSE:
                said = refusal(id, preset, f"{key}={text}")
                assert (said is None) == makes_sense(id, key, text), (preset, key, text, said)
                if said is not None:
                    assert re.match(rf"--set: {key}(\.\w+)?( must be .*, got|:) ", said), said
                    assert "\n" not in said


def leaves(value, path=()):
    """The places of all values in a mapping, in the lists in it too."""
    items = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    if not items:
        yield path
    for key, below in items:
        yield from leaves(below, (*path, key))


def replaced(value, path, new):
    """A copy of a mapping with one value replaced."""
    if not path:
        return new
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = replaced(value[path[0]], path[1:], new)
    return copy


def shortest(id):
    """The first preset that is computed."""
    return next(iter(exhibits()[id].experiment.settings))


MAPPINGS = {
    "table1": "noisy", "clock": "rates", "fig7": "models",
}  # fmt: skip


def test_these_are_the_exhibits_with_mappings():
    presets = {id: exhibits()[id].experiment.settings[shortest(id)] for id in OWN}
    found = {
        id
        for id, settings in presets.items()
        if any(isinstance(value, dict) for value in settings.values())
    }
    assert found == set(MAPPINGS)


@pytest.mark.parametrize(("id", "key"), [*MAPPINGS.items(), ("clock", "tau"), ("fig7", "series")])
def test_so_is_every_entry_of_a_mapping(id, key):
    preset = shortest(id)
    value = SERIES if key == "series" else exhibits()[id].experiment.settings[preset][key]
    assert refusal(id, preset, f"{key}={json.dumps(value)}") is None
    nonsense = [-1, "abc", [], {}, float("nan"), 1e30, True]
    for path in leaves(value):
        old = value
        for part in path:
            old = old[part]
        for new in nonsense:
            if isinstance(old, bool) and new is True:
                continue
            if key == "models" and isinstance(new, str):
                continue  # a revision of any name
            said = refusal(id, preset, f"{key}={json.dumps(replaced(value, path, new))}")
            assert said is not None, (path, new)
            assert said.startswith(f"--set: {key}"), said
    assert f"--set: {key}" in refusal(id, preset, f"{key}={json.dumps({**value, 'nonsense': 1})}")
    if key not in ("series", "models"):
        rest = dict(list(value.items())[1:])
        assert "must be a JSON object with the keys" in refusal(
            id, preset, f"{key}={json.dumps(rest)}"
        )


@pytest.mark.parametrize(
    ("id", "text", "message"),
    [
        (
            "table1",
            "columns=0",
            "columns must be a whole number of at least 1 and at most 12, got 0; the presets have 6",
        ),
        ("table1", "columns=13", "at most 12, got 13"),
        ("table1", "lr=1e-3,1e-3", "lr must be a list of different values"),
        (
            "fig6",
            "layers=1,0",
            r"layers must be .* of at least 1 and at most 100, got 0.*\(in \[1, 0\]\)",
        ),
        ("cdag", "rho=1", "rho must be a number above 0 and below 1, got 1.0"),
        ("contrast", "biases=-1", "biases must be .* of at least 0"),
        (
            "contrast",
            "inputs=Gausian",
            "inputs must be one of Gaussian, Student-t",
        ),
        ("saliency", "text=wikitext", "text: unknown corpus 'wikitext'"),
        ("fig7", "models={}", "models must be a JSON object with at least one entry"),
    ],
)
def test_the_sentence_has_what_is_expected_and_what_was_found(id, text, message):
    with pytest.raises(ValueError, match=message):
        with_settings(exhibits()[id], shortest(id), [text])


def test_values_that_are_beyond_the_presets_are_taken():
    for id, text in {
        "table1": "columns=12", "fig4": "seeds=7", "fig6": "layers=1,2,12", "fig9": "n=20", "clock": "steps=0",
        "fig8": "lr=1e-2,1", "fig5": "epsilon=0.01", "contrast": "ratios=8", "embeddings": "sample=100",
        "sinks": "models=EleutherAI/pythia-70m", "frozen": "ratios=10,100,1000", "fig2": "times=3",
    }.items():  # fmt: skip
        assert refusal(id, shortest(id), text) is None, (id, text)


def test_settings_of_an_exhibit_that_a_user_registered_are_their_own():
    from joma.paper.exhibits.index import exhibit, remove

    presets = {preset: {"shift": 0.5, "count": 1} for preset in PRESETS}
    functions = dict.fromkeys(("run", "draw", "judge"), lambda *_: None)
    try:
        exhibit("mine", "mine", "mine", rule="holds", settings=presets, **functions)
        assert refusal("mine", "default", "shift=-1e9") is None
        assert refusal("mine", "default", "count=0") is None
    finally:
        remove("mine")


def test_the_command_says_it_and_writes_nothing(monkeypatch, capsys, tmp_path):
    for arguments in (["--set", "columns=0"], ["--seed", "-1"]):
        monkeypatch.setattr(
            "sys.argv", ["joma", "reproduce", "table1", "--preset", "laptop", *arguments]
        )
        with pytest.raises(SystemExit) as end:
            main()
        assert end.value.code == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert re.match(r"joma: (--set: columns|the seed) must be a whole number of at least", line)
    assert list(tmp_path.iterdir()) == []


def test_an_error_that_comes_later_names_the_settings(monkeypatch, tmp_path):
    """Not everything is known beforehand: two values may not fit each other."""
    changed = with_settings(exhibits()["fig3"], "default", ["times=5"])

    def broken(*_):
        raise KeyError("lr")

    object.__setattr__(changed.experiment, "run", broken)
    with pytest.raises(
        ValueError,
        match=r"fig3 could not be made with times=5 \(KeyError: 'lr'\): choose values nearer",
    ):
        make_exhibit(changed, out=tmp_path)
    assert list(tmp_path.iterdir()) == []
