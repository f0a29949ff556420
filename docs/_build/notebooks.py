"""``python docs/_build/notebooks.py``: run the notebooks of examples/ and keep what they show, in their files."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).parent.parent.parent
SHOWN = ("text/plain", "text/html", "image/png", "image/svg+xml")


def executed(path: Path) -> nbformat.NotebookNode:
    """The notebook with its outputs: no warnings of libraries, no times, one kind of picture each."""
    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        NotebookClient(notebook, timeout=1200, resources={"metadata": {"path": folder}}).execute()
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
            for output in cell.outputs:
                if "data" in output:
                    output.data = {kind: output.data[kind] for kind in SHOWN if kind in output.data}
    return notebook


def main() -> None:
    """All of them."""
    os.environ["PYTHONPATH"] = str(ROOT / "src")
    for path in sorted((ROOT / "examples").glob("*.ipynb")):
        nbformat.write(executed(path), path)
        print(f"{path.name}: {path.stat().st_size / 1000:.0f} kB", flush=True)


if __name__ == "__main__":
    main()
