"""`joma docs`: the documentation in the terminal, without its pictures.

A wheel has the pages as ``joma/_docs``; a clone that is installed with ``pip install -e`` has them as ``docs``.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from joma._suggest import did_you_mean
from joma.cli.maths import plain_maths
from joma.cli.terminal import AsJson, console, escape, print_json, print_table

_PACKAGE = Path(__file__).parents[1]
_INCLUDE = "--8<--"  # how a page begins that is nothing but another file of the clone
# Code is split off first, since neither links nor formulas are meant in it: `$JOMA_DATA`.
_CODE = re.compile(r"(^```.*?^```[ \t]*$|`[^`\n]+`)", flags=re.MULTILINE | re.DOTALL)
# A comment in a line of its own goes with the line, one inside a line leaves the line as it is.
_COMMENT = re.compile(
    r"^(?:<!--.*?-->|<a id=[^>]*></a>)\n|<!--.*?-->|<a id=[^>]*></a>",
    flags=re.DOTALL | re.MULTILINE,
)
_PICTURE = re.compile(r"!\[([^\]]*)\]\([^)]*\)")
_PAGE_LINK = re.compile(r"\[([^\]]*)\]\(([\w-]+)\.md(?:#[^)]*)?\)")
_FILE_LINK = re.compile(r"\[([^\]]*)\]\((?!https?:)[^)]*\)")


def docs_folder() -> Path:
    """Return the folder of the pages."""
    for folder in (_PACKAGE / "_docs", _PACKAGE.parents[1] / "docs"):
        if (folder / "index.md").is_file():
            return folder
    raise ValueError(
        f"this installation of joma has no pages: {_PACKAGE / '_docs'} is missing; install joma again"
    )


def pages() -> dict[str, Path]:
    """Return the pages by name."""
    files = sorted(docs_folder().glob("*.md"))
    return {
        file.stem: file
        for file in files
        if not file.read_text(encoding="utf-8").startswith(_INCLUDE)
    }


def title_of(page: Path) -> str:
    """Return the first heading of a page."""
    match = re.search(r"^# (.+)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return match[1] if match else page.stem


def terminal_text(markdown: str) -> str:
    """Return a page as a terminal can show it: pictures by their captions, links by commands, formulas in Unicode.

    >>> terminal_text(
    ...     "See [the guide](watch.md#alerts), ![a curve](figures/x.png) and $z^2$; `$HOME` is code."
    ... )
    'See the guide (`joma docs watch`), *Picture: a curve.* and z²; `$HOME` is code.'
    """
    pieces = _CODE.split(_COMMENT.sub("", markdown))
    # every second piece is code
    prose = "".join(piece if n % 2 == 0 else f"\0{n}\0" for n, piece in enumerate(pieces))
    prose = _PICTURE.sub(r"*Picture: \1.*", prose)
    prose = _PAGE_LINK.sub(r"\1 (`joma docs \2`)", prose)
    prose = _FILE_LINK.sub(r"\1", prose)
    prose = plain_maths(prose)
    return re.sub("\0(\\d+)\0", lambda match: pieces[int(match[1])], prose)


def complete_page(incomplete: str) -> list[tuple[str, str]]:
    """Return the pages whose names begin so, with their titles."""
    return [(name, title_of(page)) for name, page in pages().items() if name.startswith(incomplete)]


def _docs(
    page: Annotated[
        str | None,
        typer.Argument(
            help="The page to print: watch, scan, reading, …",
            show_default="a list",
            autocompletion=complete_page,
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Read the documentation: list its pages, or print one of them."""
    known_pages = pages()
    out = console()
    if page is None:
        titles = {name: title_of(file) for name, file in known_pages.items()}
        if as_json:
            print_json(titles)
            return
        print_table(
            out, ("page", "*about"), [(name, escape(title)) for name, title in titles.items()]
        )
        out.print("\nOne of them: joma docs watch", highlight=False)
        return
    if page not in known_pages:
        hint = did_you_mean(page, known_pages)
        raise ValueError(f"there is no page {page!r}.{hint} `joma docs` lists all of them")
    text = terminal_text(known_pages[page].read_text(encoding="utf-8"))
    if as_json:
        print_json({"page": page, "title": title_of(known_pages[page]), "text": text})
    elif out.is_terminal:
        from rich.markdown import Markdown

        out.print(Markdown(text, hyperlinks=False))
    else:
        typer.echo(text)


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("docs")(_docs)
