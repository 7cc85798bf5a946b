"""The tables of CONTRIBUTING name files and functions that are there, and every file beside the rooms."""

import ast
import re

import pytest

from tests.scripts.pages import REPOSITORY

PAGE = (REPOSITORY / "CONTRIBUTING.md").read_text()


def table(heading: str) -> list[list[set[str]]]:
    """Of each row below this text: the names in each of its cells."""
    rows = PAGE.partition(heading)[2].partition("\n|")[2].partition("\n\n")[0].splitlines()[2:]
    return [[set(re.findall(r"`([^`]+)`", cell)) for cell in row.split("|")[1:-1]] for row in rows]


def test_files_that_the_page_names_are_there() -> None:
    named = set(re.findall(r"`([\w.]+/[\w./]+\.\w+)`", PAGE))
    named.remove("build/site/index.html")  # made by `make docs`
    assert [name for name in sorted(named) if not (REPOSITORY / name).exists()] == []
    assert len(named) > 100


def test_every_change_has_files_with_what_is_named_beside_them_and_tests_that_hold_it() -> None:
    for _, files, tests in table("## How to change"):
        assert len(files) > 2 and any(name.startswith("tests/") for name in tests)
        texts = [(REPOSITORY / name).read_text() for name in files | tests if "/" in name]
        words = set(re.findall(r"\w+", "\n".join(texts)))
        assert {name for name in files | tests if name.isidentifier()} <= words


@pytest.mark.parametrize("heading", ["## The life of a node", "## Which files decide which groups survive"])
def test_each_function_of_the_page_is_in_a_file_of_its_row(heading: str) -> None:
    rows = table(heading)
    assert len(rows) > 5
    for _, files, names in rows:
        sources = [(REPOSITORY / name).read_text() for name in files if name.endswith(".py")]
        defined = {
            node.name
            for source in sources
            for node in ast.walk(ast.parse(source))
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        }
        assert names and names <= defined, f"{sorted(names - defined)} are not in {sorted(files)}"


def test_every_file_beside_the_rooms_is_named() -> None:
    packages = ("coordinator", "trainer", "rollout")
    beside = {
        f"{package}/{path.name}" for package in packages for path in (REPOSITORY / package).glob("*.py")
    }
    named = {name for file, _ in table("Some files stand beside the rooms:") for name in file}
    assert named == beside - {f"{package}/__init__.py" for package in packages}
