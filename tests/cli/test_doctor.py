"""`joma doctor` tells what is there and what is not, and never fails on what it finds."""

import json
import sys
from importlib.metadata import metadata, version

from tests.cli.test_cli import joma


def test_it_tells_versions_extras_and_folders(tmp_path, monkeypatch):
    monkeypatch.setenv("JOMA_CACHE", str(tmp_path))
    (tmp_path / "entry").mkdir()
    (tmp_path / "entry/file").write_bytes(bytes(1234))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    told = json.loads(joma("doctor", "--json", check=0).stdout)
    assert told["ok"] is True
    parts = {part["name"]: part for part in told["parts"]}
    assert parts["numpy"]["installed"] == version("numpy")
    assert parts["numpy"]["needed"] == ["joma"]
    assert parts["transformers"]["needed"] == ["hf", "smollm2"]  # the one extra contains the other
    assert "hub" not in told  # the network is not tried unless asked for
    assert told["offline mode"].startswith("on")
    assert told["folders"]["cache of joma"] == {"path": str(tmp_path), "bytes": 1234}


def test_extras_are_those_of_the_metadata(monkeypatch):
    described = metadata("joma")
    requirements = {"new": "no-such-package>=1", "late": "numpy>=99", "elsewhere": "torch>=99"}
    for extra, requirement in requirements.items():
        described["Provides-Extra"] = extra
        marker = f'extra == "{extra}"'
        if extra == "elsewhere":
            marker += ' and sys_platform == "plan9"'  # not for this system
        described["Requires-Dist"] = f"{requirement}; {marker}"
    monkeypatch.setattr("importlib.metadata.metadata", lambda name: described)
    done = joma("doctor", check=0)  # an extra that is missing is no error
    assert "without no-such-package (not installed)" in done.stdout
    assert "pip install 'joma[new]'" in done.stdout
    assert "without numpy (>=99 is needed)" in done.stdout
    assert "pip install 'joma[late]'" in done.stdout
    assert "elsewhere" not in done.stdout
    told = json.loads(joma("doctor", "--json", check=0).stdout)
    assert told["todo"] == []
    assert told["extras"]["new"] == {
        "missing": ["no-such-package (not installed)"],
        "ok": False,
        "command": "pip install 'joma[new]'",
    }


def test_a_broken_library_is_a_finding_and_not_a_traceback(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)  # importing it raises
    done = joma("doctor", check=1)
    assert "ModuleNotFoundError: import of torch halted" in " ".join(done.stdout.split())
    assert "pip install --force-reinstall torch" in done.stdout
    told = json.loads(joma("doctor", "--json", check=1).stdout)
    assert told["ok"] is False
    assert list(told["broken"]) == ["torch"]


def test_a_network_that_is_not_there_is_a_finding(monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # nobody listens
    assert (
        "cannot be reached"
        in json.loads(joma("doctor", "--network", "--json", check=0).stdout)["hub"]
    )
