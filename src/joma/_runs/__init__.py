"""Run folders: their one reader (`Run`) and their one writer (`RunWriter`, `staged`).

A run folder holds `run.json` (what was run: kind, name, config, seed, versions, axes, status) and
`metrics.jsonl` (what was measured: one line per step and gauge). All lines of one measurement are appended by
one `os.write`, and the last of them carries `"end": true`, so that a run killed at any moment keeps every
complete measurement: readers ignore a torn tail, `RunWriter.resume` cuts it off. JSON has no NaN and no
infinities: they are written as the strings `"nan"`, `"inf"` and `"-inf"` and read back as floats.

>>> import tempfile
>>> from pathlib import Path
>>> with staged(Path(tempfile.mkdtemp()) / "demo") as folder:
...     with RunWriter.create(
...         folder, kind="demo", config={}, axes={"entropy": ["layer"]}
...     ) as writer:
...         writer.write(0, {"entropy": [0.5, 0.25], "loss": 2.0}, t=0.0)
>>> list(Run(folder.with_name("demo")).rows())[1]
{'step': 0, 't': 0.0, 'gauge': 'loss', 'value': 2.0}
"""

from joma._runs.files import write_atomic, write_json
from joma._runs.folder import RunError, RunInUse, RunNotFound, check_writable
from joma._runs.reader import Run
from joma._runs.staging import staged, tidy
from joma._runs.writer import RunWriter

__all__ = [
    "Run",
    "RunError",
    "RunInUse",
    "RunNotFound",
    "RunWriter",
    "check_writable",
    "staged",
    "tidy",
    "write_atomic",
    "write_json",
]
