"""Order for several workers, and the browser of the report's tests.

Tests that share a costly fixture stay on one worker, and what is long begins first. A browser is found, or missing and
said so in the last lines, or missing and an error.
"""

import os
import re
import shutil
import tempfile
from pathlib import Path

import pytest

RUNNING = pytest.StashKey()
HOW = "install chromium and chromium-driver (apt-get install chromium chromium-driver)"


def pytest_configure(config):
    """While tests run, the queue of long runs (docs/record.py) stands still: it looks at this lock."""
    from joma._run.lock import take

    user = getattr(os, "getuid", int)()
    config.stash[RUNNING] = take(Path(tempfile.gettempdir()) / f"joma-tests-{user}.lock", shared=True, wait=True)


def pytest_unconfigure(config):
    if (descriptor := config.stash.get(RUNNING, None)) is not None:
        os.close(descriptor)


def find_browser():
    """(browser, driver), each a path or None."""
    names = ("chromium", "chromium-browser", "google-chrome")
    return next(filter(None, map(shutil.which, names)), None), shutil.which("chromedriver")


@pytest.fixture(scope="session")
def browser_paths():
    browser, driver = find_browser()
    if browser is None or driver is None:
        if os.environ.get("JOMA_REQUIRE_BROWSER") == "1":
            pytest.fail(f"JOMA_REQUIRE_BROWSER=1, and there is no browser: {HOW}")
        pytest.skip(f"no browser: {HOW}")
    return browser, driver


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter):
    if None in find_browser():
        terminalreporter.write_line(f"browser tests left out: {HOW}", yellow=True)


@pytest.fixture(scope="session")
def ray_cluster():
    """One local cluster, started as joma starts it, for all tests that need one: they are kept on one worker."""
    from joma._jobs.cluster import cluster

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
        with cluster(None):
            yield


# fixtures of these files take seconds; what needs the Ray cluster is a group, too
SHARED = ("test_exhibits.py", "test_extension_exhibits.py", "test_hierarchy_lab.py", "test_browser.py",
          "test_report.py", "test_sweep.py")  # fmt: skip
RAY = re.compile(r"::test_(\w+_)?ray(_|$|\[)|\[ray")
LONG = (
    "test_python_blocks_and_joma_commands",
    "test_a_killed_worker_loses_no_run",
    "test_make_reproduce",
    "test_two_processes",
    "test_killed_at_random_it_ends_in_the_same_bits",
)


def group(nodeid):
    """What a test must share a worker with; itself if nothing."""
    file = nodeid.partition("::")[0].rpartition("/")[2]
    return file if file in SHARED else "ray" if RAY.search(nodeid) else nodeid


def pytest_xdist_make_scheduler(config, log):
    from xdist.scheduler import LoadScopeScheduling

    class ByGroup(LoadScopeScheduling):
        """`--dist loadgroup` of pytest-xdist 3.8 does nothing under pytest 9.2."""

        def _split_scope(self, nodeid):
            return group(nodeid)

    return ByGroup(config, log)


def pytest_collection_modifyitems(items):
    def rank(item):
        return 0 if group(item.nodeid) != item.nodeid else 1 if item.name.startswith(LONG) else 2

    items.sort(key=rank)  # stable: within a rank all stays as it was
