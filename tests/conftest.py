"""Order for several workers, and the browser of the report's tests.

Tests that share a costly fixture stay on one worker, and what is long begins first. A browser is found, or missing and
said so in the last lines, or missing and an error.
"""

import os
import re
import shutil
import signal
import tempfile
from pathlib import Path

import pytest

RUNNING = pytest.StashKey()
HOW = "install chromium and chromium-driver (apt-get install chromium chromium-driver)"

# in the background of a shell, or under nohup, SIGINT is ignored: the commands that tests interrupt would be deaf
signal.signal(signal.SIGINT, signal.default_int_handler)
# some virtual machines announce AMX and end a process that uses it (SIGILL in products of bfloat16); set before torch
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
os.environ.setdefault(
    "OMP_NUM_THREADS", "1"
)  # tests run beside each other; and the last bits are the same everywhere


def pytest_configure(config):
    """While tests run, the queue of long runs (docs/record.py) stands still: it looks at this lock."""
    from joma._runs.lock import take

    user = getattr(os, "getuid", int)()
    config.stash[RUNNING] = take(
        Path(tempfile.gettempdir()) / f"joma-tests-{user}.lock", shared=True, wait=True
    )


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


@pytest.fixture(scope="session")
def fork_server():
    """The process that new ones are forked from has loaded what trainings import: 10 s once, not in each of them."""
    from joma._jobs import Job, open_engine, run_jobs

    preload = (
        "joma._train.language",
        "safetensors.torch",
        "torch._dynamo",
        "torch.distributed.fsdp",
    )
    with open_engine("processes", 1, preload=preload) as engine:
        list(run_jobs([Job("", repr)], engine))


# Groups: what needs the Ray cluster or the fork server, and files whose fixtures take seconds
RAY = re.compile(r"::test_(\w+_)?ray(_|$|\[)|\[ray")
FORKED = re.compile(
    r"test_sweep\.py::|test_distributed\.py::|::test_killed_at_random_it_ends_in_the_same_bits"
)
SHARED = ("test_examples.py", "test_docs.py", "test_exhibits.py", "test_tiny_settings.py", "test_hierarchy_lab.py",
          "test_browser.py", "test_report.py", "test_wheel.py")  # fmt: skip
# what begins first, since it takes longest
LONG = ("ray", "test_two_processes_of_torchrun", "test_examples.py", "test_python_blocks_and_joma_commands", "forked",
        "test_docs.py", *SHARED, "test_make_reproduce", "test_a_script_that_ends_without_close")  # fmt: skip


def group(nodeid):
    """What a test must share a worker with; itself if nothing."""
    file = nodeid.partition("::")[0].rpartition("/")[2]
    if RAY.search(nodeid):
        return "ray"
    return "forked" if FORKED.search(nodeid) else file if file in SHARED else nodeid


def pytest_xdist_make_scheduler(config, log):
    from xdist.scheduler import LoadScopeScheduling

    class ByGroup(LoadScopeScheduling):
        """`--dist loadgroup` of pytest-xdist 3.8 does nothing under pytest 9.2."""

        def _split_scope(self, nodeid):
            return group(nodeid)

    return ByGroup(config, log)


def pytest_collection_modifyitems(items):
    def rank(item):
        names = (group(item.nodeid), getattr(item, "originalname", ""))
        return min((LONG.index(name) for name in names if name in LONG), default=len(LONG))

    items.sort(key=rank)  # stable: within a rank all stays as it was
