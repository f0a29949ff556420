"""Order for several workers: tests that share a costly fixture stay on one of them, and what is long begins first."""

import pytest

SHARED = ("test_exhibits.py", "test_beyond.py", "test_hierarchy_lab.py")  # module-wide fixtures that take seconds
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
