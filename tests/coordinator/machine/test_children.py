"""No child outlives its node, and no child can block it: with real processes throughout."""

import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from unittest.mock import patch

import psutil
import pytest

from coordinator.directory.line_writer import BATCH_LINES, QUEUE_LINES
from coordinator.machine import reaper
from coordinator.machine.child import Child
from coordinator.machine.children import COLLECTORS, FORKS, PROGRAMS, ChildError, Children, as_fork
from coordinator.settings.node_groups import GroupSettings
from tests.paths import REPOSITORY
from trainer.job import forks

GONE_S = 60.0
SLEEP = "exec sleep 1000"
WORKER = f': > "$1/$$" && echo $$ && {SLEEP}'
"""A trainer's worker as a shell script: $1 is the `pgid` directory."""
AGENT = """
import subprocess, sys, time
for _ in range(2):
    subprocess.Popen(["sh", "-c", sys.argv[1], "worker", sys.argv[2]], start_new_session=True)
time.sleep(1000)
"""
"""Starts two workers in sessions of their own, as torchrun does; argv: the worker's script, the directory."""


def agent(worker: str, spool: Path) -> list[str]:
    """The command of an agent."""
    return [sys.executable, "-I", "-S", "-c", AGENT, worker, str(spool / "pgid")]


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def eventually(condition: Callable[[], bool], within_s: float = GONE_S) -> bool:
    deadline_s = time.monotonic() + within_s
    while not (holds := condition()) and time.monotonic() < deadline_s:
        time.sleep(0.01)
    return holds


def gone(pids: Iterable[int]) -> bool:
    """Whether all of these processes are gone, soon."""
    listed = list(pids)
    return eventually(lambda: not any(map(is_alive, listed)))


def processes_with(mark: str) -> list[int]:
    """Processes with `mark` on their command line."""
    return [
        p.pid for p in psutil.process_iter(["cmdline"]) if any(mark in a for a in p.info["cmdline"] or [])
    ]


@pytest.mark.parametrize("length", [8, 40, 41, 200])
def test_sockets_fit_into_the_spool_however_long_the_name_of_the_temporary_directory_is(
    monkeypatch: pytest.MonkeyPatch, length: int
) -> None:
    temporary = Path("/tmp", f"{os.getpid()}".rjust(length, "x"))
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    try:
        with Children() as made:
            assert made.spool.stat().st_mode & 0o777 == 0o700
            assert len(f"{made.spool}/engine-100.sock") <= 100 and len(f"{made.spool}/{uuid.uuid4()}") <= 100
            assert made.spool.is_relative_to(temporary) == (length <= 40)
    finally:
        temporary.rmdir()


@pytest.fixture
def children() -> Iterator[Children]:
    with Children() as made:
        yield made
    assert not made.spool.exists()


def start_trainer(children: Children, worker: str = WORKER) -> tuple[Child, list[int]]:
    """An agent with two workers, and the workers' pids."""
    spool = children.new_spool("trainer")
    child = children.start("trainer", agent(worker, spool), spool=spool)
    assert eventually(lambda: len(child.tail().split()) == 2)
    return child, [int(pid) for pid in child.tail().split()]


TRAINER_NODE = """
import json, os, signal, sys, time
import psutil
from coordinator.machine.children import Children

children = Children()
spool = children.new_spool("trainer")
trainer = children.start("trainer", [*json.loads(sys.argv[1]), str(spool / "pgid")], spool=spool)
engine = children.start("engine", ["sh", "-c", "trap '' TERM INT HUP; sleep 1000 & echo $!; wait"])
frozen = children.start("frozen", ["sh", "-c", "echo $$; kill -STOP $$"])
deadline_s = time.monotonic() + 60
while len(trainer.tail().split()) < 2 or not engine.tail() or not frozen.tail():
    assert time.monotonic() < deadline_s
    time.sleep(0.01)
pids = [int(pid) for child in (trainer, engine, frozen) for pid in child.tail().split()]
pids += [process.pid for process in psutil.Process().children()]
signal.signal(signal.SIGINT, signal.SIG_IGN)
print(json.dumps({"spool": str(children.spool), "pids": sorted(set(pids))}), flush=True)
time.sleep(1000)
"""


