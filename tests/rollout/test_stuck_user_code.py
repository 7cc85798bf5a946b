"""User code that cancels itself, does not let go, or blocks the event loop: it costs its own group only."""

import asyncio
import gc
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from rollout import stuck_user_code
from rollout.environments.environment import single_turn
from rollout.origin import Sampling
from rollout.rewards.reward import Reward
from rollout.storage.retry import retry
from rollout.tasks.task_set import Task
from rollout.trajectory import Sample
from tests.rollout.collecting import EXACT, FakeClient, run, slots


@pytest.mark.parametrize("in_task", [False, True])
@pytest.mark.parametrize(
    "failure", [asyncio.CancelledError, SystemExit, KeyboardInterrupt, pytest.fail.Exception]
)
def test_environment_that_cancels_itself_or_exits_costs_its_group_only(
    failure: type[BaseException], in_task: bool
) -> None:
    async def fails() -> None:
        raise failure

    async def leaks(task: Task, policy: Any, sampling: Sampling) -> list[Sample]:
        if task["id"] == "t1" and in_task and not issubclass(failure, SystemExit | KeyboardInterrupt):
            async with asyncio.TaskGroup() as group:  # those two end the loop, and main() takes it up again
                group.create_task(fails())
                await asyncio.sleep(0.1)
                raise failure
        elif task["id"] == "t1":
            await fails()
        return await single_turn(task, policy, sampling)

    groups, error = run(FakeClient(), slots(3), environment=leaks)
    assert error is None
    assert {group.slot for group in groups if group.given_up} == {1}


def test_environment_that_swallows_its_cancellation_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(stuck_user_code, "CANCEL_S", 0.05)

    async def stubborn(task: Task, policy: Any, sampling: Sampling) -> list[Sample]:
        for _ in range(2):
            try:
                await asyncio.sleep(0.5 if task["id"] == "t0" else 0)
            except asyncio.CancelledError:
                continue
        return await single_turn(task, policy, sampling)

    run(FakeClient(), slots(2), {"over_sample": 2.0}, environment=stubborn, needed=1)
    assert "1 of the groups did not end when cancelled, so cut off" in caplog.text


@pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)  # of a coroutine that is cut off
@pytest.mark.parametrize("catches", [asyncio.CancelledError, BaseException])
def test_environment_that_never_lets_go_costs_its_group_only(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, catches: type[BaseException]
) -> None:
    monkeypatch.setattr(stuck_user_code, "CANCEL_S", 0.05)
    still_there: list[bool] = []

    async def holds_on() -> None:
        while not still_there:
            try:
                await asyncio.sleep(60)
            except catches:
                continue

    async def stubborn(task: Task, policy: Any, sampling: Sampling) -> list[Sample]:
        if task["id"] == "t1":
            async with asyncio.TaskGroup() as group:
                group.create_task(holds_on())
                await holds_on()
        return await single_turn(task, policy, sampling)

    groups, failure = run(FakeClient(), slots(3), {"group_timeout_s": 1.5}, environment=stubborn)
    still_there.append(False)
    gc.collect()
    assert failure is None
    assert {group.slot: group.given_up for group in groups} == {
        0: None,
        1: "TimeoutError: took longer than group_timeout_s = 1.5",
        2: None,
    }
    assert "cannot reuse already awaited coroutine" not in caplog.text
    assert "1 of the groups did not end when cancelled, so cut off" in caplog.text


def test_loop_that_is_late_because_the_process_was_suspended_is_not_interrupted() -> None:
    with stuck_user_code.interrupting(59.0, "group_timeout_s") as say_free:
        for _ in range(2):
            signal.raise_signal(signal.SIGALRM)  # as when the process goes on after a long stop
            say_free()
        signal.raise_signal(signal.SIGALRM)
        with pytest.raises(TimeoutError, match="longer than group_timeout_s = 59"):
            signal.raise_signal(signal.SIGALRM)


@pytest.mark.parametrize("where", ["reward", "environment"])
def test_code_that_blocks_the_event_loop_is_interrupted(where: str) -> None:
    def block(task: Task) -> None:
        if task["id"] == "t1":
            time.sleep(60)

    async def judge(task: Task, completion: str) -> float:
        block(task)
        return 1.0

    async def environment(task: Task, policy: Any, sampling: Sampling) -> list[Sample]:
        if where == "environment":
            block(task)
        return await single_turn(task, policy, sampling)

    reward = Reward("my:judge", judge) if where == "reward" else EXACT
    handler, started = signal.getsignal(signal.SIGALRM), time.monotonic()
    settings = {"group_timeout_s": 2.0, "concurrency": 1}  # one group at a time
    groups, failure = run(
        FakeClient(),
        slots(3),
        settings,
        reward=reward,
        environment=environment,
        **{"sampling": Sampling(n=1)},
    )
    assert failure is None and time.monotonic() - started < 50
    assert {group.slot for group in groups if group.given_up} == {1}
    assert signal.getsignal(signal.SIGALRM) is handler
    assert "blocked the event loop for longer than group_timeout_s = 2" in " ".join(
        str(group.given_up) for group in groups
    )


def test_line_that_blocks_the_event_loop_is_said_long_before_the_limit(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(stuck_user_code, "BLOCKED_S", 0.2)
    monkeypatch.setattr(stuck_user_code, "AGAIN_S", 0.1)

    async def blocks(task: Task, policy: Any, sampling: Sampling) -> list[Sample]:
        time.sleep(1.0)
        return await single_turn(task, policy, sampling)

    groups, _ = run(FakeClient(), slots(1), {"group_timeout_s": 60.0}, environment=blocks)
    assert not groups[0].given_up
    line = blocks.__code__.co_firstlineno + 1
    assert f"{__file__}, line {line}, has blocked the event loop of all groups for" in caplog.text


def test_call_on_the_directory_is_never_interrupted() -> None:
    def judge(task: Task, completion: str) -> float:
        retry("wait for", Path("/"), lambda: time.sleep(0.7))
        return 1.0

    groups, failure = run(FakeClient(), slots(1), {"group_timeout_s": 0.3}, reward=Reward("my:judge", judge))
    assert failure is None and "blocked the event loop" not in str(groups[0].given_up)
