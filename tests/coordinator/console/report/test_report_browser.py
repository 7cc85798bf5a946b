"""The page of `run report` in a real browser: headless Chromium, driven over a pipe."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from coordinator.console.report import write_report
from tests.browser import CHROMIUM, Browser, keep
from tests.coordinator.example_crews import make_crews
from tests.coordinator.example_run import make_run

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs a browser: apt-get install chromium")


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    opened = Browser(tmp_path_factory.mktemp("browser"))
    yield opened
    opened.close()


CHARTS = "[...document.querySelectorAll('svg.chart')].map(c => c.querySelectorAll('circle').length)"
POINTED = """(() => {
  const chart = document.querySelector("svg.chart"), box = chart.getBoundingClientRect();
  chart.dispatchEvent(new PointerEvent("pointermove", {clientX: box.right - 1, clientY: box.top + 9}));
  return chart.parentElement.querySelector("output").textContent;
})()"""
SMALLEST = "Math.min(...[...document.querySelectorAll('text')].map(t => t.getBoundingClientRect().height))"
DRAWN = (
    "[...document.querySelectorAll('.lanes rect')].filter(r => r.getBoundingClientRect().width > 1).length"
)


def test_page_loads_in_a_browser_without_a_word_and_shows_its_charts(
    tmp_path: Path, browser: Browser
) -> None:
    run_dir = make_run(tmp_path / "run", iterations=12, nodes=3, lost=7)
    page = write_report(run_dir.root, tmp_path / "page.html")
    for name, width, height, dark in (("desktop", 1280, 900, False), ("phone", 390, 844, True)):
        browser.open(page, width, height, dark)
        assert min(browser.value(CHARTS)) >= 1 and len(browser.value(CHARTS)) == 11
        assert browser.value(DRAWN) > 60
        assert browser.value("document.querySelectorAll('.timeline').length") == 3
        assert browser.value("document.documentElement.scrollWidth") <= width, name
        assert "iteration 12: training 0." in browser.value(POINTED)
        assert browser.value(SMALLEST) >= 10
        keep(browser.screenshot(tmp_path / f"report-{name}.png"))
    assert "<script>alert(1)</script>" in browser.value("document.querySelector('#samples').textContent")
    assert browser.complaints() == []


def test_both_crews_are_drawn_on_a_wide_screen_and_on_a_phone(tmp_path: Path, browser: Browser) -> None:
    make_crews(tmp_path / "run", 12.0, 6.0)
    page = write_report(tmp_path / "run")
    said = len(browser.complaints())
    for width in (1400, 390):
        browser.open(page, width, 900)
        assert browser.value("document.documentElement.scrollWidth") <= width
        marks = "[...document.querySelector('.timeline').querySelectorAll('.marks')].map(m => m.textContent)"
        assert browser.value(marks) == ["678", "678"]
        idle = "[...document.querySelectorAll('.lanes rect.idle')].map(r => r.getBoundingClientRect().width)"
        assert sum(drawn > 20 for drawn in browser.value(idle)) >= 4
        assert browser.value(POINTED).startswith("policy of iteration 6: training 0.6")
    assert len(browser.complaints()) == said


CUT = """[...document.querySelectorAll("#time td, #faults td, #faults th, .bars em")].filter(
  cell => cell.getClientRects().length && cell.getBoundingClientRect().right > innerWidth).length"""


def test_phone_shows_whole_tables_and_that_the_sections_can_be_scrolled(
    tmp_path: Path, browser: Browser
) -> None:
    run_dir = make_run(tmp_path / "run", iterations=8, nodes=3, lost=7)
    browser.open(write_report(run_dir.root), 390, 844)
    said = browser.value("document.querySelector('#faults .text').textContent")
    assert "is silent" in said and browser.value(CUT) == 0
    nav = "document.querySelector('nav')"
    assert browser.value(f"{nav}.scrollWidth > {nav}.clientWidth")
    assert browser.value(f"getComputedStyle({nav}).backgroundImage.split('linear-gradient').length") == 5


GAPS = """[...Array(11).keys()].map(n => n + 2).filter(count => {
  const charts = document.querySelector(".charts"), all = [...charts.children];
  all.slice(count).forEach(figure => figure.remove());
  const gap = charts.getBoundingClientRect().right - charts.lastElementChild.getBoundingClientRect().right;
  all.slice(count).forEach(figure => charts.append(figure));
  return count <= all.length && gap > 1;
})"""


def test_wide_screen_has_no_gap_beside_the_last_chart_however_many_there_are(
    tmp_path: Path, browser: Browser
) -> None:
    browser.open(write_report(make_run(tmp_path / "run", iterations=3).root), 1400, 900)
    assert browser.value("document.querySelectorAll('.charts figure').length") >= 11
    assert browser.value(GAPS) == []


def test_script_that_slips_into_the_page_would_not_run(tmp_path: Path, browser: Browser) -> None:
    run_dir = make_run(tmp_path / "run", iterations=1, nodes=1)
    page = write_report(run_dir.root)
    page.write_text(
        page.read_text().replace("</footer>", "</footer><script>document.title = 'taken'</script>")
    )
    said = len(browser.complaints())
    browser.open(page, 1280, 900)
    assert browser.value("document.title") == "run: finished"
    assert len(browser.complaints()) == said + 1