def start_trainer_node() -> tuple["subprocess.Popen[str]", list[int], Path]:
    """A node with a trainer of two workers, an engine deaf to signals, a stopped child; pids and spool."""
    command = [sys.executable, "-c", TRAINER_NODE, json.dumps(agent(WORKER, Path())[:-1])]
    node = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert node.stdout is not None
    said = json.loads(node.stdout.readline())
    # trainer, 2 workers, engine and its sleep, the stopped one, the reaper
    assert len(said["pids"]) == 7 and all(map(is_alive, said["pids"]))
    return node, said["pids"], Path(said["spool"])


def kill_node(node: "subprocess.Popen[str]") -> None:
    node.kill()
    node.communicate(timeout=60)


def test_killed_node_takes_all_its_processes_with_it() -> None:
    node, pids, spool = start_trainer_node()
    kill_node(node)
    assert gone(pids)
    assert not spool.exists()


def test_interrupt_from_the_terminal_does_not_reach_the_children() -> None:
    node, pids, _ = start_trainer_node()
    try:
        os.killpg(node.pid, signal.SIGINT)
        time.sleep(0.2)  # nothing can be waited for: the claim is that nothing happens
        assert all(map(is_alive, pids))
    finally:
        kill_node(node)
    assert gone(pids)


STARTING_NODE = """
import sys
from coordinator.machine import child
from coordinator.machine.children import Children
children = Children()
child.LAUNCHER = sys.argv[2] + child.LAUNCHER
while True:
    children.start("child", ["sleep", "1000." + sys.argv[1]])
    print(children.spool, flush=True)
"""


@pytest.mark.parametrize(
    ("slow", "starts"), [("sleep 0.5; ", 1), ("sleep 0.5; ", 10), ("", 1), ("", 2), ("", 20)]
)
def test_child_that_is_starting_when_the_node_is_killed_does_not_survive(slow: str, starts: int) -> None:
    """`slow` holds up the child between fork and registration."""
    mark = str(uuid.uuid4().int)
    command = [sys.executable, "-c", STARTING_NODE, mark, slow]
    node = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert node.stdout is not None
    spools = {node.stdout.readline().strip() for _ in range(starts)}
    kill_node(node)
    assert "" not in spools, "the node has ended by itself"
    assert eventually(lambda: not any(map(os.path.exists, spools)))
    assert eventually(lambda: not processes_with(mark))


@pytest.mark.parametrize("end", ["os.kill(os.getpid(), 9)", "os._exit(1)", "children.close()", "", "1 / 0"])
def test_last_word_is_said_for_a_node_that_dies_without_one(end: str, tmp_path: Path) -> None:
    said = tmp_path / "said"
    script = f"""
import os, sys
from pathlib import Path
from coordinator.machine.children import Children
with Children() as children:
    print(children.spool, flush=True)
    children.start("child", ["sleep", "1000"])
    for word in (b"first", b"of two\\nlines"):
        children.leave_word(Path(sys.argv[1]), word)
    {end}
"""
    node = subprocess.run(
        [sys.executable, "-c", script, "said"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
    )
    assert eventually(lambda: not os.path.exists(node.stdout.strip())), node.stderr
    died = end.startswith("os.")
    assert eventually(said.exists, GONE_S if died else 0.2) is died
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"of two\nlines"] * died


