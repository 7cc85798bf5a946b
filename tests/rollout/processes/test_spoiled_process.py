"""User code that spoils its process when it is imported and when it is called: what this program does there
goes on.
"""

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from rollout.processes.pool import ProcessPool

SCORES = """
import asyncio, os, tempfile
from rollout.module_search import keep_process
from rollout.rewards.resolve import resolve_reward
from rollout.settings import RolloutSettings

async def main():
    reward, settings = resolve_reward("spoils:score"), RolloutSettings(reward_processes=1)
    print([(await reward.values([{"id": "t"}], ["x"], settings))[0] for _ in range(2)], end=" ")
    with tempfile.NamedTemporaryFile(mode="w") as file:
        os.mkdir(f"{file.name}.d")
        print(oct(os.stat(f"{file.name}.d").st_mode & 0o777), flush=True)
        os.rmdir(f"{file.name}.d")

os.umask(0o027)
keep_process()
asyncio.run(main())
os._exit(0)
"""
"""A program that does as a collector: it loads the function, and has a process of a pool call it."""
SPOILS = """
import inspect, json, os, pathlib, sys, tempfile

def spoil():
    {path}
    os.chdir(tempfile.mkdtemp())
    os.rmdir(os.getcwd())
    sys.setrecursionlimit(len(inspect.stack(0)) + 8)
    os.umask(0o777)
    json.dumps = json.loads = None

def score(task, completion):
    spoil()
    return 1

spoil()
"""


@pytest.mark.parametrize("path", ["sys.path.clear()", "sys.path = None", "sys.path[:] = [pathlib.Path('/')]"])
def test_a_reward_that_spoils_its_process_is_called_all_the_same(tmp_path: Path, path: str) -> None:
    (tmp_path / "spoils.py").write_text(SPOILS.format(path=path))
    argv = [sys.executable, "-P", "-c", SCORES]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "[{'reward': 1.0}, {'reward': 1.0}] 0o750", done.stderr


def test_a_call_whose_thread_cannot_be_started_is_an_error_and_the_next_one_is_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pool = ProcessPool("tests.rollout.processes.pool_functions:make_echo", size=1)
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        pool.submit(1, deadline_s=60.0)
    monkeypatch.setattr(threading.Thread, "start", start)
    answer: Any = pool.submit(2, deadline_s=60.0).result(120.0)
    assert answer == [2]
    pool.close()
