"""The collector: how much runs at once, what becomes of failures, how it stops, what it leaves behind."""

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rollout_helpers import RunningServer, serving

from rollout.collect import Slot, Stopped, collect
from rollout.engine import Completion, EngineClient, EngineError, RequestRefused, Sampling
from rollout.environment import single_turn
from rollout.rewards import Reward, resolve_reward
from rollout.tasks import Task, group_seed, load_tasks, task_order
from rollout.trajectory import Group, Sample

EXACT = resolve_reward("exact")


class FakeClient(EngineClient):
    """Answers every prompt with its own text after `delay_s`; keeps count of the samples in flight."""

    def __init__(
        self, *, delay_s: float = 0.001, fail: Callable[[str], Exception | None] = lambda _: None
    ) -> None:
        super().__init__("http://127.0.0.1:1")
        self.delay_s, self.fail = delay_s, fail
        self.in_flight = self.most_in_flight = 0
        self.cancelled = 0

    async def generate(self, prompt: Any, sampling: Sampling) -> list[Completion]:
        self.in_flight += sampling.n
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            await asyncio.sleep(self.delay_s)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.in_flight -= sampling.n
        if error := self.fail(prompt):
            raise error
        return [Completion([3], [4], [-0.5], prompt, "stop") for _ in range(sampling.n)]


def slots(count: int) -> list[Slot]:
    return [
        Slot(i, {"id": f"t{i}", "prompt": f"p{i}", "answer": f"p{i}"}, seed=100 * i) for i in range(count)
    ]


def run(client: EngineClient, work: list[Slot], **changes: Any) -> tuple[list[Group], BaseException | None]:
    """The groups handed over, and what the collection raised; the loop must be left without a task."""
    groups: list[Group] = []
    arguments: dict[str, Any] = {
        "client": client,
        "environment": single_turn,
        "reward": EXACT,
        "sampling": Sampling(n=4),
        "concurrency": 16,
        "group_timeout_s": 30.0,
        "on_group": groups.append,
        "stop": threading.Event(),
        **changes,
    }

    async def main() -> BaseException | None:
        failure: BaseException | None = None
        try:
            await collect(work, **arguments)
        except Exception as error:
            failure = error
        assert asyncio.all_tasks() == {asyncio.current_task()}
        return failure

    return groups, asyncio.run(main())


def test_every_slot_becomes_one_scored_group() -> None:
    groups, failure = run(FakeClient(), slots(50))
    assert failure is None
    assert sorted(group.slot for group in groups) == list(range(50))
    for group in groups:
        assert (group.task_id, group.prompt, group.given_up) == (f"t{group.slot}", f"p{group.slot}", None)
        assert [sample.reward for sample in group.samples] == [1.0] * 4


def test_no_slots_is_no_work() -> None:
    assert run(FakeClient(), []) == ([], None)


@pytest.mark.parametrize(
    ("n", "concurrency", "most"), [(4, 16, 16), (4, 18, 16), (1, 7, 7), (4, 3, 4), (8, 1, 8)]
)
def test_samples_in_flight_are_bounded_and_a_large_group_runs_alone(
    n: int, concurrency: int, most: int
) -> None:
    client = FakeClient()
    run(client, slots(30), sampling=Sampling(n=n), concurrency=concurrency)
    assert client.most_in_flight == most


def test_group_is_handed_over_as_soon_as_it_is_finished() -> None:
    order: list[str] = []

    class Client(FakeClient):
        async def generate(self, prompt: Any, sampling: Sampling) -> list[Completion]:
            order.append(f"asked {prompt}")
            return await super().generate(prompt, sampling)

    run(Client(), slots(2), concurrency=4, on_group=lambda group: order.append(f"got p{group.slot}"))
    assert order == ["asked p0", "got p0", "asked p1", "got p1"]


def test_group_that_takes_too_long_becomes_a_tombstone() -> None:
    async def slow(task: Task, policy: Any, sampling: Sampling) -> list[Sample]:
        await asyncio.sleep(60 if task["id"] == "t1" else 0)
        return await single_turn(task, policy, sampling)

    groups, failure = run(FakeClient(), slots(3), environment=slow, group_timeout_s=0.2)
    assert failure is None
    reasons = {group.slot: group.given_up for group in groups}
    assert reasons == {0: None, 1: "TimeoutError: took longer than group_timeout_s = 0.2", 2: None}
    assert next(group for group in groups if group.slot == 1).samples == []


def test_group_whose_reward_raises_becomes_a_tombstone_and_the_first_traceback_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def judge(task: Task, completion: str) -> float:
        if task["id"] in ("t1", "t2"):
            raise KeyError("answer")
        return 1.0

    groups, failure = run(FakeClient(), slots(4), reward=Reward("my:judge", judge, inline=False))
    assert failure is None
    given_up = {group.slot: group.given_up for group in groups if group.given_up}
    assert set(given_up) == {1, 2}
    assert "reward 'my:judge', task 't1': KeyError: 'answer'" in given_up[1]
    assert [bool(r.exc_info) for r in caplog.records if "is given up" in r.getMessage()] == [True, False]
    assert any(r.levelno == logging.WARNING and "2 of 4 groups" in r.getMessage() for r in caplog.records)


