"""The command `run` in a process of its own, in a working directory with files good and bad."""

import ctypes
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from coordinator.start.rank import NODES_VARIABLE, RANK_VARIABLES
from tests.commands import run_forked
from tests.coordinator.examples import tree
from tests.imports import shared_imports
from tests.models import write_model

REPOSITORY = Path(__file__).parents[2]


SCHEDULERS = {*RANK_VARIABLES, NODES_VARIABLE, "MASTER_ADDR", "RUN_LOG_PATH"}


HEAVY = ("torch", "transformers", "vllm", "aiohttp", "jinja2", "pynvml")


LOADED = """
import sys
from coordinator.cli import main
try:
    code = main()
except SystemExit as end:
    code = end.code
print("LOADED", code, *(name for name in %r if name in sys.modules))
"""


CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH, PR_CAPBSET_DROP = 1, 2, 24


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A working directory with task files, models and configurations, good and bad."""
    (tmp_path / "home").mkdir()
    (tmp_path / "empty").mkdir()
    (tmp_path / "good.jsonl").write_text('{"prompt": "1+2=", "answer": "3"}\n')
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "broken.jsonl").write_text('{"prompt": "1+2="}\n{"prompt": \n')
    (tmp_path / "both.jsonl").write_text('{"prompt": "1", "messages": []}\n')
    (tmp_path / "no_answer.jsonl").write_text('{"prompt": "1+2=", "answer": "3"}\n\n{"prompt": "2+2="}\n')
    (tmp_path / "chat.jsonl").write_text('{"messages": [{"role": "user", "content": "?"}], "answer": "3"}\n')
    (tmp_path / "users.py").write_text(
        "def score(completion): return 1\ndef play(task, policy, sampling): return []\n"
    )
    write_model(tmp_path / "small", {"max_position_embeddings": 64}, tokenizer={})
    (tmp_path / "bad.toml").write_text("[trainer\n")
    (tmp_path / "a file").touch()
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "run.json").write_text("{}")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    return tmp_path


COMMAND = ("-m", "coordinator.cli")


Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def run(place: Path) -> Run:
    """Runs `run` there, to its end."""

    def run_once(
        *arguments: str, command: tuple[str, ...] = COMMAND, **more: Any
    ) -> subprocess.CompletedProcess[str]:
        environment = {name: value for name, value in os.environ.items() if name not in SCHEDULERS}
        environment |= {"PYTHONPATH": str(REPOSITORY), "HOME": str(place / "home"), "COLUMNS": "110"}
        environment |= {"PYTHONDONTWRITEBYTECODE": "1"}  # the user's module lies in the working directory
        # What a machine remembers of large files is not written into the working directory.
        environment |= {"XDG_CACHE_HOME": f"{place}-cache"} | more.pop("env", {})
        if command == COMMAND and not more:
            return run_forked(arguments, place, {**environment, **shared_imports()})
        return subprocess.run(
            [sys.executable, *command, *arguments],
            cwd=place,
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
            **more,
        )

    return run_once


def refusal(run: Run, place: Path, *arguments: str, **more: Any) -> str:
    """The one line with which `run` refuses; it has written nothing."""
    before = tree(place)
    ended = run(*arguments, **more)
    assert (ended.returncode, ended.stdout) == (2, ""), ended
    assert tree(place) == before
    assert ended.stderr.startswith("run: ") and ended.stderr.count("\n") == 1, ended.stderr
    return ended.stderr.removeprefix("run: ").rstrip("\n")


def lose_privileges() -> None:
    """Let the permissions of files hold for root too, in a child that is about to start."""
    if os.geteuid() != 0:
        return
    libc = ctypes.CDLL(None, use_errno=True)
    for capability in (CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH):
        if libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "cannot drop a capability")


FIXED = {
    "model": {"name": "builtin:tiny", "digest": "builtin:tiny, tiny.warmup_steps=800"},
    "tasks": {
        "name": "builtin:arithmetic",
        "digest": "003c21dd30b0843aa9d18d796571ae84d48af345194e45ce3abb649a30469f29",
    },
    "rollout.seed": {"name": "0", "digest": "0"},
    "trainer.lora": {"name": "rank=0", "digest": "rank=0"},
}
