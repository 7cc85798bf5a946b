"""`make docs`: the site shows what GitHub shows, needs no network, and has no broken link."""

import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

from tests.browser import CHROMIUM, Browser, keep
from tests.scripts.pages import PAGES, REPOSITORY, name

SEARCH = "document.querySelector('[data-md-component=search-query]')"
RESULTS = "[...document.querySelectorAll('.md-search-result__item a')].map(link => link.href)"
ELEMENTS = ("h1", "h2", "h3", "h4", "p", "li", "table", "tr", "pre", "img", "em", "strong")


def checkout(destination: Path) -> Path:
    """A copy of what the site is made of, and of what its pages link to."""
    for part in ("docs", "scripts"):
        shutil.copytree(REPOSITORY / part, destination / part, ignore=shutil.ignore_patterns("__pycache__"))
    for file in (*REPOSITORY.glob("*.md"), REPOSITORY / "Dockerfile", REPOSITORY / "LICENSE"):
        shutil.copy(file, destination)
    return destination


def build(sources: Path) -> subprocess.CompletedProcess[str]:
    """What `make docs` does, once it has installed."""
    (recipe,) = re.findall(
        r"^\t(.* \$\(BIN\)/mkdocs .*)$", (REPOSITORY / "Makefile").read_text(), re.MULTILINE
    )
    command = recipe.replace("$(BIN)", str(Path(sys.executable).parent))
    return subprocess.run(command, shell=True, cwd=sources, capture_output=True, text=True, timeout=120)


BROKEN = {
    "[x](nowhere.md)": "'docs/nowhere.md'",
    "[x](../scripts/nowhere.yaml)": "'scripts/nowhere.yaml'",
    "[x](gpus.md#nowhere)": "does not contain an anchor '#nowhere'",
    "![x](nowhere.png)": "'docs/nowhere.png'",
}
"""What leads nowhere in docs/basics.md, and what is said of it."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sources = checkout(tmp_path_factory.mktemp("checkout"))
    done = build(sources)
    assert done.returncode == 0, done.stderr
    return sources / "build" / "site"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("needs chromium")
    browser = Browser(tmp_path_factory.mktemp("chromium"))
    yield browser
    browser.close()


def of_the_site(page: str) -> str:
    """Where a page is in the site."""
    return re.sub(r"README\.md$", "index.md", page).replace(".md", ".html")


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_page_has_the_parts_that_it_has_on_github(site: Path, page: Path) -> None:
    here = (site / of_the_site(name(page))).read_text().partition("<article")[2].partition("</article>")[0]
    there = MarkdownIt().enable("table").render(page.read_text())
    counts = [
        {element: len(re.findall(rf"<{element}[ >]", html)) for element in ELEMENTS} for html in (here, there)
    ]
    assert counts[0] == counts[1]


def test_pages_fetch_nothing_from_the_network(site: Path) -> None:
    fetched = re.compile(r"<(?:link|script|img|iframe)[^>]+(?:href|src)=\"?https?:[^\s>]+")
    pages = [path for path in site.rglob("*.html")]
    assert len(pages) > len(PAGES)
    assert [link for page in pages for link in fetched.findall(page.read_text())] == []


def test_each_broken_link_and_each_page_that_is_in_no_list_ends_the_build(tmp_path: Path) -> None:
    sources = checkout(tmp_path)
    with (sources / "docs" / "basics.md").open("a") as page:
        page.write(f"\n{' '.join(BROKEN)}\n")
    (sources / "docs" / "new.md").write_text("# New\n")
    done = build(sources)
    assert done.returncode == 1
    warnings = [line for line in done.stderr.splitlines() if line.startswith("WARNING")]
    assert f"Aborted with {len(warnings)} warnings in strict mode" in done.stdout + done.stderr, "each counts"
    of_links = [line for line in warnings if "'docs/basics.md'" in line]
    (of_page,) = [line for line in warnings if line not in of_links]
    assert "docs/new.md" in of_page + done.stderr.partition(of_page)[2].partition("WARNING")[0]
    for complaint in BROKEN.values():
        assert [complaint in line for line in of_links].count(True) == 1, complaint
    assert len(of_links) == len(BROKEN)


def test_search_finds_words_from_a_disk(site: Path, browser: Browser, tmp_path: Path) -> None:
    """Where the search runs in a frame, since a browser starts no worker there."""
    browser.call("Emulation.setFocusEmulationEnabled", enabled=True)
    browser.open(site / "docs" / "clusters.html", 1200, 900)
    browser.value(f"{SEARCH}.focus() ?? 0")
    browser.call("Input.insertText", text="incarnation")
    browser.value(f"{SEARCH}.dispatchEvent(new KeyboardEvent('keyup', {{bubbles: true}}))")
    deadline_s = time.monotonic() + 60
    while not (found := browser.value(RESULTS)) and time.monotonic() < deadline_s:
        time.sleep(0.1)
    keep(browser.screenshot(tmp_path / "search.png"))
    assert any(link.startswith(f"{(site / 'docs' / 'protocol.html').as_uri()}?") for link in found)
    assert browser.complaints() == []


@pytest.mark.parametrize("width", [390, 1400])
def test_pages_are_no_wider_than_the_window(site: Path, browser: Browser, width: int) -> None:
    for page in (
        "index.html",
        "docs/settings.html",
        "docs/models.html",
        "docs/protocol.html",
        "Dockerfile.html",
    ):
        browser.open(site / page, width, 900)
        assert browser.value("document.documentElement.scrollWidth") == width, page
    assert browser.complaints() == []
