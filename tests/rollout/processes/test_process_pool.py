"""Calls in processes: what hangs or dies costs its process alone, and no process outlives its owner."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from rollout.processes.killable_process import CallFailed, CallLost
from rollout.processes.pool import ProcessPool
from tests.rollout.rollout_helpers import wait_until

PATIENCE_S = 60.0


@pytest.fixture
def make_pool(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., ProcessPool]]:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
    pools: list[ProcessPool] = []

    def make(name: str, size: int = 1) -> ProcessPool:
        pools.append(ProcessPool(f"tests.rollout.processes.pool_functions:{name}", size=size))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


def test_arguments_and_values_come_through(make_pool: Callable[..., ProcessPool]) -> None:
    arguments = ["ü\n\x00\ud800", 1.5, None, [True, {"a": "x" * 1_000_000}]]
    assert make_pool("make_echo").call(*arguments, deadline_s=PATIENCE_S) == arguments


def test_processes_are_kept_and_no_more_than_needed(make_pool: Callable[..., ProcessPool]) -> None:
    pool = make_pool("make_pid", size=3)
    assert len({pool.call(deadline_s=PATIENCE_S) for _ in range(5)}) == 1


def test_as_many_calls_run_at_once_as_the_pool_has_places(make_pool: Callable[..., ProcessPool]) -> None:
    pool = make_pool("make_trouble", size=2)
    lost: list[str] = []

    def sleep() -> None:
        with pytest.raises(CallLost) as raised:
            pool.call("sleep", deadline_s=1.0)
        lost.append(str(raised.value))

    threads = [threading.Thread(target=sleep) for _ in range(4)]
    for thread in threads:
        thread.start()
    me = psutil.Process()
    most = 0
    while any(thread.is_alive() for thread in threads):
        most = max(most, sum("pool_functions" in " ".join(_command(p)) for p in me.children()))
        threads[0].join(0.02)
        threads[-1].join(0.02)
    assert lost == ["no answer within 1 s"] * 4 and most == 2


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


@pytest.mark.parametrize(
    ("act", "reason"),
    [
        ("sleep", "no answer within 1 s"),
        ("hang in C", "no answer within 1 s"),
        ("die", "it crashed its process (SIGSEGV)"),
        ("exit", "it crashed its process (exit code 7)"),
    ],
)
def test_call_that_hangs_or_kills_its_process_is_lost_and_the_pool_goes_on(
    make_pool: Callable[..., ProcessPool], act: str, reason: str
) -> None:
    pool = make_pool("make_trouble")
    before = pool.call("pid", deadline_s=PATIENCE_S)
    with pytest.raises(CallLost) as raised:
        pool.call(act, deadline_s=1.0 if "answer" in reason else PATIENCE_S)
    assert str(raised.value) == reason
    assert not psutil.pid_exists(before)
    assert pool.call("pid", deadline_s=PATIENCE_S) != before


@pytest.mark.parametrize(
    ("act", "error"),
    [
        ("raise", "KeyError: 'no such key'"),
        ("eat memory", "MemoryError: "),
        ("no JSON", "TypeError: returned <object object at"),
    ],
)
def test_function_that_raises_fails_the_call_and_keeps_its_process(
    make_pool: Callable[..., ProcessPool], act: str, error: str
) -> None:
    pool = make_pool("make_trouble")
    before = pool.call("pid", deadline_s=PATIENCE_S)
    with pytest.raises(CallFailed) as raised:
        pool.call(act, deadline_s=PATIENCE_S)
    assert str(raised.value).startswith(error)
    assert pool.call("pid", deadline_s=PATIENCE_S) == before


def test_what_a_library_prints_or_reads_disturbs_nothing(make_pool: Callable[..., ProcessPool]) -> None:
    pool = make_pool("make_trouble")
    assert pool.call("print", deadline_s=PATIENCE_S) == len("noise\n")
    assert pool.call("read", deadline_s=PATIENCE_S) == ""


def test_function_that_cannot_be_made_fails_every_call(make_pool: Callable[..., ProcessPool]) -> None:
    pool = make_pool("make_nothing")
    for _ in range(2):
        with pytest.raises(CallFailed, match="make_nothing: ImportError: no module named sympathy"):
            pool.call(deadline_s=PATIENCE_S)


def test_process_that_does_not_start_fails_the_call(make_pool: Callable[..., ProcessPool]) -> None:
    with pytest.raises(CallFailed, match=r"make_exit: a process .* did not start: .*\(exit code 3\)"):
        make_pool("make_exit").call(deadline_s=PATIENCE_S)


def test_process_killed_by_somebody_fails_the_call(make_pool: Callable[..., ProcessPool]) -> None:
    """It is not what was called that did it: a full memory, most of the time."""
    with pytest.raises(CallFailed, match="its process was killed"):
        make_pool("make_trouble").call("be killed", deadline_s=PATIENCE_S)


def test_process_killed_while_idle_costs_no_call(make_pool: Callable[..., ProcessPool]) -> None:
    pool = make_pool("make_pid")
    before = pool.call(deadline_s=PATIENCE_S)
    os.kill(before, signal.SIGKILL)
    wait_until(lambda: psutil.Process(before).status() == psutil.STATUS_ZOMBIE)
    assert pool.call(deadline_s=PATIENCE_S) != before


def test_guard_that_was_killed_is_replaced(make_pool: Callable[..., ProcessPool]) -> None:
    pool = make_pool("make_pid")
    first = pool.call(deadline_s=PATIENCE_S)
    group = os.getpgid(first)
    os.killpg(group, signal.SIGKILL)  # the guard is its leader
    wait_until(lambda: all(psutil.Process(pid).status() == "zombie" for pid in (first, group)))
    second = pool.call(deadline_s=PATIENCE_S)
    assert os.getpgid(second) not in {group, os.getpgid(0)}


def test_sets_have_the_same_order_in_every_process(make_pool: Callable[..., ProcessPool]) -> None:
    orders = [make_pool("make_set_order").call(deadline_s=PATIENCE_S) for _ in range(3)]
    assert orders[0] == orders[1] == orders[2]


def test_close_ends_processes_and_calls_at_once(make_pool: Callable[..., ProcessPool]) -> None:
    others = set(psutil.Process().children())  # of other tests in this process
    pool = make_pool("make_trouble", size=2)
    idle = pool.call("pid", deadline_s=PATIENCE_S)
    ended: list[Exception] = []

    def sleep() -> None:
        try:
            pool.call("hang in C", deadline_s=PATIENCE_S)
        except CallFailed as error:
            ended.append(error)

    threads = [threading.Thread(target=sleep) for _ in range(2)]
    for thread in threads:
        thread.start()
    children = set(psutil.Process().children()) - others
    pool.close()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert len(ended) == 2 and not psutil.pid_exists(idle)
    assert not psutil.wait_procs(children, timeout=60)[1]
    with pytest.raises(CallFailed, match="the pool is closed"):
        pool.call("pid", deadline_s=PATIENCE_S)


OWNER = """
import os, sys, threading
from rollout.processes.pool import ProcessPool
pool = ProcessPool("tests.rollout.processes.pool_functions:make_trouble", size=2)
threading.Thread(target=lambda: pool.call("hang in C", deadline_s=600), daemon=True).start()
print(pool.call("pid", deadline_s=60), flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("end", ["SIGKILL", "SIGTERM", "exit", "SIGINT"])
def test_no_process_outlives_its_owner_even_if_it_hangs_in_c(
    make_pool: Callable[..., ProcessPool], end: str
) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", OWNER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as owner:
        assert owner.stdin is not None and owner.stdout is not None
        owner.stdout.readline()
        me = psutil.Process(owner.pid)
        wait_until(lambda: _busy(me) is not None, PATIENCE_S)
        family = me.children(recursive=True)
        assert len(family) == 4  # idle and hanging, each with its guard
        if end == "exit":
            owner.stdin.close()
        else:
            owner.send_signal(getattr(signal, end))
        owner.wait(PATIENCE_S)
        wait_until(lambda: not any(map(_lives, family)), PATIENCE_S)


def _busy(owner: psutil.Process) -> psutil.Process | None:
    """The child that computes."""
    for child in owner.children():
        try:
            if child.cpu_times().user > 0.5 and child.status() == psutil.STATUS_RUNNING:
                return child
        except psutil.Error:
            continue
    return None


def _lives(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE  # where process 1 reaps nobody
    except psutil.Error:
        return False


def test_interrupt_at_the_terminal_does_not_reach_the_processes(
    make_pool: Callable[..., ProcessPool],
) -> None:
    pool = make_pool("make_pid")
    pid = pool.call(deadline_s=PATIENCE_S)
    assert os.getpgid(pid) != os.getpgid(0)
    os.kill(pid, signal.SIGINT)  # and one that is sent to it does nothing
    assert pool.call(deadline_s=PATIENCE_S) == pid


def test_wait_that_is_cancelled_kills_the_process_of_the_call(make_pool: Callable[..., ProcessPool]) -> None:
    pool = make_pool("make_trouble")
    pid = pool.call("pid", deadline_s=PATIENCE_S)

    async def main() -> None:
        assert await pool.wait("pid", deadline_s=PATIENCE_S) == pid
        waiting = asyncio.create_task(pool.wait("hang in C", deadline_s=PATIENCE_S))
        queued = asyncio.create_task(pool.wait("sleep", deadline_s=PATIENCE_S))
        await asyncio.sleep(0.3)
        for task in (queued, waiting):
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(main())
    wait_until(lambda: not psutil.pid_exists(pid))
    assert pool.call("pid", deadline_s=PATIENCE_S) != pid
