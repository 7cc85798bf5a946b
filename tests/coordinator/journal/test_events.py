"""What a node's events hold: what was added and logged, whole lines, after whatever lay there before."""

import json
import logging
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from coordinator.journal.events import Events, about_this_process, first_begin_s
from rollout.storage.retry import retry


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines() if line]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "rank_0001.jsonl"


def test_events_carry_clock_incarnation_and_epoch(path: Path) -> None:
    events = Events()
    events.open(path, lambda: (3, 2))
    events.add("begin", it=5, row="training")
    events.add("end", it=5, row="training", work_s=1.5)
    events.end()
    first, second = lines(path)
    assert (first["n"], first["e"], first["what"], first["row"]) == (3, 2, "begin", "training")
    assert second["t"] >= first["t"] and second["work_s"] == 1.5


def test_an_iteration_that_was_begun_is_found_among_what_a_process_writes(path: Path) -> None:
    events = Events()
    events.open(path, lambda: (3, 2))
    events.add("process", host="a", **about_this_process())
    for iteration in (4, 5):
        events.add("begin", it=iteration, row="training")
    events.end()
    assert first_begin_s(path, "a", 5) == lines(path)[-1]["t"] and first_begin_s(path, "a", 6) is None


def test_a_torn_line_of_the_process_before_spoils_nothing(path: Path) -> None:
    path.write_text('{"t": 1.0, "what": "beg')
    events = Events()
    events.open(path, lambda: (2, 0))
    events.add("exit", code=0, text="")
    events.end()
    torn, whole = path.read_text().splitlines()
    assert torn == '{"t": 1.0, "what": "beg' and json.loads(whole)["code"] == 0


def test_warnings_errors_and_passing_failures_are_events(path: Path) -> None:
    events, log = Events(), logging.getLogger("rollout.storage.retry")
    events.open(path, lambda: (1, 1))
    log.addHandler(events)
    log.setLevel(logging.DEBUG)
    failures = [OSError(116, "Stale file handle")]

    def call() -> int:
        if failures:
            raise failures.pop()
        return 7

    try:
        log.warning("the %s is slow", "mount")
        log.info("nothing to keep")
        assert retry("read", path, call) == 7
    finally:
        log.removeHandler(events)
        log.setLevel(logging.NOTSET)
    events.end()
    warning, passed = lines(path)
    assert (warning["what"], warning["text"]) == ("warning", "the mount is slow")
    assert passed["what"] == "retry" and "Stale file handle" in passed["text"] and passed["seconds"] >= 0


def test_nothing_waits_for_a_directory_that_is_not_there(tmp_path: Path) -> None:
    events = Events()
    events.open(tmp_path / "gone" / "rank_0000.jsonl", lambda: (1, 1))
    events.add("begin", it=1, row="training")
    events.end()
    assert not (tmp_path / "gone").exists()


def test_a_process_says_when_it_began_and_what_it_runs_on() -> None:
    about = about_this_process()
    assert about["at"].endswith("+00:00") and about["versions"]["torch"]


def add_many(events: Events) -> None:
    for _ in range(200):
        events.add("warning", text="late")


def test_what_is_added_while_the_file_ends_harms_nobody(path: Path) -> None:
    for _round in range(20):
        events = Events()
        events.open(path, lambda: (1, 1))
        adding = threading.Thread(target=add_many, args=(events,))
        adding.start()
        events.end()
        adding.join()
    assert all(line["what"] == "warning" for line in lines(path))


def test_an_iteration_began_with_the_first_process_of_this_host_since_the_boot(path: Path) -> None:
    def process(host: str, t: float, begins: bool = True) -> str:
        begin = json.dumps({"t": t + 1.0, "what": "begin", "it": 5, "row": "training"})
        return f"{json.dumps({'t': t, 'what': 'process', 'host': host})}\n" + f"{begin}\n" * begins

    def begun_s(*processes: str) -> float | None:
        path.write_text("".join(processes) + '{"torn')
        return first_begin_s(path, "a", 5)

    assert first_begin_s(path, "a", 5) is None, "there are no events yet"
    assert begun_s(process("a", 1.0), process("a", 2.0)) == 2.0
    assert begun_s(process("a", 1.0), process("a", 3.0, begins=False)) == 2.0
    assert begun_s(process("a", 3.0), process("a", 1.0, begins=False)) is None, "the machine was booted"
    assert begun_s(process("a", 1.0), process("b", 2.0), process("a", 3.0, begins=False)) is None
    assert begun_s(process("a", 1.0), process("b", 2.0)) is None, "another machine's clock"
    assert begun_s(process("a", time.monotonic() + 60.0)) is None, "the machine was booted"
