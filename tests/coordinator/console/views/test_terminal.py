"""The live view: what it says in how much room, and that a terminal below it stays in order."""

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
from coordinator.console.views.terminal_lines import ASCII, UNICODE, rows_of, sparkline, view
from coordinator.directory.layout import RunDir
from coordinator.settings.tree import SettingsError

ROOT = Path("/shared/exp1")
GPU = {"name": "H100", "used_bytes": 61 * 2**30, "total_bytes": 80 * 2**30, "busy": 0.97}


def node(rank: int, **said: Any) -> dict[str, Any]:
    return {
        "crew": "main", "rank": rank, "name": f"rank {rank}",
        "host": f"node-{rank}", "address": "", "state": "alive", "iteration": 5,
        "phase": "train_rollout", "row_s": 12.0, "waiting_s": 0.0, "weight": 1.0, "tasks_assigned": 64,
        "tasks_done": 16, "samples_assigned": 0, "samples_done": 0,
        "tokens_per_s": None, "left_s": None, "gpu_count": 0, "gpus": [], "silent_s": 0.4,
        **said,
    }  # fmt: skip


def status(*nodes: dict[str, Any], **said: Any) -> dict[str, Any]:
    found: dict[str, Any] = {
        "run_id": "abc", "state": "running", "epoch": 2, "iteration": 5, "iterations": 16,
        "phase": "train_rollout", "waiting_for": [], "waits_for": "", "work": "", "waiting_s": 0.0,
        "left_s": None, "num_nodes": len(nodes), "nodes": list(nodes), "last_metrics": None, **said,
    }  # fmt: skip
    return {**found, "crews": [{"crew": "main", **found}]}


def text(found: dict[str, Any], width: int = 100, height: int = 24, **more: Any) -> list[str]:
    lines = view(found, more.pop("lines", []), ROOT, width=width, height=height, **more)
    return [line.plain.rstrip() for line in lines]


def test_there_is_a_line_a_node_with_its_progress() -> None:
    lines = text(status(node(0, tokens_per_s=1234.5), node(1, waiting_s=34.0, tasks_done=64)), width=90)
    assert lines[0] == "exp1: running, iteration 5 of 16, train_rollout for 12 s, epoch 2"
    assert lines[2].split() == ["rank", "host", "state", "phase", "tasks", "tokens/s"]
    assert re.fullmatch(r"   0  node-0  alive        train_rollout  ━{7}─{23} 16/64     1,234", lines[3])
    assert re.fullmatch(r"   1  node-1  waits 34 s   train_rollout  ━{30} 64/64", lines[4])


def test_samples_of_tasks_that_are_not_done_show_too() -> None:
    begun = node(0, tasks_done=0, samples_assigned=512, samples_done=128)
    lines = text(status(begun, node(1, tasks_done=0, samples_assigned=512)), width=90)
    assert lines[2].split() == ["rank", "host", "state", "phase", "tasks", "samples"]
    assert re.fullmatch(r"   0  node-0  alive        train_rollout  ━{7}─{23} +0/64  128/512", lines[3])
    assert "0/64    0/512" in lines[4]


def test_columns_are_there_where_there_is_something_to_show() -> None:
    bare = status(node(0, tasks_assigned=0, host="a"), node(1, tasks_assigned=0, host="a"))
    assert text(bare)[2].split() == ["rank", "state", "phase"]
    full = status(node(0), node(1, gpus=[GPU] * 8, tokens_per_s=1.0, silent_s=12.0))
    assert text(full)[2].split() == ["rank", "host", "state", "phase", "tasks", "tokens/s", "GPUs"]
    assert "8 x 61/80 GiB 97 %" in text(full, width=120)[4]
    assert text(bare, shown={"tasks"})[2].split() == ["rank", "state", "phase", "tasks"]


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ({"silent_s": 4.0}, "alive"),
        ({"silent_s": 12.0}, "silent 12 s"),
        ({"state": "silent", "silent_s": 130.0}, "silent 2 min"),
        ({"state": "silent"}, "silent"),
        ({"state": "silent", "silent_s": 4.0}, "silent 4 s"),
        ({"state": "left", "silent_s": 130.0}, "left"),
        ({"state": "never_seen"}, "never seen"),
    ],
)
def test_state_says_for_how_long_a_node_is_silent(said: dict[str, Any], shown: str) -> None:
    line = text(status(node(0, **said)))[3]
    assert line[6:19].rstrip() == shown


def test_nodes_of_a_finished_run_left_and_need_no_attention() -> None:
    nodes = [node(rank, state="left") for rank in range(2)]
    for state in ("finished", "stopped"):
        lines = view(status(*nodes, state=state), [], ROOT, width=80, height=24)
        assert [span.style for line in lines[3:5] for span in line.spans if span.style == "red"] == []
    colours = {span.style for span in view(status(*nodes), [], ROOT, width=80, height=24)[3].spans}
    assert "red" in colours
    finished = text(status(*nodes, state="finished"), shown={"tasks", "phase"})
    assert finished[0] == "exp1: finished, iteration 5 of 16, epoch 2"
    assert finished[2].split() == ["rank", "host", "state"]


def test_host_that_is_not_known_yet_makes_no_column() -> None:
    nodes = [node(0, host="a"), node(1, host="", state="never_seen")]
    assert "host" not in text(status(*nodes))[2]


def test_what_was_read_of_files_is_in_megabytes() -> None:
    line = text(status(node(0, phase="iteration_end", tasks_done=5, tasks_assigned=8)))[3]
    assert line.endswith("5/8 MB") and UNICODE.done in line


