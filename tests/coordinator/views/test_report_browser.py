"""The page of `run report` in a real browser: headless Chromium, driven over a pipe."""

import base64
import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from coordinator.views.report import write_report
from tests.coordinator.made_up_crews import make_crews
from tests.coordinator.made_up_run import make_run

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs a browser: apt-get install chromium")
DEADLINE_S = 60.0
SCREENSHOT_PX = 4000
"""A screenshot shows so much of the page's height."""


class Browser:
    """Chromium without a window; speaks the DevTools protocol on its descriptors 3 and 4."""

    def __init__(self, directory: Path) -> None:
        assert CHROMIUM is not None
        theirs, self._to = os.pipe()
        self._from, theirs_too = os.pipe()
        options = [
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--no-first-run",
        ]
        options += ["--remote-debugging-pipe", f"--user-data-dir={directory}", "--hide-scrollbars"]
        words = f'exec "$0" "$@" 3<&{theirs} 4>&{theirs_too}'
        self._process = subprocess.Popen(
            ["bash", "-c", words, CHROMIUM, *options, "about:blank"],
            pass_fds=(theirs, theirs_too),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(theirs)
        os.close(theirs_too)
        self._number, self._read, self._session = 0, b"", ""
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """The result of a command; events that come before it are kept."""
        self._number += 1
        command = {"id": self._number, "method": method, "params": parameters}
        command |= {"sessionId": self._session} if self._session else {}
        os.write(self._to, json.dumps(command).encode() + b"\0")
        while (message := self._message()).get("id") != self._number:
            self.events.append(message)
        assert "error" not in message, message
        return message["result"]

    def _message(self) -> dict[str, Any]:
        until_s = time.monotonic() + DEADLINE_S
        while b"\0" not in self._read:
            ready, _, _ = select.select([self._from], [], [], max(0.0, until_s - time.monotonic()))
            data = os.read(self._from, 1 << 20) if ready else b""
            assert data, "the browser has ended, or does not answer"
            self._read += data
        text, _, self._read = self._read.partition(b"\0")
        return json.loads(text)

    def open(self, page: Path, width: int, height: int, dark: bool = False) -> None:
        """Load a page in a window of this many CSS pixels; returns when it is whole."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        self.call("Page.navigate", url=page.as_uri())
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(self._message())
        self.events = [event for event in self.events if event.get("method") != "Page.loadEventFired"]

    def value(self, expression: str) -> Any:
        """What a JavaScript expression gives in the page."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result
        return result["result"]["value"]

    def screenshot(self, path: Path) -> Path:
        """The page from its top, as a PNG."""
        size = self.value("[innerWidth, document.documentElement.scrollHeight]")
        clip = {"x": 0, "y": 0, "width": size[0], "height": min(size[1], SCREENSHOT_PX), "scale": 1}
        shot = self.call("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)
        path.write_bytes(base64.b64decode(shot["data"]))
        return path

    def complaints(self) -> list[dict[str, Any]]:
        """What the console shows, and what was thrown."""
        names = {"Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded"}
        return [event for event in self.events if event.get("method") in names]

    def close(self) -> None:
        os.close(self._to)
        os.close(self._from)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    opened = Browser(tmp_path_factory.mktemp("browser"))
    yield opened
    opened.close()


def keep(screenshot: Path) -> None:
    """As an artifact of the test run, where one is wanted."""
    if directory := os.environ.get("FLAGPOST_ARTIFACTS"):
        shutil.copy(screenshot, directory)


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
