"""The browser of the report's tests: found, missing and said so, or missing and an error."""

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