def test_killed_reaper_is_replaced_at_the_next_start() -> None:
    script = """
import os, signal
import psutil
from coordinator.machine.children import Children
children = Children()
(reaper,) = psutil.Process().children()
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGKILL):
    reaper.send_signal(number)
reaper.wait(60)
child = children.start("child", ["sleep", "1000"])
print(children.spool, child.pid, flush=True)
signal.pause()
"""
    node = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert node.stdout is not None
    spool, pid = node.stdout.readline().split()
    assert is_alive(int(pid))
    kill_node(node)
    assert gone([int(pid)])
    assert eventually(lambda: not Path(spool).exists())


def test_kill_reaches_workers_in_sessions_of_their_own(children: Children) -> None:
    trainer, workers = start_trainer(children)
    os.kill(workers[0], signal.SIGSTOP)
    assert trainer.kill()
    assert not any(map(is_alive, [trainer.pid, *workers]))
    assert trainer.poll() == -signal.SIGKILL
    assert not trainer.spool.exists()


def test_kill_leaves_other_children_alone(children: Children) -> None:
    engine = children.start("engine", ["sleep", "1000"])
    trainer, _ = start_trainer(children)
    assert trainer.kill()
    assert engine.poll() is None and is_alive(engine.pid)


def test_kill_groups_ends_every_child(children: Children) -> None:
    engine = children.start("engine", ["sleep", "1000"])
    trainer, workers = start_trainer(children)
    assert children.kill_groups()
    assert not any(map(is_alive, [engine.pid, trainer.pid, *workers]))


def test_agent_that_exits_takes_its_workers_with_it(children: Children) -> None:
    trainer, workers = start_trainer(children)
    os.kill(trainer.pid, signal.SIGKILL)  # as a crash: nobody has told its workers
    assert trainer.wait(60) == -signal.SIGKILL
    assert gone(workers)


def test_worker_that_registers_too_late_ends_itself(children: Children) -> None:
    late = f'echo $$; trap "" HUP; while [ -d "$1" ]; do sleep 0.01; done; : > "$1/$$" && {SLEEP}'
    trainer, workers = start_trainer(children, worker=late)
    assert trainer.kill()
    assert gone(workers)


def test_directory_is_not_removed_while_a_group_registers_in_it(tmp_path: Path) -> None:
    registered = tmp_path / "pgid"
    registered.mkdir()
    with (
        subprocess.Popen(["sleep", "1000"], start_new_session=True) as first,
        subprocess.Popen(["sleep", "1000"], start_new_session=True) as second,
    ):
        (registered / str(first.pid)).touch()

        def second_registers(pgid: int) -> bool:
            (registered / str(second.pid)).touch()
            return True

        assert not reaper.sweep(str(registered), second_registers)
        assert first.wait(60) == -signal.SIGKILL and second.poll() is None
        assert reaper.sweep(str(registered), lambda pgid: True)
        assert second.wait(60) == -signal.SIGKILL and not registered.exists()


def test_file_that_names_no_group_kills_nobody(tmp_path: Path) -> None:
    for name in ("0", "1", "-1", "notes.txt"):  # killpg(1) would mean every process of the machine
        (tmp_path / name).touch()
    with patch.object(os, "killpg") as killpg:
        assert reaper.sweep(str(tmp_path))
    killpg.assert_not_called()


def test_zombies_that_nobody_reaps_do_not_delay_a_kill() -> None:
    """As the first process of a container a node inherits its trainer's workers, and does not reap them."""
    if sys.platform != "linux":
        pytest.skip("only Linux can make a process inherit orphans")
    script = """
import ctypes, json, sys, time
from coordinator.machine.children import Children
PR_SET_CHILD_SUBREAPER = 36
assert ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0
with Children() as children:
    spool = children.new_spool("trainer")
    trainer = children.start("trainer", [*json.loads(sys.argv[1]), str(spool / "pgid")], spool=spool)
    while len(trainer.tail().split()) < 2:
        time.sleep(0.01)
    started_s = time.monotonic()
    killed = trainer.kill()
    print(json.dumps([killed, time.monotonic() - started_s, trainer.tail().split()]), flush=True)
    sys.stdin.read()
"""
    command = [sys.executable, "-c", script, json.dumps(agent(WORKER, Path())[:-1])]
    node = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert node.stdout is not None
    killed, seconds, workers = json.loads(node.stdout.readline())
    assert [psutil.Process(int(pid)).status() for pid in workers] == [psutil.STATUS_ZOMBIE] * 2
    node.communicate(timeout=60)
    assert killed and seconds < 30.0
    assert node.returncode == 0


