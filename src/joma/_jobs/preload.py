"""Imported by the process that workers are forked from: loads the libraries named in JOMA_PRELOAD once for all.

One that cannot be imported is left to the job that needs it, which then says so. Python warns of each fork in a process
with threads (those of a library, asleep); with warnings as errors that would end the process.
"""

import os
import warnings
from contextlib import suppress
from importlib import import_module

warnings.filterwarnings("ignore", ".*use of fork", DeprecationWarning)
for name in filter(None, os.environ.get("JOMA_PRELOAD", "").split(",")):
    with suppress(Exception):
        import_module(name)