@pytest.mark.parametrize("result", [None, [], [1]])
def test_environment_that_returns_no_samples_becomes_a_tombstone(result: Any) -> None:
    async def broken(task: Task, policy: Any, sampling: Sampling) -> Any:
        return result

    groups, failure = run(FakeClient(), slots(1), environment=broken)
    assert failure is None and "non-empty list of Sample" in str(groups[0].given_up)


def test_environment_whose_arrays_do_not_match_becomes_a_tombstone() -> None:
    async def broken(task: Task, policy: Any, sampling: Sampling) -> list[Sample]:
        samples = await single_turn(task, policy, sampling)
        samples[0].logprobs = samples[0].logprobs[1:]
        return samples

    groups, failure = run(FakeClient(), slots(1), environment=broken)
    assert failure is None and "have the shapes" in str(groups[0].given_up)


def test_request_that_the_engine_refuses_costs_its_group_only() -> None:
    client = FakeClient(fail=lambda prompt: RequestRefused("too long") if prompt == "p1" else None)
    groups, failure = run(client, slots(3))
    assert failure is None
    assert {group.slot: group.given_up for group in groups} == {
        0: None,
        1: "RequestRefused: too long",
        2: None,
    }


def test_engine_failure_ends_the_collection_and_keeps_what_was_finished() -> None:
    client = FakeClient(fail=lambda prompt: EngineError("gone") if prompt == "p5" else None)
    groups, failure = run(client, slots(100), concurrency=4)
    assert isinstance(failure, EngineError) and str(failure) == "gone"
    assert [group.slot for group in groups] == [0, 1, 2, 3, 4]
    assert client.in_flight == 0


def test_engine_failure_inside_a_task_group_of_an_environment_is_one_too() -> None:
    async def parallel(task: Task, policy: Any, sampling: Sampling) -> list[Sample]:
        async with asyncio.TaskGroup() as group:
            for j in range(sampling.n):
                group.create_task(policy.for_sample(j).generate(task["prompt"]))
        return []

    _, failure = run(FakeClient(fail=lambda _: EngineError("gone")), slots(3), environment=parallel)
    assert isinstance(failure, EngineError)


def test_stop_cancels_within_a_second() -> None:
    client, stop = FakeClient(delay_s=60), threading.Event()
    timer = threading.Timer(0.2, stop.set)
    timer.start()
    started = time.monotonic()
    groups, failure = run(client, slots(100), stop=stop)
    assert isinstance(failure, Stopped) and groups == []
    assert time.monotonic() - started < 1.2
    assert client.cancelled == 4 and client.in_flight == 0
    timer.join()


def test_stop_that_is_set_already_starts_nothing() -> None:
    stop = threading.Event()
    stop.set()
    client = FakeClient()
    assert isinstance(run(client, slots(3), stop=stop)[1], Stopped)
    assert client.most_in_flight == 0


def test_error_of_the_receiver_ends_the_collection() -> None:
    def full(group: Group) -> None:
        raise OSError(28, "No space left on device")

    client = FakeClient()
    _, failure = run(client, slots(20), on_group=full)
    assert isinstance(failure, OSError) and client.in_flight == 0


def collect_from(url: str, work: list[Slot], **changes: Any) -> dict[int, Group]:
    groups: list[Group] = []

    async def main() -> None:
        async with EngineClient(url, retry_s=0.5) as client:
            await collect(
                work,
                client=client,
                environment=single_turn,
                reward=EXACT,
                group_timeout_s=60,
                on_group=groups.append,
                stop=threading.Event(),
                **changes,
            )

    asyncio.run(main())
    return {group.slot: group for group in groups}


def test_trajectories_are_the_same_whoever_asks_and_however_much_at_once(server: RunningServer) -> None:
    tasks = load_tasks("builtin:arithmetic", seed=0, split="train").tasks
    work = [
        Slot(k, tasks[t], group_seed(0, "train", 1, k))
        for k, t in enumerate(task_order(len(tasks), 0, 0, 40))
    ]
    sampling = Sampling(n=4, max_tokens=6)
    whole = collect_from(server.url, work, sampling=sampling, concurrency=256)
    halves = collect_from(server.url, work[::2], sampling=sampling, concurrency=8) | collect_from(
        server.url, work[:0:-2], sampling=sampling, concurrency=4
    )
    assert whole.keys() == halves.keys() == set(range(40))
    for k, group in whole.items():
        one, two = ([s.token_ids.tolist() for s in g.samples] for g in (group, halves[k]))
        assert one == two and group.given_up is None


def test_engine_killed_while_it_generates_ends_the_collection(model_dir: Path) -> None:
    with serving(model_dir) as running:
        timer = threading.Timer(0.3, running.process.kill)
        timer.start()
        with pytest.raises(EngineError):
            collect_from(running.url, slots(500), sampling=Sampling(n=8, max_tokens=200), concurrency=64)
        timer.join()
