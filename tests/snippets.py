"""The code of a Markdown page and what the page says that it prints.

A block of Python, or of `$ joma …` commands, that is followed by a line "It prints (3 s):" and a block of text is
compared with that text. In it "…" stands for what may differ from machine to machine (digits, times).
The seconds are for the reader and are not checked.

What needs the hub, a cluster or minutes says so behind the block and is not run: "Not run by the tests (the hub,
hours): a row per checkpoint." A block whose title is the name of a file is that file, and is imported.
"""

import contextlib
import importlib
import io
import re
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

_BLOCK = re.compile(
    r'^```(?P<kind>python|console)(?: title="(?P<title>[^"]*)")?\n(?P<code>.*?)^```\n'
    r"(?:\nIt prints \(\d+ s\):\n\n```text\n(?P<printed>.*?)^```\n"
    r"|\nNot run by the tests \((?P<needs>[^()]+, [^(),]*(?:\d+ (?:s|min|h)|minutes|hours|days))\): )?",
    flags=re.S | re.M,
)
_FENCE = re.compile(r"^```(?P<kind>\w*)[^\n]*\n(?P<code>.*?)^```$", flags=re.S | re.M)
_PRINTED = re.compile(r"^It prints \(\d+ s\):\n\n```text\n.*?^```$", flags=re.S | re.M)
_INLINE = re.compile(r"`(joma [^`]+)`")


@dataclass(frozen=True)
class Snippet:
    """One block: its code, or its commands, and what the page says of it: what it prints, or what running it needs."""

    kind: str
    code: str
    printed: str | None = None
    title: str | None = None
    needs: str | None = None

    @property
    def commands(self):
        return [line[2:] for line in self.code.splitlines() if line.startswith("$ ")]

    @property
    def module(self):
        """Of a block that is a file: the name to import it by."""
        return (
            self.title.removesuffix(".py").replace("/", ".")
            if (self.title or "").endswith(".py")
            else None
        )

    @property
    def told(self):
        """Whether the page says what comes of it."""
        return self.module is not None or (self.printed is None) != (self.needs is None)


def snippets(text):
    """The blocks of a page, in order."""
    return [Snippet(**match.groupdict()) for match in _BLOCK.finditer(text)]


def fences(text):
    """All fenced blocks of a page: (kind, text)."""
    return [(match["kind"], match["code"]) for match in _FENCE.finditer(text)]


def joma_commands(text):
    """What a page says that one may type, in blocks and between backticks: the words after `joma` of each."""
    text = _PRINTED.sub("", text)
    lines = [line.removeprefix("$ ") for _, code in fences(text) for line in code.splitlines()]
    found = [line for line in lines if line.startswith("joma ")] + _INLINE.findall(
        _FENCE.sub("", text)
    )
    return [shlex.split(line, comments=True)[1:] for line in found]


def agrees(printed, shown):
    """Whether ``printed`` is what the page shows, but for the width of white space."""
    parts = " ".join(shown.split()).split(
        "…"
    )  # not doctest's ELLIPSIS, for which "3...." is "3", anything, "."
    return re.fullmatch(".*".join(map(re.escape, parts)), " ".join(printed.split())) is not None


def _imported(snippet):
    """The module of a block that is a file, written to the current folder."""
    file = Path(snippet.title)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(snippet.code)
    importlib.invalidate_caches()
    return importlib.import_module(snippet.module)


def execute(snippet, scope):
    """Run a block, Python in ``scope``, a file by importing it, and compare what it prints; its output."""
    from joma.cli import main

    out = io.StringIO()
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.redirect_stdout(out))
        stack.enter_context(contextlib.redirect_stderr(io.StringIO()))
        stack.enter_context(
            mock.patch.object(sys, "path", [str(Path.cwd()), *sys.path])
        )  # as Python and pip have it
        if snippet.module is not None:
            scope.update(vars(_imported(snippet)))
        elif snippet.kind == "python":
            exec(compile(snippet.code, "page", "exec"), scope)
        for command in snippet.commands if snippet.kind == "console" else ():
            with mock.patch.object(sys, "argv", shlex.split(command, comments=True)):
                code = 0
                try:
                    main()
                except SystemExit as end:
                    code = end.code or 0
            assert code == 0, f"{command}: {code}\n{out.getvalue()}"
    if snippet.printed is not None:
        assert agrees(out.getvalue(), snippet.printed), f"{snippet.code}\nprints\n{out.getvalue()}"
    return out.getvalue()
