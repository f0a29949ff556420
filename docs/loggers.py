"""The picture of docs/loggers.md: its TensorBoard example, run and looked at. Needs tensorboard and chromium.

python docs/loggers.py
"""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parent
PICTURE = HERE / "figures" / "tensorboard.png"
SETTINGS = "[...document.querySelectorAll('button')].find(b => b.innerText.includes('Settings')).click()"  # hides them


def example(title: str) -> str:
    """The code of a block of the page."""
    found = re.search(
        rf'```python title="{title}"\n(.*?)```', (HERE / "loggers.md").read_text(), flags=re.S
    )
    assert found is not None
    return found[1]


def main() -> None:
    """Run the example, start TensorBoard on what it logged, take the picture."""
    sys.path.insert(0, str(HERE.parent))
    from benchmarks.report import browser, until

    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            [sys.executable, "-c", example("tensorboard_example.py")], cwd=folder, check=True
        )
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        command = [
            sys.executable,
            "-m",
            "tensorboard.main",
            "--logdir",
            "runs/tensorboard",
            "--port",
            str(port),
        ]
        server = subprocess.Popen(
            [*command, "--load_fast=false"], cwd=folder, stderr=subprocess.DEVNULL
        )
        try:
            for _ in range(600):
                with socket.socket() as asked:
                    if asked.connect_ex(("127.0.0.1", port)) == 0:
                        break
                time.sleep(0.2)
            with browser(shutil.which("chromium"), shutil.which("chromedriver")) as driver:
                driver.set_window_size(1400, 1150)
                driver.get(
                    f"http://127.0.0.1:{port}/?darkMode=false#timeseries&tagFilter=joma&_smoothingWeight=0"
                )
                until(driver, "document.querySelectorAll('line-chart, vz-line-chart2').length > 3")
                driver.execute_script(SETTINGS)
                time.sleep(5)  # drawn on a canvas, which says nothing
                driver.save_screenshot(str(PICTURE))
        finally:
            server.terminate()
            server.wait()
    print(f"{PICTURE}: {PICTURE.stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    main()
