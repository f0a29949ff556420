"""The wheel, in a site-packages of its own next to the libraries of this environment, used outside the clone."""

import os
import re
import subprocess
import sys
import sysconfig
import venv
import zipfile
from email import message_from_string
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LARGEST = 4_000_000  # bytes of the wheel
OWN = re.compile(
    r"joma([.-].*)?|.*_?joma\.pth|__editable__.*joma.*|_editable_impl_joma.*|__pycache__"
)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (file,) = folder.glob("*.whl")
    return file


class Installation:
    """An environment that has the wheel unpacked, and a link to every library of this one."""

    def __init__(self, wheel: Path, folder: Path) -> None:
        venv.EnvBuilder(symlinks=True, with_pip=False).create(folder / "venv")
        self.python = folder / "venv/bin/python"
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        self.packages = folder / "venv/lib" / version / "site-packages"
        for libraries in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}:
            for entry in Path(libraries).iterdir():
                link = self.packages / entry.name
                if not OWN.fullmatch(entry.name) and not link.exists():
                    link.symlink_to(entry)
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(self.packages)
        self.folder = folder / "elsewhere"
        self.folder.mkdir()
        self.cache = folder / "cache"

    def run(self, *arguments: str) -> str:
        """Run Python there and return what it printed."""
        left_out = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
        environment = {name: value for name, value in os.environ.items() if name not in left_out}
        environment |= {"JOMA_CACHE": str(self.cache), "NO_COLOR": "1", "COLUMNS": "100"}
        done = subprocess.run(
            [str(self.python), *arguments],
            cwd=self.folder,
            env=environment,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def joma(self, *arguments: str) -> str:
        """Run a command of joma there and return what it printed."""
        return self.run("-m", "joma", *arguments)


@pytest.fixture(scope="module")
def installation(wheel, tmp_path_factory) -> Installation:
    return Installation(wheel, tmp_path_factory.mktemp("installed"))


def test_it_is_small_and_has_all_pages(wheel):
    assert wheel.stat().st_size <= LARGEST
    names = zipfile.ZipFile(wheel).namelist()
    pages = {Path(name).stem for name in names if name.startswith("joma/_docs/")}
    assert pages == {file.stem for file in (ROOT / "docs").glob("*.md")} - {
        "changelog",
        "contributing",
    }
    source = {str(file.relative_to(ROOT / "src")) for file in (ROOT / "src/joma").rglob("*.py")}
    assert source <= set(names)


def test_on_a_package_index_every_link_leads_somewhere(wheel):
    """No address is relative to a file that is not there."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        shown = message_from_string(archive.read(name).decode()).get_payload()
    targets = re.findall(r"\]\(([^)]+)\)", shown)
    assert targets
    assert [target for target in targets if not target.startswith("https://")] == []
    assert "*Picture: Attention entropy" in shown
    assert "watch** (`joma docs watch`)" in shown
    assert not re.search(r"docs/[\w-]+\.md", shown)


def test_what_is_imported_is_what_was_installed(installation):
    file = Path(installation.run("-c", "import joma; print(joma.__file__)").strip())
    assert file == installation.packages / "joma/__init__.py"
    version = installation.run(
        "-c", "from importlib.metadata import version; print(version('joma'))"
    )
    assert installation.joma("--version").split() == ["joma", version.strip()]


def test_pages_can_be_read(installation):
    assert "getting-started" in installation.joma("docs")
    assert installation.joma("docs", "watch").startswith("# ")


@pytest.mark.timeout(900)  # the demo alone is half a minute of one core
def test_demo_report_and_scan(installation):
    """The page, and the scan of the checkpoint, are of the run that the demo wrote."""
    printed = installation.joma("demo", "--no-open")
    assert "page: runs/demo/report.html" in printed
    assert installation.joma("report", "runs/demo", "--out", "page.html")
    assert (installation.folder / "page.html").stat().st_size > 50_000
    scanned = installation.joma(
        "scan", "runs/demo", "--out", "runs/scan", "--gauges", "stable_rank,change"
    )
    assert re.search(r"\bok\b", scanned)


def test_an_exhibit_is_made_once(installation):
    first = installation.joma("reproduce", "fig3", "--out", "runs/paper")
    assert re.search(r"^fig3\s+holds", first, flags=re.M)
    verdict = installation.folder / "runs/paper/fig3/verdict.json"
    made = verdict.stat().st_mtime_ns
    installation.joma("reproduce", "fig3", "--out", "runs/paper")
    assert verdict.stat().st_mtime_ns == made


def test_claims_are_checked(installation):
    assert "\n3 claims: " in installation.joma("claims", "T1.linear", "E33", "T2.invariant")


WATCHED = """
import joma, torch
from torch import nn

torch.manual_seed(0)
model = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
with joma.watch(model, run="runs/mine", every=5, gauges="entropy,stable_rank") as w:
    for step in range(20):
        x = torch.randn(4, 8, 16)
        loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        w.step(loss=loss)
print(len(w.frame()))
"""


def test_a_training_is_watched(installation):
    script = installation.folder / "train.py"
    script.write_text(WATCHED)
    assert int(installation.run(str(script))) > 0
    assert "done" in installation.joma("status", "runs/mine")
