"""The code of a Markdown page and what the page says that it prints.

A block of Python, or of `$ joma …` commands, that is followed by a line "It prints (3 s):" and a block of text is
compared with that text. In it "…" stands for words that are left out. Numbers are real: those with a point agree to
``NEAR``, whole numbers exactly. After "It prints about (3 s):", all numbers agree to ``ABOUT``: a training that differs
between machines. The seconds are for the reader and are not checked.

``python -m tests.snippets docs/watch.md`` runs a page and writes what it prints into it, but for blocks with "…";
``--all`` writes those as well.

What needs the hub, a cluster or minutes says so behind the block and is not run: "Not run by the tests (the hub,
hours): a row per checkpoint." A block whose title is the name of a file is that file, and is imported.
"""

import contextlib
import importlib
import io
import re
import shlex
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from unittest import mock

_BLOCK = re.compile(
    r'^```(?P<kind>python|console)(?: title="(?P<title>[^"]*)")?\n(?P<code>.*?)^```\n'
    r"(?:\nIt prints(?P<about> about)? \(\d+ s\):\n\n```text\n(?P<printed>.*?)^```\n"
    r"|\nNot run by the tests \((?P<needs>[^()]+, [^(),]*(?:\d+ (?:s|min|h)|minutes|hours|days))\): )?",
    flags=re.S | re.M,
)
_FENCE = re.compile(r"^```(?P<kind>\w*)[^\n]*\n(?P<code>.*?)^```$", flags=re.S | re.M)
_PRINTED = re.compile(r"^It prints(?: about)? \(\d+ s\):\n\n```text\n.*?^```$", flags=re.S | re.M)
_INLINE = re.compile(r"`(joma [^`]+)`")


@dataclass(frozen=True)
class Snippet:
    """One block: its code, or its commands, and what the page says of it: what it prints, or what running it needs."""

    kind: str
    code: str
    printed: str | None = None
    title: str | None = None
    needs: str | None = None
    about: str | None = None

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


NEAR = 0.05  # what numbers with a point may differ by, as a share of the larger one
ABOUT = 0.25
ROUNDING = 1e-6  # below this a number is an error of rounding, of which only the size counts
_TOKEN = re.compile(r"…|─+|(?<![\w.])[-+]?\d+(?:\.\d+)?(?:e[-+]?\d+)?(?![\w])|\s+|\w+|.", re.DOTALL)
_NUMBER = re.compile(r"[-+]?\d+(?:\.(?P<digits>\d+))?(?:e[-+]?\d+)?")


def _tokens(text):
    """Words, numbers, signs and white space of a text, one by one."""
    squeezed = " ".join(text.split())
    return ["─" if token.startswith("─") else token for token in _TOKEN.findall(squeezed)]


def _token_agrees(printed, shown, tolerance):
    number = _NUMBER.fullmatch(shown)
    if printed == shown or number is None or not _NUMBER.fullmatch(printed):
        return printed == shown
    is_whole = number["digits"] is None and "e" not in shown
    if is_whole and tolerance == NEAR:
        return False
    if abs(float(shown)) < ROUNDING and not is_whole:
        return abs(float(printed)) <= 100 * abs(float(shown))
    last_digit = 10.0 ** -len(number["digits"] or "") if "e" not in shown else 0.0
    allowed = tolerance * max(abs(float(printed)), abs(float(shown))) + 1.01 * last_digit
    return abs(float(printed) - float(shown)) <= allowed


def agrees(printed, shown, about=False):
    """Whether ``printed`` is what the page shows, but for the width of white space and the last digits of numbers."""
    if re.search(r"\d\.?…|…\d|…e", shown):
        parts = " ".join(shown.split()).split("…")
        return re.fullmatch(".*".join(map(re.escape, parts)), " ".join(printed.split())) is not None
    tolerance = ABOUT if about else NEAR
    tokens = _tokens(printed)
    reached = {0}  # how many tokens of what was printed may have been read
    for token in _tokens(shown):
        if token == "…":
            reached = set(range(min(reached), len(tokens) + 1)) if reached else set()
            continue
        reached = {
            n + 1 for n in reached if n < len(tokens) and _token_agrees(tokens[n], token, tolerance)
        }
    return len(tokens) in reached


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
        assert agrees(out.getvalue(), snippet.printed, snippet.about), (
            f"{snippet.code}\nprints\n{out.getvalue()}"
        )
    return out.getvalue()


def refresh(page, everything=False):
    """Run a page in a folder of its own, and write into it what its blocks print."""
    text = page.read_text()
    scope = {}
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        for snippet in snippets(text):
            if snippet.needs or snippet.commands == ["joma demo"]:
                continue
            start = time.monotonic()
            printed = execute(replace(snippet, printed=None), scope).rstrip() + "\n"
            seconds = time.monotonic() - start
            is_shortened = "…" in (snippet.printed or "")
            is_true = snippet.printed is None or agrees(printed, snippet.printed, snippet.about)
            if is_true and not (everything and is_shortened):
                continue
            if is_shortened and not everything:
                print(
                    f"{page.name}, {seconds:.0f} s, not written:\n{snippet.code}\nprints\n{printed}"
                )
                continue
            written = f"{snippet.code}```\n\nIt prints"
            before, _, after = text.partition(written)
            told = f"```text\n{snippet.printed}```"
            text = before + written + after.replace(told, f"```text\n{printed}```", 1)
    page.write_text(text)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        if name != "--all":
            refresh(Path(name).resolve(), everything="--all" in sys.argv)
