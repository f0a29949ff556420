"""Models in packages: their weights are known by hash, and others are not taken for them."""

import hashlib
import re

import pytest

from joma._data.packaged import MODELS, Packaged, verified_models
from joma._data.present import is_present
from joma.paper.exhibits._series import located
from joma.paper.records import all_records


@pytest.fixture
def package(tmp_path, monkeypatch):
    """An installed package with two models; its weights."""
    contents = {"first": b"weights of one", "second": b"weights of two"}
    record = []
    for folder, content in contents.items():
        inside = f"twomodels/{folder}/pytorch_model.bin"
        (tmp_path / inside).parent.mkdir(parents=True)
        (tmp_path / inside).write_bytes(content)
        record.append(f"{inside},,")
    about = tmp_path / "twomodels-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: twomodels\nVersion: 1.0\n")
    (about / "RECORD").write_text("\n".join(record) + "\n")
    digests = tuple(hashlib.sha256(content).hexdigest() for content in contents.values())
    entry = Packaged("twomodels", "two", "1 kB", "pytorch_model.bin", tuple(contents), digests)
    monkeypatch.setitem(MODELS, "twomodels", entry)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path / "twomodels")
    return tmp_path / "twomodels"


def test_the_hash_of_each_model_is_returned(package):
    digests = MODELS["twomodels"].digests
    assert verified_models("twomodels") == {
        "twomodels/first": digests[0],
        "twomodels/second": digests[1],
    }
    assert verified_models("twomodels/second") == {"twomodels/second": digests[1]}
    assert verified_models("EleutherAI/pythia-70m") == {}
    assert is_present("twomodels")
    assert is_present("zipf twomodels/first")


def test_other_weights_are_refused_and_not_present(package):
    (package / "second/pytorch_model.bin").write_bytes(b"other weights")
    with pytest.raises(ValueError, match=r"weights of twomodels/second .* are others than"):
        verified_models("twomodels")
    with pytest.raises(ValueError, match="Install another version of twomodels"):
        located("twomodels")
    assert not is_present("twomodels")
    assert not is_present("zipf twomodels/second")
    assert is_present("twomodels/first")


def test_every_known_model_has_a_hash_of_each_file():
    for name, model in MODELS.items():
        assert len(model.digests) == max(1, len(model.names)), name
        assert all(re.fullmatch("[0-9a-f]{64}", digest) for digest in model.digests)


def test_records_name_the_hashes_of_their_models():
    for record in all_records():
        for name, digest in record.models.items():
            first, _, inner = name.partition("/")
            place = MODELS[first].names.index(inner) if inner else 0
            assert digest == MODELS[first].digests[place], record.exhibit
        named = record.settings.get("models", record.settings.get("model", ()))
        named = [named] if isinstance(named, str) else list(named)
        for name in named:
            if name.partition("/")[0] in MODELS:
                assert any(full.startswith(name) for full in record.models), record.exhibit
