"""The code of a Markdown page and what the page says that it prints.

A block of Python, or of `$ joma …` commands, that is followed by a line "It prints (3 s):" and a block of text is
compared with that text. In it "…" stands for what may differ from machine to machine (digits, times).
The seconds are for the reader and are not checked.
"""

import contextlib
import io
import re
import shlex
import sys
from dataclasses import dataclass
from unittest import mock

_BLOCK = re.compile(
    r'^```(?P<kind>python|console)(?: title="[^"]*")?\n(?P<code>.*?)^```\n'
    r"(?:\nIt prints \(\d+ s\):\n\n```text\n(?P<printed>.*?)^```\n)?",
    flags=re.S | re.M,
)


@dataclass(frozen=True)
class Snippet:
    """One block: its code, or its commands, and the text that it prints, if the page shows it."""

    kind: str
    code: str
    printed: str | None

    @property
    def commands(self):
        return [line[2:] for line in self.code.splitlines() if line.startswith("$ ")]


def snippets(text):
    """The blocks of a page, in order."""
    return [Snippet(match["kind"], match["code"], match["printed"]) for match in _BLOCK.finditer(text)]


def agrees(printed, shown):
    """Whether ``printed`` is what the page shows, but for the width of white space."""
    parts = " ".join(shown.split()).split("…")  # not doctest's ELLIPSIS, for which "3...." is "3", anything, "."
    return re.fullmatch(".*".join(map(re.escape, parts)), " ".join(printed.split())) is not None


def execute(snippet, scope):
    """Run a block, Python in ``scope``, and compare what it prints; its output."""
    from joma.cli import main

    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
        if snippet.kind == "python":
            exec(compile(snippet.code, "page", "exec"), scope)
        for command in snippet.commands if snippet.kind == "console" else ():
            with mock.patch.object(sys, "argv", shlex.split(command)):
                code = 0
                try:
                    main()
                except SystemExit as end:
                    code = end.code or 0
            assert code == 0, f"{command}: {code}\n{out.getvalue()}"
    if snippet.printed is not None:
        assert agrees(out.getvalue(), snippet.printed), f"{snippet.code}\nprints\n{out.getvalue()}"
    return out.getvalue()