def test_amount_whose_sum_is_not_known_is_no_full_bar() -> None:
    line = text(status(node(0, phase="iteration_end", tasks_done=5, tasks_assigned=5)))[3]
    assert line.endswith(" 5 MB") and UNICODE.done not in line


def test_parts_of_the_training_are_not_taken_for_tasks() -> None:
    assert text(status(node(0, phase="training", tasks_done=2, tasks_assigned=3)))[3].endswith(" 2/3 parts")


def test_who_is_waited_for_is_said_with_host_and_time() -> None:
    waits = status(node(0), node(1), node(2), waiting_for=[2], waiting_s=34.0, left_s=65.0)
    lines = text(waits)
    assert lines[0].endswith("train_rollout for 12 s, about 65 s left, epoch 2")
    assert lines[1] == "waiting for rank 2 (node-2) for 34 s"


def test_command_that_brings_a_node_back_is_whole_in_a_narrow_terminal() -> None:
    held = status(node(0), node(1, state="silent", silent_s=40.0), state="holding", waiting_for=[1])
    lines = text(held, width=40)
    assert lines[2] == "to bring rank 1 back, on node-1: run --worker 1 --log-path /shared/exp1"


@pytest.mark.parametrize("width", [40, 60, 80, 100, 160])
@pytest.mark.parametrize("height", [8, 23])
def test_view_fits_into_the_terminal(width: int, height: int) -> None:
    nodes = [
        node(rank, host=f"ml-{rank:03d}.cluster.example", gpus=[GPU] * 8, tokens_per_s=4e4)
        for rank in range(64)
    ]
    nodes[50] |= {"state": "silent", "silent_s": 4000.0}
    lines = [{"iteration": i, "reward": i / 100, "eval_reward": 0.5} for i in range(1, 100)]
    held = status(*nodes, state="holding", waiting_for=[50, *range(8)], waiting_s=99.0, left_s=9999.0)
    shown = view(held, lines, ROOT, width=width, height=height)
    assert sum(rows_of(line, width) for line in shown) <= height
    assert all(line.cell_len <= width for line in shown if not line.plain.startswith("to bring"))


def test_80_columns_hold_three_nodes_of_a_cluster() -> None:
    nodes = [node(rank, host=f"ml-node-{rank}.cluster", tokens_per_s=4321.0) for rank in range(3)]
    row = r"   0  ml-node-0.cluster  alive        train_rollout  ━+─+ 16/64     4,321"
    assert re.fullmatch(row, text(status(*nodes), width=80)[3])
    for described in nodes:
        described["gpus"] = [GPU]
    row = "   0  ml-node-0.cl…  alive        train_rollout  16/64     4,321  61/80 GiB 97 %"
    assert text(status(*nodes), width=80)[3] == row


def test_where_there_is_no_room_those_that_are_missing_come_first() -> None:
    nodes = [node(rank) for rank in range(64)]
    nodes[50] |= {"state": "silent"}
    lines = text(status(*nodes, waiting_for=[20, 50]), height=10)
    assert [line.split()[0] for line in lines[3:-1]] == ["50", "20", "0", "1", "2", "3"]
    assert lines[-1] == "... and 58 more, all alive"


def test_rewards_are_drawn_with_the_first_and_the_last() -> None:
    lines = [
        {"iteration": 1, "reward": 0.0, "eval_reward": 0.25},
        {"iteration": 2, "reward": 0.5},
        {"iteration": 3, "reward": None},
        {"iteration": 4, "reward": 1.0},
    ]
    assert (
        text(status(node(0)), lines=lines)[-1] == "reward 0.000 ▁▅█ 1.000   evaluation 0.250 in iteration 1"
    )
    assert text(status(node(0)), lines=lines[:1], signs=ASCII)[-1].startswith("reward = 0.000   evaluation")
    assert "reward" not in " ".join(text(status(node(0)), lines=[{"iteration": 1}]))


def test_sparkline_spans_the_values() -> None:
    assert sparkline([3, 1, 2, 8], UNICODE.levels) == "▃▁▂█"
    assert sparkline([2, 2], UNICODE.levels) == "▄▄"
    assert sparkline([0.1], ASCII.levels) == "="


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
            if up := re.fullmatch(r"\x1b\[(\d+)A", piece):
                row -= int(up[1])
            elif piece == "\x1b[J":
                lines = [*lines[:row], ""]
            elif piece == "\n":
                row += 1
                lines += [""] if row == len(lines) else []
            elif piece[0] not in "\x1b\r":
                lines[row] += piece
        assert lines[row:] == [""], lines
        return lines[:row]

    def until(self, ready: Callable[[list[str]], Any]) -> list[str]:
        deadline_s = time.monotonic() + 60.0
        while time.monotonic() < deadline_s:
            time.sleep(0.01)
            if ready(self.written.splitlines()):
                return self.screen()
        raise AssertionError(self.written)


class Readings:
    """In place of a run directory: it hangs while `hangs`, and shows `status`."""

    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []
        self.run_dir = RunDir(ROOT)
        self.error: Exception | None = None
        self.status = status(node(0), node(1))
        self.answers = threading.Event()
        self.answers.set()
        self.under_way = self.most = 0

    def __call__(self, _root: Path) -> "Readings":
        return self

    def read(self) -> dict[str, Any]:
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        self.answers.wait()
        self.under_way -= 1
        if self.error:
            raise self.error
        return self.status


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


def test_names_of_others_cannot_move_the_cursor() -> None:
    lines = text(status(node(0, host="a\x1b[2J\nb", phase="\x9b2J"), node(1)), note="bad\x1b[2J")
    assert "a^[[2J^Jb" in lines[4] and "\\x9b2J" in lines[4] and lines[1] == "bad^[[2J"


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
