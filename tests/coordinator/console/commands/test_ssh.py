"""What the shell on a host does with a program: starts it when told to, and ends it with the connection."""

import signal
import subprocess
from pathlib import Path

import pytest

from coordinator.console.commands.ssh import READY, script
from tests.bash import READY_TO_WAIT, WAIT


class There:
    """The shell's words on this machine, with a program of a few words."""

    def __init__(self, place: Path, text: str, silence_s: int = 60, grace_s: int = 60) -> None:
        path = place / "program"
        path.write_text(f"#!/bin/bash\n{READY_TO_WAIT}{text}")
        path.chmod(0o755)
        self.process = subprocess.Popen(
            ["bash", "-c", script(silence_s, grace_s), "/absent", str(path)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1, start_new_session=True,
        )  # fmt: skip
        assert self.line() == READY

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().rstrip("\n")

    def tell(self, word: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{word}\n")

    def close(self) -> int:
        with self.process as process:
            assert process.stdin is not None
            process.stdin.close()
            try:
                return process.wait(30)
            finally:
                process.kill()


def test_exit_code_is_the_programs(tmp_path: Path) -> None:
    there = There(tmp_path, "exit 4\n")
    there.tell("go")
    assert there.process.wait(30) == 4 and there.close() == 4


@pytest.mark.parametrize("word", ["", "stop"])
def test_without_go_nothing_is_started(tmp_path: Path, word: str) -> None:
    there = There(tmp_path, f"touch {tmp_path}/started\n")
    if word:
        there.tell(word)
    assert there.close() == 130
    assert not (tmp_path / "started").exists()


def test_program_hears_signals_and_ends_at_end_of_file(tmp_path: Path) -> None:
    there = There(
        tmp_path, f"trap 'echo INT' INT; trap 'echo TERM; exit 7' TERM; read line || echo none; {WAIT}"
    )
    there.tell("go")
    assert there.line() == "none", "the commands are not the program's input"
    there.tell("0")
    there.tell("INT")
    assert there.line() == "INT"
    assert there.process.stdin is not None
    there.process.stdin.close()
    assert there.line() == "TERM"
    assert there.process.wait(30) == 7 and there.close() == 7


def test_stubborn_program_is_killed(tmp_path: Path) -> None:
    there = There(tmp_path, f"trap 'echo TERM' TERM; echo up; {WAIT}", grace_s=1)
    there.tell("go")
    assert there.line() == "up"
    assert there.close() == -signal.SIGKILL


def test_silence_ends_the_program(tmp_path: Path) -> None:
    there = There(tmp_path, f"trap 'echo TERM; exit 7' TERM; echo up; {WAIT}", silence_s=1)
    there.tell("go")
    assert there.line() == "up"
    assert there.line() == "TERM", "although the connection is open"
    assert there.close() == 7
