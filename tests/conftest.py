"""Order for several workers, and the browser of the report's tests.

Tests that share a costly fixture stay on one worker, and what is long begins first. A browser is found, or missing and
said so in the last lines, or missing and an error.
"""

import os
import shutil

import pytest

HOW = "install chromium and chromium-driver (apt-get install chromium chromium-driver)"


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


SHARED = (
    "test_exhibits.py",
    "test_beyond.py",
    "test_hierarchy_lab.py",
    "test_browser.py",
)  # module-wide fixtures that take seconds
LONG = (
    "test_python_blocks_and_joma_commands",
    "test_a_killed_worker_loses_no_run",
    "test_make_reproduce",
    "test_two_processes",
    "test_killed_at_random_it_ends_in_the_same_bits",
    "test_on_ray",
)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.name in SHARED:
            item.add_marker(pytest.mark.xdist_group(item.path.name))

    def rank(item):
        if item.path.name in SHARED:
            return 0
        return 1 if item.name.startswith(LONG) else 2

    items.sort(key=rank)  # stable: within a rank all stays as it was
