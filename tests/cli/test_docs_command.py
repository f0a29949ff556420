"""`joma docs`: what a message points to can be read wherever joma is installed."""

import ast
import json
import re
from pathlib import Path

import pytest

import joma as package
from joma.cli.docs import docs_folder, pages, terminal_text
from tests.cli.test_cli import joma

SOURCE = Path(package.__file__).parent
DOCS = Path(__file__).parents[2] / "docs"


def strings(path: Path) -> list[str]:
    """Return the texts of a source file that can reach a user: its string constants, docstrings included."""
    if path.suffix != ".py":
        return [path.read_text(encoding="utf-8")]
    constants = [
        node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)
    ]
    return [node.value for node in constants if isinstance(node.value, str)]


def test_no_text_points_to_a_page_that_is_not_installed():
    files = [file for pattern in ("*.py", "*.html", "*.js") for file in SOURCE.rglob(pattern)]
    assert len(files) > 100
    pointers = {
        (str(file.relative_to(SOURCE)), pointer)
        for file in files
        for text in strings(file)
        for pointer in re.findall(r"docs/[\w-]+\.md", text)
    }
    assert pointers == set()


def test_pages_that_texts_point_to_exist():
    named = {
        name
        for file in SOURCE.rglob("*.py")
        if file != SOURCE / "cli/docs.py"
        for text in strings(file)
        for name in re.findall(r"joma docs ([a-z][\w-]*)", text)
    }
    assert {"getting-started", "reading"} <= named
    assert named <= set(pages())


def test_it_lists_all_pages_with_their_titles():
    assert docs_folder() == DOCS
    listed = json.loads(joma("docs", "--json", check=0).stdout)
    assert set(listed) == {file.stem for file in DOCS.glob("*.md")} - {"changelog", "contributing"}
    assert listed["watch"] == (DOCS / "watch.md").read_text().splitlines()[0].removeprefix("# ")
    table = joma("docs", check=0).stdout
    assert re.search(rf"^watch\s+{re.escape(listed['watch'])}", table, flags=re.M)


@pytest.mark.parametrize("page", sorted(pages()))
def test_a_page_is_readable_as_text(page):
    """Without addresses that lead nowhere in a terminal, and with all of its code as it is."""
    source = (DOCS / f"{page}.md").read_text()
    text = terminal_text(source)
    assert "\0" not in text
    assert not re.search(r"!\[|<!--|<a id=", text)
    assert [
        target for target in re.findall(r"\]\(([^)\s]+)\)", text) if not target.startswith("http")
    ] == []
    blocks = re.findall(r"^```.*?^```", source, flags=re.M | re.S)
    assert all(block in text for block in blocks)
    assert set(re.findall(r"`joma docs ([\w-]+)`", text)) <= set(pages())


def test_a_page_is_printed_and_an_unknown_one_refused_with_the_nearest():
    printed = joma("docs", "watch", check=0).stdout
    assert printed.startswith("# ")
    assert "joma.watch" in printed
    refused = joma("docs", "wotch", check=2)
    assert (
        "there is no page 'wotch'. Did you mean 'watch'? `joma docs` lists all of them"
        in refused.stderr
    )
