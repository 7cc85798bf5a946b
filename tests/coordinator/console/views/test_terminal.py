"""The live view in a terminal: what is above and below it stays in order, whatever hangs."""

import io
import logging
import os
import re
import subprocess
import sys
import termios
import threading
import time
import tty
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

import pytest

from coordinator.console.views import terminal as view_module
from coordinator.console.views.terminal import LiveView, live_view
from coordinator.directory.layout import RunDir
from coordinator.settings.tree import SettingsError
from tests.coordinator.console.views.example_status import ROOT, Readings

# ---- in a terminal


class Terminal:
    """A pseudoterminal of 80 x 24 that shows what has been written, as far as the view uses one."""

    def __init__(self) -> None:
        self._reading, writing = os.openpty()
        tty.setraw(writing)
        termios.tcsetwinsize(writing, (24, 80))
        self.file = os.fdopen(writing, "w", encoding="utf-8")
        self.written = ""
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        try:
            while data := os.read(self._reading, 65536):
                self.written += data.decode()
        except OSError:  # its other end is closed
            pass

    def close(self) -> None:
        self.file.close()
        self._thread.join(60.0)
        os.close(self._reading)

    def screen(self) -> list[str]:
        """The lines above the cursor; the cursor stands at the beginning of an empty one."""
        lines, row = [""], 0
        for piece in re.findall(r"\x1b\[\d*[A-Za-z]|\x1b\[[\d;]*m|[\r\n]|[^\x1b\r\n]+", self.written):
            if piece == "\x1b[A":
                row -= 1
            elif piece == "\x1b[2K":
                lines[row] = ""
            elif piece == "\n":
                row += 1
                lines += [""] if row == len(lines) else []
            elif piece[0] not in "\x1b\r":
                lines[row] += piece
        assert not any(lines[row:]), lines
        return lines[:row]

    def until(self, ready: Callable[[list[str]], Any]) -> list[str]:
        deadline_s = time.monotonic() + 60.0
        while time.monotonic() < deadline_s:
            time.sleep(0.01)
            if ready(self.written.splitlines()):
                return self.screen()
        raise AssertionError(self.written)


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Terminal]:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(view_module, "PAINT_S", 0.01)
    monkeypatch.setattr(view_module, "READ_S", 0.01)
    made = Terminal()
    yield made
    made.close()


@pytest.fixture
def readings(monkeypatch: pytest.MonkeyPatch) -> Iterator[Readings]:
    made = Readings()
    monkeypatch.setattr(view_module, "StatusReader", made)
    yield made
    made.answers.set()


def has(part: str) -> Callable[[list[str]], bool]:
    return lambda lines: any(part in line for line in lines)


def test_lines_scroll_above_the_view_and_the_view_goes_at_the_end(
    terminal: Terminal, readings: Readings
) -> None:
    shown = LiveView(ROOT, terminal.file)
    with shown:
        shown.say("before the first reading\n")
        terminal.until(has("16/64"))
        shown.say("half a ")
        shown.say("line\nand [bold]another[/bold] " + "long " * 40 + "\n")
        screen = terminal.until(has("another"))
        assert screen[:2] == ["before the first reading", "half a line"]
        assert screen[2].startswith("and [bold]another[/bold] long long")
        assert screen[3].startswith("exp1: running, iteration 5 of 16") and len(screen) == 8
        readings.status["nodes"][1]["tasks_done"] = 48
        assert len(terminal.until(has("48/64"))) == 8
        shown.say("without an end")
    shown.say("after it\n")
    assert terminal.until(has("after it"))[3:] == ["without an end", "after it"]
    assert "\x1b[?" not in terminal.written, "no mode of the terminal is changed"


def test_view_that_is_kept_stays(terminal: Terminal, readings: Readings) -> None:
    with LiveView(ROOT, terminal.file, keep=True):
        terminal.until(has("16/64"))
    assert len(terminal.until(has("16/64"))) == 5


