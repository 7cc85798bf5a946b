"""Whatever becomes of the reader of a node's output, the node goes on and its exit code is true."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

PROGRAM = """
import sys, time
from coordinator.journal.streams import hold_up_nobody, repair_streams
repair_streams()
hold_up_nobody()
began_s = time.monotonic()
for i in range(20000):
    print("line", i)
    print("error", i, file=sys.stderr)
opened = open("opened", "w")
print("not for this file")
opened.write(f"{time.monotonic() - began_s:.1f}")
opened.close()
sys.exit(3)
"""


@pytest.mark.parametrize(
    "how", [">&- 2>&-", "<&- >&- 2>&-", "> /dev/full 2>&1", "2>&1 | head -3", "2>&1 | sleep 20"]
)
def test_output_that_nobody_takes_holds_up_nobody(tmp_path: os.PathLike[str], how: str) -> None:
    began_s = time.monotonic()
    done = subprocess.run(
        ["bash", "-c", f'"$0" -c "$1" {how}; exit ${{PIPESTATUS[0]}}', sys.executable, PROGRAM],
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 3 and done.stderr == ""
    opened = os.path.join(tmp_path, "opened")
    with open(opened) as file:
        assert float(file.read()) < 5.0
    assert time.monotonic() - began_s < 40.0


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