def test_stop_lets_a_child_end_by_itself(children: Children) -> None:
    child = children.start("polite", ["sh", "-c", "trap 'echo bye; exit 3' TERM; echo up; sleep 1000 & wait"])
    assert eventually(lambda: child.tail() == "up")
    assert child.stop(grace_s=10)
    assert (child.poll(), child.tail()) == (3, "up\nbye")


def test_stop_kills_a_child_that_ignores_it(children: Children) -> None:
    child = children.start("stubborn", ["sh", "-c", f"trap '' TERM; echo up; {SLEEP}"])
    assert eventually(lambda: child.tail() == "up")
    started_s = time.monotonic()
    assert child.stop(grace_s=0.2)
    assert 0.2 <= time.monotonic() - started_s < GONE_S
    assert child.poll() == -signal.SIGKILL


def test_kill_right_after_start_leaves_nothing(children: Children) -> None:
    for _ in range(20):
        child = children.start("brief", ["sleep", "1000"])
        assert child.kill()
        assert child.poll() is not None and not is_alive(child.pid)


def test_exit_code_and_last_output_are_there_when_it_has_exited(children: Children) -> None:
    child = children.start("failing", ["sh", "-c", "seq 1000; echo error >&2; exit 7"])
    assert child.wait(GONE_S) == 7
    assert child.tail(3) == "999\n1000\nerror"
    assert len(child.tail().split()) == 20


def test_wait_gives_up_in_time(children: Children) -> None:
    child = children.start("sleeping", ["sleep", "1000"])
    started_s = time.monotonic()
    assert child.wait(0.1) is None
    assert time.monotonic() - started_s < GONE_S


def test_env_is_added_and_output_is_shown(children: Children) -> None:
    shown: list[str] = []
    command = ["sh", "-c", 'echo "$FLAVOUR $HOME"']
    child = children.start("env", command, env={"FLAVOUR": "sour"}, echo=shown.append)
    assert child.wait(GONE_S) == 0
    assert shown == [f"sour {os.environ['HOME']}"]


