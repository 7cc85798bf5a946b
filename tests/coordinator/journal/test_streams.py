"""Whatever becomes of the reader of a node's output, the node goes on and its exit code is true."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import os, sys
from coordinator.journal.streams import hold_up_nobody, repair_streams
repair_streams()
hold_up_nobody()
for i in range(20000):
    print("line", i)
    print("error", i, file=sys.stderr)
opened = open("opened", "w")
print("not for this file")
opened.write(f"{os.getpid()}")
opened.close()
sys.exit(3)
"""


SLEEPS = '2>&1 | { until [ -s opened ]; do sleep 0.05; done; tail --pid="$(cat opened)" -f /dev/null; }'
"""A reader that takes nothing, and lives for as long as the program."""


@pytest.mark.parametrize("how", [">&- 2>&-", "<&- >&- 2>&-", "> /dev/full 2>&1", "2>&1 | head -3", SLEEPS])
def test_output_that_nobody_takes_holds_up_nobody(tmp_path: os.PathLike[str], how: str) -> None:
    done = subprocess.run(
        ["bash", "-c", f'"$0" -c "$1" {how}; exit ${{PIPESTATUS[0]}}', sys.executable, PROGRAM],
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 3 and done.stderr == ""
    with open(os.path.join(tmp_path, "opened")) as file:
        assert file.read().isdigit(), "and what else was printed is not there"


def test_a_reader_gets_everything_in_order(tmp_path: os.PathLike[str]) -> None:
    program = PROGRAM.replace("20000", "2000")
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    lines = [f"line {i}" for i in range(2000)]
    assert done.stdout.splitlines() == [*lines, "not for this file"]
    assert done.stderr.splitlines() == [f"error {i}" for i in range(2000)]


def test_output_on_a_full_disk_is_one_line_and_no_traceback(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "coordinator.cli", "--dry-run", "--log-path", str(tmp_path / "run")]
    with open("/dev/full", "w") as full:
        ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (
        1,
        "run: the output cannot be written: No space left on device\n",
    )
