"""A page in the browser of whoever sits here."""

from __future__ import annotations

import os
import sys

NO_WINDOW = "no window can be opened here: open it in a browser of yours"


def has_windows() -> bool:
    """Whether a window can be opened: over ssh, `webbrowser` would start a text browser."""
    return sys.platform != "linux" or any(
        map(os.environ.get, ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER"))
    )


def open_page(address: str) -> bool:
    """Open an address in a window; False if there can be none."""
    import webbrowser

    return has_windows() and webbrowser.open(address)
