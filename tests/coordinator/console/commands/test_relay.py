"""What runs on a machine of a Ray cluster: words to the program, lines and the exit code from it."""

import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path

from coordinator.console.commands.relay import Relay


def lines_of(relay: Relay, argv: Sequence[str], words: Sequence[str] = ()) -> tuple[list[str], int]:
    relay.start(argv)
    lines: list[str] = []
    deadline_s = time.monotonic() + 60.0
    while time.monotonic() < deadline_s:
        new, code = relay.exchange(words, 0.1)
        words = ()
        lines += new
        if code is not None:
            return lines, code
    raise AssertionError(f"no end: {lines}")


def test_words_arrive_in_order_and_all_lines_before_the_code() -> None:
    script = (
        'while read -r word; do echo "$word"; done; for ((n = 0; n < 1500; n++)); do echo $n; done; exit 7'
    )
    lines, code = lines_of(Relay(), ["bash", "-c", script], ["go", "INT", "cut off"])
    assert (lines[:2], len(lines), code) == (["go", "INT"], 1502, 7)


def test_program_that_leaves_a_child_with_its_output_has_ended() -> None:
    (child,), code = lines_of(Relay(), ["bash", "-c", "sleep 1000 & echo $!; exit 5"])
    os.kill(int(child), signal.SIGKILL)  # it lives
    assert code == 5


def test_mark_is_made_where_the_run_will_be_and_seen_there_alone(tmp_path: Path) -> None:
    relay = Relay()
    mark = relay.mark(str(tmp_path / "a" / "b"))
    assert Path(mark).parent == tmp_path
    assert relay.sees(mark, 0.0) and not relay.sees(f"{tmp_path}/absent/{Path(mark).name}", 0.0)
    relay.unmark(mark)
    assert list(tmp_path.iterdir()) == []