def test_directory_that_hangs_holds_up_nothing_and_is_named(
    terminal: Terminal, readings: Readings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(view_module, "OLD_S", 0.2)
    with LiveView(ROOT, terminal.file) as shown:
        terminal.until(has("16/64"))
        readings.answers.clear()
        terminal.until(has("no answer from /shared/exp1 for "))
        shown.say("a line\n")
        assert "a line" in terminal.until(has("a line"))
    assert readings.under_way == 1, "the end has waited for no reading"
    assert readings.most == 1, "one reading at a time"


def test_directory_that_hangs_from_the_start_is_named(
    terminal: Terminal, readings: Readings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(view_module, "OLD_S", 0.05)
    readings.answers.clear()
    with LiveView(ROOT, terminal.file):
        terminal.until(has("no answer from /shared/exp1 for "))


def test_pause_between_readings_is_no_hang(
    terminal: Terminal, readings: Readings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(view_module, "OLD_S", 1.0)
    monkeypatch.setattr(view_module, "READ_S", 2.5)
    with LiveView(ROOT, terminal.file):
        terminal.until(has("16/64"))
        readings.status["nodes"][1]["tasks_done"] = 48
        terminal.until(has("48/64"))
    assert "no answer" not in terminal.written


def test_run_that_cannot_be_read_is_named_and_one_that_is_not_there_yet_is_not(
    terminal: Terminal, readings: Readings, tmp_path: Path
) -> None:
    readings.run_dir = RunDir(tmp_path)
    readings.error = SettingsError("a run of format 9")
    with LiveView(tmp_path, terminal.file) as shown:
        shown.say_line("a line")
        terminal.until(has("a line"))
        assert "format 9" not in terminal.written
        readings.run_dir.run_json.write_text("{}")
        assert terminal.until(has("a run of format 9")) == ["a line", "a run of format 9"]


def test_directory_that_fails_is_named(
    terminal: Terminal, readings: Readings, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LiveView(ROOT, terminal.file):
        terminal.until(has("16/64"))

        def fail() -> dict[str, Any]:
            raise OSError("cannot list /shared/exp1: Stale file handle")

        monkeypatch.setattr(readings, "read", fail)
        terminal.until(has("cannot list /shared/exp1: Stale file handle"))


def test_what_a_node_logs_and_prints_goes_above_its_view(
    terminal: Terminal, readings: Readings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", terminal.file)
    handler = logging.StreamHandler(sys.stderr)
    monkeypatch.setattr(logging.getLogger(), "handlers", [handler])
    with live_view(ROOT):
        terminal.until(has("16/64"))
        logging.getLogger().warning("a warning of 100 %%")
        print("a traceback", file=sys.stderr)
        screen = terminal.until(has("a traceback"))
    assert screen[:3] == ["a warning of 100 %%", "a traceback", screen[2]] and screen[2].startswith("exp1: ")
    assert sys.stderr is terminal.file and handler.stream is terminal.file
    logging.getLogger().warning("the end")
    assert terminal.until(has("the end")) == ["a warning of 100 %%", "a traceback", "the end"]


@pytest.mark.parametrize("kind", ["a file", "a dumb terminal"])
def test_without_a_terminal_nothing_is_read_and_lines_are_as_they_are(
    kind: str, terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_root: Path) -> None:
        raise AssertionError("a reader was started")

    monkeypatch.setattr(view_module, "StatusReader", refuse)
    file: TextIO = io.StringIO()
    if kind == "a dumb terminal":
        monkeypatch.setenv("TERM", "dumb")
        file = terminal.file
    monkeypatch.setattr(sys, "stderr", file)
    with live_view(ROOT):
        assert sys.stderr is file
    with LiveView(ROOT, file) as shown:
        shown.say_line("a line")
    written = file.getvalue() if isinstance(file, io.StringIO) else None
    assert written in {"a line\n", None}


def test_terminal_that_has_gone_ends_the_view_alone(terminal: Terminal, readings: Readings) -> None:
    with LiveView(ROOT, terminal.file) as shown:
        terminal.until(has("16/64"))
        terminal.file.close()
        deadline_s = time.monotonic() + 60.0
        with pytest.raises(ValueError):
            while time.monotonic() < deadline_s:  # until the view has noticed
                shown.say("nobody reads it\n")


def test_what_is_said_above_the_view_cannot_move_the_cursor(terminal: Terminal, readings: Readings) -> None:
    with LiveView(ROOT, terminal.file) as shown:
        terminal.until(has("16/64"))
        shown.say_line("\x1b[2Jgone\x1b]0;title\x07")
        assert terminal.until(has("gone"))[0] == "^[[2Jgone^[]0;title^G"


# ---- a terminal that takes nothing


class Unread:
    """A pseudoterminal that nobody reads until `rest`."""

    def __init__(self) -> None:
        self._reading, writing = os.openpty()
        tty.setraw(writing)
        self.file = os.fdopen(writing, "w", encoding="utf-8")

    def rest(self, until: str) -> str:
        found = ""
        while until not in found:
            found += os.read(self._reading, 65536).decode()
        return found

    def close(self) -> None:
        self.file.close()
        os.close(self._reading)


@pytest.fixture
def unread(monkeypatch: pytest.MonkeyPatch) -> Iterator[Unread]:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(view_module, "PATIENCE_S", 0.1)
    made = Unread()
    yield made
    made.close()


@pytest.mark.parametrize("room", [2000, 100])
def test_terminal_that_takes_nothing_holds_up_neither_lines_nor_the_end(
    room: int, unread: Unread, readings: Readings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(view_module, "QUEUE_TEXTS", room)
    shown = LiveView(ROOT, unread.file, keep=True)
    shown.start()
    started_s = time.monotonic()
    for number in range(1000):
        shown.say_line(f"line {number} {'x' * 300}")
    assert not shown.stop()
    shown.say_line("after the end")
    assert time.monotonic() - started_s < 30.0
    found = unread.rest(until="line 999 xxx" if room > 1000 else "did not take them")
    missing = re.search(r"\[(\d+) lines are missing here: the terminal did not take them\]", found)
    counted = len(re.findall("line [0-9]+ x", found)) + int(missing[1] if missing else 0)
    assert counted in {1000, 1001}, "the line after the end may be missing too"
    assert bool(missing) == (room == 100)


def test_process_ends_though_its_terminal_takes_nothing(unread: Unread) -> None:
    script = """
import logging, sys
from pathlib import Path
from coordinator.console.views import terminal
terminal.PATIENCE_S = 0.2
logging.basicConfig()
with terminal.live_view(Path("/absent")):
    for number in range(1000):
        logging.warning("line %d %s", number, "x" * 300)
logging.warning("after %s", "x" * 100_000)
print("the end", "x" * 100_000)
"""
    ended = subprocess.run([sys.executable, "-c", script], stdout=unread.file, stderr=unread.file, timeout=60)
    assert ended.returncode == 0


def test_text_that_would_steer_a_terminal_is_spelled_without_a_view_too(tmp_path: Path) -> None:
    file = io.StringIO()
    shown = LiveView(tmp_path, file)
    shown.say("a\x1b[2J")
    shown.say_line("\x07")
    assert file.getvalue() == "a^[[2J^G\n"