def test_what_a_shared_process_can_be_is_forked_unless_a_group_says_what_children_are_started_with(
    children: Children, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(FORKS, raising=False)
    monkeypatch.setenv(COLLECTORS, "/socket")
    engine, collector = (
        [sys.executable, "-P", "-m", name] for name in (PROGRAMS[FORKS][0], *PROGRAMS[COLLECTORS])
    )
    assert as_fork(engine, "/groups") == engine
    assert as_fork(collector, "/groups") == forks.client("/socket", "/groups", collector)
    with patch("coordinator.machine.children.Child") as started:
        children.start("collector", collector)
        children.group = GroupSettings(nodes="0", env={"COLOUR": "red"})
        children.start("collector", collector)
    assert [forks.__file__ in call.args[1] for call in started.call_args_list] == [True, False]


def test_echo_that_fails_does_not_stop_the_child(
    children: Children, caplog: pytest.LogCaptureFixture
) -> None:
    def echo(line: str) -> None:
        raise BrokenPipeError("the terminal is gone")

    child = children.start("talkative", ["seq", "100000"], echo=echo)
    assert child.wait(GONE_S) == 0
    assert child.tail(1) == "100000"
    assert caplog.messages == ["the output of talkative is no longer shown: the terminal is gone"]


def test_missing_program_is_an_error_that_names_it(children: Children) -> None:
    with pytest.raises(ChildError, match="cannot start engine: no program 'no-such-program'"):
        children.start("engine", ["no-such-program"])


def test_log_is_appended_and_complete_when_the_child_has_exited(children: Children, tmp_path: Path) -> None:
    log = tmp_path / "engine.log"
    log.write_text("earlier\n")
    child = children.start("engine", ["sh", "-c", "seq 5000; printf end"], log=log)
    assert child.wait(GONE_S) == 0
    assert log.read_text().split() == ["earlier", *map(str, range(1, 5001)), "end"]
    assert child._output.dropped_lines == 0


def test_log_that_cannot_be_written_is_reported_and_counted(
    children: Children, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    child = children.start("engine", ["seq", "10"], log=tmp_path / "missing" / "engine.log")
    assert child.wait(GONE_S) == 0
    assert child._output.dropped_lines == 10
    assert "No such file or directory" in caplog.messages[0]
    assert caplog.messages[-1] == "10 lines of the log of engine were dropped"


def test_hung_log_blocks_neither_child_nor_node(tmp_path: Path) -> None:
    log = tmp_path / "engine.log"
    os.mkfifo(log)  # opening it hangs until somebody reads
    with Children() as children:
        child = children.start("engine", ["sh", "-c", f"seq 30000; {SLEEP}"], log=log)
        assert eventually(lambda: child.tail(1) == "30000")
        started_s = time.monotonic()
        assert child.kill()
        late = children.start("late", ["sleep", "1000"], log=log)
    assert time.monotonic() - started_s < GONE_S
    assert not any(map(is_alive, [child.pid, late.pid])) and not children.spool.exists()
    assert 30_000 - QUEUE_LINES - BATCH_LINES <= child._output.dropped_lines <= 30_000 - QUEUE_LINES
    # The file system wakes up: what had been queued arrives, then a note about what was dropped.
    lines = log.read_text().splitlines()
    assert lines[:3] == ["1", "2", "3"] and len(lines) == 30_000 - child._output.dropped_lines + 1
    assert lines[-1].startswith(f"[{child._output.dropped_lines} lines are missing here")


def test_close_ends_everything_and_nothing_starts_afterwards(children: Children) -> None:
    # This process may have other children: an engine that tests share.
    # One that has just begun may have no words yet.
    reapers: list[int] = []
    while not reapers:
        reapers = [p.pid for p in psutil.Process().children() if str(children.spool) in p.cmdline()]
    engine = children.start("engine", ["sh", "-c", f"trap '' TERM; {SLEEP}"])
    trainer, workers = start_trainer(children)
    started_s = time.monotonic()
    children.close(grace_s=0.2)
    assert time.monotonic() - started_s < GONE_S
    assert not any(map(is_alive, [engine.pid, trainer.pid, *workers, *reapers]))
    assert not children.spool.exists()
    with pytest.raises(ChildError, match="ending its children"):
        children.start("engine", ["sleep", "1000"])


def test_many_children_leak_no_descriptors_threads_or_files(children: Children, tmp_path: Path) -> None:
    def resources() -> tuple[int, int, int]:
        return psutil.Process().num_fds(), threading.active_count(), len(list(children.spool.iterdir()))

    before = resources()
    for _ in range(200):
        child = children.start("brief", ["sleep", "1000"], log=tmp_path / "brief.log")
        assert child.stop(grace_s=60)
    # What another test has left may end meanwhile.
    assert all(now <= then for now, then in zip(resources(), before, strict=True))


def test_logging_is_quiet_when_all_goes_well(children: Children, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        children.start("engine", ["sleep", "1000"])
        children.close()
    assert caplog.messages == []


def test_error_that_comes_of_a_cleaner_of_temporary_files_says_so(children: Children) -> None:
    error = FileNotFoundError("trainer-3")
    assert children.explained(error) is error
    shutil.rmtree(children.spool)
    explained = children.explained(error)
    assert isinstance(explained, ChildError) and f"{children.spool} was removed" in str(explained)
