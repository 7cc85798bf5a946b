"""The server that imports once, and its clients. One server is for all tests: its imports take 4 s."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from coordinator.machine import reaper
from tests.processes import is_schedulable
from trainer.job import forks

PROGRAM = (sys.executable, "-P", "-m", "tests.trainer.job.forked")
REPOSITORY = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    path = tmp_path_factory.mktemp("forks") / "s"
    made = _start_server(path)
    yield str(path)
    made.kill()
    made.wait()


def _start_server(path: Path) -> subprocess.Popen[bytes]:
    made = subprocess.Popen([sys.executable, "-m", "trainer.job.forks", str(path), "torch"], cwd=REPOSITORY)
    deadline_s = time.monotonic() + 60
    while not path.exists():
        assert made.poll() is None and time.monotonic() < deadline_s
        time.sleep(0.02)
    return made


@pytest.fixture
def groups(tmp_path: Path) -> Path:
    (tmp_path / "pgid").mkdir()
    return tmp_path / "pgid"


@contextmanager
def client(
    socket: str, groups: Path, *how: str, cwd: Path = REPOSITORY, **env: str
) -> Iterator[subprocess.Popen[bytes]]:
    command = forks.client(socket, str(groups), [*PROGRAM, *how])
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)} | env,
        cwd=cwd,
    ) as process:
        yield process
        for group in [*map(int, os.listdir(groups)), process.pid] if groups.exists() else []:
            with suppress(ProcessLookupError):
                os.kill(group, signal.SIGKILL)


def said_by(process: subprocess.Popen[bytes]) -> dict[str, Any]:
    assert process.stdout is not None
    return json.loads(process.stdout.readline())


def until_it_knows_its_fork(process: subprocess.Popen[bytes]) -> None:
    """Wait until a client passes SIGTERM on. Its fork may say something before it has heard of it."""
    caught, deadline_s = 0, time.monotonic() + 60
    while not caught >> (signal.SIGTERM - 1) & 1:
        assert time.monotonic() < deadline_s
        (line,) = re.findall(
            r"^SigCgt:\s+(\w+)$", Path(f"/proc/{process.pid}/status").read_text(), re.MULTILINE
        )
        caught = int(line, 16)


def test_a_fork_is_the_program_that_was_asked_for(server: str, groups: Path) -> None:
    with client(server, groups, "end", "--and", "more", COLOUR="red", OMP_NUM_THREADS="1") as process:
        said = said_by(process)
        assert process.wait(60) == 3
        assert said["argv"] == ["end", "--and", "more"] and said["colour"] == "red" and said["threads"] == 1
        assert said["input"] == ""
        assert said["sockets"] == []  # the server's own, and those of other forks
        assert said["pid"] == said["group"] != process.pid


def test_a_fork_is_where_its_client_is_and_imports_from_where_that_would(
    server: str, groups: Path, tmp_path: Path
) -> None:
    here = os.pathsep.join([str(tmp_path), str(REPOSITORY)])
    with client(server, groups, "end", cwd=tmp_path, PYTHONPATH=here) as process:
        said = said_by(process)
        assert (said["cwd"], said["path"]) == (str(tmp_path), str(tmp_path)) and process.wait(60) == 3


def test_forks_know_nothing_of_one_another(server: str, groups: Path) -> None:
    with client(server, groups, "wait", COLOUR="red") as first:
        assert said_by(first)["colour"] == "red"
        with client(server, groups, "end") as second:
            said = said_by(second)
            assert said["colour"] is None and said["sockets"] == []
            assert second.wait(60) == 3 and first.poll() is None
            until_it_knows_its_fork(first)
            first.terminate()
            assert first.wait(60) == 7  # the fork's own handler


@pytest.mark.parametrize(("how", "code"), [("raise", 1), ("killed", -signal.SIGKILL)])
def test_a_client_ends_as_its_fork_ends(server: str, groups: Path, how: str, code: int) -> None:
    with client(server, groups, how) as process:
        output, _ = process.communicate(timeout=60)
        assert process.returncode == code
        assert (b"ValueError: as told" in output) == (how == "raise")


def test_what_a_fork_leaves_ends_with_it_and_its_group_is_forgotten(server: str, groups: Path) -> None:
    with client(server, groups, "leave") as process:
        left = said_by(process)["left"]
        assert process.wait(60) == 3
        assert os.listdir(groups) == []
        deadline_s = time.monotonic() + 60
        while is_schedulable(left):
            assert time.monotonic() < deadline_s
            time.sleep(0.01)


def test_what_sweeps_the_groups_ends_the_fork(server: str, groups: Path) -> None:
    with client(server, groups, "wait") as process:
        assert [str(said_by(process)["group"])] == os.listdir(groups)
        reaper.sweep(str(groups))  # true if the client has forgotten the group by then
        assert process.wait(60) == -signal.SIGKILL


def test_a_fork_whose_client_is_killed_is_killed_and_its_number_is_free(server: str, groups: Path) -> None:
    with client(server, groups, "wait") as process:
        group = said_by(process)["group"]
        process.kill()
        process.wait(60)
        deadline_s = time.monotonic() + 60
        while psutil.pid_exists(group):
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
        with pytest.raises(ProcessLookupError):
            os.killpg(group, 0)
    with client(server, groups, "end") as process:
        assert process.wait(60) == 3, "the server goes on"


def test_nothing_starts_once_the_groups_are_swept(server: str, groups: Path, tmp_path: Path) -> None:
    assert reaper.sweep(str(groups))
    with client(server, groups, "wait") as process:
        output, _ = process.communicate(timeout=60)
        assert process.returncode == 1 and b"FileNotFoundError" in output and b"argv" not in output


def test_without_a_server_the_client_becomes_the_program(groups: Path, tmp_path: Path) -> None:
    with client(str(tmp_path / "none"), groups, "end", COLOUR="red") as process:
        said = said_by(process)
        assert process.wait(60) == 3
        assert said["colour"] == "red" and said["pid"] == process.pid


def test_a_client_that_waits_for_a_server_that_dies_becomes_the_program(groups: Path, tmp_path: Path) -> None:
    dying = _start_server(tmp_path / "s")
    with client(str(tmp_path / "s"), groups, "end") as process:  # it imports, for seconds
        time.sleep(0.3)
        dying.kill()
        dying.wait()
        assert said_by(process)["pid"] == process.pid and process.wait(60) == 3


def test_a_client_says_so_if_its_server_dies(groups: Path, tmp_path: Path) -> None:
    dying = _start_server(tmp_path / "s")
    with client(str(tmp_path / "s"), groups, "wait") as process:
        said_by(process)
        until_it_knows_its_fork(process)
        dying.kill()
        dying.wait()
        assert process.wait(60) == 1  # the node takes its child for dead, and kills the group
        os.killpg(int(os.listdir(groups)[0]), signal.SIGKILL)


def test_a_client_that_sends_nonsense_or_nothing_holds_nobody_up(server: str, groups: Path) -> None:
    import socket

    with socket.socket(socket.AF_UNIX) as nonsense:
        nonsense.connect(server)
        nonsense.sendall(b"\x00\x00\x00\x02{}")
        assert nonsense.recv(1) == b""
    with socket.socket(socket.AF_UNIX) as silent:
        silent.connect(server)
        with client(server, groups, "end") as process:
            assert said_by(process)["argv"] == ["end"] and process.wait(60) == 3


def test_a_client_imports_next_to_nothing(tmp_path: Path) -> None:
    found = subprocess.run(
        [sys.executable, "-I", "-S", "-X", "importtime", forks.__file__, "/none", str(tmp_path), "/bin/true"],
        capture_output=True,
        text=True,
        check=True,
    )
    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in found.stderr.splitlines()}
    assert imported <= {*sys.stdlib_module_names, "imported package"}


def test_only_the_programs_that_it_imports_are_forked() -> None:
    python = sys.executable
    modules = ("rollout.engines.embedded.server", "trainer.job.agent")
    assert forks.is_program([python, "-P", "-m", "rollout.engines.embedded.server", "--model", "m"], modules)
    assert forks.is_program([python, "-P", "-m", "trainer.job.agent"], modules)
    assert not forks.is_program([python, "-P", "-m", "coordinator.cli"], modules)
    assert not forks.is_program(["/another/python", "-P", "-m", "trainer.job.agent"], modules)
    assert not forks.is_program([python, "-P", "-m"], modules)
