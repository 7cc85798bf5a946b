"""README and docs/ hang together: links lead somewhere, and what the pages say of the code is so."""

import re
from pathlib import Path

import pytest

from coordinator.console.views.run import Run
from coordinator.protocol.exits import Exit
from coordinator.settings.loading import OPEN, build, flatten
from tests.scripts.documented_run import make_run
from tests.scripts.pages import PAGES, REPOSITORY, anchors, links, name

PAGE = {name(page): page for page in PAGES}
INDEX = "docs/README.md"
SOURCES = sorted(
    path for room in ("coordinator", "rollout/storage") for path in (REPOSITORY / room).rglob("*.py")
)


@pytest.mark.parametrize("page", PAGE)
def test_links_lead_somewhere(page: str) -> None:
    lost: list[str] = []
    for link in links(PAGE[page]):
        target, _, heading = link.partition("#")
        if "://" in target:
            continue
        path = (PAGE[page].parent / target).resolve() if target else PAGE[page]
        if not path.is_file() or (heading and heading not in anchors(path)):
            lost.append(link)
    assert lost == []


def test_every_page_is_in_the_index() -> None:
    pages = {name(page).removeprefix("docs/") for page in PAGES if name(page).startswith("docs/")}
    listed = {link for link in links(PAGE[INDEX]) if not link.startswith("..")}
    assert listed == pages - {"README.md"}


def test_documentation_is_read_in_a_day() -> None:
    """Words and numbers, without the bars of tables; the pages that scripts write count too."""
    words = [word for page in PAGE if page.startswith("docs/") for word in PAGE[page].read_text().split()]
    assert sum(any(map(str.isalnum, word)) for word in words) <= 28_000


@pytest.mark.parametrize("page", PAGE)
def test_tests_that_a_page_names_are_there(page: str) -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)`", PAGE[page].read_text())
    assert [path for path in named if not (REPOSITORY / path).is_file()] == []
    assert named or page != "docs/evidence.md"


def test_exit_codes_of_the_recovery_page_are_those_of_run() -> None:
    page = PAGE["docs/recovery.md"].read_text()
    codes = re.findall(r"^\| (\d+) \|", page[page.index("## Exit codes") :], re.MULTILINE)
    assert [int(code) for code in codes] == sorted(set(Exit) - {Exit.MOVED})  # which nobody sees


SETTINGS = dict(flatten(build({"model": "any/model"}).model_dump(mode="json")))
SECTIONS = {name.partition(".")[0] for name in SETTINGS if "." in name}


@pytest.mark.parametrize("page", PAGE)
def test_settings_that_a_page_names_are_there(page: str) -> None:
    spans = re.findall(r"`([a-z_]+(?:\.[a-z_]+)+)(?:=[^`]*)?`", PAGE[page].read_text())
    files = {"jsonl", "md", "json", "py", "sh", "toml", "yaml", "log", "html", "sbatch"}
    named = {
        span for span in spans if span.partition(".")[0] in SECTIONS and span.split(".")[-1] not in files
    }
    sections = {name.rpartition(".")[0] for name in SETTINGS}
    known = {*SETTINGS, *sections, "trainer.algorithms"}
    assert {span for span in named - known if not span.startswith(OPEN)} == set()


@pytest.mark.parametrize("page", PAGE)
def test_defaults_that_a_page_states_are_those_of_the_settings(page: str) -> None:
    """As in `trainer.max_attempts` (3)."""
    stated = re.findall(r"`([a-z_]+\.[a-z_.]+)`\s\(([\d.e-]+)(?: s)?\)", PAGE[page].read_text())
    assert [(name, value) for name, value in stated if SETTINGS[name] != float(value)] == []
    assert len(stated) >= 3 or page != "docs/gpus.md"


def rows(page: str, heading: str) -> list[list[str]]:
    """The cells of the table below this heading."""
    table = PAGE[page].read_text().partition(f"\n{heading}\n")[2].partition("\n|")[2].partition("\n\n")[0]
    return [[cell.strip(" `") for cell in row.split("|")[1:-1]] for row in table.splitlines()[2:]]


def test_ten_settings_and_ten_symptoms_are_ten_and_defaults_are_right() -> None:
    settings = rows("docs/basics.md", "## Ten settings")
    assert len(settings) == len(rows("docs/basics.md", "## Ten symptoms")) == 10
    for setting, default, _ in settings:
        value = SETTINGS[setting]
        assert default == ("null" if value is None else str(value)) or float(default) == value, setting


def test_keys_of_the_status_are_on_the_page(tmp_path: Path) -> None:
    make_run(tmp_path, finished=1)
    status = Run(tmp_path).status()
    page = PAGE["docs/monitoring.md"].read_text()
    assert [key for key in (*status, *status["nodes"][0]) if f"`{key}`" not in page] == []


def test_events_of_the_page_are_those_that_nodes_write() -> None:
    page = PAGE["docs/monitoring.md"].read_text()
    rows = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \|", page[page.index("| `what` |") :], re.MULTILINE)
    named = {word for row in rows for word in re.findall(r"\w+", row)} - {"what"}
    sources = "\n".join(path.read_text() for path in SOURCES)
    written = re.findall(r'(?:events\.add|self\._say)\(\s*"(\w+)"|"what": "(\w+)"', sources)
    assert named == {word for pair in written for word in pair if word} | {"warning", "error"}


MESSAGES = [
    "is lost",
    "no heartbeat for",
    "To bring it back, on that machine:",
    "has not shown this node's heartbeat for",
    "it leaves the epoch, its engine stays warm, and it comes back by itself",
    "did not answer for",
    "it beats, but has made no progress for",
    "died or did not answer for",
    "starting it again (",
    "Does another run use it?",
    "DAMAGED CHECKPOINT:",
    "restore it or use another log path",
    "was taken over by",
    "this process ends",
    "stop the run first:",
]


def test_messages_of_the_recovery_page_are_those_of_the_code() -> None:
    sources = "\n".join(path.read_text() for path in SOURCES)
    page = " ".join(PAGE["docs/recovery.md"].read_text().split())
    assert [text for text in MESSAGES if text not in page] == []
    assert [text for text in MESSAGES if text not in sources] == []
