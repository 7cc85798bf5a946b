"""The page of `run serve` in a real browser: live, as wide as a desk or a phone, whatever is said."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from coordinator.console.server import jobs
from coordinator.console.server.access import COOKIE
from coordinator.console.server.runner import EXIT, OUTPUT, PROCESS
from coordinator.console.server.submission import Submission
from tests.browser import CHROMIUM, Browser, keep
from tests.coordinator.console.server.served import TOKEN, Served, serving
from tests.scripts.documented_run import make_run, metrics_line

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs a browser: apt-get install chromium")

ATTACK = "<img src=x onerror=alert(1)><script>alert(2)</script>\"'>"
STATES = (
    "[...document.querySelectorAll('article')].map(c => [c.querySelector('h2').textContent, c.className])"
)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    opened = Browser(tmp_path_factory.mktemp("browser"))
    yield opened
    opened.close()


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    with serving(tmp_path / "jobs", at_once=0) as found:
        yield found


def make_job(root: Path, name: str, finished: int = 0, code: int | None = None, said: str = "") -> jobs.Job:
    """A job with a run of three nodes, whose start was on another machine."""
    job = jobs.submit(root, Submission(name, (f"--iterations={finished + 1}",), {}))
    if finished:
        make_run(job.log_path, finished)
    folder = job.start().folder
    folder.mkdir()
    process = {"pid": 1, "created_s": 1.0, "pid_space": "elsewhere", "host": "node-0"}
    (folder / PROCESS).write_text(json.dumps(process))
    (folder / OUTPUT).write_text(f"{said}\n")
    if code is not None:
        (folder / EXIT).write_text(json.dumps({"code": code}))
    return job


def beat(job: jobs.Job, **said: Any) -> None:
    """The next heartbeat of its master."""
    master = job.log_path / "protocol" / "main" / "master"
    (last,) = master.glob("*.r0000.n*.b*")
    number = int(last.name[-6:]) + 1
    (master / f"{last.name[:-6]}{number:06d}").write_text(json.dumps(json.loads(last.read_text()) | said))
    last.unlink()


def until(browser: Browser, expression: str, timeout_s: float = 60.0) -> Any:
    deadline_s = time.monotonic() + timeout_s
    while not (value := browser.value(expression)):
        assert time.monotonic() < deadline_s, f"{expression}: {browser.value('document.body.innerText')}"
        time.sleep(0.1)
    return value


def sign_in(browser: Browser, token: str) -> None:
    until(browser, "!document.getElementById('login').hidden")
    browser.value(f"document.getElementById('token').value = {json.dumps(token)}")
    browser.value("document.getElementById('login').requestSubmit(), 1")


def test_page_shows_jobs_live_at_both_widths_without_a_word_in_the_console(
    served: Served, browser: Browser, tmp_path: Path
) -> None:
    running = make_job(served.root, "sums", finished=9)
    make_job(served.root, "failing", code=2, said=f"run: {ATTACK}")
    jobs.submit(served.root, Submission("waiting", (), {}))
    for name, width, height, dark in (("desk", 1400, 900, False), ("phone", 390, 844, True)):
        browser.open(f"{served.url}/", width, height, dark)
        if name == "desk":
            assert browser.value("document.querySelectorAll('article').length") == 0
            sign_in(browser, TOKEN)
        until(browser, "document.querySelectorAll('article').length === 3")
        states = dict(browser.value(STATES))
        assert states == {"sums": "running", "waiting": "submitted", "failing": "failed"}
        assert browser.value("document.documentElement.scrollWidth") <= width
        keep(browser.screenshot(tmp_path / f"jobs_{name}.png"))
    text = browser.value("document.body.innerText")
    for expected in ("iteration 10 of 100", "train rollout", "rank 2", "node-2", "1/2", "0.490", ATTACK):
        assert expected in text, expected
    assert browser.value("document.querySelectorAll('img, article script').length") == 0
    with running.log_path.joinpath("metrics.jsonl").open("a") as file:
        file.write(json.dumps({**metrics_line(10), "reward": 0.777}) + "\n")
    beat(running, iteration=11)
    until(browser, "document.body.innerText.includes('0.777')")
    assert browser.complaints() == []


def test_who_waits_for_whom_is_told(served: Served, browser: Browser) -> None:
    job = make_job(served.root, "sums", finished=3)
    beat(job, waiting_for=[2], waiting_s=34.0)
    browser.call("Network.clearBrowserCookies")
    browser.open(f"{served.url}/", 390, 844)
    sign_in(browser, TOKEN)
    until(browser, "document.body.innerText.includes('waiting for rank 2 (node-2) for 34 s')")
    assert browser.complaints() == []


def test_wrong_token_is_said_and_the_jobs_stay_hidden(served: Served, browser: Browser) -> None:
    make_job(served.root, "sums", code=0)
    browser.call("Network.clearBrowserCookies")
    browser.open(f"{served.url}/", 1400, 900)
    sign_in(browser, "not the token")
    until(browser, "document.getElementById('refused').textContent.includes('not the token of the server')")
    assert browser.value("document.querySelectorAll('article').length") == 0
    browser.events.clear()  # the browser itself notes the 401


def test_server_that_is_away_is_said_and_found_again(tmp_path: Path, browser: Browser) -> None:
    with serving(tmp_path / "jobs", at_once=0) as served:
        make_job(served.root, "sums", code=0)
        browser.call("Network.clearBrowserCookies")
        browser.open(f"{served.url}/", 1400, 900)
        sign_in(browser, TOKEN)
        until(browser, "document.querySelectorAll('article').length === 1")
    until(browser, "document.body.innerText.includes('The server does not answer')")
    browser.events.clear()


def test_report_of_a_job_is_a_page_of_its_own(served: Served, browser: Browser) -> None:
    make_job(served.root, "sums", finished=9)
    browser.call("Network.setCookie", name=COOKIE, value=_cookie(served), url=served.url)
    browser.open(f"{served.url}/jobs/sums/report", 1400, 900)
    assert browser.value("document.querySelectorAll('svg.chart').length") >= 1
    assert browser.value("window.origin") == "null"
    assert browser.complaints() == []


def _cookie(served: Served) -> str:
    status, _, headers = served.ask("POST", "/login", json.dumps({"token": TOKEN}).encode())
    value, *about = headers["Set-Cookie"].split("; ")
    assert status == 200 and {"HttpOnly", "SameSite=Strict"} <= {*about}
    return value.partition("=")[2]


def test_cookie_can_look_and_change_nothing(served: Served) -> None:
    make_job(served.root, "sums", code=0)
    cookie = f"{COOKIE}={_cookie(served)}"
    assert served.ask("GET", "/jobs", Authorization="", Cookie=cookie)[0] == 200
    changes = ("stop", "resume", "guest", "cleanup")
    for path in ("/jobs", *(f"/jobs/sums/{change}" for change in changes)):
        assert served.ask("POST", path, b"{}", Authorization="", Cookie=cookie)[0] == 401


def test_answers_forbid_what_the_page_does_not_need(served: Served) -> None:
    make_job(served.root, "sums", finished=3)
    for path in ("/", "/page.js", "/page.css", "/jobs", "/jobs/sums", "/jobs/sums/logs", "/jobs/sums/report"):
        status, _, headers = served.ask("GET", path)
        assert (status, headers["X-Content-Type-Options"], headers["Cache-Control"]) == (
            200,
            "nosniff",
            "no-store",
        )
    assert "script-src 'self';" in served.ask("GET", "/")[2]["Content-Security-Policy"]
    assert "sandbox" in served.ask("GET", "/jobs/sums/report")[2]["Content-Security-Policy"]
    assert served.ask("GET", "/jobs/sums/logs")[2]["Content-Type"].startswith("text/plain")


def test_logs_of_a_job_steer_no_terminal_and_name_no_path(served: Served) -> None:
    make_job(served.root, "sums", finished=3, said=f"\x1b]0;title\x07\x1b[2J{ATTACK}")
    status, text, _ = served.ask("GET", "/jobs/sums/logs")
    assert status == 200 and b"\x1b" not in text and b"^[]0;title^G^[[2J" in text
    for rank in ("9", "-1", "../0", "0/../..", "%00", "x", "99999999999999999999"):
        status, text, _ = served.ask("GET", f"/jobs/sums/logs?rank={rank}")
        assert status in {400, 404} and json.loads(text)["error"]


def test_only_files_that_a_checkpoint_names_are_given(served: Served) -> None:
    make_job(served.root, "sums", finished=3)
    said = json.loads(served.ask("GET", "/jobs/sums/checkpoint")[1])
    assert said["iteration"] == 3
    for name, facts in said["files"].items():
        status, data, headers = served.ask("GET", f"/jobs/sums/checkpoint/3/{name}", Range="bytes=1-")
        assert (status, len(data)) == (206, facts["bytes"] - 1), headers
    for name in (
        "result.json",
        "no",
        "..%2f..%2frun.json",
        "%2e%2e",
        "..%2fLATEST",
        ".",
        "%00",
        "trainer_state",
    ):
        status, data, _ = served.ask("GET", f"/jobs/sums/checkpoint/3/{name}")
        assert status == 404, data
    for number in ("0", "2", "x", "-1", "03x", "9" * 30, "%2e%2e"):
        assert served.ask("GET", f"/jobs/sums/checkpoint/{number}/config.json")[0] == 404
