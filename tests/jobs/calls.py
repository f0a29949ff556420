"""What jobs of the tests do in their workers, which find these functions by name.

Whatever must happen once is marked by a file, so that no test depends on who is faster.
"""

import os
import signal
import sys
import time
import warnings

KEPT = []


def value(x, progress):
    progress(0.5, "half")
    return x


def raises(progress):
    raise ZeroDivisionError("no <number>\nbut details")


def exits(progress):
    sys.exit(3)


def ends_its_process(progress):
    os._exit(4)


def kills_itself(progress):
    os.kill(os.getpid(), signal.SIGKILL)


def returns_what_cannot_be_sent(progress):
    return lambda: 0


class Unreadable:
    def __reduce__(self):
        return int, ("not a number",)


def returns_what_cannot_be_read(progress):
    return Unreadable()


def warns(progress):
    warnings.warn("look", UserWarning, stacklevel=1)


def process(progress):
    return os.getpid()


def environment(name, progress):
    return os.environ.get(name)


def die_once(mark):
    """Kill this process, unless ``mark`` says that it has been done; every attempt is a line in it."""
    with mark.open("a") as stream:
        stream.write("begun\n")
    if mark.read_text().count("\n") == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def is_killed_once(mark, progress):
    die_once(mark)
    return "done"


def leaks(megabytes, progress):
    KEPT.append(b"x" * (megabytes * 1_000_000))
    return os.getpid()


def waits_until_interrupted(begun, cleaned, progress):
    try:
        begun.touch()
        while True:
            progress(0.1, "waiting")
            time.sleep(0.01)
    finally:
        cleaned.touch()


# in the place of joma._train.sweep._train_one: marks are in the folder that holds the sweep's


def train_killed_once(settings, path, checkpoint_every, progress):
    """Each attempt leaks, and notes its process; "seed=1" is killed after its first checkpoint, once."""
    from joma._train.step import Stepper
    from joma._train.sweep import _train_one

    step, marks = Stepper.step, path.parent.parent
    with (marks / "processes").open("a") as stream:
        stream.write(f"{leaks(30, progress)}\n")

    def fatal(self, *window):
        if any((path / "checkpoints").glob("step-*")):
            die_once(marks / "killed")
        return step(self, *window)

    if path.name == "seed=1":
        Stepper.step = fatal
    try:
        return _train_one(settings, path, checkpoint_every, progress)
    finally:
        Stepper.step = step


def train_killed(settings, path, checkpoint_every, progress):
    with path.parent.with_name("attempts").open("a") as stream:
        stream.write("begun\n")
    kills_itself(progress)


# in the place of joma._checkpoints.scan._measure_one; ``request.data`` is a folder for marks


def measure_killed_once(checkpoint, before, request, elsewhere, progress):
    """Each checkpoint leaks, and notes its process; that of step 1 is killed once."""
    from joma._checkpoints.scan import _measure_one

    if checkpoint.step == 1:
        die_once(request.data / "killed")
    (request.data / f"process-{checkpoint.step}").write_text(str(leaks(30, progress)))
    return _measure_one(checkpoint, before, request, elsewhere, progress)


def measure_killed(checkpoint, before, request, elsewhere, progress):
    """The checkpoint of step 1 is killed every time."""
    from joma._checkpoints.scan import _measure_one

    if checkpoint.step == 1:
        kills_itself(progress)
    return _measure_one(checkpoint, before, request, elsewhere, progress)
